"""Floats to tiles and back: the quantisers, and the byte layout of docs/format.md, section 5.

A tile is 16 rows x 64 columns. Four kinds are written:

- 4-bit: per row of a tile, ``scale = (max - min) / 15``, ``code = round((w - min) / scale)``
- 8-bit: per row of a tile, ``scale = amax / 127``, ``code = round(w / scale) + 128``
- f16 and f32: the values themselves, column by column

Codes are computed against the *stored* f16 scale and min, so their rounding costs nothing
but a slightly coarser step. A min is rounded to the nearest f16. A scale is rounded up to an
f16: the codes then always span the block, nothing is clipped by more than the rounding of the
min, and a tiny range becomes the smallest f16 instead of vanishing. A block whose values are
all equal has scale 0, codes 0 (8-bit: 128) and, with 4 bits, the value as its min.

Everything here is pure, and works on cache-sized parts of the rows, so that the many small
passes numpy needs run at cache speed and temporaries stay small.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsf.format import Dtype

Float32Array = NDArray[np.float32]
TileArray = NDArray[np.void]

TILE_ROWS = 16
BLOCK = 64

F16_MAX = 65504.0
_F16_INFINITY = np.float16(math.inf)
_BAND_VALUES = 1 << 18  # 1 MiB of f32: a band and its temporaries stay in a core's cache

# The bytes of one tile. Codes are u32: the four neighbouring columns of one row.
TILE_DTYPES: dict[int, np.dtype[np.void]] = {
    Dtype.Q4: np.dtype(
        [("scales", "<f2", (16,)), ("mins", "<f2", (16,)), ("codes", "<u4", (8, 16))]
    ),
    Dtype.Q8: np.dtype([("scales", "<f2", (16,)), ("codes", "<u4", (16, 16))]),
    Dtype.F16: np.dtype([("values", "<f2", (64, 16))]),
    Dtype.F32: np.dtype([("values", "<f4", (64, 16))]),
}


class UnrepresentableError(ValueError):
    """A value that the type cannot hold: NaN, infinity, or too large for f16.

    ``row`` and ``col`` are relative to the array that was handed in.
    """

    def __init__(self, row: int, col: int, value: float, limit: float) -> None:
        """Say why ``value`` at [row, col] does not fit a type that ends at ``limit``."""
        self.row = row
        self.col = col
        self.value = value
        self.reason = (
            f"{value:g} is larger than {limit:g}, the largest this type stores"
            if math.isfinite(value)
            else f"the value is {value:g}"
        )
        super().__init__(f"at [{row}, {col}]: {self.reason}")


@dataclass(slots=True)
class ErrorSums:
    """What quantisation did to a tensor, summed over its parts with ``add``."""

    n_values: int = 0
    squared_error: float = 0.0
    max_error: float = 0.0
    source_energy: float = 0.0
    stored_energy: float = 0.0
    inner_product: float = 0.0

    def add(self, other: ErrorSums) -> None:
        """Include the sums of another part of the same tensor."""
        self.n_values += other.n_values
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)
        self.source_energy += other.source_energy
        self.stored_energy += other.stored_energy
        self.inner_product += other.inner_product

    def observe(self, source: Float32Array, stored: Float32Array) -> None:
        """Include two arrays of the same shape; ``stored`` is destroyed."""
        flat = np.ravel(source)
        other = np.ravel(stored)
        self.n_values += flat.size
        self.source_energy += float(np.dot(flat, flat))
        self.stored_energy += float(np.dot(other, other))
        self.inner_product += float(np.dot(flat, other))
        np.subtract(flat, other, out=other)
        self.squared_error += float(np.dot(other, other))
        self.max_error = max(self.max_error, float(other.max()), -float(other.min()))

    @property
    def mse(self) -> float:
        """Mean squared error of a weight."""
        return self.squared_error / self.n_values if self.n_values else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and stored weights; 1 when both are zero."""
        product = math.sqrt(self.source_energy * self.stored_energy)
        if product == 0.0:
            return 1.0 if self.source_energy == self.stored_energy else 0.0
        return min(1.0, self.inner_product / product)


def tile_bytes(dtype: int, n_rows: int, n_cols: int) -> int:
    """Bytes of a matrix in tiles."""
    return -(-n_rows // TILE_ROWS) * -(-n_cols // BLOCK) * TILE_DTYPES[dtype].itemsize


def quantise_rows(dtype: int, rows: Float32Array, errors: ErrorSums | None = None) -> bytes:
    """Return the tiles of ``rows``, [n_rows, n_cols].

    When the rows are one range of a larger matrix, their number is a multiple of 16, except
    in the last range, which is padded. ``errors``, if given, learns what was lost.

    Raises UnrepresentableError for a value that is not finite or does not fit the type.
    """
    n_rows, n_cols = rows.shape
    n_blocks = -(-n_cols // BLOCK)
    tiles = np.zeros((-(-n_rows // TILE_ROWS), n_blocks), TILE_DTYPES[dtype])
    fill = _FILLS[dtype]
    band_blocks = min(n_blocks, _BAND_VALUES // (TILE_ROWS * BLOCK))
    band_tiles = max(1, _BAND_VALUES // (TILE_ROWS * BLOCK * band_blocks))
    for tile_row in range(0, len(tiles), band_tiles):
        for block in range(0, n_blocks, band_blocks):
            row, col = tile_row * TILE_ROWS, block * BLOCK
            band = rows[row : row + band_tiles * TILE_ROWS, col : col + band_blocks * BLOCK]
            part = tiles[tile_row : tile_row + band_tiles, block : block + band_blocks]
            with np.errstate(over="ignore", invalid="ignore"):
                stored = fill(part, _pad(band), *band.shape)
            if stored is None:
                raise _unrepresentable(rows[row : row + len(band)], row, _LIMITS[dtype])
            if errors is not None:
                errors.observe(band, stored[: band.shape[0], : band.shape[1]])
    return tiles.tobytes()


def dequantise_tiles(dtype: int, data: bytes, n_rows: int, n_cols: int) -> Float32Array:
    """Return the f32 values [n_rows, n_cols] of tiles made by ``quantise_rows``."""
    n_blocks = -(-n_cols // BLOCK)
    tiles = np.frombuffer(data, TILE_DTYPES[dtype]).reshape(-(-n_rows // TILE_ROWS), n_blocks)
    n_tile_rows = len(tiles)
    if dtype in (Dtype.F16, Dtype.F32):
        # [tile row, block, col, row] -> [tile row, row, block, col]
        values = tiles["values"].transpose(0, 3, 1, 2).astype(np.float32)
    else:
        # [tile row, block, group, row] u32 -> [tile row, row, block, group x 4] bytes
        words = np.ascontiguousarray(tiles["codes"].transpose(0, 3, 1, 2))
        codes = words.view(np.uint8)
        scales = tiles["scales"].transpose(0, 2, 1)[..., None].astype(np.float32)
        if dtype == Dtype.Q4:
            codes = np.concatenate((codes & 15, codes >> 4), axis=-1)
            mins = tiles["mins"].transpose(0, 2, 1)[..., None].astype(np.float32)
            values = codes.astype(np.float32) * scales + mins
        else:
            values = (codes.astype(np.float32) - np.float32(128)) * scales
    shape = (n_tile_rows * TILE_ROWS, n_blocks * BLOCK)
    return np.ascontiguousarray(values.reshape(shape)[:n_rows, :n_cols])


def _pad(band: Float32Array) -> Float32Array:
    """Pad to whole tiles: rows with zeros, columns with the block's first value.

    A copy of a real value changes neither the minimum nor the maximum of its block.
    """
    n_rows, n_cols = band.shape
    n_padded_rows = -(-n_rows // TILE_ROWS) * TILE_ROWS
    n_padded_cols = -(-n_cols // BLOCK) * BLOCK
    if (n_padded_rows, n_padded_cols) == band.shape:
        return np.ascontiguousarray(band)
    padded = np.zeros((n_padded_rows, n_padded_cols), np.float32)
    padded[:n_rows, :n_cols] = band
    if n_cols % BLOCK:
        first = n_cols // BLOCK * BLOCK
        padded[:n_rows, n_cols:] = band[:, first : first + 1]
    return padded


def _reduce_blocks(operation: np.ufunc, values: Float32Array) -> Float32Array:
    """Reduce [rows, blocks, 64] to [rows, blocks, 1], pairing halves so that numpy vectorises."""
    width = BLOCK
    while width > 1:
        width //= 2
        values = operation(values[..., :width], values[..., width : 2 * width])
    return values


def _ceil_f16(values: Float32Array) -> NDArray[np.float16]:
    """The smallest f16 that is not below the value (>= 0)."""
    nearest = values.astype(np.float16)
    raised = np.nextafter(nearest, _F16_INFINITY)
    return np.where(nearest.astype(np.float32) < values, raised, nearest)


def _fill_4bit(
    tiles: TileArray, padded: Float32Array, n_rows: int, n_cols: int
) -> Float32Array | None:
    """Fill ``tiles`` from ``padded``; return the stored values, or None if one does not fit."""
    n_tile_rows, n_blocks = tiles.shape
    blocks = padded.reshape(n_tile_rows * TILE_ROWS, n_blocks, BLOCK)
    low = _reduce_blocks(np.minimum, blocks)
    high = _reduce_blocks(np.maximum, blocks)
    mins = low.astype(np.float16) + np.float16(0)  # -0 becomes 0
    min32 = mins.astype(np.float32)
    step: Float32Array = (high - min32) / np.float32(15)
    scales = _ceil_f16(np.maximum(step, np.float32(0)))
    scales[high == low] = 0
    if not (np.isfinite(mins).all() and np.isfinite(scales).all()):
        return None
    scale32 = scales.astype(np.float32)

    codes: Float32Array = blocks - min32
    codes /= np.where(scale32 == 0, np.float32(1), scale32)
    np.rint(codes, out=codes)
    np.clip(codes, 0, 15, out=codes)
    codes *= scale32 != 0

    packed = codes.astype(np.uint8)
    packed.reshape(len(packed), -1)[:, n_cols:] = 0
    halves = packed.reshape(n_tile_rows, TILE_ROWS, n_blocks, 2, BLOCK // 2)
    nibbles = halves[..., 0, :] | (halves[..., 1, :] << 4)
    tiles["codes"] = nibbles.view("<u4").transpose(0, 2, 3, 1)
    tiles["scales"] = scales.reshape(n_tile_rows, TILE_ROWS, n_blocks).transpose(0, 2, 1)
    tiles["mins"] = mins.reshape(n_tile_rows, TILE_ROWS, n_blocks).transpose(0, 2, 1)

    codes *= scale32
    codes += min32
    return codes.reshape(padded.shape)


def _fill_8bit(
    tiles: TileArray, padded: Float32Array, n_rows: int, n_cols: int
) -> Float32Array | None:
    """Fill ``tiles`` from ``padded``; return the stored values, or None if one does not fit."""
    n_tile_rows, n_blocks = tiles.shape
    blocks: Float32Array = padded.reshape(n_tile_rows * TILE_ROWS, n_blocks, BLOCK)
    low = _reduce_blocks(np.minimum, blocks)
    high = _reduce_blocks(np.maximum, blocks)
    amax: Float32Array = np.abs(np.maximum(high, -low))  # abs: no scale becomes -0
    scales = _ceil_f16(amax / np.float32(127))
    if not np.isfinite(scales).all():
        return None
    scale32 = scales.astype(np.float32)

    divisor: Float32Array = np.where(scale32 == 0, np.float32(1), scale32)
    codes: Float32Array = blocks / divisor
    np.rint(codes, out=codes)
    np.clip(codes, -127, 127, out=codes)

    packed = np.empty(codes.shape, np.uint8)
    np.add(codes, np.float32(128), out=packed, casting="unsafe")
    flat = packed.reshape(len(packed), -1)
    flat[:, n_cols:] = 0
    flat[n_rows:] = 0
    words = packed.reshape(n_tile_rows, TILE_ROWS, n_blocks, BLOCK).view("<u4")
    tiles["codes"] = words.transpose(0, 2, 3, 1)
    tiles["scales"] = scales.reshape(n_tile_rows, TILE_ROWS, n_blocks).transpose(0, 2, 1)

    codes *= scale32
    return codes.reshape(padded.shape)


def _fill_values(
    tiles: TileArray, padded: Float32Array, n_rows: int, n_cols: int
) -> Float32Array | None:
    """Fill f16 or f32 ``tiles``; return the stored values, or None if one does not fit."""
    n_tile_rows, n_blocks = tiles.shape
    stored = padded.astype(tiles.dtype["values"].base)
    stored[:, n_cols:] = 0
    if not np.isfinite(stored).all():
        return None
    grid = stored.reshape(n_tile_rows, TILE_ROWS, n_blocks, BLOCK)
    tiles["values"] = grid.transpose(0, 2, 3, 1)
    return stored.astype(np.float32)


def _unrepresentable(band: Float32Array, first_row: int, limit: float) -> UnrepresentableError:
    """Find what made a band fail: first what is not finite, else the largest value."""
    bad = np.argwhere(~np.isfinite(band))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
    else:
        row, col = (int(idx) for idx in np.unravel_index(np.abs(band).argmax(), band.shape))
    return UnrepresentableError(first_row + row, col, float(band[row, col]), limit)


_FILLS: dict[int, Callable[[TileArray, Float32Array, int, int], Float32Array | None]] = {
    Dtype.Q4: _fill_4bit,
    Dtype.Q8: _fill_8bit,
    Dtype.F16: _fill_values,
    Dtype.F32: _fill_values,
}

_LIMITS: dict[int, float] = {
    Dtype.Q4: F16_MAX,
    Dtype.Q8: F16_MAX * 127,
    Dtype.F16: F16_MAX,
    Dtype.F32: math.inf,
}
