# SPDX-License-Identifier: Apache-2.0
"""The line that installs llama.cpp: built for this processor, for this Python, for a shell."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qsf.bench import peer


def test_the_peer_is_built_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(flags: str, gcc: int | None) -> str:
        monkeypatch.setattr(peer, "_cpuinfo", lambda: f"processor : 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(peer, "_gcc_major", lambda: gcc)
        return peer.install_command("/a b/python")

    pip = "'/a b/python' -m pip install --no-binary llama-cpp-python llama-cpp-python gguf"
    plain = f"CMAKE_ARGS=-DGGML_NATIVE=ON {pip}"
    without = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
    assert command("fpu avx2", 12) == plain
    assert command("fpu amx_tile_x", 12) == plain
    assert command("fpu amx_bf16 amx_tile amx_int8", 13) == plain
    assert command("fpu amx_tile", None) == plain
    assert command("fpu amx_bf16 amx_tile amx_int8", 12) == (
        f"CMAKE_ARGS=\"-DGGML_NATIVE=ON -DCMAKE_C_FLAGS='{without}' "
        f"-DCMAKE_CXX_FLAGS='{without}'\" {pip}"
    )


def test_the_line_that_installs_the_peer_is_one_for_a_shell(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "qsf.bench.peer"]
    line = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert line == peer.install_command() + "\n"
    # As in the Makefile, with something else in the place of the interpreter.
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$CMAKE_ARGS"; printf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = line.replace(shlex.quote(sys.executable), shlex.quote(str(fake)))
    said = subprocess.run(
        ["sh", "-c", f"eval {shlex.quote(script)}"], capture_output=True, text=True
    )
    flags, *words = said.stdout.splitlines()
    assert flags.startswith("-DGGML_NATIVE=ON")
    assert words == [
        "-m",
        "pip",
        "install",
        "--no-binary",
        "llama-cpp-python",
        "llama-cpp-python",
        "gguf",
    ]
