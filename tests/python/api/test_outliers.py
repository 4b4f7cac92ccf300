# SPDX-License-Identifier: Apache-2.0
"""Outlier tables: the engine adds what they say; damaged ones: tests/c/check_outliers.c."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.outlier_files import Entry, add_outliers, random_entries
from make.stored import Reader
from make.tiny_checkpoints import make_gpt2, make_llama
from oracle.reference import assert_near, forward, load_qsf, tokens_for
from qsf.file.layout import OUTLIERS_OF, Tensor, TensorType
from qsf_converter import convert

T = TensorType
TOKENS = tokens_for(101)


MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama, {"attention_bias": True, "mlp_bias": True}),
    "gpt2": (make_gpt2, {}),
}


def tabled_model(folder: Path, maker: str, quant_type: str) -> Path:
    """Return a model of which every matrix but layer 1's Q and up has an outlier table."""
    out = folder / f"{maker}-{quant_type}.qsf"
    if not out.exists():
        make, options = MAKERS[maker]
        hf = make(folder / f"hf-{maker}", seed=3, **options)
        convert(hf, folder / "plain.qsf", quant_type=quant_type, force=True)
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
