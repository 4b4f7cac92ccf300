"""The delta rule with a decay for each channel (KDA), and latents: Kimi Linear, whose latents have
no RoPE, and Ling 3, whose gates and decays are of one matrix each.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf.file.kinds import MAX_STATE_DIM, MAX_TAPS, ROPE_NONE, LayerKind, Mixer
from qsf.file.layout import MAX_HEAD_DIM, MAX_HEADS, Positions
from qsf_converter.sources.families.config import MAX_LAYERS, Config
from qsf_converter.sources.families.delta import LINEAR
from qsf_converter.sources.families.experts import (
    LAYOUTS,
    SPARSE,
    of_gguf,
    one_each,
    router,
    selection_bias,
)
from qsf_converter.sources.families.family import FULL, Draft, Family, usual
from qsf_converter.sources.families.gguf import Fields, Shapes, only_sigmoid, own_layers
from qsf_converter.sources.families.latent import (
    FUSED,
    GGUF_ROUTED,
    LATENT,
    LATENT_DEFAULTS,
    SPLIT,
    latent_moe,
    rope_of_latent,
)
from qsf_converter.sources.families.llama import ATTN, ENDS, MLP, Rules, gated, pre_norms
from qsf_converter.sources.families.rules import T, Where, ends, layer, linear, norm

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
    _set_kda(draft, n_heads, dim, n_taps, gate_rank=dim)


def _set_kda(draft: Draft, n_heads: int, dim: int, n_taps: int, **more: Any) -> None:
    """Make KDA of the layers that have no latents."""
    keys = n_heads * dim
    draft.dims |= {"taps": n_taps, "keys": keys, "channels": 3 * keys, "value heads": n_heads}
    draft.dims |= {"key": dim, "latent key": draft.dims["key"]}
    draft.factors["minus"] = -1.0
    none = LayerKind.__dataclass_fields__
    kda: dict[str, Any] = {
        **{name: none[name].default for name in
           ("score_scale", "latent_rank", "nope_dim", "latent_value_dim", "query_rank")},
        "mixer": Mixer.DELTA, "n_taps": n_taps, "n_key_heads": n_heads, "n_value_heads": n_heads,
        "key_dim": dim, "value_dim": dim, "has_channel_decays": 1, "has_sigmoid_gate": 1,
        "rope_set": ROPE_NONE, **more,
    }  # fmt: skip
    draft.set_type(LINEAR, **kda)


def _ling_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Latent attention in the last layer of each group."""
    types = config.of_layers("layer_types", n_layers, (FULL, LINEAR))
    n = config.count("layer_group_size", MAX_LAYERS)
    return 0, types or [LINEAR if (i + 1) % n else FULL for i in range(n_layers)]


def _ling(draft: Draft) -> None:
    config = draft.config
    own = config.get("linear_head_dim")  # as transformers saves it
    dim = config.count("kda_dim" if own is None else "linear_head_dim", MAX_STATE_DIM)
    config.get("kda_dim")
    n_taps = config.count("short_conv_kernel_size", MAX_TAPS, least=2)
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
_RENAMES: Mapping[str, str] = {
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
    n_rope, n_layers = fields.get("rope.dimension_count"), own_layers(fields, config)
    if type(n_keys) is not int or type(n_rope) is not int:
        raise QsfConversionError(
            f"its heads of {shown(n_keys)} dimensions have {shown(n_rope)} of the rotated part"
        )
    is_kda = [f"blk.{i}.ssm_a" in shapes for i in range(n_layers)]
    beta = shapes.get(f"blk.{is_kda.index(True) if any(is_kda) else 0}.ssm_beta.weight", (0,))
    return {
        **only_sigmoid(fields, shapes, config),
        "qk_rope_head_dim": n_rope,
        "qk_nope_head_dim": n_keys - n_rope,
        "v_head_dim": n_values,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "linear_num_heads": beta[0],
        "norm_topk_prob": fields.get("expert_weights_norm", True),
        "layer_types": [LINEAR if kda else FULL for kda in is_kda],
    }


_GGUF: Final = replace(
    GGUF_ROUTED,
    needs=("kv_lora_rank", "linear_head_dim", "linear_conv_kernel_dim"),
    keys={"linear_head_dim": "kda.head_dim"},
    lists=("attention.head_count_kv",),
    more=_gguf,
)


FAMILIES = (
    Family(
        name="KimiLinearForCausalLM",
        title="Kimi Linear (48B-A3B)",
        gguf={"kimi-linear": _GGUF},
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
    Family(
        name="BailingHybridForCausalLM",
        title="Ling 3 (Flash 127B-A5B)",
        model_type="bailing_hybrid",
        is_interleaved=True,
        rules=(
            *pre_norms(),
            *_LING,
            *gated(where=Where.DENSE),
            *_choice(MLP, "expert_bias"),
            *ends("word_embeddings", "norm"),
        ),
        layouts=LAYOUTS[:2],  # there is no GGUF form
        renames={**_RENAMES, "kda_dim": "head_dim"},
        defaults=usual(
            LATENT_DEFAULTS,
            context=262144,
            q_lora_rank=None,
            experts=512,
            chosen=8,
            expert_dim=768,
            first_k_dense_replace=2,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            theta=6000000.0,
            kda_dim=128,
            short_conv_kernel_size=4,
            layer_group_size=6,
            kda_safe_gate=True,
            kda_lower_bound=-5.0,
        ),
        flags={"attention_bias": False},
        windows=_ling_types,
        rope_parameters=rope_of_latent,
        adjust=_ling,
        neutral={
            "qk_head_dim": tuple(range(2 * MAX_HEAD_DIM + 1)),
            "rope_interleave": (True,),
            # Layers behind the last one, which predict further tokens.
            "num_nextn_predict_layers": (0, 1, 2, 3),
            "num_mtp_layers": (0, 1, 2, 3),
            "mtp_loss_scaling_factor": (0, 0.1, 0.3),
        },
    ),
)
