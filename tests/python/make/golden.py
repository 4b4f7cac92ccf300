# SPDX-License-Identifier: Apache-2.0
"""Reads tests/golden/*.npz, which tools/make_golden.py writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[3]

MODELS = {
    "tiny-llama": ROOT / "examples" / "tiny-llama",
    "tiny-gpt2": ROOT / "tests" / "models" / "tiny-gpt2",
}
"""The bundled models: folder by name."""


@dataclass(frozen=True, slots=True)
class Golden:
    """What transformers computes in fp32; `logits` is within 7.7e-6 of it."""

    text: str
    tokens: list[int]
    logits: NDArray[np.float32]
    prompts: list[str]
    prompt_ids: list[list[int]]
    continuations: list[list[int]]


def load_golden(name: str) -> Golden:
    """Read the golden file of a bundled model."""
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as stored:
        tokens = stored["tokens"].tolist()
        units = np.ascontiguousarray(stored["logit_bytes"].T).view("<i4")
        return Golden(
            text=str(stored["text"]),
            tokens=tokens,
            logits=(units / 65536).astype(np.float32).reshape(len(tokens), -1),
            prompts=stored["prompts"].tolist(),
            prompt_ids=_without_padding(stored["prompt_ids"]),
            continuations=_without_padding(stored["continuations"]),
        )


def _without_padding(rows: NDArray[Any]) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in rows]
