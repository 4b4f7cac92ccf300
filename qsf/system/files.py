"""Descriptors: files are opened, locked, read and written at an offset."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import fcntl
import os
import select
from pathlib import Path

# Without O_NONBLOCK a named pipe would wait for a writer.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
DIRECT_FLAG = getattr(os, "O_DIRECT", 0)  # 0: the system cannot bypass the page cache


def open_lock(path: Path, mode: int) -> int:
    """Open an existing file for locking; create it with ``mode`` if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def create_new(path: Path) -> int:
    """Create a file for reading and writing. Raises FileExistsError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def open_no_link(path: Path) -> int:
    """Open a file for reading. Raises OSError for a symbolic link."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def forget_cached(fd: int) -> None:
    """Drop a file's pages from the page cache, if the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def path_of(fd: int) -> Path:
    """Return a path that opens the same file, even if it has no name."""
    return Path(f"/proc/self/fd/{fd}")


def lock(fd: int) -> None:
    """Wait for the lock of a file. Raises OSError on a file system without locks."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def try_lock(fd: int) -> None:
    """Lock a file. Raises BlockingIOError if another process holds it, OSError as ``lock``."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_at(fd: int, n_bytes: int, off: int) -> bytes:
    """Read at most ``n_bytes``; fewer may come."""
    return os.pread(fd, n_bytes, off)


def read_into(fd: int, buffer: memoryview, off: int) -> int:
    """Fill ``buffer`` or its beginning; return the number of bytes read."""
    return os.preadv(fd, [buffer], off)


def write_at(fd: int, data: memoryview, off: int) -> int:
    """Write ``data`` or its beginning; return the number of bytes written."""
    return os.pwrite(fd, data, off)


def wait_writable(fd: int) -> None:
    """Wait until a non-blocking descriptor accepts bytes again."""
    select.select([], [fd], [])


def make_private(fd: int) -> None:
    """Give only the user the right to read and write a file."""
    os.fchmod(fd, 0o600)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
