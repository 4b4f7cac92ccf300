"""Which codes, scales and mins a matrix gets: the rounding of every quantisation type.

Scales and mins belong to a block of 64 values of a row. w is a value of the block, amax the
largest |w|.

- 3-bit and 4-bit: ``scale = (max - min) / 7`` or ``/ 15``, ``code = round((w - min) / scale)``
- 2-bit: the four levels are fitted to the block, `_code_2bit`
- 8-bit: ``scale = amax / 127``, ``code = round(w / scale) + 128``
- 4-bit symmetric: ``scale = -w / 8`` of the w with that amax, ``code = round(w / scale) + 8``,
  at most 15: one end of the range is exact, the other may lose up to one step
- 2-bit symmetric, ternary: the scale is fitted to the block, `_code_2bit_sym`, `_code_ternary`
- f16 and f32: the values themselves

Codes are computed against the *stored* f16 scale and min, so their rounding costs nothing
but a slightly coarser step. A min and a fitted scale are rounded to the nearest f16. The other
scales are rounded up to an f16: the codes then always span the block, nothing is clipped by
more than the rounding of the min, and a tiny range becomes the smallest f16 instead of
vanishing. A block whose values are all equal has scale 0, codes 0 and the value as its min if
the type has mins; otherwise, if it is zero, scale 0 and the codes of zero.

Everything here is pure, and works on cache-sized parts of the rows, so that the many small
passes numpy needs run at cache speed and temporaries stay small.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.converter.tiles import (
    BLOCK,
    TILE_DTYPES,
    TILE_ROWS,
    CodeArray,
    Coded,
    Float16Array,
    Float32Array,
    TileArray,
    put_coded,
    put_values,
)
from qsf.format import Dtype

F16_MAX = 65504.0
_F16_INFINITY = np.float16(math.inf)
_BAND_VALUES = 1 << 18  # 1 MiB of f32: a band and its temporaries stay in a core's cache

_ZERO = np.float32(0)
# Of four even levels, in mean magnitudes: what loses least on weights of a bell shape.
_LEVELS_APART = np.float32(1.25)


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


def quantise_rows(dtype: int, rows: Float32Array, errors: ErrorSums | None = None) -> bytes:
    """Return the tiles of ``rows``, [n_rows, n_cols].

    When the rows are one range of a larger matrix, their number is a multiple of 16, except
    in the last range, which is padded. ``errors``, if given, learns what was lost.

    Raises UnrepresentableError for a value that is not finite or does not fit the type.
    """
    n_rows, n_cols = rows.shape
    n_blocks = -(-n_cols // BLOCK)
    tiles = np.zeros((-(-n_rows // TILE_ROWS), n_blocks), TILE_DTYPES[dtype])
    band_blocks = min(n_blocks, _BAND_VALUES // (TILE_ROWS * BLOCK))
    band_tiles = max(1, _BAND_VALUES // (TILE_ROWS * BLOCK * band_blocks))
    for tile_row in range(0, len(tiles), band_tiles):
        for block in range(0, n_blocks, band_blocks):
            row, col = tile_row * TILE_ROWS, block * BLOCK
            band = rows[row : row + band_tiles * TILE_ROWS, col : col + band_blocks * BLOCK]
            part = tiles[tile_row : tile_row + band_tiles, block : block + band_blocks]
            with np.errstate(over="ignore", invalid="ignore"):
                stored = _fill(dtype, part, band)
            if stored is None:
                raise _unrepresentable(rows[row : row + len(band)], row, _LIMITS[dtype])
            if errors is not None:
                errors.observe(band, stored[: band.shape[0], : band.shape[1]])
    return tiles.tobytes()


def _fill(dtype: int, tiles: TileArray, band: Float32Array) -> Float32Array | None:
    """Fill ``tiles``; return the stored values, padded, or None if one does not fit."""
    n_rows, n_cols = band.shape
    padded = _pad(band, with_copies=dtype in _SPANS)
    if dtype in (Dtype.F16, Dtype.F32):
        values = padded.astype(TILE_DTYPES[dtype]["values"].base)
        if not np.isfinite(values).all():
            return None
        put_values(tiles, values, n_cols)
        return values.astype(np.float32)
    blocks = padded.reshape(len(padded), tiles.shape[1], BLOCK)
    widths = np.full((tiles.shape[1], 1), BLOCK, np.float32)
    widths[-1] = n_cols - (tiles.shape[1] - 1) * BLOCK
    coded, stored = _CODERS[dtype](dtype, blocks, widths)
    if not np.isfinite(coded.scales).all():
        return None
    if coded.mins is not None and not np.isfinite(coded.mins).all():
        return None
    put_coded(dtype, tiles, coded, n_rows, n_cols)
    return stored.reshape(padded.shape)


def _pad(band: Float32Array, *, with_copies: bool) -> Float32Array:
    """Pad to whole tiles: with zeros, or columns ``with_copies`` of the block's first value.

    A zero changes neither the sum nor the largest magnitude of its block, a copy of a real
    value neither the minimum nor the maximum.
    """
    n_rows, n_cols = band.shape
    n_padded_rows = -(-n_rows // TILE_ROWS) * TILE_ROWS
    n_padded_cols = -(-n_cols // BLOCK) * BLOCK
    if (n_padded_rows, n_padded_cols) == band.shape:
        return np.ascontiguousarray(band)
    padded = np.zeros((n_padded_rows, n_padded_cols), np.float32)
    padded[:n_rows, :n_cols] = band
    if with_copies and n_cols % BLOCK:
        first = n_cols // BLOCK * BLOCK
        padded[:n_rows, n_cols:] = band[:, first : first + 1]
    return padded


def _reduce_blocks(operation: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
    """Reduce [rows, blocks, 64] to [rows, blocks, 1], pairing halves so that numpy vectorises.

    The order of a sum is thereby the same on every machine.
    """
    width = BLOCK
    while width > 8:
        width //= 2
        values = operation(values[..., :width], values[..., width : 2 * width])
    # Short inner loops are slow; from here on those over all blocks are the inner ones.
    columns = [values[..., i] for i in range(width)]
    while len(columns) > 1:
        half = len(columns) // 2
        columns = [operation(columns[i], columns[i + half]) for i in range(half)]
    return columns[0][..., None]


def _ceil_f16(values: Float32Array) -> Float16Array:
    """The smallest f16 that is not below the value (>= 0); never -0."""
    nearest = values.astype(np.float16)
    raised = np.nextafter(nearest, _F16_INFINITY)
    ceiling: Float16Array = np.where(nearest.astype(np.float32) < values, raised, nearest)
    ceiling += np.float16(0)
    return ceiling


def _code_asymmetric(
    dtype: int, blocks: Float32Array, _widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Spread the codes evenly from the smallest to the largest value."""
    n_steps = np.float32(_SPANS[dtype])
    low = _reduce_blocks(np.minimum, blocks)
    high = _reduce_blocks(np.maximum, blocks)
    mins = low.astype(np.float16) + np.float16(0)  # -0 becomes 0
    min32 = mins.astype(np.float32)
    step: Float32Array = (high - min32) / n_steps
    scales = _ceil_f16(np.maximum(step, _ZERO))
    scales[high == low] = 0
    return _round_from_min(blocks - min32, scales, mins, _SPANS[dtype])


def _round_from_min(
    codes: Float32Array, scales: Float16Array, mins: Float16Array, n_steps: int
) -> tuple[Coded, Float32Array]:
    """Round what the values are above the min; ``codes`` is destroyed."""
    scale32 = scales.astype(np.float32)
    codes /= np.where(scale32 == 0, np.float32(1), scale32)
    np.rint(codes, out=codes)
    np.clip(codes, _ZERO, np.float32(n_steps), out=codes)
    codes *= scale32 != 0
    coded = Coded(codes.astype(np.uint8), scales, mins)
    codes *= scale32
    codes += mins.astype(np.float32)
    return coded, codes


def _code_8bit(
    _dtype: int, blocks: Float32Array, _widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Spread the codes evenly from -amax to amax."""
    low = _reduce_blocks(np.minimum, blocks)
    high = _reduce_blocks(np.maximum, blocks)
    amax: Float32Array = np.abs(np.maximum(high, -low))  # abs: no scale becomes -0
    scales = _ceil_f16(amax / np.float32(127))
    return _round_symmetric(blocks, scales, centre=128, lowest=-127, highest=127)


def _code_4bit_sym(
    _dtype: int, blocks: Float32Array, _widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Give the value of the largest magnitude the code 0: a scale may be negative.

    Sixteen levels then serve; of the two ends of the range the one that matters is exact.
    """
    low = _reduce_blocks(np.minimum, blocks)
    high = _reduce_blocks(np.maximum, blocks)
    is_high: NDArray[np.bool_] = high >= -low
    amax: Float32Array = np.where(is_high, high, -low)
    scales = _ceil_f16(np.abs(amax) / np.float32(8))
    scales = np.where(is_high & (scales != 0), -scales, scales)
    return _round_symmetric(blocks, scales, centre=8, lowest=-8, highest=7)


def _round_symmetric(
    blocks: Float32Array, scales: Float16Array, *, centre: int, lowest: int, highest: int
) -> tuple[Coded, Float32Array]:
    scale32 = scales.astype(np.float32)
    divisor: Float32Array = np.where(scale32 == 0, np.float32(1), scale32)
    codes = blocks / divisor
    np.rint(codes, out=codes)
    np.clip(codes, np.float32(lowest), np.float32(highest), out=codes)
    packed: CodeArray = np.empty(codes.shape, np.uint8)
    np.add(codes, np.float32(centre), out=packed, casting="unsafe")
    codes *= scale32
    return Coded(packed, scales, None), codes


def _sum_above(
    magnitudes: Float32Array, limit: Float32Array, is_above: NDArray[np.bool_]
) -> tuple[Float32Array, Float32Array]:
    """Per block, the sum and the number of the magnitudes above ``limit``; NaN stays NaN."""
    n_above = _reduce_blocks(np.add, is_above.view(np.uint8)).astype(np.float32)
    excess = magnitudes - limit
    np.maximum(excess, _ZERO, out=excess)
    return _reduce_blocks(np.add, excess) + n_above * limit, n_above


def _code_2bit(
    _dtype: int, blocks: Float32Array, widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Fit four evenly spaced levels to a block.

    Spread from the smallest to the largest value, four levels would be too far apart for most
    values (bench/LOG.md: twice the error). So levels are first laid around the mean, and each
    value takes the nearest; then scale and min become those with the least squared error for
    these codes, and each value takes the nearest again.
    """
    n_padded = np.float32(BLOCK) - widths  # zeros at the end of the last block
    mean = _reduce_blocks(np.add, blocks) / widths
    centred = blocks - mean
    if n_padded[-1] > 0:
        centred[:, -1, int(widths[-1, 0]) :] = 0
    magnitudes = np.abs(centred)
    total = _reduce_blocks(np.add, magnitudes)
    amax = _reduce_blocks(np.maximum, magnitudes)
    guess = np.minimum(_LEVELS_APART * (total / widths), amax / np.float32(1.5))

    # Level numbers m = -1.5, -0.5, 0.5, 1.5 about the mean: w - mean ~ step * (m - mean of m).
    is_far = magnitudes > guess
    above, n_above = _sum_above(magnitudes, guess, is_far)
    codes = _four_codes(centred < 0, is_far)
    code_sum = _reduce_blocks(np.add, codes).astype(np.float32) - 2 * n_padded
    mean_code = code_sum / widths
    mean_m = mean_code - np.float32(1.5)
    energy = np.float32(0.25) * widths + 2 * n_above - mean_m * mean_m * widths
    product = np.float32(0.5) * total + above
    step = np.divide(product, energy, out=np.zeros_like(product), where=energy > 0)

    scales = step.astype(np.float16)
    mins = np.where(scales == 0, mean, mean - step * mean_code).astype(np.float16)
    mins += np.float16(0)  # -0 becomes 0
    scale32, min32 = scales.astype(np.float32), mins.astype(np.float32)
    values: Float32Array = blocks - min32
    codes = (values > np.float32(0.5) * scale32).view(np.uint8)
    for border in (1.5, 2.5):
        codes += (values > np.float32(border) * scale32).view(np.uint8)
    codes *= scales != 0
    values = codes.astype(np.float32)
    values *= scale32
    values += min32
    return Coded(codes, scales, mins), values


def _four_codes(is_negative: NDArray[np.bool_], is_far: NDArray[np.bool_]) -> CodeArray:
    """Codes 0 .. 3: far and near below zero, near and far above it."""
    below, far = is_negative.view(np.uint8), is_far.view(np.uint8)
    side: CodeArray = (below ^ np.uint8(1)) << np.uint8(1)
    side |= below ^ far
    return side


def _code_2bit_sym(
    _dtype: int, blocks: Float32Array, widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Fit the levels -1.5, -0.5, 0.5, 1.5 times the scale to a block.

    As `_code_2bit`, with nothing but the scale to fit. A block of such levels is kept if one of
    its values is far: the border of the first guess is then at most one scale, two thirds of
    amax, and at least 5 / 8 of one, the mean being half a scale or more.
    """
    magnitudes = np.abs(blocks)
    total = _reduce_blocks(np.add, magnitudes)
    amax = _reduce_blocks(np.maximum, magnitudes)
    guess = np.minimum(_LEVELS_APART * (total / widths), amax / np.float32(1.5))
    above, n_above = _sum_above(magnitudes, guess, magnitudes > guess)
    product = np.float32(0.5) * total + above
    scales = (product / (np.float32(0.25) * widths + 2 * n_above)).astype(np.float16)
    scale32 = scales.astype(np.float32)
    codes = _four_codes(blocks < 0, magnitudes > scale32)
    values: Float32Array = codes.astype(np.float32)
    values -= np.float32(1.5)
    values *= scale32
    return Coded(codes, scales, None), values


def _code_ternary(
    _dtype: int, blocks: Float32Array, widths: Float32Array
) -> tuple[Coded, Float32Array]:
    """Zero for what is small beside the block's mean magnitude, else one scale with a sign.

    The scale is the mean magnitude of what is not zero, the best for these codes. The limit is
    near that which loses least on weights of a bell shape, and below every value that is not
    zero in a block of -s, 0 and s: such a block is kept, if an f16 holds s.
    """
    magnitudes = np.abs(blocks)
    limit = np.float32(0.75) * (_reduce_blocks(np.add, magnitudes) / widths)
    above, n_above = _sum_above(magnitudes, limit, magnitudes > limit)
    scales = (above / np.maximum(n_above, np.float32(1))).astype(np.float16)
    codes: CodeArray = (blocks > limit).view(np.uint8) + np.uint8(1)
    codes -= (blocks < -limit).view(np.uint8)
    values: Float32Array = codes.astype(np.float32)
    values -= np.float32(1)
    values *= scales.astype(np.float32)
    return Coded(codes, scales, None), values


def _unrepresentable(band: Float32Array, first_row: int, limit: float) -> UnrepresentableError:
    """Find what made a band fail: first what is not finite, else the largest value."""
    bad = np.argwhere(~np.isfinite(band))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
    else:
        row, col = (int(idx) for idx in np.unravel_index(np.abs(band).argmax(), band.shape))
    return UnrepresentableError(first_row + row, col, float(band[row, col]), limit)


_SPANS: Final[dict[int, int]] = {Dtype.Q3: 7, Dtype.Q4: 15}  # steps between first and last code

_CODERS: Final[
    dict[int, Callable[[int, Float32Array, Float32Array], tuple[Coded, Float32Array]]]
] = {
    Dtype.Q2_SYM: _code_2bit_sym,
    Dtype.Q2: _code_2bit,
    Dtype.Q3: _code_asymmetric,
    Dtype.Q4: _code_asymmetric,
    Dtype.Q4_SYM: _code_4bit_sym,
    Dtype.TERNARY: _code_ternary,
    Dtype.TERNARY_DENSE: _code_ternary,
    Dtype.Q8: _code_8bit,
}

# What every value may be without a scale or a min that an f16 does not hold.
_LIMITS: Final[dict[int, float]] = {
    Dtype.Q2_SYM: F16_MAX / 2,
    Dtype.Q2: F16_MAX / 4,
    Dtype.Q3: F16_MAX,
    Dtype.Q4: F16_MAX,
    Dtype.Q4_SYM: F16_MAX * 8,
    Dtype.TERNARY: F16_MAX,
    Dtype.TERNARY_DENSE: F16_MAX,
    Dtype.Q8: F16_MAX * 127,
    Dtype.F16: F16_MAX,
    Dtype.F32: math.inf,
}
