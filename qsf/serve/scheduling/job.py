"""``Job``: one sequence to continue, its events, and the slot that holds it."""
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
    WAITING = "waiting"
    PROMPT = "prompt"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How the tokens of a job are chosen.

    Attributes:
        params: temperature and the like.
        presence_penalty, frequency_penalty: as in OpenAI's API, -2 to 2.
        logit_bias: added to the logits of some tokens.
        n_top: report so many of the most probable tokens with each chosen one.
        has_logprob: report the log-probability of the chosen token.
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
    """Progress of a job: more text, or its end.

    Attributes:
        text: new text of the answer.
        reasoning: new text of thoughts.
        calls: parts of calls of functions, which come after the text.
        tokens: tokens chosen since the last event, if log-probabilities are requested.
        reason: why the job has ended: "end", "stop", "length", "calls" (functions are called); "":
            it continues.
        problem: the error of a failed job, which has no reason.
        n_done: number of evaluated prompt tokens, in events without text or end.
        values: results of a job without generated text; see ``Reading``.
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
        return bool(self.reason) or self.problem is not None

    @property
    def has_more(self) -> bool:
        return bool(self.text or self.reasoning or self.tokens or self.calls or self.n_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a job computes that generates no text.

    Attributes:
        pooling: as in ``TextVectors``; "": none.
        dim: size of a hidden state.
        is_whole: all tokens must be in one pass, as an encoder needs them.
        labels: tokens whose log-probabilities after the prompt are computed instead.
    """

    pooling: str = ""
    dim: int = 0
    is_whole: bool = False
    labels: Sequence[int] = ()


@dataclass(eq=False, kw_only=True)
class Job(Answer):
    """One sequence that is to be continued.

    Attributes:
        owner: the client; each owner's jobs wait in a queue of their own.
        salt: jobs share prefixes only with jobs of the same salt, which tells their adapters too.
        adapters: the scale of each adapter of the model; None: those that it was opened with.
        sink: receives each event, in the engine's thread.
        index: of its choice in the answer.
        wants_scores: compute the probabilities of the prompt's tokens too.
        reader: finds calls of functions in the text; None: there are none.
        max_seconds: from arrival to end; None: no limit.
        reading: the result of a job that generates no text.
    """

    choosing: Choosing
    sink: Callable[[Job, Event], None]
    index: int = 0
    owner: str = ""
    salt: str = ""
    adapters: tuple[float, ...] | None = None
    name: str = ""
    max_seconds: float | None = None
    wants_progress: bool = False
    reader: CallReader | None = None
    wants_scores: bool = False
    reading: Reading | None = None

    state: State = State.WAITING
    slot: int = -1  # the slot that it got last
    is_cancelled: bool = False
    turn: int = 0  # its number in the order of admission, from 1
    is_begun: bool = False  # a part of its prompt was evaluated
    n_held: int = 0  # how many of its tokens the engine has evaluated
    n_cached: int = 0  # prompt tokens that a slot or file already had
    n_again: int = 0  # tokens evaluated again, because recurrent states cannot be cut
    generator: Any = None  # the engine's random generator between two choices
    scores: list[Chosen] = field(default_factory=list)  # of the prompt's tokens from the second on
    # Sum of the hidden states so far
    hidden: array[float] = field(default_factory=lambda: array("d"))
    unsent: list[Chosen] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)  # also not sent yet
    arrived: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        """Start the answer to the prompt; log-probabilities need a choice for each token."""
        super().__post_init__()
        self.takes_forced = not self.choosing.has_logprob

    @property
    def is_scoring(self) -> bool:
        """The probabilities of its prompt's tokens are requested and not complete."""
        return self.wants_scores and not self.first

    @property
    def reads_all(self) -> bool:
        """Each prompt token must be evaluated, even those that another sequence holds."""
        how = self.reading
        return self.is_scoring or (how is not None and (how.is_whole or how.pooling == "mean"))

    def begin_again(self) -> None:
        """Drop the results of the evaluated part of the prompt."""
        self.n_held = 0
        self.hidden = array("d")
        if self.is_scoring:
            self.scores.clear()

    def want_hidden(self, item: PassItem, *, is_last: bool) -> None:
        """Request the job's hidden states from a pass over its tokens."""
        how = self.reading
        if how is None or not how.pooling:
            return
        self.hidden = self.hidden or array("d", bytes(8 * how.dim))
        item.wants, item.hidden = "none", self.hidden
        item.n_hidden = len(item.tokens) if how.pooling == "mean" else int(is_last)

    def finish_reading(self, values: Sequence[float], now: float) -> Event:
        self.first = self.last = now
        how = self.reading
        n_read = self.n_prompt if how is not None and how.pooling == "mean" else 1
        reason = "end" if how is not None else "length"  # a prompt alone
        self.end(reason)
        return Event(reason=reason, values=values or array("d", [x / n_read for x in self.hidden]))

    @property
    def is_full(self) -> bool:
        return self.reader is not None and self.reader.is_full

    def advance(self, chosen: Chosen) -> Event | None:
        """Add a chosen token; return the event that can be sent now."""
        if self.choosing.has_logprob and chosen.token not in self.end_ids:
            self.unsent.append(chosen)
        return self._event(self.take(chosen.token))

    def advance_forced(self) -> Event | None:
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


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence in the engine: of a job, or kept after one.

    Attributes:
        n_held: number of tokens in the engine's session.
        adapters: as of the job whose tokens these are.
        leader: a slot that evaluates the first tokens of this slot's job, with its job and their
            number; until then this job waits. None: no such slot.
        is_pinned: holds the shared prefix, and never anything else.
    """

    index: int
    job: Job | None = None
    n_held: int = 0
    salt: str = ""
    adapters: tuple[float, ...] | None = None
    used: float = 0.0
    leader: tuple[Slot, Job, int] | None = None
    is_pinned: bool = False

    def is_waiting(self) -> bool:
        """Return whether another slot is still evaluating the first tokens of this slot's job."""
        if self.leader is None:
            return False
        slot, job, n_tokens = self.leader
        return slot.job is job and job.state is State.PROMPT and slot.n_held < n_tokens
