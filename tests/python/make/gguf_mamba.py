# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's converter makes of models with layers of Mamba-2."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Keys = gguf.Keys


def general(config: dict[str, Any]) -> dict[str, Any]:
    """Give a model without attention what others state."""
    if config["model_type"] != "mamba2":
        return config
    more = {"num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1 << 20}
    left_out = ("head_dim", "layer_norm_epsilon")
    kept = {name: value for name, value in config.items() if name not in left_out}
    return {**kept, **more, "rms_norm_eps": config["layer_norm_epsilon"]}


def stored(config: dict[str, Any], arch: str, tensors: dict[str, Array]) -> dict[str, Array]:
    """Make -e^A_log, matrices of vectors, and fold Falcon's factors into its matrices."""
    n_groups = config.get("mamba_n_groups") or config["n_groups"]
    has_experts = arch == "nemotron_h_moe" or config.get("num_local_experts")
    factors: dict[str, Any] = {}
    if arch == "falcon-h1":
        inner = config["mamba_d_ssm"]
        n_keys = n_groups * config["mamba_d_state"]
        of_parts = np.array(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
        n_of_parts = (inner, inner, n_keys, n_keys, config["mamba_n_heads"])
        attention = config["attention_in_multiplier"]
        factors = {
            "mamba.in_proj": np.repeat(of_parts, n_of_parts)[:, None],
            "mamba.out_proj": config["ssm_out_multiplier"],
            "q_proj": attention,
            "k_proj": attention * config["key_multiplier"],
            "v_proj": attention,
            "o_proj": config["attention_out_multiplier"],
            "gate_proj": config["mlp_multipliers"][0],
            "down_proj": config["mlp_multipliers"][1],
            "embed_tokens": config["embedding_multiplier"],
            "lm_head": config["lm_head_multiplier"],
        }
    made: dict[str, Array] = {}
    for name, values in tensors.items():
        if name.endswith(("A_log", ".D")):
            values = values[:, None]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            values = values.reshape(n_groups, -1)
        for part, factor in factors.items():
            if name.endswith(f"{part}.weight"):
                values = (values * factor).astype(np.float32)
        if "shared_mlp" in name and not has_experts:  # one FFN
            name = name.replace("shared_mlp", "mlp.shared")
        made[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return made


def said(config: dict[str, Any], arch: str) -> dict[str, Any]:
    types = config.get("layers_block_type") or config.get("layer_types") or ()
    attention = config.get("attn_layer_indices", ())  # of Bamba, which has RoPE
    if attention:
        layers = range(config["num_hidden_layers"])
        types = [("mamba", "full_attention")[i in attention] for i in layers]
    n_heads = _first(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = _first(config, "mamba_d_ssm") if arch == "falcon-h1" else 2 * config["hidden_size"]
    if "mamba_head_dim" in config:
        inner = n_heads * config["mamba_head_dim"]
    said: dict[str, Any] = {
        Keys.SSM.CONV_KERNEL: _first(config, "mamba_d_conv", "conv_kernel"),
        Keys.SSM.STATE_SIZE: _first(config, "mamba_d_state", "ssm_state_size", "state_size"),
        Keys.SSM.GROUP_COUNT: _first(config, "mamba_n_groups", "n_groups"),
        Keys.SSM.TIME_STEP_RANK: n_heads,
        Keys.SSM.INNER_SIZE: inner,
    }
    if arch == "mamba2":  # the converter states none
        said |= {Keys.Attention.HEAD_COUNT: 0, Keys.LLM.FEED_FORWARD_LENGTH: 0}
    if types:
        of_layers = [config["num_key_value_heads"] * (t == "full_attention") for t in types]
        is_turned = bool(attention) or config.get("position_embedding_type") == "rope"
        said |= {Keys.Attention.HEAD_COUNT_KV: of_layers, Keys.Rope.SCALING_FINETUNED: is_turned}
    if "layers_block_type" in config:
        of = config["moe_intermediate_size" if arch == "nemotron_h_moe" else "intermediate_size"]
        said[Keys.LLM.FEED_FORWARD_LENGTH] = [of * (t in ("mlp", "moe")) for t in types]
        said[Keys.Attention.LAYERNORM_RMS_EPS] = config["layer_norm_epsilon"]
    return said


def _first(config: dict[str, Any], *names: str) -> Any:
    return next(config[name] for name in names if config.get(name))
