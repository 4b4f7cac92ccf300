"""Mixtures whose router is a sigmoid with a selection bias: GLM-4.5 and its heirs, MiniMax-M2."""
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
    ENDS,
    MLP,
    attention,
    out,
    pre_norms,
    qk_norms,
    qkv,
)
from qsf_converter.sources.families.mtp import mtp_rules


def grouped(draft: Draft, *, has_groups: bool = True, **routing: Any) -> None:
    """Experts in all but the first layers, with shared experts; ``routing`` are the differences
    from GLM.
    """
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


FAMILIES = (
    Family(
        name="Glm4MoeForCausalLM",
        title="GLM-4.5, 4.6",
        model_type="glm4_moe",
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
        neutral={"num_nextn_predict_layers": (0, 1), "num_mtp_layers": (0, 1)},
        adjust=grouped,
    ),
    Family(
        name="SolarOpenForCausalLM",
        title="Solar Open",
        model_type="solar_open",
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
        flags={"attention_bias": False},
        neutral={"use_qk_norm": (None, False)},
        adjust=grouped,
    ),
    Family(
        name="Dots1ForCausalLM",
        title="dots.llm1",
        model_type="dots1",
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
        flags={"attention_bias": False},
        kind={"qk_norm": QkNorm.PER_HEAD},
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
        kind={"qk_norm": QkNorm.WHOLE_WIDTH},
        neutral={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            # Its heads for further tokens are not converted.
            "use_mtp": (True, False),
            "num_mtp_modules": (0, 1, 2, 3),
            "mtp_transformer_layers": (0, 1),
        },
        adjust=partial(
            route_all, expert_score=ExpertScore.SIGMOID, expert_weights=ExpertWeights.BY_SUM
        ),
    ),
)
