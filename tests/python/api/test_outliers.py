# SPDX-License-Identifier: Apache-2.0
"""Outlier tables: both readers know the rules, and the engine adds what they say everywhere."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.outlier_files import Entry, add_outliers, random_entries
from make.qsf_files import repair, tiny_header, write_tiny
from make.tiny_checkpoints import make_gpt2, make_llama
from oracle.file.outliers import unpack_outliers
from oracle.file.reader import Reader
from oracle.readers import verdict
from oracle.reference import assert_near, forward, load_qsf, tokens_for
from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.file.layout import OUTLIERS_OF, Compression, Dtype, Tensor, TensorType
from qsf_converter import convert

T = TensorType
TOKENS = tokens_for(101)
TABLE_TYPES = set(OUTLIERS_OF.values())


# ---- the readers ----

HEADER = tiny_header(dim=24, n_heads=3, n_kv_heads=3, head_dim=8, ffn_dim=40)


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> dict[Compression, bytes]:
    """Files in which every matrix of the layers has an outlier table, packed and not."""
    folder = tmp_path_factory.mktemp("tabled")
    write_tiny(folder / "plain.qsf", 4, header=HEADER, is_dull=True)
    out = {}
    for compression in (Compression.NONE, Compression.LZ4, Compression.ZSTD):
        add_outliers(folder / "plain.qsf", folder / "m.qsf", random_entries(1), compression)
        out[compression] = (folder / "m.qsf").read_bytes()
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.qsf"


def table_of(path: Path, kind: int, unit_idx: int = 1) -> tuple[Tensor, int, int]:
    """Return an outlier table, where its data is in the file, and its entry in TENS."""
    with Reader(path) as r:
        tensor = r.tensor(unit_idx, kind)
        assert tensor is not None
        in_table = r.sections["TENS"].off + 32 * r.tensors.index(tensor)
        return tensor, r.units[unit_idx].off + tensor.data_off, in_table


def test_good_tables(path: Path, tabled: dict[Compression, bytes]) -> None:
    for compression, data in tabled.items():
        assert verdict(path, data) is None
        assert verdict(path, repair(data)) is None
        with Reader(path) as r:
            kinds = {t.type for t in r.units[1].tensors} & TABLE_TYPES
            assert kinds == TABLE_TYPES
            assert r.units[1].compression == compression


# Gate is [40, 24]: 9 entries, tile rows of 16, 16 and 8 rows. (offset, format, value)
FIRST, ENTRIES = 0, 16
TABLE_ATTACKS: dict[str, list[tuple[int, str, int]]] = {
    "first is not 0": [(FIRST, "I", 1)],
    "last is less": [(FIRST + 12, "I", 8)],
    "last is more": [(FIRST + 12, "I", 10)],
    "descends": [(FIRST + 4, "I", 8), (FIRST + 8, "I", 7)],
    "beyond all": [(FIRST + 4, "I", 10)],
    "far beyond all": [(FIRST + 4, "I", 0xFFFFFFFF)],
    "step 0": [(ENTRIES + 4, "H", 0)],
    "first step 0": [(ENTRIES, "H", 0)],
    "behind the columns": [(ENTRIES, "H", 24 * 16 + 1)],
    "far behind the columns": [(ENTRIES, "H", 0xFFFF)],
    "infinite": [(ENTRIES + 2, "H", 0x7C00)],
    "minus infinite": [(ENTRIES + 2, "H", 0xFC00)],
    "not a number": [(ENTRIES + 2, "H", 0x7E01)],
    "behind the rows": [(FIRST + 4, "I", 0), (FIRST + 8, "I", 0), (ENTRIES, "H", 9)],
}


@pytest.mark.parametrize("name", TABLE_ATTACKS)
def test_hostile_tables(path: Path, tabled: dict[Compression, bytes], name: str) -> None:
    """Both readers refuse to verify them, and Python to unpack them."""
    path.write_bytes(tabled[Compression.NONE])
    tensor, off, _ = table_of(path, T.FFN_GATE_OUTLIERS)
    assert (tensor.n_rows, tensor.n_cols, tensor.n_entries) == (40, 24, 9)
    data = bytearray(tabled[Compression.NONE])
    for at, fmt, value in TABLE_ATTACKS[name]:
        struct.pack_into("<" + fmt, data, off + at, value)
    assert verdict(path, repair(data)) is QsfFormatError
    with Reader(path) as r, pytest.raises(QsfFormatError, match="outlier table"):
        list(unpack_outliers(r.read_tensor(tensor), 40, 24, 9))


@pytest.mark.parametrize(
    ("at", "fmt", "value", "error"),
    [
        (4, "I", 127, QsfUnsupportedError),
        (4, "I", T.FFN_GATE, QsfFormatError),  # the matrix's type, in layout 2
        (4, "I", T.FFN_NORM_BIAS, QsfFormatError),
        (8, "I", 39, QsfFormatError),
        (8, "I", 60, QsfFormatError),
        (12, "I", 22, QsfFormatError),
        (16, "B", Dtype.F32, QsfFormatError),
        (16, "B", 255, QsfFormatError),
        (17, "B", 0, QsfFormatError),
        (17, "B", 1, QsfFormatError),
        (17, "B", 3, QsfFormatError),
        (20, "I", 0, QsfFormatError),
        (20, "I", 8, QsfFormatError),
        (20, "I", 10, QsfFormatError),
        (20, "I", 0xFFFFFFFF, QsfFormatError),
    ],
)
def test_hostile_entries_of_the_tensor_table(
    path: Path, tabled: dict[Compression, bytes], at: int, fmt: str, value: int, error: Any
) -> None:
    path.write_bytes(tabled[Compression.NONE])
    _, _, in_table = table_of(path, T.FFN_GATE_OUTLIERS)
    data = bytearray(tabled[Compression.NONE])
    struct.pack_into("<" + fmt, data, in_table + at, value)
    assert verdict(path, repair(data)) is error


def test_the_header_in_the_unit_says_how_many(path: Path, tabled: dict[Compression, bytes]) -> None:
    path.write_bytes(tabled[Compression.NONE])
    _, off, _ = table_of(path, T.FFN_GATE_OUTLIERS)
    for at in (16, 20, 63):
        data = bytearray(tabled[Compression.NONE])
        data[off - 64 + at] ^= 1
        assert verdict(path, repair(data)) is QsfFormatError


# ---- the engine ----

MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama, {"attention_bias": True, "mlp_bias": True}),
    "gpt2": (make_gpt2, {}),
    # 5 MB of layers: more than the least budget has room for.
    "large": (make_llama, {"n_layers": 12, "dim": 256, "ffn_dim": 640, "n_vocab": 101}),
}


def tabled_model(folder: Path, maker: str, quant_type: str, compress: str = "none") -> Path:
    """Return a model of which every matrix but layer 1's Q and up has an outlier table."""
    out = folder / f"{maker}-{quant_type}-{compress}.qsf"
    if not out.exists():
        make, options = MAKERS[maker]
        hf = make(folder / f"hf-{maker}", seed=3, **options)
        convert(hf, folder / "plain.qsf", quant_type=quant_type, compress=compress, force=True)
        chosen = random_entries(9)

        def choose(t: Tensor) -> list[Entry]:
            return [] if t.unit_idx == 2 and t.type in (T.Q, T.FFN_UP) else chosen(t)

        add_outliers(folder / "plain.qsf", out, choose)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


CASES = [("llama", "4bit"), ("gpt2", "8bit")]


@pytest.mark.parametrize(("maker", "quant_type"), CASES)
def test_exact_path_equals_the_reference(folder: Path, maker: str, quant_type: str) -> None:
    path = tabled_model(folder, maker, quant_type)
    reference = load_qsf(path)
    assert len(reference.outliers) > 8
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        got = model.logits(TOKENS)
    assert_near(got, forward(reference, TOKENS).logits)


@pytest.mark.parametrize("kind", sorted(OUTLIERS_OF))
def test_no_side_table_is_forgotten(folder: Path, kind: int, tmp_path: Path) -> None:
    """Of each matrix alone: the exact path equals the reference, which differs from the plain."""
    tabled_model(folder, "llama", "4bit")
    plain, path = folder / "alone.qsf", tmp_path / "m.qsf"
    convert(folder / "hf-llama", plain, quant_type="4bit", force=True)
    chosen = random_entries(9)
    add_outliers(plain, path, lambda t: chosen(t) if t.type == kind else [])
    want = forward(load_qsf(path), TOKENS).logits
    without = forward(load_qsf(plain), TOKENS).logits
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        assert_near(model.logits(TOKENS), want)
    assert np.abs(want - without).max() > 1e-3 * np.abs(want).max()


def least_budget(path: Path, **options: Any) -> int:
    return -(-qsf.Model.plan(path, ram_budget=1, **options).min_budget_bytes // 2**20) + 1


def streamed_unit(path: Path) -> int:
    """Return a layer that is read while it is computed with, when there is least memory."""
    with qsf.Model(path, ram_budget=least_budget(path)) as model:
        model.logits(TOKENS[:1])
        return max(i for i, unit in enumerate(model.timeline[:-1]) if unit.read_bytes > 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_engine_refuses_a_hostile_table(folder: Path, path: Path, is_streamed: bool) -> None:
    """With right checksums: no logits come of it, whatever the table says."""
    good_path = tabled_model(folder, "large", "4bit")
    good, unit_idx = good_path.read_bytes(), streamed_unit(good_path)
    for kind in (T.Q_OUTLIERS, T.FFN_DOWN_OUTLIERS):
        tensor, off, _ = table_of(good_path, kind, unit_idx)
        split = 4 * (-(-tensor.n_rows // 16) + 1)
        for at, fmt, value in (
            (0, "I", 1), (4, "I", 0xFFFFFFFF), (split - 4, "I", 0), (split, "H", 0),
            (split, "H", 0xFFFF), (split + 2, "H", 0x7C00),
        ):  # fmt: skip
            data = bytearray(good)
            struct.pack_into("<" + fmt, data, off + at, value)
            path.write_bytes(repair(data))
            budget = least_budget(path) if is_streamed else None
            with qsf.Model(path, ram_budget=budget) as model:
                plan = model.info.plan
                assert (plan.n_units_resident < plan.n_units) == is_streamed
                with pytest.raises(QsfFormatError, match=f"unit {unit_idx}: .*type {int(kind)} "):
                    model.logits(TOKENS[:3])


def test_the_plan_counts_what_is_copied(folder: Path) -> None:
    """Gate and up are in memory together; nothing is taken of a model without outlier tables."""
    tabled = tabled_model(folder, "llama", "4bit")
    plain = folder / "alone.qsf"
    convert(folder / "hf-llama", plain, quant_type="4bit", force=True)
    with Reader(tabled) as r:
        pair = [r.tensor(1, kind) for kind in (T.FFN_GATE_OUTLIERS, T.FFN_UP_OUTLIERS)]
        taken = sum(-(-t.data_bytes // 64) * 64 for t in pair if t is not None)
    scratch = [qsf.Model.plan(p, ram_budget=None).scratch_bytes for p in (tabled, plain)]
    assert scratch[0] - scratch[1] == taken
