# SPDX-License-Identifier: Apache-2.0
"""Outliers in the converter: found, decided on, taken out of their blocks and given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from make.outlier_files import naive_table
from make.stored import decode_outliers
from oracle.kept_tiles import decode_tiles
from qsf.errors import QsfArgumentError
from qsf.file.layout import KEPT, Dtype
from qsf_converter.rounding.outliers import (
    FAR_SIGMAS,
    Gain,
    OutlierStats,
    choose_action,
    find_outliers,
    gain,
    join,
    pack_outliers,
    round_apart,
    split,
)
from qsf_converter.rounding.quantisers import quantise_rows

Rows = NDArray[np.float32]
TYPES = [dtype for dtype in Dtype if dtype not in (Dtype.MIXED, *KEPT)]


def gaussian(shape: tuple[int, int], seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spiked(shape: tuple[int, int], fraction: float, sigmas: float) -> Rows:
    rows = gaussian(shape)
    flat = rows.ravel()
    places = np.random.default_rng(1).permutation(flat.size)[: round(fraction * flat.size)]
    flat[places] = np.where(flat[places] < 0, -sigmas, sigmas)
    return rows


def test_statistics_are_those_of_the_whole() -> None:
    rows = spiked((64, 200), 0.002, 9) * np.float32(0.03) + np.float32(0.01)
    stats = OutlierStats.of(rows)
    w = rows.astype(np.float64)
    centred = (w - w.mean()) / w.std()
    assert stats.mean == pytest.approx(w.mean(), rel=1e-9)
    assert stats.sigma == pytest.approx(w.std(), rel=1e-9)
    assert stats.n == w.size
    assert stats.n_near == (np.abs(centred) > 3).sum()
    assert stats.n_far == (np.abs(centred) > FAR_SIGMAS).sum() == round(0.002 * w.size)
    assert stats.near_fraction == stats.n_near / w.size
    assert stats.far_fraction == stats.n_far / w.size
    constant, empty = OutlierStats.of(np.full((4, 64), 0.1, np.float32)), OutlierStats(0, 0)
    assert (constant.n_far, empty.near_fraction, empty.far_fraction) == (0, 0, 0)
    assert constant.sigma <= 1e-8


def test_split_leaves_the_mean_of_the_others() -> None:
    rows = np.arange(2 * 70, dtype=np.float32).reshape(2, 70)
    mask = np.zeros(rows.shape, np.bool_)
    mask[0, [3, 5]] = mask[0, 64:] = mask[1, 69] = True
    plain, entries = split(rows, mask)
    assert np.array_equal(plain[~mask], rows[~mask])
    others = np.delete(np.arange(64.0), [3, 5]).mean()
    assert plain[0, 3] == plain[0, 5] == np.float32(others)
    assert (plain[0, 64:] == 0).all()  # a block of nothing else
    assert plain[1, 69] == rows[1, 64:69].mean()
    assert list(zip(entries.rows, entries.cols, entries.values, strict=True)) == [
        (row, col, rows[row, col]) for row, col in np.argwhere(mask)
    ]
    same, none = split(rows, np.zeros(rows.shape, np.bool_))
    assert same is rows
    assert len(none) == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_a_side_table_gives_the_outliers_back(dtype: Dtype) -> None:
    """In pieces, as a converter goes: what is stored and the deltas are the source's outliers."""
    rows = spiked((80, 300), 0.004, 30)
    stats = OutlierStats.of(rows)
    mask = find_outliers(rows, stats.mean, stats.sigma)
    parts, tiles, both = [], b"", []
    for start in (0, 32, 64):
        here = slice(start, start + 32)
        piece, together, entries = round_apart(dtype, rows[here], mask[here])
        tiles += piece
        both.append(together)
        parts.append(entries.below(start))
    all_of = join(parts)
    table = pack_outliers(all_of.rows, all_of.cols, all_of.values, (80, 300))
    deltas = decode_outliers(table.data, 80, 300)
    assert table.n_entries == stats.n_far == (deltas != 0).sum()
    stored = decode_tiles(dtype, tiles, 80, 300) + deltas
    assert np.array_equal(stored, np.concatenate(both))
    assert np.abs(stored - rows)[mask].max() <= 30 * 2**-10
    plain = decode_tiles(dtype, quantise_rows(dtype, rows), 80, 300)
    if dtype not in (Dtype.F16, Dtype.F32):
        assert np.square(stored - rows).sum() < 0.6 * np.square(plain - rows).sum()


# ---- what to do ----


def action(rows: Rows, dtype: int = Dtype.Q4) -> str:
    stats = OutlierStats.of(rows)
    mask = find_outliers(rows, stats.mean, stats.sigma)
    return choose_action(stats, dtype, gain(dtype, rows, mask))


@pytest.mark.parametrize("dtype", [Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.TERNARY])
def test_the_four_answers(dtype: Dtype) -> None:
    """By what is gained for the bytes; measured on Gaussian weights with values further out."""
    shape = (128, 1024)
    assert action(gaussian(shape), dtype) == "none"
    assert action(spiked(shape, 0.0001, 6), dtype) == "clamp"  # not far enough to matter
    # The best scale of a ternary block leaves so few outliers aside by itself.
    few = "clamp" if dtype == Dtype.TERNARY else "outlier table"
    assert action(spiked(shape, 0.0001, 20), dtype) == few
    assert action(spiked(shape, 0.005, 10), dtype) == "outlier table"
    more = "clamp" if dtype == Dtype.Q4 else "more bits"
    assert action(spiked(shape, 0.02, 20), dtype) == more
    for spanning in (Dtype.Q8, Dtype.F16):
        assert action(spiked((64, 512), 0.005, 20), spanning) == "none"


def test_an_entry_must_be_worth_its_bytes() -> None:
    stats = OutlierStats(0.0, 1.0, n=10000, n_near=100, n_far=50)  # 0.16 bits a weight
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.33)) == "outlier table"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.31)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(0.0, 0.0)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 0.0)) == "outlier table"
    stats.n_far = 101
    assert choose_action(stats, Dtype.Q3, Gain(1.0, 0.0)) == "more bits"
    stats.n_far = 1
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.019)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.021)) == "outlier table"


def test_a_type_that_keeps_the_weights_is_not_changed() -> None:
    """Weights -s, 0 and s of which few are not 0, also where f16 rounds s."""
    rng = np.random.default_rng(8)
    for density in (0.02, 0.004):
        few = rng.integers(-1, 2, (128, 1024)) * (rng.random((128, 1024)) < density)
        for scale in (0.03125, 1 / 30):
            rows = (few * scale).astype(np.float32)
            assert action(rows, Dtype.TERNARY) == "clamp", (density, scale)
            assert action(rows + 1e-3 * gaussian(rows.shape), Dtype.TERNARY) != "clamp"


# ---- packing ----


@given(st.data())
def test_packing_equals_the_naive_one(data: st.DataObject) -> None:
    n_rows, n_cols = data.draw(st.integers(1, 40)), data.draw(st.integers(100, 9000))
    places = data.draw(
        st.lists(st.integers(0, n_rows * n_cols - 1), min_size=1, max_size=n_cols // 100,
                 unique=True)
    )  # fmt: skip
    at = np.array(places)
    deltas = np.linspace(-3, 5, len(at)).astype(np.float32)
    rows, cols = at // n_cols, at % n_cols
    entries = [
        (int(r), int(c), float(np.float16(d))) for r, c, d in zip(rows, cols, deltas, strict=True)
    ]
    expected = naive_table(entries, n_rows)
    if expected[1] <= n_rows * n_cols // 100:
        assert tuple(pack_outliers(rows, cols, deltas, (n_rows, n_cols))) == expected
    # Entries that are too far apart are bridged.
    rows, cols = np.array([0, 3, 3]), np.array([0, 4096, 20000])
    table = pack_outliers(rows, cols, np.array([1, 2, 3], np.float32), (5, 20001))
    assert tuple(table) == naive_table([(0, 0, 1.0), (3, 4096, 2.0), (3, 20000, 3.0)], 5)


@pytest.mark.parametrize(
    ("places", "delta", "text"),
    [
        ([(10, 0)], 1.0, "outside"),
        ([(0, 100)], 1.0, "outside"),
        ([(-1, 0)], 1.0, "outside"),
        ([(1, 1), (1, 1)], 1.0, "the same row and column"),
        ([(1, 1)], 65520.0, "not finite"),
        ([(1, 1)], float("nan"), "not finite"),
        ([], 1.0, "0 outliers; .* may have 1 to 10"),
        ([(1, c) for c in range(11)], 1.0, "11 outliers"),
    ],
)
def test_what_no_reader_would_accept(
    places: list[tuple[int, int]], delta: float, text: str
) -> None:
    at = np.array(places, np.int64).reshape(-1, 2)
    with pytest.raises(QsfArgumentError, match=text):
        pack_outliers(at[:, 0], at[:, 1], np.full(len(at), delta, np.float32), (10, 100))
