"""How llama.cpp stores models with latent attention, as tables. Sources as in `gguf_dialects`.

``deepseek2`` covers DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash and Youtu. Older files have one
matrix that makes keys and values from the latent, newer ones two.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.gguf_dialects import (
    EXPERT_COUNTS,
    EXPERT_GROUPS,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    OUT,
    PRE,
    RMS_CONFIG,
    SELECTION,
    SHARED_EXPERTS,
    Dialect,
    Fields,
    Shapes,
    names,
    own_layers,
)

_LATENT: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_MLP: Final = "model.layers.{layer}.mlp."
_OF_ROUTED: Final = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group",
)  # fmt: skip


def _sizes(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive from the shapes what older and newer files state under different keys."""
    n_rope, n_heads = fields.get("rope.dimension_count"), config["num_attention_heads"]
    q = shapes.get("blk.0.attn_q_b.weight", shapes.get("blk.0.attn_q.weight", (0,)))[0]
    values = shapes.get("blk.0.attn_output.weight", (0, 0))[-1]
    if (
        type(n_rope) is not int
        or type(n_heads) is not int
        or n_heads < 1
        or q % n_heads
        or values % n_heads
        or q // n_heads <= n_rope
    ):
        raise QsfConversionError(
            f"its {shown(n_heads)} heads, of which {shown(n_rope)} dimensions are rotated, have"
            f" {q} rows of queries and {values} values"
        )
    return {
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": q // n_heads - n_rope,
        "v_head_dim": values // n_heads,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
    }


def _deepseek2(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the family by its experts: none, a sigmoid with a selection bias, or others."""
    keys = {**_sizes(fields, shapes, config), "num_hidden_layers": own_layers(fields, config)}
    if not fields.get("expert_count"):
        return {**keys, **dict.fromkeys(_OF_ROUTED), "architectures": ["YoutuForCausalLM"]}
    has_bias = any("exp_probs_b" in name for name in shapes)
    function = fields.get("expert_gating_func", 2 if has_bias else 1)
    if function != (2 if has_bias else 1):
        raise QsfConversionError(
            f"its metadata's expert_gating_func = {shown(function)} is not supported"
            f" {'with' if has_bias else 'without'} a selection bias"
        )
    groups = {key: config.get(key) or 1 for key in ("n_group", "topk_group")}
    keys |= {**groups, "norm_topk_prob": fields.get("expert_weights_norm", False)}
    if has_bias:
        return {**keys, "architectures": ["DeepseekV3ForCausalLM"]}
    by_groups = groups["n_group"] != 1
    return {**keys, "topk_method": "group_limited_greedy" if by_groups else "greedy"}


def _mistral4(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    is_by_sum = fields.get("expert_weights_norm", False)
    return {**_sizes(fields, shapes, config), "norm_topk_prob": is_by_sum}


_AT: Final = "model.layers.{layer}.self_attn."
_KDA: Final = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "kv"},
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}


def _kimi(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with KDA have rates of decay; the heads are those of beta."""
    n_keys, n_values = (fields.get(f"attention.{name}_length_mla") for name in ("key", "value"))
    n_rope, n_layers = fields.get("rope.dimension_count"), own_layers(fields, config)
    if type(n_keys) is not int or type(n_rope) is not int:
        raise QsfConversionError(
            f"its heads of {shown(n_keys)} dimensions have {shown(n_rope)} of the rotated part"
        )
    if fields.get("expert_gating_func", 2) != 2:
        raise QsfConversionError("its metadata's expert_gating_func is not 2, a sigmoid")
    is_kda = [f"blk.{i}.ssm_a" in shapes for i in range(n_layers)]
    beta = shapes.get(f"blk.{is_kda.index(True) if any(is_kda) else 0}.ssm_beta.weight", (0,))
    return {
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": n_keys - n_rope,
        "v_head_dim": n_values,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "linear_num_heads": beta[0],
        "norm_topk_prob": fields.get("expert_weights_norm", True),
        "layer_types": ["linear_attention" if kda else "full_attention" for kda in is_kda],
    }


_CONFIG: Final = {**RMS_CONFIG, "kv_lora_rank": "attention.kv_lora_rank"}
_READ: Final = (
    "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    "nextn_predict_layers", "expert_gating_func", "expert_weights_norm", "expert_count",
)  # fmt: skip
_DEEPSEEK2: Final = Dialect(
    family="DeepseekV2ForCausalLM",
    other_families=("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
    config=_CONFIG,
    optional={
        **EXPERT_COUNTS,
        **EXPERT_WIDTH,
        **EXPERT_GROUPS,
        "rope_theta": "rope.freq_base",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
    },
    tensors=names(PRE, _LATENT, OUT, FFN, EXPERTS, SHARED_EXPERTS, SELECTION),
    has={"attention_bias": "attn_kv_a_mqa.bias"},
    has_tenth_of_mscale=True,
    n_layouts=2,
    more=_deepseek2,
    read_by_more=_READ,
)
LATENT_DIALECTS: Final[Mapping[str, Dialect]] = {
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(
        _DEEPSEEK2,
        family="Mistral4ForCausalLM",
        other_families=(),
        tensors={
            **names(PRE, _LATENT, OUT, FFN, EXPERTS, SHARED_EXPERTS),
            **{
                f"blk.{{layer}}.ffn_{part}_exps.weight": f"{_MLP}experts.{part}_proj"
                for part in ("gate_up", "down")
            },
        },
        n_layouts=1,
        more=_mistral4,
    ),
    "kimi-linear": replace(
        _DEEPSEEK2,
        family="KimiLinearForCausalLM",
        other_families=(),
        config={
            **_CONFIG,
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        tensors={
            **_DEEPSEEK2.tensors,
            **names(_KDA),
            "blk.{layer}.ssm_a": f"{_AT}minus_rate",
            "blk.{layer}.ssm_dt.bias": f"{_AT}dt_bias",
        },
        has_tenth_of_mscale=False,
        n_layouts=1,
        more=_kimi,
    ),
    # llama.cpp knows the factors of the embedding, the layers and the logits.
    "minicpm3": replace(
        _DEEPSEEK2,
        family="MiniCPM3ForCausalLM",
        other_families=(),
        optional={"rope_theta": "rope.freq_base"},
        tensors=names(PRE, _LATENT, OUT, FFN),
        has_tenth_of_mscale=False,
        n_layouts=1,
        more=_sizes,
    ),
}
