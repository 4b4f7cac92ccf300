"""How llama.cpp stores Gemma 4, as a table. Sources as in `gguf_dialects`.

The metadata's head sizes are those of layers without a window. RoPE rotates a part of each head:
divisors are 1 for rotated pairs and 1e30 for the others.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf_converter.sources.families.family import FULL, SLIDING
from qsf_converter.sources.gguf_dialects import (
    ATTENTION_BIAS,
    EXPERT_WIDTH,
    FFN,
    OPTIONAL,
    OUT,
    POST,
    QK,
    QKV,
    WINDOW,
    Dialect,
    Fields,
    Shapes,
    names,
)

_LAYER = "model.layers.{layer}."
_NORMS = {
    **POST,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_EXPERTS = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
}
_OWN = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm"}  # fmt: skip
_SCALES = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "blk.{layer}.ffn_gate_inp.scale": f"{_LAYER}router.scale",
    "blk.{layer}.ffn_down_exps.scale": f"{_LAYER}router.per_expert_scale",
    "blk.{layer}.layer_output_scale.weight": f"{_LAYER}layer_scalar",
}
_KEYS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    **EXPERT_WIDTH,
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
_READ = (
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.sliding_window_pattern",
    "rope.dimension_count_swa",
)


def _gemma4(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Set the head sizes of both types of layers, and whether values are keys."""
    n_layers, pattern = config["num_hidden_layers"], fields.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != n_layers:
        raise QsfConversionError(
            f"its metadata does not say which of {n_layers} layers have a window"
        )
    types = [SLIDING if is_windowed else FULL for is_windowed in pattern]
    n_kv_heads = config.get("num_key_value_heads")
    of_layers = n_kv_heads if isinstance(n_kv_heads, list) else [n_kv_heads] * n_layers
    heads = {type_: {n for n, own in zip(of_layers, types, strict=False) if own == type_}
             for type_ in (SLIDING, FULL)}  # fmt: skip
    if len(of_layers) != n_layers or any(len(counts) > 1 for counts in heads.values()):
        raise QsfConversionError("its KV heads differ between layers of one type")
    full = [i for i, type_ in enumerate(types) if type_ == FULL]
    n_shared = config.get("num_kv_shared_layers") or 0
    with_keys = [i for i in full if i < n_layers - n_shared]
    of_full, of_windowed = (next(iter(heads[type_]), None) for type_ in (FULL, SLIDING))
    return {
        **_ffn_dims(config, n_layers),
        "layer_types": types,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in shapes for i in with_keys),
        "num_key_value_heads": of_windowed or of_full,
        "num_global_key_value_heads": of_full,
        "global_head_dim": config["head_dim"],
        "head_dim": fields.get("attention.key_length_swa", config["head_dim"]),
        "enable_moe_block": bool(config.get("num_experts")),
    }


def _ffn_dims(config: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Tell whether the layers that share keys and values have FFNs twice as wide."""
    of_layers = config["intermediate_size"]
    if not isinstance(of_layers, list):
        return {}
    n_shared = config.get("num_kv_shared_layers") or 0
    usual = of_layers[0] if of_layers else 0
    for is_wide in (False, True):
        last = usual * 2 if is_wide else usual
        if of_layers == [usual] * (n_layers - n_shared) + [last] * n_shared:
            return {"intermediate_size": usual, "use_double_wide_mlp": is_wide}
    raise QsfConversionError(
        f"its metadata has FFN widths {of_layers[:8]}, supported: one, twice as much in the last"
        f" {n_shared} layers, which share keys and values"
    )


GEMMA4_DIALECTS: Final[Mapping[str, Dialect]] = {
    "gemma4": Dialect(
        family="Gemma4ForCausalLM",
        optional={**OPTIONAL, **WINDOW, **_KEYS},
        # Published checkpoints are bf16, in which the factor of the embedding is rounded.
        constants={"hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16"},
        tensors={**names(_NORMS, QKV, QK, OUT, FFN, _EXPERTS, _OWN), **_SCALES},
        has=ATTENTION_BIAS,
        more=_gemma4,
        read_by_more=_READ,
        other_families=("Gemma4UnifiedForCausalLM",),
    ),
}
