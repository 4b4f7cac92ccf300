"""Commands started as a user types them: ``qsf-run`` as a process, those of typer in this one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


def _in(folder: Path, command: list[str]) -> Run:
    """Return what runs a command in a folder where only the installed package can be found."""

    def call(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            cwd=folder,
            timeout=120,
            check=False,
        )

    return call


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``qsf-run`` in an empty folder."""
    return _in(tmp_path, COMMAND)


@pytest.fixture
def qsf(tmp_path: Path) -> Run:
    """Run ``qsf`` in an empty folder."""
    return _in(tmp_path, [sys.executable, "-m", "qsf"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command; whatever happens, it does not outlive the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def call(*arguments: object) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        command = [*COMMAND, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=tmp_path)
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
    assert lines[0].startswith("qsf-run: error: ")
    assert said in lines[0]
