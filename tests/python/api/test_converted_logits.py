"""What is converted computes what the checkpoint computes: the numpy reference on both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from make import tiny_checkpoints
from oracle import reference
from qsf_converter import convert

LLAMA3 = {"rope_scaling": tiny_checkpoints.LLAMA3_SCALING}
LINEAR = {"rope_scaling": tiny_checkpoints.LINEAR_SCALING}
LINEAR_OLD = {"rope_scaling": {"type": "linear", "factor": 4.0}}


def logits(model: reference.Model) -> np.ndarray:
    tokens = np.random.default_rng(4).integers(0, 101, 40)
    values: np.ndarray = reference.forward(model, tokens, dtype=np.float64).logits
    return values


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_checkpoints.make_llama, {}),
        (
            tiny_checkpoints.make_llama,
            {"tied_head": True, "attention_bias": True, "mlp_bias": True},
        ),
        (tiny_checkpoints.make_llama, {**LLAMA3, "n_kv_heads": 1, "head_dim": 10}),
        (tiny_checkpoints.make_llama, {**LINEAR, "n_kv_heads": 4, "rope_theta": 500.0}),
        (tiny_checkpoints.make_llama, LINEAR_OLD),
        (tiny_checkpoints.make_mistral, {}),
        (tiny_checkpoints.make_mistral, {"sliding_window": None, "hidden_act": "gelu"}),
        (tiny_checkpoints.make_gpt2, {}),
        (tiny_checkpoints.make_gpt2, {"tied_head": False, "hidden_act": "relu"}),
    ],
)
def test_f16_files_give_the_logits_of_the_checkpoint(
    tmp_path: Path, make: Callable[..., Path], options: dict[str, Any], storage: str
) -> None:
    folder = make(tmp_path / "m", storage=storage, **options)
    convert(folder, tmp_path / "out.qsf", quant_type="f16")
    expected = logits(reference.load_huggingface(folder))
    found = logits(reference.load_qsf(tmp_path / "out.qsf"))
    # fp16 weights are kept to the bit; of others f16 keeps eleven bits.
    tolerance = 1e-6 if storage == "fp16" else 2e-2 * expected.std()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def make_ternary(source: Path, folder: Path) -> Path:
    """A checkpoint whose layers hold -s, 0 and s, with an s of its own for each matrix."""
    tensors = load_file(source / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2 and ".layers." in name:
            scale = np.float32(np.float16(np.abs(values).mean()))
            tensors[name] = (np.rint(values / scale).clip(-1, 1) * scale).astype(np.float32)
    shutil.copytree(source, folder)
    (folder / "model.safetensors").write_bytes(tiny_checkpoints.safetensors_bytes(tensors, "fp16"))
    return folder


@pytest.mark.parametrize("quant", ["ternary", "ternary-dense"])
def test_ternary_checkpoints_lose_nothing(tmp_path: Path, quant: str) -> None:
    folder = make_ternary(tiny_checkpoints.make_llama(tmp_path / "source"), tmp_path / "ternary")
    report = convert(folder, tmp_path / "out.qsf", quant_type=quant, embed_type="f16")
    assert {tensor.max_error for tensor in report.tensors} == {0.0}
    expected = reference.load_huggingface(folder).weights
    found = reference.load_qsf(tmp_path / "out.qsf").weights
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize(
    ("quant", "tolerance"),
    [
        ("8bit", 0.05),
        ("4bit", 0.6),
        ("4bit-sym", 0.6),
        ("4bit-nl", 0.6),
        ("3bit", 0.9),
        ("2bit", 1.2),
        ("2bit-sym", 1.2),
        ("ternary", 1.3),
        ("ternary-dense", 1.3),
    ],
)
def test_quantised_files_stay_near(tmp_path: Path, quant: str, tolerance: float) -> None:
    for make in (tiny_checkpoints.make_llama, tiny_checkpoints.make_gpt2):
        folder = make(tmp_path / f"{make.__name__}")
        out = tmp_path / f"{make.__name__}.qsf"
        convert(folder, out, quant_type=quant)
        expected = logits(reference.load_huggingface(folder))
        error = logits(reference.load_qsf(out)) - expected
        assert 0 < error.std() < tolerance * expected.std()
