"""The rounding of every quantisation type: choice of codes, scales and mins.

Scales and mins belong to a block of 64 values of a row, of q5_0, q4_k and q5_k to 32. The
arithmetic is in C (csrc/quantise/); here are its rules, and the errors for values that cannot be
stored.

Rule ``nearest`` is the simplest one, for comparison. w is a value of the block, amax the largest
|w|:

- 2, 3 and 4 bits: ``scale = (max - min) / 3``, ``/ 7`` or ``/ 15``, ``code = (w - min) / scale``
- 8-bit: ``scale = amax / 127``; 2-bit symmetric: ``amax / 1.5``; ternary: ``amax``
- 4-bit symmetric: ``scale = -w / 8``, q5_0: ``-w / 16``, of the w with |w| = amax: one
end of the range is exact, the other may lose up to one step

The scales and mins of q4_k and q5_k, whose rows are whole blocks of 256 values, are 0 to 63 of an
f16 each that 256 values have in common: rule ``nearest`` sets these two. No min is above 0.

A min is rounded to the nearest f16, a scale up to the next: the codes then span the block, and a
tiny range becomes the smallest f16 instead of vanishing.

Rule ``search``, the default, finds the scale and min with the least squared error, weighted by
column with ``weights``: for ternary and 2-bit symmetric the best of all, for other types the best
of some dozens (csrc/quantise/fit_tmpl.h). It never loses more than ``nearest``.

Rule ``absmean``, for ternary types, is BitNet b1.58's (Ma et al. 2024): one scale for the
whole tensor, the mean |w|.

In all rules a weight gets the code whose value, made from the *stored* f16 scale and min, is
nearest to w. A block whose values are all equal has scale 0, codes 0 and the value as its min if
the type has mins; a block of zeros has scale 0 and the code of zero (``absmean``: that one scale).
Weights that are ternary already, -s, 0 and s with an f16 s, are kept exactly by ``search`` and
``nearest``. f16 and f32 store the values themselves.

`feedback_rows` is error feedback: GPTQ (Frantar et al. 2022).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfConversionError, QsfNumericError
from qsf.file.layout import Dtype
from qsf.native import quantise as native
from qsf_converter.rounding.tiles import CENTRES, TILE_ROWS, Float32Array, tile_bytes

Rule = Literal["search", "nearest", "absmean"]

F16_MAX = 65504.0

_RULES: Final[dict[str, int]] = {
    "search": native.RULE_SEARCH,
    "nearest": native.RULE_NEAREST,
    "absmean": native.RULE_SCALE,
}


class UnrepresentableError(ValueError):
    """A value that the type cannot store: NaN, infinity, or too large for f16.

    ``row`` and ``col`` are relative to the array that was passed.
    """

    def __init__(self, row: int, col: int, value: float, limit: float) -> None:
        """Describe ``value`` at [row, col], which exceeds the ``limit`` of the type."""
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
    n_values: int = 0
    squared_error: float = 0.0
    max_error: float = 0.0
    source_energy: float = 0.0
    stored_energy: float = 0.0
    inner_product: float = 0.0

    def add(self, other: ErrorSums | native.RoundingSums) -> None:
        self.n_values += other.n_values
        self.squared_error += other.squared_error
        self.max_error = max(self.max_error, other.max_error)
        self.source_energy += other.source_energy
        self.stored_energy += other.stored_energy
        self.inner_product += other.inner_product

    def observe(self, source: Float32Array, stored: Float32Array) -> None:
        """Include two arrays of the same shape; ``stored`` is overwritten."""
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
        return self.squared_error / self.n_values if self.n_values else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and stored weights; 1 if both are zero."""
        product = math.sqrt(self.source_energy * self.stored_energy)
        if product == 0.0:
            return 1.0 if self.source_energy == self.stored_energy else 0.0
        return min(1.0, self.inner_product / product)


def quantise_rows(
    dtype: int,
    rows: Float32Array,
    errors: ErrorSums | None = None,
    *,
    weights: Float32Array | None = None,
    rule: Rule = "search",
    tensor_scale: float | None = None,
    stored: Float32Array | None = None,
) -> bytes:
    """Return the tiles of ``rows``, [n_rows, n_cols].

    If the rows are one range of a larger matrix, their number is a multiple of 16, except in the
    last range, which is padded. May run on several threads at once; the bytes do not depend on
    threads, ranges or the machine.

    Args:
        dtype: the type, not ``mixed``.
        rows: f32 [n_rows, n_cols].
        errors: the rounding errors are added to it.
        weights: f32 [n_cols], >= 0, weight of each column's squared error, such as the mean square
            of its input; None: all equal.
        rule: see the module.
        tensor_scale: of rule ``absmean``: that of the whole tensor; None: the mean |w| of
            ``rows``.
        stored: f32 [n_rows, n_cols], C-contiguous; receives the values of the tiles.

    Raises:
        UnrepresentableError: a value is not finite or does not fit the type.
        QsfArgumentError: weights, rule, scale or shapes that are not valid.
    """
    if rule not in _RULES:
        raise QsfArgumentError(f"rule {rule!r} is not one of {', '.join(_RULES)}")
    if rule == "absmean":
        tensor_scale = absmean((rows,)) if tensor_scale is None else tensor_scale
    elif tensor_scale is not None:
        raise QsfArgumentError(f"tensor_scale is for the rule absmean, not {rule}")
    tiles = np.empty(tile_bytes(dtype, *rows.shape), np.uint8)
    sums = native.quantise_rows(
        native.Rounding(dtype, _RULES[rule], tensor_scale or 0.0, weights), rows, tiles, stored
    )
    if sums.bad_row is not None:
        raise _unrepresentable(dtype, rows, sums.bad_row)
    if errors is not None:
        errors.add(sums)
    return tiles.tobytes()


def feedback_rows(
    dtype: int,
    rows: Float32Array,
    factor: Float32Array,
    order: NDArray[np.int32],
    errors: ErrorSums | None = None,
    *,
    weights: Float32Array | None = None,
    stored: Float32Array | None = None,
) -> bytes:
    """Return the tiles of ``rows``; each column compensates for the errors of earlier columns.

    GPTQ: Frantar et al. 2022. A block's scale and min are those of rule ``search`` for its weights
        after the compensation so far. Ranges of rows as in `quantise_rows`; multiples of 64
    rows are fastest.

    Args:
        dtype: a type with codes.
        rows: f32 [n_rows, n_cols].
        factor: f32 [n_cols, n_cols], upper triangular, U with U^T U the inverse of the damped
            Hessian whose rows and columns are in ``order``. Values below the diagonal are ignored.
        order: int32 [n_cols]: which column comes k-th. The 64 columns of a block (the last may be
            shorter) follow each other; the order of blocks, and within them, is free.
        errors: the errors against ``rows`` are added to it. Feedback makes them larger than
            plain rounding does; it makes the error of the layer's output smaller.
        weights: f32 [n_cols], for the search, in the order of the columns of ``rows``, such as
            the Hessian's diagonal.
        stored: f32 [n_rows, n_cols], C-contiguous; receives the values of the tiles.

    Raises:
        UnrepresentableError: a value is not finite or does not fit the type.
        QsfArgumentError: an order, factor, weights or shapes that are not valid.
        QsfConversionError: the values grew out of bounds.
    """
    tiles = np.empty(tile_bytes(dtype, *rows.shape), np.uint8)
    sums = native.feedback_rows(
        native.Rounding(dtype, native.RULE_SEARCH, 0.0, weights), rows, factor, order, tiles, stored
    )
    if sums.bad_row is not None:
        band = rows[sums.bad_row : sums.bad_row + TILE_ROWS]
        if np.abs(band).max() <= _limit(dtype):  # False if a value is NaN
            raise QsfConversionError(
                f"error feedback grew out of bounds in rows {sums.bad_row} to "
                f"{sums.bad_row + len(band) - 1}: use more damping"
            )
        raise _unrepresentable(dtype, rows, sums.bad_row)
    if errors is not None:
        errors.add(sums)
    return tiles.tobytes()


def absmean(parts: Iterable[Float32Array]) -> float:
    total, n_values = 0.0, 0
    for part in parts:
        total += float(np.abs(part).sum(dtype=np.float64))
        n_values += part.size
    mean = total / n_values if n_values else 0.0
    if not math.isfinite(mean):
        raise QsfNumericError("the mean magnitude of the tensor is not finite")
    return mean


def _unrepresentable(dtype: int, rows: Float32Array, first_row: int) -> UnrepresentableError:
    """Find the value that made a tile row fail: the first that is not finite, else the largest."""
    band = rows[first_row : first_row + TILE_ROWS]
    bad = np.argwhere(~np.isfinite(band))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
    else:
        row, col = (int(idx) for idx in np.unravel_index(np.abs(band).argmax(), band.shape))
    return UnrepresentableError(first_row + row, col, float(band[row, col]), _limit(dtype))


def _limit(dtype: int) -> float:
    """Return the largest value that is safe without knowing its scale and min as f16."""
    # A scale is the largest value divided by the largest code; 8bit does not use code 0, which
    # means -128.
    return math.inf if dtype == Dtype.F32 else F16_MAX * min(CENTRES.get(dtype, 1), 127)
