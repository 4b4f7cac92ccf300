"""Commands on a pseudo-terminal, driven as a user types."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:

        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                words = [sys.executable, "-m", "qsf", *map(str, arguments)]
                os.execve(sys.executable, words, {**os.environ, **(environment or {})})
            os._exit(127)
        self.text = ""
        self._rest = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def resize(self, n_rows: int, n_columns: int) -> None:
        size = struct.pack("HHHH", n_rows, n_columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)

    def read_until(self, wanted: str) -> None:
        """Read on to the end of the next ``wanted``."""
        end = time.monotonic() + 60
        while wanted not in self._rest:
            ready, _, _ = select.select([self._descriptor], [], [], end - time.monotonic())
            assert ready, f"{wanted!r} did not appear in {self._rest!r}"
            self._rest += os.read(self._descriptor, 4096).decode("utf-8", "replace")
        before, self._rest = self._rest.split(wanted, 1)
        self.text += before + wanted

    def ask(self, line: str, answer: str) -> None:
        """Type a line where the command asks for one, and read on to the end of ``answer``."""
        self.read_until("> ")
        self.type(line)
        self.read_until(answer)

    def wait(self) -> int:
        end = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while select.select([self._descriptor], [], [], end - time.monotonic())[0]:
                data = os.read(self._descriptor, 4096)
                if not data:
                    break
                self.text += data.decode("utf-8", "replace")
        self.text += self._rest
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., Terminal]]:
    """Start commands on terminals of their own; whatever happens, they do not outlive the test."""
    terminals: list[Terminal] = []

    def start(*arguments: object, environment: dict[str, str] | None = None) -> Terminal:
        terminals.append(Terminal(*arguments, environment=environment))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


OnTerminal = Callable[..., Terminal]
