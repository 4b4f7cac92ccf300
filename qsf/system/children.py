"""Processes that this one starts, and why one ended."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Final

# Ways to end by a signal.
KILLED: Final = "killed"  # by the system or the user, from outside
FULL: Final = "memory"  # an allocation failed
NESTED: Final = "stack"
SLOW: Final = "time"  # the limit of processor time

_SIGNALS: Final = {
    "SIGKILL": KILLED,
    "SIGABRT": FULL,  # how libraries react to a failed allocation
    "SIGSEGV": NESTED,
    "SIGBUS": NESTED,
    "SIGXCPU": SLOW,
}
_ENDS: Final = {
    -number: _SIGNALS[number.name] for number in signal.Signals if number.name in _SIGNALS
}
_WINDOWS: Final = {  # exit codes; STATUS_STACK_BUFFER_OVERRUN is how they react there
    0xC0000409: FULL,
    0xC00000FD: NESTED,  # STATUS_STACK_OVERFLOW
    1816: SLOW,  # ERROR_NOT_ENOUGH_QUOTA
}


def start_apart(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process with pipes for its input and output; the terminal's Ctrl-C does not reach it.

    Raises OSError.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def end_apart(process: subprocess.Popen[bytes]) -> None:
    """End a process of ``start_apart``, with all that it has started, and close its pipes."""
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError), process:  # waits for the end
        pass


def how_ended(returncode: int) -> str:
    """Return KILLED, FULL, NESTED or SLOW; "" for any other exit code."""
    return (_WINDOWS if sys.platform == "win32" else _ENDS).get(returncode, "")
