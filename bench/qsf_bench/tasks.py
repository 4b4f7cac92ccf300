"""The task of one measured process, its answer, and the turns of several tasks.

Each process opens one file and runs its tests. In each round every task runs once, in turn (A B A
B): a disturbance of the machine affects all tasks, and compared values are measured at nearly the
same time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from qsf.errors import QsfError
from qsf_bench.memory_group import CapError
from qsf_bench.processes import ProcessError, drop_caches, last_lines, run_command

QSF = "qsf"
LLAMA = "llama.cpp"
N_TRIES = 2  # of a task that never succeeds

_WORKERS = {
    QSF: ["-m", "qsf_bench.worker_qsf"],
    LLAMA: [str(Path(__file__).with_name("worker_llama.py"))],
}


@dataclass(frozen=True, slots=True)
class Test:
    """One timed test, named as llama-bench does.

    ``pp``: a prompt of ``n_tokens`` after ``depth`` others. ``tg``: ``n_tokens`` generated
    greedily after ``depth`` others.
    """

    __test__: ClassVar[bool] = False  # pytest would collect names that begin with Test

    kind: Literal["pp", "tg"]
    n_tokens: int
    depth: int = 0

    @property
    def words(self) -> str:
        """The name, with the depth if there is one: ``tg128 @ 2048``."""
        return f"{self.kind}{self.n_tokens}" + (f" @ {self.depth}" if self.depth else "")

    @property
    def ctx_tokens(self) -> int:
        """The smallest context for the test; each generation is warmed up by one token."""
        return self.depth + self.n_tokens + 2


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does. ``kv_type`` and ``budget_mb`` are None for the engine's default."""

    engine: str  # `QSF` or `LLAMA`
    path: str
    n_threads: int
    tests: tuple[Test, ...]
    budget_mb: int | None = None  # of QSF; 0: none
    cap_mb: int | None = None  # of the memory control group; None: no group
    kv_type: str | None = None

    @property
    def words(self) -> str:
        """Engine, file and setting, for progress and failures."""
        words = [f"{self.n_threads} thread{'' if self.n_threads == 1 else 's'}"]
        words += [f"budget {self.budget_mb} MB"] if self.budget_mb else []
        words += [f"cgroup {self.cap_mb} MB"] if self.cap_mb else []
        return f"{self.engine} {Path(self.path).name}, {', '.join(words)}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a process: tokens a second by test, in the order of the task."""

    version: str  # such as "QSF 0.1.0, avx512" or "xllamacpp 2026.10, AVX2"
    tok_per_s: list[float]
    peak_bytes: int  # VmHWM at the end


@dataclass(slots=True)
class Runs:
    """A task, its answers so far (None in a round without one), and why rounds failed."""

    task: Task
    answers: list[Answer | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def is_left_out(self) -> bool:
        """True if the task failed too often to be tried again."""
        return len(self.failures) >= N_TRIES and not any(self.answers)


def run_task(task: Task) -> Answer:
    """Run one task in a process of its own; with a group, from a cold page cache.

    Raises:
        CapError: the task's memory group cannot be made.
        ProcessError: the process failed; the text ends with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="qsf-bench-") as folder:
        answer_path = Path(folder, "answer.json")
        command = [sys.executable, *_WORKERS[task.engine], json.dumps(asdict(task))]
        if task.cap_mb is not None:
            drop_caches(task.path)
        ended = run_command([*command, str(answer_path)], limit_mb=task.cap_mb)
        if ended.exit_code or not answer_path.exists():
            killed = ", killed for its memory" if ended.n_oom_kills else ""
            why = f"ended with {ended.exit_code}{killed}{last_lines(ended.errors)}"
            raise ProcessError(why)
        return Answer(**json.loads(answer_path.read_bytes()))


def run_rounds(runs: Sequence[Runs], n_rounds: int, progress: Callable[[float, str], None]) -> None:
    """Run all rounds; ``runs`` keep their answers when a signal interrupts this.

    Raises QsfError if no task gave an answer.
    """
    n_all = n_rounds * len(runs)
    for n_done in range(n_all):
        each = runs[n_done % len(runs)]
        if each.is_left_out:
            continue
        progress(n_done / n_all, f"round {n_done // len(runs) + 1}, {each.task.words}")
        try:
            each.answers.append(run_task(each.task))
        except (CapError, ProcessError) as error:
            each.answers.append(None)
            each.failures.append(str(error))
    if not any(any(each.answers) for each in runs):
        why = "; ".join(f"{each.task.words}: {each.failures[-1]}" for each in runs)
        raise QsfError(f"nothing could be measured: {why}")


def find_baseline() -> str:
    """Return the name and version of the llama.cpp of this Python; "" if there is none.

    It is asked in a process of its own: importing it takes memory, and one that was built for
    another processor crashes.
    """
    try:
        ended = run_command([sys.executable, *_WORKERS[LLAMA]], timeout_seconds=120.0)
    except ProcessError:
        return ""
    lines = ended.output.split("\n")
    return lines[-2] if ended.exit_code == 0 and len(lines) > 1 else ""
