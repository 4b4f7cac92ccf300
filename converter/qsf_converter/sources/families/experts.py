"""Families with mixtures of experts: a router, experts, and dense parts in addition or instead.

Older checkpoints store each expert's matrices separately; newer ones store gate and up of all
experts in one tensor. GGUF files have one tensor for each matrix, with all experts in it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ExpertScore, ExpertWeights, Ffn, GroupScore, QkNorm
from qsf.file.layout import MAX_CHOSEN, MAX_LAYER_EXPERTS, Activation
from qsf_converter.sources.families import family, gguf
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_FFN_DIM, MAX_LAYERS, Config
from qsf_converter.sources.families.family import Draft, Family
from qsf_converter.sources.families.gguf import EXPERTS, KEYS, VISION_KEYS, Fields, Gguf, windows
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import T, Where

# ---- rules ----


_TRANSPOSED = tuple(replace(rule, transposed=True) for rule in r.LAYOUTS[1])


def _of_gpt_oss(gate_up: str, down: str, **options: Any) -> r.Rules:
    """Rows of gate and up alternate in one tensor; both have biases, and attention has sinks."""
    both: dict[str, Any] = {"slices": "experts", "parts": r.GATE_AND_UP, "groups": "expert"}
    at = f"{r.MLP}experts."
    return (
        r.layer(T.SINKS, f"{r.AT}self_attn.sinks", "heads"),
        r.expert(T.FFN_GATE, f"{at}{gate_up}", "expert", "hidden", part=0, **both, **options),
        r.expert(T.FFN_UP, f"{at}{gate_up}", "expert", "hidden", part=1, **both, **options),
        r.expert(T.FFN_DOWN, f"{at}{down}", "hidden", "expert", slices="experts", **options),
        r.expert(T.FFN_GATE_BIAS, f"{at}gate_up_proj_bias", "expert", part=0, **both),
        r.expert(T.FFN_UP_BIAS, f"{at}gate_up_proj_bias", "expert", part=1, **both),
        r.expert(T.FFN_DOWN_BIAS, f"{at}down_proj_bias", "hidden", slices="experts"),
    )


def _gpt_oss_of_gguf() -> r.Rules:
    at = f"{r.MLP}experts."
    return (
        r.layer(T.SINKS, f"{r.AT}self_attn.sinks.weight", "heads"),
        *r.of_gguf(),
        r.expert(T.FFN_GATE_BIAS, f"{at}gate_proj.bias", "expert", slices="experts"),
        r.expert(T.FFN_UP_BIAS, f"{at}up_proj.bias", "expert", slices="experts"),
        r.expert(T.FFN_DOWN_BIAS, f"{at}down_proj.bias", "hidden", slices="experts"),
    )


# ---- configurations ----


def route(draft: Draft, layers: Collection[int], **routing: Any) -> None:
    """Give ``layers`` experts, and set the widths of all layers' parts."""
    config, dense_dim = draft.config, draft.dims["ffn"]
    n_experts = config.count("num_experts", MAX_LAYER_EXPERTS)
    n_chosen = config.count("num_experts_per_tok", MAX_CHOSEN)
    if n_chosen > n_experts:
        raise config.error("num_experts_per_tok", f"= {n_chosen}, there are {n_experts} experts")
    expert_dim = draft.dims["expert"]
    shared_dim = draft.dims.setdefault("shared", 0)
    others = [kind.ffn for i, kind in enumerate(draft.layers) if i not in layers]
    has_dense = any(ffn != Ffn.NONE for ffn in others)
    largest = max(expert_dim, shared_dim, dense_dim if has_dense else 0)
    draft.header = replace(draft.header, ffn_dim=largest)
    draft.dims |= {"experts": n_experts, "one": 1}
    if shared_dim:
        draft.flags.add("shared")
    for i, kind in enumerate(draft.layers):
        if i not in layers:
            draft.layers[i] = replace(kind, ffn_dim=dense_dim if kind.ffn else largest)
            continue
        draft.layers[i] = replace(
            kind,
            ffn=kind.ffn if shared_dim else Ffn.NONE,
            ffn_dim=shared_dim or largest,
            n_experts=n_experts,
            n_chosen=n_chosen,
            expert_dim=expert_dim,
            **routing,
        )


def by_sum(config: Config) -> ExpertWeights:
    is_divided = config.boolean("norm_topk_prob")
    return ExpertWeights.BY_SUM if is_divided else ExpertWeights.AS_IS


def route_all(draft: Draft, **routing: Any) -> None:
    """Every layer has experts as wide as ``intermediate_size``, and no other part."""
    draft.dims["expert"] = draft.dims["ffn"]
    route(draft, range(draft.header.n_layers), **routing)


def _olmoe(draft: Draft) -> None:
    route_all(draft, expert_weights=by_sum(draft.config))


def _qwen_moe(draft: Draft) -> None:
    config, n_layers = draft.config, draft.header.n_layers
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise config.error("mlp_only_layers", f"= {shown(dense)} is not a list of layers")
    step = config.count("decoder_sparse_step", MAX_LAYERS)
    layers = [i for i in range(n_layers) if i not in dense and (i + 1) % step == 0]
    if not layers:
        raise config.error("decoder_sparse_step", f"= {step}: no layer has experts")
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    config.get("max_window_layers")  # without windows it has no meaning
    route(draft, layers, expert_weights=by_sum(config))


def qwen2_moe(draft: Draft) -> None:
    """Experts and a shared expert, in the layers selected by ``decoder_sparse_step``."""
    draft.dims["shared"] = draft.config.count("shared_expert_intermediate_size", MAX_FFN_DIM)
    _qwen_moe(draft)


def _ernie(draft: Draft) -> None:
    config, n_layers = draft.config, draft.header.n_layers
    start, end = (_layer_number(config, f"moe_layer_{name}_index") for name in ("start", "end"))
    interval = config.count("moe_layer_interval", MAX_LAYERS)
    last = n_layers - 1 if end == -1 else end
    layers = [i for i in range(n_layers) if start <= i <= last and (i + 1) % interval == 0]
    if not layers:
        raise config.error("moe_layer_interval", f"= {interval}: no layer has experts")
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    config.get("moe_capacity")  # for training
    n_shared = config.get("moe_num_shared_experts")
    if n_shared:
        n_shared = config.count("moe_num_shared_experts", MAX_LAYER_EXPERTS)
        draft.dims["shared"] = n_shared * draft.dims["expert"]
    route(
        draft,
        layers,
        expert_weights=ExpertWeights.BY_SUM,
        weights_epsilon=config.positive("moe_norm_min"),
    )


def _layer_number(config: Config, name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not -1 <= value < MAX_LAYERS:
        raise config.error(name, f"= {shown(value)} is not the number of a layer")
    return value


def _gpt_oss(draft: Draft) -> None:
    if draft.header.activation != Activation.SILU:
        raise draft.config.error("hidden_act", "is not supported; supported: silu")
    draft.header = replace(draft.header, activation=Activation.SILU_CLAMPED)
    draft.set_all(activation=Activation.SILU_CLAMPED)
    route_all(draft, expert_score=ExpertScore.LOGIT, expert_weights=ExpertWeights.SOFTMAX)


EXPERT_RENAMES = {"norm_epsilon": "rms_norm_eps", "num_experts": "num_local_experts"}
_QWEN3_MOE_RULES = (*r.pre_norms(), *r.ATTENTION, *r.qk_norms(), *r.DENSE, r.ROUTER, *r.ENDS)

_mixture = functools.partial(Family, layouts=r.LAYOUTS, renames=EXPERT_RENAMES)

# ---- GGUF files ----

GGUF_ROUTED = (*EXPERTS, "moe_intermediate_size")


def _gguf_qwen(_fields: Fields, shapes: gguf.Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    routed = {name.split(".")[1] for name in shapes if ".ffn_gate_inp." in name}
    layers = range(config["num_hidden_layers"])
    return {"mlp_only_layers": [i for i in layers if str(i) not in routed]}


_GGUF_ERNIE = Gguf(
    "ernie4_5-moe",
    needs=(*GGUF_ROUTED, "moe_layer_interval", "moe_layer_start_index"),
    may=("moe_num_shared_experts",),
    keys={
        "moe_layer_interval": "interleave_moe_layer_step",
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_num_shared_experts": "expert_shared_count",
    },
    # Some models state a wrong width in the metadata; the shapes of the tensors are right.
    ignores=("expert_shared_feed_forward_length",),
)


# ---- a sigmoid with a selection bias, and groups of experts: GLM-4.5 and its heirs ----


def grouped(draft: Draft, *, has_groups: bool = True, **routing: Any) -> None:
    """Experts in all but the first layers, with shared ones; ``routing`` differs from GLM's."""
    config, n_layers = draft.config, draft.header.n_layers
    n_dense = draft.dims.get("dense layers", config.get("first_k_dense_replace"))
    if type(n_dense) is not int or not 0 <= n_dense < n_layers:
        raise config.error("first_k_dense_replace", f"= {shown(n_dense)}: no layer has experts")
    draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
    n_shared = config.count("n_shared_experts", MAX_LAYER_EXPERTS)
    draft.dims["shared"] = n_shared * draft.dims["expert"]
    route(draft, range(n_dense, n_layers), **(by_groups(config, has_groups=has_groups) | routing))
    if "use_qk_norm" in draft.flags:
        draft.set_all(qk_norm=QkNorm.PER_HEAD)


def by_groups(config: Config, *, has_groups: bool = True) -> dict[str, Any]:
    n_groups = config.count("n_group", MAX_LAYER_EXPERTS) if has_groups else 1
    kept = config.count("topk_group", n_groups) if has_groups else 1
    weights = by_sum(config)
    return {
        "expert_score": ExpertScore.SIGMOID,
        "expert_weights": weights,
        "weights_epsilon": 1e-20 if weights == ExpertWeights.BY_SUM else 0.0,
        "weights_factor": config.positive("routed_scaling_factor"),
        "n_groups": n_groups,
        "n_groups_kept": kept,
        "group_score": GroupScore.TWO_LARGEST if n_groups > 1 else GroupScore.LARGEST,
    }


_BIASES = ("gate.e_score_correction_bias", "gate.e_score_correction_bias", "gate.selection.bias")
SELECTED = tuple(
    (r.selection_bias(f"{r.MLP}{name}"), *rules)
    for name, rules in zip(_BIASES, r.LAYOUTS, strict=True)
)
RENAMES = {**EXPERT_RENAMES, "num_experts": "n_routed_experts"}
_FFN = (*r.DENSE, r.ROUTER, *r.SHARED, *r.ENDS)

_GGUF_NEEDS = (*GGUF_ROUTED, "first_k_dense_replace")
_GGUF_MAY = (*gguf.EXPERT_WEIGHTS, *gguf.EXPERT_GROUPS, "n_shared_experts")


def _rope_of_minimax(config: Config, layer_type: str) -> Config:
    """Its published files say how many dimensions of a head are rotated."""
    stated, n_dims = parameters_of(config, layer_type), config.get("rotary_dim")
    if n_dims is None or "partial_rotary_factor" in stated:
        return stated
    return Config({**stated, "rotary_dims": n_dims})


# ---- HunYuan, whose norms of queries and keys are behind RoPE ----


def _rope(config: Config, layer_type: str) -> Config:
    """A fixed alpha stretches the base, whatever kind of scaling is named."""
    stated = parameters_of(config, layer_type)
    if not stated.get("alpha"):
        return stated
    if stated.positive("alpha") > 1e9:
        raise stated.error("alpha", f"= {shown(stated['alpha'])} is above 10^9")
    heads = config.get("num_attention_heads") or 1
    dim = config.get("head_dim") or (config.get("hidden_size") or 0) // heads
    theta = stated.positive("rope_theta", 10000.0)
    return Config({"rope_theta": theta * stated.positive("alpha") ** (dim / max(1, dim - 2))})


def _common(config: Config, name: str) -> Any:
    """The value of a key that may be a list of the same for each layer."""
    value = config.get(name)
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise config.error(name, f"= {shown(value)} differs between layers")
    return value[0]


def _moe(draft: Draft) -> None:
    """Experts and the part beside them are as wide as ``intermediate_size``."""
    config, dim = draft.config, draft.dims["ffn"]
    for name, allowed in (("moe_intermediate_size", (None, dim)), ("num_shared_expert", (None, 1))):
        if _common(config, name) not in allowed:
            raise config.error(name, f"= {shown(config[name])} is not {allowed[1]}")
    counts = {name: _common(config, name) for name in ("num_experts", "num_experts_per_tok")}
    draft.config = Config({**config, **counts})
    draft.dims |= {"expert": dim, "shared": dim}
    route(draft, range(draft.header.n_layers), expert_weights=ExpertWeights.BY_SUM)


_RULES = (
    *r.pre_norms(),
    *r.ATTENTION,
    *r.norm(T.Q_NORM, f"{r.ATTN}query_layernorm", "head"),
    *r.norm(T.K_NORM, f"{r.ATTN}key_layernorm", "head"),
)
_COMMON: Mapping[str, Any] = {
    "flags": {"attention_bias": False},
    "kind": {"qk_norm": QkNorm.PER_HEAD, "has_late_qk_norm": 1},
    "rope_parameters": _rope,
    # Keys of the published files that say nothing of the text's computation.
    "ignored_keys": "(vit|org|im|text|anyres|mask|max_image)_.*"
    "|(pad_id|dense_list|class_num|num_media).*",
    "neutral": {
        "attention_head_dim": (64, 128),  # head_dim says it
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "cla_share_factor": range(64),
        "norm_type": ("rms", "hf_rms"),
        "pool_type": "last",
    },
}
# Of training, and how the published code splits the same computation.
_OF_MOE: Mapping[str, Any] = {
    "use_mixed_mlp_moe": True,
    "norm_topk_prob": True,
    "moe_layer_num_skipped": 0,
    "capacity_factor": 1.0,
}


FAMILIES = (
    _mixture(
        name="OlmoeForCausalLM",
        title="OLMoE",
        gguf=Gguf("olmoe", needs=EXPERTS),
        rules=(*r.pre_norms(), *r.ATTENTION, *r.qk_norms("q", "kv"), r.ROUTER, *r.ENDS),
        adjust=_olmoe,
    ),
    _mixture(
        name="Qwen2MoeForCausalLM",
        title="Qwen 1.5, 2 MoE",
        gguf=Gguf(
            "qwen2moe", needs=(*GGUF_ROUTED, "shared_expert_intermediate_size"), more=_gguf_qwen
        ),
        rules=(
            *r.pre_norms(),
            *r.qkv(bias="qkv_bias"),
            *r.out(),
            *r.DENSE,
            r.ROUTER,
            *r.SHARED_EXPERT,
            *r.ENDS,
        ),
        layouts=r.with_shared_gate(),
        defaults={"num_key_value_heads": 16},
        flags={"qkv_bias": True},
        adjust=qwen2_moe,
    ),
    _mixture(
        name="Qwen3MoeForCausalLM",
        title="Qwen 3 MoE (30B-A3B, Coder)",
        gguf=Gguf(
            "qwen3moe", needs=GGUF_ROUTED, constants={"norm_topk_prob": True}, more=_gguf_qwen
        ),
        rules=_QWEN3_MOE_RULES,
        neutral={"use_qk_norm": True},
        adjust=_qwen_moe,
    ),
    _mixture(
        name="Qwen3VLMoeTextForCausalLM",
        title="Qwen 3 VL MoE (30B-A3B), text",
        model_type="qwen3_vl_moe_text",
        gguf=Gguf("qwen3vlmoe", needs=GGUF_ROUTED, more=_gguf_qwen, ignores=VISION_KEYS),
        nested=("Qwen3VLMoeForConditionalGeneration",),
        rules=_QWEN3_MOE_RULES,
        layouts=(*r.LAYOUTS[:2], _TRANSPOSED, r.LAYOUTS[2]),
        defaults={
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
            "head_dim": 128,
            "num_key_value_heads": 16,
        },
        adjust=_qwen_moe,
    ),
    _mixture(
        name="MixtralForCausalLM",
        title="Mixtral",
        rules=(*r.pre_norms(), *r.attention(), *r.ENDS),
        layouts=(
            (r.router(f"{r.SPARSE}gate.weight"), *r.one_each(r.SPARSE, "w1", "w3", "w2")),
            *((r.ROUTER, *rules) for rules in r.LAYOUTS),
        ),
        windows=family.window_of_all,
        adjust=functools.partial(route_all, expert_weights=ExpertWeights.BY_SUM),
    ),
    _mixture(
        name="GptOssForCausalLM",
        title="gpt-oss",
        gguf=Gguf(
            "gpt-oss",
            needs=(*EXPERTS, "sliding_window"),
            keys={"intermediate_size": KEYS["moe_intermediate_size"]},
            yarn={"truncate": False},
            more=windows(2),
        ),
        rules=(
            *r.pre_norms(),
            *r.ATTENTION,
            r.router(f"{r.MLP}router.weight"),
            r.layer(T.ROUTER_BIAS, f"{r.MLP}router.bias", "experts", where=Where.ROUTED),
            *r.ENDS,
        ),
        layouts=(
            _of_gpt_oss("gate_up_proj_blocks", "down_proj_blocks"),  # of MXFP4
            _of_gpt_oss("gate_up_proj", "down_proj", transposed=True),
            _gpt_oss_of_gguf(),
        ),
        defaults={"sliding_window_pattern": 2},
        flags={"attention_bias": True},
        windows=family.window_but_every,
        neutral={
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            # Other names of keys that are read by their usual names.
            "experts_per_token": 4,
            "initial_context_length": 4096,
        },
        adjust=_gpt_oss,
    ),
    _mixture(
        name="Ernie4_5_MoeForCausalLM",
        title="ERNIE 4.5 MoE",
        gguf=_GGUF_ERNIE,
        is_interleaved=True,
        rules=(*r.pre_norms(), *r.attention(), *r.DENSE, r.ROUTER, *r.SHARED, *r.ENDS),
        layouts=(
            (
                r.selection_bias(f"{r.MLP}moe_statics.e_score_correction_bias", slices="one"),
                *r.LAYOUTS[0],
            ),
            (
                r.selection_bias(f"{r.MLP}gate.moe_statics.e_score_correction_bias", slices="one"),
                *r.LAYOUTS[1],
            ),
            (r.selection_bias(f"{r.MLP}gate.selection.bias"), *r.LAYOUTS[2]),
        ),
        renames={
            **EXPERT_RENAMES,
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
        },
        neutral={
            "use_rmsnorm": True,
            "moe_gate": "topk",
            "moe_gate_act": "softmax",
            "moe_use_aux_free": True,  # all have a selection bias
        },
        adjust=_ernie,
    ),
    Family(
        name="Glm4MoeForCausalLM",
        title="GLM-4.5, 4.6",
        gguf=gguf.Gguf("glm4moe", needs=_GGUF_NEEDS, may=_GGUF_MAY, neutral=gguf.SIGMOID),
        has_partial_rope=True,
        rules=(
            *r.pre_norms(),
            *r.qkv(bias="attention_bias"),
            *(replace(rule, flag="use_qk_norm") for rule in r.qk_norms()),
            *r.out(),
            *_FFN,
            *r.mtp_rules(),
        ),
        layouts=SELECTED,
        renames=RENAMES,
        flags={"attention_bias": False, "use_qk_norm": False},
        adjust=grouped,
    ),
    Family(
        name="SolarOpenForCausalLM",
        title="Solar Open",
        rules=(*r.pre_norms(), *r.ATTENTION, *_FFN),
        layouts=SELECTED,
        renames=RENAMES,
        defaults={"first_k_dense_replace": 0, "intermediate_size": 10240},
        adjust=grouped,
    ),
    Family(
        name="Dots1ForCausalLM",
        title="dots.llm1",
        gguf=gguf.Gguf(
            "dots1",
            needs=_GGUF_NEEDS,
            may=_GGUF_MAY,
            constants={"sliding_window": None},
            neutral=gguf.SIGMOID,
        ),
        rules=(*r.pre_norms(), *r.ATTENTION, *r.qk_norms(), *_FFN),
        layouts=SELECTED,
        renames=RENAMES,
        defaults={"n_shared_experts": 1},
        neutral={"max_window_layers": range(4097)},
        adjust=grouped,
    ),
    Family(
        name="MiniMaxM2ForCausalLM",
        title="MiniMax-M2",
        model_type="minimax_m2",
        gguf=gguf.Gguf(
            "minimax-m2",
            needs=gguf.EXPERTS,
            neutral=gguf.SIGMOID,
            ignores=("expert_feed_forward_length",),
        ),
        has_partial_rope=True,
        rope_parameters=_rope_of_minimax,
        rules=(*r.pre_norms(), *r.attention(), *r.qk_norms("q", "kv"), *r.ENDS),
        layouts=(
            (
                r.router(f"{r.SPARSE}gate.weight"),
                r.selection_bias(f"{r.SPARSE}e_score_correction_bias"),
                *r.one_each(r.SPARSE, "w1", "w3", "w2"),
            ),
            (r.ROUTER, r.selection_bias(f"{r.MLP}e_score_correction_bias"), *r.LAYOUTS[1]),
            (r.ROUTER, r.selection_bias(f"{r.MLP}gate.selection.bias"), *r.LAYOUTS[2]),
        ),
        renames=EXPERT_RENAMES,
        neutral={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        adjust=functools.partial(
            route_all, expert_score=ExpertScore.SIGMOID, expert_weights=ExpertWeights.BY_SUM
        ),
    ),
    Family(
        name="HunYuanDenseV1ForCausalLM",
        title="HunYuan (0.5B to 7B)",
        model_type="hunyuan_v1_dense",
        gguf=gguf.Gguf("hunyuan-dense"),
        rules=(*_RULES, *r.gated(), *r.ENDS),
        **_COMMON,
    ),
    Family(
        name="HunYuanMoEV1ForCausalLM",
        title="HunYuan MoE (A13B)",
        model_type="hunyuan_v1_moe",
        gguf=gguf.Gguf(
            "hunyuan-moe",
            needs=gguf.EXPERTS,
            ignores=(
                "expert_shared_count",
                "expert_feed_forward_length",
                "expert_shared_feed_forward_length",
            ),
        ),
        rules=(
            *_RULES,
            *r.gated(f"{r.MLP}shared_mlp.", "shared", where=Where.ROUTED),
            r.router(f"{r.MLP}gate.wg.weight"),
            *r.ENDS,
        ),
        layouts=r.LAYOUTS,
        renames={"norm_epsilon": "rms_norm_eps", "num_experts_per_tok": "moe_topk"},
        adjust=_moe,
        **{
            **_COMMON,
            "neutral": {**_COMMON["neutral"], **_OF_MOE},
        },
    ),
)
