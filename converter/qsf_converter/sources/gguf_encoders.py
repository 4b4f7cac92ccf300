"""How llama.cpp stores encoders, as tables. Sources as in `gguf_dialects`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf_converter.sources.gguf_dialects import (
    CONFIG,
    DIALECTS,
    Dialect,
    Fields,
    Shapes,
    ends_of,
    layer_types,
    layers_of,
)

_GEMMA3 = DIALECTS["gemma3"]
_CLS, _RANK = 2, 4  # llama.cpp's numbers of poolings; the second one is of rerankers


def _encoder(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("attention.causal", False):
        raise QsfConversionError("its metadata's attention.causal = True is not supported")
    types = shapes.get("token_types.weight", (1, 0))
    n_types = {"type_vocab_size": types[0] if len(types) > 1 else 1}
    if fields.get("pooling_type") != _RANK and "cls.output.weight" not in shapes:
        return n_types
    is_modern = "token_types.weight" not in shapes and "position_embd.weight" not in shapes
    name = "ModernBert" if is_modern else "Bert"
    return {**n_types, "architectures": [f"{name}ForSequenceClassification"]}


def _gemma(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    assert _GEMMA3.more is not None
    return {
        **_GEMMA3.more(fields, shapes, config),
        **_encoder(fields, shapes, config),
        "use_bidirectional_attention": True,
    }


def _modern(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The first layer of each period has no window; without a theta for windows there is one."""
    types = layer_types(fields, {"sliding_window": config.get("local_attention")}, 3)
    every = types.pop("sliding_window_pattern", 1)
    return {
        **_encoder(fields, shapes, config),
        "classifier_pooling": "cls" if fields.get("pooling_type") == _CLS else "mean",
        "local_rope_theta": fields.get("rope.freq_base_swa", config.get("global_rope_theta")),
        **(types or {"global_attn_every_n_layers": every}),
    }


_EMBEDDINGS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
}


def _head_of(dense: str, out: str) -> dict[str, str]:
    return {
        f"{here}.{kind}": f"{there}.{kind}"
        for here, there in (("cls", dense), ("cls.output", out), ("cls.norm", "head.norm"))
        for kind in ("weight", "bias")
    }


_BERT = Dialect(
    family="BertModel",
    config={**CONFIG, "layer_norm_eps": "attention.layer_norm_epsilon"},
    optional={},
    constants={"hidden_act": "gelu"},
    tensors={
        **_EMBEDDINGS,
        **_head_of("classifier.dense", "classifier.out_proj"),
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
        **layers_of(
            "encoder.layer",
            {
                "attn_q": "attention.self.query",
                "attn_k": "attention.self.key",
                "attn_v": "attention.self.value",
                "attn_output": "attention.output.dense",
                "attn_output_norm": "attention.output.LayerNorm",
                "ffn_up": "intermediate.dense",
                "ffn_down": "output.dense",
                "layer_output_norm": "output.LayerNorm",
            },
        ),
    },
    more=_encoder,
    read_by_more=("attention.causal", "classifier.output_labels"),
    other_families=("BertForSequenceClassification",),
)


def _nomic_names(**ffn: str) -> dict[str, str]:
    both = {"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1"}
    both |= {"layer_output_norm": "norm2", **{here: f"mlp.{name}" for here, name in ffn.items()}}
    norms = {f"token_embd_norm.{kind}": f"emb_ln.{kind}" for kind in ("weight", "bias")}
    return {**_EMBEDDINGS, **norms, **layers_of("encoder.layers", both)}


_NOMIC = replace(
    _BERT,
    family="NomicBertModel",
    optional={"rotary_emb_base": "rope.freq_base"},
    other_families=(),
)

ENCODER_DIALECTS: Final[Mapping[str, Dialect]] = {
    "bert": _BERT,  # XLM-RoBERTa too, whose positions llama.cpp has cut
    "nomic-bert": replace(
        _NOMIC,
        constants={"hidden_act": "silu"},
        tensors=_nomic_names(ffn_up="fc11", ffn_gate="fc12", ffn_down="fc2"),
    ),
    "nomic-bert-moe": replace(
        _NOMIC,
        config={**_BERT.config, "num_experts": "expert_count", "moe_top_k": "expert_used_count"},
        optional={**_NOMIC.optional, "moe_every_n_layers": "moe_every_n_layers"},
        # Files lack the bias behind the experts.
        constants={"hidden_act": "gelu", "experts_bias": False},
        has={
            "qkv_proj_bias": "attn_qkv.bias",
            "mlp_fc1_bias": "ffn_up.bias",
            "mlp_fc2_bias": "ffn_down.bias",
        },
        tensors=_nomic_names(
            ffn_up="fc1",
            ffn_down="fc2",
            ffn_gate_inp="router.layer",
            ffn_up_exps="experts.mlp.w1",
            ffn_down_exps="experts.mlp.w2",
        ),
        n_layouts=2,
    ),
    "modern-bert": Dialect(
        family="ModernBertModel",
        config={**CONFIG, "norm_eps": "attention.layer_norm_epsilon"},
        optional={
            "global_rope_theta": "rope.freq_base",
            "local_attention": "attention.sliding_window",
            "hidden_activation": "hidden_activation",
        },
        has={
            "norm_bias": "output_norm.bias",
            "attention_bias": "attn_output.bias",
            "mlp_bias": "ffn_down.bias",
        },
        tensors={
            **_head_of("head.dense", "classifier"),
            **ends_of("embeddings.tok_embeddings", "final_norm"),
            "token_embd_norm.weight": "embeddings.norm.weight",
            "token_embd_norm.bias": "embeddings.norm.bias",
            **layers_of(
                "layers",
                {
                    "attn_norm": "attn_norm",
                    "attn_qkv": "attn.Wqkv",
                    "attn_output": "attn.Wo",
                    "ffn_norm": "mlp_norm",
                    "ffn_up": "mlp.Wi",
                    "ffn_down": "mlp.Wo",
                },
            ),
        },
        more=_modern,
        read_by_more=("attention.causal", "rope.freq_base_swa", "classifier.output_labels"),
        other_families=("ModernBertForSequenceClassification",),
    ),
    "gemma-embedding": replace(
        _GEMMA3,
        family="Gemma3TextModel",
        tensors={here: there.removeprefix("model.") for here, there in _GEMMA3.tensors.items()},
        more=_gemma,
        read_by_more=(*_GEMMA3.read_by_more, "attention.causal"),
    ),
}
