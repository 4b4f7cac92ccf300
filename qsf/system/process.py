"""This process and others: memory, open files, whether a process lives."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_UNMAPPED_BYTES: Final = 4 << 20


def is_alive(pid: int) -> bool:
    """Return whether a process of that number lives; True too if it belongs to another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not report it."""
    return _status_bytes("VmRSS:")


def peak_bytes() -> int | None:
    """Return the highest resident memory so far; None if the system does not report it."""
    return _status_bytes("VmHWM:")


def unmap_freed_arrays() -> None:
    """Return arrays of 4 MB and more to the system as soon as they are freed.

    glibc raises its threshold to the size of each freed block, and then each thread's heap keeps up
    to twice as much: 85 MB after a conversion. Other C libraries are left unchanged.
    """
    with contextlib.suppress(OSError, AttributeError):
        import ctypes  # imported late: 1 MB that no other command needs

        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _UNMAPPED_BYTES)


def _status_bytes(field: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split(field, 1)[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def processor_name() -> str:
    """Return the name of the processor, or the machine's architecture if the system does not report
    it.
    """
    import platform
    import re

    cpuinfo = ""
    with contextlib.suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    match = re.search(r"^(?:model name|Processor|cpu model)\s*: (.*\S)", cpuinfo, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def open_file_count() -> int | None:
    """Return the number of open descriptors; None if the system does not report it."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # minus the listing's own # noqa: PTH208
    except OSError:
        return None


def ask_to_end(pid: int) -> None:
    """Ask a process to end. Raises OSError if it does not exist or belongs to another user."""
    os.kill(pid, signal.SIGTERM)
