# SPDX-License-Identifier: Apache-2.0
"""Rounding by sums over texts and with error feedback, against GPTQ written out in numpy; layers
that are changed into equivalent ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from make import calibrated_models, golden_families, tiny_checkpoints
from oracle.kept_tiles import decode_tiles
from oracle.naive_tiles import NL_LEVELS
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import KEPT, Dtype, TensorType, layer_unit
from qsf_converter.calibrate import compensation, transforms
from qsf_converter.calibrate.compensation import (
    DAMPING,
    LEAST_DAMPING,
    InputSums,
    Rounding,
    activation_order,
    inverse_factor,
)
from qsf_converter.calibrate.transforms import ROTATED, SCALED, choose, rotate_heads, scale_inputs
from qsf_converter.original.layers import Original
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.quantisers import (
    ErrorSums,
    UnrepresentableError,
    feedback_rows,
    quantise_rows,
)
from qsf_converter.rounding.tiles import tile_bytes
from qsf_converter.sources.families.rules import INPUT_GROUPS

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


def test_one_direction_may_have_nearly_all_of_the_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In f32 as in use; where halves lose that the matrix is positive, f64 finds it."""
    n = 700
    x = inputs(2 * n, n).astype(np.float32)
    moments = x.T @ x
    large = np.random.default_rng(1).normal(size=n).astype(np.float32)
    moments += np.outer(large, large) * np.trace(moments)
    moments += np.eye(n, dtype=np.float32) * LEAST_DAMPING * np.trace(moments) / n
    product = inverse_factor(moments).astype(np.float64)
    product = product.T @ product @ moments
    assert np.abs(np.diag(product) - 1).max() < 0.02
    halves = compensation._inverse_factor

    def fail_in_f32(matrix: Any) -> Any:
        if matrix.dtype == np.float32:
            raise np.linalg.LinAlgError
        return halves(matrix)

    monkeypatch.setattr(compensation, "_inverse_factor", fail_in_f32)
    product = inverse_factor(moments).astype(np.float64)
    assert np.abs(np.diag(product.T @ product @ moments) - 1).max() < 0.02


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
    np.testing.assert_array_equal(activation_order(np.ones(n_cols)), np.arange(n_cols))


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
        for sums in (sums_of(z[fitted], z[fitted], noise[fitted]), sums_of(z[fitted], z[fitted]))
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


def test_activations_and_weights_out_of_range_are_an_error() -> None:
    y, weights = inputs(50, 70), matrix(20, 70)
    weights[17, 3] = 1e6
    with pytest.raises(UnrepresentableError) as caught:
        Rounding(sums_of(y, y), 1).round(Dtype.Q4, weights)
    assert (caught.value.row, caught.value.col) == (17, 3)
    for value in (np.nan, np.inf):
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


# ---- error feedback ----
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


def errors_of_rows(moments: np.ndarray, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
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
    lost, wanted = errors_of_rows(moments, rows, stored), errors_of_rows(moments, rows, want)
    assert (lost <= np.where(is_same, 1.01, 3) * wanted + 1e-6).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_without_correlations_it_is_plain_rounding(dtype: Dtype) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((81, 200)).astype(np.float32)
    weights = rng.random(200).astype(np.float32)
    order = shuffled_order(200, rng)
    tiles = feedback_rows(dtype, rows, np.eye(200, dtype=np.float32), order, weights=weights)
    assert tiles == quantise_rows(dtype, rows, weights=weights)


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
    rows[37, 66] = 0
    factor = np.triu(np.full((70, 70), 1e7, np.float32), 1) + np.eye(70, dtype=np.float32)
    with pytest.raises(QsfConversionError, match="rows 0 to 15: use more damping"):
        feedback_rows(Dtype.Q4, rows, factor, order)  # values grow out of bounds


# ---- equivalent layers ----
T = TensorType
OF_QKV = (T.Q, T.K, T.V)  # of a layer without a gate
OF_OUT, _, OF_GATE, OF_DOWN = INPUT_GROUPS[1:]

MODELS: dict[str, Callable[[Path], Path]] = {
    f"llama-{n_kv_heads}": lambda f, n=n_kv_heads: tiny_checkpoints.make_llama(
        f, n_heads=4, n_kv_heads=n, head_dim=16, attention_bias=n == 2, mlp_bias=n == 2
    )
    for n_kv_heads in (4, 2, 1)
} | {"gpt2": lambda f: tiny_checkpoints.make_gpt2(f, dim=96, n_heads=3)}
# Norms before, behind and between; attention and FFN beside each other; factors and caps.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    name: golden_families.cases()[name].write
    for name in ("phi", "gpt_neox", "olmo2", "bitnet", "gemma2", "granite-bias", "qwen3_5-three",
                 "granitemoehybrid-h", "falcon_h1")
}  # fmt: skip


def stream(original: Original) -> Array:
    return original.embed(np.random.default_rng(4).integers(0, original.header.n_vocab, (2, 30)))


def energies_of(original: Original, weights: Weights, x: Array) -> dict[Any, Any]:
    found: dict[Any, Any] = {}

    def observe(kinds: tuple[TensorType, ...], y: Array) -> None:
        found[kinds] = found.get(kinds, 0) + (y.T @ y).astype(np.float64)

    original.layer(weights, x, observe)
    return found


def same_for_shared_heads(scales: Array, original: Original) -> Array:
    header = original.header
    n_kv_heads = header.n_kv_heads or header.n_heads
    grid = scales.reshape(n_kv_heads, -1, header.head_dim)
    return np.repeat(grid[:, :1], grid.shape[1], axis=1).ravel()


# Nothing in front can take a factor: an activation, the stream itself, or a norm that two read.
UNSCALED = {
    ("gpt2", OF_DOWN), ("phi", OF_QKV), ("phi", (T.FFN_UP,)), ("phi", OF_DOWN),
    ("gpt_neox", OF_DOWN), ("olmo2", OF_QKV), ("olmo2", OF_GATE), ("falcon_h1", (T.SSD_OUT,)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_scaled_inputs_leave_the_layer_as_it_is(name: str, tmp_path: Path) -> None:
    with calibrated_models.original({**MODELS, **FAMILIES}[name](tmp_path / "m")) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        before = original.layer(weights, x)
        rng = np.random.default_rng(0)
        for kinds in energies_of(original, weights, x):
            scales = np.exp(rng.normal(0, 1, weights[kinds[0]].shape[1])).astype(np.float32)
            if kinds == OF_OUT and not weights.kind.has_attention:
                continue  # which nothing scales
            if kinds == OF_OUT:
                scales = same_for_shared_heads(scales, original)
            kept = {kind: values.copy() for kind, values in weights.items()}
            scaled = scale_inputs(weights, kinds, scales)
            for kind, values in kept.items():
                np.testing.assert_array_equal(weights[kind], values)
            if (name, kinds) in UNSCALED:
                assert scaled is None
                continue
            assert scaled is not None
            for kind in kinds:
                assert np.abs(scaled[kind] - weights[kind]).max() > 0.01
            assert {values.dtype for values in scaled.values()} == {np.dtype("f4")}
            np.testing.assert_allclose(original.layer(scaled, x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(MODELS))
def test_turned_heads_leave_the_layer_as_it_is(name: str, tmp_path: Path) -> None:
    with calibrated_models.original(MODELS[name](tmp_path / "m")) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        turned = rotate_heads(weights)
        assert turned is not None
        for kind in (T.V, T.ATTN_OUT):
            assert np.abs(turned[kind] - weights[kind]).max() > 0.01
            assert turned[kind].dtype == np.float32
        out = original.layer(turned, x)
        np.testing.assert_allclose(out, original.layer(weights, x), rtol=1e-4, atol=1e-4)
        # The sums that are turned in place of being gathered anew.
        before, after = (energies_of(original, w, x)[OF_OUT] for w in (weights, turned))
        found = transforms._rotated(before, original.header.head_dim)
        np.testing.assert_allclose(found, after, rtol=1e-3, atol=1e-3 * np.abs(after).max())


@pytest.mark.parametrize("n", [1, 2, 64])
def test_hadamard_is_orthogonal(n: int) -> None:
    turn = transforms.hadamard(n)
    np.testing.assert_allclose(turn @ turn.T, np.eye(n), atol=1e-6)
    np.testing.assert_allclose(np.abs(turn), n**-0.5, rtol=1e-6)


def chosen(
    original: Original, weights: Weights, x: Array, dtype: Dtype = Dtype.Q2
) -> tuple[Weights, dict[TensorType, str]]:
    dtypes = {kind: Dtype.F32 if w.ndim == 1 else dtype for kind, w in weights.items()}
    return choose(weights, dtypes, energies_of(original, weights, x))[:2]


def true_error(
    original: Original, weights: Weights, x: Array, kinds: tuple[TensorType, ...], dtype: Dtype
) -> float:
    """What plain rounding of a group does to its outputs, each token computed."""
    total = 0.0
    seen: list[Array] = []
    original.layer(weights, x, lambda k, y: seen.append(y) if k == kinds else None)
    y = np.concatenate(seen)
    energies = np.square(y).sum(axis=0)
    for kind in kinds:
        stored = np.empty_like(weights[kind])
        quantise_rows(dtype, weights[kind], weights=energies, stored=stored)
        total += float(np.square(y @ (stored - weights[kind]).T).sum())
    return total


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_inputs_that_stand_out_are_scaled(n_kv_heads: int, tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", n_kv_heads=n_kv_heads, head_dim=24, dim=128, ffn_dim=128
    )
    with calibrated_models.original(folder) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        for norm in (T.ATTN_NORM, T.FFN_NORM):
            weights[norm] = weights[norm].copy()
            weights[norm][[3, 40, 77]] *= 30
        changed, actions = chosen(original, weights, x, Dtype.Q4_SYM)
        assert {actions.get(kind) for kind in (*OF_QKV, *OF_GATE)} == {SCALED}
        out = original.layer(changed, x)
        before = original.layer(weights, x)
        np.testing.assert_allclose(out, before, rtol=1e-3, atol=1e-3 * np.abs(before).max())
        for kinds in (OF_QKV, OF_GATE):
            lost = true_error(original, changed, x, kinds, Dtype.Q4_SYM)
            assert lost < 0.9 * true_error(original, weights, x, kinds, Dtype.Q4_SYM)
        # With few codes the search by weights has spent them on those columns already.
        assert not set(chosen(original, weights, x, Dtype.Q2)[1]) & {*OF_QKV, *OF_GATE}


def test_heads_with_outlying_values_are_turned(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_kv_heads=4, head_dim=16, dim=128)
    with calibrated_models.original(folder) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        # In every head one column stands out, of weights whose inputs are alike.
        out = weights[T.ATTN_OUT].copy()
        out[:, 5::16] *= 12
        weights[T.ATTN_OUT] = out
        changed, actions = chosen(original, weights, x)
        assert actions[T.ATTN_OUT].startswith(ROTATED)
        after, before = original.layer(changed, x), original.layer(weights, x)
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-3 * np.abs(before).max())
        lost = true_error(original, changed, x, OF_OUT, Dtype.Q2)
        assert lost < 0.9 * true_error(original, weights, x, OF_OUT, Dtype.Q2)


def test_what_gains_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    with calibrated_models.original(folder) as original:
        weights = original.weights(layer_unit(0))
        assert rotate_heads(weights) is None  # of 24
        # Inputs that are all alike: no column is worth more than another.
        alike: dict[tuple[TensorType, ...], NDArray[np.float64]] = {
            group: np.eye(weights[group[0]].shape[1]) * 7.0
            for group in (OF_QKV, OF_OUT, OF_GATE, OF_DOWN)
        }
        dtypes = {kind: Dtype.F32 if w.ndim == 1 else Dtype.Q3 for kind, w in weights.items()}
        changed, actions, _ = choose(weights, dtypes, alike)
        assert actions == {}
        assert all(changed[kind] is values for kind, values in weights.items())
        # Nor are floats changed, whatever the inputs.
        floats = dict.fromkeys(weights, Dtype.F16)
        changed, actions, _ = choose(
            weights, floats, energies_of(original, weights, stream(original))
        )
        assert actions == {}
        assert all(changed[kind] is values for kind, values in weights.items())
        weights[T.ATTN_NORM] = weights[T.ATTN_NORM] * 0  # inputs that are always zero
        changed, actions = chosen(original, weights, stream(original))
        assert not set(OF_QKV) & set(actions)
        assert np.isfinite(original.layer(changed, stream(original))).all()


@pytest.mark.parametrize("name", ["llama-2", "gpt2"])
def test_changes_are_judged_by_the_inputs_that_they_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared with each change are the energies that the changed layer really has."""
    error = transforms._error
    with calibrated_models.original(MODELS[name](tmp_path / "m")) as original:
        x = stream(original)
        judged: list[tuple[TensorType, ...]] = []

        def checked(
            weights: Weights, group: tuple[TensorType, ...], dtypes: Any, energies: Any
        ) -> float:
            real = np.diag(energies_of(original, weights, x)[group])
            np.testing.assert_allclose(energies, real, rtol=1e-3, atol=1e-5 * real.max())
            judged.append(group)
            return error(weights, group, dtypes, energies)

        monkeypatch.setattr(transforms, "_error", checked)
        chosen(original, original.weights(layer_unit(0)), x, Dtype.Q4_SYM)
        assert len(judged) >= 3 * 3
