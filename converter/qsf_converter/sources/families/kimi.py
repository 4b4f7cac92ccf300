"""Kimi Linear: the delta rule with a decay for each channel (KDA), and latents without RoPE."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import shown
from qsf.file.kinds import MAX_STATE_DIM, MAX_TAPS, LayerKind, Mixer
from qsf.file.layout import MAX_HEAD_DIM, MAX_HEADS, Positions
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.delta import LINEAR
from qsf_converter.sources.families.experts import (
    SPARSE,
    of_gguf,
    one_each,
    router,
    selection_bias,
)
from qsf_converter.sources.families.family import FULL, Draft, Family, usual
from qsf_converter.sources.families.latent import (
    FUSED,
    LATENT,
    LATENT_DEFAULTS,
    SPLIT,
    latent_moe,
)
from qsf_converter.sources.families.llama import ATTN, ENDS, MLP, Rules, gated, pre_norms
from qsf_converter.sources.families.rules import T, Where, layer, linear, norm

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
    *norm(T.MIX_NORM, f"{ATTN}o_norm", "key", **_DELTA),
    layer(T.DECAY_BIAS, f"{ATTN}dt_bias", "keys", **_DELTA),
    layer(T.CONV, f"{ATTN}{{part}}_conv1d.weight", "taps", "channels", is_flat=True,
          transposed=True, **_DELTA),
)  # fmt: skip


def _rate(name: str, **options: Any) -> Rules:
    shape = ("value heads", "key")
    return (layer(T.DECAY_RATE, f"{ATTN}{name}", *shape, is_flat=True, is_repeated=True,
                  **options, **_DELTA),)  # fmt: skip


def _of_attention(rules: Rules) -> Rules:
    return tuple(replace(rule, where=Where.ATTENTION) for rule in rules)


def _choice(at: str, bias: str) -> Rules:
    return (
        router(f"{at}gate.weight"),
        selection_bias(f"{at}gate.{bias}"),
        *gated(f"{at}shared_experts.", "shared", where=Where.ROUTED, flag="shared"),
    )


_PUBLISHED: Final[Rules] = (
    *_of_attention(FUSED),
    *_rate("A_log", is_log=True),
    *_choice(SPARSE, "e_score_correction_bias"),
    *one_each(SPARSE, "w1", "w3", "w2"),
)
_LAYOUTS: Final = (
    # As published, as transformers writes it, and GGUF's.
    (*_PUBLISHED, *gated(where=Where.DENSE)),
    (*_PUBLISHED, *gated(SPARSE, where=Where.DENSE)),
    (
        *_of_attention(SPLIT),
        *_rate("minus_rate", scale="minus"),
        *_choice(MLP, "selection.bias"),
        *of_gguf(),
        *gated(where=Where.DENSE),
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
    n_heads, dim = sizes.count("num_heads", MAX_HEADS), sizes.count("head_dim", MAX_STATE_DIM)
    n_taps = sizes.count("short_conv_kernel_size", MAX_TAPS, least=2)
    for name, value in sizes.unread():
        raise sizes.error(name, f"= {shown(value)} is not supported")
    latent_moe(draft)
    keys = n_heads * dim
    draft.dims |= {"taps": n_taps, "keys": keys, "channels": 3 * keys, "value heads": n_heads}
    draft.dims |= {"key": dim, "latent key": draft.dims["key"]}
    draft.factors["minus"] = -1.0
    none = LayerKind.__dataclass_fields__
    kda: dict[str, Any] = {
        **{name: none[name].default for name in
           ("score_scale", "latent_rank", "nope_dim", "latent_value_dim", "query_rank")},
        "mixer": Mixer.DELTA, "n_taps": n_taps, "n_key_heads": n_heads, "n_value_heads": n_heads,
        "key_dim": dim, "value_dim": dim, "gate_rank": dim, "has_channel_decays": 1,
        "has_sigmoid_gate": 1,
    }  # fmt: skip
    draft.set_type(LINEAR, **kda)


_LATENT: Final = tuple(  # ``key`` is a dimension of KDA here
    replace(rule, shape=tuple({"key": "latent key"}.get(dim, dim) for dim in rule.shape))
    for rule in LATENT
)
_RENAMES: Mapping[str, str] = {
    "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "model_max_length",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "n_shared_experts": "num_shared_experts",
    "head_dim": "qk_rope_head_dim",
}
FAMILIES = (
    Family(
        name="KimiLinearForCausalLM",
        title="Kimi Linear (48B-A3B)",
        model_type="kimi_linear",
        positions=Positions.ALIBI,
        rules=(*pre_norms(), *_of_attention(_LATENT), *_KDA, *ENDS),
        layouts=_LAYOUTS,
        renames=_RENAMES,
        defaults=usual(
            LATENT_DEFAULTS,
            context=1048576,
            epsilon=1e-5,
            q_lora_rank=None,
            experts=256,
            chosen=8,
            expert_dim=1024,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.446,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
        ),
        flags={"attention_bias": False},
        windows=_layer_types,
        adjust=_kimi,
        neutral={
            "head_dim": tuple(range(MAX_HEAD_DIM + 1)),
            "qk_head_dim": tuple(range(2 * MAX_HEAD_DIM + 1)),
            "mla_use_nope": (True,),
            "moe_layer_freq": (1,),
            "moe_router_activation_func": ("sigmoid",),
            "use_grouped_topk": (True, False),
        },
    ),
)
