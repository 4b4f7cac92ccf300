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
    layers_of,
)

_GEMMA3 = DIALECTS["gemma3"]


def _encoder(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("attention.causal", False):
        raise QsfConversionError("its metadata's attention.causal = True is not supported")
    if any("_exps." in name for name in shapes):
        raise QsfConversionError("an encoder with experts is not supported")
    types = shapes.get("token_types.weight", (1, 0))
    return {"type_vocab_size": types[0] if len(types) > 1 else 1}


def _gemma(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    assert _GEMMA3.more is not None
    return {
        **_GEMMA3.more(fields, shapes, config),
        **_encoder(fields, shapes, config),
        "use_bidirectional_attention": True,
    }


_EMBEDDINGS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
}
_BERT = Dialect(
    family="BertModel",
    config={**CONFIG, "layer_norm_eps": "attention.layer_norm_epsilon"},
    optional={},
    constants={"hidden_act": "gelu"},
    tensors={
        **_EMBEDDINGS,
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
    read_by_more=("attention.causal",),
)

ENCODER_DIALECTS: Final[Mapping[str, Dialect]] = {
    "bert": _BERT,  # XLM-RoBERTa too, whose positions llama.cpp has cut
    "nomic-bert": replace(
        _BERT,
        family="NomicBertModel",
        optional={"rotary_emb_base": "rope.freq_base"},
        constants={"hidden_act": "silu"},
        tensors={
            **_EMBEDDINGS,
            "token_embd_norm.weight": "emb_ln.weight",
            "token_embd_norm.bias": "emb_ln.bias",
            **layers_of(
                "encoder.layers",
                {
                    "attn_qkv": "attn.Wqkv",
                    "attn_output": "attn.out_proj",
                    "attn_output_norm": "norm1",
                    "ffn_up": "mlp.fc11",
                    "ffn_gate": "mlp.fc12",
                    "ffn_down": "mlp.fc2",
                    "layer_output_norm": "norm2",
                },
            ),
        },
    ),
    "gemma-embedding": replace(
        _GEMMA3,
        family="Gemma3TextModel",
        tensors={here: there.removeprefix("model.") for here, there in _GEMMA3.tensors.items()},
        more=_gemma,
        read_by_more=(*_GEMMA3.read_by_more, "attention.causal"),
    ),
}
