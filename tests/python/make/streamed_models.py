"""Models too large for the least budget, and the ways of reading that can be had here."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.golden import MODELS
from make.tiny_checkpoints import make_gpt2, make_llama
from qsf.errors import QsfUnsupportedError
from qsf.options import IO_METHODS as ALL_METHODS
from qsf_bench.models.random_qsf import write_model
from qsf_bench.models.shapes import Shape
from qsf_converter import convert
from qsf_converter.rounding.plan import QUANT_TYPES

IO_METHODS = tuple(name for name in ALL_METHODS if name != "auto")


def make_large_llama(folder: Path, **shape: int) -> Path:
    """Return a checkpoint that makes 23 MB of 8-bit weights in eight units, with a tokenizer."""
    sizes = {
        "n_layers": 6,
        "dim": 512,
        "n_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 64,
        "ffn_dim": 1536,
        "n_vocab": 2048,
        "max_tokens": 512,
        **shape,
    }
    return make_llama(folder, seed=1, tokenizer_from=MODELS["tiny-llama"], **sizes)


def make_streamed_llama(folder: Path) -> Path:
    """23 MB in eight units, with a tokenizer and without an end of text."""
    checkpoint = make_large_llama(folder / "llama", max_tokens=1024)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((checkpoint / name).read_text("utf-8"))
        (checkpoint / name).write_text(json.dumps({**values, "eos_token_id": None}), "utf-8")
    convert(checkpoint, folder / "llama.qsf", quant_type="8bit")
    return folder / "llama.qsf"


def write_random_llama(path: Path, tokenizer_from: Path) -> Path:
    """Random weights of about 130 MB: most of it is streamed in a budget of 110."""
    shape = Shape(12, 1024, 2816, 16, 16, n_vocab=2048, max_tokens=1024)
    dtype = QUANT_TYPES["8bit"]
    write_model(path, shape, dtype, dtype, tokenizer_from=tokenizer_from)
    return path


def write_random_mixture(
    path: Path, tokenizer_from: Path, *, n_real_layers: int | None = None
) -> Path:
    """Random weights of about 210 MB, nearly all of it in 256 experts of which a token has 16.

    With fewer real layers than four the others are holes.
    """
    shape = Shape(
        4, 512, 512, 8, 4, n_vocab=2048, max_tokens=1024, family="qwen3_moe", head_dim=64,
        n_experts=64, n_chosen=4,
    )  # fmt: skip
    dtype = QUANT_TYPES["8bit"]
    write_model(
        path, shape, dtype, dtype, tokenizer_from=tokenizer_from, n_real_layers=n_real_layers
    )
    return path


def make_streamed_gpt2(folder: Path) -> Path:
    """12 MB in five units; the embedding is the head, too."""
    checkpoint = make_gpt2(
        folder / "gpt2", seed=2, n_layers=3, dim=576, n_heads=9, n_vocab=2048, max_tokens=128
    )
    convert(checkpoint, folder / "gpt2.qsf", quant_type="8bit")
    return folder / "gpt2.qsf"


def least_options(path: Path, **options: Any) -> dict[str, Any]:
    """Return arguments of ``Model`` with which as much as can be is streamed in this process.

    The KV cache does not depend on the budget, so that the logits do not.
    """
    asked = {"kv_type": "8bit", "max_seq_len": 128, **options}
    least = qsf.Model.plan(path, ram_budget=1, **asked).min_budget_bytes
    return {**asked, "ram_budget": -(-least // 2**20) + 1}


@cache
def why_not(path: Path, method: str) -> str | None:
    try:
        with qsf.Model(path, **least_options(path, io=method)):
            return None
    except QsfUnsupportedError as error:
        return str(error)


def require_method(path: Path, method: str) -> None:
    """Skip the test, and say why, where ``path`` cannot be read this way."""
    why = why_not(path, method)
    if why is not None:
        print(why)
        pytest.skip(why)
