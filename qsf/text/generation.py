"""The state and the statistics of one generation."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from qsf.native import binding

if TYPE_CHECKING:
    from qsf.options import GenerationOptions
    from qsf.text.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one generation took.

    Attributes:
        prompt_tokens: length of the prompt.
        evaluated_tokens: those of them that the session did not hold already.
        prompt_seconds: time to evaluate them.
        generated_tokens: tokens chosen, an end token included.
        step_tokens: tokens evaluated one at a time, of the generated ones all but the last.
        step_seconds: time to evaluate and choose them.
        first_token_seconds: from the start to the first token; 0 without one.
        stop_reason: "end" (the model ended the text), "stop" (a stop string), "length"
            (``max_tokens``), "context" (the context is full), "cancelled", or "abandoned"
            (the caller stopped iterating, or an error was raised).
        seed: what makes the same text again.
        peak_bytes: the most memory that the process has had so far.
        token_ids: the generated tokens, without one that ends the text.
        n_shortened: how often the context was full and the KV policy has forgotten its middle.
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
        """Prompt tokens evaluated per second."""
        return self.evaluated_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def step_rate(self) -> float:
        """Generated tokens per second, after the first."""
        return self.step_tokens / self.step_seconds if self.step_seconds else 0.0


class Generation:
    """The state of one ``generate``."""

    def __init__(
        self, tokens: array[int], options: GenerationOptions, params: SamplingParams, seed: int
    ) -> None:
        """Begin with the tokens of the prompt; those that are chosen are added to them."""
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.answer = array("I")
        self.n_shortened = 0
        self.options = options
        self.seed = seed
        self.is_cancelled = False
        self.sampler = binding.NativeSampler(**asdict(params), seed=seed)
        self.stop_reason = "abandoned"
        self.n_reported = 0  # prompt tokens that ``progress`` was told of
        self.n_evaluated = 0
        self.n_generated = 0
        self.n_steps = 0
        self.start_seconds = 0.0
        self.prompt_seconds = 0.0
        self.step_seconds = 0.0
        self.first_token_seconds = 0.0

    def append(self, token: int) -> None:
        """Add a token that was chosen."""
        self.tokens.append(token)
        self.answer.append(token)

    def stats(self) -> GenerationStats:
        """Return what has happened so far."""
        return GenerationStats(
            prompt_tokens=self.n_prompt,
            evaluated_tokens=self.n_evaluated,
            prompt_seconds=self.prompt_seconds,
            generated_tokens=self.n_generated,
            step_tokens=self.n_steps,
            step_seconds=self.step_seconds,
            first_token_seconds=self.first_token_seconds,
            stop_reason=self.stop_reason,
            seed=self.seed,
            peak_bytes=binding.describe_machine().peak_bytes,
            token_ids=tuple(self.answer),
            n_shortened=self.n_shortened,
        )
