# SPDX-License-Identifier: Apache-2.0
"""The rounding of every type: against a naive coder, and what it may lose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_tiles import WITH_MIN, naive_tiles

from qsf.converter.quantisers import ErrorSums, UnrepresentableError, quantise_rows
from qsf.converter.tiles import TILE_DTYPES, dequantise_tiles
from qsf.format import Dtype

ALL_TYPES = [dtype for dtype in Dtype if dtype != Dtype.MIXED]
QUANTISED = [dtype for dtype in ALL_TYPES if dtype not in (Dtype.F16, Dtype.F32)]
SPANNING = [Dtype.Q3, Dtype.Q4, Dtype.Q4_SYM, Dtype.Q8]  # first to last code: all of the block
FITTED = [Dtype.Q2, Dtype.Q2_SYM, Dtype.TERNARY]
TERNARY = [Dtype.TERNARY, Dtype.TERNARY_DENSE]

# The largest magnitude that every block may have; beyond it a scale or a min may overflow.
LIMITS = {
    Dtype.Q2: 65504 / 4, Dtype.Q2_SYM: 65504 / 2, Dtype.Q3: 65504, Dtype.Q4: 65504,
    Dtype.Q4_SYM: 65504 * 8, Dtype.TERNARY: 65504, Dtype.TERNARY_DENSE: 65504,
    Dtype.Q8: 65504 * 127, Dtype.F16: 65504, Dtype.F32: 3.4e38,
}  # fmt: skip


def random_rows(n_rows: int, n_cols: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n_rows, n_cols])
    return (rng.standard_normal((n_rows, n_cols)) * scale).astype(np.float32)


def round_trip(dtype: Dtype, rows: np.ndarray) -> np.ndarray:
    return dequantise_tiles(dtype, quantise_rows(dtype, rows), *rows.shape)


@given(
    dtype=st.sampled_from(QUANTISED),
    rows=st.lists(
        st.lists(
            st.floats(-1.6e4, 1.6e4, width=32)
            | st.floats(-1, 1, width=32)
            | st.sampled_from([0.0, -0.0, 1e-7, -1e-30, 1e-42, 0.25, -0.25]),
            min_size=5,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    ),
)
@example(Dtype.Q3, [[-0.0, 0.0, 0.0, 0.0, -1e-30]])  # a range of -0 is no scale of -0
@settings(deadline=None, max_examples=400)
def test_any_values_are_coded_as_said(dtype: Dtype, rows: list[list[float]]) -> None:
    array = np.array(rows, np.float32)
    assert quantise_rows(dtype, array) == naive_tiles(dtype, array)


@given(
    dtype=st.sampled_from(ALL_TYPES),
    n_cols=st.sampled_from([1, 2, 3, 5, 64, 65]),
    kind=st.sampled_from(["signs", "uniform", "few"]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=200)
def test_all_up_to_the_limit_is_stored(dtype: Dtype, n_cols: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = {
        "signs": rng.choice([-1.0, 1.0], (3, n_cols)),
        "uniform": rng.uniform(-1, 1, (3, n_cols)),
        "few": rng.choice([-1.0, 0.0, 0.0, 0.0, 0.3, 0.66, 1.0], (3, n_cols)),
    }[kind]
    rows = (units * LIMITS[dtype]).astype(np.float32)
    assert np.isfinite(round_trip(dtype, rows)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-4, 1.0, 1000.0, 10000.0])
@pytest.mark.parametrize("dtype", SPANNING)
@pytest.mark.parametrize("shape", [(1, 1), (15, 63), (16, 64), (17, 65)])
def test_error_is_half_a_step(dtype: Dtype, shape: tuple[int, int], scale: float) -> None:
    rows = np.clip(random_rows(*shape), -4, 4) * np.float32(scale)
    again = round_trip(dtype, rows)
    assert again.shape == rows.shape
    for col0 in range(0, shape[1], 64):
        block = rows[:, col0 : col0 + 64].astype(np.float64)
        error = np.abs(block - again[:, col0 : col0 + 64])
        amax = np.abs(block).max(axis=1)
        if dtype in WITH_MIN:
            n_steps = 7 if dtype == Dtype.Q3 else 15
            step = (block.max(axis=1) - block.min(axis=1)) / n_steps
            slack = amax * 2**-10 + 2**-23  # rounding of min and scale to f16
        else:
            n_steps = 127 if dtype == Dtype.Q8 else 8
            step = amax / n_steps
            slack = amax * 2**-10 / 2 + n_steps * 2**-26  # half the coarseness of a tiny scale
        limit = np.repeat((step / 2 + slack)[:, None], block.shape[1], axis=1)
        if dtype == Dtype.Q4_SYM:  # opposite the extreme there is no code 8, only 7
            limit[np.abs(block) > 7.5 * step[:, None] * (1 - 2**-9)] *= 2
        assert (error <= limit).all()


@given(
    dtype=st.sampled_from(FITTED),
    n_cols=st.sampled_from([1, 2, 7, 64]),
    spread=st.sampled_from(["normal", "laplace", "t", "two", "shifted"]),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=300)
def test_fitted_levels_lose_no_more_than_zeros_would(
    dtype: Dtype, n_cols: int, spread: str, exponent: int, seed: int
) -> None:
    """What least squares promises: no more is lost than with all levels at zero, or at the mean.

    And with 2 bits each value has the nearest of its block's levels.
    """
    rng = np.random.default_rng(seed)
    rows = {
        "normal": rng.standard_normal((16, n_cols)),
        "laplace": rng.laplace(size=(16, n_cols)),
        "t": rng.standard_t(2, (16, n_cols)).clip(-50, 50),
        "two": rng.choice([-1.0, 3.0], (16, n_cols)),
        "shifted": rng.standard_normal((16, n_cols)) + 9,
    }[spread]
    rows = (rows * 2.0**exponent).astype(np.float32)
    tile = np.frombuffer(quantise_rows(dtype, rows), TILE_DTYPES[dtype])[0]
    again = dequantise_tiles(dtype, tile.tobytes(), 16, n_cols)
    wide = rows.astype(np.float64)
    centre = wide.mean(axis=1, keepdims=True) if dtype == Dtype.Q2 else 0.0
    lost = ((wide - again) ** 2).sum(axis=1)
    slack = n_cols * (np.abs(wide).max(axis=1) * 2**-9 + 2**-24) ** 2
    assert (lost <= ((wide - centre) ** 2).sum(axis=1) * (1 + 2**-9) + slack).all()
    scales = tile["scales"].astype(np.float64)[:, None]
    if dtype in TERNARY:
        mean = np.abs(wide).mean(axis=1, keepdims=True)
        assert (np.abs(wide[again == 0]) <= np.broadcast_to(mean, wide.shape)[again == 0]).all()
        n_kept = np.maximum((again != 0).sum(axis=1), 1)
        best = (np.abs(wide) * (again != 0)).sum(axis=1) / n_kept
        np.testing.assert_allclose(scales[:, 0], best, rtol=2**-10, atol=2**-25)
        return
    first = tile["mins"].astype(np.float64)[:, None] if dtype == Dtype.Q2 else -1.5 * scales
    levels = first[:, :, None] + np.arange(4) * scales[:, :, None]
    nearest = np.abs(wide[:, :, None] - levels).min(axis=2)
    assert (np.abs(wide - again) <= nearest * (1 + 2**-20) + 2**-60).all()


# Measured 0.1101, 0.1144, 0.1856 of the weights' energy. The best that evenly spaced levels
# of one scale for all of a normal distribution can do: 0.1188, 0.1188, 0.1902.
@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (Dtype.Q2, 0.113), (Dtype.Q2_SYM, 0.117), (Dtype.TERNARY, 0.189),
        (Dtype.TERNARY_DENSE, 0.189), (Dtype.Q3, 0.038), (Dtype.Q4, 0.0083),
        (Dtype.Q4_SYM, 0.0093), (Dtype.Q8, 3.7e-5),
    ],
)  # fmt: skip
def test_loss_on_normal_weights(dtype: Dtype, most: float) -> None:
    errors = ErrorSums()
    quantise_rows(dtype, random_rows(256, 1024, 0.02), errors)
    assert 0.9 * most < errors.squared_error / errors.source_energy < most


@given(
    dtype=st.sampled_from(TERNARY),
    n_cols=st.sampled_from([1, 5, 64, 100, 200]),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.67, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=200)
def test_ternary_weights_are_kept(dtype: Dtype, n_cols: int, density: float, seed: int) -> None:
    """Each block holds only -s, 0 and s, with an s of its own that an f16 holds."""
    rng = np.random.default_rng(seed)
    n_blocks = -(-n_cols // 64)
    scales = np.exp(rng.uniform(np.log(2.0**-14), np.log(60000), (20, n_blocks)))
    scales = np.repeat(scales.astype(np.float16).astype(np.float32), 64, axis=1)[:, :n_cols]
    signs = rng.choice([-1.0, 1.0], (20, n_cols)) * (rng.random((20, n_cols)) < density)
    rows = (signs * scales).astype(np.float32)
    np.testing.assert_array_equal(round_trip(dtype, rows), rows)


@given(n_far=st.integers(1, 64), n_cols=st.integers(1, 64), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_symmetric_2bit_weights_are_kept(n_far: int, n_cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = np.where(np.arange(64) < n_far, 1.5, 0.5)[:n_cols] * rng.choice([-1, 1], (16, n_cols))
    scales = np.exp(rng.uniform(np.log(2.0**-13), np.log(30000), (16, 1))).astype(np.float16)
    rows = rng.permuted(units, axis=1).astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(round_trip(Dtype.Q2_SYM, rows), rows)


@given(dtype=st.sampled_from([Dtype.Q2, Dtype.Q2_SYM]), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_four_levels_in_equal_parts_are_kept(dtype: Dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.permutation(np.repeat(np.arange(4), 16)) for _ in range(16)])
    scale = np.float32(2.0 ** rng.integers(-10, 10))
    offset = 1.5 if dtype == Dtype.Q2_SYM else float(rng.integers(-3, 4))
    rows = ((codes - offset) * scale).astype(np.float32)
    np.testing.assert_array_equal(round_trip(dtype, rows), rows)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 2.0**-5])
@pytest.mark.parametrize("shape", [(17, 65), (1, 1), (16, 3), (16, 64)])
def test_constant_blocks_are_exact(dtype: Dtype, value: float, shape: tuple[int, int]) -> None:
    rows = np.full(shape, value, np.float32)
    # Where the value is a level that no f16 scale may give exactly.
    tolerance = abs(value) * 2**-10 if dtype in (Dtype.Q8, Dtype.Q2_SYM) else 0
    np.testing.assert_allclose(round_trip(dtype, rows), rows, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", WITH_MIN)
@pytest.mark.parametrize("n_cols", [3, 64])
def test_constant_block_with_a_min_has_no_scale_and_no_codes(dtype: Dtype, n_cols: int) -> None:
    rows = np.full((16, n_cols), 0.1, np.float32)
    tile = np.frombuffer(quantise_rows(dtype, rows), TILE_DTYPES[dtype])[0]
    assert not tile["scales"].any()
    assert not tile["codes"].any()
    assert (tile["mins"] == np.float16(0.1)).all()


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_padding_has_no_influence(dtype: Dtype) -> None:
    """No zero is near: counted in, it would widen the range or lower the mean."""
    rows = random_rows(3, 70, 0.2) + np.float32(5)
    tiles = quantise_rows(dtype, rows)
    alone = quantise_rows(dtype, rows[:, 64:])
    n_bytes = TILE_DTYPES[dtype].itemsize
    assert tiles[n_bytes:] == alone
    again = dequantise_tiles(dtype, tiles, 3, 70)[:, 64:]
    assert np.abs(again - rows[:, 64:]).max() < 0.8


@pytest.mark.parametrize(("dtype", "n_steps"), [(Dtype.Q3, 7), (Dtype.Q4, 15)])
def test_min_and_scale_cover_the_block(dtype: Dtype, n_steps: int) -> None:
    rows = random_rows(64, 64, seed=3)
    tile_rows = np.frombuffer(quantise_rows(dtype, rows), TILE_DTYPES[dtype])
    scales = tile_rows["scales"].astype(np.float64).reshape(64)
    mins = tile_rows["mins"].astype(np.float64).reshape(64)
    assert (mins + n_steps * scales >= rows.max(axis=1) * (1 - 2**-20)).all()


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("value", [1e-45, -1e-42, 1e-30, 2.0**-26, -(2.0**-25)])
def test_what_is_below_f16_is_near_zero(dtype: Dtype, value: float) -> None:
    rows = np.zeros((16, 64), np.float32)
    rows[:, 1] = value
    rows[3] = value
    assert np.abs(round_trip(dtype, rows)).max() <= 2.0**-24


def test_a_range_below_f16_keeps_the_smallest_scale() -> None:
    rows = np.zeros((16, 64), np.float32)
    rows[:, 1] = 2.0**-26
    tile = np.frombuffer(quantise_rows(Dtype.Q4, rows), TILE_DTYPES[Dtype.Q4])[0]
    assert (tile["scales"] == np.float16(2.0**-24)).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_scales_of_zeros_are_plus_zero(dtype: Dtype) -> None:
    for zero in (0.0, -0.0):
        tile = np.frombuffer(
            quantise_rows(dtype, np.full((16, 64), zero, np.float32)), TILE_DTYPES[dtype]
        )[0]
        assert not tile["scales"].view(np.uint16).any()
        if dtype in WITH_MIN:
            assert not tile["mins"].view(np.uint16).any()


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_place(dtype: Dtype, value: float) -> None:
    rows = random_rows(40, 70)
    rows[37, 66] = value
    rows[38, 2] = value
    with pytest.raises(UnrepresentableError) as caught:
        quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (37, 66)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("col", [0, 17, 63])
def test_one_bad_value_among_zeros_is_refused(dtype: Dtype, value: float, col: int) -> None:
    rows = np.zeros((16, 64), np.float32)
    rows[5, col] = value
    with pytest.raises(UnrepresentableError):
        quantise_rows(dtype, rows)


def test_place_is_right_in_a_later_band() -> None:
    rows = np.zeros((4096, 256), np.float32)
    rows[4001, 255] = np.nan
    with pytest.raises(UnrepresentableError) as caught:
        quantise_rows(Dtype.Q4, rows)
    assert (caught.value.row, caught.value.col) == (4001, 255)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (Dtype.F16, 65520.0), (Dtype.F16, -1e6), (Dtype.Q4, -7e4), (Dtype.Q3, -7e4),
        (Dtype.Q8, 9e6), (Dtype.Q4_SYM, 6e5), (Dtype.Q4_SYM, -6e5), (Dtype.TERNARY, 7e4),
        (Dtype.TERNARY_DENSE, -7e4), (Dtype.Q2_SYM, 2e5), (Dtype.Q2, -3e5),
        *((dtype, 3e38) for dtype in QUANTISED),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused(dtype: Dtype, value: float) -> None:
    rows = np.zeros((2, 2), np.float32)
    rows[1, 0] = value
    with pytest.raises(UnrepresentableError, match="larger than") as caught:
        quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (1, 0)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (600, 700)])
def test_error_sums_are_those_of_the_values(dtype: Dtype, shape: tuple[int, int]) -> None:
    rows = random_rows(*shape) + np.float32(0.1)
    errors = ErrorSums()
    again = dequantise_tiles(dtype, quantise_rows(dtype, rows, errors), *shape)
    a, b = rows.astype(np.float64).ravel(), again.astype(np.float64).ravel()
    assert errors.n_values == rows.size
    assert errors.mse == pytest.approx(np.mean((a - b) ** 2), rel=1e-3)
    assert errors.max_error == pytest.approx(np.abs(a - b).max(), rel=1e-5)
    assert errors.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-5)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_wide_rows_are_those_of_their_blocks(dtype: Dtype) -> None:
    rows = random_rows(17, 16384 * 2 + 100)
    whole = np.frombuffer(quantise_rows(dtype, rows), TILE_DTYPES[dtype])
    grid = whole.reshape(2, -1)
    for col in (0, 16320, 16384, 16448, 32768, 32832):
        part = quantise_rows(dtype, rows[:, col : col + 64])
        assert grid[:, col // 64].tobytes() == part
    rows[16, 20000] = np.inf
    with pytest.raises(UnrepresentableError) as caught:
        quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (16, 20000)


def test_ranges_of_rows_join_to_the_whole() -> None:
    rows = random_rows(100, 130)
    for dtype in ALL_TYPES:
        parts = [quantise_rows(dtype, rows[i : i + 32]) for i in range(0, 100, 32)]
        assert b"".join(parts) == quantise_rows(dtype, rows)


def test_rows_need_not_be_contiguous() -> None:
    rows = random_rows(65, 33).T
    assert quantise_rows(Dtype.Q4, rows) == quantise_rows(Dtype.Q4, rows.copy())
