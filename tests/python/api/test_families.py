# SPDX-License-Identifier: Apache-2.0
"""Every family: the engine, and the reference, against the logits that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make import golden_families
from make.golden_families import Case
from oracle import reference
from qsf_converter import convert
from qsf_converter.sources.architectures import FAMILIES

BOUND = 3e-5  # of the largest logit
CONTEXT = golden_families.N_TOKENS


def difference(logits: NDArray[Any], case: Case) -> float:
    """The largest difference from the golden logits, as a part of the largest of these."""
    return float(np.abs(logits - case.logits).max() / np.abs(case.logits).max())


@pytest.mark.parametrize("name", golden_families.cases())
def test_engine_and_reference_agree_with_transformers(name: str, tmp_path: Path) -> None:
    case = golden_families.cases()[name]
    path = tmp_path / "model.qsf"
    convert(case.write(tmp_path / "m"), path, quant_type="f16", embed_type="f16")
    ours = reference.forward(reference.load_qsf(path, CONTEXT), case.tokens, dtype=np.float64)
    assert difference(ours.logits, case) < 1e-5
    with qsf.Model(path, exact=True, kv_type="f32", max_seq_len=CONTEXT, ram_budget=None) as model:
        assert difference(model.logits(case.tokens), case) < BOUND


def test_every_family_has_a_case() -> None:
    configs = [case.config for case in golden_families.cases().values()]
    tried = {c.get("text_config", c)["model_type"] for c in configs}
    older = {"llama", "mistral", "gpt2"}  # tests/golden has texts of these
    assert {family.model_type for family in FAMILIES.values()} <= tried | older
