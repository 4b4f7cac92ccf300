# SPDX-License-Identifier: Apache-2.0
"""Outlier tables: the engine adds what they say; damaged ones: tests/c/check_outliers.c."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qsf
from make.outlier_files import add_outliers, random_entries
from make.stored import Reader
from make.tiny_checkpoints import make_llama
from oracle.reference import assert_near, forward, load_qsf, tokens_for
from qsf.file.layout import OUTLIERS_OF, TensorType
from qsf_converter import convert

T = TensorType
TOKENS = tokens_for(101)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    hf = make_llama(folder / "hf", seed=3, attention_bias=True, mlp_bias=True)
    convert(hf, folder / "plain.qsf", quant_type="4bit")
    return folder / "plain.qsf"


@pytest.mark.parametrize("kind", sorted(OUTLIERS_OF))
def test_no_side_table_is_forgotten(plain: Path, kind: int, tmp_path: Path) -> None:
    """Of each matrix alone: the exact path equals the reference, which differs from the plain."""
    path = tmp_path / "m.qsf"
    chosen = random_entries(9)
    add_outliers(plain, path, lambda t: chosen(t) if t.type == kind else [])
    want = forward(load_qsf(path), TOKENS).logits
    without = forward(load_qsf(plain), TOKENS).logits
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        assert_near(model.logits(TOKENS), want)
    assert np.abs(want - without).max() > 1e-3 * np.abs(want).max()


def test_the_plan_counts_what_is_copied(plain: Path, tmp_path: Path) -> None:
    """Gate and up are in memory together; nothing is taken of a model without outlier tables."""
    path = tmp_path / "m.qsf"
    add_outliers(plain, path, random_entries(9))
    with Reader(path) as r:
        pair = [r.tensor(1, kind) for kind in (T.FFN_GATE_OUTLIERS, T.FFN_UP_OUTLIERS)]
        taken = sum(-(-t.data_bytes // 64) * 64 for t in pair if t is not None)
    scratch = [qsf.Model.plan(p, ram_budget=None).scratch_bytes for p in (path, plain)]
    assert scratch[0] - scratch[1] == taken
