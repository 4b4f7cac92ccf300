"""Tiles: the layout against a packer written per element, and what quantisation may lose."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsf.converter import tiles
from qsf.format import Dtype

ALL_TYPES = [Dtype.Q4, Dtype.Q8, Dtype.F16, Dtype.F32]
QUANTISED = [Dtype.Q4, Dtype.Q8]
EDGE_ROWS = [1, 15, 16, 17, 33]
EDGE_COLS = [1, 3, 63, 64, 65, 130]


def random_rows(n_rows: int, n_cols: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n_rows, n_cols])
    return (rng.standard_normal((n_rows, n_cols)) * scale).astype(np.float32)


def ceil_f16(value: np.float32) -> np.float16:
    half: np.float16 = np.float16(value)
    if np.float32(half) < value:
        bits = int.from_bytes(half.tobytes(), "little") + 1
        half = np.frombuffer(bits.to_bytes(2, "little"), np.float16)[0]
    return half


def block_parameters(dtype: Dtype, block: np.ndarray) -> tuple[np.float16, np.float16]:
    """Scale and min of the real values of one block, by the definition."""
    if dtype == Dtype.Q8:
        return ceil_f16(np.float32(max(abs(v) for v in block)) / np.float32(127)), np.float16(0)
    low, high = min(block), max(block)
    minimum = np.float16(low) + np.float16(0)
    if low == high:
        return np.float16(0), minimum
    return ceil_f16((high - np.float32(minimum)) / np.float32(15)), minimum


def code_of(dtype: Dtype, value: np.float32, scale: np.float16, minimum: np.float16) -> int:
    if dtype == Dtype.Q8:
        if scale == 0:
            return 128
        return int(np.clip(np.rint(value / np.float32(scale)), -127, 127)) + 128
    if scale == 0:
        return 0
    return int(np.clip(np.rint((value - np.float32(minimum)) / np.float32(scale)), 0, 15))


def naive_tiles(dtype: Dtype, rows: np.ndarray) -> bytes:
    """docs/format.md, section 5, one element at a time."""
    n_rows, n_cols = rows.shape
    out = bytearray()
    for row0 in range(0, n_rows, 16):
        for col0 in range(0, n_cols, 64):
            scales, mins = [np.float16(0)] * 16, [np.float16(0)] * 16
            codes = bytearray(64 * 8 if dtype == Dtype.Q4 else 64 * 16)
            values = [0.0] * 1024
            for r in range(min(16, n_rows - row0)):
                block = rows[row0 + r, col0 : col0 + 64]
                if dtype in QUANTISED:
                    scales[r], mins[r] = block_parameters(dtype, block)
                for c, value in enumerate(block):
                    if dtype in (Dtype.F16, Dtype.F32):
                        values[c * 16 + r] = float(value)
                        continue
                    code = code_of(dtype, value, scales[r], mins[r])
                    g, j = divmod(c, 4)
                    if dtype == Dtype.Q8:
                        codes[g * 64 + r * 4 + j] = code
                    elif g < 8:
                        codes[g * 64 + r * 4 + j] |= code
                    else:
                        codes[(g - 8) * 64 + r * 4 + j] |= code << 4
            if dtype == Dtype.F16:
                out += struct.pack("<1024e", *values)
            elif dtype == Dtype.F32:
                out += struct.pack("<1024f", *values)
            else:
                out += struct.pack("<16e", *scales)
                if dtype == Dtype.Q4:
                    out += struct.pack("<16e", *mins)
                out += codes
    return bytes(out)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("n_rows", EDGE_ROWS)
@pytest.mark.parametrize("n_cols", EDGE_COLS)
def test_layout_is_the_documented_one(dtype: Dtype, n_rows: int, n_cols: int) -> None:
    rows = random_rows(n_rows, n_cols)
    assert tiles.quantise_rows(dtype, rows) == naive_tiles(dtype, rows)


@given(
    dtype=st.sampled_from(QUANTISED),
    rows=st.lists(
        st.lists(
            st.floats(-6e4, 6e4, width=32) | st.sampled_from([0.0, -0.0, 1e-7, 1e-30, 0.25]),
            min_size=5,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(deadline=None, max_examples=200)
def test_any_values_are_coded_as_documented(dtype: Dtype, rows: list[list[float]]) -> None:
    array = np.array(rows, np.float32)
    assert tiles.quantise_rows(dtype, array) == naive_tiles(dtype, array)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_tile_bytes(dtype: Dtype) -> None:
    size = {Dtype.Q4: 576, Dtype.Q8: 1056, Dtype.F16: 2048, Dtype.F32: 4096}[dtype]
    assert tiles.TILE_DTYPES[dtype].itemsize == size
    assert tiles.tile_bytes(dtype, 17, 65) == 4 * size
    assert len(tiles.quantise_rows(dtype, random_rows(17, 65))) == 4 * size


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-4, 1.0, 1000.0, 15000.0])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("shape", [(1, 1), (15, 63), (16, 64), (17, 65)])
def test_round_trip_error_is_half_a_step(
    dtype: Dtype, shape: tuple[int, int], scale: float
) -> None:
    rows = np.clip(random_rows(*shape), -4, 4) * np.float32(scale)
    again = tiles.dequantise_tiles(dtype, tiles.quantise_rows(dtype, rows), *shape)
    assert again.shape == rows.shape
    for col0 in range(0, shape[1], 64):
        block = rows[:, col0 : col0 + 64].astype(np.float64)
        error = np.abs(block - again[:, col0 : col0 + 64]).max(axis=1)
        amax = np.abs(block).max(axis=1)
        if dtype == Dtype.Q4:
            step = (block.max(axis=1) - block.min(axis=1)) / 15
            slack = amax * 2**-10 + 2**-23  # rounding of min and scale to f16
        else:
            step = amax / 127
            slack = amax * 2**-10 / 2 + 2**-19  # 127 x the coarseness of a subnormal scale
        assert (error <= step / 2 + slack).all()


@given(
    dtype=st.sampled_from([Dtype.F16, Dtype.F32]),
    n_rows=st.sampled_from(EDGE_ROWS),
    n_cols=st.sampled_from(EDGE_COLS),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_float_tiles_keep_the_values(dtype: Dtype, n_rows: int, n_cols: int, seed: int) -> None:
    rows = random_rows(n_rows, n_cols, seed=seed).astype(np.float16).astype(np.float32)
    again = tiles.dequantise_tiles(dtype, tiles.quantise_rows(dtype, rows), n_rows, n_cols)
    np.testing.assert_array_equal(again, rows)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 2.0**-5])
def test_constant_blocks_are_exact(dtype: Dtype, value: float) -> None:
    rows = np.full((17, 65), value, np.float32)
    again = tiles.dequantise_tiles(dtype, tiles.quantise_rows(dtype, rows), 17, 65)
    tolerance = abs(value) * 2**-10 if dtype == Dtype.Q8 else 0
    np.testing.assert_allclose(again, rows, rtol=0, atol=tolerance)


def test_constant_4bit_block_has_no_scale_and_no_codes() -> None:
    tile = np.frombuffer(
        tiles.quantise_rows(Dtype.Q4, np.full((16, 64), 0.1, np.float32)),
        tiles.TILE_DTYPES[Dtype.Q4],
    )[0]
    assert not tile["scales"].any()
    assert not tile["codes"].any()
    assert (tile["mins"] == np.float16(0.1)).all()


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_padding_is_zero_and_has_no_influence(dtype: Dtype) -> None:
    rows = random_rows(3, 70) + np.float32(5)  # no zero near: padding would widen the range
    tile = np.frombuffer(tiles.quantise_rows(dtype, rows), tiles.TILE_DTYPES[dtype])[1]
    if dtype in QUANTISED:
        codes = tile["codes"].reshape(-1, 16)  # [group, row]
        assert not codes[:, 3:].any(), "padded rows"
        assert not tile["scales"][3:].any()
        nibble = 4 if dtype == Dtype.Q4 else 8
        assert not (codes[1] >> (16 if nibble == 8 else 0) & 0xFFFF0000).any()
        assert not codes[2:].any(), "padded columns"
        if dtype == Dtype.Q4:
            assert not tile["mins"][3:].any()
            assert (tile["mins"][:3] >= np.float16(rows[:, 64:].min() * 0.999)).all()
    else:
        assert not tile["values"][6:].any()
        assert not tile["values"][:, 3:].any()


def test_min_and_scale_cover_the_block() -> None:
    rows = random_rows(64, 64, seed=3)
    tile_rows = np.frombuffer(tiles.quantise_rows(Dtype.Q4, rows), tiles.TILE_DTYPES[Dtype.Q4])
    scales = tile_rows["scales"].astype(np.float64).reshape(64)
    mins = tile_rows["mins"].astype(np.float64).reshape(64)
    assert (mins + 15 * scales >= rows.max(axis=1) * (1 - 2**-20)).all()


def test_a_range_below_f16_keeps_the_smallest_scale() -> None:
    rows = np.zeros((16, 64), np.float32)
    rows[:, 1] = 2.0**-26
    tile = np.frombuffer(tiles.quantise_rows(Dtype.Q4, rows), tiles.TILE_DTYPES[Dtype.Q4])[0]
    assert (tile["scales"] == np.float16(2.0**-24)).all()
    again = tiles.dequantise_tiles(Dtype.Q4, tile.tobytes(), 16, 64)
    assert np.abs(again - rows).max() <= 2.0**-25


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_place(dtype: Dtype, value: float) -> None:
    rows = random_rows(40, 70)
    rows[37, 66] = value
    rows[38, 2] = value
    with pytest.raises(tiles.UnrepresentableError) as caught:
        tiles.quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (37, 66)


def test_place_is_right_in_a_later_band() -> None:
    rows = np.zeros((4096, 256), np.float32)
    rows[4001, 255] = np.nan
    with pytest.raises(tiles.UnrepresentableError) as caught:
        tiles.quantise_rows(Dtype.Q4, rows)
    assert (caught.value.row, caught.value.col) == (4001, 255)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(Dtype.F16, 65520.0), (Dtype.F16, -1e6), (Dtype.Q4, -7e4), (Dtype.Q8, 9e6)],
)
def test_what_is_too_large_is_refused(dtype: Dtype, value: float) -> None:
    rows = np.zeros((2, 2), np.float32)
    rows[1, 0] = value
    with pytest.raises(tiles.UnrepresentableError, match="larger than") as caught:
        tiles.quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (1, 0)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (600, 700)])
def test_error_sums_are_those_of_the_values(dtype: Dtype, shape: tuple[int, int]) -> None:
    rows = random_rows(*shape) + np.float32(0.1)
    errors = tiles.ErrorSums()
    again = tiles.dequantise_tiles(dtype, tiles.quantise_rows(dtype, rows, errors), *shape)
    a, b = rows.astype(np.float64).ravel(), again.astype(np.float64).ravel()
    assert errors.n_values == rows.size
    assert errors.mse == pytest.approx(np.mean((a - b) ** 2), rel=1e-3)
    assert errors.max_error == pytest.approx(np.abs(a - b).max(), rel=1e-5)
    assert errors.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), abs=1e-5)


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_wide_rows_are_those_of_their_blocks(dtype: Dtype) -> None:
    rows = random_rows(17, 16384 * 2 + 100)
    whole = np.frombuffer(tiles.quantise_rows(dtype, rows), tiles.TILE_DTYPES[dtype])
    grid = whole.reshape(2, -1)
    for col in (0, 16320, 16384, 16448, 32768, 32832):
        part = tiles.quantise_rows(dtype, rows[:, col : col + 64])
        assert grid[:, col // 64].tobytes() == part
    rows[16, 20000] = np.inf
    with pytest.raises(tiles.UnrepresentableError) as caught:
        tiles.quantise_rows(dtype, rows)
    assert (caught.value.row, caught.value.col) == (16, 20000)


def test_ranges_of_rows_join_to_the_whole() -> None:
    rows = random_rows(100, 130)
    for dtype in ALL_TYPES:
        parts = [tiles.quantise_rows(dtype, rows[i : i + 32]) for i in range(0, 100, 32)]
        assert b"".join(parts) == tiles.quantise_rows(dtype, rows)


def test_rows_need_not_be_contiguous() -> None:
    rows = random_rows(65, 33).T
    assert tiles.quantise_rows(Dtype.Q4, rows) == tiles.quantise_rows(Dtype.Q4, rows.copy())
