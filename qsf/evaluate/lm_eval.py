"""A .qsf file as a model of lm-evaluation-harness, so that its standard tasks run.

    pip install "qsf[eval]"
    python -m qsf.evaluate.lm_eval --model_args path=model.qsf --tasks arc_easy

The harness (Gao et al., github.com/EleutherAI/lm-evaluation-harness) is imported by ``register``
and ``main`` only; its model is called ``qsf``. Other programs call ``register()`` first, then
``lm_eval.simple_evaluate(model="qsf", model_args="path=model.qsf", tasks=[...])``.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from qsf.errors import QsfArgumentError, QsfError
from qsf.evaluate.evaluation import ModelLogits, block_rows, judged_kv_type, log_probabilities
from qsf.evaluate.windows import Window
from qsf.model import Model
from qsf.options import ModelOptions, described
from qsf.shell import command

NAME: Final = "qsf"
_DEFAULT_NEW_TOKENS: Final = 256  # as the harness's own models


class HarnessModel:
    """What the harness asks of a model, without the harness; ``register`` joins them.

    Args:
        path: the .qsf file.
        max_length: context in tokens; None: the model's, at most 4096.
        add_bos_token: begin every text with BOS; None: as the file's tokenizer does. The harness's
            own HuggingFace models do so only when they are asked to.
        batch_size: the harness's; texts are evaluated one after another, so 1 or "auto".
        max_batch_size: not used: there are no batches.
        device: not used: the harness names one ("cuda:0") when nobody has asked for it.
        options: those of ``qsf.ModelOptions`` for it: ram_budget ("auto" unless given), threads,
            kv_type (f16 unless given, f32 with ``exact``) and exact.

    Raises:
        QsfArgumentError: something was asked for that cannot be had.
    """

    def __init__(
        self,
        path: str = "",
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Open the file; see the class."""
        super().__init__()
        del max_batch_size, device
        if not path:
            raise QsfArgumentError("which model? Say --model_args path=model.qsf")
        if str(batch_size) not in ("None", "1", "auto"):
            raise QsfArgumentError(f"a batch size of {batch_size} cannot be had: only 1")
        self.model = Model(path, **_model_options(max_length, options).arguments())
        self._path = path
        self._has_bos = add_bos_token
        info = self.model.info
        self._first_id = info.bos_id if info.bos_id is not None else info.eos_id

    @property
    def max_length(self) -> int:
        """The context in tokens."""
        return self.model.info.plan.ctx_tokens

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps its cache of requests under."""
        return self._path.replace("/", "__")

    def tok_encode(self, text: str) -> list[int]:
        """Return the tokens of a text, BOS as ``add_bos_token`` says."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(text, add_prefix=self._has_bos is not False)
        if self._has_bos and ids[:1] != [self._first_id] and self._first_id is not None:
            return [self._first_id, *ids]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as the file's chat template puts it."""
        return self.model.chat_template.render(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def loglikelihood(self, requests: Sequence[Any], **_options: Any) -> list[tuple[float, bool]]:
        """Return, of requests (context, continuation), log p(continuation) and if it is greedy."""
        results = []
        for request in requests:
            context, continuation = request.args
            result = self._continuation(*self._encode_pair(context, continuation))
            self._remember("loglikelihood", request.args, result)
            results.append(result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], **_options: Any) -> list[float]:
        """Return the log-likelihood of each whole text, every token once, as much before it."""
        results = []
        for request in requests:
            (text,) = request.args
            ids = self.model.tokenizer.encode(text, add_prefix=False)
            tokens = [*self._first(), *ids]
            windows = rolling_windows(tokens, self.max_length)
            result = float(sum(self._score(window)[0] for window in windows))
            self._remember("loglikelihood_rolling", request.args, result)
            results.append(result)
        return results

    def generate_until(self, requests: Sequence[Any], **_options: Any) -> list[str]:
        """Return what continues each (context, options), up to a stop string; greedy by default."""
        results = []
        for request in requests:
            context, options = request.args
            result = self._generate(context, dict(options))
            self._remember("generate_until", request.args, result)
            results.append(result)
        return results

    # ---- parts ----

    def _remember(self, kind: str, args: Any, result: Any) -> None:
        hook = getattr(self, "cache_hook", None)  # of the harness
        if hook is not None:
            hook.add_partial(kind, args, result)

    def _first(self) -> list[int]:
        """What stands before a text with nothing before it."""
        if self._first_id is None:
            raise QsfArgumentError("the model has neither BOS nor EOS to begin a text with")
        return [self._first_id]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split the tokens of both together where the context's end.

        Blanks at the context's end go to the continuation: vocabularies have them before words.
        """
        if not context:
            ids = self.model.tokenizer.encode(continuation, add_prefix=False)
            return self._first(), ids
        n_blanks = len(context) - len(context.rstrip())
        if n_blanks:
            continuation = context[-n_blanks:] + continuation
            context = context[:-n_blanks]
        whole, first = self.tok_encode(context + continuation), self.tok_encode(context)
        return (first, whole[len(first) :]) if first else (self._first(), whole)

    def _continuation(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        if not continuation:
            return 0.0, True
        if len(continuation) > self.max_length:
            raise QsfArgumentError(
                f"a continuation has {len(continuation)} tokens, but the context holds "
                f"{self.max_length}: max_length asks for more"
            )
        # The last token is only predicted, so one more fits than the context holds.
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        first_row = len(tokens) - len(continuation) - 1
        return self._score(Window(np.asarray(tokens, np.int64), first_row))

    def _score(self, window: Window) -> tuple[float, bool]:
        """Return the log-likelihood of the scored tokens, and if each was the likeliest."""
        max_rows = block_rows(self.model.info.n_vocab)
        blocks = ModelLogits(self.model).logits([window], max_rows, lambda _: None)
        total, is_greedy, first = 0.0, True, 0
        for rows in blocks:
            targets = window.scored[first : first + len(rows)]
            first += len(rows)
            for row, target in zip(rows, targets, strict=True):  # one at a time: bounded memory
                total += float(log_probabilities(row[None])[0, target])
                is_greedy &= int(row.argmax()) == int(target)
        return total, is_greedy

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        stop = options.pop("until", None) or []
        stop = [stop] if isinstance(stop, str) else [text for text in stop if text]
        n_new = int(options.pop("max_gen_toks", _DEFAULT_NEW_TOKENS))
        is_sampled = bool(options.pop("do_sample", options.get("temperature", 0) > 0))
        temperature = float(options.pop("temperature", 1.0 if is_sampled else 0.0))
        known = {name: options.pop(name) for name in ("top_p", "top_k", "min_p") if name in options}
        if options:
            raise QsfArgumentError(f"the option {next(iter(options))} of generating is unknown")
        n_room = self.max_length - n_new
        if n_room < 1:
            raise QsfArgumentError(
                f"{n_new} new tokens leave no room in a context of {self.max_length}"
            )
        tokens = (self.tok_encode(context) or self._first())[-n_room:]
        pieces = self.model.generate(
            tokens,
            max_tokens=n_new,
            temperature=temperature if is_sampled else 0.0,
            repetition_penalty=1.0,
            seed=0,
            stop=stop,
            **known,
        )
        return "".join(pieces)


def _model_options(max_length: int | None, given: dict[str, Any]) -> ModelOptions:
    """Return how to open the file; ``given`` are arguments of the harness, by name."""
    known = {option.name for option in described(ModelOptions, "harness")}
    unknown = sorted(set(given) - known)
    if unknown:
        raise QsfArgumentError(
            f"there is no argument {unknown[0]}: known are {', '.join(sorted(known))}",
            argument=unknown[0],
        )
    budget = given.get("ram_budget", "auto") or None  # 0 is none, as for the commands
    options = ModelOptions(
        **{**given, "ram_budget": budget, "max_seq_len": max_length, "draft": "off"}
    )
    kv_type = judged_kv_type(options.kv_type, is_exact=options.exact)
    return replace(options, kv_type=kv_type)


def rolling_windows(tokens: Sequence[int], ctx_tokens: int) -> Iterator[Window]:
    """Yield windows that score every token but the first once; the last is filled up in front."""
    ids = np.asarray(tokens, np.int64)
    for target in range(1, len(ids), ctx_tokens):
        end = min(target + ctx_tokens, len(ids))
        start = max(0, end - ctx_tokens - 1)
        yield Window(ids[start:end], target - 1 - start)


def register() -> Any:
    """Make the model ``qsf`` known to the harness; return its class.

    Raises:
        QsfError: the harness is not installed.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise QsfError(
            f"lm-evaluation-harness cannot be imported ({error}): pip install 'qsf[eval]'"
        ) from error
    return register_model(NAME)(type("QsfLM", (HarnessModel, LM), {}))


def main() -> int:
    """Run the harness's own command line with the model ``qsf`` unless another is named."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        if not any(word.split("=")[0] in ("--model", "-m") for word in sys.argv[1:]):
            sys.argv[1:1] = ["--model", NAME]
        cli_evaluate()
    except QsfError as error:
        command.say_error("qsf.evaluate.lm_eval", str(error))
        return command.EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
