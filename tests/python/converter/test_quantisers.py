# SPDX-License-Identifier: Apache-2.0
"""The rounding of every type: against a naive coder, and what it may lose."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oracle.kept_tiles import decode_tiles
from oracle.naive_tiles import WITH_MIN, naive_tiles
from qsf.errors import QsfArgumentError
from qsf.file.layout import KEPT, Dtype
from qsf.native import quantise as native
from qsf_converter.rounding.quantisers import (
    ErrorSums,
    Rule,
    UnrepresentableError,
    absmean,
    quantise_rows,
)
from qsf_converter.rounding.tiles import TILE_DTYPES, dequantise_tiles

ALL_TYPES = [dtype for dtype in Dtype if dtype not in (Dtype.MIXED, *KEPT)]
QUANTISED = [dtype for dtype in ALL_TYPES if dtype not in (Dtype.F16, Dtype.F32)]
ROUNDED = [*ALL_TYPES, Dtype.Q5_0]  # a type of GGUF files that matrices are rounded to, too
SPANNING = [Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.Q4_SYM, Dtype.Q8]
EXACT = [Dtype.Q2_SYM, Dtype.TERNARY, Dtype.TERNARY_DENSE]  # the search finds the best of all
TERNARY = [Dtype.TERNARY, Dtype.TERNARY_DENSE]

# The largest magnitude that every block may have; beyond it a scale or a min may overflow.
LIMITS = {
    Dtype.Q2: 65504, Dtype.Q2_SYM: 65504 * 1.5, Dtype.Q3: 65504, Dtype.Q4: 65504,
    Dtype.Q4_SYM: 65504 * 8, Dtype.Q4_NL: 65504 * 32, Dtype.TERNARY: 65504,
    Dtype.TERNARY_DENSE: 65504, Dtype.Q8: 65504 * 127, Dtype.Q5_0: 65504 * 16, Dtype.F16: 65504,
    Dtype.F32: 3.4e38,
}  # fmt: skip


def random_rows(n_rows: int, n_cols: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n_rows, n_cols])
    return (rng.standard_normal((n_rows, n_cols)) * scale).astype(np.float32)


def round_trip(dtype: Dtype, rows: np.ndarray, rule: Rule = "search") -> np.ndarray:
    return dequantise_tiles(dtype, quantise_rows(dtype, rows, rule=rule), *rows.shape)


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
@example(Dtype.Q4, [[0.0, 2.0**-26, 0.0, 0.0, 0.0]])  # a range below f16: the smallest scale
@example(Dtype.Q2, [[0.1, 0.1, 0.1, 0.1, 0.1]])  # no range: a min, no scale, no codes
def test_any_values_are_coded_plainly_as_said(dtype: Dtype, rows: list[list[float]]) -> None:
    array = np.array(rows, np.float32)
    assert quantise_rows(dtype, array, rule="nearest") == naive_tiles(dtype, array)


@given(
    dtype=st.sampled_from(ROUNDED),
    n_cols=st.sampled_from([1, 2, 3, 5, 64, 65]),
    kind=st.sampled_from(["signs", "uniform", "few"]),
    seed=st.integers(0, 2**32),
)
def test_all_up_to_the_limit_is_stored(dtype: Dtype, n_cols: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = {
        "signs": rng.choice([-1.0, 1.0], (3, n_cols)),
        "uniform": rng.uniform(-1, 1, (3, n_cols)),
        "few": rng.choice([-1.0, 0.0, 0.0, 0.0, 0.3, 0.66, 1.0], (3, n_cols)),
    }[kind]
    rows = (units * LIMITS[dtype]).astype(np.float32)
    assert np.isfinite(round_trip(dtype, rows)).all()
    assert np.isfinite(round_trip(dtype, rows, "nearest")).all()


# Of the weights' energy. The best that evenly spaced levels of one scale for all of a normal
# distribution can do: 2 bits 0.1188, ternary 0.1902; fitted to each block, less.
@pytest.mark.parametrize(
    ("dtype", "plain", "most"),
    [
        (Dtype.Q2, 0.206, 0.104), (Dtype.Q2_SYM, 0.26, 0.115), (Dtype.TERNARY, 0.53, 0.187),
        (Dtype.TERNARY_DENSE, 0.53, 0.187), (Dtype.Q3, 0.038, 0.0275), (Dtype.Q4, 0.0083, 0.0068),
        (Dtype.Q4_SYM, 0.0093, 0.0083), (Dtype.Q5_0, 0.0019, 0.0017), (Dtype.Q8, 3.7e-5, 3.2e-5),
        (Dtype.Q4_K, 0.0065, 0.0052), (Dtype.Q5_K, 0.0015, 0.0013),
    ],
)  # fmt: skip
def test_loss_on_normal_weights(dtype: Dtype, plain: float, most: float) -> None:
    rows = random_rows(256, 1024, 0.02)
    for rule, limit in (("nearest", plain), ("search", most)):
        errors = ErrorSums()
        quantise_rows(dtype, rows, errors, rule=cast("Rule", rule))
        assert 0.9 * limit < errors.squared_error / errors.source_energy < limit


def weighted_losses(rows: np.ndarray, stored: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Per row, in f64."""
    losses: np.ndarray = ((rows.astype(np.float64) - stored) ** 2 * weights).sum(axis=1)
    return losses


def spread_rows(kind: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal((n_rows, n_cols))
    rows = {
        "normal": normal,
        "laplace": rng.laplace(size=(n_rows, n_cols)),
        "t": rng.standard_t(2, (n_rows, n_cols)).clip(-50, 50),
        "two": rng.choice([-1.0, 3.0], (n_rows, n_cols)),
        "shifted": normal + 9,
        "outlier": np.where(rng.random((n_rows, n_cols)) < 0.02, 40.0, normal),
    }[kind]
    return rows.astype(np.float32)


SPREADS = ["normal", "laplace", "t", "two", "shifted", "outlier"]


@given(
    dtype=st.sampled_from([Dtype.Q4_K, Dtype.Q5_K]),
    n_rows=st.sampled_from([1, 16, 17]),
    kind=st.sampled_from(SPREADS),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 2**32),
)
def test_scales_and_mins_are_integers_for_256_columns(
    dtype: Dtype, n_rows: int, kind: str, exponent: int, seed: int
) -> None:
    rows = spread_rows(kind, n_rows, 512, np.random.default_rng(seed)) * np.float32(10.0**exponent)
    if exponent < -4 or np.abs(rows).max() > LIMITS[Dtype.Q4]:
        rows = rows / np.abs(rows).max()
    losses = {}
    for rule in ("nearest", "search"):
        stored = np.empty_like(rows)
        tiles = quantise_rows(dtype, rows, rule=rule, stored=stored)
        np.testing.assert_array_equal(stored, decode_tiles(dtype, tiles, *rows.shape))
        losses[rule] = weighted_losses(rows, stored, np.ones(512))
    assert (losses["search"] <= losses["nearest"] * (1 + 1e-5)).all()
    assert losses["search"].sum() < 0.02 * np.square(rows.astype(np.float64)).sum()
    with pytest.raises(QsfArgumentError, match="300 columns are no whole blocks"):
        quantise_rows(dtype, np.ascontiguousarray(rows[:, :300]))


@given(
    dtype=st.sampled_from([*QUANTISED, Dtype.Q5_0]),
    n_rows=st.sampled_from([1, 15, 16, 17]),
    n_cols=st.sampled_from([1, 2, 7, 63, 64, 65]),
    kind=st.sampled_from(SPREADS),
    weighting=st.sampled_from(["none", "some", "wide", "holes"]),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 2**32),
)
def test_search_never_loses_more_than_nearest(
    dtype: Dtype, n_rows: int, n_cols: int, kind: str, weighting: str, exponent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = spread_rows(kind, n_rows, n_cols, rng) * np.float32(2.0**exponent)
    weights = {
        "none": np.ones(n_cols),
        "some": np.exp(rng.standard_normal(n_cols)),
        "wide": np.exp(rng.uniform(-60, 60, n_cols)),
        "holes": rng.random(n_cols) * (rng.random(n_cols) < 0.5),
    }[weighting].astype(np.float32)
    found = {}
    rules: tuple[Rule, ...] = ("search", "nearest")
    for rule in rules:
        stored = np.empty_like(rows)
        tiles = quantise_rows(
            dtype, rows, rule=rule, stored=stored,
            weights=None if weighting == "none" else weights,
        )  # fmt: skip
        np.testing.assert_array_equal(stored, decode_tiles(dtype, tiles, n_rows, n_cols))
        blocks = [slice(c, c + 64) for c in range(0, n_cols, 64)]
        found[rule] = [
            weighted_losses(rows[:, b], stored[:, b], relative(weights[b])) for b in blocks
        ]
    for search, nearest in zip(found["search"], found["nearest"], strict=True):
        assert (search <= nearest * (1 + 1e-4) + 1e-30).all()


def relative(weights: np.ndarray) -> np.ndarray:
    """The weights of a block as the search has them; all alike if there are none."""
    top = weights.max()
    return weights.astype(np.float64) / top if top > 0 else np.ones(len(weights))


def levels_of(dtype: Dtype) -> np.ndarray:
    """What codes stand for, in scales."""
    return {
        Dtype.Q2: np.arange(4), Dtype.Q3: np.arange(8), Dtype.Q4: np.arange(16),
        Dtype.Q4_SYM: np.arange(-8, 8), Dtype.Q8: np.arange(-127, 128),
    }[dtype].astype(np.float64)  # fmt: skip


# A handful of values and almost as many levels: the loss of such blocks has the most valleys.
@pytest.mark.parametrize(
    ("dtype", "n_cols", "left"), [(Dtype.Q2, 5, 0.07), (Dtype.Q3, 4, 0.4), (Dtype.Q4_SYM, 3, 0.4)]
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_search_is_near_the_best_of_tiny_blocks(
    dtype: Dtype, n_cols: int, left: float, is_weighted: bool
) -> None:
    """Against least squares for every one of the codes that a block could have."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((64, n_cols)).astype(np.float32)
    weights = (rng.random(n_cols) + 0.05).astype(np.float32)
    w = weights.astype(np.float64) if is_weighted else np.ones(n_cols)
    stored = np.empty_like(rows)
    quantise_rows(dtype, rows, weights=weights if is_weighted else None, stored=stored)
    codes = np.array(list(itertools.product(levels_of(dtype), repeat=n_cols)))
    ones = [np.ones_like(codes)] if dtype in WITH_MIN else []
    bases = np.stack([codes, *ones], axis=-1)  # [n_ways, n_cols, 1 or 2]
    gram = np.einsum("kci,c,kcj->kij", bases, w, bases) + 1e-9 * np.eye(bases.shape[-1])
    moments = np.einsum("kci,c,rc->rki", bases, w, rows.astype(np.float64))
    gains = np.einsum("rki,kij,rkj->rk", moments, np.linalg.inv(gram), moments).max(axis=1)
    best = np.maximum((w * rows.astype(np.float64) ** 2).sum(axis=1) - gains, 0)
    found = weighted_losses(rows, stored, w)
    nearest = np.empty_like(rows)
    quantise_rows(dtype, rows, stored=nearest, rule="nearest")
    plain = weighted_losses(rows, nearest, w)
    # Of what plain rounding loses more than the best, so much is left.
    assert (found - best).sum() < left * (plain - best).sum()


@pytest.mark.parametrize("dtype", SPANNING)
def test_codes_are_those_of_the_nearest_levels(dtype: Dtype) -> None:
    rows = random_rows(16, 64, seed=9)
    tile = np.frombuffer(quantise_rows(dtype, rows), TILE_DTYPES[dtype])[0]
    again = dequantise_tiles(dtype, tile.tobytes(), 16, 64)
    scales = tile["scales"].astype(np.float64)[:, None, None]
    mins = tile["mins"].astype(np.float64)[:, None, None] if dtype in WITH_MIN else 0.0
    levels = levels_of(dtype)[None, None, :] * scales + mins
    nearest = np.abs(rows.astype(np.float64)[:, :, None] - levels).min(axis=2)
    assert (np.abs(rows - again.astype(np.float64)) <= nearest * (1 + 2**-20) + 2**-60).all()


@pytest.mark.parametrize("dtype", [*QUANTISED, Dtype.Q5_0])
def test_weights_move_the_loss_to_where_it_counts_less(dtype: Dtype) -> None:
    rows = random_rows(64, 64)
    weights = np.where(np.arange(64) % 4 == 0, 100, 1).astype(np.float32)
    found = {}
    for name, given_weights in (("plain", None), ("weighted", weights)):
        stored = np.empty_like(rows)
        quantise_rows(dtype, rows, weights=given_weights, stored=stored)
        found[name] = weighted_losses(rows, stored, weights)
    assert found["weighted"].sum() < 0.9 * found["plain"].sum()
    alike = quantise_rows(dtype, rows, weights=np.full(64, 0.37, np.float32))
    assert alike == quantise_rows(dtype, rows)
    assert quantise_rows(dtype, rows, weights=np.zeros(64, np.float32)) == alike


@given(
    dtype=st.sampled_from(TERNARY),
    n_cols=st.sampled_from([1, 5, 64, 100, 200]),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.67, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_ternary_weights_are_kept(dtype: Dtype, n_cols: int, density: float, seed: int) -> None:
    """Each block holds only -s, 0 and s, with an s of its own that an f16 holds."""
    rng = np.random.default_rng(seed)
    n_blocks = -(-n_cols // 64)
    scales = np.exp(rng.uniform(np.log(2.0**-14), np.log(60000), (20, n_blocks)))
    scales = np.repeat(scales.astype(np.float16).astype(np.float32), 64, axis=1)[:, :n_cols]
    signs = rng.choice([-1.0, 1.0], (20, n_cols)) * (rng.random((20, n_cols)) < density)
    rows = (signs * scales).astype(np.float32)
    weights = np.exp(rng.standard_normal(n_cols)).astype(np.float32)
    np.testing.assert_array_equal(round_trip(dtype, rows), rows)
    np.testing.assert_array_equal(round_trip(dtype, rows, "nearest"), rows)
    stored = np.empty_like(rows)
    quantise_rows(dtype, rows, weights=weights, stored=stored)
    np.testing.assert_array_equal(stored, rows)


@pytest.mark.parametrize("dtype", TERNARY)
def test_absmean_is_one_scale_for_the_tensor(dtype: Dtype) -> None:
    rows = random_rows(40, 70, 0.02)
    whole = absmean(rows[i : i + 16] for i in range(0, 40, 16))
    assert whole == pytest.approx(np.abs(rows.astype(np.float64)).mean(), rel=1e-6)
    scale = np.float32(np.float16(whole))
    want = np.clip(np.rint(rows / scale), -1, 1) * scale
    np.testing.assert_array_equal(round_trip(dtype, rows, "absmean"), want)
    parts = [
        quantise_rows(dtype, rows[i : i + 16], rule="absmean", tensor_scale=whole)
        for i in range(0, 40, 16)
    ]
    assert b"".join(parts) == quantise_rows(dtype, rows, rule="absmean")
    tile = np.frombuffer(parts[2], TILE_DTYPES[dtype])[1]
    assert (tile["scales"][:8] == np.float16(whole)).all()
    assert not tile["scales"][8:].any()


def test_rules_weights_and_outputs_that_are_none_are_refused() -> None:
    rows = random_rows(2, 4)
    with pytest.raises(QsfArgumentError, match="absmean"):
        quantise_rows(Dtype.Q4, rows, rule=cast("Rule", "best"))
    with pytest.raises(QsfArgumentError, match="ternary types, not 4bit"):
        quantise_rows(Dtype.Q4, rows, rule="absmean")
    with pytest.raises(QsfArgumentError, match="for the rule absmean"):
        quantise_rows(Dtype.TERNARY, rows, tensor_scale=1.0)
    with pytest.raises(QsfArgumentError, match="65504"):
        quantise_rows(Dtype.TERNARY, rows, rule="absmean", tensor_scale=7e4)
    for bad in (-1.0, np.nan, np.inf):
        weights = np.array([1, 1, bad, 1], np.float32)
        with pytest.raises(QsfArgumentError, match=r"weights \[2\]"):
            quantise_rows(Dtype.Q4, rows, weights=weights)
    with pytest.raises(QsfArgumentError, match=r"\[3\]: \[4\]"):
        quantise_rows(Dtype.Q4, rows, weights=np.ones(3, np.float32))
    with pytest.raises(QsfArgumentError, match="stored is float64"):
        quantise_rows(Dtype.Q4, rows, stored=cast("Any", np.empty((2, 4))))
    with pytest.raises(QsfArgumentError, match="no tiles"):
        native.quantise_rows(native.Rounding(5, 0, 0.0, None), rows, np.empty(9, np.uint8), None)
    with pytest.raises(QsfArgumentError, match="the tiles need 576"):
        native.quantise_rows(native.Rounding(3, 0, 0.0, None), rows, np.empty(9, np.uint8), None)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_constant_blocks_are_exact(dtype: Dtype) -> None:
    for value, shape in ((0.0, (17, 65)), (1.0, (1, 1)), (-0.25, (16, 3)), (2.0**-5, (16, 64))):
        rows = np.full(shape, value, np.float32)
        # Where the value is a level that no f16 scale may give exactly.
        tolerance = abs(value) * 2**-10 if dtype in (Dtype.Q8, Dtype.Q2_SYM) else 0
        np.testing.assert_allclose(round_trip(dtype, rows), rows, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_padding_has_no_influence(dtype: Dtype) -> None:
    """No zero is near: counted in, it would widen the range or lower the mean."""
    rows = random_rows(3, 70, 0.2) + np.float32(5)
    tiles = quantise_rows(dtype, rows)
    alone = quantise_rows(dtype, rows[:, 64:])
    n_bytes = TILE_DTYPES[dtype].itemsize
    assert tiles[n_bytes:] == alone
    again = dequantise_tiles(dtype, tiles, 3, 70)[:, 64:]
    assert np.abs(again - rows[:, 64:]).max() < (1.5 if dtype in EXACT else 0.8)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_below_f16_is_near_zero(dtype: Dtype) -> None:
    for value in (1e-45, -1e-42, 1e-30, 2.0**-26, -(2.0**-25)):
        rows = np.zeros((16, 64), np.float32)
        rows[:, 1] = value
        rows[3] = value
        assert np.abs(round_trip(dtype, rows)).max() <= 2.0**-24


@pytest.mark.parametrize("dtype", QUANTISED)
def test_scales_of_zeros_are_plus_zero(dtype: Dtype) -> None:
    for zero in (0.0, -0.0):
        tile = np.frombuffer(
            quantise_rows(dtype, np.full((16, 64), zero, np.float32)), TILE_DTYPES[dtype]
        )[0]
        assert not tile["scales"].view(np.uint16).any()
        if dtype in WITH_MIN:
            assert not tile["mins"].view(np.uint16).any()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (Dtype.F16, 65520.0), (Dtype.F16, -1e6), (Dtype.Q4, -7e4), (Dtype.Q3, -7e4),
        (Dtype.Q8, 9e6), (Dtype.Q4_SYM, 6e5), (Dtype.Q4_SYM, -6e5), (Dtype.TERNARY, 7e4),
        (Dtype.TERNARY_DENSE, -7e4), (Dtype.Q2_SYM, 1e5), (Dtype.Q2, -7e4), (Dtype.Q2, 2e5),
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
def test_error_sums_are_those_of_the_values(dtype: Dtype) -> None:
    shape = (100, 300)
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
    assert whole.tobytes() == quantise_rows(dtype, np.asfortranarray(rows))
    assert whole.tobytes() == quantise_rows(dtype, rows[:16]) + quantise_rows(dtype, rows[16:])
    for value, place in ((np.inf, (16, 20000)), (-np.inf, (1, 63)), (np.nan, (0, 17))):
        rows[place] = value  # the first one is named
        with pytest.raises(UnrepresentableError) as caught:
            quantise_rows(dtype, rows)
        assert (caught.value.row, caught.value.col) == place
