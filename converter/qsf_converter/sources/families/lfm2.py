"""LFM2 and 3: short convolutions between layers with attention."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import shown
from qsf.file.kinds import MAX_TAPS, ROPE_NONE, ExpertScore, Mixer, QkNorm
from qsf_converter.sources.families.config import MAX_FFN_DIM, MAX_TOKENS, Config
from qsf_converter.sources.families.experts import (
    GGUF_ROUTED,
    by_sum,
    of_gguf,
    one_each,
    route,
    router,
    selection_bias,
)
from qsf_converter.sources.families.family import FULL, SLIDING, Draft, Family, usual
from qsf_converter.sources.families.gguf import (
    EXPERT_WEIGHTS,
    KEYS,
    Fields,
    Gguf,
    Shapes,
    only_sigmoid,
)
from qsf_converter.sources.families.llama import AT, ATTN, DEFAULTS, attention, fused, qk_norms, qkv
from qsf_converter.sources.families.positions import NO_ROPE, parameters_of
from qsf_converter.sources.families.rules import T, TensorRule, Where, ends, layer, linear, norm

CONV: Final = "conv"
_AT_CONV, _FFN = f"{AT}conv.", f"{AT}feed_forward."
_ATTENTION: Mapping[str, Any] = {"where": Where.ATTENTION}
_CONVOLUTION: Mapping[str, Any] = {"where": Where.SHORT_CONV, "bias_flag": "conv_bias"}
_PARTS = {T.K: T.K_BIAS, T.Q: T.Q_BIAS, T.V: T.V_BIAS}  # B, C, x
_ATTENTION_RULES = (
    *qkv(**_ATTENTION),
    *norm(T.Q_NORM, f"{ATTN}q_layernorm", "head", **_ATTENTION),
    *norm(T.K_NORM, f"{ATTN}k_layernorm", "head", **_ATTENTION),
    *linear(T.ATTN_OUT, None, f"{ATTN}out_proj", "hidden", "q", **_ATTENTION),
)
_COMMON = (
    *norm(T.ATTN_NORM, f"{AT}operator_norm"),
    *norm(T.FFN_NORM, f"{AT}ffn_norm"),
    *fused(_PARTS, f"{_AT_CONV}in_proj", ("hidden",) * 3, **_CONVOLUTION),
    layer(T.CONV, f"{_AT_CONV}conv.weight", "taps", "hidden", is_flat=True, transposed=True,
          where=Where.SHORT_CONV),
    layer(T.CONV_BIAS, f"{_AT_CONV}conv.bias", "hidden", flag="conv_bias", where=Where.SHORT_CONV),
    *linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_AT_CONV}out_proj", "hidden", "hidden",
            **_CONVOLUTION),
    *linear(T.FFN_GATE, None, f"{_FFN}w1", "ffn", "hidden", where=Where.DENSE),
    *linear(T.FFN_UP, None, f"{_FFN}w3", "ffn", "hidden", where=Where.DENSE),
    *linear(T.FFN_DOWN, None, f"{_FFN}w2", "hidden", "ffn", where=Where.DENSE),
    *ends("embed_tokens", "embedding_norm"),
)  # fmt: skip
_RULES = (*_ATTENTION_RULES, *_COMMON)
_LFM3 = (
    *attention(bias="attention_bias", **_ATTENTION),
    *qk_norms(**_ATTENTION),
    *linear(T.MIX_GATE, None, f"{ATTN}gate_proj", "heads", "hidden", flag="use_attention_gate",
            **_ATTENTION),
    *norm(T.POST_ATTN_NORM, f"{AT}post_operator_norm", flag="use_sandwich_norm"),
    *norm(T.POST_FFN_NORM, f"{AT}post_ffn_norm", flag="use_sandwich_norm"),
    *_COMMON,
)  # fmt: skip


def _layer_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Attention in the listed layers, or in all if none are listed."""
    types = config.of_layers("layer_types", n_layers, (FULL, CONV))
    listed = config.get("full_attn_idxs")
    if types is not None:
        return 0, types
    if listed is not None and not (
        isinstance(listed, list) and all(isinstance(i, int) and 0 <= i < n_layers for i in listed)
    ):
        raise config.error("full_attn_idxs", "is not a list of layers")
    return 0, [FULL if listed is None or i in listed else CONV for i in range(n_layers)]


def _ffn_dim(config: Config) -> int:
    """The FFN's width, adjusted as the configuration requires."""
    n = config.count("intermediate_size", MAX_FFN_DIM)
    multiple = config.count("block_multiple_of", MAX_FFN_DIM)
    factor = config.get("block_ffn_dim_multiplier")
    if not config.boolean("block_auto_adjust_ff_dim"):
        return n
    n = int(2 * n / 3)
    if factor is not None:
        n = -(-int(config.positive("block_ffn_dim_multiplier") * n) // multiple) * multiple
    if not 1 <= n <= MAX_FFN_DIM:
        raise config.error("intermediate_size", f"makes an FFN of {n} dimensions")
    return n


def _mixers(draft: Draft) -> None:
    """Turn the layers of type ``conv`` into short convolutions."""
    config, dim = draft.config, draft.header.dim
    for name, value in (("block_dim", dim), ("conv_dim", dim), ("conv_dim_out", dim),
                        ("num_heads", draft.header.n_heads)):  # fmt: skip
        if config.get(name, value) != value:
            raise config.error(name, f"differs from {value}, which is not supported")
    n_taps = config.count("conv_L_cache", MAX_TAPS, least=2)
    draft.dims["taps"] = n_taps
    draft.set_type(
        CONV, mixer=Mixer.SHORT_CONV, n_taps=n_taps, rope_set=ROPE_NONE, output_gate=0,
        qk_norm=QkNorm.NONE,
    )  # fmt: skip


def _lfm2(draft: Draft) -> None:
    _mixers(draft)
    ffn_dim = _ffn_dim(draft.config)
    draft.header = replace(draft.header, ffn_dim=ffn_dim)
    draft.dims["ffn"] = ffn_dim
    draft.set_all(ffn_dim=ffn_dim)


def _lfm2_moe(draft: Draft) -> None:
    config, n_layers = draft.config, draft.header.n_layers
    _mixers(draft)
    n_dense = config.get("num_dense_layers")
    if type(n_dense) is not int or not 0 <= n_dense < n_layers:
        raise config.error("num_dense_layers", f"= {shown(n_dense)}: no layer has experts")
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    is_divided = config.boolean("norm_topk_prob")
    route(
        draft,
        range(n_dense, n_layers),
        expert_score=ExpertScore.SIGMOID,
        expert_weights=by_sum(config),
        weights_epsilon=1e-6 if is_divided else 0.0,
        weights_factor=config.positive("routed_scaling_factor"),
    )


def _lfm3_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Of four layers two are convolutions, one has a window."""
    types = config.of_layers("layer_types", n_layers, (FULL, SLIDING, CONV))
    of_four = (SLIDING, CONV, FULL, CONV)
    types = types or [of_four[i % 4] if i else CONV for i in range(n_layers)]
    return config.count("sliding_window", MAX_TOKENS), types


def _lfm3_rope(config: Config, layer_type: str) -> Config:
    return NO_ROPE if layer_type == CONV else parameters_of(config, layer_type)


def _lfm3(draft: Draft) -> None:
    if "use_attention_gate" in draft.flags:
        draft.set_all(output_gate=2)
    _mixers(draft)
    draft.ropes.pop(CONV, None)


def _selection(name: str) -> tuple[TensorRule, ...]:
    return selection_bias(f"{_FFN}{name}", flag="use_expert_bias"), router(f"{_FFN}gate.weight")


# ---- GGUF files ----

_GGUF_TAPS = {"conv_L_cache": "shortconv.l_cache"}


def _gguf_moe(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are short convolutions."""
    of_layers = config.get("num_key_value_heads")
    if not isinstance(of_layers, list):
        of_layers = [of_layers] * config["num_hidden_layers"]
    return {
        **only_sigmoid(fields, shapes, config),
        "num_key_value_heads": max(of_layers, default=0),
        "layer_types": [FULL if n else CONV for n in of_layers],
    }


def _gguf(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The stated FFN width is already adjusted."""
    return {**_gguf_moe(fields, shapes, config), "block_auto_adjust_ff_dim": False}


_RENAMES = {
    "norm_epsilon": "norm_eps",
    "intermediate_size": "block_ff_dim",
    "tie_word_embeddings": "tie_embedding",
}
_DEFAULTS = usual(
    DEFAULTS, context=128000, epsilon=1e-5, theta=1000000.0, kv_heads=8, tied=True, conv_L_cache=3
)
FAMILIES = (
    Family(
        name="Lfm2ForCausalLM",
        title="LFM2",
        model_type="lfm2",
        gguf={
            "lfm2": Gguf(
                needs=("conv_L_cache",),
                keys=_GGUF_TAPS,
                more=_gguf,
                lists=("attention.head_count_kv",),
            )
        },
        rules=_RULES,
        renames=_RENAMES,
        defaults=usual(
            _DEFAULTS,
            block_multiple_of=256,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=True,
        ),
        flags={"conv_bias": False},
        kind={"qk_norm": QkNorm.PER_HEAD},
        windows=_layer_types,
        adjust=_lfm2,
        neutral={
            "block_use_swiglu": (True,),
            "use_pos_enc": (True,),
            "block_norm_eps": (1e-5,),
            "block_mlp_init_scale": (1.0,),
            "block_out_init_scale": (1.0,),
            "block_use_xavier_init": (True, False),
            "conv_use_xavier_init": (True, False),
        },
    ),
    Family(
        name="Lfm3ForCausalLM",
        title="LFM3",
        model_type="lfm3",
        rules=_LFM3,
        renames={"norm_epsilon": "norm_eps"},
        defaults=usual(
            _DEFAULTS,
            kv_heads=4,
            head=128,
            window=256,
            conv_L_cache=7,
            rope_parameters={
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        ),
        flags={
            "conv_bias": False,
            "attention_bias": False,
            "use_attention_gate": True,
            "use_sandwich_norm": True,
        },
        kind={"qk_norm": QkNorm.PER_HEAD},
        windows=_lfm3_types,
        rope_parameters=_lfm3_rope,
        adjust=_lfm3,
    ),
    Family(
        name="Lfm2MoeForCausalLM",
        title="LFM2 MoE",
        model_type="lfm2_moe",
        gguf={
            "lfm2moe": Gguf(
                needs=("conv_L_cache", *GGUF_ROUTED, "num_dense_layers"),
                may=EXPERT_WEIGHTS,
                keys={**_GGUF_TAPS, "num_dense_layers": KEYS["first_k_dense_replace"]},
                more=_gguf_moe,
                reads=("expert_gating_func",),
                lists=("attention.head_count_kv",),
            )
        },
        rules=_RULES,
        layouts=(
            (*_selection("expert_bias"), *one_each(_FFN, "w1", "w3", "w2")),
            (*_selection("expert_bias.bias"), *of_gguf(_FFN)),
        ),
        renames=_RENAMES,
        defaults=usual(
            _DEFAULTS,
            expert_dim=1792,
            num_dense_layers=2,
            experts=32,
            chosen=4,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        flags={"conv_bias": False, "use_expert_bias": True},
        kind={"qk_norm": QkNorm.PER_HEAD},
        windows=_layer_types,
        adjust=_lfm2_moe,
    ),
)
