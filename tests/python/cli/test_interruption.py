"""Ctrl-C and SIGTERM as a user sends them, progress, output that arrives whole."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import qsf
from qsf.shell import command, progress
from qsf.system import signals
from qsf_converter.cli import _Progress

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, pseudo-terminals")

# Stands for a call into the engine: the main thread is in C for a minute, and Python's own
# handlers wait that long.
LONG_CALL = """
import ctypes, os, signal, sys
from qsf.shell import command
from qsf.system import signals

woken_reader, woken_writer = os.pipe()

def on_signal(number):
    print("woken by", number, flush=True)
    os.write(woken_writer, b"x")

def block():
    print("blocking", flush=True)
    one = (ctypes.c_char * 1)()
    # ctypes lets go of the GIL, and unlike os.read starts no handler in between.
    while ctypes.CDLL(None).read(woken_reader, one, 1) < 1:
        pass

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with command.stopped_by_signals(), signals.Watcher(on_signal):
        block()
except command.StoppedError as stopped:
    print(stopped.text)
    sys.exit(stopped.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_is_seen_while_the_main_thread_is_in_a_long_call(
    number: int, code: int, text: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_CALL], stdout=subprocess.PIPE, encoding="utf-8"
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocking\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert said == f"woken by {int(number)}\n{text}\n"
    assert process.returncode == code


# Blocked in the main thread, the signal is noted by the watcher's, as one is noted that comes
# just before a wait: nothing interrupts the wait itself.
WAIT_FOR_INPUT = """
import os, signal, sys
from qsf.shell import command
from qsf.system import signals

try:
    with command.stopped_by_signals(), signals.interruptible_wait():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print("waiting", flush=True)
        os.read(0, 1)
except command.StoppedError as stopped:
    print(stopped.text)
    sys.exit(stopped.exit_code)
"""


def test_a_signal_that_comes_just_before_a_wait_for_input_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_INPUT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
            assert process.stdout.read() == "interrupted\n"
        finally:
            process.kill()


def test_a_watcher_ends_and_leaves_no_thread_and_no_descriptor() -> None:
    n_threads = threading.active_count()
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    for _ in range(20):
        with signals.Watcher(lambda _: None, lambda: None):
            assert threading.active_count() == n_threads + 1
    assert threading.active_count() == n_threads
    after = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(after)
    assert after == before


def test_ctrl_c_while_python_imports_is_no_traceback() -> None:
    # Importing is cut short by a signal to itself, at a place that all of them pass.
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from qsf.shell import entry\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "entry.convert()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_before_the_first_line_of_ours_ends_a_command() -> None:
    """It is pending when Python starts: the scripts of make demo block it until then."""

    def press() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)

    done = subprocess.run(
        [sys.executable, "-m", "qsf", "run", "none.qsf"],
        capture_output=True, timeout=60, check=False, preexec_fn=press,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_nothing_is_imported_before_signals_are_handled() -> None:
    code = (
        "import importlib, os, sys\n"
        "before = set(sys.modules)\n"
        f"sys.path.insert(0, {str(Path(qsf.__file__).parents[1])!r})\n"
        "from qsf.shell import entry\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    isolated = [sys.executable, "-I", "-S", "-c", code]  # site imports some of the same
    done = subprocess.run(isolated, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["__future__", "qsf", "qsf.shell", "qsf.shell.entry"]


# ---- on a terminal ----
def test_progress_comes_after_two_seconds_and_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = command.Progress("reading", is_wanted=True)
    unwanted = command.Progress("reading", is_wanted=False)
    progress.tick()
    assert capsys.readouterr().err == ""
    clock[0] += 3
    progress.update("reading: 3 of 9 tokens")
    progress.tick()
    assert capsys.readouterr().err == "\rreading: 3 of 9 tokens (3 s)\x1b[K"
    progress.end()
    assert capsys.readouterr().err == "\r\x1b[K"
    progress.tick()
    unwanted.tick()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    no_terminal = command.Progress("reading", is_wanted=True)
    clock[0] += 3
    no_terminal.tick()
    assert capsys.readouterr().err == ""


# ---- standard output loses nothing ----


# More than a pipe holds, written by a command's own means; then one piece larger than a pipe.
WRITER = """
import sys
from qsf.shell import command

command.prepare_streams()
for stream in (sys.stdout, sys.stderr):
    for _ in range(900):
        stream.write("x" * 99 + "\\n")
        stream.flush()
    stream.write("\\N{EURO SIGN}" * 50_000)
    stream.flush()
"""
N_BYTES = 900 * 100 + 3 * 50_000


@pytest.mark.parametrize(
    ("name", "is_blocking", "is_unbuffered"),
    [("stdout", False, True), ("stderr", False, False), ("stdout", True, False)],
)
def test_every_byte_arrives(name: str, *, is_blocking: bool, is_unbuffered: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    unbuffered = {"PYTHONUNBUFFERED": "1"} if is_unbuffered else {"PYTHONUNBUFFERED": ""}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: writer}
    environment = {**os.environ, **unbuffered, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", WRITER], env=environment, **streams) as process:  # type: ignore[call-overload]
        os.close(writer)
        n_bytes = 0
        while data := os.read(reader, 4096):
            n_bytes += len(data)
            time.sleep(0.0002)
        assert process.wait(60) == 0
    os.close(reader)
    assert n_bytes == N_BYTES


def test_the_time_left_is_steady() -> None:
    """A task of 100 s whose speed halves now and then: the estimate follows, and does not jump."""
    remaining = progress._Remaining(0.0)
    assert remaining.seconds(0.0, 1.0) is None
    fraction, now, last = 0.0, 0.0, None
    for i in range(90):
        fraction += 0.01 * (0.5 if i % 10 < 3 else 1.2)
        now += 1.0
        left = remaining.seconds(min(fraction, 1.0), now)
        assert left is not None
        if last is not None and i > 10:
            assert abs(left - (last - 1)) < 3.0, i
        last = left


def test_progress_of_a_conversion_counts_tokens_then_what_is_converted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A phase's line is not gone on with, though both may count tokens."""
    shown = _Progress(enabled=True, n_tokens=4096)
    update = shown.begin("measuring the arithmetic")
    update(1022, 2044)
    shown.update(100, 400)
    shown.update(400, 400)
    shown.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("measuring the arithmetic, once; ")
    assert [line.split(", ")[-2] for line in lines[1:]] == [
        "1022 of 2044 tokens", "1024 of 4096 tokens", "4096 of 4096 tokens",
    ]  # fmt: skip
    assert all(line.endswith("tokens/s") for line in lines[1:])
