# SPDX-License-Identifier: Apache-2.0
"""The bytes of tiles: against docs/format.md, value by value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.naive_tiles import NL_LEVELS, WITH_MIN, naive_tiles, pack
from qsf.file.layout import KEPT, Dtype, Layout, tensor_bytes
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import TILE_DTYPES, dequantise_tiles, tile_bytes

# Those that weights are rounded to; others: converter/test_gguf_kept.py.
ALL_TYPES = [dtype for dtype in Dtype if dtype not in (Dtype.MIXED, *KEPT)]
QUANTISED = [dtype for dtype in ALL_TYPES if dtype not in (Dtype.F16, Dtype.F32)]
N_CODES = {Dtype.TERNARY: 3, Dtype.TERNARY_DENSE: 3, Dtype.Q8: 256, Dtype.Q3: 8, Dtype.Q4: 16,
           Dtype.Q4_SYM: 16, Dtype.Q4_NL: 16, Dtype.Q2: 4, Dtype.Q2_SYM: 4}  # fmt: skip


def random_rows(n_rows: int, n_cols: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n_rows, n_cols])
    return rng.standard_normal((n_rows, n_cols)).astype(np.float32)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize(("n_rows", "n_cols"), [(16, 64), (33, 130)])
def test_layout_is_the_documented_one(dtype: Dtype, n_rows: int, n_cols: int) -> None:
    rows = random_rows(n_rows, n_cols)
    assert quantise_rows(dtype, rows, rule="nearest") == naive_tiles(dtype, rows)


@given(dtype=st.sampled_from(QUANTISED), n_tiles=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_any_codes_come_back(dtype: Dtype, n_tiles: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, N_CODES[dtype], (16, n_tiles, 64)).astype(np.uint8)
    # The first and the last code of each block, in any columns, so that the scale is 1.
    ends = np.array([0, N_CODES[dtype] - 1], np.uint8)
    if dtype == Dtype.Q8:
        codes, ends = np.maximum(codes, 1), np.array([1, 255], np.uint8)
    if dtype in (Dtype.Q4_SYM, Dtype.Q4_NL):
        ends = ends[:1]
    for block in codes.reshape(-1, 64):
        block[rng.permutation(64)[: len(ends)]] = ends
    zero = {Dtype.Q8: 128, Dtype.Q4_SYM: 8, Dtype.Q2_SYM: 1.5}.get(dtype, 1)
    if dtype in WITH_MIN:
        zero = 0
    rows = codes.reshape(16, -1).astype(np.float32) - np.float32(zero)
    if dtype == Dtype.Q4_NL:
        rows = np.array(NL_LEVELS, np.float32)[codes].reshape(16, -1)
    tiles = quantise_rows(dtype, rows, rule="nearest")
    np.testing.assert_array_equal(dequantise_tiles(dtype, tiles, *rows.shape), rows)
    size, head = tile_bytes(dtype, 16, 64), 64 if dtype in WITH_MIN else 32
    for t in range(n_tiles):
        assert tiles[t * size + head : (t + 1) * size] == pack(dtype, codes[:, t].tolist())


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_tile_bytes(dtype: Dtype) -> None:
    size = tensor_bytes(16, 64, dtype, Layout.TILES)
    assert TILE_DTYPES[dtype].itemsize == size
    assert tile_bytes(dtype, 17, 65) == tensor_bytes(17, 65, dtype, Layout.TILES) == 4 * size
    assert len(quantise_rows(dtype, random_rows(17, 65))) == 4 * size


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_padding_is_zero(dtype: Dtype) -> None:
    tile = np.frombuffer(
        quantise_rows(dtype, random_rows(3, 70) + np.float32(5)), TILE_DTYPES[dtype]
    )[1]
    if dtype in (Dtype.F16, Dtype.F32):
        assert not tile["values"][6:].any()
        assert not tile["values"][:, 3:].any()
        return
    # The codes of a tile whose only codes that are not zero are those of 3 rows x 6 columns.
    kept = np.array(naive_codes(dtype, tile))
    assert not tile["scales"][3:].any()
    assert not kept[3:].any(), "padded rows"
    assert not kept[:, 6:].any(), "padded columns"
    assert kept[:3, :6].any()
    if dtype in WITH_MIN:
        assert not tile["mins"][3:].any()


def naive_codes(dtype: Dtype, tile: np.void) -> np.ndarray:
    """The codes of a tile as its values with scales of 1 and no mins."""
    plain = tile.copy()
    plain["scales"] = 1
    if dtype in WITH_MIN:
        plain["mins"] = 0
        zero = 0.0
    else:
        zero = {Dtype.Q8: 128, Dtype.Q4_SYM: 8, Dtype.Q4_NL: 32, Dtype.Q2_SYM: 1.5}.get(dtype, 1)
    codes: np.ndarray = dequantise_tiles(dtype, plain.tobytes(), 16, 64) + np.float32(zero)
    return codes
