"""How llama.cpp stores models with the gated delta rule, as tables. Sources as in `gguf_dialects`.

In `qwen35` and `qwen35moe` the value heads of a key head are n_key_heads apart, in all tensors;
the engine computes with that order.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf_converter.sources.gguf_dialects import (
    EXPERT_COUNTS,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    OUT,
    QK,
    QKV,
    RMS_CONFIG,
    SHARED_EXPERTS,
    VISION_KEYS,
    Dialect,
    Fields,
    Shapes,
    names,
    own_layers,
    renamed,
)

_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_STEPS_BY_KEY_HEAD = {"ssm_ba": "linear_attn.in_proj_ba"}
_AT = "model.layers.{layer}.linear_attn."
_RATES = {  # names without the ending ".weight"
    "blk.{layer}.ssm_a": f"{_AT}minus_rate",
    "blk.{layer}.ssm_dt.bias": f"{_AT}dt_bias",
}
_SHARED = {
    **EXPERTS,
    **renamed(SHARED_EXPERTS, "experts", "expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_KEYS = ("ssm.inner_size", "nextn_predict_layers", "full_attention_interval")


def _delta(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = own_layers(fields, config)
    n_heads, n_inner = config["linear_num_value_heads"], fields.get("ssm.inner_size")
    if type(n_inner) is not int or type(n_heads) is not int or n_heads < 1 or n_inner % n_heads:
        raise QsfConversionError(
            f"its {n_heads!r} value heads do not divide ssm.inner_size = {n_inner!r}"
        )
    return {
        "num_hidden_layers": n_layers,
        "linear_value_head_dim": n_inner // n_heads,
        "layer_types": [
            "linear_attention" if f"blk.{i}.ssm_a" in shapes else "full_attention"
            for i in range(n_layers)
        ],
    }


def _tiled(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_delta(fields, shapes, config), "has_tiled_heads": True}


_QWEN35 = Dialect(
    family="Qwen3_5ForCausalLM",
    config={
        **RMS_CONFIG,
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    tensors={**names(_NORMS, QKV, QK, OUT, FFN, _DELTA), **_RATES},
    has_one_in_norms=True,
    more=_tiled,
    read_by_more=(*VISION_KEYS, *_KEYS),
)
_MOE_CONFIG = {
    **{field: key for field, key in _QWEN35.config.items() if field != "intermediate_size"},
    **EXPERT_COUNTS,
    **EXPERT_WIDTH,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
DELTA_DIALECTS: Final[Mapping[str, Dialect]] = {
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        family="Qwen3_5MoeForCausalLM",
        config=_MOE_CONFIG,
        tensors={**names(_NORMS, QKV, QK, OUT, _SHARED, _DELTA), **_RATES},
    ),
    "qwen3next": replace(
        _QWEN35,
        family="Qwen3NextForCausalLM",
        config=_MOE_CONFIG,
        constants={"norm_topk_prob": True},
        tensors={
            **names(_NORMS, QKV, QK, OUT, FFN, _SHARED, _DELTA, _STEPS_BY_KEY_HEAD),
            **_RATES,
        },
        more=_delta,
    ),
}
