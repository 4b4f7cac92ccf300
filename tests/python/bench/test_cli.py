# SPDX-License-Identifier: Apache-2.0
"""python -m qsf.bench as a user types it: what it writes, says, refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from make.bench_baselines import baseline_python
from make.bench_commands import SMALL, bench
from make.bench_records import small_results
from qsf.shell.command import StoppedError
from qsf_bench import campaign, cli
from qsf_bench.campaign import Outputs
from qsf_bench.judge import results
from qsf_bench.judge.results import Results
from qsf_bench.models.random_gguf import write_model as write_gguf
from qsf_bench.models.shapes import shape_of_file
from qsf_bench.request import Request
from qsf_bench.run.memory_group import CapError, memory_group

ONE = ("--shape", "tiny", "--quant", "4bit", *SMALL)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random weights are kept."""
    return tmp_path_factory.mktemp("random")


def check_refused(done: subprocess.CompletedProcess[str], code: int, said: str) -> None:
    """One line with ``said`` in it, and nothing on standard output."""
    assert said in done.stderr
    assert (done.returncode, done.stdout) == (code, "")
    *_, last = done.stderr.splitlines()
    assert last.startswith("python -m qsf.bench: error: ")


# ---- a run ----


def test_a_run_as_a_user_types_it(cache: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("a.json", "a.html")]
    given = zip(("--json", "--html"), outputs, strict=True)
    options = [word for pair in given for word in pair]
    done = bench(*ONE, "--baseline", "none", "--cache", cache, *options)
    assert done.returncode == 0
    assert "making random weights, tiny, qsf 4bit" in done.stderr
    assert done.stderr.endswith(f"written: {', '.join(map(str, outputs))}\n")
    assert "qsf 4bit" in done.stdout
    assert "pp8" in done.stdout
    assert "Failed" not in done.stdout

    known = json.loads(outputs[0].read_text())
    assert known["machine"]["command"].startswith("python -m qsf.bench --shape tiny")
    assert str(tmp_path) not in outputs[0].read_text()
    assert {"cpu", "isa_available", "qsf", "python"} <= set(known["machine"])
    assert known["limits"]["memory_gb_per_s"] == {"1": 10.0}
    assert known["limits"]["disk_gb_per_s"] == {"direct x1": 1.0}
    assert [row["test"] for row in known["rows"]] == ["pp8", "tg4"]
    wanted = "engine shape type bits_per_weight file_bytes threads test depth budget_mb tok_per_s"
    for row in known["rows"]:
        assert {*wanted.split(), "peak_rss_bytes", "fraction_of_limit"} <= set(row)
        assert {"median", "min", "max"} <= set(row["tok_per_s"])
        assert (row["engine"], row["shape"], row["budget_mb"]) == ("qsf", "tiny", None)
        assert row["fraction_of_limit"] > 0
    assert known["ratios"] == []
    assert results.read(outputs[0]).rows[0].test == "pp8"

    assert outputs[1].read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]


@pytest.mark.slow
def test_a_run_with_nothing_put_aside(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    options = ["--baseline", "none", "--cache", str(cache), "--json", str(out), "-q"]
    command = [sys.executable, "-m", "qsf.bench", *ONE, *options]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    found = results.read(out)
    assert found.limits.memory_gb_per_s["1"] > 0
    assert [row.test for row in found.rows] == ["pp8", "tg4"]


def test_the_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m qsf.bench [OPTIONS] [MODEL.qsf]...\n")
    assert max(map(len, said.splitlines())) <= 80
    for line in (
        "Examples:",
        "  python -m qsf.bench\n",
        "Shapes: tiny, gpt2",
        "Types: ",
    ):
        assert f"\n{line}" in said


def test_the_examples_of_the_help_are_understood(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run(["--help"])
    said = capsys.readouterr().out
    lines = said.split("Examples:")[1].split("Shapes:")[0].splitlines()
    examples = [line.split()[3:] for line in lines if line.strip()]
    assert len(examples) == 5
    asked: list[Request] = []

    def note(request: Request, *_: Any, **__: Any) -> Outputs:
        asked.append(request)
        return Outputs(small_results(), False)

    monkeypatch.setattr(campaign, "run", note)
    monkeypatch.setattr(cli, "print_report", lambda *_: None)
    monkeypatch.setattr(cli, "check_outputs", lambda *_: None)
    monkeypatch.setattr(cli, "write_outputs", lambda *_: [])
    for example in examples:
        assert cli.run(example) == 0, capsys.readouterr().err
    assert [request.shapes for request in asked[:3]] == [("tinyllama-1.1b",), (), ("llama2-7b",)]
    assert [setting.budget_mb for setting in asked[3].settings[::2]] == [None, 400, 200]


# ---- what it writes, and how it ends ----


class Ran:
    """A run whose results are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.found = Outputs(small_results(), False)
        self.n_runs = 0
        self._folder = folder
        monkeypatch.setattr(campaign, "run", self._run)

    def _run(self, *_: Any, **__: Any) -> Outputs:
        self.n_runs += 1
        return self.found

    def __call__(self, *options: str | Path) -> int:
        return cli.run(["--shape", "tiny", *map(str, options)])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    return Ran(monkeypatch, tmp_path)


def test_exit_codes(ran: Ran) -> None:
    assert ran() == 0
    ran.found = replace(ran.found, is_incomplete=True)
    assert ran() == 1
    assert ran("--threads", "0") == 2


def test_an_interruption_of_the_report_does_not_lose_the_results(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise StoppedError(signal.SIGINT)

    monkeypatch.setattr(cli, "print_report", stop)
    assert ran("--json", tmp_path / "a.json") == 130
    assert "interrupted; the report is cut off" in capsys.readouterr().err
    assert results.read(tmp_path / "a.json").rows


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_an_output_that_exists_is_refused_before_the_work(
    ran: Ran, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    assert ran(option, out) == 2
    assert "out exists; --force replaces it" in capsys.readouterr().err
    assert (ran.n_runs, out.read_text()) == (0, "precious")
    assert ran(option, out, "--force") == 0
    assert out.read_text() != "precious"
    assert list(tmp_path.iterdir()) == [out]


def test_outputs_that_would_fail_or_destroy_are_refused_before_the_work(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.qsf"
    model.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(model)

    def refused(code: int, said: str, *options: str | Path) -> None:
        assert cli.run([*map(str, options), "--force"]) == code
        assert said in capsys.readouterr().err

    a = tmp_path / "a"
    refused(1, "no such directory", "--json", tmp_path / "absent" / "a.json")
    refused(1, "is a directory", "--html", tmp_path)
    refused(2, "need names of their own", "--json", a, "--html", tmp_path / "." / "a")
    refused(2, "is read as well", model, "--json", model)
    refused(2, "is read as well", model, "--json", link)
    assert (ran.n_runs, model.read_text()) == (0, "precious")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(("where", "code"), [("pipe", 0), ("full disk", 1)])
def test_a_report_that_nobody_takes_is_written_all_the_same(
    ran: Ran,
    tmp_path: Path,
    where: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Into a pipe whose reader has left, and onto a full disk."""
    reader, writer = os.pipe()
    os.close(reader)
    out = tmp_path / "a.json"
    with os.fdopen(writer, "w") as pipe, Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", pipe if where == "pipe" else full)
        assert ran("--json", out) == code
    assert results.read(out).rows
    assert ("No space left on device" in capsys.readouterr().err) == (code == 1)


# ---- the baseline ----


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [False, True])
def test_the_real_baseline_beside_a_model(
    tiny_llama_8bit: Path, tmp_path: Path, *, has_file: bool
) -> None:
    out, gguf = tmp_path / "a.json", tmp_path / "baseline.gguf"
    options: list[str | Path] = ["--baseline-python", baseline_python(), "--cache", tmp_path]
    if has_file:
        write_gguf(gguf, shape_of_file(tiny_llama_8bit), "Q8_0", seed=0)
        options += ["--baseline-model", gguf]
    done = bench(tiny_llama_8bit, *SMALL, *options, "--baseline", "llama.cpp", "--json", out)
    assert done.returncode == 0, done.stderr
    found = results.read(out)
    assert [row.engine for row in found.rows] == ["qsf", "qsf", "llama.cpp", "llama.cpp"]
    assert len(found.ratios) == 2


# ---- what takes longer ----


@pytest.mark.slow
def test_a_run_in_a_control_group(tmp_path: Path, cache: Path) -> None:
    try:
        with memory_group(32 << 20):
            pass
    except CapError as error:
        pytest.skip(str(error))
    out = tmp_path / "a.json"
    options: list[str | Path] = [*ONE, "--baseline", "none", "--cache", cache]
    done = bench(*options, "--cgroup", "100M", "--json", out)
    assert done.returncode == 0, done.stderr
    found: Results = results.read(out)
    for row in found.rows:
        assert row.cap is not None
        assert (row.cap.limit_mb, row.cap.n_oom_kills, row.budget_mb) == (100, 0, 100)
        assert row.cap.peak_bytes is not None
        # What was cached before the run is not charged: the file must have been read in the group.
        assert row.file_bytes < row.cap.peak_bytes <= 100 << 20
    assert found.settings["caches"] == "dropped before runs that stream or are in a cgroup"
    done = bench(*options, "--cgroup", "3M")
    check_refused(done, 1, "out of memory in its group of 3 MB")
