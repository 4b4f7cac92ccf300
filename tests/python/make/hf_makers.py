"""Makes small HuggingFace model directories with known random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from make.refusals import table
from make.tiny_checkpoints import gpt2_shapes
from make.tiny_checkpoints import llama_shapes as llama_shapes

Weights = dict[str, np.ndarray]

LLAMA_CONFIG: dict[str, Any] = table("tables")["llama"]
GPT2_CONFIG: dict[str, Any] = table("tables")["gpt2"]


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: type = np.float16, seed: int = 0
) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in shapes.items()
    }


def tokenizer_json(n_first: int = 3) -> bytes:
    """A tokenizer.json of 47 tokens: some letters, numbered from ``n_first``."""
    letters = "ABCDEHOWabcdefghijklmnopqrstuvwxyz .,!0123456789"[:47]
    vocab = {letter.replace(" ", "\u0120"): n_first + i for i, letter in enumerate(letters)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    ).encode()


def write_model(folder: Path, config: dict[str, Any], weights: Weights | None) -> Path:
    """A directory with config.json, tokenizer.json and, if there are weights, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weights: Weights, n_shards: int) -> None:
    """model-0000N-of-0000M.safetensors and their index."""
    weight_map = {}
    for i in range(n_shards):
        shard = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::n_shards]}
        save_file(part, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def bf16_bytes(values: np.ndarray) -> bytes:
    """The upper halves of f32 values: bf16 by truncation."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def llama(folder: Path, dtype: type = np.float16, **changes: Any) -> tuple[Path, Weights]:
    config = {**LLAMA_CONFIG, **changes}
    weights = random_weights(llama_shapes(config), dtype)
    return write_model(folder, config, weights), weights


def gpt2(folder: Path, dtype: type = np.float16, **changes: Any) -> tuple[Path, Weights]:
    config = {**GPT2_CONFIG, **changes}
    shapes = gpt2_shapes(config)
    for layer in range(config["n_layer"]):  # no weights: a mask
        shapes[f"transformer.h.{layer}.attn.bias"] = (1, 1, 24, 24)
    weights = random_weights(shapes, dtype)
    return write_model(folder, config, weights), weights
