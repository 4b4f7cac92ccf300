"""This process and others: memory, open files, whether a process lives, and how it ended."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import subprocess

_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_UNMAPPED_BYTES: Final = 4 << 20
_M_TRIM_THRESHOLD: Final = -1
_KEPT_HEAP_BYTES: Final = 16 << 20  # of each thread; else smaller arrays cost page faults again
_SYNCHRONIZE: Final = 0x100000  # of Windows
_ERROR_ACCESS_DENIED: Final = 5
_WAIT_TIMEOUT: Final = 258
_END_EVENT: Final = "Local\\qsf-end-{}"


def is_alive(pid: int) -> bool:
    """Return whether a process of that number lives; True too if it belongs to another user.

    One that has ended and was never waited for, as happens in containers, does not live.
    """
    if sys.platform == "win32":  # os.kill(pid, 0) would be Ctrl-C there
        import ctypes

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        handle = kernel.OpenProcess(_SYNCHRONIZE, False, pid)
        if not handle:
            return ctypes.get_last_error() == _ERROR_ACCESS_DENIED
        is_waiting = kernel.WaitForSingleObject(handle, 0) == _WAIT_TIMEOUT
        kernel.CloseHandle(handle)
        return is_waiting
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
    return True


def unmap_freed_arrays() -> None:
    """Return arrays of 4 MB and more to the system as soon as they are freed.

    glibc raises its threshold to the size of each freed block, and then each thread's heap keeps up
    to twice as much: 85 MB after a conversion. Other C libraries are left unchanged.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        import ctypes  # imported late: 1 MB that no other command needs

        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _UNMAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)


def processor_name() -> str:
    """Return the name of the processor, or else the machine's architecture."""
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
    """Ask a process to end.

    Raises OSError if it does not exist or belongs to another user; Windows does not say so.
    """
    if sys.platform == "win32":  # os.kill would end it at once
        import _overlapped

        _overlapped.SetEvent(_overlapped.CreateEvent(None, True, False, _END_EVENT.format(pid)))
    else:
        os.kill(pid, signal.SIGTERM)


def wait_to_be_asked() -> None:
    """Wait until ``ask_to_end`` names this process; only on Windows, elsewhere it is a signal."""
    if sys.platform == "win32":
        import _overlapped
        import _winapi

        event = _overlapped.CreateEvent(None, True, False, _END_EVENT.format(os.getpid()))
        _winapi.WaitForSingleObject(event, _winapi.INFINITE)


def emulator_name() -> str:
    """Return the name of the emulator whose memory counts as this process's, or "-".

    qemu's ``maps`` has the files of the program, ``smaps`` those of the whole process.
    """
    files = [
        {line.partition(" /")[2] for line in path.read_text("utf-8", "replace").splitlines()}
        for path in (Path("/proc/self/maps"), Path("/proc/self/smaps"))
        if path.exists()
    ]
    names = {Path(file).name for file in files[1] - files[0]} if len(files) == 2 else set()
    return min((name for name in names if name.startswith("qemu-")), default="-")


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
    import subprocess  # 1 MB that few commands need

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
