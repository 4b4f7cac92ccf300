"""Processes that this one starts, and why one ended."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import signal
import subprocess
from typing import Final

# Ways to end by a signal.
KILLED: Final = "killed"  # by the system or the user, from outside
FULL: Final = "memory"  # an allocation failed
NESTED: Final = "stack"
SLOW: Final = "time"  # the limit of processor time

_ENDS: Final = {  # by exit code
    -signal.SIGKILL: KILLED,
    -signal.SIGABRT: FULL,  # how libraries react to a failed allocation
    -signal.SIGSEGV: NESTED,
    -signal.SIGBUS: NESTED,
    -signal.SIGXCPU: SLOW,
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
    )


def how_ended(returncode: int) -> str:
    """Return KILLED, FULL, NESTED or SLOW; "" for any other exit code."""
    return _ENDS.get(returncode, "")
