"""Quantised matrices of a checkpoint as families see them, and the numbers of their tensors."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    Matrix,
    RawArray,
    Rows,
    SourceTensor,
    to_float32,
)

FLOATS: Final = ("F16", "BF16", "F32", "F64")
FP8: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INTEGERS: Final = ("I32", "I64")

_BAND_BYTES: Final = 16 << 20  # columns of a matrix that is stored transposed, held at once
_N_BANDS: Final = 4  # codes, zeros, scales
_SLAB_BYTES: Final = 4 << 20
_PLAIN: Final = {
    "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def _fp8(exponent_bits: int, bias: int, *, is_fnuz: bool = False) -> RawArray:
    byte = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = byte >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (byte & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    values = np.where(exponent > 0, 1 + fraction, 2 * fraction) * 2.0 ** (exponent - bias)
    values[byte >= 128] *= -1
    if is_fnuz:
        values[128] = np.nan
    elif exponent_bits == 4:
        values[[127, 255]] = np.nan
    else:
        values[exponent == 31] = np.nan
        values[[124, 252]] = np.inf, -np.inf
    return np.asarray(values, np.float32)


POWERS: Final = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32("nan"))  # E8M0
_TABLES: Final = {
    "F8_E4M3": _fp8(4, 7),
    "F8_E5M2": _fp8(5, 15),
    "F8_E4M3FNUZ": _fp8(4, 8, is_fnuz=True),
    "F8_E5M2FNUZ": _fp8(5, 16, is_fnuz=True),
    "F8_E8M0": POWERS,
}


class Stored:
    """Reads the tensors of a checkpoint as numbers; it keeps some columns for the next read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = checkpoint.tensors
        self.raw = checkpoint.read_stored
        self._bands: dict[str, tuple[int, int, RawArray]] = {}

    def need(self, name: str, types: Collection[str]) -> SourceTensor:
        """Return a tensor. Raises QsfConversionError if it is missing or of another type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise QsfConversionError(f"a quantised matrix has no tensor {name}")
        if tensor.dtype not in types:
            allowed = ", ".join(types)
            raise QsfConversionError(f"tensor {name} is {tensor.dtype}, allowed: {allowed}")
        return tensor

    def rows(self, name: str, start: int, stop: int) -> RawArray:
        """Return rows [start, stop): types of 8-bit floats and bf16 as f32, others as stored."""
        raw, dtype = self.raw(name, start, stop), self.tensors[name].dtype
        if dtype in _TABLES:
            return _TABLES[dtype][raw]
        numbers: RawArray = np.ascontiguousarray(raw).view(_PLAIN[dtype])
        return to_float32(numbers) if dtype == "BF16" else numbers

    def whole(self, name: str) -> RawArray:
        return self.rows(name, 0, self.tensors[name].n_rows).reshape(-1)

    def columns(self, name: str, start: int, stop: int) -> RawArray:
        """Return columns [start, stop); a vector is one row."""
        tensor = self.tensors[name]
        first, last, band = self._bands.pop(name, (0, 0, None))
        if band is None or not first <= start <= stop <= last:
            item_bytes = tensor.row_bytes // tensor.shape[-1]
            n_cols = max(stop - start, _BAND_BYTES // max(1, tensor.n_rows * item_bytes))
            first, last = start, min(start + n_cols, tensor.shape[-1])
            step = max(1, _SLAB_BYTES // max(1, tensor.row_bytes))
            slabs = [
                self.rows(name, row, min(row + step, tensor.n_rows))[:, first:last].copy()
                for row in range(0, tensor.n_rows, step)
            ]
            band = np.concatenate(slabs)
        self._bands[name] = first, last, band
        if len(self._bands) > _N_BANDS:
            del self._bands[next(iter(self._bands))]
        return band[:, start - first : stop - first]


def unpack(words: RawArray, bits: int) -> RawArray:
    """Return the codes in each row of ``words``, the lowest bits first; any may cross bytes."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes: RawArray = data[..., None] >> shifts & np.uint8((1 << bits) - 1)
    else:
        set_bits = np.unpackbits(data, axis=1, bitorder="little")
        codes = set_bits.reshape(len(data), -1, bits) @ (1 << np.arange(bits, dtype=np.uint8))
    return codes.reshape(len(data), -1)


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
        # AWQ's codes come column by column.
        return np.ascontiguousarray(values * scale(start, stop).astype(np.float32))

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
