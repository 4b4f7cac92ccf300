# SPDX-License-Identifier: Apache-2.0
"""Reads tests/golden/adapters.npz, of tools/make_golden_adapters.py; writes adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from make import golden, golden_families

PATH = golden.ROOT / "tests" / "golden" / "adapters.npz"
FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENS = [0, 5, 9, 14, 2, 33, 41, 60]
# By name: the base, and the adapters with their scales.
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "plain": ("llama", {"plain": 1.0}),
    "patterns": ("llama", {"patterns": 1.0}),
    "several": ("llama", {"plain": 0.5, "patterns": -0.25, "one-layer": 1.0}),
    "biased": ("qwen2", {"biased": 1.0}),
    "dora": ("qwen2", {"dora": 1.0}),
    "dora-and-plain": ("qwen2", {"dora": 0.5, "biased": 1.5}),
    "conv": ("gpt2", {"conv": 1.0}),
    "conv-dora": ("gpt2", {"conv-dora": 1.0, "conv": 1.0}),
}


def base(name: str, folder: Path) -> Path:
    """Return the folder of a base; write it to ``folder`` if none is bundled."""
    if name == "gpt2":
        return golden.MODELS["tiny-gpt2"]
    return golden_families.cases()["llama-linear" if name == "llama" else name].write(folder)


def columns(logits: NDArray[Any]) -> NDArray[np.float32]:
    """The part of logits that is stored."""
    return np.ascontiguousarray(logits[:, :: 16 if logits.shape[1] > 1000 else 1], np.float32)


def logits(case: str) -> NDArray[np.float32]:
    """What PEFT computes of the case, `columns` of it."""
    with np.load(PATH) as stored:
        return np.asarray(stored[f"logits/{case}"])


def adapter(name: str, folder: Path) -> Path:
    """Write the folder that PEFT saved, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(PATH) as stored:
        for file in FILES:
            (folder / file).write_bytes(stored[f"{name}/{file}"].tobytes())
    return folder


# ---- adapters as PEFT saves them ----
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
