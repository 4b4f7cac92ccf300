"""An outlier table, read by Python: docs/format.md, section 5."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from qsf.errors import QsfFormatError
from qsf.file.layout import TILE_ROWS

_FINITE: Final = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)  # high bytes of an f16


class Outlier(NamedTuple):
    """One entry: the difference that is added to the stored weight of this place."""

    row: int
    col: int
    delta: float


def _numbers(kind: str, data: bytes | bytearray) -> array[int]:
    """Return little-endian numbers of type ``kind`` of the array module."""
    out = array(kind, bytes(data))
    if sys.byteorder == "big":
        out.byteswap()
    return out


def outliers_fault(data: bytes | bytearray, n_rows: int, n_cols: int, n_entries: int) -> str | None:
    """Return what is wrong with the bytes of an outlier table of [n_rows, n_cols]; None: nothing.

    The rules are those of csrc/format/outliers.c.
    """
    n_tile_rows = -(-n_rows // TILE_ROWS)
    split = 4 * (n_tile_rows + 1)
    first = _numbers("I", data[:split])
    if first[0] != 0 or first[-1] != n_entries:
        return f"entries {first[0]} .. {first[-1]}, allowed: 0 .. {n_entries}"
    steps = _numbers("H", data[split:])[::2]
    if 0 in steps:
        return f"entry {steps.index(0)} has step 0, allowed: 1 or more"
    if bytes(data[split + 3 :: 4]).translate(None, _FINITE):
        return "a delta that is not finite"
    for i in range(n_tile_rows):
        begin, end = first[i], first[i + 1]
        if not begin <= end <= n_entries:
            return f"tile row {i} has entries {begin} .. {end}, allowed: ascending"
        if sum(steps[begin:end]) > TILE_ROWS * n_cols:
            return f"tile row {i} has outliers behind its {n_cols} columns"
    rows_left = n_rows - (n_tile_rows - 1) * TILE_ROWS
    position = -1
    for step in steps[first[-2] :] if rows_left < TILE_ROWS else ():
        position += step
        if position % TILE_ROWS >= rows_left:
            return f"tile row {n_tile_rows - 1} has outliers behind its {rows_left} rows"
    return None


def unpack_outliers(data: bytes, n_rows: int, n_cols: int, n_entries: int) -> Iterator[Outlier]:
    """Yield the entries of an outlier table in their order: by tile row, column, row.

    Raises:
        QsfFormatError: the table is malformed.
    """
    fault = outliers_fault(data, n_rows, n_cols, n_entries)
    if fault is not None:
        raise QsfFormatError(f"outlier table: {fault}")
    n_tile_rows = -(-n_rows // TILE_ROWS)
    first = _numbers("I", data[: 4 * (n_tile_rows + 1)])
    entries = list(struct.iter_unpack("<He", data[4 * (n_tile_rows + 1) :]))
    for i in range(n_tile_rows):
        position = -1
        for step, delta in entries[first[i] : first[i + 1]]:
            position += step
            yield Outlier(TILE_ROWS * i + position % TILE_ROWS, position // TILE_ROWS, delta)
