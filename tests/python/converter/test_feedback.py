# SPDX-License-Identifier: Apache-2.0
"""Rounding with error feedback: against GPTQ written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.kept_tiles import decode_tiles
from oracle.naive_tiles import NL_LEVELS
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import KEPT, Dtype
from qsf_converter.rounding.quantisers import (
    ErrorSums,
    UnrepresentableError,
    feedback_rows,
    quantise_rows,
)
from qsf_converter.rounding.tiles import tile_bytes

QUANTISED = [d for d in Dtype if d not in (Dtype.MIXED, *KEPT, Dtype.F16, Dtype.F32)]
LEVELS = {  # what codes stand for, in scales
    Dtype.Q2: np.arange(4), Dtype.Q3: np.arange(8), Dtype.Q4: np.arange(16),
    Dtype.Q4_SYM: np.arange(-8, 8), Dtype.Q4_NL: np.array(NL_LEVELS),
    Dtype.Q8: np.arange(-127, 128), Dtype.Q2_SYM: np.arange(-1.5, 2),
    Dtype.TERNARY: np.arange(-1, 2),
    Dtype.TERNARY_DENSE: np.arange(-1, 2),
}  # fmt: skip


def hessian(n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """Second moments of inputs that hang together, damped by 1 %."""
    mix = rng.standard_normal((n_cols, n_cols)) / np.sqrt(n_cols) + np.eye(n_cols)
    inputs = rng.standard_normal((2 * n_cols + 8, n_cols)) @ mix
    moments: np.ndarray = inputs.T @ inputs / len(inputs)
    moments += np.eye(n_cols) * 0.01 * np.mean(np.diag(moments))
    return moments


def shuffled_order(n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks in any order, and columns in any order within them."""
    blocks = [rng.permutation(np.arange(c, min(c + 64, n_cols))) for c in range(0, n_cols, 64)]
    return np.concatenate([blocks[i] for i in rng.permutation(len(blocks))]).astype(np.int32)


def factor_of(moments: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The upper triangular U with U^T U = the inverse of the moments, in that order."""
    inverse = np.linalg.inv(moments[np.ix_(order, order)])
    return np.ascontiguousarray(np.linalg.cholesky(inverse).T).astype(np.float32)


def scales_and_mins(dtype: Dtype, block: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What plain search gives a block: [2, n_rows, 1]."""
    tiles = np.frombuffer(quantise_rows(dtype, block, weights=weights), np.uint8)
    heads = tiles.reshape(-1, tile_bytes(dtype, 16, 64))[:, :64].copy().view("<f2")
    halves = heads.reshape(-1, 2, 16).swapaxes(0, 1).reshape(2, -1, 1)[:, : len(block)]
    found: np.ndarray = halves.astype(np.float64)
    if dtype not in (Dtype.Q2, Dtype.Q3, Dtype.Q4):
        found[1] = 0
    return found


def naive_feedback(
    dtype: Dtype, rows: np.ndarray, factor: np.ndarray, order: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The values that GPTQ (Frantar et al. 2022) stores, one column after the other, in f64."""
    values = rows.astype(np.float64)
    stored = np.zeros_like(values)
    for k, col in enumerate(order):
        first = col // 64 * 64
        block = slice(first, first + 64)
        if k == 0 or order[k - 1] // 64 != col // 64:
            scale, low = scales_and_mins(dtype, values[:, block].astype(np.float32), weights[block])
        levels = LEVELS[dtype] * scale + low
        nearest = np.abs(values[:, col, None] - levels).argmin(axis=1)
        stored[:, col] = np.take_along_axis(levels, nearest[:, None], axis=1)[:, 0]
        error = (values[:, col] - stored[:, col]) / factor[k, k]
        values[:, order[k + 1 :]] -= error[:, None] * factor[k, k + 1 :]
    return stored


def output_error(moments: np.ndarray, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Mean squared error of each row's output, times the number of columns."""
    d = rows.astype(np.float64) - stored
    found: np.ndarray = np.einsum("ri,ij,rj->r", d, moments, d)
    return found


@given(
    dtype=st.sampled_from(QUANTISED),
    n_rows=st.sampled_from([1, 15, 16, 17, 65]),
    n_cols=st.sampled_from([1, 5, 63, 64, 100, 150]),
    seed=st.integers(0, 2**32),
)
def test_it_is_gptq(dtype: Dtype, n_rows: int, n_cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments, order = hessian(n_cols, rng), shuffled_order(n_cols, rng)
    factor = factor_of(moments, order)
    weights = np.diag(moments).astype(np.float32)
    rows = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
    stored, errors = np.empty_like(rows), ErrorSums()
    tiles = feedback_rows(dtype, rows, factor, order, errors, weights=weights, stored=stored)
    np.testing.assert_array_equal(stored, decode_tiles(dtype, tiles, n_rows, n_cols))
    assert errors.n_values == rows.size
    assert errors.mse == pytest.approx(
        np.mean((rows.astype(np.float64) - stored) ** 2), rel=1e-5, abs=1e-12
    )
    want = naive_feedback(dtype, rows, factor, order, weights)
    # A value half way between two levels may go either way, and the rest of its row with it. (No
    # block of one column behind others: two 2-bit scales would store it equally well.)
    is_same = np.isclose(stored, want, rtol=1e-6, atol=1e-6).all(axis=1)
    assert is_same.mean() >= 0.8 or n_rows - is_same.sum() <= 2
    lost, wanted = output_error(moments, rows, stored), output_error(moments, rows, want)
    assert (lost <= np.where(is_same, 1.01, 3) * wanted + 1e-6).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_without_correlations_it_is_plain_rounding(dtype: Dtype) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((81, 200)).astype(np.float32)
    weights = rng.random(200).astype(np.float32)
    order = shuffled_order(200, rng)
    tiles = feedback_rows(dtype, rows, np.eye(200, dtype=np.float32), order, weights=weights)
    assert tiles == quantise_rows(dtype, rows, weights=weights)


@pytest.mark.parametrize("dtype", [Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.TERNARY])
def test_outputs_are_nearer_than_with_plain_rounding(dtype: Dtype) -> None:
    rng = np.random.default_rng(5)
    moments, order = hessian(256, rng), shuffled_order(256, rng)
    weights = np.diag(moments).astype(np.float32)
    rows = rng.standard_normal((64, 256)).astype(np.float32)
    plain, fed = np.empty_like(rows), np.empty_like(rows)
    quantise_rows(dtype, rows, weights=weights, stored=plain)
    feedback_rows(dtype, rows, factor_of(moments, order), order, weights=weights, stored=fed)
    assert output_error(moments, rows, fed).sum() < 0.75 * output_error(moments, rows, plain).sum()


def test_ranges_of_rows_join_to_the_whole() -> None:
    """Nor does it matter what is below the diagonal."""
    rng = np.random.default_rng(6)
    order = shuffled_order(130, rng)
    factor = factor_of(hessian(130, rng), order)
    dirty = factor + np.tril(np.full((130, 130), np.nan, np.float32), -1)
    rows = rng.standard_normal((150, 130)).astype(np.float32)
    parts = [feedback_rows(Dtype.Q3, rows[i : i + 48], dirty, order) for i in range(0, 150, 48)]
    assert b"".join(parts) == feedback_rows(Dtype.Q3, rows, factor, order)


def test_orders_and_factors_that_are_none_are_refused() -> None:
    rows = np.ones((2, 130), np.float32)
    factor = np.eye(130, dtype=np.float32)
    order = np.arange(130, dtype=np.int32)

    def refused(order: np.ndarray, factor: np.ndarray, match: str) -> None:
        with pytest.raises(QsfArgumentError, match=match):
            feedback_rows(Dtype.Q4, rows, factor, order)

    mixed = order.copy()
    mixed[[3, 70]] = mixed[[70, 3]]
    refused(mixed, factor, "block at place 0 of 130")
    twice = order.copy()
    twice[5] = 6
    refused(twice, factor, "block at place 0 of 130")
    again = order.copy()
    again[64:128] = order[:64]
    refused(again, factor, "column 0 comes at places 0 and 64")
    for wrong in (-1, 130, 2**31 - 1):
        refused(np.where(order == 129, wrong, order).astype(np.int32), factor, "place 128 of 130")
    refused(order[:129], factor, r"\[129\]: \[130\]")
    refused(order, factor[:, :129], r"\[130, 129\]: \[130, 130\]")
    for bad in (0.0, -1.0, np.nan, np.inf):
        broken = factor.copy()
        broken[77, 77] = bad
        refused(order, broken, r"\[77, 77\]")
    with pytest.raises(QsfArgumentError, match="f16 is not a quantised type"):
        feedback_rows(Dtype.F16, rows, factor, order)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 7e4])
def test_what_cannot_be_stored_is_refused_with_its_place(value: float) -> None:
    rows = np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32)
    rows[37, 66] = value
    order = np.arange(70, dtype=np.int32)
    with pytest.raises(UnrepresentableError) as caught:
        feedback_rows(Dtype.TERNARY, rows, np.eye(70, dtype=np.float32), order)
    assert (caught.value.row, caught.value.col) == (37, 66)


def test_values_that_grow_out_of_bounds_are_refused() -> None:
    rows = np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32)
    factor = np.eye(70, dtype=np.float32)
    factor[np.triu_indices(70, 1)] = 1e7
    with pytest.raises(QsfConversionError, match="rows 0 to 15: use more damping"):
        feedback_rows(Dtype.Q4, rows, factor, np.arange(70, dtype=np.int32))
