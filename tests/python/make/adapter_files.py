"""Adapters as PEFT saves them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A = "model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
K = Q.replace("q_proj", "k_proj")
Tensors = dict[str, NDArray[Any]]


def write_adapter(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **fields}
    (folder / CONFIG).write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / WEIGHTS)
    return folder


def pair(module: str = Q, n_out: int = 96, n_in: int = 80, rank: int = 2) -> Tensors:
    """A and B of one module; by default Q of `tiny_checkpoints.make_llama`."""
    rng = np.random.default_rng(rank)
    a, b = rng.standard_normal((rank, n_in)), rng.standard_normal((n_out, rank))
    values = {"lora_A": a.astype("f2"), "lora_B": b.astype("f2")}  # which f16 keeps exactly
    return {f"{module}.{part}.weight": v.astype("f4") for part, v in values.items()}
