# SPDX-License-Identifier: Apache-2.0
"""Rounding by sums over texts: the solution, the order and the factor, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import Dtype
from qsf_converter.calibrate import compensation
from qsf_converter.calibrate.compensation import (
    DAMPING,
    InputSums,
    Rounding,
    activation_order,
    inverse_factor,
)
from qsf_converter.rounding.quantisers import UnrepresentableError, feedback_rows, quantise_rows

Array = NDArray[np.float32]
TYPES = (Dtype.Q2, Dtype.Q4_SYM, Dtype.Q8)


def inputs(n_tokens: int, n_cols: int, seed: int = 0) -> Array:
    """Inputs that hang together, some larger than others."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((n_cols, n_cols)) / np.sqrt(n_cols) + np.eye(n_cols)
    sizes = np.exp(rng.standard_normal(n_cols))
    values: Array = (rng.standard_normal((n_tokens, n_cols)) @ mix * sizes).astype(np.float32)
    return values


def matrix(n_rows: int, n_cols: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_rows, n_cols)) * 0.05).astype(np.float32)


def sums_of(z: Array, y: Array, lacking: Array | None = None) -> InputSums:
    sums = InputSums(y.shape[1])
    for part in (slice(0, 100), slice(100, None)):
        sums.add(z[part], y[part], None if lacking is None else lacking[part])
    return sums


@pytest.mark.parametrize("n", [1, 2, 256, 257, 520])
def test_the_factor_is_that_of_the_inverse(n: int) -> None:
    x = inputs(2 * n + 5, n).astype(np.float64)
    moments = x.T @ x + np.eye(n) * 0.05 * (x * x).sum() / n
    factor = inverse_factor(moments)
    assert factor.dtype == np.float32
    assert factor.shape == (n, n)
    np.testing.assert_array_equal(factor, np.triu(factor))
    assert (np.diag(factor) > 0).all()
    product = factor.astype(np.float64).T @ factor @ moments
    np.testing.assert_allclose(product, np.eye(n), atol=1e-4)


@pytest.mark.parametrize("n_cols", [1, 63, 64, 65, 200, 256])
def test_the_order_takes_whole_blocks_by_falling_energy(n_cols: int) -> None:
    energies = np.random.default_rng(n_cols).random(n_cols)
    order = activation_order(energies)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(n_cols))
    ends = np.flatnonzero(np.diff(order // 64)) + 1
    parts = np.split(order, ends)
    assert len(parts) == -(-n_cols // 64)
    totals = []
    for part in parts:
        assert (np.diff(energies[part]) <= 0).all()
        totals.append(energies[part].sum())
    assert (np.diff(totals) <= 0).all()


def test_equal_energies_keep_their_order() -> None:
    np.testing.assert_array_equal(activation_order(np.ones(130)), np.arange(130))


@pytest.mark.parametrize("dtype", TYPES)
def test_where_nothing_is_to_be_made_up_for_it_is_gptq(dtype: Dtype) -> None:
    n_cols = 130
    y, weights = inputs(500, n_cols), matrix(40, n_cols)
    sums = sums_of(y, y)
    found = Rounding(sums, 1).round(dtype, weights)
    moments = y.astype(np.float64).T @ y
    order = activation_order(np.diag(moments))
    moments += np.eye(n_cols) * DAMPING * n_cols / len(y) * np.diag(moments).mean()
    upper = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T
    stored = np.empty_like(weights)
    costs = np.empty(n_cols, np.float32)
    costs[order] = np.diag(upper) ** -2
    feedback_rows(dtype, weights, upper.astype(np.float32), order, weights=costs, stored=stored)
    # The factor is computed in another way: some near ties fall to the other side.
    assert (found.stored != stored).mean() < 0.02
    lost, wanted = (output_error(weights, y, q, y) for q in (found.stored, stored))
    assert lost == pytest.approx(wanted, rel=0.02)
    plain = np.empty_like(weights)
    quantise_rows(dtype, weights, weights=np.diag(sums.inputs).astype(np.float32), stored=plain)
    assert lost < 0.8 * output_error(weights, y, plain, y)


def output_error(
    weights: Array, z: Array, stored: Array, y: Array, lacking: Array | float = 0.0
) -> float:
    error = y @ stored.T - (z @ weights.T + lacking)
    return float((error.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("dtype", TYPES)
def test_what_rounding_before_did_to_the_input_is_made_up_for(dtype: Dtype) -> None:
    z = inputs(400, 80)
    y = (z + 0.2 * inputs(400, 80, seed=7)).astype(np.float32)
    weights = matrix(48, 80)
    corrected = Rounding(sums_of(z, y), 1).round(dtype, weights)
    blind = Rounding(sums_of(y, y), 1).round(dtype, weights)
    lost = output_error(weights, z, corrected.stored, y)
    assert lost < 0.97 * output_error(weights, z, blind.stored, y)
    # Without rounding: the least squares solution, but for the damping.
    exact = Rounding(sums_of(z, y), 1, 1e-9)._corrected(weights)
    solved = np.linalg.lstsq(y.astype(np.float64), z @ weights.T, rcond=None)[0].T
    np.testing.assert_allclose(exact, solved, atol=2e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_stream_lacks_is_added(dtype: Dtype) -> None:
    z, weights = inputs(400, 80), matrix(48, 80)
    lacking = (z @ matrix(48, 80, seed=9).T * 0.3).astype(np.float32)
    corrected = Rounding(sums_of(z, z, lacking), 1).round(dtype, weights)
    blind = Rounding(sums_of(z, z), 1).round(dtype, weights)
    lost = output_error(weights, z, corrected.stored, z, lacking)
    assert lost < 0.5 * output_error(weights, z, blind.stored, z, lacking)


def test_a_correction_does_not_fit_the_noise_of_few_tokens() -> None:
    n_cols, n_rows = 256, 64
    z, weights = inputs(2 * n_cols, n_cols), matrix(n_rows, n_cols)
    noise = np.random.default_rng(5).standard_normal((2 * n_cols, n_rows)).astype(np.float32)
    noise *= 0.06 * (z @ weights.T).std()  # about as much as the layers before lose at 4 bits
    fitted, others = slice(0, n_cols), slice(n_cols, None)
    noisy, plain = (
        output_error(
            weights, z[others], Rounding(sums, 1).round(Dtype.Q4, weights).stored, z[others]
        )
        for sums in (
            sums_of(z[fitted], z[fitted], noise[fitted]),
            sums_of(z[fitted], z[fitted]),
        )
    )
    assert noisy < 1.25 * plain


def test_sums_of_parts_are_sums_of_all_tokens() -> None:
    z, y, lacking = inputs(300, 30), inputs(300, 30, 3), inputs(300, 20, 4)
    sums = InputSums(30)
    for i in range(0, 300, 7):
        sums.add(z[i : i + 7], y[i : i + 7], lacking[i : i + 7])
    assert sums.lacking is not None
    assert {a.dtype for a in (sums.inputs, sums.original, sums.lacking)} == {np.dtype("f8")}
    y64 = y.astype(np.float64)
    np.testing.assert_allclose(sums.inputs, y64.T @ y64, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(sums.original, z.T @ y64, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(sums.lacking, lacking.T @ y64, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
def test_inputs_that_are_always_zero_do_no_harm(dtype: Dtype) -> None:
    weights = matrix(20, 130)
    y = inputs(300, 130)
    y[:, :70] = 0
    found = Rounding(sums_of(y, y), 1).round(dtype, weights)
    assert np.isfinite(found.stored).all()
    assert 0 < found.output_error < 1
    # What never matters is still stored about as it is.
    error = found.stored[:, :70] - weights[:, :70]
    assert (error**2).sum() < 0.6 * (weights[:, :70] ** 2).sum()
    nothing = Rounding(sums_of(y * 0, y * 0), 1).round(dtype, weights)
    assert np.isfinite(nothing.stored).all()
    assert nothing.output_error == 0
    assert nothing.errors.cosine > 0.7


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_out_of_range_are_an_error(value: float) -> None:
    y = inputs(50, 70)
    sums = sums_of(y, y)
    sums.inputs[5, 5] = value  # a large activation's square
    with pytest.raises(QsfConversionError, match="activations on the calibration text are not"):
        Rounding(sums, 1)


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.F32])
def test_floats_are_stored_as_they_are(dtype: Dtype) -> None:
    z, weights = inputs(100, 70), matrix(20, 70)
    found = Rounding(sums_of(z, z * np.float32(1.1)), 1).round(dtype, weights)
    stored = weights.astype("<f2" if dtype == Dtype.F16 else "<f4").astype(np.float32)
    np.testing.assert_array_equal(found.stored, stored)
    assert found.tiles == quantise_rows(dtype, weights)
    assert found.errors.max_error == np.abs(stored - weights).max()


@pytest.mark.parametrize("dtype", [Dtype.Q2, Dtype.Q4])
def test_the_result_does_not_depend_on_threads(
    dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compensation, "_ROWS_AT_ONCE", 32)
    z, y, weights = inputs(300, 100), inputs(300, 100, 5), matrix(150, 100)
    one = Rounding(sums_of(z, y), 1).round(dtype, weights)
    for n_threads in (2, 5):
        other = Rounding(sums_of(z, y), n_threads).round(dtype, weights)
        assert other.tiles == one.tiles
        np.testing.assert_array_equal(other.stored, one.stored)
        assert other.errors == one.errors
    monkeypatch.setattr(compensation, "_ROWS_AT_ONCE", 512)
    assert Rounding(sums_of(z, y), 1).round(dtype, weights).tiles == one.tiles


def test_a_weight_that_no_type_holds_is_named() -> None:
    z, weights = inputs(100, 70), matrix(20, 70)
    weights[17, 3] = 1e6
    with pytest.raises(UnrepresentableError) as caught:
        Rounding(sums_of(z, z), 1).round(Dtype.Q4, weights)
    assert (caught.value.row, caught.value.col) == (17, 3)


def test_more_damping_where_feedback_leaves_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    z, weights = inputs(100, 70), matrix(20, 70)
    tried: list[float] = []
    inverse = compensation.inverse_factor

    def noted(damped: NDArray[np.float64]) -> Array:
        moments = z.astype(np.float64).T @ z
        tried.append((np.trace(damped) - np.trace(moments)) / np.trace(moments))
        return inverse(damped)

    def refused(*_args: object, **_options: object) -> bytes:
        if len(tried) < 3:
            raise QsfConversionError("out of bounds")
        return feedback_rows(*_args, **_options)  # type: ignore[arg-type]

    monkeypatch.setattr(compensation, "inverse_factor", noted)
    monkeypatch.setattr(compensation, "feedback_rows", refused)
    found = Rounding(sums_of(z, z), 1).round(Dtype.Q4, weights)
    assert np.isfinite(found.stored).all()
    np.testing.assert_allclose(tried, [0.35, 3.5, 35], rtol=1e-4)
