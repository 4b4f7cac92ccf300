"""The roofline: bytes a second from memory and from the disk.

The disk is read as the engine reads it, a megabyte at a time by several threads into huge pages. A
read into small pages has a list of 256 addresses, which virtual disks serve at half the speed, so
huge pages give the true limit.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qsf.errors import QsfIOError
from qsf.system import files

READ_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MEMORY_BYTES = 1 << 30  # several times the caches of a processor,
_LEAST_MEMORY_BYTES = 64 << 20  # for a machine with little memory
_MEMORY_MS = 400
_DISK_SECONDS = 0.5  # for each way of reading: six of them
_DIRECT_READERS = (1, 2, 4, 8)
_BUFFERED_READERS = (1, 4)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # how filesystems refuse O_DIRECT

Progress = Callable[[str], None]
"""Is told what is measured next, or what cannot be."""


def measure_memory(thread_counts: Sequence[int], progress: Progress) -> dict[str, float]:
    """Return GB/s read from memory, by number of threads.

    Raises:
        QsfMemoryError: the system lacks the memory to read from.
    """
    from qsf.native import binding

    gb_per_s: dict[str, float] = {}
    available_mb = binding.describe_machine().available_bytes >> 20
    n_bytes = max(_LEAST_MEMORY_BYTES, min(_MEMORY_BYTES, available_mb // 4 << 20))
    for n_threads in sorted(set(thread_counts)):
        progress(f"memory, {n_threads} thread{'' if n_threads == 1 else 's'}")
        gb_per_s[str(n_threads)] = binding.measure_roofline(n_threads, n_bytes, _MEMORY_MS)
    return gb_per_s


def measure_disk(path: Path, progress: Progress) -> dict[str, float]:
    """Return GB/s at which ``path`` can be read, by way: "direct x4", "buffered x1".

    Each way continues where the last one ended, so that nothing is read twice. Buffered reads are
    cold: the page cache is asked to forget the file first. A filesystem without O_DIRECT has no
    direct ways; a file of less than a megabyte has none at all.

    Raises:
        QsfIOError: the file cannot be read.
    """
    rates: dict[str, float] = {}
    first = 0
    direct_flag = files.DIRECT_FLAG
    ways = [("direct", direct_flag, _DIRECT_READERS)] if direct_flag else []
    try:
        n_places = path.stat().st_size // READ_BYTES
        for name, flag, numbers in [*ways, ("buffered", 0, _BUFFERED_READERS)] if n_places else ():
            try:
                for n_readers in numbers:
                    progress(f"disk, {name} x{n_readers}")
                    rate, n_read = _read_file(path, flag, first, n_places, n_readers)
                    rates[f"{name} x{n_readers}"] = rate
                    first = (first + n_read) % n_places
            except OSError as error:
                if not flag or error.errno not in _NO_DIRECT:
                    raise
                progress(f"disk: the filesystem of {path.name} has no O_DIRECT")
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror or error}") from error
    return rates


def _read_file(
    path: Path, flag: int, first: int, n_places: int, n_readers: int
) -> tuple[float, int]:
    """Open the file and read it as `_read` does, buffered from a cold cache."""
    fd = os.open(path, files.READ_FLAGS | flag)
    try:
        if not flag:
            files.forget_cached(fd)
        return _read(fd, first, n_places, n_readers)
    finally:
        os.close(fd)


def _read(fd: int, first: int, n_places: int, n_readers: int) -> tuple[float, int]:
    """Read megabytes one after another until the time is over or all are read.

    Returns GB/s and the number of megabytes. Raises the OSError of a reader that failed.
    """
    places = iter(range(first, first + n_places))  # next() of one is atomic

    def read(buffer: memoryview) -> tuple[int, int]:
        n_read = last_ns = 0
        while time.perf_counter_ns() < end_ns and (place := next(places, None)) is not None:
            got = files.read_into(fd, buffer, place % n_places * READ_BYTES)
            if got != READ_BYTES:
                raise OSError(errno.EIO, f"{got} bytes came of {READ_BYTES}")
            n_read, last_ns = n_read + 1, time.perf_counter_ns()
        return n_read, last_ns

    with _buffers(n_readers) as buffers, ThreadPoolExecutor(n_readers) as pool:
        began_ns = time.perf_counter_ns()
        end_ns = began_ns + int(_DISK_SECONDS * 1e9)
        counts = list(pool.map(read, buffers))
    n_read = sum(n for n, _ in counts)
    last_ns = max(ns for _, ns in counts)
    return n_read * READ_BYTES / max(last_ns - began_ns, 1), n_read


@contextlib.contextmanager
def _buffers(n_buffers: int) -> Iterator[list[memoryview]]:
    """A megabyte for each reader, in its own huge page if the system grants them."""
    n_bytes = (n_buffers + 1) * _HUGE_PAGE_BYTES
    with files.new_memory(n_bytes) as block:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                block.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.c_char.from_buffer(block)
        skip = -ctypes.addressof(start) % _HUGE_PAGE_BYTES
        del start  # a mapping cannot be closed while a pointer into it exists
        whole = memoryview(block)
        views = []
        for i in range(n_buffers):
            at = skip + i * _HUGE_PAGE_BYTES
            whole[at] = 1  # maps the page before the clock starts
            views.append(whole[at : at + READ_BYTES])
        try:
            yield views
        finally:
            for view in [*views, whole]:
                view.release()
