# SPDX-License-Identifier: Apache-2.0
"""llama.cpp for qsf.bench: how it is found and built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qsf_bench.run import baseline

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
