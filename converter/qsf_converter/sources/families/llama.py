"""Families with the blocks of LLaMA: RMSNorm, RoPE, a gated FFN."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import shown
from qsf.file.kinds import ROPE_NONE
from qsf.file.layout import Activation, Architecture
from qsf_converter.sources.families.config import MAX_LAYERS, MAX_TOKENS, Config
from qsf_converter.sources.families.family import (
    FULL,
    SENSES,
    SLIDING,
    Draft,
    Family,
    no_windows,
    usual,
)
from qsf_converter.sources.families.gguf import (
    EXPERTS,
    KEYS,
    VISION_KEYS,
    Fields,
    Gguf,
    Shapes,
    layer_types,
)
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import T, TensorRule, ends, linear, norm

Rules = tuple[TensorRule, ...]

AT = "layers.{layer}."
ATTN, MLP = f"{AT}self_attn.", f"{AT}mlp."

# ---- rules ----


def qkv(at: str = ATTN, *, bias: str = "", **options: Any) -> Rules:
    """Q, K and V as separate matrices, with biases if the flag ``bias`` holds."""
    options["bias_flag"] = bias
    return (
        *linear(T.Q, T.Q_BIAS, f"{at}q_proj", "q", "hidden", **options),
        *linear(T.K, T.K_BIAS, f"{at}k_proj", "kv", "hidden", **options),
        *linear(T.V, T.V_BIAS, f"{at}v_proj", "kv", "hidden", **options),
    )


def fused(names: Mapping[Any, Any], source: str, outs: tuple[str, ...], **options: Any) -> Rules:
    """Consecutive parts of one matrix: matrix -> its bias, or None."""
    return tuple(
        rule
        for part, (matrix, bias) in enumerate(names.items())
        for rule in linear(
            matrix, bias, source, outs[part], "hidden", parts=outs, part=part, **options
        )
    )


def out(at: str = ATTN, *, bias: str = "", **options: Any) -> Rules:
    options["bias_flag"] = bias
    return linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{at}o_proj", "hidden", "q", **options)


def attention(at: str = ATTN, **options: Any) -> Rules:
    return (*qkv(at, **options), *out(at, **options))


def gated(at: str = MLP, dim: str = "ffn", *, bias: str = "", **options: Any) -> Rules:
    options["bias_flag"] = bias
    return (
        *linear(T.FFN_GATE, T.FFN_GATE_BIAS, f"{at}gate_proj", dim, "hidden", **options),
        *linear(T.FFN_UP, T.FFN_UP_BIAS, f"{at}up_proj", dim, "hidden", **options),
        *linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, f"{at}down_proj", "hidden", dim, **options),
    )


def gated_fused() -> Rules:
    names = {T.FFN_GATE: None, T.FFN_UP: None}
    return (
        *fused(names, f"{MLP}gate_up_proj", ("ffn", "ffn")),
        *linear(T.FFN_DOWN, None, f"{MLP}down_proj", "hidden", "ffn"),
    )


def pre_norms(**options: Any) -> Rules:
    return (
        *norm(T.ATTN_NORM, f"{AT}input_layernorm", **options),
        *norm(T.FFN_NORM, f"{AT}post_attention_layernorm", **options),
    )


def post_norms() -> Rules:
    """The norms after attention and FFN, for layers without norms before them."""
    return (
        *norm(T.POST_ATTN_NORM, f"{AT}post_attention_layernorm"),
        *norm(T.POST_FFN_NORM, f"{AT}post_feedforward_layernorm"),
    )


def qk_norms(q: str = "head", k: str = "head", **options: Any) -> Rules:
    return (
        *norm(T.Q_NORM, f"{ATTN}q_norm", q, **options),
        *norm(T.K_NORM, f"{ATTN}k_norm", k, **options),
    )


ENDS = ends("embed_tokens", "norm")
ATTENTION = attention(bias="attention_bias")
LLAMA_RULES = (*pre_norms(), *ATTENTION, *gated(bias="mlp_bias"), *ENDS)

# ---- windows ----


def window_of_all(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """A window on every layer, unless the file or ``layer_types`` states none."""
    window_tokens, types = _windows(config, n_layers, [SLIDING] * n_layers)
    if len(set(types)) > 1:
        raise config.error("layer_types", "with different attention is not supported")
    return window_tokens, types


def window_when_switched(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Qwen: a window on the layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    first = config.get("max_window_layers")
    if not config.boolean("use_sliding_window"):
        return no_windows(config, n_layers)
    if isinstance(first, bool) or not isinstance(first, int):
        raise config.error("max_window_layers", f"= {shown(first)} is not a number of layers")
    return _windows(config, n_layers, [SLIDING if i >= first else FULL for i in range(n_layers)])


def window_but_every(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """A window on all layers but every n-th, by ``sliding_window_pattern``.

    The pattern is n, or the types of a period by their first letters (LLLG: the last one is
    global).
    """
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        pattern = 1
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        usual = [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(n_layers)]
    else:
        n = 1 if pattern == 1 else config.count("sliding_window_pattern", MAX_LAYERS)
        usual = [SLIDING if (i + 1) % n else FULL for i in range(n_layers)]
    return _windows(config, n_layers, usual)


def window_but_first_of_four(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """CWM, Granite: every fourth layer, beginning with the first, has no window."""
    return _windows(config, n_layers, [SLIDING if i % 4 else FULL for i in range(n_layers)])


def _windows(config: Config, n_layers: int, usual: list[str]) -> tuple[int, list[str]]:
    types = config.of_layers("layer_types", n_layers, (SLIDING, FULL))
    if config.get("sliding_window") is None:
        return 0, [FULL] * n_layers
    return config.count("sliding_window", MAX_TOKENS), usual if types is None else types


# ---- special cases ----


def _smollm3(draft: Draft) -> None:
    n_layers = draft.header.n_layers
    rotates = draft.config.of_layers("no_rope_layers", n_layers, (0, 1, True, False))
    interval = draft.config.count("no_rope_layer_interval", MAX_LAYERS)
    if rotates is None:
        rotates = [(i + 1) % interval != 0 for i in range(n_layers)]
    unrotated(draft, [i for i in range(n_layers) if not rotates[i]])


def _exaone4(draft: Draft) -> None:
    if draft.config.get("sliding_window") is not None:
        types = draft.layer_types
        unrotated(draft, [i for i, type_ in enumerate(types) if type_ == FULL])


def unrotated(draft: Draft, layers: list[int]) -> None:
    for i in layers:
        draft.layers[i] = replace(draft.layers[i], rope_set=ROPE_NONE)


def _rope_of_olmo3(config: Config, layer_type: str) -> Config:
    """In older configurations ``rope_scaling`` applies to layers without a window."""
    if layer_type == SLIDING and not config.has("rope_parameters"):
        return Config({"rope_theta": config.positive("rope_theta")})
    return parameters_of(config, layer_type)


LLAMA3_OF_CWM: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_YARN_OF_MINISTRAL: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

# Usual defaults of classes; a table states only its differences.
DEFAULTS: Mapping[str, Any] = {
    "norm_epsilon": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN2_RULES = (*pre_norms(), *qkv(bias="always"), *out(), *gated(), *ENDS)
_QWEN3_RULES = (*pre_norms(), *ATTENTION, *qk_norms(), *gated(), *ENDS)
_QWEN_DEFAULTS = usual(DEFAULTS, context=32768, window=4096, max_window_layers=28)
_OLMO_DEFAULTS = usual(DEFAULTS, context=2048, epsilon=1e-5)
_OLMO_RULES = (*post_norms(), *ATTENTION, *qk_norms("q", "kv"), *gated(), *ENDS)
# ---- GGUF files ----


def _gguf_llama(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("expert_count"):
        counts = {name: fields.get(KEYS[name]) for name in EXPERTS}
        return {"architectures": ["MixtralForCausalLM"], **counts}
    return {"architectures": ["MistralForCausalLM"]} if config.get("sliding_window") else {}


def _gguf_olmo(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    windows = layer_types(fields, config, 4)
    return {"architectures": ["Olmo3ForCausalLM"], **windows} if windows else {}


def _gguf_exaone4(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window"), **layer_types(fields, config, 4)}


_LLAMA_FAMILIES = (
    Family(
        name="LlamaForCausalLM",
        title="LLaMA 2, 3; SmolLM2; all with its blocks",
        gguf={
            "llama": Gguf(
                may=("sliding_window",),
                is_permuted=True,
                more=_gguf_llama,
                reads=("expert_count",),
                others=("MistralForCausalLM", "MixtralForCausalLM"),
            )
        },
        architecture=Architecture.LLAMA,
        rules=LLAMA_RULES,
        defaults=usual(DEFAULTS, context=2048),
    ),
    Family(
        name="MistralForCausalLM",
        title="Mistral, Mistral-Small 3",
        architecture=Architecture.MISTRAL,
        rules=LLAMA_RULES,
        defaults=usual(DEFAULTS, context=131072, kv_heads=8, window=4096),
        windows=window_of_all,
        nested=("Mistral3ForConditionalGeneration",),
    ),
    Family(
        name="Ministral3ForCausalLM",
        title="Ministral 3",
        gguf={"mistral3": Gguf(is_permuted=True)},
        rules=LLAMA_RULES,
        defaults=usual(
            DEFAULTS,
            context=262144,
            epsilon=1e-5,
            kv_heads=8,
            window=None,
            rope_parameters=_YARN_OF_MINISTRAL,
        ),
        windows=window_of_all,
        nested=("Mistral3ForConditionalGeneration",),
    ),
    Family(
        name="Qwen2ForCausalLM",
        title="Qwen 2, 2.5",
        gguf={"qwen2": Gguf()},
        rules=_QWEN2_RULES,
        defaults=_QWEN_DEFAULTS,
        windows=window_when_switched,
        neutral={"use_mrope": (None, False)},
    ),
    Family(
        name="Qwen2_5_VLTextForCausalLM",
        title="Qwen 2 VL, 2.5 VL (2B to 72B), text",
        model_type="qwen2_5_vl_text",
        gguf={"qwen2vl": Gguf(reads=VISION_KEYS)},
        nested=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
        rules=_QWEN2_RULES,
        defaults=usual(
            _QWEN_DEFAULTS, epsilon=1e-5, kv_heads=8, theta=1000000.0, max_window_layers=80
        ),
        windows=window_when_switched,
    ),
    Family(
        name="Qwen3ForCausalLM",
        title="Qwen 3",
        gguf={"qwen3": Gguf()},
        rules=_QWEN3_RULES,
        defaults=usual(_QWEN_DEFAULTS, head=128),
        windows=window_when_switched,
    ),
    Family(
        name="Qwen3VLTextForCausalLM",
        title="Qwen 3 VL (2B to 32B), text",
        model_type="qwen3_vl_text",
        gguf={"qwen3vl": Gguf(reads=VISION_KEYS)},
        nested=("Qwen3VLForConditionalGeneration",),
        rules=_QWEN3_RULES,
        defaults=usual(DEFAULTS, context=128000, kv_heads=32, head=128, theta=500000.0),
    ),
    Family(
        name="Phi3ForCausalLM",
        title="Phi-3, 3.5, 4, 4-mini",
        has_partial_rope=True,
        gguf={"phi3": Gguf(may=("sliding_window",))},
        architecture=Architecture.PHI,
        rules=(
            *pre_norms(),
            *fused({T.Q: None, T.K: None, T.V: None}, f"{ATTN}qkv_proj", ("q", "kv", "kv")),
            *out(),
            *gated_fused(),
            *ENDS,
        ),
        defaults=usual(DEFAULTS, context=4096, epsilon=1e-5, window=None),
        windows=window_of_all,
    ),
    Family(
        name="SmolLM3ForCausalLM",
        title="SmolLM3",
        model_type="smollm3",
        gguf={"smollm3": Gguf(is_permuted=True)},
        rules=LLAMA_RULES,
        defaults=usual(
            DEFAULTS,
            context=32768,
            kv_heads=4,
            tied=True,
            theta=2000000.0,
            no_rope_layer_interval=4,
            window=None,
        ),
        neutral={"use_sliding_window": (None, False)},
        adjust=_smollm3,
    ),
    Family(
        name="Olmo2ForCausalLM",
        title="OLMo 2",
        gguf={
            "olmo2": Gguf(may=("sliding_window",), more=_gguf_olmo, others=("Olmo3ForCausalLM",))
        },
        rules=_OLMO_RULES,
        defaults=_OLMO_DEFAULTS,
    ),
    Family(
        name="Olmo3ForCausalLM",
        title="OLMo 3",
        rules=_OLMO_RULES,
        defaults=usual(_OLMO_DEFAULTS, theta=500000.0, window=4096, sliding_window_pattern=4),
        windows=window_but_every,
        rope_parameters=_rope_of_olmo3,
    ),
    Family(
        name="Exaone4ForCausalLM",
        title="EXAONE 4; 4.5, text",
        gguf={"exaone4": Gguf(may=("sliding_window",), more=_gguf_exaone4)},
        nested=("Exaone4_5_ForConditionalGeneration",),
        left_out=(*SENSES, "mtp."),
        rules=(*post_norms(), *attention(), *qk_norms(), *gated(), *ENDS),
        defaults=usual(
            DEFAULTS, context=2048, epsilon=1e-5, kv_heads=32, window=4096, sliding_window_pattern=4
        ),
        windows=window_but_every,
        adjust=_exaone4,
    ),
    Family(
        name="SeedOssForCausalLM",
        title="Seed-OSS",
        gguf={"seed_oss": Gguf()},
        rules=(
            *pre_norms(),
            *qkv(bias="attention_bias"),
            *out(bias="attention_out_bias"),
            *gated(bias="mlp_bias"),
            *ENDS,
        ),
        defaults=usual(DEFAULTS, context=524288, kv_heads=8, head=128),
        flags={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    ),
    Family(
        name="Ernie4_5ForCausalLM",
        title="ERNIE 4.5",
        gguf={"ernie4_5": Gguf()},
        is_interleaved=True,
        rules=(*pre_norms(), *attention(bias="use_bias"), *gated(bias="use_bias"), *ENDS),
        defaults=usual(
            DEFAULTS, context=131072, epsilon=1e-5, tied=True, kv_heads=2, head=128, theta=500000.0
        ),
        flags={"use_bias": False},
    ),
    Family(
        name="CwmForCausalLM",
        title="CWM",
        rules=LLAMA_RULES,
        defaults=usual(
            DEFAULTS,
            context=131072,
            epsilon=1e-5,
            kv_heads=8,
            head=128,
            rope_parameters=LLAMA3_OF_CWM,
            window=8192,
        ),
        windows=window_but_first_of_four,
    ),
    Family(
        name="HeliumForCausalLM",
        title="Helium",
        is_interleaved=True,
        rules=LLAMA_RULES,
        defaults=usual(DEFAULTS, context=4096, epsilon=1e-8, head=128, theta=100000.0),
    ),
    Family(
        name="InternLM3ForCausalLM",
        title="InternLM 3",
        model_type="internlm3",
        rules=(*pre_norms(), *qkv(bias="qkv_bias"), *out(bias="bias"), *gated(bias="bias"), *ENDS),
        defaults=usual(DEFAULTS, context=32768, epsilon=1e-5, kv_heads=2, head=128),
        flags={"qkv_bias": False, "bias": False},
    ),
    *(
        Family(
            name=f"{name}ForCausalLM",
            title=title,
            model_type=name.lower(),
            gguf={arch: Gguf()},
            is_interleaved=True,
            has_partial_rope=True,
            rules=(*pre_norms(), *more, *qkv(bias="attention_bias"), *out(), *gated_fused(), *ENDS),
            defaults=usual(
                DEFAULTS,
                context=131072,
                epsilon=1.5625e-07,
                kv_heads=2,
                head=128,
                partial_rotary_factor=0.5,
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
        gguf={"bitnet": Gguf()},
        rules=(
            *pre_norms(),
            *ATTENTION,
            *norm(T.ATTN_SUB_NORM, f"{ATTN}attn_sub_norm"),
            *norm(T.FFN_SUB_NORM, f"{MLP}ffn_sub_norm", "ffn"),
            *gated(),
            *ENDS,
        ),
        defaults=usual(
            DEFAULTS, context=2048, epsilon=1e-5, hidden_act="relu2", kv_heads=5, theta=500000.0
        ),
    ),
)


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


_APERTUS_FAMILIES = (
    Family(
        name="ApertusForCausalLM",
        title="Apertus (8B, 70B)",
        gguf={
            "apertus": Gguf(
                may=tuple(_KEYS), keys=_KEYS, lists=tuple(_KEYS.values()), reads=("xielu.eps",)
            )
        },
        activation=Activation.SILU,  # KIND has xIELU
        rules=(
            *norm(T.ATTN_NORM, f"{AT}attention_layernorm"),
            *norm(T.FFN_NORM, f"{AT}feedforward_layernorm"),
            *ATTENTION,
            *qk_norms(),
            *linear(T.FFN_UP, None, f"{MLP}up_proj", "ffn", "hidden"),
            *linear(T.FFN_DOWN, None, f"{MLP}down_proj", "hidden", "ffn"),
            *ENDS,
        ),
        ignored_suffixes=(
            "rotary_emb.inv_freq",
            *(f"act_fn.{name}" for name in _XIELU),
            "act_fn.eps",
        ),
        scalars={f"xielu_{name}": f"{MLP}act_fn.{name}" for name in _XIELU},
        defaults=usual(
            DEFAULTS,
            context=65536,
            epsilon=1e-5,
            hidden_act="xielu",
            rope_parameters={**LLAMA3_OF_CWM, "rope_theta": 12000000.0, "factor": 8.0},
        ),
        neutral={"qk_norm": (True,), "post_norm": (None, False), "mlp_bias": (None, False)},
        adjust=_apertus,
    ),
)


FAMILIES = (*_LLAMA_FAMILIES, *_APERTUS_FAMILIES)
