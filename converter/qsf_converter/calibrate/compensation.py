"""Rounds a matrix so that its outputs, not its weights, change least: the sums and the solution.

A matrix W reads y where the original reads z, because all layers before it are already rounded.
These sums over all tokens of the text are computed:

    H = sum y^T y    C = sum z^T y    D = sum d^T y

d is the error of the residual stream so far (original - rounded), for matrices that add to it.
First the weights become those whose output is nearest to the original's output plus d: they
minimise sum |W' y - (W z + d)|^2, which is W' = W + (W (C - H) + D) H^-1. Then they are rounded
with error feedback under H (GPTQ, Frantar et al. 2022). Correcting for z is GPTAQ's idea (Li et
al. 2025). Both damp H, because the sums of few tokens are noisy.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import Dtype
from qsf_converter.original.layers import for_each
from qsf_converter.rounding.outliers import Entries, split, table_mask
from qsf_converter.rounding.plan import Target
from qsf_converter.rounding.quantisers import ErrorSums, feedback_rows, quantise_rows
from qsf_converter.rounding.tiles import BLOCK, TILE_ROWS
from qsf_converter.sources.checkpoint import Float32Array

Float64Array = NDArray[np.float64]

# Against the noise of few tokens, H's mean diagonal is added to its diagonal: times the number of
# inputs / the number of tokens, times these. Feedback gets at least LEAST_DAMPING times the mean,
# and more if it grows without bound. Corrections fit noise most (bench/LOG-quantisation.md).
DAMPING: Final = 0.5
LEAST_DAMPING: Final = 0.01
CORRECTION_DAMPING: Final = 2.0
_MORE: Final = 10  # times as much in each further attempt
_FURTHER_ATTEMPTS: Final = 2
_ROWS_AT_ONCE: Final = 512  # rows of a piece that one thread rounds
_LEAST_SPLIT: Final = 64  # below that, numpy's own inverse is as fast


class InputSums:
    def __init__(self, n_inputs: int) -> None:
        self.inputs = np.zeros((n_inputs, n_inputs))  # H
        self.original = np.zeros((n_inputs, n_inputs))  # C
        self.lacking: Float64Array | None = None  # D, [dim, n_inputs]
        self.n_tokens = 0

    def add(self, z: Float32Array, y: Float32Array, lacking: Float32Array | None) -> None:
        """Add tokens: inputs [n_tokens, n_inputs] of the original and of the rounded model."""
        self.n_tokens += len(y)
        factors = [y, z] if lacking is None else [y, z, lacking]
        products = [y] * len(factors)

        def multiply(i: int) -> None:
            products[i] = factors[i].T @ y

        for_each(len(factors), multiply)
        self.inputs += products[0]
        self.original += products[1]
        if lacking is not None:
            product = products[2].astype(np.float64)
            self.lacking = product if self.lacking is None else self.lacking + product


@dataclass(frozen=True, slots=True)
class Rounded:
    tiles: bytes
    stored: Float32Array  # [n_rows, n_cols], the values that the tiles represent
    errors: ErrorSums  # compared with the original's weights
    output_error: float  # relative squared error of the outputs caused by rounding
    entries: Entries | None = None  # of an outlier table, included in ``stored``


class Rounding:
    """The solution for one group of matrices; the factor of feedback is computed once."""

    def __init__(
        self, sums: InputSums, n_threads: int, correction_damping: float = CORRECTION_DAMPING
    ) -> None:
        """Factorise. Raises QsfConversionError when the sums are not finite."""
        self._sums = sums
        self._n_threads = n_threads
        inputs_per_token = len(sums.inputs) / max(1, sums.n_tokens)
        self._correction_damping = correction_damping * inputs_per_token
        self._damping = max(LEAST_DAMPING, DAMPING * inputs_per_token)
        self._prepare()

    def _prepare(self) -> None:
        diagonal = np.diag(self._sums.inputs)
        if not np.isfinite(diagonal).all():
            raise QsfConversionError("the activations on the calibration text are not finite")
        order = self._order = activation_order(diagonal)
        self._factor = inverse_factor(damp(self._sums.inputs[np.ix_(order, order)], self._damping))
        # What an error of a column costs once later columns have compensated for it
        self._costs = np.empty(len(order), np.float32)
        self._costs[order] = np.diag(self._factor) ** -2

    def round(self, dtype: Dtype, weights: Float32Array, *, has_table: bool = False) -> Rounded:
        """Round ``weights`` [n_rows, n_cols] of the original to ``dtype``.

        With ``has_table`` outliers go to ``Rounded.entries``, not to the tiles.

        Raises UnrepresentableError for a value that the type cannot hold.
        """
        if dtype in (Dtype.F16, Dtype.F32):
            return self._plain(dtype, weights)
        for _ in range(_FURTHER_ATTEMPTS):
            try:
                return self._feedback(dtype, weights, has_table)
            except QsfConversionError:  # feedback exceeded the range of numbers
                self._damping *= _MORE
                self._prepare()
        return self._feedback(dtype, weights, has_table)

    def _plain(self, dtype: Dtype, weights: Float32Array) -> Rounded:
        errors, stored = ErrorSums(), np.empty_like(weights)
        tiles = quantise_rows(dtype, weights, errors, stored=stored)
        return Rounded(tiles, stored, errors, self._output_error(weights, stored))

    def _feedback(self, dtype: Dtype, weights: Float32Array, has_table: bool) -> Rounded:
        wanted = plain = self._corrected(weights)
        entries = None
        if has_table:
            mean, sigma = float(weights.mean()), float(weights.std())
            plain, entries = split(wanted, table_mask(wanted, mean, sigma))
        stored = np.empty_like(wanted)

        def part(rows: slice) -> bytes:
            return feedback_rows(
                dtype,
                plain[rows],
                self._factor,
                self._order,
                weights=self._costs,
                stored=stored[rows],
            )

        with ThreadPoolExecutor(self._n_threads) as pool:
            tiles = b"".join(pool.map(part, row_ranges(len(weights))))
        if entries is not None:
            # The table holds the difference to the values that replaced the outliers, not to the
            # tiles: feedback has already compensated the error of the tiles.
            at = (entries.rows, entries.cols)
            deltas = (wanted[at] - plain[at]).astype(np.float16).astype(np.float32)
            stored[at] += deltas
            entries = Entries(entries.rows, entries.cols, deltas)
        errors = ErrorSums()
        errors.observe(weights, stored.copy())
        return Rounded(tiles, stored, errors, self._output_error(wanted, stored), entries)

    def _corrected(self, weights: Float32Array) -> Float32Array:
        """Return W' (see the module)."""
        gap = weights @ (self._sums.original - self._sums.inputs).astype(np.float32)
        if self._sums.lacking is not None:
            gap += self._sums.lacking
        damped = damp(self._sums.inputs.astype(np.float32), self._correction_damping)
        wanted: Float32Array = weights + np.linalg.solve(damped, gap.T).T
        return wanted

    def _output_error(self, wanted: Float32Array, stored: Float32Array) -> float:
        inputs = self._sums.inputs.astype(np.float32)
        error = wanted - stored
        energy = float(np.vdot(wanted @ inputs, wanted))
        return max(0.0, float(np.vdot(error @ inputs, error))) / energy if energy > 0 else 0.0


def damp(matrix: NDArray[Any], share: float) -> NDArray[Any]:
    matrix[np.diag_indices(len(matrix))] += share * np.diag(matrix).mean() or 1.0
    return matrix


def row_ranges(n_rows: int) -> Iterator[slice]:
    step = _ROWS_AT_ONCE // TILE_ROWS * TILE_ROWS
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def activation_order(energies: Float64Array) -> NDArray[np.int32]:
    """Return columns by falling energy: first blocks, then columns within a block.

    For columns that are rounded first, more columns are left to compensate.
    """
    n_cols = len(energies)
    starts = range(0, n_cols, BLOCK)
    of_blocks = np.array([energies[start : start + BLOCK].sum() for start in starts])
    parts = []
    for block in np.argsort(-of_blocks, kind="stable"):
        start = int(block) * BLOCK
        parts.append(start + np.argsort(-energies[start : start + BLOCK], kind="stable"))
    return np.concatenate(parts).astype(np.int32)


def inverse_factor(matrix: NDArray[np.floating]) -> Float32Array:
    """Return the upper triangular U with U^T U = matrix^-1, of a positive definite matrix."""
    try:
        return _inverse_factor(matrix).astype(np.float32)
    except np.linalg.LinAlgError:  # lost to the rounding of halves
        return _inverse_factor(matrix.astype(np.float64)).astype(np.float32)


def _inverse_factor(matrix: NDArray[np.floating]) -> NDArray[np.floating]:
    """U is the inverse of the upper triangular R with R R^T = matrix.

    By halves, [[A, B], [B^T, C]], so that nearly all of it are products of matrices.
    """
    n = len(matrix)
    if n <= _LEAST_SPLIT:
        lower = np.linalg.cholesky(matrix[::-1, ::-1])
        return np.triu(np.linalg.inv(lower[::-1, ::-1]))
    half, out = n // 2, np.zeros_like(matrix)
    of_c = out[half:, half:] = _inverse_factor(matrix[half:, half:])
    beside = matrix[:half, half:] @ of_c.T  # what R has there
    of_a = out[:half, :half] = _inverse_factor(matrix[:half, :half] - beside @ beside.T)
    out[:half, half:] = -of_a @ beside @ of_c
    return out


def round_plainly(target: Target, rows: Float32Array) -> Rounded:
    """Round a matrix to nearest, without sums of its inputs."""
    errors, stored = ErrorSums(), np.empty_like(rows)
    tiles = quantise_rows(target.dtype, rows, errors, stored=stored)
    return Rounded(tiles, stored, errors, 0.0)
