"""Limits of this process, for a program that runs untrusted templates.

Imports nothing of the package: ``qsf/text/render_child.py`` runs without it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def confine(free_bytes: int, n_seconds: int, stack_bytes: int) -> None:
    """Limit this process to ``free_bytes`` more memory than it has now, and to its open files.

    Raises OSError if the system refuses.
    """
    if resource is None:
        _enter_job(free_bytes, n_seconds)
        return
    _limit(resource.RLIMIT_CORE, 1)  # one byte: neither a file nor a crash handler gets a dump
    _limit(resource.RLIMIT_CPU, n_seconds, 1)
    _limit(resource.RLIMIT_STACK, stack_bytes)
    _limit(resource.RLIMIT_DATA, _data_bytes() + free_bytes)
    _limit(resource.RLIMIT_NOFILE, 0)  # what is open stays; no file, socket or program is opened


def run_in_fork(
    work: Callable[[Callable[[bytes], object]], None], most_bytes: int
) -> tuple[int, bytes]:
    """Run ``work(write)`` in a fork; return its exit code, or minus the number of a signal, and the
    first ``most_bytes`` that it wrote. The fork has no standard input and output.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            for descriptor in (0, 1, reader):
                os.close(descriptor)
            with os.fdopen(writer, "wb") as file:

                def write(data: bytes) -> None:
                    file.write(data)
                    file.flush()  # what follows may end the process

                work(write)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as written:
        answer = written.read(most_bytes)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), answer


def limit_file_bytes(n_bytes: int) -> None:
    """Limit the size of files that this process writes; longer writes raise OSError.

    Not on Windows.
    """
    if resource is not None:
        _limit(resource.RLIMIT_FSIZE, n_bytes)


def _limit(kind: int, most: int, slack: int = 0) -> None:
    """Lower a limit of this process; its hard limit is larger by ``slack``."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
        slack = min(slack, hard - most)
    resource.setrlimit(kind, (most, most + slack))


def _data_bytes() -> int:
    """Return the private writable memory that this process has mapped; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib is large)
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


def job_limits(memory_bytes: int, n_seconds: int) -> bytes:
    """Return Windows' JOBOBJECT_EXTENDED_LIMIT_INFORMATION: commit and user time of a process."""
    flags = 0x100 | 0x2  # JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOB_OBJECT_LIMIT_PROCESS_TIME
    basic = struct.pack("<qqI4xQQI4xQII", n_seconds * 10**7, 0, flags, 0, 0, 0, 0, 0, 0)
    return basic + bytes(48) + struct.pack("<QQQQ", memory_bytes, 0, 0, 0)


def _enter_job(free_bytes: int, n_seconds: int) -> None:
    """Put this process into a job of its own. The stack is that of the program's file."""
    if sys.platform == "win32":
        import ctypes

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
        process, job = (ctypes.c_void_p(handle) for handle in (
            kernel.GetCurrentProcess(), kernel.CreateJobObjectW(None, None)))  # fmt: skip
        counters = ctypes.create_string_buffer(struct.pack("<I68x", 72), 72)
        is_done = kernel.K32GetProcessMemoryInfo(process, counters, 72)
        (committed,) = struct.unpack_from("<Q", counters, 56)  # PagefileUsage
        limits = job_limits(committed + free_bytes, n_seconds)
        is_done = is_done and kernel.SetInformationJobObject(job, 9, limits, len(limits))
        if not (is_done and kernel.AssignProcessToJobObject(job, process)):
            raise ctypes.WinError(ctypes.get_last_error())
