"""Mixtures whose router is a sigmoid with a selection bias: GLM-4.5 and its heirs, MiniMax-M2; and
HunYuan, dense and with experts, whose norms of queries and keys are behind RoPE.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ExpertScore, ExpertWeights, GroupScore, QkNorm
from qsf.file.layout import MAX_LAYER_EXPERTS
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.families.experts import (
    DENSE,
    EXPERT_DEFAULTS,
    EXPERT_RENAMES,
    GGUF_ROUTED,
    LAYOUTS,
    ROUTER,
    SHARED,
    SPARSE,
    by_sum,
    one_each,
    route,
    route_all,
    router,
    selection_bias,
)
from qsf_converter.sources.families.family import Draft, Family, usual
from qsf_converter.sources.families.gguf import (
    EXPERT_GROUPS,
    EXPERT_WEIGHTS,
    EXPERTS,
    Fields,
    Gguf,
    Shapes,
    only_sigmoid,
    own_layers,
)
from qsf_converter.sources.families.llama import (
    ATTENTION,
    ATTN,
    DEFAULTS,
    ENDS,
    MLP,
    attention,
    gated,
    out,
    pre_norms,
    qk_norms,
    qkv,
)
from qsf_converter.sources.families.mtp import mtp_rules
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import T, Where, norm


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
    (selection_bias(f"{MLP}{name}"), *rules) for name, rules in zip(_BIASES, LAYOUTS, strict=True)
)
RENAMES = {**EXPERT_RENAMES, "num_experts": "n_routed_experts"}
_DEFAULTS: Mapping[str, Any] = usual(
    EXPERT_DEFAULTS,
    expert_dim=1408,
    n_shared_experts=1,
    first_k_dense_replace=0,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
_FFN = (*DENSE, ROUTER, *SHARED, *ENDS)

_GGUF_NEEDS = (*GGUF_ROUTED, "first_k_dense_replace")
_GGUF_MAY = (*EXPERT_WEIGHTS, *EXPERT_GROUPS, "n_shared_experts")


def _gguf_glm4(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**only_sigmoid(fields, shapes, config), "num_hidden_layers": own_layers(fields, config)}


def _rope_of_minimax(config: Config, layer_type: str) -> Config:
    """Its published files say how many dimensions of a head are rotated."""
    stated, n_dims = parameters_of(config, layer_type), config.get("rotary_dim")
    if n_dims is None or "partial_rotary_factor" in stated:
        return stated
    return Config({**stated, "rotary_dims": n_dims})


_GROUPED_FAMILIES = (
    Family(
        name="Glm4MoeForCausalLM",
        title="GLM-4.5, 4.6",
        gguf={
            "glm4moe": Gguf(
                needs=_GGUF_NEEDS,
                may=_GGUF_MAY,
                more=_gguf_glm4,
                reads=("nextn_predict_layers", "expert_gating_func"),
            )
        },
        has_partial_rope=True,
        rules=(
            *pre_norms(),
            *qkv(bias="attention_bias"),
            *(replace(rule, flag="use_qk_norm") for rule in qk_norms()),
            *out(),
            *_FFN,
            *mtp_rules(),
        ),
        layouts=SELECTED,
        renames=RENAMES,
        defaults=usual(
            _DEFAULTS,
            context=131072,
            epsilon=1e-5,
            kv_heads=8,
            partial_rotary_factor=0.5,
            experts=128,
            chosen=8,
            first_k_dense_replace=1,
        ),
        flags={"attention_bias": False, "use_qk_norm": False},
        # Layers after the last one predict further tokens: the first of them is the MTP head.
        adjust=grouped,
    ),
    Family(
        name="SolarOpenForCausalLM",
        title="Solar Open",
        rules=(*pre_norms(), *ATTENTION, *_FFN),
        layouts=SELECTED,
        renames=RENAMES,
        defaults=usual(
            _DEFAULTS,
            context=131072,
            epsilon=1e-5,
            kv_heads=8,
            head=128,
            theta=1000000.0,
            experts=128,
            chosen=8,
            expert_dim=1280,
            intermediate_size=10240,
        ),
        neutral={"use_qk_norm": (None, False)},
        adjust=grouped,
    ),
    Family(
        name="Dots1ForCausalLM",
        title="dots.llm1",
        gguf={
            "dots1": Gguf(
                needs=_GGUF_NEEDS,
                may=_GGUF_MAY,
                constants={"sliding_window": None},
                more=only_sigmoid,
                reads=("expert_gating_func",),
            )
        },
        rules=(*pre_norms(), *ATTENTION, *qk_norms(), *_FFN),
        layouts=SELECTED,
        renames=RENAMES,
        defaults=usual(_DEFAULTS, context=2048, norm_topk_prob=False, window=4096),
        neutral={"max_window_layers": tuple(range(4097))},
        adjust=grouped,
    ),
    Family(
        name="MiniMaxM2ForCausalLM",
        title="MiniMax-M2",
        model_type="minimax_m2",
        gguf={
            "minimax-m2": Gguf(
                needs=EXPERTS,
                more=only_sigmoid,
                reads=("expert_gating_func", "expert_feed_forward_length"),
            )
        },
        has_partial_rope=True,
        rope_parameters=_rope_of_minimax,
        rules=(*pre_norms(), *attention(), *qk_norms("q", "kv"), *ENDS),
        layouts=(
            (
                router(f"{SPARSE}gate.weight"),
                selection_bias(f"{SPARSE}e_score_correction_bias"),
                *one_each(SPARSE, "w1", "w3", "w2"),
            ),
            (ROUTER, selection_bias(f"{MLP}e_score_correction_bias"), *LAYOUTS[1]),
            (ROUTER, selection_bias(f"{MLP}gate.selection.bias"), *LAYOUTS[2]),
        ),
        renames=EXPERT_RENAMES,
        defaults=usual(
            EXPERT_DEFAULTS,
            context=196608,
            kv_heads=8,
            head=128,
            theta=5000000.0,
            experts=256,
            chosen=8,
        ),
        neutral={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
        },
        adjust=partial(
            route_all, expert_score=ExpertScore.SIGMOID, expert_weights=ExpertWeights.BY_SUM
        ),
    ),
)


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


def _published(draft: Draft) -> None:
    """Keys of the published files that say nothing of the text's computation are read here."""
    for name in draft.config:
        if name.startswith(
            (
                "vit_",
                "org_",
                "pad_id",
                "dense_list",
                "class_num",
                "im_",
                "text_",
                "anyres_",
                "mask_",
                "max_image_",
                "num_media",
            )
        ):
            draft.config.get(name)


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
    _published(draft)
    for name, allowed in (("moe_intermediate_size", (None, dim)), ("num_shared_expert", (None, 1))):
        if _common(config, name) not in allowed:
            raise config.error(name, f"= {shown(config[name])} is not {allowed[1]}")
    counts = {name: _common(config, name) for name in ("num_experts", "num_experts_per_tok")}
    draft.config = Config({**config, **counts})
    draft.dims |= {"expert": dim, "shared": dim}
    route(draft, range(draft.header.n_layers), expert_weights=ExpertWeights.BY_SUM)


_RULES = (
    *pre_norms(),
    *ATTENTION,
    *norm(T.Q_NORM, f"{ATTN}query_layernorm", "head"),
    *norm(T.K_NORM, f"{ATTN}key_layernorm", "head"),
)
_COMMON: Mapping[str, Any] = {
    "defaults": usual(DEFAULTS, context=2048, epsilon=1e-5),
    "flags": {"attention_bias": False},
    "kind": {"qk_norm": QkNorm.PER_HEAD, "has_late_qk_norm": 1},
    "rope_parameters": _rope,
    "neutral": {
        "attention_head_dim": (64, 128),  # head_dim says it
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
        "use_cla": (None, False),
        "cla_share_factor": tuple(range(64)),
        "norm_type": ("rms", "hf_rms"),
        "mlp_bias": (None, False),
        "pool_type": ("last",),
        "add_classification_head": (None, False),
    },
}
# Of training, and how the published code splits the same computation.
_OF_MOE: Mapping[str, tuple[Any, ...]] = {
    "use_mixed_mlp_moe": (True,),
    "norm_topk_prob": (True,),
    "moe_layer_num_skipped": (0,),
    "group_limited_greedy": (False,),
    "capacity_factor": (1.0,),
}

_HUNYUAN_FAMILIES = (
    Family(
        name="HunYuanDenseV1ForCausalLM",
        title="HunYuan (0.5B to 7B)",
        model_type="hunyuan_v1_dense",
        gguf={"hunyuan-dense": Gguf()},
        rules=(*_RULES, *gated(), *ENDS),
        adjust=_published,
        **_COMMON,
    ),
    Family(
        name="HunYuanMoEV1ForCausalLM",
        title="HunYuan MoE (A13B)",
        model_type="hunyuan_v1_moe",
        gguf={
            "hunyuan-moe": Gguf(
                needs=EXPERTS,
                reads=(
                    "expert_shared_count",
                    "expert_feed_forward_length",
                    "expert_shared_feed_forward_length",
                ),
            )
        },
        rules=(
            *_RULES,
            *gated(f"{MLP}shared_mlp.", "shared", where=Where.ROUTED),
            router(f"{MLP}gate.wg.weight"),
            *ENDS,
        ),
        layouts=LAYOUTS,
        renames={"norm_epsilon": "rms_norm_eps", "num_experts_per_tok": "moe_topk"},
        adjust=_moe,
        **{
            **_COMMON,
            "defaults": usual(_COMMON["defaults"], experts=1, chosen=1),
            "neutral": {**_COMMON["neutral"], **_OF_MOE},
        },
    ),
)


FAMILIES = (*_GROUPED_FAMILIES, *_HUNYUAN_FAMILIES)
