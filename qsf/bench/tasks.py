"""What a measured process is told and what it answers: JSON in both directions.

`worker_llama` runs in a Python that need not have QSF, so it knows these records by their keys.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

Engine = Literal["qsf", "llama.cpp"]
ENGINES: tuple[Engine, ...] = ("qsf", "llama.cpp")

ANSWER_VARIABLE = "QSF_BENCH_ANSWER"
"""The environment variable that names the file for the answer: stdout is anybody's."""


@dataclass(frozen=True, slots=True)
class Test:
    """One thing that is timed, named as llama-bench does.

    ``pp``: a prompt of ``n_tokens`` after ``depth`` others, of which only the last one's logits are
    wanted. ``tg``: ``n_tokens`` one at a time after ``depth`` others, and a token is chosen
    (greedily) after each; the tokens that are fed are given, so both engines get the same.
    """

    __test__: ClassVar[bool] = False  # pytest takes names that begin with Test for its own

    kind: Literal["pp", "tg"]
    n_tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        """Such as ``pp512``; the depth is apart."""
        return f"{self.kind}{self.n_tokens}"

    @property
    def words(self) -> str:
        """The name, with the depth if there is one: ``tg128 @ 2048``."""
        return f"{self.name} @ {self.depth}" if self.depth else self.name

    @property
    def ctx_tokens(self) -> int:
        """The least context in which it fits: a warm-up of ``tg`` is one token more."""
        return self.depth + self.n_tokens + (1 if self.kind == "tg" else 0)


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does: it opens a file and runs tests on it, each after a warm-up.

    The warm-up of ``pp`` is the same prompt, of ``tg`` one token; where a model is streamed and
    passes take seconds, ``is_slow`` makes the warm-up of ``pp`` one pass of a single token.
    """

    engine: Engine
    path: str
    n_threads: int
    tests: tuple[Test, ...]
    budget_mb: int | None = None  # of QSF; None: none
    cap_mb: int | None = None  # of the memory control group; None: not in one
    kv_type: str | None = None  # as --kv-type; None: the engine's default
    io: str | None = None  # as --io of qsf-run; None: auto
    ctx_tokens: int | None = None  # None: each test's own
    is_slow: bool = False
    trace_events: int = 0  # so many of the last test at most; 0: no trace

    def as_json(self) -> dict[str, Any]:
        """Return what `parse_task` reads; each test has ``name`` and ``ctx_tokens`` too."""
        known = asdict(self)
        known["tests"] = [
            asdict(test) | {"name": test.name, "ctx_tokens": test.ctx_tokens} for test in self.tests
        ]
        return known


def parse_task(known: dict[str, Any]) -> Task:
    """Return the task of `Task.as_json`."""
    tests = tuple(Test(t["kind"], t["n_tokens"], t["depth"]) for t in known["tests"])
    return Task(**(known | {"tests": tests}))


@dataclass(frozen=True, slots=True)
class TestRun:
    """What one test of one process took.

    Times are of one clock. ``wall_ns`` is that of the timed loop; ``parts`` say, for QSF, where it
    went, measured apart: ``phase_*`` are the engine's phases of the computing thread
    (``qsf_phase``), ``sample`` choosing tokens, ``python`` what passed between calls of the engine.
    ``beside`` is work of other threads at the same time: ``read``, ``checksum``.
    """

    __test__: ClassVar[bool] = False

    name: str
    depth: int
    n_tokens: int
    wall_ns: int
    engine_ns: int | None = None  # as the engine itself counts: prompt_ns + step_ns
    parts: dict[str, int] = field(default_factory=dict)  # ns
    beside: dict[str, int] = field(default_factory=dict)  # ns
    n_passes: int = 0  # over the weights
    read_bytes: int | None = None  # of weights, by the engine's count
    disk_bytes: int | None = None  # by the kernel's (/proc/self/io), all that the process read


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process found."""

    version: str  # of the engine, such as "QSF 0.1.0" or "llama.cpp 0.3.36"
    kernels: str  # what it says of them, such as "amx" or "CPU_REPACK:604.45 CPU:71.78"
    kv_type: str  # such as "4bit" or "f16"
    n_vocab: int
    n_weights: int
    load_seconds: float
    peak_rss_bytes: int  # VmHWM at the end, as the process sees itself
    tests: list[TestRun]
    plan: dict[str, Any] = field(default_factory=dict)  # QSF's memory plan of the last test
    io: str = ""  # QSF: how weights are read, such as "direct x4"
    trace: list[list[int]] = field(default_factory=list)  # see worker_qsf
    trace_kinds: list[str] = field(default_factory=list)  # names of the kinds in it
    failure: str = ""  # why tests are missing

    def as_json(self) -> dict[str, Any]:
        """Return what `parse_answer` reads."""
        return asdict(self)


def parse_answer(known: dict[str, Any]) -> Answer:
    """Return the answer of `Answer.as_json`. Raises KeyError or TypeError for anything else."""
    tests = [TestRun(**test) for test in known["tests"]]
    return Answer(**(known | {"tests": tests}))
