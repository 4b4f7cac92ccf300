# SPDX-License-Identifier: Apache-2.0
"""Ternary types hold the weights of a checkpoint: exactly, or by the rule that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from make import hf_makers
from oracle import reference
from qsf.errors import QsfArgumentError
from qsf.file.reader import Reader
from qsf_converter import convert

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_matrix(name: str) -> bool:
    return any(f"{kind}.weight" in name for kind in MATRICES)


@pytest.mark.parametrize("quant_type", ["ternary", "ternary-dense"])
def test_ternary_weights_are_kept_bit_for_bit(tmp_path: Path, quant_type: str) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, values in weights.items():
        if is_matrix(name):
            scales = rng.uniform(1e-4, 3, (len(values), 1)).astype(np.float16)
            weights[name] = (rng.integers(-1, 2, values.shape) * scales).astype(np.float16)
    save_file(weights, folder / "model.safetensors")
    report = convert(folder, tmp_path / "m.qsf", quant_type=quant_type)
    actions = {tensor.action for tensor in report.tensors if tensor.type == quant_type}
    assert actions == {"lossless ternary"}
    source, stored = reference.load_huggingface(folder), reference.load_qsf(tmp_path / "m.qsf")
    for name, values in source.weights.items():
        if name.startswith("layer.") and values.ndim == 2:
            np.testing.assert_array_equal(stored.weights[name], values, err_msg=name)


def test_absmean_has_one_scale_for_each_matrix(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    convert(folder, tmp_path / "m.qsf", quant_type="ternary", ternary_rule="absmean")
    with Reader(tmp_path / "m.qsf") as reader:
        options = json.loads(reader.read_section("META"))["converter"]["options"]
    wanted_options = {"ternary_rule": "absmean", "quant_type": "ternary", "embed_type": "8bit"}
    assert options == wanted_options
    source, stored = reference.load_huggingface(folder), reference.load_qsf(tmp_path / "m.qsf")
    for name, values in source.weights.items():
        if name.startswith("layer.") and values.ndim == 2:
            scale = float(np.float16(np.abs(values.astype(np.float64)).mean()))
            wanted = np.clip(np.rint(values / np.float32(scale)), -1, 1) * np.float32(scale)
            np.testing.assert_array_equal(stored.weights[name], wanted, err_msg=name)


def test_what_does_not_go_with_a_ternary_rule_is_refused(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "m.qsf"
    with pytest.raises(QsfArgumentError, match="is for ternary types, not 4bit"):
        convert(folder, out, quant_type="4bit", ternary_rule="absmean")
    with pytest.raises(QsfArgumentError, match="leaves nothing to calibrate"):
        convert(folder, out, quant_type="ternary", ternary_rule="absmean", calibration="bundled")
    with pytest.raises(QsfArgumentError, match="rule best is unknown; available: search, absmean"):
        convert(folder, out, quant_type="ternary", ternary_rule="best")
    assert not out.exists()
