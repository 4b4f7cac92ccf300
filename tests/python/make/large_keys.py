# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose key channels differ in size as those of real models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from make.tiny_checkpoints import write_checkpoint

Tensors = dict[str, NDArray[np.float32]]


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and the tensors as f32 of a folder with one safetensors file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return config, {name: array.astype(np.float32) for name, array in tensors.items()}


def with_large_keys(folder: Path, out: Path, *, size: float, n_pairs: int = 2) -> Path:
    """Write a LLaMA checkpoint again, with biases of ``size`` in the K channels that turn slowest.

    As in Qwen 2, these change the scores of all positions alike, so that the model hardly changes.
    """
    config, tensors = read_checkpoint(folder)
    config["attention_bias"] = True
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, dim = config["head_dim"], config["hidden_size"]
    rng = np.random.default_rng(1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        keys = np.zeros((n_kv_heads, 2, head_dim // 2), np.float32)
        keys[:, :, -n_pairs:] = size * rng.choice((-1, 1), (n_kv_heads, 2, n_pairs))
        biases = {
            "q": np.zeros(n_heads * head_dim, np.float32),
            "k": keys.ravel(),
            "v": np.zeros(n_kv_heads * head_dim, np.float32),
            "o": np.zeros(dim, np.float32),
        }
        tensors |= {f"{at}.{name}_proj.bias": bias for name, bias in biases.items()}
    has_tokenizer = (folder / "tokenizer.json").exists()
    return write_checkpoint(out, config, tensors, tokenizer_from=folder if has_tokenizer else None)
