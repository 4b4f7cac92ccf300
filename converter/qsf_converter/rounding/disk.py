"""The speed of the disk of the output file, measured by `qsf.native.roofline`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from qsf.errors import QsfIOError
from qsf.native.roofline import READ_BYTES, measure_disk
from qsf.system import files

_LEAST_BYTES = 64 << 20  # smaller files measure little; the temporary file has this size


def read_bytes_per_s(folder: Path, sources: Sequence[Path]) -> float | None:
    """Return the speed of the disk under ``folder``, or None if it cannot be measured.

    Reads the largest of ``sources`` if it is on the same disk and large enough; else first writes a
    temporary file without a name.
    """
    with contextlib.suppress(OSError, QsfIOError), _something_to_read(folder, sources) as path:
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
        piece = os.urandom(READ_BYTES)
        for _ in range(_LEAST_BYTES // READ_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        yield files.path_of(file.fileno())


def _measure(path: Path) -> float | None:
    best_gb_per_s = max(measure_disk(path, lambda _: None).values(), default=None)
    return None if best_gb_per_s is None else best_gb_per_s * 1e9
