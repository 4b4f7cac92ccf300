# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM in python -m qsf.bench: what is kept, and what is left behind: nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from make.bench_commands import SMALL, Running
from qsf_bench.judge import results


def left_behind(*folders: Path) -> list[str]:
    """Names of temporary files."""
    names = [path.name for folder in folders if folder.exists() for path in folder.iterdir()]
    return [name for name in names if "partial" in name or name.startswith("qsf-bench-")]


def test_ctrl_c_while_a_model_is_made_leaves_no_half_of_it(tmp_path: Path) -> None:
    options = ["--shape", "llama-110m", "--quant", "8bit", *SMALL, "--baseline", "none"]
    with Running(*options, "--cache", tmp_path / "cache", folder=tmp_path) as running:
        running.wait_for("making random weights")
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 130
        assert running.said.endswith("error: interrupted; nothing was written\n")
    assert list((tmp_path / "cache").iterdir()) == []
    assert left_behind(tmp_path) == []


# The second process of a run hangs, and says who it is.
HANGS = """
from qsf_bench.run import launch
n_started = 0
real = launch.worker_of
def worker_of(task):
    global n_started
    n_started += 1
    return real(task) if n_started == 1 else ["-c", '''
import os, pathlib, time
pathlib.Path("PIDFILE.new").write_text(str(os.getpid()))
os.replace("PIDFILE.new", "PIDFILE")
time.sleep(100)
''']
launch.worker_of = worker_of
"""


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        pytest.param([signal.SIGTERM], 143, marks=pytest.mark.slow),
        pytest.param([signal.SIGHUP], 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_the_rounds_keeps_what_was_measured(
    tiny_llama_8bit: Path, tmp_path: Path, numbers: list[signal.Signals], code: int
) -> None:
    pid_file, out = tmp_path / "pid", tmp_path / "a.json"
    options: list[str | Path] = [tiny_llama_8bit, *SMALL[:-1], "10"]
    patch = HANGS.replace("PIDFILE", str(pid_file))
    options += ["--baseline", "none", "--json", out]
    with Running(*options, patch=patch, folder=tmp_path) as running:
        running.wait_for("10%")
        while not pid_file.exists():
            assert running.process.poll() is None
        for number in numbers:
            running.process.send_signal(number)
        assert running.end() == code
        # A second signal may come while the report is printed already; the file is whole then too.
        is_cut_off = len(numbers) > 1 and "the report is cut off" in running.said
        if not is_cut_off:
            assert "the report has what was measured until then" in running.said
            assert "before all rounds were done" in running.output
    assert [len(row.tok_per_s.values) for row in results.read(out).rows] == [1, 1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert left_behind(tmp_path) == []
