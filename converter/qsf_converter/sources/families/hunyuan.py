"""HunYuan, dense and with experts: the norms of queries and keys are behind RoPE."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ExpertWeights, QkNorm
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.experts import LAYOUTS, route, router
from qsf_converter.sources.families.family import Draft, Family, usual
from qsf_converter.sources.families.gguf import EXPERTS, Gguf
from qsf_converter.sources.families.llama import (
    ATTENTION,
    ATTN,
    DEFAULTS,
    ENDS,
    MLP,
    gated,
    pre_norms,
)
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import T, Where, norm


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
    "moe_drop_tokens": (True, False),
    "moe_random_routing_dropped_token": (True, False),
    "moe_layer_num_skipped": (0,),
    "group_limited_greedy": (False,),
    "capacity_factor": (1.0,),
}

FAMILIES = (
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
