"""Families with Mamba-2 (SSD), between attention, beside it, or alone; and all of Granite."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import shown
from qsf.file.kinds import (
    MAX_STATE_DIM,
    MAX_TAPS,
    ROPE_NONE,
    ExpertScore,
    ExpertWeights,
    Ffn,
    Mixer,
    QkNorm,
)
from qsf.file.layout import F32_MAX, MAX_HEADS, Activation
from qsf_converter.sources.families import family, gguf
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_DIM, MAX_FFN_DIM, MAX_LAYERS, Config
from qsf_converter.sources.families.delta import LINEAR
from qsf_converter.sources.families.experts import (
    EXPERT_RENAMES,
    GGUF_ROUTED,
    by_groups,
    route,
    route_all,
)
from qsf_converter.sources.families.family import FULL, Draft, Family
from qsf_converter.sources.families.gguf import EXPERTS, Fields, Gguf, Shapes, whole
from qsf_converter.sources.families.positions import parameters_of, rope_of
from qsf_converter.sources.families.rules import AT, ATTN, Rules, T, Where, layer, linear, norm

_SSD: dict[str, Any] = {"where": Where.SSD}
_PARTS: Final = {T.SSD_GATE: "values", T.SSD_IN: "channels", T.SSD_STEP: "value heads"}
# Fields of a layer without attention.
NO_ATTENTION: Final[dict[str, Any]] = {
    "rope_set": ROPE_NONE, "qk_norm": QkNorm.NONE, "score_scale": 0.0,
}  # fmt: skip
SSD_FLAGS: Final = {"mamba_conv_bias": True}
SSD_NEUTRAL: Final[dict[str, Any]] = {
    "mamba_chunk_size": tuple(1 << i for i in range(16)),
    "num_logits_to_keep": (0, 1),
}

# ---- GGUF files ----

GGUF_SIZES: Final = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
GGUF_IGNORES: Final = ("expert_shared_count",)


def largest(value: Any) -> Any:
    """Return the common number of the layers that have one; other layers state 0."""
    return max(value, default=0) if isinstance(value, list) else value


def gguf_common(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the KV heads and the width of all states."""
    return {
        "num_key_value_heads": largest(config.get("num_key_value_heads")),
        "mamba_d_ssm": fields.get("ssm.inner_size"),
    }


# ---- rules ----


def ssd_rules(at: str, *, conv_bias: str = "mamba_conv_bias", is_scaled: bool = False) -> Rules:
    """All tensors but those of `ssd_layouts`; scaled: by the factors of `_PARTS` and "ssd out"."""
    outs = tuple(_PARTS.values())
    parts = (
        linear(target, None, f"{at}in_proj", out, "hidden", parts=outs, part=part,
               scale=target.name if is_scaled else None, **_SSD)
        for part, (target, out) in enumerate(_PARTS.items())
    )  # fmt: skip
    return (
        *(rule for rules in parts for rule in rules),
        layer(T.SSD_CONV, f"{at}conv1d.weight", "taps", "channels", is_flat=True, transposed=True,
              **_SSD),
        layer(T.SSD_CONV_BIAS, f"{at}conv1d.bias", "channels", flag=conv_bias, **_SSD),
        layer(T.SSD_STEP_BIAS, f"{at}dt_bias", "value heads", **_SSD),
        *linear(T.SSD_OUT, None, f"{at}out_proj", "hidden", "values",
                scale=T.SSD_OUT.name if is_scaled else None, **_SSD),
    )  # fmt: skip


def ssd_layouts(at: str, norm_flag: str | None = None) -> tuple[Rules, Rules]:
    """The tensors that the second layout, GGUF's, stores differently: -e^A_log, and matrices."""
    flat: dict[str, Any] = {"is_flat": True, **_SSD}
    return (
        (
            layer(T.SSD_RATE, f"{at}A_log", "value heads", is_log=True, **_SSD),
            layer(T.SSD_SKIP, f"{at}D", "value heads", **_SSD),
            *norm(T.SSD_NORM, f"{at}norm", "values", flag=norm_flag, **_SSD),
        ),
        (
            layer(T.SSD_RATE, f"{at}minus_rate", "value heads", "one", scale="minus", **flat),
            layer(T.SSD_SKIP, f"{at}D", "value heads", "one", **flat),
            layer(T.SSD_NORM, f"{at}norm.weight", "groups", "group", flag=norm_flag, **flat),
        ),
    )


def with_layouts(of_ssd: tuple[Rules, Rules], others: tuple[Rules, ...]) -> tuple[Rules, ...]:
    return (*((*rules, *of_ssd[0]) for rules in others[:-1]), (*others[-1], *of_ssd[1]))


def ssd_layers(
    draft: Draft, layers: Collection[int], mixer: Mixer = Mixer.SSD, *, has_width: bool = True
) -> None:
    """Give ``layers`` states of Mamba-2, beside attention or instead of it.

    ``has_width``: the configuration states the width of all heads together, which must match.
    """
    config, dim = draft.config, draft.header.dim
    _check(config)
    n_heads = config.count("mamba_n_heads", MAX_HEADS)
    n_groups = config.count("mamba_n_groups", MAX_HEADS)
    n_states = config.count("mamba_d_state", MAX_STATE_DIM)
    n_taps = config.count("mamba_d_conv", MAX_TAPS, least=2)
    inner = config.count("mamba_d_ssm", MAX_DIM, config.count("mamba_expand", 1 << 10) * dim)
    head_dim = inner // n_heads
    if config.get("mamba_d_head") != "auto":
        head_dim = config.count("mamba_d_head", MAX_STATE_DIM)
    if not has_width:
        inner = n_heads * head_dim
    if n_heads * head_dim != inner or not 1 <= head_dim <= MAX_STATE_DIM:
        raise config.error("mamba_n_heads", f"= {n_heads} of {head_dim} are not {inner} dimensions")
    if n_heads % n_groups:
        raise config.error("mamba_n_groups", f"= {n_groups} do not divide {n_heads} heads")
    draft.dims |= {
        "one": 1,
        "taps": n_taps,
        "values": inner,
        "channels": inner + 2 * n_groups * n_states,
        "value heads": n_heads,
        "groups": n_groups,
        "group": inner // n_groups,
    }
    draft.factors["minus"] = -1.0
    ssd: dict[str, Any] = {
        "mixer": mixer,
        "n_taps": n_taps,
        "n_key_heads": n_groups,
        "n_value_heads": n_heads,
        "key_dim": n_states,
        "value_dim": head_dim,
    }
    if mixer == Mixer.SSD:
        ssd |= NO_ATTENTION
    for i in layers:
        draft.layers[i] = replace(draft.layers[i], **ssd)


def _check(config: Config) -> None:
    name = "hidden_act" if config.get("mamba_hidden_act") is None else "mamba_hidden_act"
    if config.activation(name) != Activation.SILU:
        raise config.error(name, f"= {shown(config.get(name))} is not supported; supported: silu")
    limits = config.get("time_step_limit")
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (0, limits)
    if isinstance(high, float) and high >= F32_MAX:
        high = None
    if low != 0 or high not in (None, {"__float__": "Infinity"}):  # as transformers writes it
        raise config.error("time_step_limit", f"= {shown(limits)}: only none is supported")


_AT_SSD, _FFN, _MIXER = f"{AT}mamba.", f"{AT}feed_forward.", f"{AT}mixer."
_NORMS = (*norm(T.ATTN_NORM, f"{AT}input_layernorm"), *norm(T.FFN_NORM, f"{AT}pre_ff_layernorm"))

# ---- Bamba ----


def _bamba_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    listed = config.get("attn_layer_indices") or []
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise config.error("attn_layer_indices", f"= {shown(listed)} is not a list of layers")
    return 0, [FULL if i in listed else LINEAR for i in range(n_layers)]


def _bamba(draft: Draft) -> None:
    ssd_layers(draft, [i for i, type_ in enumerate(draft.layer_types) if type_ != FULL])


# ---- Falcon-H1 ----


def _scaled(target: T, source: str, out_dim: str, of: str, scale: str) -> Rules:
    return linear(target, None, source, out_dim, of, scale=scale)


_FALCON = (
    *_NORMS,
    *_scaled(T.Q, f"{ATTN}q_proj", "q", "hidden", "attention in"),
    *_scaled(T.K, f"{ATTN}k_proj", "kv", "hidden", "keys"),
    *_scaled(T.V, f"{ATTN}v_proj", "kv", "hidden", "attention in"),
    *_scaled(T.ATTN_OUT, f"{ATTN}o_proj", "hidden", "q", "attention out"),
    *ssd_rules(_AT_SSD, is_scaled=True),
    *_scaled(T.FFN_GATE, f"{_FFN}gate_proj", "ffn", "hidden", "gate"),
    *linear(T.FFN_UP, None, f"{_FFN}up_proj", "ffn", "hidden"),
    *_scaled(T.FFN_DOWN, f"{_FFN}down_proj", "hidden", "ffn", "down"),
    *r.ends("embed_tokens", "final_layernorm", scale="logits"),
)


def _multipliers(config: Config, name: str, n: int) -> list[float]:
    return config.numbers(name, n) if config.get(name) is not None else [1.0] * n


def _falcon(draft: Draft) -> None:
    """Attention and Mamba-2 in every layer; factors are merged into the next matrices."""
    config = draft.config
    ssd_layers(draft, range(draft.header.n_layers), Mixer.ATTENTION_AND_SSD)
    if "mamba_rms_norm" in draft.flags and config.boolean("mamba_norm_before_gate"):
        raise config.error("mamba_norm_before_gate", "= true is not supported")
    n_values, n_keys = draft.dims["values"], (draft.dims["channels"] - draft.dims["values"]) // 2
    into = config.positive("ssm_in_multiplier")
    z, x, b, c, step = (into * factor for factor in _multipliers(config, "ssm_multipliers", 5))
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    into_heads = config.positive("attention_in_multiplier")
    draft.factors |= {
        T.SSD_GATE.name: z,
        T.SSD_IN.name: (x,) * n_values + (b,) * n_keys + (c,) * n_keys,
        T.SSD_STEP.name: step,
        T.SSD_OUT.name: config.positive("ssm_out_multiplier"),
        "attention in": into_heads,
        "keys": into_heads * config.positive("key_multiplier"),
        "attention out": config.positive("attention_out_multiplier"),
        "gate": gate,
        "down": down,
        "logits": config.positive("lm_head_multiplier"),
    }
    draft.arch = replace(draft.arch, embedding_factor=config.positive("embedding_multiplier"))


# ---- Nemotron-H ----

_MLP, _MOE = "mlp", "moe"
_BLOCKS: Final = {
    "M": LINEAR, "mamba": LINEAR, LINEAR: LINEAR, "*": FULL, "attention": FULL, FULL: FULL,
    "-": _MLP, _MLP: _MLP, "E": _MOE, _MOE: _MOE,
}  # fmt: skip


_OF_TRAINING: Final = (
    "mtp_layers_block_type|mtp_hybrid_override_pattern|norm_eps"
    "|time_step_(min|max|floor|rank|init_scheme|scale)"
)
_OF_EXPERTS: Final = (
    "moe_intermediate_size", "moe_shared_expert_intermediate_size", "num_experts",
    "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
    "n_shared_experts",
)  # fmt: skip


def _blocks(config: Config) -> list[str]:
    """The kind of each block: a layer is a mixer or an FFN."""
    name = "layers_block_type"
    if config.get(name) is None:
        name = "hybrid_override_pattern"
    blocks = config.get(name)
    if not isinstance(blocks, (str, list)) or not 1 <= len(blocks) <= MAX_LAYERS:
        raise config.error(name, f"= {shown(blocks)} is not a list of layers")
    for block in blocks:
        if block not in _BLOCKS:
            raise config.error(name, f"has {shown(block)}, supported: {', '.join(_BLOCKS)}")
    return [_BLOCKS[block] for block in blocks]


def _block_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    if config.get("num_hidden_layers", n_layers) != n_layers:
        raise config.error("num_hidden_layers", f"is not {n_layers}, the number of blocks")
    return 0, _blocks(config)


def _nemotron(draft: Draft) -> None:
    config, blocks = draft.config, draft.layer_types
    for name in () if _MOE in blocks else _OF_EXPERTS:
        config.get(name)  # has no meaning here
    if config.get("attention_head_dim", draft.header.head_dim) != draft.header.head_dim:
        raise config.error("attention_head_dim", f"is not head_dim, {draft.header.head_dim}")
    draft.set_all(**NO_ATTENTION)
    for i, block in enumerate(blocks):
        change: dict[str, Any] = {"ffn": Ffn.NONE}
        if block in (_MLP, _MOE):
            change = {"mixer": Mixer.NONE}
        draft.layers[i] = replace(draft.layers[i], **change)
    if LINEAR in blocks:
        states = [i for i, block in enumerate(blocks) if block == LINEAR]
        ssd_layers(draft, states, has_width=False)
    if _MOE in blocks:
        draft.dims["expert"] = config.count("moe_intermediate_size", MAX_FFN_DIM)
        draft.dims["shared"] = config.count("moe_shared_expert_intermediate_size", MAX_FFN_DIM)
        routed = [i for i, block in enumerate(blocks) if block == _MOE]
        route(draft, routed, expert_ffn=Ffn.PLAIN, **by_groups(config))


def _alone(draft: Draft) -> None:
    draft.set_all(ffn=Ffn.NONE)
    ssd_layers(draft, range(draft.header.n_layers))


def _plain(at: str, dim: str, where: Where) -> Rules:
    return (
        *linear(T.FFN_UP, None, f"{at}up_proj", dim, "hidden", where=where),
        *linear(T.FFN_DOWN, None, f"{at}down_proj", "hidden", dim, where=where),
    )


_NEMOTRON = (
    *norm(T.ATTN_NORM, f"{AT}norm", where=Where.MIXED),
    *norm(T.FFN_NORM, f"{AT}norm", where=Where.FED),
    *r.attention(_MIXER, where=Where.ATTENTION),
    *ssd_rules(_MIXER, conv_bias="use_conv_bias"),
    *_plain(_MIXER, "ffn", Where.DENSE),
    r.router(f"{_MIXER}gate.weight"),
    *_plain(f"{_MIXER}shared_experts.", "shared", Where.ROUTED),
    *r.ends("embeddings", "norm_f"),
)
_NEMOTRON_EXPERTS = tuple(
    (r.selection_bias(f"{_MIXER}{name}"), *rules)
    for name, rules in zip(
        ("gate.e_score_correction_bias", "gate.e_score_correction_bias", "gate.selection.bias"),
        r.plain_experts(_MIXER),
        strict=True,
    )
)

_OF_STATES: Final = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand",
    "norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip
_NO_EFFECT: Final[Mapping[str, Any]] = {
    **SSD_NEUTRAL,
    **dict.fromkeys(("residual_in_fp32", "rescale_prenorm_residual"), (True, False)),
    "chunk_size": SSD_NEUTRAL["mamba_chunk_size"],
}

# ---- GGUF files ----


def _gguf_alone(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = whole("ssm.inner_size", fields.get("ssm.inner_size"))
    head_dim = inner // whole("ssm.time_step_rank", config["mamba_n_heads"], 1)
    heads = config["mamba_n_heads"]
    return {"mamba_d_ssm": inner, "head_dim": head_dim, "num_attention_heads": heads}


def _gguf_nemotron(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of a block follows from its tensors."""
    keys = gguf_common(fields, shapes, config)
    kinds = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": _MOE}
    blocks = [
        next((kind for name, kind in kinds.items() if f"blk.{i}.{name}" in shapes), _MLP)
        for i in range(config["num_hidden_layers"])
    ]
    inner = whole("ssm.inner_size", keys.pop("mamba_d_ssm"))
    keys["mamba_d_head"] = inner // whole("ssm.time_step_rank", config["mamba_n_heads"], 1)
    return {
        **keys,
        "layers_block_type": blocks,
        "intermediate_size": largest(config["intermediate_size"]),
    }


_GGUF_ALONE: Final = Gguf("mamba2",
    needs=GGUF_SIZES,
    without=("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rope_theta"),
    more=_gguf_alone,
    ignores=(*GGUF_IGNORES, "attention.head_count"),
    prefix="backbone.",
)  # fmt: skip
_GGUF_NEMOTRON: Final = Gguf(
    "nemotron_h",
    needs=GGUF_SIZES,
    is_permuted=True,
    more=_gguf_nemotron,
    ignores=(*GGUF_IGNORES, "attention.layer_norm_epsilon"),
    lists=("attention.head_count_kv", "feed_forward_length"),
)


# ---- Granite and HyperCLOVA X: factors on embedding, residuals, scores and logits ----


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
        ssd_layers(draft, states)


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
            f"{AT}shared_mlp.input_linear",
            (dim, dim),
            **options,
        ),
        *r.linear(T.FFN_DOWN, None, f"{AT}shared_mlp.output_linear", "hidden", dim, **options),
    )


_SCALED_ENDS = r.ends("embed_tokens", "norm", scale="logits")
_ATTENTION = (*r.pre_norms(), *r.ATTENTION)
_SINKS = r.layer(T.SINKS, f"{AT}self_attn.sinks", "heads")
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
_HYBRID = (
    *r.pre_norms(),
    *r.attention(bias="attention_bias", where=Where.ATTENTION),
    *ssd_rules(_AT_SSD),
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
    common = gguf_common(fields, shapes, config)
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
            needs=GGUF_SIZES,
            may=(*_GGUF_MAY, *EXPERTS, "shared_intermediate_size"),
            is_permuted=True,
            more=_gguf_hybrid,
            ignores=GGUF_IGNORES,
            lists=("attention.head_count_kv",),
            others=("BambaForCausalLM",),
        ),
        rules=_HYBRID,
        layouts=with_layouts(
            ssd_layouts(_AT_SSD),
            (
                *((*rules, *_shared_ffn("shared")) for rules in _MOE_LAYOUTS[:2]),
                (*_MOE_LAYOUTS[2], *r.gated(f"{r.MLP}shared.", "shared")),
            ),
        ),
        renames=EXPERT_RENAMES,
        flags={"attention_bias": False, **SSD_FLAGS},
        windows=_hybrid_types,
        neutral={"normalization_function": "rmsnorm", **SSD_NEUTRAL},
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
            *r.norm(T.POST_ATTN_NORM, f"{AT}post_norm1", flag="use_post_norm"),
            *r.norm(T.POST_FFN_NORM, f"{AT}post_norm2", flag="use_post_norm"),
            *_SCALED_ENDS,
        ),
        # Without the key, scores are divided by the root of the head size.
        flags={**family.BIASES, "use_post_norm": True},
        adjust=_hyperclova,
    ),
    Family(
        name="Mamba2ForCausalLM",
        title="Mamba-2, Mamba-Codestral",
        gguf=_GGUF_ALONE,
        prefixes=("model.backbone.", "backbone.", "model."),
        rules=(
            *norm(T.ATTN_NORM, f"{AT}norm"),
            *ssd_rules(_MIXER, conv_bias="use_conv_bias"),
            *r.ends("embeddings", "norm_f"),
        ),
        layouts=ssd_layouts(_MIXER),
        renames={
            **_OF_STATES,
            **dict.fromkeys(("mamba_n_heads", "num_attention_heads"), "num_heads"),
            "mamba_d_head": "head_dim",
            "mamba_d_state": "state_size",
        },
        # It states no context; layers without an FFN have no use for its width.
        defaults={
            "mamba_d_head": "auto",
            "max_position_embeddings": 1048576,
            "ffn_multiple": 2,
            "num_attention_heads": 128,
        },
        flags={"use_conv_bias": True},
        neutral={
            **_NO_EFFECT,
            "rms_norm": True,
            "norm_before_gate": (True, False),  # read by nobody
        },
        ignored_keys=_OF_TRAINING,
        adjust=_alone,
    ),
    Family(
        name="BambaForCausalLM",
        title="Bamba",
        has_partial_rope=True,
        rules=(
            *_NORMS,
            *r.attention(where=Where.ATTENTION),
            *ssd_rules(_AT_SSD),
            *r.gated(_FFN),
            *r.ends("embed_tokens", "final_layernorm"),
        ),
        layouts=ssd_layouts(_AT_SSD),
        flags=SSD_FLAGS,
        windows=_bamba_types,
        neutral={
            **SSD_NEUTRAL,
            # Half of a head: it follows from the share of rotated dimensions.
            "attn_rotary_emb": range(1 << 12),
            "z_loss_coefficient": 0.0,
        },
        adjust=_bamba,
    ),
    Family(
        name="FalconH1ForCausalLM",
        title="Falcon-H1 (0.5B to 34B)",
        gguf=Gguf(
            "falcon-h1",
            needs=GGUF_SIZES,
            constants={"mamba_norm_before_gate": False},
            more=gguf_common,
            ignores=GGUF_IGNORES,
        ),
        rules=_FALCON,
        layouts=ssd_layouts(_AT_SSD, norm_flag="mamba_rms_norm"),
        flags={**SSD_FLAGS, "mamba_rms_norm": False},
        neutral={**SSD_NEUTRAL, "mamba_norm_before_gate": (True, False), "mamba_use_mlp": True},
        adjust=_falcon,
    ),
    Family(
        name="NemotronHForCausalLM",
        title="Nemotron-H, Nemotron 3 Nano",
        gguf=replace(
            _GGUF_NEMOTRON,
            also=(
                replace(
                    _GGUF_NEMOTRON,
                    name="nemotron_h_moe",
                    needs=(*GGUF_SIZES, *GGUF_ROUTED, "moe_shared_expert_intermediate_size"),
                    may=(*gguf.EXPERT_WEIGHTS, *gguf.EXPERT_GROUPS),
                ),
            ),
        ),
        prefixes=("backbone.", "model."),
        rules=_NEMOTRON,
        layouts=with_layouts(ssd_layouts(_MIXER), _NEMOTRON_EXPERTS),
        renames={
            **_OF_STATES,
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
        },
        defaults={"intermediate_size": 21504, "hybrid_override_pattern": "ME*-"},
        flags={"use_conv_bias": True},
        count_layers=lambda config: len(_blocks(config)),
        windows=_block_types,
        neutral={
            **_NO_EFFECT,
            **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
            **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap"), (True, False)),
            "n_shared_experts": 1,
            "mamba_ssm_cache_dtype": "float32",
        },
        ignored_keys=_OF_TRAINING,
        adjust=_nemotron,
    ),
)
