"""Commands as a user types them: in this process, or as one of their own where that matters."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qsf.shell import entry

PROMPT = "Once upon a time"


COMMAND = [sys.executable, "-m", "qsf.cli.run.main"]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


Start = Callable[..., "subprocess.Popen[bytes]"]


Here = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """Run a command of typer in this process, ``qsf-convert`` unless told: no second of a start."""

    def call(
        *arguments: object, command: Callable[[list[str]], int] | None = None
    ) -> subprocess.CompletedProcess[str]:
        from qsf_converter import cli  # what it imports is not for every test

        words = [*map(str, arguments)]
        code = (command or cli.run)(words)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return call


def _with_budget(words: list[str]) -> list[str]:
    """No limit unless told: the process of the tests is larger than the usual budget."""
    verb = words[0] if words and words[0] in entry.VERBS else "run"
    has_budget = verb in ("run", "chat", "eval", "embed") and len(words) > 1
    return [*words, "--ram-budget", "0"] if has_budget and "--ram-budget" not in words else words


@pytest.fixture
def qsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``qsf`` in this process and in an empty folder: no second of a start."""
    monkeypatch.setattr(entry, "_leave_on_signals", lambda: None)

    def call(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        words = _with_budget([*map(str, arguments)])
        code: object = 0
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file, monkeypatch.context() as patch:
            file.write(stdin)
            file.seek(0)
            patch.chdir(tmp_path)
            patch.setattr(sys, "stdin", file)
            patch.setattr(sys, "argv", ["qsf", *words])
            try:
                entry.front()
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return call


@pytest.fixture
def run(qsf: Run) -> Run:
    """Run ``qsf run`` in this process and in an empty folder."""

    def call(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return qsf("run", *arguments, stdin=stdin)

    return call


@pytest.fixture
def process(tmp_path: Path) -> Run:
    """Run ``qsf`` as a process of its own, in an empty folder."""

    def call(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "qsf", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            cwd=tmp_path,
            timeout=120,
            check=False,
        )

    return call


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command; whatever happens, it does not outlive the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def call(*arguments: object) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        command = [*COMMAND, *map(str, arguments)]
        # Without buffers: what they hold, communicate() would not see.
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=tmp_path, bufsize=0
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        with process:  # closes the pipes and waits
            process.kill()


def check_refused(done: subprocess.CompletedProcess[str], code: int, said: str) -> None:
    """One line on standard error, nothing on standard output, no traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(("qsf-run: error: ", "qsf run: error: "))
    assert said in lines[0]
