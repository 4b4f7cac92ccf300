"""Families with factors on embedding, residuals, scores and logits: Granite, HyperCLOVA X."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ROPE_NONE, ExpertScore, ExpertWeights
from qsf_converter.sources.families import family, hybrids
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.families.delta import LINEAR
from qsf_converter.sources.families.experts import EXPERT_RENAMES, route_all
from qsf_converter.sources.families.family import FULL, Draft, Family
from qsf_converter.sources.families.gguf import EXPERTS, Fields, Gguf, Shapes
from qsf_converter.sources.families.positions import parameters_of, rope_of
from qsf_converter.sources.families.rules import T, Where


def _factors(draft: Draft) -> None:
    config = draft.config
    draft.arch = replace(draft.arch, embedding_factor=config.positive("embedding_multiplier"))
    draft.set_all(residual_factor=config.positive("residual_multiplier"))
    if config.get("attention_multiplier") is not None:
        draft.set_all(score_scale=config.positive("attention_multiplier"))


def _granite(draft: Draft) -> None:
    _factors(draft)
    draft.factors["logits"] = 1 / draft.config.positive("logits_scaling")


def _granite_windows(draft: Draft) -> None:
    """Each layer may have a theta of its own; one of 0 has no RoPE."""
    _granite(draft)
    thetas = draft.config.get("layer_rope_theta")
    if thetas is None:
        return
    header, stated = draft.header, parameters_of(draft.config, FULL)
    if not isinstance(thetas, list) or len(thetas) != header.n_layers:
        raise draft.config.error(
            "layer_rope_theta", f"= {shown(thetas)} is not a list for {header.n_layers} layers"
        )
    draft.layer_types = [f"theta {theta}" for theta in thetas]
    draft.unrotate([i for i, theta in enumerate(thetas) if theta == 0])
    draft.ropes = {
        f"theta {theta}": rope_of(
            Config({**stated, "rope_theta": theta}, where="layer_rope_theta."),
            header.head_dim,
            header.max_tokens,
            is_interleaved=False,
            may_be_partial=False,
        )
        for theta in thetas
        if theta != 0
    } or {f"theta {thetas[0]}": next(iter(draft.ropes.values()))}


def _granite_moe_windows(draft: Draft) -> None:
    _granite_shared(draft)
    _granite_windows(draft)


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
    """Granite 4: a shared FFN in each layer, beside experts or alone, and states of Mamba-2."""
    config = draft.config
    states = [i for i, type_ in enumerate(draft.layer_types) if type_ != FULL]
    for name in config if not states else ():
        if name.startswith(("mamba_", "time_step_")):
            config.get(name)  # read, because it says nothing where no layer is recurrent
    if config.get("num_local_experts"):
        _granite_shared(draft)
    else:
        config.get("num_experts_per_tok")
        _granite(draft)
        ffn_dim = config.count("shared_intermediate_size", MAX_FFN_DIM)
        draft.dims["ffn"] = draft.dims["shared"] = ffn_dim
        draft.header = replace(draft.header, ffn_dim=ffn_dim)
        draft.set_all(ffn_dim=ffn_dim)
    if config.get("position_embedding_type") != "rope":
        draft.set_all(rope_set=ROPE_NONE)
    if states:
        hybrids.ssd_layers(draft, states)


def _hybrid_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """All layers have states of Mamba-2 where nothing is said; there are no windows."""
    name = "layers_block_type" if config.get("layers_block_type") else "layer_types"
    types = config.of_layers(name, n_layers, ("attention", FULL, "mamba", LINEAR))
    return 0, [
        FULL if type_ in ("attention", FULL) else LINEAR for type_ in types or [LINEAR] * n_layers
    ]


def _shared_ffn(dim: str, **options: Any) -> r.Rules:
    return (
        *r.fused(
            {T.FFN_GATE: None, T.FFN_UP: None},
            f"{r.AT}shared_mlp.input_linear",
            (dim, dim),
            **options,
        ),
        *r.linear(T.FFN_DOWN, None, f"{r.AT}shared_mlp.output_linear", "hidden", dim, **options),
    )


_SCALED_ENDS = r.ends("embed_tokens", "norm", scale="logits")
_ATTENTION = (*r.pre_norms(), *r.ATTENTION)
_SINKS = r.layer(T.SINKS, f"{r.AT}self_attn.sinks", "heads")
_MOE_LAYOUTS = (
    (
        r.router(f"{r.SPARSE}router.layer.weight"),
        *r.in_one(f"{r.SPARSE}input_linear.weight", f"{r.SPARSE}output_linear.weight"),
    ),
    (
        r.router(f"{r.SPARSE}router.weight"),
        *r.in_one(f"{r.SPARSE}experts.gate_up_proj", f"{r.SPARSE}experts.down_proj"),
    ),
    (r.ROUTER, *r.of_gguf()),
)
_SHARED: Mapping[str, Any] = {"where": Where.ROUTED, "flag": "shared"}
_AT_SSD = f"{r.AT}mamba."
_HYBRID = (
    *r.pre_norms(),
    *r.attention(bias="attention_bias", where=Where.ATTENTION),
    *hybrids.ssd_rules(_AT_SSD),
    *_SCALED_ENDS,
)

_shared_family = functools.partial(
    Family,
    layouts=(
        *((*rules, *_shared_ffn("shared", **_SHARED)) for rules in _MOE_LAYOUTS[:2]),
        (*_MOE_LAYOUTS[2], *r.gated(f"{r.MLP}shared.", "shared", **_SHARED)),
    ),
    renames=EXPERT_RENAMES,
)

# ---- GGUF files ----


def _gguf_moe(_fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    is_shared = config.get("shared_intermediate_size")
    return {"architectures": ["GraniteMoeSharedForCausalLM"]} if is_shared else {}


def _gguf_hybrid(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE shows in a field of something else; Bamba has it, with states and no scale."""
    layers = range(config["num_hidden_layers"])
    states = [f"blk.{i}.ssm_a" in shapes for i in layers]
    has_rope = fields.get("rope.scaling.finetuned")
    common = hybrids.gguf_common(fields, shapes, config)
    if has_rope and any(states) and "attention_multiplier" not in config:
        listed = [i for i in layers if not states[i]]
        return {"architectures": ["BambaForCausalLM"], **common, "attn_layer_indices": listed}
    width = config.get("shared_intermediate_size") or config["intermediate_size"]
    return {
        **common,
        "layer_types": ["mamba" if has_state else "attention" for has_state in states],
        "position_embedding_type": "rope" if has_rope else None,
        "num_local_experts": config.get("num_experts") or 0,
        "shared_intermediate_size": width,
    }


_GGUF_MAY = ("embedding_multiplier", "residual_multiplier", "attention_multiplier",
             "logits_scaling")  # fmt: skip


FAMILIES = (
    Family(
        name="GraniteForCausalLM",
        title="Granite 3",
        gguf=Gguf("granite", may=_GGUF_MAY, is_permuted=True),
        rules=(*r.LLAMA_RULES[: -len(r.ENDS)], *_SCALED_ENDS),
        adjust=_granite,
    ),
    Family(
        name="GraniteSWAForCausalLM",
        title="Granite with windows",
        rules=(*r.LLAMA_RULES[: -len(r.ENDS)], _SINKS, *_SCALED_ENDS),
        windows=family.window_but_first_of_four,
        adjust=_granite_windows,
    ),
    Family(
        name="GraniteMoeHybridForCausalLM",
        title="Granite 4, 4 H (350M to 32B-A9B)",
        model_type="granitemoehybrid",
        gguf=Gguf(
            "granitehybrid",
            needs=hybrids.GGUF_SIZES,
            may=(*_GGUF_MAY, *EXPERTS, "shared_intermediate_size"),
            is_permuted=True,
            more=_gguf_hybrid,
            ignores=hybrids.GGUF_IGNORES,
            lists=("attention.head_count_kv",),
            others=("BambaForCausalLM",),
        ),
        rules=_HYBRID,
        layouts=hybrids.with_layouts(
            hybrids.ssd_layouts(_AT_SSD),
            (
                *((*rules, *_shared_ffn("shared")) for rules in _MOE_LAYOUTS[:2]),
                (*_MOE_LAYOUTS[2], *r.gated(f"{r.MLP}shared.", "shared")),
            ),
        ),
        renames=EXPERT_RENAMES,
        flags={"attention_bias": False, **hybrids.SSD_FLAGS},
        windows=_hybrid_types,
        neutral={"normalization_function": "rmsnorm", **hybrids.SSD_NEUTRAL},
        adjust=_granite_hybrid,
    ),
    Family(
        name="GraniteMoeForCausalLM",
        title="Granite 3 MoE",
        model_type="granitemoe",
        gguf=Gguf(
            "granitemoe",
            needs=EXPERTS,
            may=(*_GGUF_MAY, "shared_intermediate_size"),
            is_permuted=True,
            more=_gguf_moe,
            others=("GraniteMoeSharedForCausalLM",),
        ),
        rules=(*_ATTENTION, *_SCALED_ENDS),
        layouts=_MOE_LAYOUTS,
        renames=EXPERT_RENAMES,
        adjust=_granite_moe,
    ),
    _shared_family(
        name="GraniteMoeSharedForCausalLM",
        title="Granite MoE with a shared expert",
        model_type="granitemoeshared",
        rules=(*_ATTENTION, *_SCALED_ENDS),
        adjust=_granite_shared,
    ),
    _shared_family(
        name="GraniteMoeSWAForCausalLM",
        title="Granite MoE with windows",
        model_type="granitemoe_swa",
        rules=(*_ATTENTION, _SINKS, *_SCALED_ENDS),
        windows=family.window_but_first_of_four,
        adjust=_granite_moe_windows,
    ),
    Family(
        name="HyperCLOVAXForCausalLM",
        title="HyperCLOVA X SEED",
        model_type="hyperclovax",
        rules=(
            *r.LLAMA_RULES[: -len(r.ENDS)],
            *r.norm(T.POST_ATTN_NORM, f"{r.AT}post_norm1", flag="use_post_norm"),
            *r.norm(T.POST_FFN_NORM, f"{r.AT}post_norm2", flag="use_post_norm"),
            *_SCALED_ENDS,
        ),
        # Without the key, scores are divided by the root of the head size.
        flags={**family.BIASES, "use_post_norm": True},
        adjust=_hyperclova,
    ),
)
