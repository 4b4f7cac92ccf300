"""How fast the disk is that a file is written to: a short read past the page cache.

As the engine reads it: 1 MiB at a time, from a few threads at once.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qsf.system import files

_READ_BYTES = 1 << 20
_N_READERS = 4
_LEAST_BYTES = 64 << 20  # less says little; so much is written when there is nothing to read
_MOST_BYTES = 512 << 20
_MOST_S = 1.0


def read_bytes_per_s(folder: Path, sources: Sequence[Path]) -> float | None:
    """Return the speed of the disk under ``folder``, None where it cannot be measured.

    Reads the largest of ``sources`` if it lies on the same disk and is large enough, else a
    file without a name that is written there first and gone afterwards.
    """
    with contextlib.suppress(OSError), _something_to_read(folder, sources) as path:
        return _measure(path)
    return None


@contextlib.contextmanager
def _something_to_read(folder: Path, sources: Sequence[Path]) -> Iterator[Path]:
    device = folder.stat().st_dev
    here = [path for path in sources if path.stat().st_dev == device]
    largest = max(here, key=lambda path: path.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= _LEAST_BYTES:
        yield largest
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        piece = os.urandom(_READ_BYTES)
        for _ in range(_LEAST_BYTES // _READ_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        yield files.path_of(file.fileno())


def _measure(path: Path) -> float | None:
    fd = files.open_uncached(path)
    try:
        n_pieces = os.fstat(fd).st_size // _READ_BYTES
        n_read = min(n_pieces, _MOST_BYTES // _READ_BYTES)
        places = ((i * n_pieces // n_read) * _READ_BYTES for i in itertools.count())
        started = time.perf_counter()

        def read(offs: Iterator[int]) -> int:
            done = 0
            # A mapping is aligned, as direct reads want it.
            with mmap.mmap(-1, _READ_BYTES) as mapping, memoryview(mapping) as buffer:
                for off in offs:
                    if time.perf_counter() - started > _MOST_S:
                        break
                    done += files.read_into(fd, buffer, off)
            return done

        # Each reader has places of its own: a generator cannot be shared by threads.
        offs = list(itertools.islice(places, n_read))
        with ThreadPoolExecutor(_N_READERS, thread_name_prefix="disk") as pool:
            done = sum(pool.map(read, [iter(offs[i::_N_READERS]) for i in range(_N_READERS)]))
        elapsed_s = time.perf_counter() - started
    finally:
        os.close(fd)
    return done / elapsed_s if done else None
