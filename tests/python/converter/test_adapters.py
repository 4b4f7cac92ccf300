# SPDX-License-Identifier: Apache-2.0
"""Adapters of low rank: merged as PEFT computes with them, and refused by name otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qsf
from make import golden_adapters as made
from qsf_converter import convert


@pytest.mark.parametrize("case", made.CASES)
def test_engine_agrees_with_peft(case: str, tmp_path: Path) -> None:
    base, used = made.CASES[case]
    lora = [f"{made.adapter(name, tmp_path / name)}:{scale}" for name, scale in used.items()]
    out = tmp_path / "m.qsf"
    convert(made.base(base, tmp_path / "base"), out, quant_type="f32", lora=lora, measure=False)
    with qsf.Model(out, exact=True, kv_type="f32", ram_budget=None) as model:
        logits = made.columns(model.logits(made.TOKENS))
    want = made.logits(case)
    assert np.abs(logits - want).max() < 2e-5 * np.abs(want).max()
