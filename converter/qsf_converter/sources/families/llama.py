"""Families with the blocks of LLaMA: RMSNorm, RoPE, a gated FFN."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import shown
from qsf.file.layout import Activation, Architecture
from qsf_converter.sources.families import family, gguf
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_LAYERS, Config
from qsf_converter.sources.families.family import Draft, Family, window_of_all
from qsf_converter.sources.families.gguf import VISION_KEYS, Fields, Gguf, Shapes, layer_types
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import AT, ENDS, LLAMA_RULES, T, gated, norm, pre_norms

# ---- rules ----


def post_norms() -> r.Rules:
    """The norms after attention and FFN, for layers without norms before them."""
    return (
        *norm(T.POST_ATTN_NORM, f"{AT}post_attention_layernorm"),
        *norm(T.POST_FFN_NORM, f"{AT}post_feedforward_layernorm"),
    )


# ---- special cases ----


def _smollm3(draft: Draft) -> None:
    n_layers = draft.header.n_layers
    rotates = draft.config.of_layers("no_rope_layers", n_layers, (0, 1, True, False))
    interval = draft.config.count("no_rope_layer_interval", MAX_LAYERS)
    if rotates is None:
        rotates = [(i + 1) % interval != 0 for i in range(n_layers)]
    draft.unrotate([i for i in range(n_layers) if not rotates[i]])


def _exaone4(draft: Draft) -> None:
    if draft.config.get("sliding_window") is not None:
        draft.unrotate_full()


def _rope_of_olmo3(config: Config, layer_type: str) -> Config:
    """In older configurations ``rope_scaling`` applies to layers without a window."""
    if layer_type == family.SLIDING and not config.has("rope_parameters"):
        return Config({"rope_theta": config.positive("rope_theta")})
    return parameters_of(config, layer_type)


_QWEN2_RULES = (*pre_norms(), *r.qkv(bias="always"), *r.out(), *gated(), *ENDS)
_QWEN3_RULES = (*pre_norms(), *r.ATTENTION, *r.qk_norms(), *gated(), *ENDS)
_OLMO_RULES = (*post_norms(), *r.ATTENTION, *r.qk_norms("q", "kv"), *gated(), *ENDS)
# ---- GGUF files ----


def _gguf_llama(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("expert_count"):
        counts = {name: fields.get(gguf.KEYS[name]) for name in gguf.EXPERTS}
        return {"architectures": ["MixtralForCausalLM"], **counts}
    return {"architectures": ["MistralForCausalLM"]} if config.get("sliding_window") else {}


def _gguf_olmo(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    windows = layer_types(fields, config, 4)
    return {"architectures": ["Olmo3ForCausalLM"], **windows} if windows else {}


def _gguf_exaone4(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window"), **layer_types(fields, config, 4)}


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _apertus(draft: Draft) -> None:
    """The numbers of xIELU are stored as what softplus makes them of."""
    config, n_layers = draft.config, draft.header.n_layers
    if config.get("hidden_act") != "xielu":
        raise config.error("hidden_act", f"= {shown(config['hidden_act'])} is not xielu")
    numbers: list[list[float]] = []
    for name in _XIELU:
        values = config.get(f"xielu_{name}")
        if (
            not isinstance(values, list)
            or len(values) != n_layers
            or not all(isinstance(n, (int, float)) and abs(n) < 1e6 for n in values)
        ):
            raise config.error(
                f"xielu_{name}", f"= {shown(values)} is not a number of each of {n_layers} layers"
            )
        numbers.append(values)
    square, exp, line = numbers
    draft.layers = [
        replace(
            kind,
            activation=Activation.XIELU,
            xielu_square=_softplus(square[i]),
            xielu_exp=line[i] + _softplus(exp[i]),
            xielu_line=line[i],
        )
        for i, kind in enumerate(draft.layers)
    ]


_XIELU = ("alpha_p", "alpha_n", "beta")

_KEYS = {f"xielu_{name}": f"xielu.{name}" for name in _XIELU}


FAMILIES = (
    Family(
        name="LlamaForCausalLM",
        title="LLaMA 2, 3; SmolLM2; all with its blocks",
        gguf=Gguf(
            "llama",
            may=("sliding_window",),
            is_permuted=True,
            more=_gguf_llama,
            others=("MistralForCausalLM", "MixtralForCausalLM"),
        ),
        architecture=Architecture.LLAMA,
        rules=LLAMA_RULES,
    ),
    Family(
        name="MistralForCausalLM",
        title="Mistral, Mistral-Small 3",
        architecture=Architecture.MISTRAL,
        rules=LLAMA_RULES,
        windows=window_of_all,
        nested=("Mistral3ForConditionalGeneration",),
    ),
    Family(
        name="Ministral3ForCausalLM",
        title="Ministral 3",
        gguf=Gguf("mistral3", is_permuted=True),
        rules=LLAMA_RULES,
        windows=window_of_all,
        nested=("Mistral3ForConditionalGeneration",),
    ),
    Family(
        name="Qwen2ForCausalLM",
        title="Qwen 2, 2.5",
        gguf=Gguf("qwen2"),
        rules=_QWEN2_RULES,
        windows=family.window_when_switched,
    ),
    Family(
        name="Qwen2_5_VLTextForCausalLM",
        title="Qwen 2 VL, 2.5 VL (2B to 72B), text",
        model_type="qwen2_5_vl_text",
        gguf=Gguf("qwen2vl", ignores=VISION_KEYS),
        nested=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
        rules=_QWEN2_RULES,
        windows=family.window_when_switched,
    ),
    Family(
        name="Qwen3ForCausalLM",
        title="Qwen 3",
        gguf=Gguf("qwen3"),
        rules=_QWEN3_RULES,
        windows=family.window_when_switched,
    ),
    Family(
        name="Qwen3VLTextForCausalLM",
        title="Qwen 3 VL (2B to 32B), text",
        model_type="qwen3_vl_text",
        gguf=Gguf("qwen3vl", ignores=VISION_KEYS),
        nested=("Qwen3VLForConditionalGeneration",),
        rules=_QWEN3_RULES,
        defaults={"num_key_value_heads": 32},
    ),
    Family(
        name="Phi3ForCausalLM",
        title="Phi-3, 3.5, 4, 4-mini",
        has_partial_rope=True,
        gguf=Gguf("phi3", may=("sliding_window",)),
        architecture=Architecture.PHI,
        rules=(
            *pre_norms(),
            *r.fused({T.Q: None, T.K: None, T.V: None}, f"{r.ATTN}qkv_proj", ("q", "kv", "kv")),
            *r.out(),
            *r.gated_fused(),
            *ENDS,
        ),
        windows=window_of_all,
    ),
    Family(
        name="SmolLM3ForCausalLM",
        title="SmolLM3",
        model_type="smollm3",
        gguf=Gguf("smollm3", is_permuted=True),
        rules=LLAMA_RULES,
        adjust=_smollm3,
    ),
    Family(
        name="Olmo2ForCausalLM",
        title="OLMo 2",
        gguf=Gguf("olmo2", may=("sliding_window",), more=_gguf_olmo, others=("Olmo3ForCausalLM",)),
        rules=_OLMO_RULES,
    ),
    Family(
        name="Olmo3ForCausalLM",
        title="OLMo 3",
        rules=_OLMO_RULES,
        defaults={"rope_theta": 500000.0, "sliding_window_pattern": 4},
        windows=family.window_but_every,
        rope_parameters=_rope_of_olmo3,
    ),
    Family(
        name="Exaone4ForCausalLM",
        title="EXAONE 4; 4.5, text",
        gguf=Gguf("exaone4", may=("sliding_window",), more=_gguf_exaone4),
        nested=("Exaone4_5_ForConditionalGeneration",),
        left_out=(*family.SENSES, "mtp."),
        rules=(*post_norms(), *r.attention(), *r.qk_norms(), *gated(), *ENDS),
        defaults={"num_key_value_heads": 32},
        windows=family.window_but_every,
        adjust=_exaone4,
    ),
    Family(
        name="SeedOssForCausalLM",
        title="Seed-OSS",
        gguf=Gguf("seed_oss"),
        rules=(
            *pre_norms(),
            *r.qkv(bias="attention_bias"),
            *r.out(bias="attention_out_bias"),
            *gated(bias="mlp_bias"),
            *ENDS,
        ),
        flags={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    Family(
        name="Ernie4_5ForCausalLM",
        title="ERNIE 4.5",
        gguf=Gguf("ernie4_5"),
        is_interleaved=True,
        rules=(*pre_norms(), *r.attention(bias="use_bias"), *gated(bias="use_bias"), *ENDS),
        flags={"use_bias": False},
    ),
    Family(
        name="CwmForCausalLM",
        title="CWM",
        rules=LLAMA_RULES,
        windows=family.window_but_first_of_four,
    ),
    Family(
        name="HeliumForCausalLM",
        title="Helium",
        is_interleaved=True,
        rules=LLAMA_RULES,
    ),
    Family(
        name="InternLM3ForCausalLM",
        title="InternLM 3",
        model_type="internlm3",
        rules=(
            *pre_norms(),
            *r.qkv(bias="qkv_bias"),
            *r.out(bias="bias"),
            *gated(bias="bias"),
            *ENDS,
        ),
        flags={"qkv_bias": False, "bias": False},
    ),
    *(
        Family(
            name=f"{name}ForCausalLM",
            title=title,
            model_type=name.lower(),
            gguf=Gguf(arch),
            is_interleaved=True,
            has_partial_rope=True,
            rules=(
                *pre_norms(),
                *more,
                *r.qkv(bias="attention_bias"),
                *r.out(),
                *r.gated_fused(),
                *ENDS,
            ),
            flags={"attention_bias": True},
        )
        for name, title, arch, more in (
            ("Glm", "GLM-4-9B", "chatglm", ()),
            (
                "Glm4",
                "GLM-4-0414",
                "glm4",
                (
                    *norm(T.POST_ATTN_NORM, f"{AT}post_self_attn_layernorm"),
                    *norm(T.POST_FFN_NORM, f"{AT}post_mlp_layernorm"),
                ),
            ),
        )
    ),
    Family(
        name="BitNetForCausalLM",
        title="BitNet b1.58",
        model_type="bitnet",
        gguf=Gguf(
            "bitnet",
            may=("hidden_act",),
            keys={"hidden_act": "hidden_activation"},
            constants={"hidden_act": "silu"},
            # Of bitnet.cpp.
            also=tuple(Gguf(name, named_as="bitnet") for name in ("bitnet-b1.58", "bitnet-25")),
        ),
        rules=(
            *pre_norms(),
            *r.ATTENTION,
            *norm(T.ATTN_SUB_NORM, f"{r.ATTN}attn_sub_norm"),
            *norm(T.FFN_SUB_NORM, f"{r.MLP}ffn_sub_norm", "ffn"),
            *gated(),
            *ENDS,
        ),
    ),
    Family(
        name="ApertusForCausalLM",
        title="Apertus (8B, 70B)",
        gguf=Gguf(
            "apertus",
            may=tuple(_KEYS),
            keys=_KEYS,
            lists=tuple(_KEYS.values()),
            ignores=("xielu.eps",),
        ),
        activation=Activation.SILU,  # KIND has xIELU
        rules=(
            *norm(T.ATTN_NORM, f"{AT}attention_layernorm"),
            *norm(T.FFN_NORM, f"{AT}feedforward_layernorm"),
            *r.ATTENTION,
            *r.qk_norms(),
            *r.linear(T.FFN_UP, None, f"{r.MLP}up_proj", "ffn", "hidden"),
            *r.linear(T.FFN_DOWN, None, f"{r.MLP}down_proj", "hidden", "ffn"),
            *ENDS,
        ),
        ignored_suffixes=(
            "rotary_emb.inv_freq",
            *(f"act_fn.{name}" for name in _XIELU),
            "act_fn.eps",
        ),
        scalars={f"xielu_{name}": f"{r.MLP}act_fn.{name}" for name in _XIELU},
        neutral={"qk_norm": True},
        adjust=_apertus,
    ),
)
