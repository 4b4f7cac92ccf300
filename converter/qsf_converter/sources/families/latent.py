"""Families with latent attention (MLA): DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash, MiniCPM3.

Checkpoints have one matrix that makes keys and values from the latent; its part for keys is
applied to queries instead (docs/format.md, section 7). Newer GGUF files store the two parts
separately. Kimi Linear, whose latents have no RoPE, and Ling 3 have latents in some layers, and the
delta rule with a decay for each channel (KDA) in the others.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf.file import kinds
from qsf.file.layout import MAX_DIM, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYER_EXPERTS, Positions, padded
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.delta import LINEAR, attention_every
from qsf_converter.sources.families.experts import RENAMES, SELECTED, grouped
from qsf_converter.sources.families.family import FULL, Draft, Family
from qsf_converter.sources.families.gguf import SIGMOID, Fields, Gguf, Shapes
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import ATTN, DENSE, Rules, T, Where, linear, pre_norms

# ---- rules ----

_BY_HEAD: Final[dict[str, Any]] = {"parts": ("nopes", "values"), "groups": "heads"}
_STACKED: Final[dict[str, Any]] = {"groups": "heads", "is_stacked": True}
LATENT: Final[Rules] = (
    *linear(T.Q, None, f"{ATTN}q_proj", "queries", "hidden", flag="one_query"),
    *linear(T.Q, None, f"{ATTN}q_a_proj", "query rank", "hidden", flag="query_rank"),
    r.layer(T.Q_BIAS, f"{ATTN}q_a_proj.bias", "query rank", flag="query_bias"),
    *r.norm(T.Q_NORM, f"{ATTN}q_a_layernorm", "query rank", flag="query_rank"),
    *linear(T.Q_UP, None, f"{ATTN}q_b_proj", "queries", "query rank", flag="query_rank"),
    *linear(T.K, T.K_BIAS, f"{ATTN}kv_a_proj_with_mqa", "key", "hidden",
            bias_flag="attention_bias"),
    *r.norm(T.K_NORM, f"{ATTN}kv_a_layernorm", "latent"),
    *linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{ATTN}o_proj", "hidden", "values",
            bias_flag="attention_bias"),
)  # fmt: skip
FUSED: Final[Rules] = (
    *linear(T.K_UP, None, f"{ATTN}kv_b_proj", "latents", "nope", part=0, is_turned=True,
            **_BY_HEAD),
    *linear(T.V_UP, None, f"{ATTN}kv_b_proj", "values", "latent", part=1, **_BY_HEAD),
)  # fmt: skip
SPLIT: Final[Rules] = (
    *linear(T.K_UP, None, f"{ATTN}k_b_proj", "latents", "nope", **_STACKED),
    *linear(T.V_UP, None, f"{ATTN}v_b_proj", "values", "latent", **_STACKED),
)


def _layouts(experts: tuple[Rules, ...]) -> tuple[Rules, ...]:
    """The layouts of checkpoints, then the two of GGUF files."""
    return (*((*FUSED, *rules) for rules in experts), (*SPLIT, *experts[-1]))


# ---- configurations ----


def rope_of_latent(config: Config, layer_type: str) -> Config:
    """The RoPE parameters of the rotated part of a head, or of one of KDA in files of Ling."""
    n_rope = config.get("head_dim")
    stated = parameters_of(config, layer_type)
    part = stated.get("partial_rotary_factor")
    sizes = ((config.get("qk_nope_head_dim") or 0) + (n_rope or 0), config.get("kda_dim") or 0)
    if part not in (None, 1):
        parts = [round(stated.positive("partial_rotary_factor") * size) for size in sizes]
        if n_rope not in parts:
            problem = f"= {shown(part)} is not {n_rope} of {sizes[0]}"
            raise stated.error("partial_rotary_factor", problem)
    values = {name: stated[name] for name in stated if name != "partial_rotary_factor"}
    return Config(values, where="rope_parameters.")


def latent(draft: Draft) -> None:
    """Keys are latents and one rotated head; the scale of scores depends on the size of queries."""
    config, heads = draft.config, draft.header.n_heads
    n_rope = draft.header.head_dim
    own_rank = config.count("kv_lora_rank", MAX_HEAD_DIM - n_rope - kinds.LATENT_STEP + 1)
    rank = padded(own_rank, kinds.LATENT_STEP)
    n_nope = config.count("qk_nope_head_dim", MAX_HEAD_DIM)
    own_values = config.count("v_head_dim", MAX_HEAD_DIM)
    n_values = padded(own_values, kinds.LATENT_VALUE_STEP)
    has_rank = config.get("q_lora_rank") is not None
    query_rank = config.count("q_lora_rank", MAX_DIM) if has_rank else 0
    draft.flags.add("query_rank" if has_rank else "one_query")
    if has_rank and "attention_bias" in draft.flags:
        draft.flags.add("query_bias")
    draft.dims |= {
        "queries": heads * (n_nope + n_rope),
        "query rank": query_rank,
        "key": rank + n_rope,
        "latent": rank,
        "latents": heads * rank,
        "nope": n_nope,
        "nopes": heads * n_nope,
        "values": heads * n_values,
    }
    draft.header = replace(draft.header, n_kv_heads=1, head_dim=rank + n_rope)
    draft.ropes = {
        type_: rope if rope.arch is None else replace(rope, arch=rope.arch | {"rope_dims": n_rope})
        for type_, rope in draft.ropes.items()
    }
    if (own_rank, own_values) != (rank, n_values):
        latent, values = (own_rank, rank), (own_values, n_values)
        whole, of_values = (1, (latent,)), (heads, (values,))
        draft.padded |= {
            r"kv_a_proj_with_mqa\.(weight|bias)$": {0: (1, (latent, (n_rope, n_rope)))},
            r"kv_a_layernorm\.weight$": {0: whole},
            r"kv_b_proj\.weight$": {0: (heads, ((n_nope, n_nope), values)), 1: whole},
            r"k_b_proj\.weight$": {1: whole},
            r"v_b_proj\.weight$": {1: (1, (values,)), 2: whole},
            r"(o_proj|attention\.dense)\.weight$": {1: of_values},
        }
    scaling = rope_of_latent(config, draft.layer_types[0])
    size = 1.0
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        size = _size(scaling)
    draft.set_all(
        n_kv_heads=1,
        head_dim=rank + n_rope,
        latent_rank=rank,
        latent_norm_dim=own_rank if own_rank != rank else 0,
        nope_dim=n_nope,
        latent_value_dim=n_values,
        query_rank=query_rank,
        score_scale=(n_nope + n_rope) ** -0.5 * size * size,
    )


def _size(scaling: Config) -> float:
    """The factor of queries and keys required by YaRN's ``mscale_all_dim``."""
    of_all = scaling.get("mscale_all_dim")
    factor = scaling.positive("factor", 1.0)
    if not of_all or factor <= 1:
        return 1.0
    return 0.1 * scaling.positive("mscale_all_dim") * math.log(factor) + 1.0


def _v2(draft: Draft) -> None:
    config = draft.config
    latent(draft)
    by_groups = config.get("topk_method") == "group_limited_greedy"
    grouped(
        draft,
        has_groups=by_groups,
        expert_score=kinds.ExpertScore.SOFTMAX,
        expert_weights=kinds.ExpertWeights.AS_IS,
        weights_epsilon=0.0,
        group_score=kinds.GroupScore.LARGEST,
    )


def latent_moe(draft: Draft) -> None:
    """The first layers have no experts; either key states their number."""
    config, n_layers = draft.config, draft.header.n_layers
    types = config.of_layers("mlp_layer_types", n_layers, ("dense", "sparse"))
    if types is not None:
        n_dense = types.count("dense")
        if types != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
            raise config.error("mlp_layer_types", "has dense layers behind others")
        draft.dims["dense layers"] = n_dense
    latent(draft)
    grouped(draft)


def _mistral4(draft: Draft) -> None:
    latent(draft)
    grouped(draft, expert_score=kinds.ExpertScore.SOFTMAX)


def _minicpm3(draft: Draft) -> None:
    config, header = draft.config, draft.header
    latent(draft)
    draft.arch = replace(draft.arch, embedding_factor=config.positive("scale_emb"))
    depth = math.sqrt(header.n_layers)
    draft.set_all(residual_factor=config.positive("scale_depth", depth) / depth)
    base = config.count("dim_model_base", MAX_DIM, header.dim)
    draft.factors["logits"] = base / header.dim


_RENAMES: Final = {**RENAMES, "head_dim": "qk_rope_head_dim"}
_NEUTRAL: Final[dict[str, Any]] = {
    # sizes that transformers derives from others
    "head_dim": range(MAX_HEAD_DIM + 1),
    "qk_head_dim": range(2 * MAX_HEAD_DIM + 1),
    "rope_interleave": True,
}
_ROUTED: Final[dict[str, Any]] = {"moe_layer_freq": 1, "aux_loss_alpha": (0.001, 0.0001)}

_family = functools.partial(
    Family, is_interleaved=True, renames=_RENAMES, rope_parameters=rope_of_latent, neutral=_NEUTRAL
)

# ---- GGUF files ----

_OF_ROUTED: Final = ("num_experts", "num_experts_per_tok", "moe_intermediate_size",
                     "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor",
                     "n_group", "topk_group")  # fmt: skip


def _gguf_sizes(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _gguf_deepseek2(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the family by its experts: none, a sigmoid with a selection bias, or others."""
    keys = _gguf_sizes(fields, shapes, config)
    if not fields.get("expert_count"):
        without = dict.fromkeys((*_OF_ROUTED, "norm_topk_prob"))
        return {**keys, **without, "architectures": ["YoutuForCausalLM"]}
    has_bias = any("exp_probs_b" in name for name in shapes)
    function = fields.get("expert_gating_func", 2 if has_bias else 1)
    if function != (2 if has_bias else 1):
        raise QsfConversionError(
            f"its metadata's expert_gating_func = {shown(function)} is not supported"
            f" {'with' if has_bias else 'without'} a selection bias"
        )
    groups = {key: config.get(key) or 1 for key in ("n_group", "topk_group")}
    keys |= groups
    if has_bias:
        return {**keys, "architectures": ["DeepseekV3ForCausalLM"]}
    by_groups = groups["n_group"] != 1
    return {**keys, "topk_method": "group_limited_greedy" if by_groups else "greedy"}


GGUF_LATENT: Final = Gguf(
    needs=("kv_lora_rank",),
    without=("num_key_value_heads", "head_dim"),
    ignores=("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"),
)  # fmt: skip
GGUF_ROUTED: Final = replace(
    GGUF_LATENT, may=(*_OF_ROUTED, "norm_topk_prob"), constants={"norm_topk_prob": False}
)
# Older files have one matrix that makes keys and values from the latent, newer ones two.
_DEEPSEEK2: Final = replace(
    GGUF_ROUTED,
    name="deepseek2",
    others=("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
    has_tenth_of_mscale=True,
    layouts=(-2, None),
    more=_gguf_deepseek2,
)


# ---- layers of KDA: Kimi Linear, Ling 3 ----

_DELTA: Final[dict[str, Any]] = {"where": Where.DELTA}
_MATRICES: Final = (
    (T.Q, "q_proj", "keys", "hidden"), (T.K, "k_proj", "keys", "hidden"),
    (T.V, "v_proj", "keys", "hidden"), (T.MIX_GATE, "g_a_proj", "key", "hidden"),
    (T.GATE_UP, "g_b_proj", "keys", "key"), (T.BETA, "b_proj", "value heads", "hidden"),
    (T.DECAY, "f_a_proj", "key", "hidden"), (T.DECAY_UP, "f_b_proj", "keys", "key"),
    (T.ATTN_OUT, "o_proj", "hidden", "keys"),
)  # fmt: skip
_KDA: Final[Rules] = (
    *(
        rule
        for target, name, rows, of in _MATRICES
        for rule in linear(target, None, f"{ATTN}{name}", rows, of, **_DELTA)
    ),
    *r.norm(T.MIX_NORM, f"{ATTN}o_norm", "key", **_DELTA),
    r.layer(T.DECAY_BIAS, f"{ATTN}dt_bias", "keys", **_DELTA),
    r.layer(T.CONV, f"{ATTN}{{part}}_conv1d.weight", "taps", "channels", is_flat=True,
          transposed=True, **_DELTA),
)  # fmt: skip


def _rate(name: str, **options: Any) -> Rules:
    shape = ("value heads", "key")
    return (r.layer(T.DECAY_RATE, f"{ATTN}{name}", *shape, is_flat=True, is_repeated=True,
                  **options, **_DELTA),)  # fmt: skip


def _of_attention(rules: Rules) -> Rules:
    return tuple(replace(rule, where=Where.ATTENTION) for rule in rules)


def _choice(at: str, bias: str) -> Rules:
    return (
        r.router(f"{at}gate.weight"),
        r.selection_bias(f"{at}gate.{bias}"),
        *r.gated(f"{at}shared_experts.", "shared", where=Where.ROUTED, flag="shared"),
    )


_PUBLISHED: Final[Rules] = (
    *_of_attention(FUSED),
    *_rate("A_log", is_log=True),
    *_choice(r.SPARSE, "e_score_correction_bias"),
    *r.one_each(r.SPARSE, "w1", "w3", "w2"),
)
_LAYOUTS: Final = (
    # As published, as transformers writes it, and GGUF's.
    (*_PUBLISHED, *r.gated(where=Where.DENSE)),
    (*_PUBLISHED, *r.gated(r.SPARSE, where=Where.DENSE)),
    (
        *_of_attention(SPLIT),
        *_rate("minus_rate", scale="minus"),
        *_choice(r.MLP, "selection.bias"),
        *r.of_gguf(),
        *r.gated(where=Where.DENSE),
    ),
)


def _linear(config: Config) -> Config:
    """The sizes of KDA; checkpoints have an object for them."""
    stated = config.get("linear_attn_config")
    if stated is None:
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
                 "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
        return Config({name: config.get(key) for name, key in names.items()}, where="linear_")
    if not isinstance(stated, dict):
        raise config.error("linear_attn_config", f"= {shown(stated)} is not an object")
    for key in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        config.get(key)
    return Config(stated, where="linear_attn_config.")


def _layer_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Latent attention in the layers that are listed, counted from 1, or in every fourth."""
    types = config.of_layers("layer_types", n_layers, (FULL, LINEAR))
    full = _linear(config).get("full_attn_layers")
    if types is None and isinstance(full, list):
        types = [FULL if i + 1 in full else LINEAR for i in range(n_layers)]
    return 0, types or [FULL if i and i % 4 == 0 else LINEAR for i in range(n_layers)]


def _kimi(draft: Draft) -> None:
    sizes = _linear(draft.config)
    for name in ("full_attn_layers", "kda_layers"):
        sizes.get(name)  # read with the layers' types
    n_heads, dim = sizes.count("num_heads", MAX_HEADS), sizes.count("head_dim", kinds.MAX_STATE_DIM)
    n_taps = sizes.count("short_conv_kernel_size", kinds.MAX_TAPS, least=2)
    for name, value in sizes.unread():
        raise sizes.error(name, f"= {shown(value)} is not supported")
    latent_moe(draft)
    _set_kda(draft, n_heads, dim, n_taps, gate_rank=dim)


def _set_kda(draft: Draft, n_heads: int, dim: int, n_taps: int, **more: Any) -> None:
    """Make KDA of the layers that have no latents."""
    keys = n_heads * dim
    draft.dims |= {"taps": n_taps, "keys": keys, "channels": 3 * keys, "value heads": n_heads}
    draft.dims |= {"key": dim, "latent key": draft.dims["key"]}
    draft.factors["minus"] = -1.0
    none = kinds.LayerKind.__dataclass_fields__
    kda: dict[str, Any] = {
        **{name: none[name].default for name in
           ("score_scale", "latent_rank", "nope_dim", "latent_value_dim", "query_rank")},
        "mixer": kinds.Mixer.DELTA, "n_taps": n_taps, "n_key_heads": n_heads,
        "n_value_heads": n_heads, "key_dim": dim, "value_dim": dim, "has_channel_decays": 1,
        "has_sigmoid_gate": 1, "rope_set": kinds.ROPE_NONE, **more,
    }  # fmt: skip
    draft.set_type(LINEAR, **kda)


# Keys of published files; with other values their own code computes something else.
_OF_LING: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("linear_silu", "no_kda_lora", "use_qk_norm", "moe_router_enable_expert_bias",
                     "rope_interleave"), True),
    **dict.fromkeys(("up_proj_norm", "use_bias", "use_kda_lora", "use_mla_nope", "use_nGPT",
                     "use_qkv_bias", "value_norm", "scale_router_input",
                     "num_kv_heads_for_linear_attn"), False),
    **dict.fromkeys(("score_function", "scoring_func"), "sigmoid"),
    **dict.fromkeys(("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), ()),
    "gated_attention_proj_granularity_type": "head_wise",
    "topk_method": "noaux_tc",
    "partial_rotary_factor": (0.5, 1.0),
    "qk_head_dim": range(2 * MAX_HEAD_DIM + 1),
}  # fmt: skip


def _ling(draft: Draft) -> None:
    config = draft.config
    own = config.get("linear_head_dim")  # as transformers saves it
    dim = config.count("kda_dim" if own is None else "linear_head_dim", kinds.MAX_STATE_DIM)
    config.get("kda_dim")
    n_taps = config.count("short_conv_kernel_size", kinds.MAX_TAPS, least=2)
    for name, value in (("linear_num_heads", draft.header.n_heads),
                        ("linear_conv_kernel_dim", n_taps)):  # fmt: skip
        if config.get(name) not in (None, value):
            raise config.error(name, f"= {shown(config[name])} is not {value}")
    limit, bound = 0.0, config.get("kda_lower_bound")
    if config.boolean("kda_safe_gate"):
        if not isinstance(bound, (int, float)) or not -1e3 < bound < 0:
            raise config.error("kda_lower_bound", f"= {shown(bound)} is not a number below 0")
        limit = -float(bound)
    latent_moe(draft)
    draft.set_type(FULL, output_gate=2)
    _set_kda(draft, draft.header.n_heads, dim, n_taps, decay_limit=limit)


_RANKED: Final = (T.MIX_GATE, T.GATE_UP, T.BETA, T.DECAY, T.DECAY_UP)
_LATENT: Final = tuple(  # ``key`` is a dimension of KDA here
    replace(rule, shape=tuple({"key": "latent key"}.get(dim, dim) for dim in rule.shape))
    for rule in LATENT
)
_LING_MATRICES: Final = (
    (T.MIX_GATE, "g_proj", "keys"), (T.BETA, "b_proj", "value heads"), (T.DECAY, "f_proj", "keys"),
)  # fmt: skip
_LING: Final = tuple(
    replace(
        rule,
        source=rule.source.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense."),
    )
    for rule in (
        *_of_attention(_LATENT),
        *_of_attention(FUSED),
        *linear(T.MIX_GATE, None, f"{ATTN}g_proj", "value heads", "hidden", where=Where.ATTENTION),
        *(rule for rule in _KDA if rule.target not in _RANKED),
        *(
            rule
            for target, name, rows in _LING_MATRICES
            for rule in linear(target, None, f"{ATTN}{name}", rows, "hidden", **_DELTA)
        ),
        *_rate("A_log", is_log=True),
    )
)
_KIMI_RENAMES: Mapping[str, str] = {
    "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "model_max_length",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "n_shared_experts": "num_shared_experts",
    "head_dim": "qk_rope_head_dim",
}
# ---- GGUF files ----


def _gguf(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with KDA have rates of decay; the heads are those of beta."""
    n_keys, n_values = (fields.get(f"attention.{name}_length_mla") for name in ("key", "value"))
    n_rope, n_layers = fields.get("rope.dimension_count"), config["num_hidden_layers"]
    if type(n_keys) is not int or type(n_rope) is not int:
        raise QsfConversionError(
            f"its heads of {shown(n_keys)} dimensions have {shown(n_rope)} of the rotated part"
        )
    is_kda = [f"blk.{i}.ssm_a" in shapes for i in range(n_layers)]
    beta = shapes.get(f"blk.{is_kda.index(True) if any(is_kda) else 0}.ssm_beta.weight", (0,))
    return {
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": n_keys - n_rope,
        "v_head_dim": n_values,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "linear_num_heads": beta[0],
        "layer_types": [LINEAR if kda else FULL for kda in is_kda],
    }


_GGUF: Final = replace(
    GGUF_ROUTED,
    name="kimi-linear",
    needs=("kv_lora_rank", "linear_head_dim", "linear_conv_kernel_dim"),
    keys={"linear_head_dim": "kda.head_dim"},
    constants={"norm_topk_prob": True},
    lists=("attention.head_count_kv",),
    neutral=SIGMOID,
    more=_gguf,
)


FAMILIES = (
    _family(
        name="DeepseekV2ForCausalLM",
        title="DeepSeek V2 (Lite, Coder)",
        gguf=_DEEPSEEK2,
        rules=(*pre_norms(), *LATENT, *DENSE, r.ROUTER, *r.SHARED, *r.ENDS),
        layouts=_layouts(r.LAYOUTS),
        defaults={"n_group": 1, "topk_group": 1},
        neutral={
            **_NEUTRAL,
            **_ROUTED,
            "scoring_func": "softmax",
            "topk_method": ("greedy", "group_limited_greedy"),
            "n_group": range(MAX_LAYER_EXPERTS),
            "topk_group": range(MAX_LAYER_EXPERTS),
        },
        adjust=_v2,
    ),
    _family(
        name="DeepseekV3ForCausalLM",
        title="DeepSeek V3, R1, Kimi K2; K2.5, text",
        nested=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        rules=(*pre_norms(), *LATENT, *DENSE, r.ROUTER, *r.SHARED, *r.ENDS, *r.mtp_rules()),
        layouts=_layouts(SELECTED),
        neutral={**_NEUTRAL, **_ROUTED, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        adjust=latent_moe,
    ),
    _family(
        name="Glm4MoeLiteForCausalLM",
        title="GLM-4.7-Flash",
        rules=(*pre_norms(), *LATENT, *DENSE, r.ROUTER, *r.SHARED, *r.ENDS, *r.mtp_rules()),
        layouts=_layouts(SELECTED),
        defaults={"first_k_dense_replace": 1},
        neutral={**_NEUTRAL, "topk_method": "noaux_tc"},
        adjust=latent_moe,
    ),
    _family(
        name="Mistral4ForCausalLM",
        title="Mistral Small 4, text",
        gguf=replace(_DEEPSEEK2, layouts=(-1, None), more=_gguf_sizes, others=(), name="mistral4"),
        nested=("Mistral3ForConditionalGeneration",),
        left_out=("vision_tower.", "multi_modal_projector."),
        rules=(*pre_norms(), *LATENT, *DENSE, r.ROUTER, *r.SHARED, *r.ENDS),
        layouts=(
            *_layouts(r.LAYOUTS),
            (*SPLIT, *r.LAYOUTS[1]),
        ),  # GGUF files have gate and up in one
        defaults={"rope_parameters": None},
        adjust=_mistral4,
    ),
    _family(
        name="YoutuForCausalLM",
        title="Youtu-LLM",
        rules=(*pre_norms(), *LATENT, *r.gated(), *r.ENDS),
        layouts=(FUSED, SPLIT),
        adjust=latent,
    ),
    _family(
        name="MiniCPM3ForCausalLM",
        title="MiniCPM3",
        gguf=replace(GGUF_LATENT, more=_gguf_sizes, name="minicpm3"),
        model_type="minicpm3",
        rules=(*pre_norms(), *LATENT, *r.gated(), *r.ends("embed_tokens", "norm", scale="logits")),
        layouts=(FUSED,),
        defaults={"v_head_dim": 64},
        adjust=_minicpm3,
        is_interleaved=False,
    ),
    Family(
        name="KimiLinearForCausalLM",
        title="Kimi Linear (48B-A3B)",
        gguf=_GGUF,
        positions=Positions.ALIBI,
        rules=(*pre_norms(), *_of_attention(_LATENT), *_KDA, *r.ENDS),
        layouts=_LAYOUTS,
        renames=_KIMI_RENAMES,
        defaults={"num_experts": 256, "first_k_dense_replace": 1},
        windows=_layer_types,
        adjust=_kimi,
        neutral={
            "head_dim": range(MAX_HEAD_DIM + 1),
            "qk_head_dim": range(2 * MAX_HEAD_DIM + 1),
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "use_grouped_topk": (True, False),
        },
    ),
    Family(
        name="BailingHybridForCausalLM",
        title="Ling 3 (Flash 127B-A5B)",
        is_interleaved=True,
        rules=(
            *pre_norms(),
            *_LING,
            *r.gated(where=Where.DENSE),
            *_choice(r.MLP, "expert_bias"),
            *r.ends("word_embeddings", "norm"),
        ),
        layouts=r.LAYOUTS[:2],  # there is no GGUF form
        renames={**_KIMI_RENAMES, "kda_dim": "head_dim"},
        defaults={"num_experts": 512},
        windows=functools.partial(attention_every, key="layer_group_size"),
        rope_parameters=rope_of_latent,
        adjust=_ling,
        neutral=_OF_LING,
        # The first is by the shapes of tensors, the others are of training.
        ignored_keys="moe_shared_expert_intermediate_size|group_norm_size|max_window_layers"
        "|pregate_.*",
    ),
)
