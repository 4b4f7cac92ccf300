"""Makes records of qsf.bench: what processes would answer, and results of it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from qsf.native.roofline import Limits
from qsf_bench.judge.results import Results
from qsf_bench.judge.rows import analyse
from qsf_bench.models.facts import FileFacts
from qsf_bench.options import parse
from qsf_bench.request import Request, make_request
from qsf_bench.run.launch import Outcome
from qsf_bench.run.rounds import TaskRuns
from qsf_bench.run.tasks import Answer, Cap, Task, Test, TestRun

PP = Test("pp", 512)
TG = Test("tg", 128)
QSF_FILE = "/models/small-4bit.qsf"
BASELINE_FILE = "/models/small-Q4_K_M.gguf"
LIMITS = Limits(
    memory_gb_per_s={"1": 10.0, "2": 20.0},
    disk_gb_per_s={"direct x1": 1.0, "direct x4": 2.0, "buffered x1": 1.5},
    gmadds_per_s={"1": 1000.0, "2": 2000.0},
)


def facts_of(**changes: Any) -> FileFacts:
    """Return a file of 600 MB for each token, and a billion multiply-adds."""
    facts = FileFacts(
        path=Path(QSF_FILE),
        engine="qsf",
        shape_name="small",
        type="4bit",
        n_weights=1_000_000_000,
        file_bytes=700_000_000,
        tensor_bytes=575_000_000,
        token_bytes=600_000_000,
        token_madds=1_000_000_000,
        head_madds=51_200_000,
        n_layers=10,
        dim=512,
        n_heads=8,
        n_kv_heads=4,
        head_dim=64,
        ffn_dim=1024,
        n_vocab=32000,
        max_tokens=4096,
    )
    return replace(facts, **changes)


def request_of(*models: Path, n_cores: int = 2, **options: Any) -> Request:
    """Return the request of these options; lists and the words of ``baseline`` are repeated."""
    words = [*map(str, models)]
    for name, value in options.items():
        values = value.split() if name == "baseline" else value
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        else:
            for one in values if isinstance(values, list) else [value]:
                words += [flag, str(one)]
    return make_request(parse(words, "version"), n_cores=n_cores)


def run_of(test: Test, rate: float, **changes: Any) -> TestRun:
    """Return a run at ``rate`` tok/s."""
    wall_ns = round(test.n_tokens / rate * 1e9)
    known: dict[str, Any] = {
        "name": test.name,
        "depth": test.depth,
        "n_tokens": test.n_tokens,
        "wall_ns": wall_ns,
        "n_passes": 2 if test.kind == "pp" else test.n_tokens,
    }
    return TestRun(**(known | changes))


def answer_of(runs: Sequence[TestRun], **changes: Any) -> Answer:
    """Return the answer of a QSF that holds its weights in memory."""
    answer = Answer(
        version="QSF 0.1.0",
        kernels="avx2",
        kv_type="4bit",
        n_vocab=32000,
        load_seconds=1.0,
        peak_rss_bytes=700 << 20,
        tests=list(runs),
        plan={"streamed_bytes": 0},
    )
    return replace(answer, **changes)


def measured_of(
    engine: str,
    rounds: Sequence[Sequence[TestRun] | None],
    *,
    tests: Sequence[Test] = (PP, TG),
    facts: FileFacts | None = None,
    answer: Mapping[str, Any] | None = None,
    caps: Sequence[Cap] = (),
    **more: Any,
) -> TaskRuns:
    """Return what rounds gave; None: the process of that round gave nothing."""
    is_qsf = engine == "qsf"
    changes: dict[str, Any] = {} if is_qsf else {"version": "llama.cpp 1", "kv_type": "f16"}
    changes |= dict(answer or {})
    path = QSF_FILE if is_qsf else BASELINE_FILE
    known: dict[str, Any] = {"n_threads": 2, "tests": tuple(tests), "path": path} | more
    task = Task(engine, **known)
    return TaskRuns(
        task,
        facts or facts_of(type="4bit" if is_qsf else "Q4_K_M"),
        [
            None if runs is None else Outcome(task, answer_of(runs, **changes), "", 720 << 20, cap)
            for runs, cap in zip_longest(rounds, caps[: len(rounds)])
        ],
    )


def small_results(**machine: Any) -> Results:
    """Return a whole result: both engines, in memory and in a group, one failure."""
    parts = {"attention": 0.3, "ffn": 0.6, "sample": 0.1}

    def qsf_runs(scale: float) -> list[TestRun]:
        runs = [run_of(PP, 500 * scale), run_of(TG, 25 * scale)]
        return [
            replace(run, parts={name: round(part * run.wall_ns) for name, part in parts.items()})
            for run in runs
        ]

    def baseline_runs(scale: float) -> list[TestRun]:
        return [run_of(PP, 125 * scale), run_of(TG, 10 * scale)]

    scales = (1.0, 0.96, 1.04)
    streamed = {"plan": {"streamed_bytes": 500_000_000}, "io": "direct x4"}
    capped: dict[str, Any] = {"tests": [TG], "cap_mb": 300, "caps": 3 * [Cap(300, 290 << 20, 0)]}
    measured = [
        measured_of("qsf", [qsf_runs(scale) for scale in scales]),
        measured_of("llama.cpp", [baseline_runs(scale) for scale in scales]),
        measured_of(
            "qsf", [[run_of(TG, 3 * s)] for s in scales], answer=streamed, budget_mb=300, **capped
        ),
        measured_of("llama.cpp", [[run_of(TG, 0.5 * s)] for s in scales], **capped),
    ]
    measured[1].failures["killed by signal 9"] = 1
    found = analyse(measured, LIMITS, [(QSF_FILE, BASELINE_FILE)])
    known = {"cpu": "Processor X", "n_cores": 2, "isa": "avx2", "isa_available": ["avx2"]}
    known |= {"commit": "abc1234", "date": "2026-01-02T03:04:05+00:00", "baseline": "llama.cpp 1"}
    return Results(
        known | machine,
        LIMITS,
        found.rows,
        found.ratios,
        found.failures,
        found.notes,
        {"rounds": 3},
    )
