"""The scheduler: which tokens of which jobs are in the next pass.

It runs in one thread, the only one that calls the engine. Between two passes it sends events,
handles cancellations and new jobs, and chooses the next tokens: one for each decoding job, then
parts of prompts, so many that the pass stays short for the decoding jobs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from qsf.errors import (
    QsfArgumentError,
    QsfCancelledError,
    QsfError,
    QsfFormatError,
    QsfIOError,
    QsfMemoryError,
)
from qsf.options import MAX_U32
from qsf.passes import PassItem, Wants
from qsf.serve.http.problems import Problem, problem_of
from qsf.serve.scheduling.engine import ModelEngine
from qsf.serve.scheduling.job import Event, Job, Slot, State
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.slot_files import SlotFiles
from qsf.serve.scheduling.slots import Slots

_MAX_RETRY_SECONDS = 60
_WEIGHT = 0.2  # weight of the newest measurement
_LEAST_ROWS = 8  # least rows, so that slow machines progress too
_FIRST_ROWS = 32  # before the first measurement
# A pass that exceeds the target time even without prompt rows may take longer by this share.
_STREAMED_SHARE = 0.5


class Scheduler:
    """Runs jobs and sends their events. ``submit`` and ``cancel`` may be called from any thread."""

    def __init__(
        self,
        engine: ModelEngine,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        files: SlotFiles | None = None,
        *,
        max_waiting: int = 32,
        max_waiting_tokens: int = 1 << 20,
        queue_seconds: float = 120.0,
        pass_seconds: float = 0.1,
    ) -> None:
        """Set how many jobs and tokens may wait and how long, and the longest pass beside others.

        Infinity: no limit.
        """
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._queue_seconds = queue_seconds
        self._pace = Pace(pass_seconds)
        self._slots = Slots(engine, metrics, clock, files)
        self._waiting: dict[str, deque[Job]] = {}  # by owner; the first owner is next
        self._left: list[Job] = []  # jobs that left the queue by cancellation
        self._changed = threading.Condition()
        self._is_closed = self._is_ended = False
        self._n_turns = 0  # number of admitted jobs
        self._is_full = False  # a job was set aside: no job is admitted until one has ended

    # ---- from any thread ----

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs: all of them, or with a Problem none."""
        with self._changed:
            if self._is_closed:
                raise _shutting_down()
            self._check_room(jobs)
            self._metrics.count("requests_total", len(jobs))
            now = self._clock()
            for job in jobs:
                job.arrived = now
                self._waiting.setdefault(job.owner, deque()).append(job)
            self._changed.notify()

    def _check_room(self, jobs: Sequence[Job]) -> None:
        waiting = [job for line in self._waiting.values() for job in line]
        n_free = self._engine.n_running - len(self.running)
        n_behind = max(len(waiting) - n_free, 0)  # the others get slots in the next round
        n_tokens = sum(job.n_prompt for job in waiting)
        n_new = sum(job.n_prompt for job in jobs)
        text = ""
        if waiting and len(waiting) + len(jobs) - n_free > self._max_waiting:
            text = f"{n_behind} requests wait, and {self._max_waiting} is the limit"
        elif waiting and n_tokens + n_new > self._max_waiting_tokens:
            text = (
                f"the prompts that wait would have {n_tokens + n_new} tokens, and "
                f"{self._max_waiting_tokens} is the limit"
            )
        if text:
            seconds = (n_tokens + n_new) / max(self._pace.tokens_per_second, 1.0)
            retry_seconds = min(_MAX_RETRY_SECONDS, max(1, round(seconds)))
            raise Problem(429, "queue_full", text, retry_seconds=retry_seconds)

    def cancel(self, job: Job) -> None:
        """End a job whose client has gone, even during a pass."""
        with self._changed:
            job.is_cancelled = True
            line = self._waiting.get(job.owner)
            if line is not None and job in line:  # it leaves the queue before the pass has ended
                line.remove(job)
                self._left.append(job)
                if not line:
                    del self._waiting[job.owner]
            for slot, running in self._slots.taken:
                if running is job:
                    self._engine.cancel(slot.index)
            self._changed.notify()

    def close(self, *, at_once: bool = False) -> None:
        """Accept no more jobs; waiting ones end, running ones continue unless ``at_once``."""
        with self._changed:
            self._is_closed = True
            self._is_ended = at_once
            for slot in self._slots.all if at_once else ():
                self._engine.cancel(slot.index)
            self._changed.notify()

    @property
    def n_waiting(self) -> int:
        with self._changed:
            return sum(len(line) for line in self._waiting.values())

    @property
    def n_running_most(self) -> int:
        return self._engine.n_running

    @property
    def running(self) -> list[Job]:
        return [job for _, job in self._slots.taken]

    @property
    def slots(self) -> Sequence[Slot]:
        return self._slots.all

    # ---- the thread ----

    def prepare(self, prefix: array[int] | None = None) -> None:
        """Measure costs, and evaluate a prefix that all share; before ``run``. Raises QsfError."""
        self._slots.measure()
        if prefix is not None:
            self._slots.pin(prefix)

    def write_all(self) -> None:
        """Write the tokens of the slots to files, if there is a folder; after ``run``."""
        self._slots.write_all()

    def gauges(self) -> dict[str, float]:
        return self._slots.gauges()

    def run(self, deliver: Callable[[], None]) -> None:
        """Work until closed and nothing is left; ``deliver`` is called after each round."""
        while True:
            try:
                is_busy = self.step()
            except Exception as error:  # our own error; the server continues
                traceback.print_exc()
                is_busy = True
                self._fail_all(QsfError(f"internal error: {error!r}"))
            deliver()
            with self._changed:
                if is_busy:
                    continue
                if self._waiting or self._left:  # new work arrived meanwhile
                    continue
                if self._is_closed:
                    return
                self._changed.wait()

    def step(self) -> bool:
        """Do one round: ends, admissions, a pass. Return whether there is more to do."""
        self._end_jobs()
        for slot, _ in self._slots.taken:
            if slot.leader is not None and not slot.is_waiting():
                self._prepare(slot)
        while (admitted := self._admit()) is not None:
            self._prepare(admitted)
        ahead = self._ahead_rows()
        rows = ahead or self._choose_rows()
        if rows:
            self._pass(rows, is_ahead=bool(ahead))
        return bool(self._waiting or self._left or self._slots.taken)

    def _end_jobs(self) -> None:
        """End jobs that are cancelled, out of time, or waiting after ``close``."""
        now = self._clock()
        ended: list[tuple[Job, Problem]] = []
        with self._changed:
            for job in self._left:
                if (problem := self._end_of_any(job, now)) is not None:
                    ended.append((job, problem))
            self._left.clear()
            for owner, line in list(self._waiting.items()):
                for job in list(line):
                    problem = self._end_of_waiting(job, now)
                    if problem is not None:
                        line.remove(job)
                        ended.append((job, problem))
                if not line:
                    del self._waiting[owner]
        for slot, running in self._slots.taken:
            if (problem := self._end_of_any(running, now)) is not None:
                self._release(slot)
                ended.append((running, problem))
        for job, problem in ended:
            self._end(job, Event(problem=problem))

    def _end_of_any(self, job: Job, now: float) -> Problem | None:
        if job.is_cancelled:
            return Problem(499, "cancelled", "the client has gone")
        if self._is_ended:
            return _shutting_down()
        if job.max_seconds is not None and now - job.arrived >= job.max_seconds:
            return Problem(
                503, "deadline", f"it has taken more than {job.max_seconds:g} s", retry_seconds=5
            )
        return None

    def _end_of_waiting(self, job: Job, now: float) -> Problem | None:
        problem = self._end_of_any(job, now)
        if job.turn:  # the job was set aside
            return problem
        if problem is None and self._is_closed:
            return _shutting_down()
        if problem is None and now - job.arrived >= self._queue_seconds:
            text = f"it has waited for more than {self._queue_seconds:g} s"
            return Problem(503, "queue_timeout", text, retry_seconds=10)
        return problem

    def _admit(self) -> Slot | None:
        """Give a free slot to the next job that waits, the owners in turns."""
        with self._changed:
            n_running = len(self.running)
            is_full = n_running == self._engine.n_running or (self._is_full and n_running)
            if is_full or not self._waiting:
                return None
            self._is_full = False
            owner = next(iter(self._waiting))
            line = self._waiting.pop(owner)
            job = line.popleft()
            if line:
                self._waiting[owner] = line  # after the other owners
            slot = self._slots.choose(job)
            slot.job = job
            job.slot = slot.index
            job.n_again -= self._engine.n_again(slot.index)
            job.state = State.PROMPT
            if not job.turn:
                self._n_turns += 1
                job.turn = self._n_turns
                job.admitted = self._clock()
            return slot

    def _prepare(self, slot: Slot) -> None:
        """Start a prompt, unless another job is evaluating its first tokens."""
        job = slot.job
        assert job is not None
        try:
            is_ready = self._slots.prepare(slot)
        except QsfMemoryError:
            self._set_aside(slot)
            return
        except QsfArgumentError as error:  # scales of adapters
            self._fail(slot, error)
            return
        if is_ready:
            if not job.is_begun:
                job.is_begun = True
                job.n_cached = job.n_held
                self._metrics.count_prompt(job)
            self._take_forced(slot)

    def _ahead_rows(self) -> list[tuple[Slot, PassItem]]:
        """Return the tokens that drafts have already evaluated; used before the next pass drops
        them.
        """
        rows = []
        for slot, job in self._slots.taken:
            token = job.tokens[job.n_held : job.n_held + 1]
            if job.state is State.DECODING and self._engine.is_ahead(slot.index, token[0]):
                rows.append((slot, self._item(slot, token, "ahead")))
        return rows

    def _choose_rows(self) -> list[tuple[Slot, PassItem]]:
        """Return the tokens of the next pass."""
        rows: list[tuple[Slot, PassItem]] = []
        jobs = [(slot, job) for slot, job in self._slots.taken if slot.leader is None]
        prompts = [slot for slot, job in jobs if job.state is State.PROMPT]
        decoding = [(slot, job) for slot, job in jobs if job.state is State.DECODING]
        # Slots take turns if memory is too small for all
        decoding.sort(key=lambda pair: pair[1].last)
        del decoding[self._engine.chunk_tokens :]
        n_free = self._engine.chunk_tokens - len(decoding)
        for slot, running in decoding:
            n_held, n_all = running.n_held, len(running.tokens)
            n_forced = min(n_all - n_held - 1, n_free)
            n_free -= n_forced
            tokens = running.tokens[n_held : n_held + 1 + n_forced]
            wants: Wants = "ahead" if n_held + len(tokens) == n_all else "none"
            rows.append((slot, self._item(slot, tokens, wants)))
        if rows:
            n_free = min(n_free, self._pace.prompt_rows(len(rows)))
        prompts.sort(key=lambda slot: slot.job.arrived if slot.job is not None else 0.0)
        n_score = self._engine.score_rows
        if len(jobs) > 1:  # the others may need a row each
            n_score = min(n_score, self._engine.logits_rows - len(jobs) + 1)
        for i, slot in enumerate(prompts):
            job = slot.job
            assert job is not None
            is_alone = i + 1 == len(prompts)
            n_left = len(job.tokens) - job.n_held  # includes tokens forced after the prompt
            n_rows = min(n_left, n_free if is_alone else -(-n_free // 2))
            if job.is_scoring:
                n_rows, n_score = min(n_rows, n_score), 0
            if job.reading is not None and job.reading.is_whole:
                n_rows = n_left if n_left <= n_free else 0
            if n_rows <= 0:
                continue
            n_free -= n_rows
            tokens = job.tokens[job.n_held : job.n_held + n_rows]
            wants = "all" if job.is_scoring else "ahead" if n_rows == n_left else "none"
            item = self._item(slot, tokens, wants)
            job.want_hidden(item, is_last=n_rows == n_left)
            rows.append((slot, item))
        return rows

    def _item(self, slot: Slot, tokens: array[int], wants: Wants) -> PassItem:
        return PassItem(self._engine.sessions[slot.index], tokens, wants)

    def _pass(self, rows: list[tuple[Slot, PassItem]], *, is_ahead: bool) -> None:
        started = self._clock()
        errors = self._evaluate(rows)
        if not rows:  # all jobs were set aside
            return
        ready: list[Slot] = []
        n_prompt = n_decoded = 0
        for (slot, item), error in zip(rows, errors, strict=True):
            job = slot.job
            assert job is not None
            if error is None:
                slot.n_held += len(item.tokens)
                job.n_held = slot.n_held
                is_prompt = job.state is State.PROMPT
                n_prompt += len(item.tokens) - (not is_prompt)
                n_decoded += not is_prompt
                if item.wants == "all" and not self._score(slot, job):
                    continue
                if job.n_held == len(job.tokens):
                    is_over = job.reading is not None or not job.max_tokens
                    self._finish_reading(slot, job) if is_over else ready.append(slot)
                elif job.wants_progress and is_prompt and not job.first:
                    job.sink(job, Event(n_done=min(job.n_held, job.n_prompt)))
                continue
            job.n_held = self._slots.keep(slot, min(self._engine.n_held(slot.index), job.n_held))
            # A cancellation may have been for the job that had the slot before.
            if not isinstance(error, QsfCancelledError):
                self._fail(slot, error)
        if is_ahead:
            # Tokens that needed no pass: an earlier one evaluated them as drafts
            self._metrics.count("spec_decode_num_accepted_tokens_total", n_decoded)
        else:
            seconds = self._clock() - started
            self._pace.learn(n_decoded, n_prompt, seconds)
            slot, item = rows[0]
            if len(rows) == 1 and n_prompt == len(item.tokens):  # all its tokens are prompt tokens
                first = slot.n_held - n_prompt
                self._slots.costs.learn_evaluating(first, n_prompt, seconds)
            self._metrics.count_pass(n_decoded + n_prompt, self._engine.n_drafts, seconds)
        self._choose_tokens(ready)

    def _finish_reading(self, slot: Slot, job: Job) -> None:
        labels = () if job.reading is None else job.reading.labels
        try:
            values = self._engine.label_scores(slot.index, labels)
        except QsfError as error:
            self._fail(slot, error)
            return
        self._tell(slot, job, job.finish_reading(values, self._clock()))

    def _score(self, slot: Slot, job: Job) -> bool:
        tokens = job.prompt[1 + len(job.scores) : job.n_held + 1]
        try:
            job.scores += self._engine.scores(slot.index, tokens, job.choosing.n_top)
        except QsfError as error:
            self._fail(slot, error)
            return False
        return True

    def _evaluate(self, rows: list[tuple[Slot, PassItem]]) -> list[QsfError | None]:
        """Evaluate; repeats a pass once after a read error, because disks recover."""
        try:
            return self._evaluate_with_room(rows)
        except (QsfIOError, QsfFormatError):
            pass
        except QsfError as error:
            return [error] * len(rows)
        try:
            for slot, item in rows:  # the first try may have evaluated some of them
                job = slot.job
                if job is not None and self._engine.n_held(slot.index) != job.n_held:
                    n_held = self._slots.keep(slot, job.n_held)
                    item.tokens = job.tokens[n_held : job.n_held + len(item.tokens)]
            return self._evaluate_with_room(rows)
        except QsfError as error:
            return [error] * len(rows)

    def _evaluate_with_room(self, rows: list[tuple[Slot, PassItem]]) -> list[QsfError | None]:
        """Evaluate; while memory is short, evict the slot of least value.

        If all slots have jobs, the youngest job is set aside and leaves ``rows``.
        """
        while rows:
            try:
                return self._engine.evaluate([item for _, item in rows])
            except QsfMemoryError:
                if self._slots.make_room():
                    continue
                slot = self._slots.youngest()
                if slot is None:
                    raise
                rows[:] = [row for row in rows if row[0] is not slot]
                self._set_aside(slot)
        return []

    def _set_aside(self, slot: Slot) -> None:
        """Put the job at the head of the queue; its slot is saved to a file and restored later."""
        job = slot.job
        assert job is not None
        self._release(slot)
        self._slots.give_up(slot)
        self._metrics.count("kv_swaps_total")
        self._is_full = True
        job.state = State.WAITING
        job.begin_again()
        with self._changed:
            if job.is_cancelled:
                self._left.append(job)
                return
            line = self._waiting.pop(job.owner, deque())
            line.appendleft(job)
            self._waiting = {job.owner: line, **self._waiting}

    def _choose_tokens(self, ready: list[Slot]) -> None:
        pairs = [(slot.index, slot.job) for slot in ready if slot.job is not None]
        if not pairs:
            return
        try:
            answers = self._engine.choose(pairs)
        except QsfError as error:
            answers = [error] * len(pairs)
        now = self._clock()
        for slot, chosen in zip(ready, answers, strict=True):
            job = slot.job
            assert job is not None
            if isinstance(chosen, QsfError):
                self._fail(slot, chosen)
                continue
            self._metrics.count_token(job, now)
            job.state = State.DECODING
            job.first = job.first or now
            job.last = now
            try:
                event = job.advance(chosen)
            except QsfError as error:  # from the grammar of its constraint
                self._fail(slot, error)
                continue
            if event is None or self._tell(slot, job, event):
                self._take_forced(slot)

    def _tell(self, slot: Slot, job: Job, event: Event) -> bool:
        if event.is_last:
            self._release(slot)
            self._end(job, event)
        else:
            job.sink(job, event)
        return not event.is_last

    def _take_forced(self, slot: Slot) -> None:
        """Add forced tokens to the job, for its next pass."""
        job = slot.job
        assert job is not None
        n_before = job.n_forced
        try:
            event = job.advance_forced()
        except QsfError as error:  # from the grammar of its constraint
            self._fail(slot, error)
            return
        self._metrics.count_forced(job.n_forced - n_before)
        if event is not None:
            self._tell(slot, job, event)

    def _fail(self, slot: Slot, error: QsfError) -> None:
        job = slot.job
        self._slots.keep(slot, 0)
        self._release(slot)
        if job is not None:
            self._end(job, Event(problem=problem_of(error)))

    def _fail_all(self, error: QsfError) -> None:
        for slot in self._slots.all:
            if slot.job is not None:
                self._fail(slot, error)

    def _release(self, slot: Slot) -> None:
        """Take the slot from its job; later jobs may share its tokens."""
        with self._changed:
            self._is_full = False
            if slot.job is not None:
                slot.job.n_again += self._engine.n_again(slot.index)
            slot.job = slot.leader = None
            slot.used = self._clock()

    def _end(self, job: Job, event: Event) -> None:
        job.state = State.ENDED
        self._metrics.count_end(job, event, self._clock())
        job.sink(job, event)


def _shutting_down() -> Problem:
    return Problem(503, "shutting_down", "the server is shutting down", retry_seconds=5)


class Pace:
    """Learns the duration of passes.

    A pass takes as long as reading the weights or computing its rows, whichever is longer. So rows
    are nearly free if weights are read from a disk, and expensive if they are in memory. One figure
    covers both: the seconds that a prompt row adds to a pass.
    """

    def __init__(self, pass_seconds: float) -> None:
        """Set the longest duration of a pass while a job decodes; infinity: no limit."""
        self._wanted_seconds = pass_seconds
        self._base_seconds = 0.0  # duration of a pass without prompt rows
        self._row_seconds = 0.0  # that a prompt row adds
        self.tokens_per_second = 0.0

    def prompt_rows(self, n_decoding: int) -> int:
        """Return how many prompt rows the next pass may have in addition to decoding ones."""
        if self._wanted_seconds == math.inf:
            return MAX_U32
        if self._row_seconds <= 0.0 or n_decoding == 0:
            return _FIRST_ROWS
        most_seconds = max(self._wanted_seconds, (1 + _STREAMED_SHARE) * self._base_seconds)
        return max(_LEAST_ROWS, int((most_seconds - self._base_seconds) / self._row_seconds))

    def learn(self, n_decoded: int, n_prompt: int, seconds: float) -> None:
        if seconds <= 0.0 or n_decoded + n_prompt == 0:
            return
        self.tokens_per_second = _mean(self.tokens_per_second, (n_decoded + n_prompt) / seconds)
        if n_prompt == 0:
            self._base_seconds = _mean(self._base_seconds, seconds)
        elif n_decoded:
            self._row_seconds = _mean(
                self._row_seconds, max(seconds - self._base_seconds, 1e-9) / n_prompt
            )
        elif self._row_seconds <= 0.0:
            self._row_seconds = seconds / n_prompt


def _mean(before: float, now: float) -> float:
    return now if before <= 0.0 else before + _WEIGHT * (now - before)
