"""Outliers of a matrix: how they are found, handled, and stored in a sparse table.

A block of 64 weights has few codes. One weight far from the others makes the steps of all weights
coarse, or is itself clamped. A sparse outlier table stores such weights apart (docs/format.md,
section 5), for 32 bits each: the block is fitted to the other weights, and the table holds the
difference between the outlier and the value of its code.

For each matrix: `OutlierStats` and `gain` of a sample, then `choose_action`. For a matrix with a
table: `table_mask` and `round_apart` of each piece, then `join` and `pack_outliers`.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError
from qsf.file.layout import KEPT, LEAST_WEIGHTS_PER_OUTLIER, MAX_OUTLIERS, MAX_STEP, PackedOutliers
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import BLOCK, TILE_ROWS, Float32Array, bits_per_weight

Action = Literal["none", "clamp", "outlier table", "more bits"]  # the names that META records
TABLE_ACTION: Final = "outlier table"  # older files say "side table"
IndexArray = NDArray[np.int64]

NEAR_SIGMAS: Final = 3.0
"""For reports: 0.27 % of Gaussian weights are further from the mean."""
FAR_SIGMAS: Final = 5.0
"""A weight further from the mean is an outlier: 6 of ten million Gaussian weights are.

A weight k sigmas from the mean widens the range of a block of 64 Gaussian weights by the factor
(k + 2.4) / 4.8. The 32 bits of an entry would instead give each of the 64 weights half a bit more,
which halves the squared error: the entry is worth its bytes from k = 4.4 on."""
MOST_FRACTION: Final = 1 / LEAST_WEIGHTS_PER_OUTLIER
"""With a larger share of outliers the matrix needs more bits, not a table."""
ENTRY_BITS: Final = 32
LEAST_GAIN_BITS: Final = 0.02
"""A table must save as much error as this many bits a weight: 2.7 % of the squared error."""
_F16_ROUNDING: Final = 2.0**-22
"""The most squared error, relative to the variance, of weights whose scales alone are rounded."""
_COARSE_BITS: Final = 4.5  # types of at most this size, whose error outliers can change much


@dataclass(slots=True)
class OutlierStats:
    """Statistics of the distances of a matrix's weights, or of a sample, from their mean."""

    mean: float
    sigma: float
    n: int = 0
    n_near: int = 0  # beyond NEAR_SIGMAS, the far ones included
    n_far: int = 0  # beyond FAR_SIGMAS

    @classmethod
    def of(cls, rows: Float32Array) -> OutlierStats:
        mean, sigma = float(rows.mean(dtype=np.float64)), float(rows.std(dtype=np.float64))
        n_near = int(find_outliers(rows, mean, sigma, NEAR_SIGMAS).sum())
        return cls(mean, sigma, rows.size, n_near, int(find_outliers(rows, mean, sigma).sum()))

    @property
    def near_fraction(self) -> float:
        return self.n_near / self.n if self.n else 0.0

    @property
    def far_fraction(self) -> float:
        return self.n_far / self.n if self.n else 0.0


class Gain(NamedTuple):
    squared_error: float
    squared_error_with: float

    @property
    def bits(self) -> float:
        """Bits a weight that would lower the error as much as the table; one bit quarters it."""
        if self.squared_error <= 0.0:
            return 0.0
        if self.squared_error_with <= 0.0:
            return math.inf
        return 0.5 * math.log2(self.squared_error / self.squared_error_with)


@dataclass(frozen=True, slots=True)
class Entries:
    """Outliers of a matrix or a piece of it, by row and column; ``values`` are the source's."""

    rows: IndexArray  # [n]
    cols: IndexArray  # [n]
    values: Float32Array  # [n]; for a table: source value - stored weight

    def __len__(self) -> int:
        return len(self.values)

    def below(self, first_row: int) -> Entries:
        """Return the entries of a piece with the matrix's row numbers."""
        return Entries(self.rows + first_row, self.cols, self.values)


def find_outliers(
    rows: Float32Array, mean: float, sigma: float, sigmas: float = FAR_SIGMAS
) -> NDArray[np.bool_]:
    """Return which of ``rows`` [n_rows, n_cols] are more than ``sigmas`` sigmas from the mean."""
    mask: NDArray[np.bool_] = np.abs(rows - np.float32(mean)) > np.float32(sigmas * sigma)
    return mask


def table_mask(rows: Float32Array, mean: float, sigma: float) -> NDArray[np.bool_]:
    """Return which of ``rows`` go to the table: the outliers, or the farthest ones if there are too
    many.

    A file allows one weight in a hundred; a tenth of these is reserved for bridging entries.
    """
    mask = find_outliers(rows, mean, sigma)
    most = int(rows.size * MOST_FRACTION * 0.9)
    if int(mask.sum()) > most:
        far = np.abs(rows - np.float32(mean)).ravel()
        mask = np.zeros(rows.size, np.bool_)
        mask[np.argsort(-far, kind="stable")[:most]] = True
        mask = mask.reshape(rows.shape)
    return mask


def split(rows: Float32Array, mask: NDArray[np.bool_]) -> tuple[Float32Array, Entries]:
    """Return ``rows`` [n_rows, n_cols] without the outliers of ``mask``, and the outliers.

    Each outlier is replaced by the mean of the block's other weights, so that it does not disturb
    the fit of the block. Any code would be correct: the table stores the exact difference.
    """
    at, cols = np.nonzero(mask)
    entries = Entries(at, cols, rows[at, cols])
    if not len(entries):
        return rows, entries
    plain = rows.copy()
    plain[at, cols] = 0
    blocks = cols // BLOCK
    keys, first = np.unique(at * -(-rows.shape[1] // BLOCK) + blocks, return_inverse=True)
    block_rows, block_cols = np.divmod(keys, -(-rows.shape[1] // BLOCK))
    cells = block_cols[:, None] * BLOCK + np.arange(BLOCK)
    is_other = cells < rows.shape[1]
    cells = np.minimum(cells, rows.shape[1] - 1)
    is_other &= ~mask[block_rows[:, None], cells]
    others = np.where(is_other, plain[block_rows[:, None], cells], np.float32(0))
    means = others.sum(axis=1) / np.maximum(1, is_other.sum(axis=1)).astype(np.float32)
    plain[at, cols] = means[first].astype(np.float32)
    return plain, entries


def round_apart(
    dtype: int, rows: Float32Array, mask: NDArray[np.bool_]
) -> tuple[bytes, Float32Array, Entries]:
    """Round ``rows`` [n_rows, n_cols] without the outliers of ``mask``.

    Returns the tiles, the values [n_rows, n_cols] that tiles and table together represent, and the
    table's entries: the differences, rounded to f16.
    """
    plain, entries = split(rows, mask)
    stored = np.empty_like(plain)
    tiles = quantise_rows(dtype, plain, stored=stored)
    at = (entries.rows, entries.cols)
    deltas = (entries.values - stored[at]).astype(np.float16).astype(np.float32)
    stored[at] += deltas
    return tiles, stored, Entries(entries.rows, entries.cols, deltas)


def gain(dtype: int, rows: Float32Array, mask: NDArray[np.bool_]) -> Gain:
    """Return the squared error that a table of the outliers of ``mask`` saves in ``rows``, [n_rows,
    n_cols].

    For a large matrix a few evenly spread tile rows are a large enough sample.
    """
    stored = np.empty_like(rows)
    quantise_rows(dtype, rows, stored=stored)
    before = rows - stored
    after = rows - round_apart(dtype, rows, mask)[1]
    after[mask] = 0
    return Gain(*(float(np.dot(e.ravel(), e.ravel())) for e in (before, after)))


def choose_action(stats: OutlierStats, dtype: int, measured: Gain) -> Action:
    """Return the action for the outliers of a matrix that would be stored as ``dtype``.

    A table must gain at least twice its cost. ``none`` and ``clamp`` change nothing: the fit of a
    block decides whether its range includes a weight or clamps it; ``clamp`` records that there
    were outliers.
    """
    if not stats.n_far or dtype in KEPT or bits_per_weight(dtype) > _COARSE_BITS:
        return "none"
    if measured.squared_error <= _F16_ROUNDING * stats.n * stats.sigma**2:
        return "clamp"  # already ternary, with many zeros: the type keeps the weights
    if stats.far_fraction > MOST_FRACTION:
        return "more bits" if bits_per_weight(dtype) < 4 else "clamp"
    cost_bits = ENTRY_BITS * stats.far_fraction
    is_worth_it = measured.bits > max(2 * cost_bits, LEAST_GAIN_BITS)
    return TABLE_ACTION if is_worth_it else "clamp"


def join(parts: Sequence[Entries]) -> Entries:
    return Entries(
        np.concatenate([p.rows for p in parts]),
        np.concatenate([p.cols for p in parts]),
        np.concatenate([p.values for p in parts]),
    )


def pack_outliers(
    rows: IndexArray, cols: IndexArray, deltas: Float32Array, shape: tuple[int, int]
) -> PackedOutliers:
    """Return the outlier table of a matrix of ``shape`` [n_rows, n_cols], entries in any order.

    ``rows``, ``cols`` and ``deltas`` are [n]. Deltas are rounded to f16. If two entries of a tile
    row are further apart than the largest step, entries of delta 0 bridge the gap.

    Raises QsfArgumentError for an entry that is outside the matrix, repeated or not finite as an
    f16, for an empty table, and for more entries than a file allows.
    """
    n_rows, n_cols = shape
    if len(rows) and not (
        0 <= rows.min() <= rows.max() < n_rows and 0 <= cols.min() <= cols.max() < n_cols
    ):
        raise QsfArgumentError(f"an outlier is outside its matrix [{n_rows}, {n_cols}]")
    with np.errstate(over="ignore"):
        halves = np.asarray(deltas).astype("<f2")
    if not np.isfinite(halves).all():
        raise QsfArgumentError("the delta of an outlier is not finite as an f16")
    tile_rows = rows // TILE_ROWS
    places = cols * TILE_ROWS + rows % TILE_ROWS
    order = np.lexsort((places, tile_rows))
    tile_rows, places, halves = tile_rows[order], places[order], halves[order]
    is_first = np.ones(len(places), np.bool_)
    is_first[1:] = tile_rows[1:] != tile_rows[:-1]
    steps = places - np.where(is_first, -1, np.roll(places, 1))
    if (steps <= 0).any():
        raise QsfArgumentError("two outliers have the same row and column")
    n_bridges = (steps - 1) // MAX_STEP
    ends = np.cumsum(n_bridges + 1) if len(steps) else np.zeros(0, np.int64)
    n = int(ends[-1]) if len(ends) else 0
    most = min(MAX_OUTLIERS, n_rows * n_cols // LEAST_WEIGHTS_PER_OUTLIER)
    if not 1 <= n <= most:
        raise QsfArgumentError(f"{n} outliers; a matrix [{n_rows}, {n_cols}] may have 1 to {most}")
    table = np.zeros(n, [("step", "<u2"), ("delta", "<f2")])
    table["step"] = MAX_STEP
    table["step"][ends - 1] = steps - n_bridges * MAX_STEP
    table["delta"][ends - 1] = halves
    first = np.zeros(-(-n_rows // TILE_ROWS) + 1, "<u4")
    np.add.at(first, tile_rows + 1, (n_bridges + 1).astype(np.uint32))
    return PackedOutliers(np.cumsum(first, dtype="<u4").tobytes() + table.tobytes(), n)
