"""Standard output loses nothing: pipes that do not wait, slow readers, containers' settings."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from qsf.shell import progress
from qsf_converter.cli import _Progress

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
    assert lines[0].startswith("measuring the arithmetic, once, ")
    assert [line.split(", ")[-2] for line in lines[1:]] == [
        "1022 of 2044 tokens", "1024 of 4096 tokens", "4096 of 4096 tokens",
    ]  # fmt: skip
    assert all(line.endswith("tokens/s") for line in lines[1:])
