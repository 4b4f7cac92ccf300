"""Descriptors: files are opened, locked, read and written at an offset."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import mmap
import os
import select
import stat
import struct
import threading
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends
# Without O_NONBLOCK a named pipe would wait for a writer.
READ_FLAGS = os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0)
DIRECT_FLAG = getattr(os, "O_DIRECT", 0)  # 0: the system cannot bypass the page cache
_AT_ONCE, _EXCLUSIVE = 1, 2  # flags of LockFileEx; msvcrt's locking() gives wine's errors no number
_ERROR_LOCK_VIOLATION = 33
_LOCKED_BYTE = 0x7FFF0000  # after the end: Windows locks bytes, and nobody else can read them
_POLL_SECONDS = 0.05
_seeking = threading.Lock()  # where a descriptor's position must be moved


def user_folder(variable: str, usual: str) -> Path:
    """Return the folder of the user that a variable of XDG names, else the usual one, for QSF."""
    folder = Path(os.environ.get(variable, ""))
    return (folder if folder.is_absolute() else Path(usual).expanduser()) / "qsf"


def open_lock(path: Path, mode: int) -> int:
    """Open an existing file for locking; create it with ``mode`` if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, mode)


def create_new(path: Path) -> int:
    """Create a file for reading and writing. Raises FileExistsError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)


def open_no_link(path: Path) -> int:
    """Open a regular file for reading. Raises OSError for others, symbolic links included."""
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    fd = os.open(path, READ_FLAGS | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def forget_cached(fd: int) -> None:
    """Drop a file's pages from the page cache, if the system can."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(fd)  # the cache would keep unwritten pages
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def path_of(fd: int) -> Path:
    """Return a path that opens the same file, even if it has no name; it may not exist."""
    return Path("/proc/self/fd" if DIRECT_FLAG else "/dev/fd") / str(fd)


def lock(fd: int) -> None:
    """Wait for the lock of a file. Raises OSError on a file system without locks."""
    while fcntl is None:
        try:
            return try_lock(fd)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
    return fcntl.flock(fd, fcntl.LOCK_EX)


def try_lock(fd: int) -> None:
    """Lock a file. Raises BlockingIOError if another process holds it, OSError as ``lock``."""
    if fcntl is not None:
        return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    import ctypes
    import msvcrt

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(fd))
    place = ctypes.create_string_buffer(struct.pack("<QQQQ", 0, 0, _LOCKED_BYTE, 0), 32)
    if not kernel.LockFileEx(handle, _AT_ONCE | _EXCLUSIVE, 0, 1, 0, place):
        code = ctypes.get_last_error()
        if code == _ERROR_LOCK_VIOLATION:
            raise BlockingIOError(errno.EACCES, os.strerror(errno.EACCES))
        raise ctypes.WinError(code)
    return None


def unlink_locked(fd: int, path: Path) -> None:
    """Remove a file that this process has locked; the caller closes ``fd``."""
    if fcntl is None:  # an open file cannot be removed
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, fd)
        os.close(null)
    try:
        path.unlink(missing_ok=True)
    except PermissionError:  # on Windows it stays, without the lock, while others look at it
        if fcntl is not None:
            raise


def read_at(fd: int, n_bytes: int, off: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, n_bytes, off)
    with _seeking:
        os.lseek(fd, off, os.SEEK_SET)
        return os.read(fd, n_bytes)


def read_into(fd: int, buffer: memoryview, off: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], off)
    data = read_at(fd, len(buffer), off)
    buffer[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, off: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, off)
    with _seeking:
        os.lseek(fd, off, os.SEEK_SET)
        return os.write(fd, data)


def wait_writable(fd: int) -> None:
    """Wait until a non-blocking descriptor accepts bytes again."""
    try:
        select.select([], [fd], [])
    except OSError:  # Windows waits for sockets only
        time.sleep(_POLL_SECONDS)


def make_private(fd: int) -> None:
    """Give only the user the right to read and write a file."""
    if hasattr(os, "fchmod"):  # in a folder of the user's, Windows needs no rights of the file
        os.fchmod(fd, 0o600)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows keeps a journal of them
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_memory(n_bytes: int) -> mmap.mmap:
    """Map memory that no file backs; with MADV_HUGEPAGE it may get huge pages."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: never huge
