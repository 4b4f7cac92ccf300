"""The slots of the engine: what they hold is kept, shared with who begins alike, and given up.

Whose beginning another job is just evaluating waits until that one holds it, and takes it from
there: equal prompts that come together are evaluated once. Beginnings are found by comparing the
tokens of the few sequences that there are; docs/server.md has what that takes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qsf.errors import QsfError
from qsf.serve.job import Chosen, Job, State
from qsf.text.arguments import count_common

# Fewer tokens are evaluated rather than waited for: a block of the KV pool.
_LEAST_TOKENS = 32


@dataclass(slots=True)
class PassItem:
    """Tokens of one slot in a pass, after those that the slot holds."""

    slot: int
    tokens: array[int]
    wants_logits: bool
    wants_scores: bool = False  # logits of all its tokens; of one item in a pass
    is_ahead: bool = False  # evaluated already, as all of this pass


class Engine(Protocol):
    """What evaluates: slots, each with a sequence of tokens and its KV cache."""

    n_slots: int
    n_running: int  # slots that may have a job: so many contexts have room beside each other
    ctx_tokens: int
    chunk_tokens: int  # the most of one pass
    logits_rows: int  # tokens with logits in one pass, where more than one item wants some
    score_rows: int  # the most tokens of an item that wants scores
    n_drafts: int  # guesses in the latest pass, beside its items

    def evaluate(self, items: Sequence[PassItem]) -> list[QsfError | None]:
        """Evaluate all items in one pass; return what went wrong with each.

        Raises QsfError where the pass has failed: then no slot has changed, or ``n_held`` says so;
        QsfMemoryError where slots hold too much together.
        """

    def is_ahead(self, slot: int, token: int) -> bool:
        """Return whether the latest pass evaluated this token too, as the slot's next one."""

    def choose(self, jobs: Sequence[tuple[int, Job]]) -> list[Chosen | QsfError]:
        """Choose the next token for each of (slot, job), from the logits of the last pass."""

    def scores(self, slot: int, tokens: Sequence[int], n_top: int) -> list[Chosen]:
        """Return how probable each of ``tokens`` was, by the rows of the last pass."""

    def n_held(self, slot: int) -> int:
        """Return how many tokens the slot holds."""

    def keep(self, slot: int, n_tokens: int) -> int:
        """Forget all but the first tokens of the slot; return how many it holds then."""

    def copy(self, slot: int, source: int, n_tokens: int) -> None:
        """Make the slot hold the first tokens that another holds. Raises QsfError: it cannot."""

    def cancel(self, slot: int) -> None:
        """End what is evaluated for the slot; from any thread."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence in the engine: of a job, or left over from one.

    Attributes:
        leader: the slot, with its job, that evaluates the first tokens of this slot's job, and how
            many; until then the job waits. None: it does not.
        is_pinned: it holds what all may share, and never anything else.
    """

    index: int
    job: Job | None = None
    held: array[int] = field(default_factory=lambda: array("I"))
    salt: str = ""
    used: float = 0.0
    leader: tuple[Slot, Job, int] | None = None
    is_pinned: bool = False

    def is_waiting(self) -> bool:
        """Return whether another slot is still evaluating the beginning of this one's job."""
        if self.leader is None:
            return False
        slot, job, n_tokens = self.leader
        return slot.job is job and job.state is State.PROMPT and len(slot.held) < n_tokens


class Slots:
    """All slots of an engine; used by the scheduler's thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        """Begin with slots that hold nothing."""
        self._engine = engine
        self._clock = clock
        self.all = [Slot(index) for index in range(engine.n_slots)]

    @property
    def taken(self) -> list[tuple[Slot, Job]]:
        """The slots that have a job, with it."""
        return [(slot, job) for slot in self.all if (job := slot.job) is not None]

    def pin(self, tokens: array[int]) -> None:
        """Evaluate tokens that prompts may begin with, and keep them for all. Raises QsfError."""
        slot = self.all[-1]
        n_chunk = self._engine.chunk_tokens
        self.keep(slot, count_common(slot.held, tokens))
        while len(slot.held) < len(tokens):
            piece = tokens[len(slot.held) : len(slot.held) + n_chunk]
            for error in self._engine.evaluate([PassItem(slot.index, piece, False)]):
                if error is not None:
                    raise error
            slot.held.extend(piece)
        slot.is_pinned = True

    def choose(self, job: Job) -> Slot:
        """Return the free slot that the job goes on from, or else the longest unused one.

        What a slot holds beyond the prompt stays for others: its beginning is copied.
        """
        free = [slot for slot in self.all if slot.job is None and not slot.is_pinned]
        goes_on = [slot for slot in free if slot.held and _n_held_of(slot, job) == len(slot.held)]
        if goes_on:
            return max(goes_on, key=lambda slot: len(slot.held))
        return min(free, key=lambda slot: (slot.used, len(slot.held)))

    def prepare(self, slot: Slot) -> bool:
        """Keep or share what the slots hold of the job's prompt; one token is left to evaluate.

        Returns whether the job can begin; else another one is evaluating its beginning.
        """
        job = slot.job
        assert job is not None
        n_most = 0 if job.wants_scores else job.n_prompt - 1
        n_common = min(_n_held_of(slot, job), n_most)
        source = max(self.all, key=lambda other: _n_held_of(other, job))
        n_shared = min(_n_held_of(source, job), n_most)
        if n_shared <= n_common or not self._copy(slot, source, n_shared):
            self.keep(slot, n_common)
        slot.salt = job.salt
        job.n_cached = job.n_held = len(slot.held)
        slot.leader = self._find_leader(slot, job, n_most)
        return slot.leader is None

    def _find_leader(self, slot: Slot, job: Job, n_most: int) -> tuple[Slot, Job, int] | None:
        """Return who of those that came before evaluates more of the prompt than the slot holds."""
        best = None
        n_best = len(slot.held) + _LEAST_TOKENS - 1
        for other, lead in self.taken:
            if lead.state is not State.PROMPT or lead.salt != job.salt or lead.turn >= job.turn:
                continue
            n_tokens = min(count_common(lead.tokens, job.prompt), n_most)
            if n_tokens > max(n_best, len(other.held)):
                best, n_best = (other, lead, n_tokens), n_tokens
        return best

    def _copy(self, slot: Slot, source: Slot, n_tokens: int) -> bool:
        """Return whether the slot holds the first tokens of another one now."""
        try:
            self._engine.copy(slot.index, source.index, n_tokens)
        except QsfError:  # a window of attention has gone on there
            return False
        slot.held = source.held[:n_tokens]
        return True

    def keep(self, slot: Slot, n_tokens: int) -> int:
        """Forget all but the first tokens of a slot; return how many it holds then."""
        try:
            n_held = self._engine.keep(slot.index, n_tokens)
        except QsfError:
            n_held = 0  # the engine's next answer says what is wrong
        del slot.held[n_held:]
        return n_held

    def make_room(self) -> bool:
        """Forget what was not used for longest; return whether there was anything."""
        kept = [slot for slot in self.all if slot.job is None and slot.held and not slot.is_pinned]
        if kept:
            self.keep(min(kept, key=lambda slot: slot.used), 0)
        return bool(kept)


def _n_held_of(slot: Slot, job: Job) -> int:
    """Return how many tokens of the job's prompt the slot holds, for a job that may know."""
    is_shared = slot.salt == job.salt or slot.is_pinned
    return count_common(slot.held, job.prompt) if is_shared else 0
