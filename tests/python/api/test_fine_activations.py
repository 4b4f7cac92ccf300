# SPDX-License-Identifier: Apache-2.0
"""16-bit activations, which a file may ask for: near to exact arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make import gguf_files
from make.fine_files import convert_fine
from make.gpt_oss import make_gpt_oss
from make.tiny_checkpoints import make_llama
from qsf_converter import convert

TOKENS = np.random.default_rng(6).integers(0, 101, 40).tolist()


def make_kept(tmp_path: Path, kind: str) -> Path:
    folder = make_llama(tmp_path / "hf", dim=96, head_dim=32, ffn_dim=160)
    return gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf_files.Type[kind])


def errors(path: Path) -> float:
    """The largest error against exact arithmetic."""
    found = []
    for exact in (False, True):
        with qsf.Model(path, ram_budget=None, exact=exact, kv_type="f32") as model:
            found.append(model.logits(TOKENS))
    return float(np.abs(found[0] - found[1]).max())


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "3bit", "4bit", "moe"])
def test_they_are_nearly_exact(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {}
    if kind.startswith("Q"):
        source = make_kept(tmp_path, kind)
    else:
        source = (
            make_gpt_oss(tmp_path / "hf", seed=3) if kind == "moe" else make_llama(tmp_path / "hf")
        )
        options = {"quant_type": "4bit" if kind == "moe" else kind}
    convert(source, tmp_path / "8.qsf", **options)
    fine = convert_fine(source, tmp_path / "16.qsf", **options)
    assert 0 < errors(fine) < errors(tmp_path / "8.qsf") / 50
