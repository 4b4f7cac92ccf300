# SPDX-License-Identifier: Apache-2.0
"""Reads tests/golden/adapters.npz, which tools/make_golden_adapters.py writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
