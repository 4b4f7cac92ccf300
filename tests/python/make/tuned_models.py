# SPDX-License-Identifier: Apache-2.0
"""The bundled model as people pass models on: with wider heads, or with a LoRA merged into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from make.large_keys import Tensors, read_checkpoint
from make.tiny_checkpoints import write_checkpoint


def with_wide_heads(folder: Path, out: Path, head_dim: int) -> Path:
    """Write a LLaMA checkpoint again with heads of ``head_dim``; it computes the same.

    The further channels of keys and values are as large as the others, and nothing reads them: they
    are there for the KV cache. The pairs that were there turn at the same speed.
    """
    config, tensors = read_checkpoint(folder)
    old_dim = config["head_dim"]
    rng = np.random.default_rng(3)

    def widened(rows: NDArray[np.float32], *, is_read: bool) -> NDArray[np.float32]:
        """Rows of one head more: in each half of it, as RoPE pairs its channels."""
        heads = rows.reshape(-1, 2, old_dim // 2, rows.shape[1])
        more = np.zeros((len(heads), 2, (head_dim - old_dim) // 2, rows.shape[1]), np.float32)
        if not is_read:
            more += rng.normal(0, rows.std(), more.shape)
        return np.concatenate([heads, more], axis=2).reshape(-1, rows.shape[1])

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        q, k, v, o = (tensors[f"{at}.{name}_proj.weight"] for name in "qkvo")
        q = q * np.float32(np.sqrt(head_dim / old_dim))  # the scores' divisor grows
        tensors[f"{at}.q_proj.weight"] = widened(q, is_read=True)
        tensors[f"{at}.k_proj.weight"] = widened(k, is_read=False)
        tensors[f"{at}.v_proj.weight"] = widened(v, is_read=False)
        tensors[f"{at}.o_proj.weight"] = np.ascontiguousarray(widened(o.T, is_read=True).T)
        for name in ("q", "k", "v") if f"{at}.k_proj.bias" in tensors else ():
            bias = tensors[f"{at}.{name}_proj.bias"][:, None]
            tensors[f"{at}.{name}_proj.bias"] = widened(bias, is_read=name == "q")[:, 0]
    config["head_dim"] = head_dim
    config["rope_theta"] **= head_dim / old_dim
    return write_checkpoint(out, config, tensors, tokenizer_from=folder)


def with_merged_lora(folder: Path, out: Path, *, rank: int, size: float) -> Path:
    """Write a checkpoint again, each projection + B A of ``rank``; ``size``: norm of B A to it."""
    config, tensors = read_checkpoint(folder)
    rng = np.random.default_rng(4)
    merged: Tensors = {}
    for name, w in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        b, a = (rng.standard_normal(shape) for shape in ((len(w), rank), (rank, w.shape[1])))
        delta = b @ a
        merged[name] = w + (delta * (size * np.linalg.norm(w) / np.linalg.norm(delta))).astype("f4")
    return write_checkpoint(out, config, tensors | merged, tokenizer_from=folder)
