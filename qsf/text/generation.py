"""One answer: its tokens, the text that they become, why it ends, and its statistics."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from qsf.errors import QsfArgumentError
from qsf.kv import parse_kv_policy
from qsf.native import binding
from qsf.options import MAX_U32
from qsf.text.channels import answer_decoder
from qsf.text.sampling import StopMatcher, end_texts, resolve_sampling, sampling_fields
from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from qsf.options import GenerationOptions
    from qsf.text.parts import OpenedModel


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One chosen token, for ``on_token``.

    Log-probabilities are natural logarithms of the model's own distribution, before penalties,
    temperature and limits of sampling.

    Attributes:
        id: of the token.
        logprob: its log-probability.
        top: (id, log-probability) of the ``top_logprobs`` most probable tokens, best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@runtime_checkable
class TokenConstraint(Protocol):
    """A constraint on the next token of an answer, such as ``Constraint`` of `constraints.py`."""

    def forced(self) -> int | None:
        """Return the forced token; None: there is a choice. Raises QsfError."""

    def mask(self) -> bytes | None:
        """Return the mask of allowed tokens, a bit each; None: all. Raises QsfError."""

    def take(self, token: int) -> bool:
        """Record the chosen token; return True at the end of the form. Raises QsfError."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Statistics of one generation.

    Attributes:
        prompt_tokens: length of the prompt.
        evaluated_tokens: prompt tokens that the session did not hold.
        prompt_seconds: time to evaluate these.
        generated_tokens: tokens chosen, an end token included.
        step_tokens: generated tokens evaluated one at a time: all but the last.
        step_seconds: time to evaluate and choose these.
        first_token_seconds: from the start to the first token; 0 without one.
        stop_reason: "end" (the model ended the text), "stop" (a stop string), "length"
            (``max_tokens``), "context" (the context is full), "cancelled", or "abandoned" (the
            caller stopped iterating, or an error was raised).
        seed: reproduces the text.
        peak_bytes: the process's peak memory so far.
        token_ids: the generated tokens, without one that ends the text.
        n_shortened: how often the KV policy has forgotten the middle of a full context.
    """

    prompt_tokens: int
    evaluated_tokens: int
    prompt_seconds: float
    generated_tokens: int
    step_tokens: int
    step_seconds: float
    first_token_seconds: float
    stop_reason: str
    seed: int
    peak_bytes: int
    token_ids: tuple[int, ...] = field(repr=False)
    n_shortened: int = 0

    @property
    def prompt_rate(self) -> float:
        return self.evaluated_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def step_rate(self) -> float:
        """Generated tokens per second, after the first."""
        return self.step_tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(eq=False, kw_only=True)
class Answer:
    """A prompt and the answer to it, token by token.

    Attributes:
        prompt: its tokens, at least one.
        end_ids: tokens that end the text.
        constraint: which tokens may be chosen; None: any.
        ctx_tokens: the longest sequence that can be evaluated.
        takes_forced: forced tokens are appended without being chosen.
        tokens: of the prompt, then of the answer.
        n_generated: tokens of the answer, an end token included.
        n_forced: forced tokens of the answer.
        n_thought: tokens of thoughts, with the marks around them.
        reason: why the answer has ended, as ``GenerationStats.stop_reason``; "": not ended.
    """

    prompt: array[int]
    max_tokens: int
    decoder: IncrementalDecoder
    matcher: StopMatcher
    end_ids: frozenset[int]
    constraint: TokenConstraint | None = None
    ctx_tokens: int = MAX_U32
    takes_forced: bool = True
    tokens: array[int] = field(default_factory=lambda: array("I"))
    n_generated: int = 0
    n_forced: int = 0
    n_thought: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        self.tokens = array("I", self.prompt)

    @property
    def n_prompt(self) -> int:
        return len(self.prompt)

    @property
    def is_full(self) -> bool:
        return False

    def take(self, token: int) -> str:
        """Add a token; return the text that can be shown now, and set ``reason`` at the end."""
        self.n_generated += 1
        if token in self.end_ids:
            return self.end("end")
        self.tokens.append(token)
        was_thinking = self.decoder.is_thinking
        text = self.read(self.matcher.push(self.decoder.push(token)))
        self.n_thought += was_thinking or self.decoder.is_thinking
        is_over = self.matcher.is_stopped or self.is_full
        if is_over or (self.constraint is not None and self.constraint.take(token)):
            return text + self.end("end")
        if self.n_generated >= self.max_tokens:
            return text + self.end("length")
        if len(self.tokens) > self.ctx_tokens:
            return text + self.end("context")
        return text

    def take_forced(self) -> str:
        """Add forced tokens; return the text that can be shown now.

        They are evaluated together in one pass.
        """
        text = ""
        while not self.reason and self.takes_forced and self.constraint is not None:
            token = self.constraint.forced()
            if token is None:
                break
            self.n_forced += 1
            text += self.take(token)
        return text

    def end(self, reason: str) -> str:
        rest = ""
        if not self.matcher.is_stopped:
            rest = self.matcher.push(self.decoder.flush()) + self.matcher.flush()
        if self.matcher.is_stopped:
            reason = "end" if self.matcher.stopped_by is None else "stop"
        self.reason = reason
        return self.read(rest)

    def read(self, text: str) -> str:
        """Return the part of new text that can be shown."""
        return text


def answer_values(
    opened: OpenedModel, options: GenerationOptions, tokens: array[int], *, has_text: bool = True
) -> dict[str, Any]:
    """Return the arguments of an ``Answer`` to a prompt of these tokens; without ``has_text``, of
    one that generates no text, which needs no tokenizer.
    """
    constraint = options.constraint
    decoder = IncrementalDecoder()
    if has_text:
        # A constraint covers the whole answer, which then has no thoughts.
        prompt = tokens if constraint is None else ()
        decoder = answer_decoder(opened.tokenizer, begins_text=options.begins_text, prompt=prompt)
    return {
        "prompt": tokens,
        "max_tokens": options.max_tokens,
        "decoder": decoder,
        "matcher": StopMatcher(
            [options.stop] if isinstance(options.stop, str) else options.stop,
            end_texts(opened.generation),
        ),
        "end_ids": opened.end_ids,
        "constraint": None if constraint is None else _made(constraint),
        "ctx_tokens": opened.info.plan.ctx_tokens,
        "takes_forced": options.on_token is None,
    }


def _made(constraint: Callable[[], TokenConstraint]) -> TokenConstraint:
    made = constraint()
    if not isinstance(made, TokenConstraint):
        raise QsfArgumentError(
            f"constraint must return a TokenConstraint, not {type(made).__name__}",
            argument="constraint",
        )
    return made


def seed_of(options: GenerationOptions) -> int:
    return int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed


class Generation(Answer):
    """An answer of ``Session.generate``, and its times and counts so far."""

    def __init__(self, opened: OpenedModel, options: GenerationOptions, tokens: array[int]) -> None:
        """Start from a prompt. Raises QsfArgumentError, QsfFormatError."""
        super().__init__(**answer_values(opened, options, tokens))
        params = resolve_sampling(opened.generation, **sampling_fields(options))
        self.options = options
        self.seed = seed_of(options)
        self.sampler = binding.NativeSampler(**asdict(params), seed=self.seed)
        self._policy = parse_kv_policy(opened.info.plan.kv_policy)
        self._plan_tokens = self.ctx_tokens
        if self._policy is not None:
            self.ctx_tokens = MAX_U32
        # The tokens of the answer, also those that a KV policy has forgotten
        self.answer = array("I")
        self.n_shortened = 0
        self.is_cancelled = False
        self.n_reported = 0  # prompt tokens reported to ``progress``
        self.n_evaluated = 0
        self.n_chosen = 0
        self.start_seconds = 0.0
        self.prompt_seconds = 0.0
        self.step_seconds = 0.0
        self.first_token_seconds = 0.0

    def take(self, token: int) -> str:
        if token not in self.end_ids:
            self.answer.append(token)
        return super().take(token)

    def shorten(self) -> None:
        """Forget the middle of a text that fills the context, by the KV policy."""
        if self._policy is not None and len(self.tokens) > self._plan_tokens:
            self.tokens = self._policy.shortened(self.tokens, self._plan_tokens)
            self.n_shortened += 1

    def stats(self) -> GenerationStats:
        return GenerationStats(
            prompt_tokens=self.n_prompt,
            evaluated_tokens=self.n_evaluated,
            prompt_seconds=self.prompt_seconds,
            generated_tokens=self.n_generated,
            step_tokens=max(self.n_chosen - 1, 0),
            step_seconds=self.step_seconds,
            first_token_seconds=self.first_token_seconds,
            stop_reason=self.reason or "abandoned",
            seed=self.seed,
            peak_bytes=binding.describe_machine().peak_bytes,
            token_ids=tuple(self.answer),
            n_shortened=self.n_shortened,
        )
