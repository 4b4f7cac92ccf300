# SPDX-License-Identifier: Apache-2.0
"""The cases of tools/make_golden_families.py that have layers of Mamba-2."""

from __future__ import annotations

from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "hidden_size": 72, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_WIDE: Final = {**_BASE, "head_dim": 24}
_GRANITE: Final = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "logits_scaling": 3.0,
                   "attention_multiplier": 0.17}  # fmt: skip
_F, _L = "full_attention", "linear_attention"
_MAMBA: Final[dict[str, Any]] = {
    "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_n_heads": 4, "mamba_d_head": 36,
    "mamba_chunk_size": 16,
}  # fmt: skip
_GRANITE_H: Final[dict[str, Any]] = {
    **_BASE, **_GRANITE, **_MAMBA, "num_attention_heads": 6, "num_hidden_layers": 4,
    "layer_types": [_L, _L, _F, _L], "num_local_experts": 0, "shared_intermediate_size": 96,
}  # fmt: skip
_NEMOTRON_H: Final[dict[str, Any]] = {
    **_WIDE,
    "ssm_state_size": 24, "mamba_num_heads": 4, "mamba_head_dim": 40, "n_groups": 2,
    "chunk_size": 16, "layers_block_type": [_L, "mlp", _F, "mlp", _L], "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5,
}  # fmt: skip
_FALCON_H1: Final[dict[str, Any]] = {**_WIDE, **_MAMBA, "mamba_d_ssm": 144, "num_hidden_layers": 3}

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "granitemoehybrid-h": (
        "granitemoehybrid",
        {**_GRANITE_H, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granitemoehybrid-moe": (
        "granitemoehybrid",
        {
            **_GRANITE_H,
            "mamba_n_groups": 1,
            "mamba_n_heads": 6,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "mamba_d_conv": 3,
        },
    ),
    "lfm3": (
        "lfm3",
        {**_WIDE, "num_hidden_layers": 5, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "lfm3-plain": (
        "lfm3",
        {
            **_WIDE,
            "num_hidden_layers": 3,
            "layer_types": ["conv", _F, "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "bamba": (
        "bamba",
        {**_WIDE, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "pad_token_id": 2},
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 72,
            "vocab_size": 67,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 24,
            "n_groups": 2,
            "state_size": 24,
            "chunk_size": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        },
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    "nemotron_h-moe": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": [_L, "moe", _F, "moe", _L],
            "use_conv_bias": False,
            "mamba_head_dim": 24,
        },
    ),
    "nemotron_h-groups": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["moe", _L, _F, "moe"],
            "n_groups": 4,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_FALCON_H1,
            "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 0.125],
            "ssm_in_multiplier": 2.0,
            "ssm_out_multiplier": 0.5,
            "attention_in_multiplier": 0.5,
            "key_multiplier": 4.0,
            "attention_out_multiplier": 2.0,
            "mlp_multipliers": [0.25, 2.0],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.25,
            "mamba_conv_bias": False,
        },
    ),
    "falcon_h1-norm": (
        "falcon_h1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
        },
    ),
}
