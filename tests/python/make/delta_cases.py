# SPDX-License-Identifier: Apache-2.0
"""The cases of tools/make_golden_families.py that have the delta rule."""

from __future__ import annotations

import re
from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "hidden_size": 72, "intermediate_size": 80, "vocab_size": 67, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_KIMI: Final[dict[str, Any]] = {
    **_BASE, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3,
    "model_max_length": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 40,
}  # fmt: skip
_LING: Final[dict[str, Any]] = {**_KIMI, "head_dim": 16}
_F, _L = "full_attention", "linear_attention"
_QWEN: Final[dict[str, Any]] = {
    **_BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                        "partial_rotary_factor": 0.25},
}  # fmt: skip
_MOE: Final[dict[str, Any]] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_OLMO: Final[dict[str, Any]] = {
    **_BASE, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bailing_hybrid": (
        "bailing_hybrid",
        {**_LING, "num_hidden_layers": 5, "layer_group_size": 2, "num_expert_group": 4,
         "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "bailing_hybrid-plain": (
        "bailing_hybrid",
        {**_LING, "num_hidden_layers": 3, "layer_types": [_F, _L, _L], "q_lora_rank": 40,
         "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
         "kda_safe_gate": False, "short_conv_kernel_size": 3},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {**_QWEN, "linear_num_value_heads": 4, "linear_value_head_dim": 24,
         "num_hidden_layers": 4, "layer_types": [_L, _L, _F, _L]},
    ),
    "qwen3_5-three": (
        "qwen3_5_text",
        {**_QWEN, "linear_num_value_heads": 6, "linear_value_head_dim": 40,
         "linear_key_head_dim": 24, "tie_word_embeddings": True, "num_hidden_layers": 3,
         "layer_types": [_F, _L, _L]},
    ),
    "qwen3_5-nested": (
        "qwen3_5",
        {"text_config": {**_QWEN, "model_type": "qwen3_5_text", "num_hidden_layers": 2,
                         "layer_types": [_L, _F]},
         "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                           "out_hidden_size": 72, "num_position_embeddings": 16},
         "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
         "vision_end_token_id": 63},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_QWEN, **_MOE, "linear_num_value_heads": 4, "num_hidden_layers": 3,
         "layer_types": [_L, _F, _L]},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_QWEN, **_MOE, "linear_num_value_heads": 4, "linear_value_head_dim": 24,
         "num_hidden_layers": 4, "layer_types": [_L, _L, _F, _L]},
    ),
    "qwen3_next-dense": (
        "qwen3_next",
        {**_QWEN, **_MOE, "mlp_only_layers": [0], "linear_conv_kernel_dim": 3,
         "norm_topk_prob": False, "num_hidden_layers": 3, "layer_types": [_F, _L, _L]},
    ),
    "kimi_linear": (
        "kimi_linear",
        {**_KIMI, "linear_attn_config": {
            "head_dim": 24, "num_heads": 2, "short_conv_kernel_size": 4, "full_attn_layers": [3],
            "kda_layers": [1, 2, 4]}},
    ),
    "kimi_linear-groups": (
        "kimi_linear",
        {**_KIMI, "q_lora_rank": 40, "num_expert_group": 4, "topk_group": 2, "num_hidden_layers": 3,
         "num_shared_experts": 2, "moe_renormalize": False,
         "layer_types": [_F, _L, _L], "linear_head_dim": 36, "linear_num_heads": 3,
         "linear_conv_kernel_dim": 3, "first_k_dense_replace": 2, "rms_norm_eps": 1e-4},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_OLMO, "rope_parameters": {"rope_theta": None,
                                                                 "rope_type": "default"}}),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        {**_OLMO, "linear_allow_neg_eigval": False, "linear_num_key_heads": None,
         "linear_num_value_heads": None, "linear_key_head_dim": None, "attention_bias": True,
         "linear_value_head_dim": None, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-4,
         "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
# Tensors that transformers saves under other names than published checkpoints have.
_RENAMED: Final = {
    "kimi_k25": (r"(language_model\.model)\.blocks\.", r"\1.layers."),
    "kimi_linear": (r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1"),
    "olmo_hybrid": (r"(layers\.3\.)feedforward_layer_norm", r"\1post_attention_layernorm"),
}


def published(config: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
    """The shapes by the names of published checkpoints, convolutions cut between q, k and v."""
    old, new = _RENAMED.get(config["model_type"], ("$^", ""))
    shapes = {re.sub(old, new, name): shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if "_conv1d." in name:
            rows = shapes[name.replace("_conv1d.", "_proj.")]
            shapes[name] = [rows[0], *shape[1:]]
    return shapes
