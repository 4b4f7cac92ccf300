"""Families with factors on embedding, residuals, scores and logits: Granite, HyperCLOVA X."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ROPE_NONE, ExpertScore, ExpertWeights
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.families.experts import (
    EXPERT_DEFAULTS,
    EXPERT_RENAMES,
    ROUTER,
    SPARSE,
    in_one,
    of_gguf,
    route_all,
    router,
)
from qsf_converter.sources.families.family import FULL, Draft, Family
from qsf_converter.sources.families.llama import (
    AT,
    BIASES,
    DEFAULTS,
    ENDS,
    LLAMA_RULES,
    MLP,
    Rules,
    fused,
    gated,
    out,
    pre_norms,
    qkv,
)
from qsf_converter.sources.families.rules import T, Where, ends, linear, norm


def _factors(draft: Draft) -> None:
    config = draft.config
    draft.arch = replace(draft.arch, embedding_factor=config.positive("embedding_multiplier"))
    draft.set_all(residual_factor=config.positive("residual_multiplier"))
    if config.get("attention_multiplier") is not None:
        draft.set_all(score_scale=config.positive("attention_multiplier"))


def _granite(draft: Draft) -> None:
    _factors(draft)
    draft.factors["logits"] = 1 / draft.config.positive("logits_scaling")


def _hyperclova(draft: Draft) -> None:
    _factors(draft)
    draft.factors["logits"] = draft.config.positive("logits_scaling")


def _granite_moe(draft: Draft) -> None:
    _granite(draft)
    route_all(draft, expert_score=ExpertScore.LOGIT, expert_weights=ExpertWeights.SOFTMAX)


def _granite_shared(draft: Draft) -> None:
    if draft.config.get("shared_intermediate_size"):
        draft.dims["shared"] = draft.config.count("shared_intermediate_size", MAX_FFN_DIM)
    _granite_moe(draft)


def _granite_hybrid(draft: Draft) -> None:
    """Granite 4 without recurrent layers: the shared FFN is the only FFN."""
    config = draft.config
    if config.get("num_local_experts"):
        raise config.error("num_local_experts", "with a hybrid's layers is not supported")
    for name in config:
        if name.startswith(("mamba_", "time_step_")) or name == "num_experts_per_tok":
            config.get(name)  # has no meaning without recurrent layers
    _granite(draft)
    if config.get("position_embedding_type") != "rope":
        draft.set_all(rope_set=ROPE_NONE)
    ffn_dim = config.count("shared_intermediate_size", MAX_FFN_DIM)
    draft.dims["ffn"] = ffn_dim
    draft.header = replace(draft.header, ffn_dim=ffn_dim)
    draft.set_all(ffn_dim=ffn_dim)


def _attention_only(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Refuse recurrent layers; no layer has a window."""
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None or set(types) - {"attention", FULL}:
        raise config.error("layer_types", f"= {shown(types)}: recurrent layers are not supported")
    return 0, [FULL] * n_layers


def _shared_ffn(dim: str, **options: Any) -> Rules:
    return (
        *fused(
            {T.FFN_GATE: None, T.FFN_UP: None},
            f"{AT}shared_mlp.input_linear",
            (dim, dim),
            **options,
        ),
        *linear(T.FFN_DOWN, None, f"{AT}shared_mlp.output_linear", "hidden", dim, **options),
    )


_FACTORS = {
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_SCALED_ENDS = ends("embed_tokens", "norm", scale="logits")
_ATTENTION = (*pre_norms(), *qkv(bias="attention_bias"), *out(bias="attention_bias"))
_MOE_LAYOUTS = (
    (
        router(f"{SPARSE}router.layer.weight"),
        *in_one(f"{SPARSE}input_linear.weight", f"{SPARSE}output_linear.weight"),
    ),
    (
        router(f"{SPARSE}router.weight"),
        *in_one(f"{SPARSE}experts.gate_up_proj", f"{SPARSE}experts.down_proj"),
    ),
    (ROUTER, *of_gguf()),
)
_SHARED: Mapping[str, Any] = {"where": Where.ROUTED, "flag": "shared"}
_MOE_DEFAULTS = {**EXPERT_DEFAULTS, **_FACTORS, "num_experts": 8, "num_experts_per_tok": 2}

FAMILIES = (
    Family(
        name="GraniteForCausalLM",
        title="Granite 3",
        model_type="granite",
        rules=(*LLAMA_RULES[: -len(ENDS)], *_SCALED_ENDS),
        defaults={**DEFAULTS, **_FACTORS},
        flags=BIASES,
        adjust=_granite,
    ),
    Family(
        name="GraniteMoeHybridForCausalLM",
        title="Granite 4 without Mamba (350M, 1B, micro)",
        model_type="granitemoehybrid",
        rules=(*_ATTENTION, *_shared_ffn("ffn"), *_SCALED_ENDS),
        defaults={**DEFAULTS, **_FACTORS, "shared_intermediate_size": 1024},
        flags={"attention_bias": False},
        windows=_attention_only,
        neutral={"normalization_function": ("rmsnorm",)},
        adjust=_granite_hybrid,
    ),
    Family(
        name="GraniteMoeForCausalLM",
        title="Granite 3 MoE",
        model_type="granitemoe",
        rules=(*_ATTENTION, *_SCALED_ENDS),
        layouts=_MOE_LAYOUTS,
        renames=EXPERT_RENAMES,
        defaults=_MOE_DEFAULTS,
        flags={"attention_bias": False},
        adjust=_granite_moe,
    ),
    Family(
        name="GraniteMoeSharedForCausalLM",
        title="Granite MoE with a shared expert",
        model_type="granitemoeshared",
        rules=(*_ATTENTION, *_SCALED_ENDS),
        layouts=(
            *((*rules, *_shared_ffn("shared", **_SHARED)) for rules in _MOE_LAYOUTS[:2]),
            (*_MOE_LAYOUTS[2], *gated(f"{MLP}shared.", "shared", **_SHARED)),
        ),
        renames=EXPERT_RENAMES,
        defaults=_MOE_DEFAULTS,
        flags={"attention_bias": False},
        adjust=_granite_shared,
    ),
    Family(
        name="HyperCLOVAXForCausalLM",
        title="HyperCLOVA X SEED",
        model_type="hyperclovax",
        rules=(
            *LLAMA_RULES[: -len(ENDS)],
            *norm(T.POST_ATTN_NORM, f"{AT}post_norm1", flag="use_post_norm"),
            *norm(T.POST_FFN_NORM, f"{AT}post_norm2", flag="use_post_norm"),
            *_SCALED_ENDS,
        ),
        # Without the key, scores are divided by the root of the head size.
        defaults={**DEFAULTS, **_FACTORS, "attention_multiplier": None},
        flags={**BIASES, "use_post_norm": True},
        adjust=_hyperclova,
    ),
)
