"""Starts a process, waits for its end, and returns its exit, output and memory.

Each process has a session of its own, so that it and its children can be killed. If this process
is ended, the measured one is killed too, and its memory group is removed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qsf.errors import QsfError
from qsf_bench.memory_group import memory_group

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_SHOWN_LINES = 5
_SHOWN_CHARS = 800


class ProcessError(QsfError):
    """A process could not be started, failed, or took too long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process."""

    exit_code: int  # negative: the signal that ended it
    n_oom_kills: int  # of its memory group
    peak_bytes: int | None  # of the group, page cache included; None: not counted
    output: str
    errors: str


def run_command(
    command: Sequence[str],
    *,
    limit_mb: int | None = None,
    timeout_seconds: float = 3600.0,
) -> Ended:
    """Run a command, in a new memory group if there is a limit.

    Raises:
        CapError: the group cannot be made.
        ProcessError: the command cannot be started, or does not end in time.
    """
    with contextlib.ExitStack() as stack:
        group = None
        if limit_mb is not None:
            group = stack.enter_context(memory_group(limit_mb << 20))
            command = group.enter_and_run(list(command))
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"{command[0]} cannot be started: {error.strerror}") from error
        with process:
            try:
                output, errors = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                raise ProcessError(f"did not end within {timeout_seconds:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
                process.wait()  # `with` does not, behind a Ctrl-C
        return Ended(
            process.returncode,
            0 if group is None else group.n_oom_kills(),
            None if group is None else group.peak_bytes(),
            output.decode("utf-8", "replace"),
            errors.decode("utf-8", "replace"),
        )


def forget_file(path: str | os.PathLike[str]) -> None:
    """Let the system drop the file's pages from its cache. Raises ProcessError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # unwritten pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise ProcessError(f"{path} cannot be read: {error.strerror}") from error


def drop_caches(path: str) -> None:
    """Drop the page cache: of the file, and of all files if that is permitted.

    A memory group is not charged for pages that others have read, so a cold cache is needed there.
    Raises ProcessError: the file cannot be read.
    """
    forget_file(path)
    with contextlib.suppress(OSError):
        _DROP_CACHES.write_text("3")


def last_lines(text: str) -> str:
    """Return the last lines of a process's output, as the end of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": " + " / ".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARS:] if lines else ""
