"""Who runs when: in each round all tasks once, in turn: A B A B.

So whatever disturbs the machine for a while disturbs all of them, the values of each are spread
over the whole run, and what is compared was measured at nearly the same time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qsf.bench.launch import Outcome
from qsf.bench.memory_group import CapError, memory_group
from qsf.bench.results import Failure
from qsf.bench.tasks import Task
from qsf.errors import QsfError

N_TRIES = 2  # of a task that never succeeds

_NUMBER = re.compile(r"\d+(\.\d+)?")

Run = Callable[[Task], Outcome]
Progress = Callable[[int, int, str], None]  # how many are done, of how many, what comes now


class NothingMeasuredError(QsfError):
    """No task gave any figures; the text says why."""


@dataclass(slots=True)
class TaskRuns:
    """What came of one task so far: an outcome for each round, None where it gave no figures."""

    task: Task
    outcomes: list[Outcome | None] = field(default_factory=list)
    whys: Counter[str] = field(default_factory=Counter)  # what failed, and how often
    skipped_why: str = ""  # it is not tried at all

    @property
    def has_figures(self) -> bool:
        """Whether there are figures of one round at least."""
        return any(outcome is not None for outcome in self.outcomes)

    @property
    def is_left_out(self) -> bool:
        """Whether it is not tried any more."""
        has_failed = self.whys.total() >= N_TRIES and not self.has_figures
        return bool(self.skipped_why) or has_failed

    @property
    def failures(self) -> list[Failure]:
        """All that failed; ``n_times`` is 0 where nothing was tried."""
        counts = {self.skipped_why: 0} if self.skipped_why else dict(self.whys)
        name, setting = Path(self.task.path).name, setting_of(self.task)
        return [Failure(self.task.engine, name, setting, why, n) for why, n in counts.items()]

    def add_failure(self, why: str) -> None:
        """Count a failure; one that differs in its numbers alone, such as free bytes, is alike."""
        kind = _NUMBER.sub("", why)
        self.whys[next((known for known in self.whys if _NUMBER.sub("", known) == kind), why)] += 1


def setting_of(task: Task) -> str:
    """Return how a task is run, in words."""
    parts = [f"{task.n_threads} thread{'' if task.n_threads == 1 else 's'}"]
    parts += [f"budget {task.budget_mb} MB"] if task.budget_mb is not None else []
    parts += [f"cgroup {task.cap_mb} MB"] if task.cap_mb is not None else []
    parts += [f"KV cache {task.kv_type}"] if task.kv_type is not None else []
    return ", ".join([*parts, *(test.words for test in task.tests)])


def run_rounds(
    tasks: Sequence[Task],
    n_rounds: int,
    run: Run,
    *,
    runs: list[TaskRuns] | None = None,
    progress: Progress = lambda _n_done, _n_all, _text: None,
) -> list[TaskRuns]:
    """Run the rounds and return what came of each task, in their order.

    ``runs``, a list that is empty, is filled as it goes: after an interruption it has what there
    is until then. A task that fails is tried again in the next round, and left out when it has
    failed twice without any figures; the others go on.

    Raises:
        NothingMeasuredError: all tasks have failed.
    """
    runs = [] if runs is None else runs
    runs += [
        TaskRuns(task, skipped_why=why) for task, why in zip(tasks, reasons(tasks), strict=True)
    ]
    n_all = n_rounds * len(tasks)
    for n_done in range(n_all):
        one = runs[n_done % len(tasks)]
        if not one.is_left_out:
            progress(n_done, n_all, f"{Path(one.task.path).name}, {setting_of(one.task)}")
            _run_once(one, run)
        else:
            one.outcomes.append(None)
    progress(n_all, n_all, "")
    if not any(one.has_figures for one in runs):
        failures = [failure for one in runs for failure in one.failures]
        texts = [f"{f.engine}, {f.file}, {f.what}: {f.why}" for f in failures]
        raise NothingMeasuredError("nothing could be measured: " + "; ".join(texts))
    return runs


def _run_once(one: TaskRuns, run: Run) -> None:
    try:
        outcome = run(one.task)
    except CapError as error:
        one.add_failure(str(error))
        one.outcomes.append(None)
        return
    if outcome.why:
        one.add_failure(outcome.why)
    one.outcomes.append(outcome if outcome.has_figures else None)


def reasons(tasks: Sequence[Task]) -> list[str]:
    """Return for each task why it cannot be run at all; empty: it can, as far as is known."""
    caps: dict[int, str] = {}
    found = []
    for task in tasks:
        why = "" if Path(task.path).is_file() else f"{task.path} does not exist, or is no file"
        if not why and task.cap_mb is not None:
            if task.cap_mb not in caps:
                caps[task.cap_mb] = _reason_of_cap(task.cap_mb)
            why = caps[task.cap_mb]
        found.append(why)
    return found


def _reason_of_cap(cap_mb: int) -> str:
    try:
        with memory_group(cap_mb << 20):
            return ""
    except CapError as error:
        return str(error)
