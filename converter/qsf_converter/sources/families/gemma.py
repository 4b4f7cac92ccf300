"""Gemma. 1 to 3 store norms as w of 1 + w, and have factors of the embedding.

Gemma 4 has heads of two widths, values with a norm, experts beside a dense part, own embeddings.
The layers without a window have heads of ``global_head_dim``, RoPE on a part of them, and, where
``attention_k_eq_v`` says so, KV heads of another number whose values are the keys.
The last ``num_kv_shared_layers`` read the keys and values of the last layer of their type before
them. In E2B and E4B each layer has an embedding of every token of its own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.file.kinds import ExpertWeights, QkNorm
from qsf.file.layout import KV_LENT, MAX_OWN_WIDTH, Activation
from qsf_converter.sources.families import family
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import (
    MAX_DIM,
    MAX_FFN_DIM,
    MAX_HEAD_DIM,
    MAX_VOCAB,
    Config,
)
from qsf_converter.sources.families.experts import route
from qsf_converter.sources.families.family import FULL, SLIDING, Draft, window_but_every
from qsf_converter.sources.families.gguf import EXPERTS, Fields, Gguf, Shapes, layer_types
from qsf_converter.sources.families.positions import parameters_of, rope_of
from qsf_converter.sources.families.rules import AT, ATTENTION, ATTN, T, Where, gated, layer, norm


def scale_and_cap(draft: Draft) -> None:
    """The embedding's factor: the root of the width, in the type of the checkpoint."""
    config = draft.config
    factor = math.sqrt(draft.header.dim)
    if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")):
        factor = _rounded(factor)
    cap = 0.0
    if config.get("final_logit_softcapping") is not None:
        cap = config.positive("final_logit_softcapping")
    draft.arch = replace(draft.arch, embedding_factor=factor, logit_cap=cap)


def scale_and_cap_scores(draft: Draft) -> None:
    """The embedding's factor, and how scores are scaled and capped."""
    scale_and_cap(draft)
    config = draft.config
    if draft.config.get("query_pre_attn_scalar") is not None:
        scalar = config.count("query_pre_attn_scalar", MAX_DIM)
        draft.set_all(score_scale=1 / math.sqrt(scalar))
    if config.get("attn_logit_softcapping") is not None:
        draft.set_all(score_cap=config.positive("attn_logit_softcapping"))


def _rounded(value: float) -> float:
    """The nearest number of bf16; the root of a whole number is never halfway between two."""
    bits = np.float32(value).view(np.uint32) + np.uint32(0x8000)
    return float((bits & np.uint32(0xFFFF0000)).view(np.float32))


def rope_of_gemma3(config: Config, layer_type: str) -> Config:
    """Older configurations state the theta of windowed layers, and scale the others alone."""
    if layer_type != SLIDING:
        return parameters_of(config, layer_type)
    if config.get("rope_parameters"):
        return parameters_of(config, layer_type, theta="rope_local_base_freq")
    return Config({"rope_theta": config.positive("rope_local_base_freq")})


_ENDS = r.ends("embed_tokens", "norm", add=1.0)


def sandwich(add: float = 0.0) -> r.Rules:
    """The norms before and behind attention and FFN."""
    return (
        *norm(T.ATTN_NORM, f"{AT}input_layernorm", add=add),
        *norm(T.POST_ATTN_NORM, f"{AT}post_attention_layernorm", add=add),
        *norm(T.FFN_NORM, f"{AT}pre_feedforward_layernorm", add=add),
        *norm(T.POST_FFN_NORM, f"{AT}post_feedforward_layernorm", add=add),
    )


_SANDWICH = sandwich(add=1.0)
RENAMES = {"norm_epsilon": "rms_norm_eps", "hidden_act": "hidden_activation"}
_family = functools.partial(family.Family, renames=RENAMES, adjust=scale_and_cap_scores)

GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
BLOCK = (*_SANDWICH, *ATTENTION)


def _gemma1(draft: Draft) -> None:
    scale_and_cap_scores(draft)
    # Its files say gelu but mean the tanh form; transformers reads them so.
    draft.config.get("hidden_activation")
    if draft.header.activation == Activation.GELU_ERF:
        draft.header = replace(draft.header, activation=Activation.GELU_TANH)
        draft.set_all(activation=Activation.GELU_TANH)


def _gguf(period: int, largest: int) -> Callable[..., dict[str, Any]]:
    """llama.cpp knows the scale of each generation's largest model, recognised by its layers."""

    def more(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == largest
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            **layer_types(fields, config, period),
            "query_pre_attn_scalar": width if is_largest else config["head_dim"],
        }

    return more


# Published checkpoints are bf16, in which the factor of the embedding is rounded.
_BF16 = {"dtype": "bfloat16"}
_GGUF_MAY = (
    "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq",
)  # fmt: skip
GGUF_GEMMA3 = Gguf(
    "gemma3", may=_GGUF_MAY, constants=_BF16, has_one_in_norms=True, more=_gguf(6, 62)
)


# ---- rules ----


def _attention(where: Where, of: str) -> r.Rules:
    """The tensors of layers whose heads have the dimensions that begin with ``of``."""
    keys = Where.UNLIMITED_KEYS if of else Where.WINDOWED_KEYS
    values = Where.OWN_VALUES if of else keys
    biases = {"bias_flag": "attention_bias"}
    return (
        *r.linear(T.Q, T.Q_BIAS, f"{ATTN}q_proj", f"{of}q", "hidden", where=where, **biases),
        *r.linear(T.K, T.K_BIAS, f"{ATTN}k_proj", f"{of}kv", "hidden", where=keys, **biases),
        *r.linear(T.V, T.V_BIAS, f"{ATTN}v_proj", f"{of}kv", "hidden", where=values, **biases),
        *norm(T.Q_NORM, f"{ATTN}q_norm", f"{of}head", where=where),
        *norm(T.K_NORM, f"{ATTN}k_norm", f"{of}head", where=keys),
        *r.linear(
            T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{ATTN}o_proj", "hidden", f"{of}q", where=where, **biases
        ),
    )


_ROUTED: Final[dict[str, Any]] = {"where": Where.ROUTED}
_OWN: Final[dict[str, Any]] = {"flag": "own embeddings"}
# What all of Gemma 4's kind have in a layer, but for the FFN.
LAYER_RULES: Final = (
    *sandwich(),
    *_attention(Where.WINDOWED, ""),
    *_attention(Where.UNLIMITED, "global "),
    layer(T.LAYER_SCALE, f"{AT}layer_scalar", "one"),
)
_RULES: Final = (
    *LAYER_RULES,
    *gated(where=Where.KEYS),
    *gated(dim="wide ffn", where=Where.SHARED_KEYS),
    layer(T.ROUTER_NORM, f"{AT}router.scale", "hidden", scale="router", **_ROUTED),
    layer(T.EXPERT_SCALE, f"{AT}router.per_expert_scale", "experts", **_ROUTED),
    layer(T.EXPERT_ROUTER, f"{AT}router.proj.weight", "experts", "hidden", **_ROUTED),
    *norm(T.DENSE_POST_NORM, f"{AT}post_feedforward_layernorm_1", **_ROUTED),
    *norm(T.ROUTED_NORM, f"{AT}pre_feedforward_layernorm_2", **_ROUTED),
    *norm(T.ROUTED_POST_NORM, f"{AT}post_feedforward_layernorm_2", **_ROUTED),
    layer(T.OWN_IN_NORM, "per_layer_projection_norm.weight", "own", of_all=True, **_OWN),
    layer(T.OWN_IN, "per_layer_model_projection.weight", "own", "hidden", of_all=True, **_OWN),
    layer(T.OWN_GATE, f"{AT}per_layer_input_gate.weight", "own", "hidden", **_OWN),
    layer(T.OWN_OUT, f"{AT}per_layer_projection.weight", "hidden", "own", **_OWN),
    *norm(T.OWN_NORM, f"{AT}post_per_layer_input_norm", **_OWN),
    r.TensorRule(
        r.Place.OWN_TABLE,
        T.OWN_TABLE,
        "embed_tokens_per_layer.weight",
        ("vocab", "own of all"),
        **_OWN,
    ),
    *r.ends("embed_tokens", "norm"),
)

# ---- configurations ----


def gemma4_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """The last layer has no window, whatever its type."""
    window_tokens, types = window_but_every(config, n_layers)
    return window_tokens, [*types[:-1], FULL]


def as_gemma4(draft: Draft) -> None:
    """What all of Gemma 4's kind have: scores without a scale, and heads of two widths."""
    scale_and_cap(draft)
    draft.dims["one"] = 1
    draft.set_all(score_scale=1.0, value_norm=1)
    _widen_heads(draft)


def _adjust(draft: Draft) -> None:
    as_gemma4(draft)
    if draft.config.boolean("enable_moe_block"):
        draft.dims["expert"] = draft.config.count("moe_intermediate_size", MAX_FFN_DIM)
        draft.dims["shared"] = draft.dims["ffn"]
        draft.factors["router"] = draft.header.dim**-0.5
        route(draft, range(draft.header.n_layers), expert_weights=ExpertWeights.BY_SUM)
    else:
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            draft.config.get(key)  # of experts, which there are not
    _share_keys(draft)
    if draft.config.get("hidden_size_per_layer_input"):
        _embed_layers(draft)


def _share_keys(draft: Draft) -> None:
    """Let the last layers read keys and values of earlier ones; their FFN may be twice as wide."""
    config, n_layers = draft.config, draft.header.n_layers
    is_wide = config.boolean("use_double_wide_mlp")
    n_shared = config.get("num_kv_shared_layers") or 0
    if isinstance(n_shared, bool) or n_shared not in range(n_layers):
        raise config.error("num_kv_shared_layers", f"= {shown(n_shared)} of {n_layers} layers")
    first = n_layers - n_shared
    ffn_dim = draft.dims["ffn"] * (2 if is_wide and n_shared else 1)
    draft.dims["wide ffn"] = ffn_dim
    draft.header = replace(draft.header, ffn_dim=max(draft.header.ffn_dim, ffn_dim))
    for i in range(first, n_layers):
        sources = [j for j in range(first) if draft.layer_types[j] == draft.layer_types[i]]
        if not sources:
            raise config.error(
                "num_kv_shared_layers", f"= {n_shared}: no layer before has the type of layer {i}"
            )
        draft.layers[i] = replace(
            draft.layers[i],
            kv_source=1 + sources[-1],
            value_norm=0,
            values_are_keys=0,
            ffn_dim=ffn_dim,
        )


def _embed_layers(draft: Draft) -> None:
    config, header = draft.config, draft.header
    set_own_width(draft)
    n_vocab = config.count("vocab_size_per_layer_input", MAX_VOCAB, header.n_vocab)
    if n_vocab != header.n_vocab:
        raise config.error(
            "vocab_size_per_layer_input", f"= {n_vocab} is supported with that of vocab_size"
        )
    draft.flags.add("own embeddings")


def set_own_width(draft: Draft) -> None:
    width = draft.config.count("hidden_size_per_layer_input", MAX_OWN_WIDTH)
    draft.arch = replace(draft.arch, own_width=width)
    draft.dims |= {"own": width, "own of all": width * draft.header.n_layers}


def _widen_heads(draft: Draft) -> None:
    config, header = draft.config, draft.header
    is_shared = not draft.arch.is_encoder and config.boolean("attention_k_eq_v")
    own_config = _global_heads(draft, has_own_number=is_shared or draft.arch.is_encoder)
    head_dim = own_config.count("head_dim", MAX_HEAD_DIM)
    n_kv_heads = own_config.count("num_key_value_heads", header.n_heads)
    if header.n_heads % n_kv_heads:
        raise own_config.error(
            "num_key_value_heads", f"= {n_kv_heads} do not share {header.n_heads} heads"
        )
    draft.dims |= {
        "global q": header.n_heads * head_dim,
        "global kv": n_kv_heads * head_dim,
        "global head": head_dim,
    }
    draft.set_type(FULL, head_dim=head_dim, n_kv_heads=n_kv_heads, values_are_keys=int(is_shared))
    draft.header = replace(
        header,
        head_dim=max(kind.head_dim for kind in draft.layers),
        n_kv_heads=max(kind.n_kv_heads for kind in draft.layers),
    )
    draft.ropes[FULL] = rope_of(
        gemma4_rope(config, FULL),
        head_dim,
        header.max_tokens,
        is_interleaved=False,
        may_be_partial=True,
    )


def _global_heads(draft: Draft, *, has_own_number: bool) -> Config:
    """The sizes of heads without a window, which newer configurations state for each layer."""
    config, header = draft.config, draft.header
    usual_heads = {
        "head_dim": header.head_dim,
        "num_key_value_heads": header.n_kv_heads or header.n_heads,
    }
    of_layers = config.get("per_layer_config")
    if of_layers is None:
        renames = {
            "head_dim": "global_head_dim",
            "num_key_value_heads": "num_global_key_value_heads",
        }
        n_own = config.get("num_global_key_value_heads")
        if has_own_number and n_own is not None:
            usual_heads["num_key_value_heads"] = n_own
        return Config(usual_heads | {"head_dim": config.get("global_head_dim")}, renames)
    config.get("global_head_dim"), config.get("num_global_key_value_heads")
    wide = [str(i) for i, type_ in enumerate(draft.layer_types) if type_ == FULL]
    if isinstance(of_layers, dict):  # transformers pads the numbers of layers: 05, 11
        of_layers = {name.lstrip("0") or "0": values for name, values in of_layers.items()}
    if (
        not isinstance(of_layers, dict)
        or sorted(of_layers) != sorted(wide)
        or any(values != of_layers[wide[0]] for values in of_layers.values())
        or not isinstance(of_layers[wide[0]], dict)
        or not of_layers[wide[0]].keys() <= usual_heads.keys()
    ):
        raise config.error(
            "per_layer_config", "is supported with the same heads in all layers without a window"
        )
    return Config(usual_heads | of_layers[wide[0]], where="per_layer_config.")


def gemma4_rope(config: Config, layer_type: str) -> Config:
    """GGUF files state the theta of windowed layers, and the scaling of the other layers."""
    if layer_type == SLIDING and config.get("rope_local_base_freq") is not None:
        return Config({"rope_theta": config.positive("rope_local_base_freq")})
    stated = parameters_of(config, layer_type)
    whole = {key: value for key, value in stated.items() if key != "rotary_dims"}
    return Config(whole, where="rope_parameters.")


_EXPERTS_AT: Final = (f"{AT}experts.gate_up_proj", f"{AT}experts.down_proj")
_LAYOUTS: Final = (
    r.in_one(*_EXPERTS_AT),
    r.in_one(*(f"{name}.weight" for name in _EXPERTS_AT)),  # of GGUF files
)
_COMMON: Final[Mapping[str, Any]] = {
    "rules": _RULES,
    "layouts": _LAYOUTS,
    # Published checkpoints have keys and values also in layers that read those of others.
    "ignored_suffixes": tuple(
        f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")
    ),
    "renames": {**RENAMES, "num_experts_per_tok": "top_k_experts"},
    "flags": {"attention_bias": False},
    "kind": {"qk_norm": QkNorm.PER_HEAD},
    "windows": gemma4_types,
    "rope_parameters": gemma4_rope,
    "has_partial_rope": True,
    "adjust": _adjust,
    "neutral": {
        "use_bidirectional_attention": (False, "vision"),  # of images
        "vocab_size_per_layer_input": range(MAX_VOCAB + 1),
    },
}
# ---- GGUF files ----


def _gguf_of_gemma4(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
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
    dim = of_layers[0] if of_layers else 0
    for is_wide in (False, True):
        last = dim * 2 if is_wide else dim
        if of_layers == [dim] * (n_layers - n_shared) + [last] * n_shared:
            return {"intermediate_size": dim, "use_double_wide_mlp": is_wide}
    raise QsfConversionError(
        f"its metadata has FFN widths {of_layers[:8]}, supported: one, twice as much in the last"
        f" {n_shared} layers, which share keys and values"
    )


_KEYS: Final = {
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
# The metadata's head sizes are those of layers without a window.
_GGUF: Final = Gguf("gemma4",
    may=(*EXPERTS, "moe_intermediate_size", "sliding_window", "final_logit_softcapping",
         "rope_local_base_freq", *_KEYS),
    keys=_KEYS,
    # Published checkpoints are bf16, in which the factor of the embedding is rounded.
    constants={"dtype": "bfloat16"},
    more=_gguf_of_gemma4,
    ignores=("attention.value_length_swa", "rope.dimension_count_swa"),
    lists=("attention.head_count_kv", "feed_forward_length"),
    others=("Gemma4UnifiedForCausalLM",),
)  # fmt: skip


# ---- drafters ----


def _as_drafter(draft: Draft) -> None:
    """All layers read the keys and values of the model's last layer of their type.

    Through a window of n tokens a guess sees n + 1 tokens before its own, whose key there is not.
    """
    config = draft.config
    as_gemma4(draft)
    n_layers = draft.header.n_layers
    if config.get("num_kv_shared_layers") not in (0, None, n_layers):
        raise config.error(
            "num_kv_shared_layers", f"= {shown(config['num_kv_shared_layers'])} of {n_layers}"
        )
    for key in ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"):
        config.get(key)  # of a search in a part of the words; here guesses are the best of all
    draft.dims["target"] = config.count("backbone_hidden_size", MAX_DIM)
    draft.dims["joined"] = 2 * draft.dims["target"]
    draft.arch = replace(draft.arch, target_dim=draft.dims["target"], logit_cap=0.0)
    draft.layers = [
        replace(
            kind,
            kv_source=KV_LENT,
            value_norm=0,
            values_are_keys=0,
            window_tokens=kind.window_tokens and kind.window_tokens + 2,
        )
        for kind in draft.layers
    ]


_DRAFTER: Final[Mapping[str, Any]] = {
    **_COMMON,
    "rules": (
        *LAYER_RULES,
        *gated(),
        r.TensorRule(r.Place.FINAL, T.JOIN, "pre_projection.weight", ("hidden", "joined")),
        r.TensorRule(r.Place.FINAL, T.DENSE, "post_projection.weight", ("target", "hidden")),
        *r.ends("embed_tokens", "norm"),
    ),
    "layouts": (),
    "ignored_suffixes": (
        *_COMMON["ignored_suffixes"],
        *(f"masked_embedding.{name}" for name in ("centroids.weight", "token_ordering")),
    ),
    "adjust": _as_drafter,
    # Of other forms of Gemma 4.
    "neutral": {
        **_COMMON["neutral"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    },
}
_GEMMA4_DEFAULTS: Final[Mapping[str, Any]] = {
    "global_head_dim": 512,
    "num_attention_heads": 8,
    "vocab_size": 262144,
    "sliding_window_pattern": 6,
}


FAMILIES = (
    _family(
        name="GemmaForCausalLM",
        title="Gemma 1",
        gguf=Gguf("gemma", constants=_BF16, has_one_in_norms=True),
        rules=(*r.pre_norms(add=1.0), *ATTENTION, *gated(), *_ENDS),
        renames={"norm_epsilon": "rms_norm_eps"},
        defaults={"num_key_value_heads": 16},
        adjust=_gemma1,
    ),
    _family(
        name="Gemma2ForCausalLM",
        title="Gemma 2",
        gguf=Gguf(
            "gemma2", may=_GGUF_MAY[:3], constants=_BF16, has_one_in_norms=True, more=_gguf(2, 46)
        ),
        rules=(*_SANDWICH, *ATTENTION, *gated(), *_ENDS),
        defaults={"sliding_window_pattern": 2},
        windows=window_but_every,
    ),
    _family(
        name="VaultGemmaForCausalLM",
        title="VaultGemma",
        model_type="vaultgemma",
        rules=(
            *norm(T.ATTN_NORM, f"{AT}input_layernorm", add=1.0),
            *norm(T.FFN_NORM, f"{AT}pre_feedforward_layernorm", add=1.0),
            *ATTENTION,
            *gated(),
            *_ENDS,
        ),
        defaults={"sliding_window_pattern": 2},
        windows=window_but_every,
    ),
    _family(
        name="Gemma3ForCausalLM",
        title="Gemma 3",
        model_type="gemma3_text",
        gguf=GGUF_GEMMA3,
        rules=(*_SANDWICH, *ATTENTION, *r.qk_norms(add=1.0), *gated(), *_ENDS),
        nested=("Gemma3ForConditionalGeneration",),
        defaults=GEMMA3_DEFAULTS,
        windows=window_but_every,
        rope_parameters=rope_of_gemma3,
    ),
    family.Family(
        name="Gemma4ForCausalLM",
        title="Gemma 4 (E2B, E4B, 31B, 26B-A4B), text",
        model_type="gemma4_text",
        gguf=_GGUF,
        nested=("Gemma4ForConditionalGeneration",),
        defaults=_GEMMA4_DEFAULTS,
        **_COMMON,
    ),
    family.Family(
        name="Gemma4UnifiedForCausalLM",
        title="Gemma 4 12B, text",
        model_type="gemma4_unified_text",
        nested=("Gemma4UnifiedForConditionalGeneration",),
        defaults=_GEMMA4_DEFAULTS,
        **_COMMON,
    ),
    *(
        family.Family(
            name=f"{name}AssistantForCausalLM",
            title=title,
            model_type=f"{model_type}_text",
            nested=(f"{name}AssistantForCausalLM",),
            defaults={**_GEMMA4_DEFAULTS, "backbone_hidden_size": 1536},
            **_DRAFTER,
        )
        for name, model_type, title in (
            ("Gemma4", "gemma4", "Gemma 4's drafters, for --draft"),
            ("Gemma4Unified", "gemma4_unified", "Gemma 4 12B's drafter, for --draft"),
        )
    ),
)
