"""How llama.cpp stores families with LayerNorm, as tables. Sources as in `gguf_dialects`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf_converter.sources.gguf_dialects import (
    ATTENTION_BIAS,
    BIASES,
    CONFIG,
    FFN,
    LLAMA_NAMES,
    OPTIONAL,
    OUT,
    PRE,
    QK,
    QKV,
    WINDOW,
    Dialect,
    Fields,
    Shapes,
    layers_of,
    names,
    own_names,
)


def _stablelm(_fields: Fields, shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    if any("attn_q_norm" in name for name in shapes):
        raise QsfConversionError(
            "norms of single heads' queries are not supported in GGUF files; convert the "
            "original model"
        )
    return {"use_parallel_residual": not any("ffn_norm" in name for name in shapes)}


def _falcon(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    n_kv_heads = fields.get("attention.head_count_kv", config["num_attention_heads"])
    return {"multi_query": n_kv_heads == 1, "num_kv_heads": n_kv_heads}


def _mpt(fields: Fields, _shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_config": {
            "alibi_bias_max": fields.get("attention.max_alibi_bias", 8.0),
            "clip_qkv": fields.get("attention.clamp_kqv"),
        }
    }


_LAYER_NORM = {**CONFIG, "layer_norm_eps": "attention.layer_norm_epsilon"}
_FALCON = Dialect(
    family="FalconForCausalLM",
    config={
        **{key: CONFIG[key] for key in CONFIG if key != "intermediate_size"},
        "ffn_hidden_size": "feed_forward_length",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
    },
    optional={"rope_theta": "rope.freq_base"},
    constants={"activation": "gelu", "parallel_attn": True, "alibi": False},
    tensors=own_names(
        "transformer.h",
        ("transformer.word_embeddings", "transformer.ln_f"),
        attn_norm="input_layernorm",
        attn_qkv="self_attention.query_key_value",
        attn_output="self_attention.dense",
        ffn_up="mlp.dense_h_to_4h",
        ffn_down="mlp.dense_4h_to_h",
    ),
    is_ungrouped=True,
    has={"bias": "attn_qkv.bias", "new_decoder_architecture": "attn_norm_2"},
    more=_falcon,
)

_COHERE = Dialect(
    family="CohereForCausalLM",
    config={**_LAYER_NORM, "logit_scale": "logit_scale"},
    tensors=names({"attn_norm": "input_layernorm"}, QKV, QK, OUT, FFN),
    has={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm"},
)
_JAIS2 = Dialect(
    family="Jais2ForCausalLM",
    config=_LAYER_NORM,
    constants={"hidden_act": "relu2"},
    tensors=LLAMA_NAMES,
    has=BIASES,
)

LAYER_NORM_DIALECTS: Final[Mapping[str, Dialect]] = {
    "command-r": _COHERE,
    # llama.cpp uses no window in every fourth layer of this architecture.
    "cohere2": replace(
        _COHERE,
        family="Cohere2ForCausalLM",
        optional={**OPTIONAL, **WINDOW},
        has=ATTENTION_BIAS,
    ),
    "jais2": _JAIS2,
    "nemotron": replace(
        _JAIS2,
        family="NemotronForCausalLM",
        config={**CONFIG, "norm_eps": "attention.layer_norm_epsilon"},
        has_one_in_norms=True,
    ),
    "gpt2": Dialect(
        family="GPT2LMHeadModel",
        config={
            "n_layer": "block_count",
            "n_embd": "embedding_length",
            "n_inner": "feed_forward_length",
            "n_head": "attention.head_count",
            "n_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        optional={},
        constants={"activation_function": "gelu_new"},
        tensors={
            "position_embd.weight": "transformer.wpe.weight",
            **own_names(
                "transformer.h",
                ("transformer.wte", "transformer.ln_f"),
                attn_norm="ln_1",
                attn_qkv="attn.c_attn",
                attn_output="attn.c_proj",
                ffn_norm="ln_2",
                ffn_up="mlp.c_fc",
                ffn_down="mlp.c_proj",
            ),
        },
    ),
    "phi2": Dialect(
        family="PhiForCausalLM",
        config=_LAYER_NORM,
        constants={"hidden_act": "gelu_new"},
        tensors=own_names(
            "model.layers",
            ("model.embed_tokens", "model.final_layernorm"),
            **QKV,
            attn_norm="input_layernorm",
            attn_output="self_attn.dense",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
        ),
    ),
    "stablelm": Dialect(
        family="StableLmForCausalLM",
        config=_LAYER_NORM,
        tensors=LLAMA_NAMES,
        has={"use_qkv_bias": "attn_q.bias"},
        more=_stablelm,
    ),
    "starcoder2": Dialect(
        family="Starcoder2ForCausalLM",
        config={**CONFIG, "norm_epsilon": "attention.layer_norm_epsilon"},
        constants={"hidden_act": "gelu_pytorch_tanh"},
        tensors=names(PRE, QKV, OUT, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        has={"use_bias": "attn_q.bias"},
    ),
    "gptneox": Dialect(
        family="GPTNeoXForCausalLM",
        config=_LAYER_NORM,
        optional={
            "rotary_emb_base": "rope.freq_base",
            "use_parallel_residual": "use_parallel_residual",
        },
        constants={"hidden_act": "gelu"},
        tensors=own_names(
            "gpt_neox.layers",
            ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
            attn_norm="input_layernorm",
            attn_qkv="attention.query_key_value",
            attn_output="attention.dense",
            ffn_norm="post_attention_layernorm",
            ffn_up="mlp.dense_h_to_4h",
            ffn_down="mlp.dense_4h_to_h",
        ),
        is_ungrouped=True,
        has={"attention_bias": "attn_qkv.bias"},
    ),
    "falcon": _FALCON,
    "bloom": Dialect(
        family="BloomForCausalLM",
        config={
            "n_layer": "block_count",
            "n_embed": "embedding_length",
            "n_head": "attention.head_count",
            "seq_length": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        optional={},
        tensors={
            **_FALCON.tensors,
            "token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
            "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
            **layers_of("transformer.h", {"ffn_norm": "post_attention_layernorm"}),
        },
        is_ungrouped=True,
    ),
    "mpt": Dialect(
        family="MptForCausalLM",
        config={
            "n_layers": "block_count",
            "d_model": "embedding_length",
            "n_heads": "attention.head_count",
            "max_seq_len": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        optional={},
        tensors=own_names(
            "transformer.blocks",
            ("transformer.wte", "transformer.norm_f"),
            attn_norm="norm_1",
            attn_qkv="attn.Wqkv",
            attn_output="attn.out_proj",
            ffn_norm="norm_2",
            ffn_up="ffn.up_proj",
            ffn_down="ffn.down_proj",
        ),
        more=_mpt,
        read_by_more=("attention.max_alibi_bias", "attention.clamp_kqv"),
    ),
}

_FALCON_TWO_NORMS: Final = replace(
    _FALCON,
    tensors={
        **_FALCON.tensors,
        **layers_of("transformer.h", {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}),
    },
)


def variant_of(dialect: Dialect, shapes: Shapes) -> Dialect:
    """Return the dialect that matches the tensors: Falcon has one norm a layer, or two."""
    if dialect is _FALCON and any("attn_norm_2" in name for name in shapes):
        return _FALCON_TWO_NORMS
    return dialect
