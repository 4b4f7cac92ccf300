"""How llama.cpp stores models with layers of Mamba-2, as tables. Sources as in `gguf_dialects`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.gguf_dialects import (
    ATTENTION_BIAS,
    DIALECTS,
    EXPERT_COUNTS,
    EXPERT_GROUPS,
    EXPERT_WEIGHTS,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    OPTIONAL,
    OUT,
    PERMUTED,
    PRE,
    QKV,
    RMS_CONFIG,
    SHARED_EXPERTS,
    Dialect,
    Fields,
    Shapes,
    layers_of,
    names,
    own_layers,
    own_names,
    renamed,
)

_CONV_BIAS = "ssm_conv1d.bias"
_SSD = ("in_proj", "conv1d", "norm", "out_proj")
_SIZES = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}


def _ssd_names(at: str, mixer: str) -> dict[str, str]:
    here = ("ssm_in", "ssm_conv1d", "ssm_norm", "ssm_out")
    there = (f"{mixer}.{name}" for name in _SSD)
    single = {"ssm_a": "minus_rate", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {
        **layers_of(at, dict(zip(here, there, strict=True))),
        **{f"blk.{{layer}}.{name}": f"{at}.{{layer}}.{mixer}.{of}" for name, of in single.items()},
    }


def _whole(name: str, value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise QsfConversionError(f"its metadata's {name} = {shown(value)} is not a number")
    return value


def _largest(value: Any) -> Any:
    """Return the common number of the layers that have one; other layers state 0."""
    return max(value, default=0) if isinstance(value, list) else value


def _common(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_key_value_heads": _largest(config.get("num_key_value_heads")),
        "mamba_d_ssm": fields.get("ssm.inner_size"),
    }


def _bamba(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(_whole("block_count", config["num_hidden_layers"]))
    listed = [i for i in layers if f"blk.{i}.ssm_a" not in shapes]
    return {**_common(fields, config), "attn_layer_indices": listed}


def _granite(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE is recognised by a field that actually describes something else."""
    layers = range(_whole("block_count", config["num_hidden_layers"]))
    width = config.get("shared_intermediate_size") or config["intermediate_size"]
    return {
        **_common(fields, config),
        "layer_types": ["mamba" if f"blk.{i}.ssm_a" in shapes else "attention" for i in layers],
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else None,
        "num_local_experts": config.get("num_experts") or 0,
        "shared_intermediate_size": width,
    }


def _mamba2(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = _whole("ssm.inner_size", fields.get("ssm.inner_size"))
    head_dim = inner // _whole("ssm.time_step_rank", config["num_heads"], 1)
    return {"mamba_d_ssm": inner, "head_dim": head_dim}


def _falcon(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_common(fields, config), "mamba_norm_before_gate": False}


def _nemotron(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of a block follows from its tensors."""
    n_layers = own_layers(fields, config)
    keys = _common(fields, config)
    kinds = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"}
    blocks = [
        next((kind for name, kind in kinds.items() if f"blk.{i}.{name}" in shapes), "mlp")
        for i in range(n_layers)
    ]
    inner = _whole("ssm.inner_size", keys.pop("mamba_d_ssm"))
    keys["mamba_d_head"] = inner // _whole("ssm.time_step_rank", config["mamba_n_heads"], 1)
    return {
        **keys,
        "num_hidden_layers": n_layers,
        "layers_block_type": blocks,
        "intermediate_size": _largest(config["intermediate_size"]),
    }


_GRANITE = DIALECTS["granite"]
_SHARED = renamed(SHARED_EXPERTS, "shared_experts", "shared")
_DENSE = renamed(FFN, "mlp.", "mlp.shared.")
_READ = ("ssm.inner_size", "expert_shared_count")
_MIXER = {
    **renamed(QKV | OUT, "self_attn.", "mixer."),
    **renamed(FFN | EXPERTS, "mlp.", "mixer."),
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "exp_probs_b": "mixer.gate.selection",
    "attn_norm": "norm",
}
_NEMOTRON = Dialect(
    family="NemotronHForCausalLM",
    config={
        **{name: key for name, key in RMS_CONFIG.items() if name != "rms_norm_eps"},
        **_SIZES,
        "layer_norm_epsilon": RMS_CONFIG["rms_norm_eps"],
    },
    constants={"mlp_hidden_act": "relu2"},
    has={**ATTENTION_BIAS, "use_conv_bias": _CONV_BIAS},
    tensors={
        **own_names("backbone.layers", ("backbone.embeddings", "backbone.norm_f"), **_MIXER),
        **_ssd_names("backbone.layers", "mixer"),
    },
    permuted={name.replace("self_attn", "mixer"): of for name, of in PERMUTED.items()},
    more=_nemotron,
    read_by_more=(*_READ, "nextn_predict_layers", "attention.layer_norm_epsilon"),
)
_FALCON = Dialect(
    family="FalconH1ForCausalLM",
    config={**RMS_CONFIG, **_SIZES},
    has={**ATTENTION_BIAS, "mamba_conv_bias": _CONV_BIAS, "mamba_rms_norm": "ssm_norm"},
    tensors={
        **own_names(
            "model.layers",
            ("model.embed_tokens", "model.final_layernorm"),
            **(QKV | OUT | renamed(FFN, "mlp.", "feed_forward.")),
            attn_norm="input_layernorm",
            ffn_norm="pre_ff_layernorm",
        ),
        **_ssd_names("model.layers", "mamba"),
    },
    more=_falcon,
    read_by_more=_READ,
)
_MAMBA2 = Dialect(
    family="Mamba2ForCausalLM",
    config={
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "layer_norm_epsilon": RMS_CONFIG["rms_norm_eps"],
        **{name: key for name, key in _SIZES.items() if name != "mamba_n_heads"},
        "num_heads": _SIZES["mamba_n_heads"],
    },
    optional={},
    has={"use_conv_bias": _CONV_BIAS},
    tensors={
        **own_names(
            "backbone.layers", ("backbone.embeddings", "backbone.norm_f"), attn_norm="norm"
        ),
        **_ssd_names("backbone.layers", "mixer"),
    },
    more=_mamba2,
    read_by_more=(*_READ, "attention.head_count"),
)
# Its rows are in the order of a RoPE on whole heads, of which the first half is turned.
_BAMBA = replace(
    _FALCON,
    family="BambaForCausalLM",
    has={**ATTENTION_BIAS, "mamba_conv_bias": _CONV_BIAS},
    permuted=PERMUTED,
    more=_bamba,
)


def hybrid_of(dialect: Dialect, metadata: Mapping[str, Any], shapes: Shapes) -> Dialect:
    """Return the dialect of a file. Bamba's have Granite 4 H's name, but RoPE and no scale."""
    if dialect is not MAMBA_DIALECTS["granitehybrid"]:
        return dialect
    has_rope = metadata.get("granitehybrid.rope.scaling.finetuned")
    has_scale = "granitehybrid.attention.scale" in metadata
    has_states = any("ssm_a" in name for name in shapes)
    return _BAMBA if has_rope and has_states and not has_scale else dialect


MAMBA_DIALECTS: Final[Mapping[str, Dialect]] = {
    "granitehybrid": replace(
        _GRANITE,
        family="GraniteMoeHybridForCausalLM",
        other_families=("BambaForCausalLM",),
        config={**RMS_CONFIG, **_SIZES},
        optional={
            **_GRANITE.optional,
            **EXPERT_COUNTS,
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        tensors={
            **names(PRE, QKV, OUT, EXPERTS, _DENSE, _SHARED),
            **_ssd_names("model.layers", "mamba"),
        },
        has={**ATTENTION_BIAS, "mamba_conv_bias": _CONV_BIAS},
        more=_granite,
        read_by_more=_READ,
    ),
    "falcon-h1": replace(
        _FALCON,
        tensors={
            **_FALCON.tensors,
            "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_ff_layernorm.weight",
        },
    ),
    "mamba2": _MAMBA2,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        config={
            **_NEMOTRON.config,
            **EXPERT_COUNTS,
            **EXPERT_WIDTH,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        optional={**OPTIONAL, **EXPERT_WEIGHTS, **EXPERT_GROUPS},
    ),
}
