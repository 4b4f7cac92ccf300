"""The order of runs: in each round every task runs once, in turn: A B A B.

A temporary disturbance of the machine affects all tasks, each task's values are spread over the
whole run, and compared values are measured at nearly the same time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qsf.errors import QsfError
from qsf_bench.models.facts import FileFacts
from qsf_bench.run.launch import Outcome
from qsf_bench.run.memory_group import CapError
from qsf_bench.run.tasks import Task

N_TRIES = 2  # of a task that never succeeds

_NUMBER = re.compile(r"\d+(\.\d+)?")


class NothingMeasuredError(QsfError):
    """No task gave any figures; the text says why."""


@dataclass(slots=True)
class TaskRuns:
    """The outcomes of one task so far, one for each round; None in a round without figures."""

    task: Task
    facts: FileFacts  # of its file
    outcomes: list[Outcome | None] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # reason -> number of times

    def __str__(self) -> str:
        return f"{self.task.engine} {self.file}, {self.task.setting}"

    @property
    def file(self) -> str:
        """The file's name, without folder."""
        return Path(self.task.path).name

    @property
    def has_figures(self) -> bool:
        """True if at least one round has figures."""
        return any(outcome is not None for outcome in self.outcomes)

    @property
    def is_left_out(self) -> bool:
        """True if the task is not repeated any more."""
        return self.failures.total() >= N_TRIES and not self.has_figures

    def add_failure(self, why: str) -> None:
        """Count a failure; reasons that differ only in numbers, such as free bytes, are one."""
        kind = _NUMBER.sub("", why)
        same = (counted for counted in self.failures if _NUMBER.sub("", counted) == kind)
        self.failures[next(same, why)] += 1

    def run(self, run: Callable[[Task], Outcome]) -> None:
        """Run the task once and record its outcome."""
        try:
            outcome = run(self.task)
        except CapError as error:
            self.add_failure(str(error))
            self.outcomes.append(None)
            return
        if outcome.why:
            self.add_failure(outcome.why)
        self.outcomes.append(outcome if outcome.has_figures else None)


def run_rounds(
    runs: Sequence[TaskRuns],
    n_rounds: int,
    run: Callable[[Task], Outcome],
    progress: Callable[[int, int, str], None] = lambda _n_done, _n_all, _next: None,
) -> None:
    """Run all rounds, and append the outcomes to ``runs``, which keeps them after an interruption.

    A task that fails is repeated in the next round, and left out after two failures without
    figures. ``progress`` is called with n_done, n_all and the next run.

    Raises:
        NothingMeasuredError: all tasks have failed.
    """
    n_all = n_rounds * len(runs)
    for n_done in range(n_all):
        task_runs = runs[n_done % len(runs)]
        if task_runs.is_left_out:
            task_runs.outcomes.append(None)
            continue
        tests = ", ".join(test.words for test in task_runs.task.tests)
        progress(n_done, n_all, f"{task_runs}, {tests}")
        task_runs.run(run)
    progress(n_all, n_all, "")
    if not any(task_runs.has_figures for task_runs in runs):
        texts = [f"{task_runs}: {why}" for task_runs in runs for why in task_runs.failures]
        raise NothingMeasuredError("nothing could be measured: " + "; ".join(texts))
