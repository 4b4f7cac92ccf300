# SPDX-License-Identifier: Apache-2.0
"""python -m qsf.bench for tests: its process, and a machine whose limits are known at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

SECONDS = 60  # until a test that waits gives up

# Measuring the limits takes seconds, and says nothing about the rest.
QUICK = """
from qsf.native import roofline

roofline.measure_memory = lambda counts, progress: (progress("memory"), (
    {str(n): 10.0 for n in counts}, {str(n): 1000.0 for n in counts}))[1]
roofline.measure_disk = lambda path, progress: {"direct x1": 1.0}
PATCH
from qsf.shell.entry import bench

bench()
"""

SMALL = ("--prompt", "8", "--gen", "4", "--threads", "1", "--rounds", "1")


def command(*arguments: str | Path, patch: str = "") -> list[str]:
    """Return the command line of a process; ``patch`` is Python that runs before the rest."""
    return [sys.executable, "-c", QUICK.replace("PATCH", patch), *map(str, arguments)]


def bench(*arguments: str | Path, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        command(*arguments, patch=patch),
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
    )


class Running:
    """A process that is under way, and what it has said on standard error."""

    def __init__(self, *arguments: str | Path, patch: str = "", folder: Path) -> None:
        """Start it; its output goes to a file in ``folder``, which is also its temporary one."""
        self._out = (folder / "out").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command(*arguments, patch=patch),
            stdout=self._out,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=os.environ | {"TMPDIR": str(folder)},
        )
        # One that hangs must not hang the tests.
        self._timer = threading.Timer(SECONDS, self.process.kill)
        self._timer.start()
        self.said = ""

    def __enter__(self) -> Running:
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End it, whatever has happened."""
        self.process.kill()
        self.process.wait()
        self._timer.cancel()
        self._errors().close()
        self._out.close()

    def wait_for(self, text: str) -> None:
        """Read what it says until a line has ``text`` in it."""
        for line in self._errors():
            self.said += line
            if text in line:
                return
        raise AssertionError(f"{text!r} was not said: {self.said}")

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        self.said += "".join(self._errors())
        return self.process.wait()

    @property
    def output(self) -> str:
        """What it has written to standard output."""
        self._out.seek(0)
        return self._out.read()

    def _errors(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr
