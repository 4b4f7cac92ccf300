# SPDX-License-Identifier: Apache-2.0
"""The cases of tools/make_golden_families.py that came after its own: windows, norms, limits."""

from __future__ import annotations

from typing import Any, Final

_BASE: Final[dict[str, Any]] = {
    "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_WIDE: Final = {**_BASE, "num_attention_heads": 4, "head_dim": 24}
_MOE: Final = {**_BASE, "intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2}
_GRANITE: Final = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "logits_scaling": 3.0,
                   "attention_multiplier": 0.17}  # fmt: skip
_EYE: Final[dict[str, Any]] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 72,
    "patch_size": 4, "spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 8,
    "fullatt_block_indexes": [0],
}  # fmt: skip
_TOKENS: Final = {"image_token_id": 60, "video_token_id": 61}
_S, _F = "sliding_attention", "full_attention"


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **more}}


CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": {**_BASE, **_rope(mrope_section=[2, 2, 2])}, "vision_config": _EYE,
         **_TOKENS, "vision_start_token_id": 62, "vision_end_token_id": 63,
         "tie_word_embeddings": False},
    ),
    "exaone4_5": (
        "exaone4_5",
        {"text_config": {"model_type": "exaone4", **_BASE, "num_hidden_layers": 3,
                         "sliding_window": 6, "layer_types": [_S, _F, _S]},
         "vision_config": {**_EYE, "num_key_value_heads": 1}, **_TOKENS},
    ),
    "granite_swa": (
        "granite_swa",
        {**_BASE, **_GRANITE, "num_hidden_layers": 5, "sliding_window": 6, "attention_bias": True,
         "layer_rope_theta": [0, 500.0, 500.0, 5000.0, 0]},
    ),
    "granite_swa-plain": (
        "granite_swa",
        {**_WIDE, **_GRANITE, "sliding_window": 7, "tie_word_embeddings": True,
         **_rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {**_MOE, **_GRANITE, "num_hidden_layers": 3, "sliding_window": 7,
         "layer_types": [_S, _F, _S], "shared_intermediate_size": 56},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _WIDE),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        {**_WIDE, "attention_bias": True, "tie_word_embeddings": True,
         **_rope("dynamic", factor=1.0, alpha=20.0)},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe", {**_WIDE, "intermediate_size": 40, "num_experts": 6, "moe_topk": 2},
    ),
    "apertus": ("apertus", {**_WIDE, "num_hidden_layers": 3, **_rope("linear", factor=4.0)}),
    "apertus-llama3": ("apertus", {**_WIDE, "attention_bias": True}),  # as the class scales RoPE
    "mpt-clip": (
        "mpt",
        {"d_model": 72, "n_heads": 3, "n_layers": 2, "max_seq_len": 64, "vocab_size": 67,
         "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
         "attn_config": {"clip_qkv": 0.6}},
    ),
    "cohere-norms": (
        "cohere",
        {**_BASE, "num_key_value_heads": 3, "use_qk_norm": True, "logit_scale": 0.3,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
