"""``Job``: one sequence that is to be continued, and what happens to it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from qsf.passes import Chosen
from qsf.text.sampling import SamplingParams, StopMatcher

if TYPE_CHECKING:
    from qsf.serve.http.problems import Problem
    from qsf.serve.tools.call_reader import CallPart, CallReader
    from qsf.serve.tools.request import ArgumentsConstraint
    from qsf.text.constraints import Constraint
    from qsf.text.tokenizer import IncrementalDecoder


class State(Enum):
    """Where a job is."""

    WAITING = "waiting"
    PROMPT = "prompt"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How the tokens of a job are chosen.

    Attributes:
        params: temperature and the like.
        presence_penalty, frequency_penalty: as OpenAI has them, -2 to 2.
        logit_bias: what is added to the logits of some tokens.
        n_top: how many of the most probable tokens are told with each chosen one.
        has_logprob: the log-probability of the chosen token is told.
    """

    params: SamplingParams
    seed: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_top: int = 0
    has_logprob: bool = False


@dataclass(slots=True)
class Event:
    """What has happened to a job: more text, or its end.

    Attributes:
        text: that can be shown now.
        reasoning: what was said in other channels than the final one.
        calls: parts of calls of functions, which come after the text.
        tokens: chosen since the last event, where log-probabilities are wanted.
        reason: why the job has ended: "end", "stop", "length", "calls" (functions are called); "":
            it goes on.
        problem: why it has failed; then there is no reason.
        n_done: tokens of the prompt that are done, where there is neither text nor an end.
    """

    text: str = ""
    tokens: tuple[Chosen, ...] = ()
    calls: tuple[CallPart, ...] = ()
    reason: str = ""
    problem: Problem | None = None
    n_done: int = 0
    reasoning: str = ""

    @property
    def is_last(self) -> bool:
        """The job has ended."""
        return bool(self.reason) or self.problem is not None


@dataclass(eq=False)
class Job:
    """One sequence that is to be continued.

    Attributes:
        prompt: its tokens, at least one.
        end_ids: tokens that end the text.
        owner: whose it is: jobs of one owner wait in a line of their own.
        salt: only jobs of the same salt share prefixes.
        sink: is told each event, by the thread of the engine.
        constraint: which tokens may be chosen; None: any.
        wants_scores: how probable each token of the prompt was is wanted too.
        reader: finds calls of functions in the text; None: there are none.
        max_seconds: from its arrival to its end; None: no limit.
    """

    prompt: array[int]
    choosing: Choosing
    max_tokens: int
    decoder: IncrementalDecoder
    matcher: StopMatcher
    end_ids: frozenset[int]
    sink: Callable[[Job, Event], None]
    owner: str = ""
    salt: str = ""
    name: str = ""
    max_seconds: float | None = None
    wants_progress: bool = False
    constraint: Constraint | ArgumentsConstraint | None = None
    reader: CallReader | None = None
    wants_scores: bool = False

    state: State = State.WAITING
    is_cancelled: bool = False
    tokens: array[int] = field(default_factory=lambda: array("I"))
    turn: int = 0  # the how many-th that was admitted, from 1
    is_begun: bool = False  # its prompt was evaluated in part
    n_held: int = 0  # of tokens, that the engine has evaluated
    n_cached: int = 0  # of the prompt, that it had before
    n_generated: int = 0
    n_forced: int = 0  # of these, that nothing else could have been
    generator: Any = None  # what the engine keeps between two choices
    scores: list[Chosen] = field(default_factory=list)  # of the prompt's tokens but the first
    unsent: list[Chosen] = field(default_factory=list)
    arrived: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.tokens = array("I", self.prompt)

    @property
    def n_prompt(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt)

    @property
    def is_scoring(self) -> bool:
        """How probable the tokens of its prompt are is wanted, and not known yet."""
        return self.wants_scores and not self.first

    def take(self, chosen: Chosen) -> Event | None:
        """Add a chosen token; return what can be told now."""
        self.n_generated += 1
        if self.choosing.has_logprob:
            self.unsent.append(chosen)
        if chosen.token in self.end_ids:
            if self.unsent:
                self.unsent.pop()  # it has no text
            return self._ended("end")
        self.tokens.append(chosen.token)
        text = self.matcher.push(self.decoder.push(chosen.token))
        calls: tuple[CallPart, ...] = ()
        is_full = False
        if self.reader is not None:
            text, calls = self.reader.push(text)
            is_full = self.reader.is_full
        if self.matcher.is_stopped or is_full:
            return self._ended("end", text, calls)
        if self.constraint is not None and self.constraint.take(chosen.token):
            return self._ended("end", text, calls)
        if self.n_generated >= self.max_tokens:
            return self._ended("length", text, calls)
        reasoning = self.decoder.take_reasoning()
        if not text and not reasoning and not calls:
            return None
        return Event(text, self._take_unsent(), calls, reasoning=reasoning)

    def take_forced(self) -> list[Event]:
        """Add the tokens that must come next, as far as they are known; return what can be told.

        They are evaluated together in one pass. Where log-probabilities are wanted they come one
        by one, because logits of their own are needed.
        """
        events: list[Event] = []
        while self.constraint is not None and not self.choosing.has_logprob:
            token = self.constraint.forced()
            if token is None:
                break
            self.n_forced += 1
            event = self.take(Chosen(token))
            if event is not None:
                events.append(event)
                if event.is_last:
                    break
        return events

    def _ended(self, reason: str, text: str = "", calls: tuple[CallPart, ...] = ()) -> Event:
        rest = ""
        if not self.matcher.is_stopped:
            rest = self.matcher.push(self.decoder.flush()) + self.matcher.flush()
        if self.matcher.is_stopped:
            reason = "stop"
        if self.reader is not None:
            for more in (self.reader.push(rest), self.reader.finish()):
                text, calls = text + more[0], calls + more[1]
            rest = ""
            if self.reader.n_calls and reason != "length":
                reason = "calls"
        reasoning = self.decoder.take_reasoning()
        return Event(text + rest, self._take_unsent(), calls, reason, reasoning=reasoning)

    def _take_unsent(self) -> tuple[Chosen, ...]:
        tokens = tuple(self.unsent)
        self.unsent.clear()
        return tokens
