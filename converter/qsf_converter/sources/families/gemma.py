"""Gemma 1 to 3: norms stored as w of 1 + w, and factors of the embedding."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qsf.file.kinds import QkNorm
from qsf.file.layout import Activation
from qsf_converter.sources.families.config import MAX_DIM, Config
from qsf_converter.sources.families.family import SLIDING, Draft, Family, usual
from qsf_converter.sources.families.gguf import Fields, Gguf, Shapes, layer_types
from qsf_converter.sources.families.llama import (
    AT,
    ATTENTION,
    SENSES,
    TEXT_PREFIXES,
    gated,
    pre_norms,
    qk_norms,
    window_but_every,
)
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import T, ends, norm


def scale_and_cap(draft: Draft) -> None:
    """The embedding's factor: the root of the width, in the type of the checkpoint."""
    config = draft.config
    factor = math.sqrt(draft.header.dim)
    if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")):
        factor = _rounded(factor)
    cap = 0.0
    if config.get("final_logit_softcapping") is not None:
        cap = config.positive("final_logit_softcapping")
    draft.arch = replace(draft.arch, embedding_factor=factor, logit_cap=cap)


def scale_and_cap_scores(draft: Draft) -> None:
    """The embedding's factor, and how scores are scaled and capped."""
    scale_and_cap(draft)
    config = draft.config
    if draft.config.get("query_pre_attn_scalar") is not None:
        scalar = config.count("query_pre_attn_scalar", MAX_DIM)
        draft.set_all(score_scale=1 / math.sqrt(scalar))
    if config.get("attn_logit_softcapping") is not None:
        draft.set_all(score_cap=config.positive("attn_logit_softcapping"))


def _rounded(value: float) -> float:
    """The nearest number of bf16; the root of a whole number is never halfway between two."""
    bits = np.float32(value).view(np.uint32) + np.uint32(0x8000)
    return float((bits & np.uint32(0xFFFF0000)).view(np.float32))


def rope_of_gemma3(config: Config, layer_type: str) -> Config:
    """Older configurations state the theta of windowed layers only, and scale the other layers
    alone.
    """
    if layer_type != SLIDING:
        return parameters_of(config, layer_type)
    if config.get("rope_parameters"):
        return parameters_of(config, layer_type, theta="rope_local_base_freq")
    return Config({"rope_theta": config.positive("rope_local_base_freq")})


_ENDS = ends("embed_tokens", "norm", add=1.0)
_SANDWICH = (
    *norm(T.ATTN_NORM, f"{AT}input_layernorm", add=1.0),
    *norm(T.POST_ATTN_NORM, f"{AT}post_attention_layernorm", add=1.0),
    *norm(T.FFN_NORM, f"{AT}pre_feedforward_layernorm", add=1.0),
    *norm(T.POST_FFN_NORM, f"{AT}post_feedforward_layernorm", add=1.0),
)
RENAMES = {"norm_epsilon": "rms_norm_eps", "hidden_act": "hidden_activation"}
_family = functools.partial(
    Family,
    renames=RENAMES,
    flags={"attention_bias": False},
    adjust=scale_and_cap_scores,
    neutral={"use_bidirectional_attention": (None, False)},
)
_DEFAULTS: Mapping[str, Any] = {
    "norm_epsilon": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_WINDOWED: Mapping[str, Any] = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS: Mapping[str, Any] = usual(
    _WINDOWED,
    context=8192,
    sliding_window_pattern=2,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)

GEMMA3_DEFAULTS: Mapping[str, Any] = usual(
    _WINDOWED,
    context=131072,
    vocab_size=262208,
    num_attention_heads=8,
    sliding_window_pattern=6,
    theta=1000000.0,
    rope_local_base_freq=10000.0,
)
BLOCK = (*_SANDWICH, *ATTENTION)


def _gemma1(draft: Draft) -> None:
    scale_and_cap_scores(draft)
    # Its files say gelu but mean the tanh form; transformers reads them so.
    draft.config.get("hidden_activation")
    if draft.header.activation == Activation.GELU_ERF:
        draft.header = replace(draft.header, activation=Activation.GELU_TANH)
        draft.set_all(activation=Activation.GELU_TANH)


def _gguf(period: int, largest: int) -> Callable[..., dict[str, Any]]:
    """llama.cpp knows the scale of each generation's largest model, recognised by its layers."""

    def more(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == largest
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            **layer_types(fields, config, period),
            "query_pre_attn_scalar": width if is_largest else config["head_dim"],
        }

    return more


# Published checkpoints are bf16, in which the factor of the embedding is rounded.
_BF16 = {"dtype": "bfloat16"}
_GGUF_MAY = (
    "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq",
)  # fmt: skip
GGUF_GEMMA3 = Gguf(may=_GGUF_MAY, constants=_BF16, has_one_in_norms=True, more=_gguf(6, 62))


FAMILIES = (
    _family(
        name="GemmaForCausalLM",
        title="Gemma 1",
        model_type="gemma",
        gguf={"gemma": Gguf(constants=_BF16, has_one_in_norms=True)},
        rules=(*pre_norms(add=1.0), *ATTENTION, *gated(), *_ENDS),
        renames={"norm_epsilon": "rms_norm_eps"},
        defaults=usual(_DEFAULTS, context=8192, kv_heads=16),
        adjust=_gemma1,
    ),
    _family(
        name="Gemma2ForCausalLM",
        title="Gemma 2",
        model_type="gemma2",
        gguf={
            "gemma2": Gguf(
                may=_GGUF_MAY[:3], constants=_BF16, has_one_in_norms=True, more=_gguf(2, 46)
            )
        },
        rules=(*_SANDWICH, *ATTENTION, *gated(), *_ENDS),
        defaults=_GEMMA2_DEFAULTS,
        windows=window_but_every,
    ),
    _family(
        name="VaultGemmaForCausalLM",
        title="VaultGemma",
        model_type="vaultgemma",
        rules=(
            *norm(T.ATTN_NORM, f"{AT}input_layernorm", add=1.0),
            *norm(T.FFN_NORM, f"{AT}pre_feedforward_layernorm", add=1.0),
            *ATTENTION,
            *gated(),
            *_ENDS,
        ),
        defaults=_GEMMA2_DEFAULTS,
        windows=window_but_every,
    ),
    _family(
        name="Gemma3ForCausalLM",
        title="Gemma 3",
        model_type="gemma3_text",
        gguf={"gemma3": GGUF_GEMMA3},
        rules=(*_SANDWICH, *ATTENTION, *qk_norms(add=1.0), *gated(), *_ENDS),
        prefixes=TEXT_PREFIXES,
        nested=("Gemma3ForConditionalGeneration",),
        left_out=SENSES,
        defaults=GEMMA3_DEFAULTS,
        kind={"qk_norm": QkNorm.PER_HEAD},
        windows=window_but_every,
        rope_parameters=rope_of_gemma3,
    ),
)
