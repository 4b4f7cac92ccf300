# SPDX-License-Identifier: Apache-2.0
"""The measured processes of qsf.bench: what they evaluate, what they time, what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qsf.native import binding
from qsf_bench.run import launch, tasks, worker_llama


def tokens_of(n_tokens: int, *, is_even: bool = False) -> list[int]:
    return list(worker_llama.tokens_of(n_tokens, 100, is_even=is_even))


# ---- what is evaluated ----


@pytest.mark.parametrize("is_even", [False, True])
def test_tokens_are_as_many_as_asked_for_and_in_the_vocabulary(is_even: bool) -> None:
    for n_tokens, n_vocab in ((0, 10), (1, 1), (128, 512), (512, 32000)):
        tokens = worker_llama.tokens_of(n_tokens, n_vocab, is_even=is_even)
        assert len(tokens) == n_tokens
        assert all(token < n_vocab for token in tokens)
    assert len(set(worker_llama.tokens_of(128, 32000, is_even=is_even))) > 100


def test_tokens_are_a_run_of_one_half_or_any_of_the_other() -> None:
    run = tokens_of(40)
    assert [b - a for a, b in pairwise(run)] == [1] * 39 or max(run) == 49
    assert max(run) < 50 <= min(tokens_of(40, is_even=True))


def qsf_task(*tests: tasks.Test, path: str = "m.qsf", **options: Any) -> tasks.Task:
    return tasks.Task("qsf", path, 2, tests, **options)


# ---- real models ----


def test_a_real_model_is_measured(tiny_llama_4bit: Path, tmp_path: Path) -> None:
    tests = (tasks.Test("pp", 20), tasks.Test("tg", 4), tasks.Test("tg", 3, depth=17))
    out = tmp_path / "answer"
    task = qsf_task(*tests, path=str(tiny_llama_4bit))
    command = [sys.executable, "-m", "qsf_bench.run.worker_qsf", json.dumps(task.as_json())]
    subprocess.run(command, env=os.environ | {tasks.ANSWER_VARIABLE: str(out)}, check=True)
    answer = tasks.parse_answer(json.loads(out.read_text("utf-8")), task)
    assert [(run.name, run.depth) for run in answer.tests] == [("pp20", 0), ("tg4", 0), ("tg3", 17)]
    assert [run.n_passes for run in answer.tests] == [1, 4, 3]
    for run in answer.tests:
        phases_ns = sum(ns for part, ns in run.parts.items() if part.startswith("phase_"))
        assert 0 < phases_ns <= run.wall_ns - run.parts["python"]
    assert answer.version == f"QSF {binding.version()}"
    assert answer.plan["ctx_tokens"] == 21
    assert answer.peak_rss_bytes > 1 << 20
    assert answer.load_seconds > 0
    assert answer.failure == ""


def test_the_measured_process_imports_little() -> None:
    """As test_lean.py asks of qsf-run: its memory is compared with that of others."""
    unwanted = "numpy lz4 typer rich subprocess tempfile logging asyncio concurrent qsf_converter"
    program = (
        "import sys, qsf_bench.run.worker_qsf; "
        "print(*(n for n in sys.argv[1:] if n in sys.modules))"
    )
    command = [sys.executable, "-c", program, *unwanted.split()]
    assert subprocess.check_output(command, text=True).split() == []


# ---- llama.cpp ----


def test_the_baseline_finds_no_modules_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by its path, Python would look into qsf/bench for `trace`, `results` or `tasks`."""
    (tmp_path / "llama_cpp.py").write_text("import tasks\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = tasks.Task("llama.cpp", str(tmp_path), 1, (tasks.Test("tg", 1),))
    outcome = launch.run_task(task, sys.executable)
    assert "No module named 'tasks'" in outcome.why
