# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of gpt-oss as they are published: experts in MXFP4, blocks and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from make import golden_families
from make.tiny_checkpoints import raw_safetensors

# The table of the OCP's specification of microscaling formats, version 1.0, but for -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, NDArray[Any]]
DIM, EXPERT_DIM, N_EXPERTS = 96, 64, 6
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_SIZES = {72: DIM, 40: EXPERT_DIM, 80: 2 * EXPERT_DIM}  # of the golden case -> here


def packed(n_vocab: int = 67) -> tuple[dict[str, Any], Tensors]:
    """The golden case of gpt-oss with wider matrices, its experts as published."""
    case = golden_families.cases()["gpt_oss"]
    config = {**case.config, "hidden_size": DIM, "intermediate_size": EXPERT_DIM}
    config["vocab_size"] = n_vocab
    config["quantization_config"] = QUANTIZATION
    tensors: Tensors = {}
    for name, shape in case.shapes.items():
        shape = tuple({**_SIZES, 67: n_vocab}.get(n, n) for n in shape)
        if name.endswith(("gate_up_proj", "down_proj")):
            n_experts, n_inputs, n_outputs = shape
            rng = np.random.default_rng(len(tensors))
            blocks = rng.integers(0, 256, (n_experts, n_outputs, n_inputs // 32, 16))
            scales = rng.integers(118, 124, blocks.shape[:-1])
            tensors[f"{name}_blocks"] = blocks.astype(np.uint8)
            tensors[f"{name}_scales"] = scales.astype(np.uint8)
        else:
            tensors[name] = golden_families.weights_of(name, shape)
    return config, tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A checkpoint of f16 and U8 tensors."""
    stored = {
        name: ("U8", t.shape, t.tobytes())
        if t.dtype == np.uint8
        else ("F16", t.shape, t.astype("<f2").tobytes())
        for name, t in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "model.safetensors").write_bytes(raw_safetensors(stored))
    return folder


def decoded(tensors: Tensors, name: str) -> NDArray[np.float32]:
    """[experts, outputs, inputs], by the published table: value * 2^(scale - 127)."""
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    values = np.stack((E2M1[blocks & 15], E2M1[blocks >> 4]), axis=-1)  # low half: even column
    values = values.reshape(*blocks.shape[:-1], 32) * 2.0 ** (scales.astype(float) - 127)[..., None]
    out: NDArray[np.float32] = values.reshape(*scales.shape[:-1], -1).astype(np.float32)
    return out


def dequantised(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The same model as transformers dequantises it: [experts, inputs, outputs]."""
    plain = {n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    for name in (n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")):
        plain[name] = np.ascontiguousarray(decoded(tensors, name).swapaxes(1, 2))
    return {key: v for key, v in config.items() if key != "quantization_config"}, plain


def make_gpt_oss(folder: Path, seed: int) -> Path:
    """Write a checkpoint with a vocabulary of 128 tokens."""
    del seed  # weights follow from the names
    return write(folder, *packed(n_vocab=128))
