"""``Job``: one sequence to continue, and its events."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from qsf.passes import Chosen
from qsf.text.generation import Answer
from qsf.text.sampling import SamplingParams

if TYPE_CHECKING:
    from qsf.passes import PassItem
    from qsf.serve.http.problems import Problem
    from qsf.serve.tools.call_reader import CallPart, CallReader


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
        values: of a job that was only read: see ``Reading``.
    """

    text: str = ""
    tokens: tuple[Chosen, ...] = ()
    calls: tuple[CallPart, ...] = ()
    reason: str = ""
    problem: Problem | None = None
    n_done: int = 0
    reasoning: str = ""
    values: Sequence[float] = ()

    @property
    def is_last(self) -> bool:
        """The job has ended."""
        return bool(self.reason) or self.problem is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is wanted of a prompt that is read and not continued.

    Attributes:
        pooling: the hidden state of the "last" token, or the "mean" of all; "": none.
        dim: of a hidden state.
        labels: tokens whose log-probabilities after the prompt are wanted instead.
    """

    pooling: str = ""
    dim: int = 0
    labels: Sequence[int] = ()


@dataclass(eq=False, kw_only=True)
class Job(Answer):
    """One sequence that is to be continued.

    Attributes:
        owner: whose it is: jobs of one owner wait in a line of their own.
        salt: only jobs of the same salt share prefixes.
        sink: is told each event, by the thread of the engine.
        wants_scores: the probabilities of the prompt's tokens are wanted too.
        reader: finds calls of functions in the text; None: there are none.
        max_seconds: from its arrival to its end; None: no limit.
        reading: the prompt is not continued, and this is wanted of it.
    """

    choosing: Choosing
    sink: Callable[[Job, Event], None]
    owner: str = ""
    salt: str = ""
    name: str = ""
    max_seconds: float | None = None
    wants_progress: bool = False
    reader: CallReader | None = None
    wants_scores: bool = False
    reading: Reading | None = None

    state: State = State.WAITING
    is_cancelled: bool = False
    turn: int = 0  # the how many-th that was admitted, from 1
    is_begun: bool = False  # its prompt was evaluated in part
    n_held: int = 0  # of tokens, that the engine has evaluated
    n_cached: int = 0  # of the prompt, that it had before
    n_again: int = 0  # tokens that it evaluated again, because states cannot be cut
    generator: Any = None  # what the engine keeps between two choices
    scores: list[Chosen] = field(default_factory=list)  # of the prompt's tokens but the first
    hidden: array[float] = field(default_factory=lambda: array("d"))  # the sum of those read
    unsent: list[Chosen] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)  # unsent too
    arrived: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        """Begin with the prompt; log-probabilities need a choice for each token."""
        super().__post_init__()
        self.takes_forced = not self.choosing.has_logprob

    @property
    def is_scoring(self) -> bool:
        """How probable the tokens of its prompt are is wanted, and not known yet."""
        return self.wants_scores and not self.first

    @property
    def reads_all(self) -> bool:
        """Each of its tokens must be evaluated, also those that another sequence holds."""
        return self.is_scoring or (self.reading is not None and self.reading.pooling == "mean")

    def begin_again(self) -> None:
        """Forget what the evaluated part of the prompt has given."""
        self.n_held = 0
        self.hidden = array("d")
        if self.is_scoring:
            self.scores.clear()

    def want_hidden(self, item: PassItem, *, is_last: bool) -> None:
        """Let a pass add what is wanted of its tokens."""
        how = self.reading
        if how is None or not how.pooling:
            return
        self.hidden = self.hidden or array("d", bytes(8 * how.dim))
        item.wants, item.hidden = "none", self.hidden
        item.n_hidden = len(item.tokens) if how.pooling == "mean" else int(is_last)

    def finish_reading(self, values: Sequence[float], now: float) -> Event:
        """End a job that was only read; ``values`` are those of its labels."""
        self.first = self.last = now
        n_read = self.n_prompt if self.reads_all else 1
        self.end("end")
        return Event(reason="end", values=values or array("d", [x / n_read for x in self.hidden]))

    @property
    def is_full(self) -> bool:
        """The answer has all calls of functions that it may have."""
        return self.reader is not None and self.reader.is_full

    def advance(self, chosen: Chosen) -> Event | None:
        """Add a chosen token; return what can be told now."""
        if self.choosing.has_logprob and chosen.token not in self.end_ids:
            self.unsent.append(chosen)
        return self._event(self.take(chosen.token))

    def advance_forced(self) -> Event | None:
        """Add the tokens that must come next; return what can be told now."""
        return self._event(self.take_forced())

    def read(self, text: str) -> str:
        """Return new text without calls of functions."""
        if self.reader is None:
            return text
        text, calls = self.reader.push(text)
        self.calls += calls
        return text

    def end(self, reason: str) -> str:
        """End the answer; return the rest of its text."""
        text = super().end(reason)
        if self.reader is not None:
            rest, calls = self.reader.finish()
            text += rest
            self.calls += calls
            if self.reader.n_calls and self.reason != "length":
                self.reason = "calls"
        return text

    def _event(self, text: str) -> Event | None:
        reasoning = self.decoder.take_reasoning()
        if not (text or reasoning or self.calls or self.reason):
            return None
        event = Event(text, tuple(self.unsent), tuple(self.calls), self.reason, reasoning=reasoning)
        self.unsent.clear()
        self.calls.clear()
        return event
