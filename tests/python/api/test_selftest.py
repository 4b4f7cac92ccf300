# SPDX-License-Identifier: Apache-2.0
"""``python -m qsf.selftest`` as a person runs it, and what it says where something differs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from make.refusals import table
from qsf import selftest
from qsf.native import binding
from qsf.system import process


def test_this_machine_passes() -> None:
    done = subprocess.run([sys.executable, "-m", "qsf.selftest"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert rows["result"].strip() == "all passed"
    for isa in binding.describe_machine().isa_available:
        assert rows[f"bits, {isa}"].strip() == "ok"
    assert rows["budget, 64 MB"].strip() == "ok"
    assert rows["reading, buffered"].strip() == rows["budget, least"].strip() == "ok"
    assert "GB/s" in rows["speed, memory"]


@pytest.mark.parametrize(("words", "verdict"), table("tables")["selftest"])
def test_what_differs_is_said(words: str, verdict: str) -> None:
    assert selftest._verdict("avx2", words) == verdict


def test_a_trial_that_cannot_run_is_a_failure() -> None:
    assert selftest._judge("avx1024", None, "auto").startswith("FAILED: ")
    assert "not measured: " in selftest._judge(None, 1, "auto")  # 1 MB


def test_only_an_emulator_is_taken_for_one() -> None:
    assert process.emulator_name() == "-"
    program = [
        sys.executable,
        "-c",
        "from qsf.system import process; print(process.emulator_name())",
    ]
    if (qemu := shutil.which("qemu-x86_64")) is None:
        pytest.skip("no qemu-x86_64")
    done = subprocess.run([qemu, *program], capture_output=True, text=True)
    assert done.stdout == "qemu-x86_64\n", done.stderr
