"""Quantised matrices of a checkpoint, as families see them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import Matrix, RawArray, Rows
from qsf_converter.sources.quantised.stored import POWERS, Stored

# How other engines round activations and caches; this one measures that itself.
OF_ACTIVATIONS: Final = re.compile(
    r"\.((input|activation|output|[qkv]|kv)(_activation)?_(scale|zero_point|global_scale)"
    r"|input_scale_ub)$"
)
_KEPT: Final = {4: "Q4_0", 8: "Q8_0"}  # blocks of codes and a scale of f16
_KEPT_COLS: Final = 32
_CHECKED_BYTES: Final = 4 << 20


def affine(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    parts: Sequence[str],
    codes: Rows,
    scale: Rows,
    zero: Rows | None = None,
    kept: str | None = None,
) -> Matrix:
    """Return the matrix of (codes - zero) * scale; ``kept``: see `kept_type`."""

    def read(start: int, stop: int) -> RawArray:
        values = codes(start, stop).astype(np.float32, copy=False)
        if zero is not None:
            values = values - zero(start, stop).astype(np.float32)
        return np.asarray(values * scale(start, stop).astype(np.float32))

    def blocks(start: int, stop: int) -> RawArray:
        found = codes(start, stop).reshape(stop - start, -1, _KEPT_COLS)
        n_bytes, half = (16, 16) if kept == "Q4_0" else (32, 0)
        block = np.dtype([("scale", "<f2"), ("codes", "u1", (n_bytes,))])
        raw = np.empty(found.shape[:2], block)
        raw["scale"] = scale(start, stop)[:, ::_KEPT_COLS]
        raw["codes"] = found[..., :half] | found[..., half:] << 4 if half else found ^ 128
        return raw

    return Matrix(name, shape, kind, parts, read, kept, blocks if kept else None)


def kept_type(stored: Stored, scales: str, bits: int, n_cols: int, group: int) -> str | None:
    """Return the type whose blocks hold a matrix exactly whose zeros are the middle of the codes;
    None if there is none. Reads the scales, unless they are of f16.
    """
    tensor = stored.tensors[scales]
    if bits not in _KEPT or n_cols % _KEPT_COLS or group % _KEPT_COLS:
        return None
    step = max(1, _CHECKED_BYTES // max(1, tensor.row_bytes))
    for start in range(0, tensor.n_rows if tensor.dtype != "F16" else 0, step):
        numbers = stored.rows(scales, start, min(start + step, tensor.n_rows))
        with np.errstate(over="ignore"):
            if not np.array_equal(numbers.astype(np.float16), numbers):
                return None
    return _KEPT[bits]


def scales_of(
    stored: Stored,
    name: str,
    shape: tuple[int, ...],
    *,
    block: Sequence[int] = (),
    groups: RawArray | None = None,
    is_zero: bool = False,
) -> Rows:
    """Return a function of rows [start, stop) of a matrix: the numbers of the blocks that they are
    in, [n, n_cols] or [n, 1].

    ``block``: the rows and columns of one; by default blocks are equal parts. ``groups``: the block
    of each column. Bytes are exponents, unless they are zeros.

    Raises QsfConversionError if the shape is not one of blocks.
    """
    tensor = stored.tensors[name]
    n_rows, n_cols = shape[-2:]
    grid = tensor.shape
    if math.prod(grid) == 1:
        grid = (*(1 for _ in shape),)
    elif len(grid) == len(shape) - 1:  # a number of each row, or of each expert
        grid = (*grid, 1, 1)[: len(shape)] if len(shape) > 2 else (*grid, 1)
    n_high, n_wide = grid[-2:] if len(grid) > 1 else (0, 0)
    high = _block(n_rows, n_high, block[0] if block else 0)
    wide = _block(n_cols, n_wide, block[-1] if block else 0)
    if groups is not None:
        high, wide = n_rows // n_high if n_high in (1, n_rows) else 0, 1
    if not high or not wide or (math.prod(grid) > 1 and grid[:-2] != shape[:-2]):
        raise QsfConversionError(
            f"tensor {name} of shape {list(tensor.shape)} has no numbers of blocks {list(block)} "
            f"of a matrix {list(shape)}"
        )
    n_grid_rows = math.prod(grid[:-1])

    def read(start: int, stop: int) -> RawArray:
        row = np.arange(start, stop)
        at = row // n_rows * n_high + row % n_rows // high if n_grid_rows > 1 else 0 * row
        first, last = int(at[0]), int(at[-1]) + 1
        if tensor.n_rows == n_grid_rows:
            found = stored.rows(name, first, last)
        else:  # a vector is one row
            found = stored.columns(name, first * n_wide, last * n_wide).reshape(-1, n_wide)
        found = POWERS[found] if tensor.dtype == "U8" and not is_zero else found
        found = found[at - first]
        if groups is not None:
            return found[:, groups]
        return found if n_wide == 1 else np.repeat(found, wide, axis=1)[:, :n_cols]

    return read


def _block(size: int, n_blocks: int, stated: int) -> int:
    if stated > 0 and -(-size // stated) == n_blocks:
        return stated
    return size // n_blocks if n_blocks and size % n_blocks == 0 else 0
