"""Measures the cost of cheap arithmetic during a conversion, and chooses the file's defaults.

The KV cache gets 8 bits, or f16 if these cost too much. 4-bit values alone cost small models more
than half a percent (docs/quality.md). Activations get 8 bits; a model with weights of a GGUF file
gets 16 if 8 cost too much. Weights that this converter rounds lose more than 8-bit activations do.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.evaluate.evaluation import Evaluation, evaluate, perplexity_change, working_bytes
from qsf.file.reader import Reader
from qsf.file.writer import Writer
from qsf.kv import parse_kv_type
from qsf.model import Model
from qsf_converter.calibrate.texts import bundled_text

_KV_TYPES: Final = ("8bit", "f16")  # the measured option, and the reference
_ACT_BITS: Final = (8, 16)
_MOST_CHANGE_PERCENT: Final = 0.5  # change of perplexity, plus two standard errors
# Least share of positions at which both predict the same token. Of 20 greedy answers of 16 tokens,
# SmolLM2-135M kept 16 with a KV cache of 8 bits (97.1 %) and with activations of 8 bits (97.3 %),
# Qwen2.5-Coder-0.5B keeps 20 (98.2 %, 98.9 %).
_LEAST_KV_AGREEMENT: Final = 0.975
_LEAST_ACT_AGREEMENT: Final = 0.98
_CTX_TOKENS: Final = 512
_MOST_TOKENS: Final = 2048
_LEAST_TOKENS: Final = 1024  # with fewer tokens the standard error is too large
# Memory of the whole process: measuring a large model must not need the model's size.
_BUDGET_MB: Final = 180
_MARGIN_MB: Final = 32  # above the least memory of the model, so that fewer layers are streamed
# An evaluation takes about half a minute on two cores, with 16-bit activations a minute. The limit
# counts weights, not time: a file must not depend on the machine.
_MOST_WORK: Final = 4e12  # tokens x weights


Costs = dict[str, dict[str, Any]]  # the records of META, by name


@dataclass(frozen=True, slots=True)
class Cost:
    """The change that ``measured`` causes against the reference, over ``tokens`` scored tokens.

    ``chosen`` is the file's default: one of the two. ``agreement`` is the share (0 to 1) of
    positions at which both have the same most probable token.
    """

    chosen: str | int
    measured: str | int
    tokens: int
    change_percent: float
    change_error: float
    agreement: float

    @classmethod
    def between(
        cls,
        names: tuple[str | int, str | int],
        evaluated: tuple[Evaluation, Evaluation],
        least_agreement: float,
    ) -> Cost:
        """Compare an option with the reference; ``names`` and ``evaluated`` are in this order."""
        measured, reference = evaluated
        change, error = perplexity_change(measured.token_nll, reference.token_nll)
        agreement = float((measured.top_tokens == reference.top_tokens).mean())
        is_cheap = change + 2 * error <= _MOST_CHANGE_PERCENT and agreement >= least_agreement
        chosen = names[0] if is_cheap else names[1]
        # Logarithms of C libraries differ in the last bits; files do not.
        change, error = round(change, 9), round(error, 9)
        return cls(chosen, names[0], reference.tokens, change, error, agreement)

    def meta(self, name: str) -> dict[str, Any]:
        """Return the record for META, with ``chosen`` under a name of its own."""
        fields = dataclasses.asdict(self)
        return {name: fields.pop("chosen"), **fields, "text": "bundled"}


def n_measured_tokens(n_weights: int) -> int:
    """Return how many tokens to measure a model with; 0: the model is too large."""
    n_tokens = min(_MOST_TOKENS, int(_MOST_WORK / n_weights) // _CTX_TOKENS * _CTX_TOKENS)
    return n_tokens if n_tokens >= _LEAST_TOKENS else 0


def measure_costs(
    writer: Writer,
    n_weights: int,
    n_threads: int | None,
    progress: Callable[[int, int], None],
    *,
    is_kept: bool,
) -> Costs:
    """Measure the model of a complete file, and write its defaults into ``ARCH``.

    Args:
        writer: of a file that lacks META only.
        n_weights: weights that a token uses.
        n_threads: of the evaluation; None: one per core.
        progress: called with the work done and all work.
        is_kept: the weights are those of a GGUF file.

    Returns: the records of META, by name; none if the model is too large, or cannot be evaluated.

    Raises:
        QsfIOError, QsfFormatError: the file that was written cannot be read.
    """
    n_tokens = n_measured_tokens(n_weights)
    if n_tokens == 0:
        return {}
    candidate, reference = _KV_TYPES
    trial = _Trial(n_tokens, n_threads, progress, 3 if is_kept else 2)
    records: Costs = {}
    try:
        with writer.completed() as path:
            evaluated = trial.evaluate(path, reference)
        if is_kept:
            writer.change_arch(act_bits=_ACT_BITS[1])
            with writer.completed() as path:
                fine = trial.evaluate(path, reference)
            cost = Cost.between(_ACT_BITS, (evaluated, fine), _LEAST_ACT_AGREEMENT)
            records["activations"] = cost.meta("bits")
            writer.change_arch(act_bits=int(cost.chosen))
            evaluated = evaluated if cost.chosen == _ACT_BITS[0] else fine
        with writer.completed() as path:
            kv_found = trial.evaluate(path, candidate), evaluated
        cost = Cost.between(_KV_TYPES, kv_found, _LEAST_KV_AGREEMENT)
    except (QsfIOError, QsfFormatError):
        raise
    except QsfError:  # the tokenizer cannot encode the text, or the context is too short
        writer.change_arch(act_bits=_ACT_BITS[0])
        return {}
    records["kv_cache"] = cost.meta("type")
    key_bits, value_bits = parse_kv_type(str(cost.chosen))
    writer.change_arch(kv_key_bits=key_bits, kv_value_bits=value_bits)
    return records


@dataclass(slots=True)
class _Trial:
    """Evaluations of one model, one after the other."""

    n_tokens: int
    n_threads: int | None
    progress: Callable[[int, int], None]
    n_evaluations: int
    n_done: int = 0

    def evaluate(self, path: Path, kv_type: str) -> Evaluation:
        def advance(done: float, total: float) -> None:
            self.progress(int(self.n_done * total + done), int(self.n_evaluations * total))

        with Reader(path) as reader:
            n_vocab = reader.header.n_vocab
        reserve_mb = -(-working_bytes(n_vocab, 1, bundled_text(), self.n_tokens) >> 20)
        least = Model.plan(
            path, ram_budget=1, kv_type=_KV_TYPES[1], reserve_mb=reserve_mb
        ).min_budget_bytes
        budget_mb = max(_BUDGET_MB, (least >> 20) + _MARGIN_MB)
        with Model(
            path, ram_budget=budget_mb, kv_type=kv_type, threads=self.n_threads,
            reserve_mb=reserve_mb,
        ) as model:  # fmt: skip
            ctx_tokens = min(_CTX_TOKENS, model.info.max_tokens)
            evaluated = evaluate(
                model, bundled_text(), ctx_tokens=ctx_tokens, max_tokens=self.n_tokens,
                progress=advance,
            )  # fmt: skip
        self.n_done += 1
        return evaluated
