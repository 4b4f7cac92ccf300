# SPDX-License-Identifier: Apache-2.0
"""llama.cpp for qsf.bench: how it is found and built, and llama-bench programs of the user."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsf_bench.run import baseline
from qsf_bench.run.launch import run_task
from qsf_bench.run.tasks import Task, Test

# ---- building ----


def fake_compilers(folder: Path, patch: pytest.MonkeyPatch, **versions: str) -> None:
    """Put compilers of these versions on the PATH, and no others."""
    for name, version in versions.items():
        for command in (name, name.replace("clang", "clang++")):
            path = folder / command.replace("_", "-")
            path.write_text(f"#!/bin/sh\necho {version}\n")
            path.chmod(0o755)
    patch.setenv("PATH", str(folder))


NO_AMX = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"


@pytest.mark.parametrize(
    ("compilers", "has_amx", "expected"),
    [
        ({"gcc": "12.2.0"}, False, ["", "-DGGML_NATIVE=ON"]),
        ({"gcc": "13"}, True, ["", "-DGGML_NATIVE=ON"]),
        (
            {"gcc": "12.2.0", "clang": "14.0.6"},
            True,
            [
                "",
                f"-DGGML_NATIVE=ON -DCMAKE_C_FLAGS='{NO_AMX}' -DCMAKE_CXX_FLAGS='{NO_AMX}'",
            ],
        ),
        (
            {"gcc": "12.2.0", "clang": "14.0.6", "clang_16": "16.0.6", "clang_19": "19.1.7"},
            True,
            ["clang-19", "-DGGML_NATIVE=ON"],
        ),
        ({"clang": "17.0.1"}, True, ["clang", "-DGGML_NATIVE=ON"]),
    ],
)
def test_the_best_compiler_builds_it(
    compilers: dict[str, str],
    has_amx: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    project_root: Path,
) -> None:
    """With something else in the place of the interpreter."""
    script = [shutil.which("bash") or "bash", str(project_root / "tools" / "build_baseline.sh")]
    for tool in ("bash", "cut", "grep"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    (tmp_path / "cpuinfo").write_text("flags: fpu amx_tile" if has_amx else "flags: fpu")
    python = tmp_path / "a b"
    python.write_text('#!/bin/sh\necho "$CC"; echo "$CMAKE_ARGS"; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    fake_compilers(tmp_path, monkeypatch, **compilers)
    monkeypatch.setenv("CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.delenv("CC", raising=False)
    done = subprocess.run([*script, str(python)], stdout=subprocess.PIPE, text=True, check=True)
    _, *found = done.stdout.splitlines()
    assert found[:2] == expected
    assert found[-4:] == ["--no-binary", "llama-cpp-python", "llama-cpp-python", "gguf"]


# ---- finding ----

MODULE = """
__version__ = '4.5'
def llama_backend_init(): print('hello')
def llama_print_system_info(): return b'CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 0 | X'
"""


def test_it_is_found_with_its_compiler_and_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE)
    made = b"\0GCC: (Debian 12.2.0-14) 12.2.0\0"
    (package / "lib" / "libggml-cpu.so").write_bytes(made)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = baseline.find_baseline()
    assert found == baseline.Baseline(sys.executable, "4.5", "gcc 12.2.0", "AVX2 AVX512")
    assert found.words == "llama.cpp 4.5, built by gcc 12.2.0, AVX2 AVX512"
    (package / "lib" / "libggml-cpu.so").write_bytes(made + b"Debian clang version 19.1.7 (3)\0")
    assert baseline.find_baseline().compiler == "clang 19.1.7"
    (package / "__init__.py").write_text("raise ImportError(\"No module named 'llama_cpp'\")")
    with pytest.raises(baseline.BaselineMissingError, match=r"has no llama-cpp-python: `make base"):
        baseline.find_baseline()


# ---- llama-bench ----

TESTS = (Test("pp", 512), Test("tg", 16), Test("pp", 512, 64), Test("tg", 16, 64))


def task(program: Path | str, **changes: Any) -> Task:
    known: dict[str, Any] = {"engine": "ik", "path": "m.gguf", "n_threads": 2, "tests": TESTS}
    return Task(**(known | changes), program=str(program))


def record(n_prompt: int, n_gen: int, n_depth: int, **changes: Any) -> dict[str, Any]:
    known = {
        "build_commit": "abc123",
        "build_number": 42,
        "backends": "CPU",
        "model_filename": "/x/m.gguf",
        "model_n_params": 1000,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "avg_ns": 10**9 + n_prompt + n_gen + n_depth,
        "samples_ns": [10**9],
    }
    return known | changes


ALL = [record(n, g, d) for d in (0, 64) for n, g in ((512, 0), (0, 16))]


def llama_bench_in(folder: Path, records: Any) -> Path:
    """Write a script that stands for a llama-bench; returns its path."""
    (folder / "answer.json").write_text(
        records if isinstance(records, str) else json.dumps(records)
    )
    path = folder / "llama-bench"
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/arguments\n'
        f"echo loading; cat {folder}/answer.json; echo done\n"
    )
    path.chmod(0o755)
    return path


def run(folder: Path, records: Any, *, n_weights: int = 1000, **changes: Any) -> Any:
    given = task(llama_bench_in(folder, records), **changes)
    return run_task(given, sys.executable, n_weights=n_weights)


def test_a_llama_bench_answers_by_its_json(tmp_path: Path) -> None:
    outcome = run(tmp_path, ALL)
    assert outcome.why == ""
    assert [(t.name, t.depth, t.wall_ns - 10**9) for t in outcome.answer.tests] == [
        *(("pp512", 0, 512), ("tg16", 0, 16), ("pp512", 64, 576), ("tg16", 64, 80))
    ]
    assert outcome.answer.version == "ik abc123 (42)"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments == [
        "-m",
        "m.gguf",
        "-t",
        "2",
        "-r",
        "1",
        "-o",
        "json",
        "-p",
        "512",
        "-n",
        "16",
        "-d",
        "0,64",
    ]


def test_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    outcome = run(tmp_path, ALL, n_weights=1_100_048_384)
    assert outcome.answer is None
    assert "measured a model of 1,000 weights (m.gguf), but m.gguf has 1,100,048,384" in outcome.why


def test_a_llama_bench_that_fails_or_is_none_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "llama-bench"
    path.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    path.chmod(0o755)
    assert run_task(task(path), sys.executable).why == "ended with 1: no such model"
    assert "cannot be started" in run_task(task(tmp_path / "absent"), sys.executable).why
