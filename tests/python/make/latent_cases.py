# SPDX-License-Identifier: Apache-2.0
"""The cases of tools/make_golden_families.py that have latent attention."""

from __future__ import annotations

from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 3, "vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
    "kv_lora_rank": 64, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
_MOE: Final[dict[str, Any]] = {
    **_BASE, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
_ONE_QUERY: Final = {"q_lora_rank": None, "v_head_dim": 32, "kv_lora_rank": 128}
_GROUPS: Final = {"n_group": 4, "topk_group": 2}

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deepseek_v2": ("deepseek_v2", {**_MOE, **_ONE_QUERY, "rope_parameters": _YARN}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {**_MOE, **_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.6},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_MOE, **_GROUPS, "routed_scaling_factor": 2.5, "rope_parameters": _YARN,
         "rms_norm_eps": 1e-4},
    ),
    "deepseek_v3-bias": (
        "deepseek_v3",
        {**_MOE, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "attention_bias": True,
         "norm_topk_prob": False, "first_k_dense_replace": 2, "tie_word_embeddings": True},
    ),
    "kimi_k25": (
        "kimi_k25",
        {"text_config": {**_MOE, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
         "vision_config": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4,
                           "pos_emb_time": 2, "num_attention_heads": 2, "num_hidden_layers": 1,
                           "hidden_size": 16, "intermediate_size": 16, "merge_kernel_size": [1, 1]},
         "projection_hidden_size": 16, "image_token_id": 60, "video_token_id": 61,
         "vision_start_token_id": 62, "vision_end_token_id": 63, "tie_word_embeddings": False},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**_MOE, "n_shared_experts": 1, "mlp_layer_types": ["dense"] * 2 + ["sparse"]},
    ),
    "mistral4": (
        "mistral3",
        {"text_config": {**_MOE, "model_type": "mistral4", "first_k_dense_replace": 0,
                         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
                                             "llama_4_scaling_beta": 0.1}},
         "vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
                           "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
                           "image_size": 8, "head_dim": 8},
         "image_token_index": 66, "tie_word_embeddings": False},
    ),
    "youtu": ("youtu", {**_BASE, "tie_word_embeddings": True}),
    "youtu-one": ("youtu", {**_BASE, **_ONE_QUERY}),
    "deepseek_v2-odd": (
        "deepseek_v2", {**_MOE, "q_lora_rank": None, "kv_lora_rank": 40, "v_head_dim": 20},
    ),
    "deepseek_v3-odd": (
        "deepseek_v3",
        {**_MOE, "n_group": 1, "topk_group": 1, "kv_lora_rank": 72, "v_head_dim": 24,
         "attention_bias": True},
    ),
    "minicpm3": (
        "minicpm3",
        {**_BASE, "v_head_dim": 48, "scale_emb": 6, "scale_depth": 1.1, "dim_model_base": 36,
         "tie_word_embeddings": True},
    ),
    "minicpm3-longrope": (
        "minicpm3",
        {**_BASE, "scale_depth": None, "dim_model_base": None, "max_position_embeddings": 128,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 5000.0,
                             "short_factor": [1.0 + 0.05 * i for i in range(8)],
                             "long_factor": [1.5 + 0.7 * i for i in range(8)],
                             "original_max_position_embeddings": 32}},
    ),
}  # fmt: skip
