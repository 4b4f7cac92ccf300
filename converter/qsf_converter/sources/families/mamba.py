"""The layers of Mamba-2 (SSD) in families that have them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import shown
from qsf.file.kinds import MAX_STATE_DIM, MAX_TAPS, ROPE_NONE, Mixer, QkNorm
from qsf.file.layout import MAX_HEADS, Activation
from qsf_converter.sources.families.config import MAX_DIM, Config
from qsf_converter.sources.families.family import Draft
from qsf_converter.sources.families.gguf import Fields
from qsf_converter.sources.families.llama import Rules
from qsf_converter.sources.families.rules import T, Where, layer, linear, norm

_SSD: dict[str, Any] = {"where": Where.SSD}
_PARTS: Final = {T.SSD_GATE: "values", T.SSD_IN: "channels", T.SSD_STEP: "value heads"}
# Fields of a layer without attention.
NO_ATTENTION: Final[dict[str, Any]] = {
    "rope_set": ROPE_NONE, "qk_norm": QkNorm.NONE, "score_scale": 0.0,
}  # fmt: skip
# Keys with the sizes of layers, and keys without effect.
DEFAULTS: Final[dict[str, Any]] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "time_step_limit": None,
}
FLAGS: Final = {"mamba_conv_bias": True}
NEUTRAL: Final[dict[str, Any]] = {
    "mamba_proj_bias": (False,),
    "mamba_chunk_size": tuple(1 << i for i in range(16)),
    "num_logits_to_keep": (0, 1),
}

# ---- GGUF files ----

GGUF_SIZES: Final = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
GGUF_READS: Final = ("ssm.inner_size", "expert_shared_count")


def largest(value: Any) -> Any:
    """Return the common number of the layers that have one; other layers state 0."""
    return max(value, default=0) if isinstance(value, list) else value


def gguf_common(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
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


# The spellings of checkpoints, and of transformers.
_NO_LIMITS: Final = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def _check(config: Config) -> None:
    name = "hidden_act" if config.get("mamba_hidden_act") is None else "mamba_hidden_act"
    if config.activation(name) != Activation.SILU:
        raise config.error(name, f"= {shown(config.get(name))} is not supported; supported: silu")
    limits = config.get("time_step_limit")
    if limits not in (None, *_NO_LIMITS):
        raise config.error("time_step_limit", f"= {shown(limits)}: only none is supported")
