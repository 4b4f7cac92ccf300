# SPDX-License-Identifier: Apache-2.0
"""Calibration of every family: the rounded model is taken through its layers as the original is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from make import calibrated_models, golden_families, mtp_models
from qsf.file.layout import Dtype
from qsf_converter.calibrate.calibration import Calibration

NAMES = ("qwen3-bias", "phi", "gpt_neox", "falcon-alibi", "bloom", "stablelm-heads", "olmo2",
         "bitnet", "gemma2", "gemma3", "granite-bias", "phi3-longrope-short", "smollm3",
         "ministral3", "gpt_oss", "qwen3_5", "qwen3_5+mtp", "qwen3_5_moe+mtp",
         "granitemoehybrid-moe", "nemotron_h-moe", "falcon_h1-norm", "mamba2",
         "gemma4", "gemma4-moe", "gemma4-own",
         "gemma4-shared", "deepseek_v2", "youtu", "minicpm3")  # fmt: skip


def mean_kl(folder: Path, dtype: Dtype) -> float:
    """KL of the calibrated model on texts that it was not fitted to."""
    with calibrated_models.planned(folder, dtype, dtype) as (source, plan):
        tokens = np.random.default_rng(3).integers(0, 67, (6, 24))
        run = Calibration(plan, source.checkpoint, tokens[:4], tokens[4:])
        for unit in run.units():
            for tensor in unit.tensors:
                assert all(piece.data for piece in tensor.pieces)
    assert run.divergence is not None
    return float(run.divergence.kl.mean())


@pytest.mark.parametrize("name", NAMES)
def test_both_streams_pass_all_layers(name: str, tmp_path: Path) -> None:
    case = golden_families.cases()[name.removesuffix("+mtp")]
    folder = (mtp_models.write_hf if "+mtp" in name else type(case).write)(case, tmp_path / "m")
    unrounded = abs(mean_kl(folder, Dtype.F16))
    assert unrounded < 1e-7
    assert 10 * unrounded < mean_kl(folder, Dtype.Q8) < 1e-2
