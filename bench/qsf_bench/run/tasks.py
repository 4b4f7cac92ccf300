"""A measured process's task and its answer: JSON in both directions.

`worker_llama` runs in a Python that need not have QSF, so it knows these records by their keys.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from qsf.errors import QsfError

QSF = "qsf"
LLAMA = "llama.cpp"
LLAMA_KV_TYPES = ("f16", "8bit", "4bit")  # as in `worker_llama`
"""Names of engines; a llama-bench that the user names is an engine of that name."""

ANSWER_VARIABLE = "QSF_BENCH_ANSWER"
"""The environment variable that names the file for the answer: stdout is anybody's."""


class WorkerError(QsfError):
    """A measured process gave no answer, or an unusable one."""


@dataclass(frozen=True, slots=True)
class Test:
    """One timed test, named as llama-bench does.

    ``pp``: a prompt of ``n_tokens`` after ``depth`` others; only the last token's logits are
    computed. ``tg``: ``n_tokens`` one at a time after ``depth`` others, and a token is chosen
    greedily after each. The input tokens are fixed and equal for both engines.

    ``is_even``: each token differs from earlier ones, so that random mixtures choose their experts
    evenly (see `random_qsf`).
    """

    __test__: ClassVar[bool] = False  # pytest would collect names that begin with Test

    kind: Literal["pp", "tg"]
    n_tokens: int
    depth: int = 0
    is_even: bool = False

    @property
    def name(self) -> str:
        """The name without the depth, such as ``pp512``."""
        return f"{self.kind}{self.n_tokens}{'-even' * self.is_even}"

    @property
    def words(self) -> str:
        """The name, with the depth if there is one: ``tg128 @ 2048``."""
        return f"{self.name} @ {self.depth}" if self.depth else self.name

    @property
    def ctx_tokens(self) -> int:
        """The smallest context for the test: a warm-up of ``tg`` adds one token."""
        return self.depth + self.n_tokens + (1 if self.kind == "tg" else 0)


def setting_words(n_threads: int, budget_mb: int | None, cap_mb: int | None) -> str:
    """Return such as "2 threads, budget 200 MB, cgroup 300 MB"; omits a limit of None."""
    words = [f"{n_threads} thread{'' if n_threads == 1 else 's'}"]
    if budget_mb is not None:
        words.append(f"budget {budget_mb} MB")
    if cap_mb is not None:
        words.append(f"cgroup {cap_mb} MB")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one process: it opens a file and runs tests, each after a warm-up.

    The warm-up of ``pp`` is the same prompt, of ``tg`` one token. If ``is_slow``, which is for
    streamed models whose passes take seconds, a prompt is warmed up by a single token.
    """

    engine: str  # `QSF` or `LLAMA`
    path: str
    n_threads: int
    tests: tuple[Test, ...]
    budget_mb: int | None = None  # for QSF; None: none
    cap_mb: int | None = None  # of the memory control group; None: no group
    kv_type: str | None = None  # as --kv-type; None: the engine's default
    io: str | None = None  # as --io of qsf-run; None: auto
    is_slow: bool = False

    @property
    def setting(self) -> str:
        """Threads and limits in words."""
        return setting_words(self.n_threads, self.budget_mb, self.cap_mb)

    def as_json(self) -> dict[str, Any]:
        """Return the input of `parse_task`; each test has ``name`` and ``ctx_tokens`` too."""
        record = asdict(self)
        record["tests"] = [
            asdict(test) | {"name": test.name, "ctx_tokens": test.ctx_tokens} for test in self.tests
        ]
        return record


def parse_task(record: dict[str, Any]) -> Task:
    """Return the task from the output of `Task.as_json`."""
    tests = tuple(Test(t["kind"], t["n_tokens"], t["depth"], t["is_even"]) for t in record["tests"])
    return Task(**(record | {"tests": tests}))


@dataclass(frozen=True, slots=True)
class TestRun:
    """The times of one test in one process.

    ``wall_ns`` is the time of the timed loop. ``parts`` divides it, for QSF: ``phase_*`` are the
    engine's phases of the computing thread (``qsf_phase``), ``sample`` is choosing tokens,
    ``python`` is the time between calls of the engine. ``beside`` is work of other threads at the
    same time: ``read``, ``checksum``.
    """

    __test__: ClassVar[bool] = False

    name: str
    depth: int
    n_tokens: int
    wall_ns: int
    parts: dict[str, int] = field(default_factory=dict)  # ns
    beside: dict[str, int] = field(default_factory=dict)  # ns
    n_passes: int = 0  # over the weights
    read_bytes: int | None = None  # of weights, by the engine's count
    n_expert_uses: int = 0
    n_expert_hits: int = 0  # experts in memory when they were chosen
    disk_bytes: int | None = None  # all reads of the process, by the kernel's count (/proc/self/io)


@dataclass(frozen=True, slots=True)
class Cap:
    """The kernel's counts of a memory control group; of a row, the worst of all rounds."""

    limit_mb: int
    peak_bytes: int | None  # of the group, page cache included
    n_oom_kills: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a measured process."""

    version: str  # of the engine, such as "QSF 0.1.0" or "llama.cpp 0.3.36"
    kernels: str  # as the engine names them, such as "amx" or "CPU_REPACK:604.45 CPU:71.78"
    kv_type: str  # such as "4bit" or "f16"
    n_vocab: int
    load_seconds: float
    peak_rss_bytes: int  # VmHWM at the end, as the process sees itself
    tests: list[TestRun]
    plan: dict[str, Any] = field(default_factory=dict)  # QSF's memory plan of the last test
    io: str = ""  # QSF: how weights are read, such as "direct x4"
    failure: str = ""  # why tests are missing

    def as_json(self) -> dict[str, Any]:
        """Return the input of `parse_answer`."""
        return asdict(self)


def parse_answer(record: dict[str, Any], task: Task) -> Answer:
    """Return the answer to the task from the output of `Answer.as_json`.

    Raises ValueError, KeyError, TypeError or AttributeError for anything else, such as other tests
    than the task's, or missing ones without a failure.
    """
    answer = Answer(**(record | {"tests": [TestRun(**test) for test in record["tests"]]}))
    wanted = [(test.name, test.depth) for test in task.tests]
    done = [(run.name, run.depth) for run in answer.tests]
    if done != wanted[: len(done)] or (len(done) < len(wanted) and not answer.failure):
        raise ValueError(f"tests {done}, asked for {wanted}")
    for run in answer.tests:
        if type(run.wall_ns) is not int or run.wall_ns <= 0:
            raise ValueError(f"{run.name} took {run.wall_ns!r} ns")
    if type(answer.peak_rss_bytes) is not int:
        raise ValueError(f"a peak of {answer.peak_rss_bytes!r} bytes")
    return answer
