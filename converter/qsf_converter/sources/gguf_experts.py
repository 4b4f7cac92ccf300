"""How llama.cpp stores mixtures of experts, as tables: each matrix of all experts is one tensor.

Sources as in `gguf_dialects`. Mixtral is there: its architecture is llama.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources import gguf_dialects
from qsf_converter.sources.gguf_dialects import (
    ATTENTION_BIAS,
    EXPERT_COUNTS,
    EXPERT_GROUPS,
    EXPERT_WEIGHTS,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    OPTIONAL,
    OUT,
    PRE,
    QK,
    QKV,
    RMS_CONFIG,
    SELECTION,
    SHARED_EXPERTS,
    Dialect,
    Fields,
    Shapes,
    layer_types,
    layers_of,
    lfm2,
    names,
    own_layers,
    renamed,
)


def _qwen(_fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    routed = {name.split(".")[1] for name in shapes if ".ffn_gate_inp." in name}
    layers = range(config["num_hidden_layers"])
    return {"mlp_only_layers": [i for i in layers if str(i) not in routed]}


def _granite(_fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    is_shared = config.get("shared_intermediate_size")
    return {"architectures": ["GraniteMoeSharedForCausalLM"]} if is_shared else {}


def _sigmoid(fields: Fields, _shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a score of experts that these architectures lack."""
    if fields.get("expert_gating_func", 2) != 2:
        raise QsfConversionError(
            f"its metadata's expert_gating_func = {shown(fields['expert_gating_func'])}: of this"
            " architecture only 2, sigmoid, is supported"
        )
    return {}


def _lfm2_moe(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    stated = lfm2(fields, shapes, config)
    del stated["block_auto_adjust_ff_dim"]
    return {**_sigmoid(fields, shapes, config), **stated}


def _dots1(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_sigmoid(fields, shapes, config), "sliding_window": None}


def _glm4(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_sigmoid(fields, shapes, config),
        "num_hidden_layers": own_layers(fields, config),
    }


def _gpt_oss(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return layer_types(fields, config, 2)


_OLMOE = Dialect(
    family="OlmoeForCausalLM",
    config={**RMS_CONFIG, **EXPERT_COUNTS},
    constants={"norm_topk_prob": False},
    tensors=names(PRE, QKV, QK, OUT, EXPERTS),
    has=ATTENTION_BIAS,
)
_QWEN3 = replace(
    _OLMOE,
    family="Qwen3MoeForCausalLM",
    config={**_OLMOE.config, **EXPERT_WIDTH},
    constants={"norm_topk_prob": True},
    tensors=names(PRE, QKV, QK, OUT, FFN, EXPERTS),
    more=_qwen,
)
_GRANITE = gguf_dialects.DIALECTS["granite"]
_LFM2 = gguf_dialects.DIALECTS["lfm2"]
_GROUPED = replace(
    _OLMOE,
    family="Glm4MoeForCausalLM",
    config={**_QWEN3.config, "first_k_dense_replace": "leading_dense_block_count"},
    optional={
        **OPTIONAL,
        **EXPERT_WEIGHTS,
        **EXPERT_GROUPS,
        "n_shared_experts": "expert_shared_count",
    },
    constants={},
    has={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm"},
    tensors=names(
        {**PRE, "post_attention_norm": PRE["ffn_norm"]},
        *(QKV, QK, OUT, FFN, EXPERTS, SHARED_EXPERTS, SELECTION),
    ),
    read_by_more=("nextn_predict_layers", "expert_gating_func"),
    more=_glm4,
)

EXPERT_DIALECTS: Final[Mapping[str, Dialect]] = {
    "olmoe": _OLMOE,
    "qwen3moe": _QWEN3,
    "qwen2moe": replace(
        _QWEN3,
        family="Qwen2MoeForCausalLM",
        config={
            **_QWEN3.config,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        constants={"norm_topk_prob": False},
        tensors=names(
            PRE,
            QKV,
            OUT,
            FFN,
            EXPERTS,
            renamed(SHARED_EXPERTS, "experts", "expert"),
            {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        ),
        has={"qkv_bias": "attn_q.bias"},
    ),
    "qwen3vlmoe": replace(
        _QWEN3,
        family="Qwen3VLMoeTextForCausalLM",
        read_by_more=gguf_dialects.VISION_KEYS,
    ),
    "granitemoe": replace(
        _GRANITE,
        family="GraniteMoeForCausalLM",
        config=_OLMOE.config,
        optional={
            **_GRANITE.optional,
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        tensors=names(PRE, QKV, OUT, EXPERTS, renamed(SHARED_EXPERTS, "shared_experts", "shared")),
        read_by_more=(),
        more=_granite,
        other_families=("GraniteMoeSharedForCausalLM",),
    ),
    "hunyuan-moe": replace(
        _OLMOE,
        family="HunYuanMoEV1ForCausalLM",
        constants={},
        tensors=names(
            *(PRE, QKV, gguf_dialects.HUNYUAN_QK, OUT),
            {**EXPERTS, "ffn_gate_inp": "mlp.gate.wg"},
            renamed(SHARED_EXPERTS, "shared_experts", "shared_mlp"),
        ),
        read_by_more=(
            "expert_shared_count",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
        ),
    ),
    "minimax-m2": replace(
        _OLMOE,
        family="MiniMaxM2ForCausalLM",
        tensors=names(PRE, QKV, QK, OUT, EXPERTS, SELECTION),
        read_by_more=("expert_gating_func", "expert_feed_forward_length"),
        more=_sigmoid,
    ),
    "dots1": replace(
        _OLMOE,
        family="Dots1ForCausalLM",
        config=_GROUPED.config,
        optional=_GROUPED.optional,
        constants={},
        tensors=names(PRE, QKV, QK, OUT, FFN, EXPERTS, SHARED_EXPERTS, SELECTION),
        read_by_more=("expert_gating_func",),
        more=_dots1,
    ),
    "glm4moe": _GROUPED,
    "lfm2moe": replace(
        _LFM2,
        family="Lfm2MoeForCausalLM",
        config={
            **_LFM2.config,
            **EXPERT_COUNTS,
            **EXPERT_WIDTH,
            "num_dense_layers": "leading_dense_block_count",
        },
        optional={**_LFM2.optional, **EXPERT_WEIGHTS},
        tensors={
            **_LFM2.tensors,
            **layers_of("model.layers", renamed(EXPERTS, "mlp.", "feed_forward.")),
            **layers_of("model.layers", {"exp_probs_b": "feed_forward.expert_bias"}),
        },
        has={**_LFM2.has, "use_expert_bias": "exp_probs_b"},
        more=_lfm2_moe,
        read_by_more=("expert_gating_func",),
    ),
    "gpt-oss": replace(
        _OLMOE,
        family="GptOssForCausalLM",
        # All its layers are routed; an expert is as wide as the FFN.
        config={
            **_OLMOE.config,
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        tensors=names(
            {**PRE, "post_attention_norm": PRE["ffn_norm"]},
            QKV,
            OUT,
            {**EXPERTS, "ffn_gate_inp": "mlp.router"},
            {"attn_sinks": "self_attn.sinks"},
        ),
        yarn={"truncate": False},
        more=_gpt_oss,
    ),
    "ernie4_5-moe": replace(
        _OLMOE,
        family="Ernie4_5_MoeForCausalLM",
        config={
            **_QWEN3.config,
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        optional={**OPTIONAL, "moe_num_shared_experts": "expert_shared_count"},
        tensors=names(PRE, QKV, OUT, FFN, EXPERTS, SHARED_EXPERTS, SELECTION),
        # Some models state a wrong width in the metadata; the shapes of the tensors are right.
        read_by_more=("expert_shared_feed_forward_length",),
        has={},
    ),
}
