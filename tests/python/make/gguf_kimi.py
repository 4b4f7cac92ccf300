# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's converter does to Kimi Linear."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Keys = gguf.Keys


def general(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with usual names of Kimi Linear's keys."""
    if config["model_type"] != "kimi_linear":
        return config
    names = {"max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
             "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
             "n_shared_experts": "num_shared_experts"}  # fmt: skip
    n_dense = config["mlp_layer_types"].count("dense")
    here = {name: config[key] for name, key in names.items()}
    return {**config, **here, "first_k_dense_replace": n_dense}


def stored(name: str, values: Array) -> tuple[str, Array]:
    """-e^A_log, and convolutions with four axes."""
    if name.endswith("A_log"):
        return name, -np.exp(values.astype(np.float64)).astype(np.float32)
    if "_conv1d." in name:
        return name, values.reshape(1, len(values), 1, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def said(config: dict[str, Any]) -> dict[str, Any]:
    """What the metadata says beside what all families say."""
    n_rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        Keys.Attention.HEAD_COUNT_KV: [int(t[0] == "f") for t in config["layer_types"]],
        Keys.SSM.CONV_KERNEL: config["linear_conv_kernel_dim"],
        Keys.KDA.HEAD_DIM: config["linear_head_dim"],
        Keys.Attention.Q_LORA_RANK: config["q_lora_rank"],
        Keys.Attention.KV_LORA_RANK: rank,
        Keys.Rope.DIMENSION_COUNT: n_rope,
        Keys.Attention.KEY_LENGTH: rank + n_rope,
        Keys.Attention.VALUE_LENGTH: None,
        Keys.Attention.KEY_LENGTH_MLA: config["qk_nope_head_dim"] + n_rope,
        Keys.Attention.VALUE_LENGTH_MLA: config["v_head_dim"],
        Keys.LLM.EXPERT_GATING_FUNC: 2,
    }
