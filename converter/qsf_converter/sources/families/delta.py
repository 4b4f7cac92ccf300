"""Families with the gated delta rule, or short convolutions (LFM2, 3), between attention."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf.file import kinds
from qsf.file.layout import MAX_HEADS
from qsf_converter.sources.families import experts, family, gguf
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_FFN_DIM, MAX_LAYERS, Config
from qsf_converter.sources.families.family import FULL, SLIDING, Draft, Family
from qsf_converter.sources.families.gguf import EXPERT_WEIGHTS, KEYS, Fields, Gguf, Shapes
from qsf_converter.sources.families.positions import NO_ROPE, parameters_of
from qsf_converter.sources.families.rules import T, Where

LINEAR: Final = "linear_attention"
_LIN = f"{r.AT}linear_attn."
_DELTA: dict[str, Any] = {"where": Where.DELTA}
_ATTENTION: dict[str, Any] = {"where": Where.ATTENTION}
_Q_AND_GATE: dict[str, Any] = {"parts": ("q", "q"), "groups": "heads", **_ATTENTION}
_QKV: Final = ("keys", "keys", "values")

# ---- rules ----

_RULES: Final = (
    *r.pre_norms(add=1.0),
    *r.linear(T.Q, None, f"{r.ATTN}q_proj", "q", "hidden", part=0, **_Q_AND_GATE),
    *r.linear(T.MIX_GATE, None, f"{r.ATTN}q_proj", "q", "hidden", part=1, **_Q_AND_GATE),
    *r.qkv(**_ATTENTION)[1:],
    *r.qk_norms(add=1.0, **_ATTENTION),
    *r.out(**_ATTENTION),
    *r.norm(T.MIX_NORM, f"{_LIN}norm", "value", **_DELTA),
    r.layer(T.DECAY_BIAS, f"{_LIN}dt_bias", "value heads", **_DELTA),
    r.layer(T.CONV, f"{_LIN}conv1d.weight", "taps", "channels", is_flat=True, transposed=True,
          **_DELTA),
    *r.linear(T.ATTN_OUT, None, f"{_LIN}out_proj", "hidden", "values", **_DELTA),
    *r.ends("embed_tokens", "norm", add=1.0),
    *r.mtp_rules(add=1.0),
)  # fmt: skip
_PARTS: Final = (
    *r.fused(dict.fromkeys((T.Q, T.K, T.V)), f"{_LIN}in_proj_qkv", _QKV, **_DELTA),
    *r.linear(T.MIX_GATE, None, f"{_LIN}in_proj_z", "values", "hidden", **_DELTA),
)
_STEPS: Final = (
    *r.linear(T.BETA, None, f"{_LIN}in_proj_b", "value heads", "hidden", **_DELTA),
    *r.linear(T.DECAY, None, f"{_LIN}in_proj_a", "value heads", "hidden", **_DELTA),
)
_BY_KEY_HEAD: dict[str, Any] = {"groups": "key heads", **_DELTA}
_PARTS_BY_KEY_HEAD: Final = r.fused(
    dict.fromkeys((T.Q, T.K, T.V, T.MIX_GATE)),
    f"{_LIN}in_proj_qkvz",
    (*_QKV, "values"),
    **_BY_KEY_HEAD,
)
_STEPS_BY_KEY_HEAD: Final = r.fused(
    dict.fromkeys((T.BETA, T.DECAY)), f"{_LIN}in_proj_ba", ("value heads",) * 2, **_BY_KEY_HEAD
)
_LOG_RATE: Final = r.layer(T.DECAY_RATE, f"{_LIN}A_log", "value heads", is_log=True, **_DELTA)
# GGUF files store -e^A_log.
_MINUS_RATE: Final = r.layer(
    T.DECAY_RATE, f"{_LIN}minus_rate", "value heads", scale="minus", **_DELTA
)
_SPLIT: Final = (*_PARTS, *_STEPS, _LOG_RATE)
_FUSED: Final = (*_PARTS_BY_KEY_HEAD, *_STEPS_BY_KEY_HEAD, _LOG_RATE)


# ---- configurations ----


def attention_every(
    config: Config, n_layers: int, *, key: str = "full_attention_interval"
) -> tuple[int, list[str]]:
    """Attention in every n-th layer, unless each layer's type is stated."""
    types = config.of_layers("layer_types", n_layers, (FULL, LINEAR))
    n = config.count(key, MAX_LAYERS, 4)
    return 0, types or [LINEAR if (i + 1) % n else FULL for i in range(n_layers)]


def _mixers(draft: Draft) -> None:
    config = draft.config
    names = ("key", "value")
    heads = {
        name: config.count(f"linear_num_{name}_heads", MAX_HEADS, draft.header.n_heads)
        for name in names
    }
    # Olmo Hybrid's dimensions, if it does not state them
    usual_dim = 3 * draft.header.dim // (4 * heads["key"])
    key_dim = config.count("linear_key_head_dim", kinds.MAX_STATE_DIM, usual_dim)
    dims = {
        "key": key_dim,
        "value": config.count("linear_value_head_dim", kinds.MAX_STATE_DIM, 2 * key_dim),
    }
    if heads["value"] % heads["key"]:
        raise config.error(
            "linear_num_value_heads",
            f"= {heads['value']} is not a multiple of {heads['key']} key heads",
        )
    n_taps = config.count("linear_conv_kernel_dim", kinds.MAX_TAPS, least=2)
    keys, values = (heads[name] * dims[name] for name in names)
    is_tiled = config.boolean("has_tiled_heads", False) and heads["key"] != heads["value"]
    draft.dims |= {
        "taps": n_taps,
        "keys": keys,
        "values": values,
        "channels": 2 * keys + values,
        "value": dims["value"],
        "key heads": heads["key"],
        "value heads": heads["value"],
    }
    draft.factors["minus"] = -1.0
    delta: dict[str, Any] = {
        "mixer": kinds.Mixer.DELTA,
        "n_taps": n_taps,
        "n_key_heads": heads["key"],
        "n_value_heads": heads["value"],
        "key_dim": dims["key"],
        "value_dim": dims["value"],
        "has_tiled_heads": int(is_tiled),
        "rope_set": kinds.ROPE_NONE,
        "qk_norm": kinds.QkNorm.NONE,
        "output_gate": 0,
    }
    draft.set_type(LINEAR, **delta)


def _moe(draft: Draft) -> None:
    config = draft.config
    _mixers(draft)
    draft.dims["shared"] = config.count("shared_expert_intermediate_size", MAX_FFN_DIM)
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    experts.route(draft, range(draft.header.n_layers), expert_weights=kinds.ExpertWeights.BY_SUM)


def _next(draft: Draft) -> None:
    _mixers(draft)
    experts.qwen2_moe(draft)


# ---- Olmo Hybrid ----


_OLMO: Final = (
    *r.norm(T.ATTN_NORM, f"{r.AT}attention_layer_norm", **_DELTA),
    *r.norm(T.FFN_NORM, f"{r.AT}feedforward_layer_norm", **_DELTA),
    *r.norm(T.POST_FFN_NORM, f"{r.AT}post_feedforward_layernorm", **_ATTENTION),
    *r.attention(bias="attention_bias", **_ATTENTION),
    *r.qk_norms("q", "kv", **_ATTENTION),
    *(
        rule
        for target, name, dim in (
            (T.Q, "q", "keys"), (T.K, "k", "keys"), (T.V, "v", "values"),
            (T.MIX_GATE, "g", "values"), (T.BETA, "b", "value heads"),
            (T.DECAY, "a", "value heads"),
        )
        for rule in r.linear(target, None, f"{_LIN}{name}_proj", dim, "hidden", **_DELTA)
    ),
    *r.linear(T.ATTN_OUT, None, f"{_LIN}o_proj", "hidden", "values", **_DELTA),
    *r.norm(T.MIX_NORM, f"{_LIN}o_norm", "value", **_DELTA),
    r.layer(T.DECAY_BIAS, f"{_LIN}dt_bias", "value heads", **_DELTA),
    r.layer(T.CONV, f"{_LIN}{{part}}_conv1d.weight", "taps", "channels", is_flat=True,
          transposed=True, **_DELTA),
    _LOG_RATE,
    *r.gated(),
    *r.ENDS,
)  # fmt: skip


def _has_rope(config: Config) -> bool:
    """False if base or type are null, as in the published checkpoint, or nothing is stated."""
    stated = config.get("rope_parameters")
    if not isinstance(stated, dict):
        return config.get("rope_theta") is not None
    return None not in (stated.get("rope_theta", 0), stated.get("rope_type", ""))


def _olmo_rope(config: Config, layer_type: str) -> Config:
    return parameters_of(config, layer_type) if _has_rope(config) else NO_ROPE


def _olmo(draft: Draft) -> None:
    config = draft.config
    _mixers(draft)
    factor = 2.0 if config.boolean("linear_allow_neg_eigval") else 1.0
    draft.set_type(LINEAR, beta_factor=factor, value_epsilon=1e-5)
    if not _has_rope(config):
        draft.unrotate(list(range(draft.header.n_layers)))


_COMMON: Final[dict[str, Any]] = {
    "left_out": family.SENSES,
    "has_partial_rope": True,
    "kind": {"qk_norm": kinds.QkNorm.PER_HEAD, "output_gate": 1},
    "windows": attention_every,
    "neutral": {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        **{key: range(17) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers")},
        "norm_topk_prob": True,
    },
}
# ---- GGUF files ----


def _gguf(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    n_heads, n_inner = config["linear_num_value_heads"], fields.get("ssm.inner_size")
    if type(n_inner) is not int or type(n_heads) is not int or n_heads < 1 or n_inner % n_heads:
        raise QsfConversionError(
            f"its {n_heads!r} value heads do not divide ssm.inner_size = {n_inner!r}"
        )
    is_linear = [f"blk.{i}.ssm_a" in shapes for i in range(config["num_hidden_layers"])]
    return {
        "linear_value_head_dim": n_inner // n_heads,
        "layer_types": [LINEAR if has_delta else FULL for has_delta in is_linear],
    }


_GGUF: Final = Gguf("qwen35",
    needs=("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
           "linear_conv_kernel_dim"),
    has_one_in_norms=True,
    # The value heads of a key head are n_key_heads apart; the engine computes with that.
    constants={"has_tiled_heads": True},
    more=_gguf,
    ignores=(*gguf.VISION_KEYS, "full_attention_interval"),
)  # fmt: skip
_GGUF_MOE: Final = replace(
    _GGUF,
    name="qwen35moe",
    needs=(*_GGUF.needs, *experts.GGUF_ROUTED, "shared_expert_intermediate_size"),
    without=("intermediate_size",),
)


# ---- short convolutions: LFM2, 3 ----

CONV: Final = "conv"
_AT_CONV, _FFN = f"{r.AT}conv.", f"{r.AT}feed_forward."
_LFM2_ATTENTION: Mapping[str, Any] = {"where": Where.ATTENTION}
_CONVOLUTION: Mapping[str, Any] = {"where": Where.SHORT_CONV, "bias_flag": "conv_bias"}
_LFM2_PARTS = {T.K: T.K_BIAS, T.Q: T.Q_BIAS, T.V: T.V_BIAS}  # B, C, x
_ATTENTION_RULES = (
    *r.qkv(**_LFM2_ATTENTION),
    *r.norm(T.Q_NORM, f"{r.ATTN}q_layernorm", "head", **_LFM2_ATTENTION),
    *r.norm(T.K_NORM, f"{r.ATTN}k_layernorm", "head", **_LFM2_ATTENTION),
    *r.linear(T.ATTN_OUT, None, f"{r.ATTN}out_proj", "hidden", "q", **_LFM2_ATTENTION),
)
_LFM2_COMMON = (
    *r.norm(T.ATTN_NORM, f"{r.AT}operator_norm"),
    *r.norm(T.FFN_NORM, f"{r.AT}ffn_norm"),
    *r.fused(_LFM2_PARTS, f"{_AT_CONV}in_proj", ("hidden",) * 3, **_CONVOLUTION),
    r.layer(T.CONV, f"{_AT_CONV}conv.weight", "taps", "hidden", is_flat=True, transposed=True,
          where=Where.SHORT_CONV),
    r.layer(T.CONV_BIAS, f"{_AT_CONV}conv.bias", "hidden", flag="conv_bias",
            where=Where.SHORT_CONV),
    *r.linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_AT_CONV}out_proj", "hidden", "hidden",
            **_CONVOLUTION),
    *r.linear(T.FFN_GATE, None, f"{_FFN}w1", "ffn", "hidden", where=Where.DENSE),
    *r.linear(T.FFN_UP, None, f"{_FFN}w3", "ffn", "hidden", where=Where.DENSE),
    *r.linear(T.FFN_DOWN, None, f"{_FFN}w2", "hidden", "ffn", where=Where.DENSE),
    *r.ends("embed_tokens", "embedding_norm"),
)  # fmt: skip
_LFM2_RULES = (*_ATTENTION_RULES, *_LFM2_COMMON)
_LFM3 = (
    *r.attention(bias="attention_bias", **_LFM2_ATTENTION),
    *r.qk_norms(**_LFM2_ATTENTION),
    *r.linear(T.MIX_GATE, None, f"{r.ATTN}gate_proj", "heads", "hidden", flag="use_attention_gate",
            **_LFM2_ATTENTION),
    *r.norm(T.POST_ATTN_NORM, f"{r.AT}post_operator_norm", flag="use_sandwich_norm"),
    *r.norm(T.POST_FFN_NORM, f"{r.AT}post_ffn_norm", flag="use_sandwich_norm"),
    *_LFM2_COMMON,
)  # fmt: skip


def _layer_types_of_lfm2(config: Config, n_layers: int) -> tuple[int, list[str]]:
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


def _mixers_of_lfm2(draft: Draft) -> None:
    """Turn the layers of type ``conv`` into short convolutions."""
    config, dim = draft.config, draft.header.dim
    for name, value in (("block_dim", dim), ("conv_dim", dim), ("conv_dim_out", dim),
                        ("num_heads", draft.header.n_heads)):  # fmt: skip
        if config.get(name, value) != value:
            raise config.error(name, f"differs from {value}, which is not supported")
    n_taps = config.count("conv_L_cache", kinds.MAX_TAPS, least=2)
    draft.dims["taps"] = n_taps
    draft.set_type(
        CONV, mixer=kinds.Mixer.SHORT_CONV, n_taps=n_taps, rope_set=kinds.ROPE_NONE, output_gate=0,
        qk_norm=kinds.QkNorm.NONE,
    )  # fmt: skip


def _lfm2(draft: Draft) -> None:
    _mixers_of_lfm2(draft)
    ffn_dim = _ffn_dim(draft.config)
    draft.header = replace(draft.header, ffn_dim=ffn_dim)
    draft.dims["ffn"] = ffn_dim
    draft.set_all(ffn_dim=ffn_dim)


def _lfm2_moe(draft: Draft) -> None:
    config, n_layers = draft.config, draft.header.n_layers
    _mixers_of_lfm2(draft)
    n_dense = config.get("num_dense_layers")
    if type(n_dense) is not int or not 0 <= n_dense < n_layers:
        raise config.error("num_dense_layers", f"= {shown(n_dense)}: no layer has experts")
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    is_divided = config.boolean("norm_topk_prob")
    experts.route(
        draft,
        range(n_dense, n_layers),
        expert_score=kinds.ExpertScore.SIGMOID,
        expert_weights=experts.by_sum(config),
        weights_epsilon=1e-6 if is_divided else 0.0,
        weights_factor=config.positive("routed_scaling_factor"),
    )


def _lfm3_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Of four layers two are convolutions, one has a window."""
    types = config.of_layers("layer_types", n_layers, (FULL, SLIDING, CONV))
    of_four = (SLIDING, CONV, FULL, CONV)
    types = types or [of_four[i % 4] if i else CONV for i in range(n_layers)]
    return config.tokens("sliding_window"), types


def _lfm3_rope(config: Config, layer_type: str) -> Config:
    return NO_ROPE if layer_type == CONV else parameters_of(config, layer_type)


def _lfm3(draft: Draft) -> None:
    if "use_attention_gate" in draft.flags:
        draft.set_all(output_gate=2)
    _mixers_of_lfm2(draft)
    draft.ropes.pop(CONV, None)


def _selection(name: str) -> tuple[r.TensorRule, ...]:
    return r.selection_bias(f"{_FFN}{name}", flag="use_expert_bias"), r.router(f"{_FFN}gate.weight")


# ---- GGUF files ----

_GGUF_TAPS = {"conv_L_cache": "shortconv.l_cache"}


def _gguf_of_lfm2(_fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are short convolutions."""
    of_layers = config.get("num_key_value_heads")
    if not isinstance(of_layers, list):
        of_layers = [of_layers] * config["num_hidden_layers"]
    return {
        "num_key_value_heads": max(of_layers, default=0),
        "layer_types": [FULL if n else CONV for n in of_layers],
    }


_RENAMES = {
    "norm_epsilon": "norm_eps",
    "intermediate_size": "block_ff_dim",
    "tie_word_embeddings": "tie_embedding",
}


FAMILIES = (
    Family(
        name="OlmoHybridForCausalLM",
        title="Olmo Hybrid (7B)",
        rules=_OLMO,
        # As published, and as transformers writes it.
        layouts=tuple(
            r.norm(T.POST_ATTN_NORM, f"{r.AT}{name}", **_ATTENTION)
            for name in ("post_attention_layernorm", "feedforward_layer_norm")
        ),
        windows=attention_every,
        rope_parameters=_olmo_rope,
        ignored_keys="linear_(a_log|dt)_(min|max)",  # of training
        adjust=_olmo,
    ),
    Family(
        name="Qwen3_5ForCausalLM",
        title="Qwen 3.5, 3.6, 3.8 (0.8B to 27B), text",
        gguf=_GGUF,
        model_type="qwen3_5_text",
        nested=("Qwen3_5ForConditionalGeneration",),
        rules=(*_RULES, *r.gated()),
        layouts=(_SPLIT, (*_PARTS, *_STEPS, _MINUS_RATE)),
        adjust=_mixers,
        **_COMMON,
    ),
    Family(
        name="Qwen3_5MoeForCausalLM",
        title="Qwen 3.5, 3.6 MoE (35B-A3B, 122B-A10B), text",
        gguf=_GGUF_MOE,
        model_type="qwen3_5_moe_text",
        nested=("Qwen3_5MoeForConditionalGeneration",),
        rules=(*_RULES, r.ROUTER, *r.SHARED_EXPERT),
        layouts=r.with_shared_gate(_SPLIT, (*_PARTS, *_STEPS, _MINUS_RATE)),
        defaults={"intermediate_size": 512},  # of no layer
        adjust=_moe,
        **_COMMON,
    ),
    Family(
        name="Qwen3NextForCausalLM",
        title="Qwen3-Next (80B-A3B), Qwen3-Coder-Next",
        gguf=replace(_GGUF_MOE, constants={}, name="qwen3next"),
        rules=(*_RULES, *r.DENSE, r.ROUTER, *r.SHARED_EXPERT),
        layouts=r.with_shared_gate(_FUSED, (*_PARTS, *_STEPS_BY_KEY_HEAD, _MINUS_RATE)),
        defaults={"intermediate_size": 5632},
        adjust=_next,
        **_COMMON,
    ),
    Family(
        name="Lfm2ForCausalLM",
        title="LFM2",
        gguf=Gguf(
            "lfm2",
            needs=("conv_L_cache",),
            keys=_GGUF_TAPS,
            constants={"block_auto_adjust_ff_dim": False},  # the stated FFN width is adjusted
            more=_gguf_of_lfm2,
            lists=("attention.head_count_kv",),
        ),
        rules=_LFM2_RULES,
        renames=_RENAMES,
        defaults={"hidden_act": "silu"},
        flags={"conv_bias": False},
        windows=_layer_types_of_lfm2,
        adjust=_lfm2,
        neutral={
            "block_use_swiglu": True,
            "use_pos_enc": True,
            "block_norm_eps": 1e-5,
            "block_mlp_init_scale": 1.0,
            "block_out_init_scale": 1.0,
        },
    ),
    Family(
        name="Lfm3ForCausalLM",
        title="LFM3",
        rules=_LFM3,
        renames={"norm_epsilon": "norm_eps"},
        defaults={"hidden_act": "silu", "rope_theta": 1000000.0},
        flags={
            "conv_bias": False,
            "attention_bias": False,
            "use_attention_gate": True,
            "use_sandwich_norm": True,
        },
        windows=_lfm3_types,
        rope_parameters=_lfm3_rope,
        adjust=_lfm3,
    ),
    Family(
        name="Lfm2MoeForCausalLM",
        title="LFM2 MoE",
        gguf=Gguf(
            "lfm2moe",
            needs=("conv_L_cache", *experts.GGUF_ROUTED, "num_dense_layers"),
            may=EXPERT_WEIGHTS,
            keys={**_GGUF_TAPS, "num_dense_layers": KEYS["first_k_dense_replace"]},
            more=_gguf_of_lfm2,
            neutral=gguf.SIGMOID,
            lists=("attention.head_count_kv",),
        ),
        rules=_LFM2_RULES,
        layouts=(
            (*_selection("expert_bias"), *r.one_each(_FFN, "w1", "w3", "w2")),
            (*_selection("expert_bias.bias"), *r.of_gguf(_FFN)),
        ),
        renames=_RENAMES,
        defaults={"hidden_act": "silu"},
        flags={"conv_bias": False, "use_expert_bias": True},
        windows=_layer_types_of_lfm2,
        adjust=_lfm2_moe,
    ),
)
