"""Encoders: no head, and a token sees later ones too. Their vectors are those of whole texts."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from qsf.file.kinds import Ffn, QkNorm
from qsf.file.layout import Norm, Positions
from qsf_converter.sources.families import gemma
from qsf_converter.sources.families.family import Draft, Family, usual
from qsf_converter.sources.families.gpt import GPT2_RENAMES
from qsf_converter.sources.families.llama import fused, gated, qk_norms, window_but_every
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import Place, T, TensorRule, layer, linear, norm

Rules = tuple[TensorRule, ...]
_L = "encoder.layer.{layer}."
_N = "encoder.layers.{layer}."
# What sentence-transformers computes behind the pooling: sources/dense.py makes it one matrix.
DENSE = "dense.weight"
_DENSE = TensorRule(Place.FINAL, T.DENSE, DENSE, ("hidden", "hidden"), flag="dense")
_ALWAYS = frozenset({"always"})


def as_encoder(draft: Draft) -> None:
    """No head; the rows of positions before `offset` are of padding."""
    config = draft.config
    draft.arch = replace(draft.arch, is_encoder=True, tied_head=False)
    draft.dims |= {"types": config.count("type_vocab_size", 1 << 16, 1), "offset": 0}


def _as_roberta(draft: Draft) -> None:
    """Positions count from the one after the padding token's id."""
    as_encoder(draft)
    offset = (draft.header.pad_id or 0) + 1
    n_tokens = draft.header.max_tokens - offset
    if n_tokens < 1:
        raise draft.config.error("max_position_embeddings", f"leaves no position behind {offset}")
    draft.header = replace(draft.header, max_tokens=n_tokens)
    draft.dims |= {"positions": n_tokens, "offset": offset}


def _as_nomic(draft: Draft) -> None:
    as_encoder(draft)
    epsilon = draft.config.positive("layer_norm_eps", draft.arch.norm_epsilon)  # transformers' name
    draft.arch = replace(draft.arch, norm_epsilon=epsilon)
    for name in ("max_trained_positions", "pad_vocab_size_multiple"):  # without effect
        draft.config.get(name)


def _as_embedding_gemma(draft: Draft) -> None:
    """A window is in both directions, and half of it lies on each side."""
    as_encoder(draft)
    gemma.scale_and_cap_scores(draft)
    if not draft.config.boolean("use_bidirectional_attention"):
        raise draft.config.error(
            "use_bidirectional_attention", "= False: Gemma3TextModel is supported as an encoder"
        )
    draft.layers = [
        replace(kind, window_tokens=kind.window_tokens and kind.window_tokens // 2 + 1)
        for kind in draft.layers
    ]


def post_norms(embeddings: str, attention: str, ffn: str) -> Rules:
    """The norm behind the embeddings, and those behind attention and FFN of each layer.

    That behind an FFN is stored as the norm of the next layer's input, or as the final one.
    """
    bias = T.INPUT_NORM_BIAS
    last = ffn.replace("{layer}", "{last}")
    final = ((T.FINAL_NORM, "weight"), (T.FINAL_NORM_BIAS, "bias"))
    return (
        *norm(T.INPUT_NORM, embeddings, bias=bias),
        *norm(T.INPUT_NORM, ffn.replace("{layer}", "{before}"), bias=bias),
        *norm(T.FFN_NORM, attention, bias=T.FFN_NORM_BIAS),
        *(TensorRule(Place.FINAL, kind, f"{last}.{name}", ("hidden",)) for kind, name in final),
    )


def ends(embeddings: str) -> Rules:
    """The embedding of tokens, and that of the type of all of them, the first one."""
    return (
        _DENSE,
        TensorRule(
            Place.EMBEDDING, T.EMBEDDING, f"{embeddings}word_embeddings.weight", ("vocab", "hidden")
        ),
        layer(T.INPUT_SHIFT, f"{embeddings}token_type_embeddings.weight", "hidden", slices="types"),
    )


_BIASED: Mapping[str, Any] = {"bias_flag": "always"}
_BERT: Mapping[str, Any] = {
    "norm": Norm.LAYER,
    "ffn": Ffn.PLAIN,
    "positions": Positions.LEARNED,
    "kind": {"is_post_norm": True},
    "facts": _ALWAYS,
    "ignored_suffixes": ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
    "renames": {"norm_epsilon": "layer_norm_eps"},
    "neutral": {"position_embedding_type": (None, "absolute"), "is_decoder": (None, False)},
    "rules": (
        TensorRule(
            Place.POSITIONS,
            None,
            "embeddings.position_embeddings.weight",
            ("positions", "hidden"),
            parts=("offset", "positions"),
            part=1,
        ),
        *ends("embeddings."),
        *post_norms(
            "embeddings.LayerNorm", f"{_L}attention.output.LayerNorm", f"{_L}output.LayerNorm"
        ),
        *linear(T.Q, T.Q_BIAS, f"{_L}attention.self.query", "q", "hidden", **_BIASED),
        *linear(T.K, T.K_BIAS, f"{_L}attention.self.key", "kv", "hidden", **_BIASED),
        *linear(T.V, T.V_BIAS, f"{_L}attention.self.value", "kv", "hidden", **_BIASED),
        *linear(
            T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_L}attention.output.dense", "hidden", "q", **_BIASED
        ),
        *linear(T.FFN_UP, T.FFN_UP_BIAS, f"{_L}intermediate.dense", "ffn", "hidden", **_BIASED),
        *linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, f"{_L}output.dense", "hidden", "ffn", **_BIASED),
    ),
}
_DEFAULTS = usual({}, norm_epsilon=1e-12, hidden_act="gelu", context=512, tied=False)

FAMILIES = (
    Family(
        name="BertModel",
        title="BERT: bge, e5, GTE, all-MiniLM",
        model_type="bert",
        prefixes=("bert.",),
        defaults=usual(_DEFAULTS, vocab_size=30522, type_vocab_size=2),
        adjust=as_encoder,
        **_BERT,
    ),
    *(
        Family(
            name=name,
            title=title,
            model_type=model_type,
            prefixes=("roberta.",),
            defaults=usual(_DEFAULTS, pad_token_id=1, type_vocab_size=2),
            adjust=_as_roberta,
            **_BERT,
        )
        for name, model_type, title in (
            ("XLMRobertaModel", "xlm-roberta", "XLM-RoBERTa: bge-m3, multilingual-e5"),
            ("RobertaModel", "roberta", "RoBERTa"),
        )
    ),
    Family(
        name="NomicBertModel",
        title="Nomic Embed 1, 1.5",
        model_type="nomic_bert",
        norm=Norm.LAYER,
        prefixes=("nomic_bert.",),
        rules=(
            *ends("embeddings."),
            *post_norms("emb_ln", f"{_N}norm1", f"{_N}norm2"),
            *fused(dict.fromkeys((T.Q, T.K, T.V)), f"{_N}attn.Wqkv", ("q", "kv", "kv")),
            *linear(T.ATTN_OUT, None, f"{_N}attn.out_proj", "hidden", "q"),
            *linear(T.FFN_GATE, None, f"{_N}mlp.fc12", "ffn", "hidden"),
            *linear(T.FFN_UP, None, f"{_N}mlp.fc11", "ffn", "hidden"),
            *linear(T.FFN_DOWN, None, f"{_N}mlp.fc2", "hidden", "ffn"),
        ),
        renames=GPT2_RENAMES,
        defaults=usual(_DEFAULTS, hidden_act="silu", type_vocab_size=2, theta=1000.0),
        kind={"is_post_norm": True},
        adjust=_as_nomic,
        rope_parameters=partial(parameters_of, theta="rotary_emb_base"),
        neutral={
            "dense_seq_output": (True,),
            "use_xentropy": (True,),
            "scale_attn_weights": (True,),
            "rotary_emb_fraction": (1,),
        },
    ),
    Family(
        name="Gemma3TextModel",
        title="EmbeddingGemma",
        model_type="gemma3_text",
        rules=(
            *gemma.BLOCK,
            *qk_norms(add=1.0),
            *gated(),
            TensorRule(Place.EMBEDDING, T.EMBEDDING, "embed_tokens.weight", ("vocab", "hidden")),
            TensorRule(Place.FINAL, T.FINAL_NORM, "norm.weight", ("hidden",), add=1.0),
            _DENSE,
        ),
        renames=gemma.RENAMES,
        defaults=gemma.GEMMA3_DEFAULTS,
        kind={"qk_norm": QkNorm.PER_HEAD},
        flags={"attention_bias": False},
        windows=window_but_every,
        rope_parameters=gemma.rope_of_gemma3,
        adjust=_as_embedding_gemma,
    ),
)
