"""Temporary files that are renamed when complete: created, and cleared away.

``.NAME.PID.partial`` lies beside ``NAME`` and is locked while it is written. A killed process
leaves it unlocked; the next process that writes ``NAME`` removes it. A process that ends normally
leaves none.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path
from typing import Final

from qsf.system import files
from qsf.system.process import is_alive

# Temporaries of this process that may exist. The creator removes its file, unless a signal's
# exception arrives after the system created it and before the creator knows.
_own: Final[set[Path]] = set()


@atexit.register
def _remove_own() -> None:
    ending = f".{os.getpid()}.partial"  # a forked child has a copy of its parent's set
    for temporary in _own:
        if temporary.name.endswith(ending):
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def create_partial(path: Path) -> tuple[int, Path]:
    """Create and lock a temporary for ``path``; return its descriptor, to be closed, and its path.

    First removes the temporaries of killed processes. Raises OSError, ValueError for a path
    with a zero byte.
    """
    remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial").absolute()
    _own.difference_update([own for own in list(_own) if not os.path.lexists(own)])
    _own.add(temporary)
    while True:
        fd = files.create_new(temporary)
        # The process that holds the lock takes the file for abandoned and is about to remove it.
        with contextlib.suppress(OSError):  # no locks on this file system: nobody removes the file
            files.lock(fd)
        if os.fstat(fd).st_nlink > 0:
            return fd, temporary
        os.close(fd)  # it was removed before it was locked


def remove_abandoned(path: Path) -> None:
    """Remove the temporaries of ``path`` whose processes have ended."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            number = entry.name.removeprefix(prefix).removesuffix(".partial")
            is_ours = entry.name == f"{prefix}{number}.partial" and number.isdecimal()
            if is_ours and entry.is_file(follow_symlinks=False) and not _is_at_work(int(number)):
                _remove_unless_locked(Path(entry.path))


def _is_at_work(pid: int) -> bool:
    """Return whether a process of that number lives, other than this one.

    The lock alone does not show this: a process holds none between two files and right before a
    rename.
    """
    return pid not in (0, os.getpid()) and is_alive(pid)


def _remove_unless_locked(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        fd = files.open_no_link(temporary)
        try:
            files.try_lock(fd)
            files.unlink_locked(fd, temporary)
        finally:
            os.close(fd)
