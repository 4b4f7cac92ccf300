"""Families with LLaMA's attention, but LayerNorm or a plain FFN: Command R, Nemotron, Arcee."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qsf.file.kinds import Ffn, QkNorm
from qsf.file.layout import Norm
from qsf_converter.sources.families.family import FULL, Draft, Family, usual
from qsf_converter.sources.families.gguf import Gguf
from qsf_converter.sources.families.llama import (
    AT,
    ATTENTION,
    ATTN,
    BIASES,
    DEFAULTS,
    ENDS,
    MLP,
    Rules,
    gated,
    pre_norms,
    unrotated,
    window_but_every,
)
from qsf_converter.sources.families.rules import T, ends, layer, linear, norm


def _cohere(draft: Draft) -> None:
    if "use_qk_norm" in draft.flags:
        draft.set_all(qk_norm=QkNorm.OWN_WEIGHTS)
    draft.factors["logits"] = draft.config.positive("logit_scale")
    draft.set_all(is_parallel=True)


def _cohere2(draft: Draft) -> None:
    _cohere(draft)
    types = draft.layer_types
    unrotated(draft, [i for i, type_ in enumerate(types) if type_ == FULL])


def _layer_norms(**options: Any) -> Rules:
    return (
        *norm(T.ATTN_NORM, f"{AT}input_layernorm", bias=T.ATTN_NORM_BIAS, **options),
        *norm(T.FFN_NORM, f"{AT}post_attention_layernorm", bias=T.FFN_NORM_BIAS, **options),
    )


def _plus_one(rules: Rules) -> Rules:
    """Norm weights are stored as w of 1 + w, norm biases unchanged."""
    norms = (T.ATTN_NORM, T.FFN_NORM, T.FINAL_NORM)
    return tuple(replace(rule, add=1.0) if rule.target in norms else rule for rule in rules)


_PLAIN = (
    *linear(T.FFN_UP, T.FFN_UP_BIAS, f"{MLP}up_proj", "ffn", "hidden", bias_flag="mlp_bias"),
    *linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, f"{MLP}down_proj", "hidden", "ffn", bias_flag="mlp_bias"),
)
_OF_HEADS: dict[str, Any] = {"flag": "use_qk_norm", "is_flat": True}
_COHERE_RULES = (
    *norm(T.ATTN_NORM, f"{AT}input_layernorm"),
    *ATTENTION,
    layer(T.Q_NORM, f"{ATTN}q_norm.weight", "heads", "head", **_OF_HEADS),
    layer(T.K_NORM, f"{ATTN}k_norm.weight", "kv heads", "head", **_OF_HEADS),
    *gated(),
    *ends("embed_tokens", "norm", scale="logits"),
)
_BIASED_ENDS = ends("embed_tokens", "norm", bias=True)
_EPSILON = {"norm_epsilon": "layer_norm_eps"}
_COHERE_DEFAULTS = usual(DEFAULTS, context=8192, epsilon=1e-5, tied=True, logit_scale=0.0625)
_RELU2 = {**DEFAULTS, "norm_epsilon": 1e-5, "hidden_act": "relu2"}

FAMILIES = (
    Family(
        name="CohereForCausalLM",
        title="Command R, R+",
        model_type="cohere",
        gguf={"command-r": Gguf(needs=("logit_scale",))},
        norm=Norm.LAYER,
        is_interleaved=True,
        rules=_COHERE_RULES,
        renames=_EPSILON,
        defaults=usual(_COHERE_DEFAULTS, theta=500000.0),
        flags={"attention_bias": False, "use_qk_norm": False},
        adjust=_cohere,
    ),
    Family(
        name="Cohere2ForCausalLM",
        title="Command R7B, Command A",
        model_type="cohere2",
        gguf={"cohere2": Gguf(needs=("logit_scale",), may=("sliding_window",))},
        norm=Norm.LAYER,
        is_interleaved=True,
        rules=_COHERE_RULES,
        renames=_EPSILON,
        defaults=usual(_COHERE_DEFAULTS, head=128, window=4096, sliding_window_pattern=4),
        flags={"attention_bias": False},
        windows=window_but_every,
        neutral={
            # Windows and RoPE as the model's own code places them, which layer_types states too.
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "layer_switch": (4,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
            "use_parallel_embedding": (None, False, True),
            "use_qk_norm": (None, False),
        },
        adjust=_cohere2,
    ),
    Family(
        name="NemotronForCausalLM",
        title="Nemotron, Minitron",
        model_type="nemotron",
        gguf={"nemotron": Gguf(has_one_in_norms=True)},
        norm=Norm.LAYER,
        ffn=Ffn.PLAIN,
        has_partial_rope=True,
        rules=_plus_one((*_layer_norms(), *ATTENTION, *_PLAIN, *_BIASED_ENDS)),
        renames={"norm_epsilon": "norm_eps"},
        defaults=usual(_RELU2, context=4096, partial_rotary_factor=0.5),
        flags=BIASES,
        neutral={"normalization": ("layernorm1p",)},
    ),
    Family(
        name="Jais2ForCausalLM",
        title="Jais 2",
        model_type="jais2",
        gguf={"jais2": Gguf()},
        norm=Norm.LAYER,
        ffn=Ffn.PLAIN,
        rules=(*_layer_norms(), *ATTENTION, *_PLAIN, *_BIASED_ENDS),
        renames=_EPSILON,
        defaults=usual(_RELU2, context=8192),
        flags={"attention_bias": True, "mlp_bias": True},
    ),
    Family(
        name="ArceeForCausalLM",
        title="Arcee AFM",
        model_type="arcee",
        gguf={"arcee": Gguf(is_permuted=True)},
        ffn=Ffn.PLAIN,
        rules=(*pre_norms(), *ATTENTION, *_PLAIN, *ENDS),
        defaults=usual(_RELU2, context=4096),
        flags=BIASES,
    ),
)
