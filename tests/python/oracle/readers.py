"""Both readers asked about one file."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

from make.fresh import write_fresh
from oracle.file.reader import Reader
from qsf.errors import QsfError
from qsf.file import reader as engine


def python_verdict(path: Path) -> QsfError | None:
    """Return what the Python reader has against the file; None: nothing."""
    try:
        with Reader(path) as r:
            r.verify()
    except QsfError as e:
        return e
    return None


def verify_file(path: Path) -> None:
    """Check every byte with the C reader. Raises QsfError."""
    with engine.Reader(path) as r:
        r.verify()


def c_verdict(path: Path) -> QsfError | None:
    """Return what the C reader has against the file; None: nothing."""
    try:
        verify_file(path)
    except QsfError as e:
        return e
    return None


def agree(path: Path) -> type[QsfError] | None:
    """Return the verdict of both: the kind of error, None for a good file."""
    python, c = python_verdict(path), c_verdict(path)
    assert type(python) is type(c), f"Python: {python!r}, C: {c!r}"
    for e in (python, c):
        assert e is None or str(e).isascii()
        assert e is None or str(e).isprintable()
    return None if c is None else type(c)


def verdict(path: Path, data: bytes | bytearray) -> type[QsfError] | None:
    write_fresh(path, data)
    return agree(path)
