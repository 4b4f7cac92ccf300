"""Slots: prefix reuse between requests, and eviction.

If another job is evaluating a job's prefix, the job waits and shares the result, so equal prompts
that arrive together are evaluated once. The search compares a prompt with the tokens of all slots;
docs/server.md has the cost.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from operator import itemgetter

from qsf.errors import QsfError, QsfMemoryError
from qsf.kv import KV_BLOCK_TOKENS
from qsf.passes import PassItem
from qsf.serve.scheduling.engine import ModelEngine
from qsf.serve.scheduling.job import Job, Slot, State
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.slot_files import Costs, SlotFiles, value
from qsf.text.arguments import count_common

# For fewer tokens, evaluating is better than waiting: a block of the KV pool.
_LEAST_TOKENS = KV_BLOCK_TOKENS
_MEASURED_TOKENS = 64
_PINNED_SALT = "prefix"  # no job has this salt


class Slots:
    """All slots of an engine; only for the scheduler's thread."""

    def __init__(
        self,
        engine: ModelEngine,
        metrics: Metrics,
        clock: Callable[[], float],
        files: SlotFiles | None,
    ) -> None:
        """Start with the engine's tokens; ``files`` stores evicted slots."""
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._files = files
        self.costs = Costs() if files is None else files.costs
        self.all = [Slot(i, n_held=engine.n_held(i)) for i in range(len(engine.sessions))]

    @property
    def taken(self) -> list[tuple[Slot, Job]]:
        return [(slot, job) for slot in self.all if (job := slot.job) is not None]

    def measure(self) -> None:
        """Measure the cost of evaluating and reading, if there are files. Raises QsfError."""
        if self._files is None:
            return
        slot = self.all[0]
        n_tokens = min(_MEASURED_TOKENS, self._engine.chunk_tokens, self._engine.ctx_tokens)
        self._evaluate(slot, array("I", [0] * n_tokens))
        self._files.measure(slot)
        self.keep(slot, 0)

    def pin(self, tokens: array[int]) -> None:
        """Evaluate the shared prefix of prompts, and pin it in a slot. Raises QsfError."""
        slot = self.all[-1]
        if self._files is not None:
            kept, n_kept = self._files.find(tokens, _PINNED_SALT, len(tokens))
            if kept is not None and n_kept == len(tokens):
                self._files.load(kept, slot)
                self.keep(slot, min(n_kept, slot.n_held))
        self._evaluate(slot, tokens)
        slot.salt = _PINNED_SALT
        slot.is_pinned = True

    def _evaluate(self, slot: Slot, tokens: array[int]) -> None:
        """Evaluate the rest of the tokens in the slot, which holds the first ones."""
        while (first := slot.n_held) < len(tokens):
            piece = tokens[first : first + self._engine.chunk_tokens]
            started = self._clock()
            item = PassItem(self._engine.sessions[slot.index], piece, "none")
            for error in self._engine.evaluate([item]):
                if error is not None:
                    raise error
            self.costs.learn_evaluating(first, len(piece), self._clock() - started)
            slot.n_held += len(piece)

    def choose(self, job: Job) -> Slot:
        """Return the free slot with the job's longest prefix, or else the one of least value.

        If a slot holds more than the prompt, its prefix is copied and the slot stays for others.
        """
        free = [slot for slot in self.all if slot.job is None and not slot.is_pinned]
        goes_on = [slot for slot in free if slot.n_held == self._n_held_of(slot, job) > 0]
        if goes_on:
            longest = max(goes_on, key=lambda slot: slot.n_held)
            self._keep_turn(longest, [slot for slot in free if slot is not longest])
            return longest
        return min(free, key=lambda slot: self._worth(slot, is_by_token=False))

    def _keep_turn(self, slot: Slot, spare: list[Slot]) -> None:
        """Share what a slot holds, before it goes on, with one that holds nothing of its own.

        A window moves on with the text: without that, a prompt that differs before the last turn,
        such as one with a late result of a tool, would be evaluated from its beginning.
        """
        empty = [each for each in spare if self._n_elsewhere(each) == each.n_held]
        if self._engine.is_windowed and empty:
            oldest = min(empty, key=lambda each: each.used)
            if self._copy(oldest, slot, slot.n_held):
                oldest.salt, oldest.used = slot.salt, self._clock()
                oldest.adapters = slot.adapters
            else:
                self.keep(oldest, 0)

    def _worth(self, slot: Slot, *, is_by_token: bool) -> tuple[float, float]:
        """Return the retention value of tokens that only this slot holds, as a key for sorting.

        The value is per token if memory is short, because a long sequence frees more than a short
        one.
        """
        n_tokens, n_elsewhere = slot.n_held, self._n_elsewhere(slot)
        seconds = self.costs.evaluating(n_elsewhere, n_tokens)
        if self._files is not None and seconds:
            n_read = self._files.find(self._engine.tokens(slot.index), slot.salt, n_tokens)[1]
            read_seconds = self.costs.reading(self._engine.state_bytes(slot.index))
            # 2: the file was written
            seconds = min(seconds, read_seconds * (1 if n_read == n_tokens else 2))
        n_freed = n_tokens - n_elsewhere if is_by_token else 1
        return value(seconds, n_freed, self._clock() - slot.used), slot.used

    def _n_elsewhere(self, slot: Slot) -> int:
        """Return how many leading tokens of the slot another slot holds too."""
        tokens = self._engine.tokens(slot.index)
        others = (
            other
            for other in self.all
            if other is not slot
            and (other.salt == slot.salt or (other.is_pinned and slot.adapters is None))
        )
        counts = (self._engine.count_common(other.index, tokens) for other in others)
        return max(counts, default=0)

    def _n_held_of(self, slot: Slot, job: Job) -> int:
        """Return how many of the job's tokens the slot holds, if the job may know of them."""
        is_pinned = slot.is_pinned and job.adapters is None
        is_shared = slot.n_held and (slot.salt == job.salt or is_pinned)
        return self._engine.count_common(slot.index, job.tokens) if is_shared else 0

    def prepare(self, slot: Slot) -> bool:
        """Reuse the job's tokens that a slot or a file has; leaves at least one to evaluate.

        Returns False if another job is evaluating the same prefix. Raises QsfMemoryError: a file's
        tokens do not fit beside the running jobs.
        """
        job = slot.job
        assert job is not None
        n_most = 0 if job.reads_all else len(job.tokens) - 1
        if self._n_held_of(slot, job) < slot.n_held:
            self._write(slot, self._n_elsewhere(slot))
        self._engine.set_adapters(slot.index, job.adapters)
        slot.adapters = job.adapters
        slot.n_held = self._engine.n_held(slot.index)
        saved_seconds = self._read(slot, job, n_most)
        n_common = min(self._n_held_of(slot, job), n_most)
        shared = [(min(self._n_held_of(other, job), n_most), other) for other in self.all]
        longer = sorted((pair for pair in shared if pair[0] > n_common), key=itemgetter(0))
        if not any(self._copy(slot, source, n) for n, source in reversed(longer)):
            self.keep(slot, n_common)
        slot.salt = job.salt
        job.n_held = slot.n_held
        slot.leader = self._find_leader(slot, job, n_most)
        if slot.leader is None:
            saved_seconds += self.costs.evaluating(0, job.n_held)
            self._metrics.count("kv_saved_seconds_total", saved_seconds)
        return slot.leader is None

    def _read(self, slot: Slot, job: Job, n_most: int) -> float:
        """Load the job's prefix from a file if no slot has it; return minus the seconds.

        A file is read if it adds an eighth of its tokens, and 32 of them: that is much faster than
        evaluating.
        """
        if self._files is None:
            return 0.0
        before = self._files.read_seconds
        while True:
            n_held = max(self._n_held_of(other, job) for other in self.all)
            kept, n_kept = self._files.find(job.tokens, job.salt, n_most)
            n_gained = n_kept - n_held
            if kept is None or n_gained < max(_LEAST_TOKENS, len(kept.tokens) // 8):
                break
            self.keep(slot, 0)
            try:
                if self._files.load(kept, slot):
                    self._metrics.count("kv_restored_tokens_total", self.keep(slot, n_kept))
                    break
            except QsfMemoryError:
                if not self.make_room():  # this may write other files, and remove this one
                    if len(self.taken) > 1:
                        raise
                    break
        return before - self._files.read_seconds

    def _write(self, slot: Slot, n_elsewhere: int) -> None:
        """Write a slot to a session file if it holds enough tokens that no other slot holds."""
        n_lost = slot.n_held - n_elsewhere
        if self._files is None or n_lost < _LEAST_TOKENS or not self._files.save(slot):
            self._metrics.count("kv_dropped_tokens_total", n_lost)

    def give_up(self, slot: Slot) -> None:
        """Evict a slot; a session file keeps its tokens if there is a folder for them."""
        self._write(slot, self._n_elsewhere(slot))
        self.keep(slot, 0)

    def write_all(self) -> None:
        """Write the tokens of slots to files; the most valuable slots last, so that they stay."""
        for slot in sorted(self.all, key=lambda slot: self._worth(slot, is_by_token=True)):
            if self._files is not None and slot.n_held:
                tokens = self._engine.tokens(slot.index)
                self._write(slot, self._files.find(tokens, slot.salt, slot.n_held)[1])

    def _find_leader(self, slot: Slot, job: Job, n_most: int) -> tuple[Slot, Job, int] | None:
        """Return an earlier slot that is evaluating a longer prefix of this prompt."""
        best = None
        n_best = slot.n_held + _LEAST_TOKENS - 1
        for other, lead in self.taken:
            if lead.state is not State.PROMPT or lead.salt != job.salt or lead.turn >= job.turn:
                continue
            n_tokens = min(count_common(lead.tokens, job.tokens), n_most)
            if n_tokens > max(n_best, other.n_held):
                best, n_best = (other, lead, n_tokens), n_tokens
        return best

    def _copy(self, slot: Slot, source: Slot, n_tokens: int) -> bool:
        """Return whether the slot holds the first tokens of another one now."""
        try:
            self._engine.copy(slot.index, source.index, n_tokens)
        except QsfError:  # a sliding window has moved on there
            return False
        slot.n_held = n_tokens
        return True

    def keep(self, slot: Slot, n_tokens: int) -> int:
        """Forget all but the first tokens of a slot; return how many it holds then."""
        with contextlib.suppress(QsfError):  # the engine's next call reports the error
            self._engine.keep(slot.index, n_tokens)
        slot.n_held = self._engine.n_held(slot.index)
        return slot.n_held

    def make_room(self) -> bool:
        """Evict the idle slot of least value; return whether there was an idle slot."""
        kept = [
            slot for slot in self.all if slot.job is None and slot.n_held and not slot.is_pinned
        ]
        if kept:
            self.give_up(min(kept, key=lambda slot: self._worth(slot, is_by_token=True)))
        return bool(kept)

    def youngest(self) -> Slot | None:
        """Return the slot of the job that was admitted last, but never the first of all."""
        others = sorted(self.taken, key=lambda pair: pair[1].turn)[1:]
        return others[-1][0] if others else None

    def gauges(self) -> dict[str, float]:
        tokens: dict[str, float] = {"kv_tokens_in_memory": sum(slot.n_held for slot in self.all)}
        if (files := self._files) is None:
            return tokens
        return {
            **tokens,
            "kv_tokens_on_disk": files.n_tokens,
            "session_files_bytes": files.n_bytes,
            "session_files_read_seconds": files.read_seconds,
            "session_files_write_seconds": files.write_seconds,
            "session_files_failures": files.n_failures,
        }
