"""Encoders: no head, and a token sees later ones too. Their vectors are those of whole texts."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from qsf.errors import QsfConversionError
from qsf.file.kinds import Ffn, QkNorm
from qsf.file.layout import MAX_CHOSEN, MAX_LAYER_EXPERTS, Norm, Positions
from qsf_converter.sources.families import gemma
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import MAX_DIM, MAX_LAYERS, MAX_TOKENS, Config
from qsf_converter.sources.families.family import (
    FULL,
    SLIDING,
    Draft,
    Family,
    window_but_every,
)
from qsf_converter.sources.families.gguf import KEYS, Fields, Gguf, Shapes, layer_types
from qsf_converter.sources.families.gpt import GPT2_RENAMES
from qsf_converter.sources.families.positions import parameters_of
from qsf_converter.sources.families.rules import (
    Place,
    T,
    TensorRule,
    Where,
    fused,
    layer,
    linear,
    norm,
)

Rules = tuple[TensorRule, ...]
_L = "encoder.layer.{layer}."
_N = "encoder.layers.{layer}."
# What sentence-transformers computes behind the pooling: sources/embedding.py makes it one matrix.
DENSE = "dense.weight"
_DENSE = TensorRule(Place.FINAL, T.DENSE, DENSE, ("hidden", "hidden"), flag="dense")


def as_encoder(draft: Draft) -> None:
    """No head; the rows of positions before `offset` are of padding."""
    config = draft.config
    draft.arch = replace(draft.arch, is_encoder=True, tied_head=False)
    draft.dims |= {"types": config.count("type_vocab_size", 1 << 16, 1), "offset": 0}


def _as_pairs(draft: Draft) -> None:
    """The second text of a pair has a type of its own."""
    as_encoder(draft)
    draft.flags |= {"pairs"} if draft.dims["types"] > 1 else set()


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
    _add_experts(draft)


def _add_experts(draft: Draft) -> None:
    """Of a mixture every n-th layer has experts, from the second layer on; no FFN is gated."""
    config, n_experts = draft.config, draft.config.get("num_experts")
    if not config.get("moe_every_n_layers") or not n_experts:
        return
    every = config.count("moe_every_n_layers", MAX_LAYERS, least=2)
    n_experts = config.count("num_experts", MAX_LAYER_EXPERTS)
    n_chosen = config.count("moe_top_k", min(MAX_CHOSEN, n_experts))
    draft.dims |= {"experts": n_experts, "expert": draft.header.ffn_dim}
    draft.set_all(ffn=Ffn.PLAIN)
    routed: dict[str, Any] = {"n_experts": n_experts, "n_chosen": n_chosen, "ffn": Ffn.NONE}
    routed |= {"expert_dim": draft.header.ffn_dim, "expert_ffn": Ffn.PLAIN}
    draft.layers = [
        replace(kind, **routed) if i % every == 1 else kind for i, kind in enumerate(draft.layers)
    ]


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


def _as_embedding_gemma2(draft: Draft) -> None:
    """A window of n tokens reaches as far to each side; the vectors have a width of their own."""
    as_encoder(draft)
    gemma.as_gemma4(draft)
    gemma.set_own_width(draft)
    draft.dims["vector"] = draft.config.count("embedding_dim", MAX_DIM)
    draft.layers = [
        replace(kind, window_tokens=kind.window_tokens and kind.window_tokens + 1)
        for kind in draft.layers
    ]


def _modern_windows(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Every third layer sees all tokens; the others half of the local ones on each side."""
    every = config.count("global_attn_every_n_layers", MAX_LAYERS)
    usual = [SLIDING if i % every else FULL for i in range(n_layers)]
    types = config.of_layers("layer_types", n_layers, (SLIDING, FULL))
    return config.count("local_attention", MAX_TOKENS) // 2 + 1, types or usual


def _rope_of_modern(config: Config, layer_type: str) -> Config:
    thetas = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
    for theta in thetas.values():  # a model may lack layers of a type
        config.get(theta)
    return parameters_of(config, layer_type, theta=thetas[layer_type])


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
    return (
        _DENSE,
        TensorRule(
            Place.EMBEDDING, T.EMBEDDING, f"{embeddings}word_embeddings.weight", ("vocab", "hidden")
        ),
        layer(T.INPUT_SHIFT, f"{embeddings}token_type_embeddings.weight", "hidden", slices="types"),
    )


_BIASED: Mapping[str, Any] = {"bias_flag": "always"}


def _modern_norm(weight: T, bias: T, source: str) -> Rules:
    return (*norm(weight, source), layer(bias, f"{source}.bias", "hidden", flag="norm_bias"))


_M = "layers.{layer}."
_BERT: Mapping[str, Any] = {
    "norm": Norm.LAYER,
    "positions": Positions.LEARNED,
    "kind": {"is_post_norm": True},
    "ignored_suffixes": ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
    "renames": {"norm_epsilon": "layer_norm_eps"},
    "neutral": {"position_embedding_type": "absolute", "is_decoder": False},
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


def _mixture(ending: str) -> Rules:
    """Plain FFNs with biases, or experts and one bias behind their sum."""
    at, dense = f"{_N}mlp.experts.", Where.DENSE
    shape = ("expert", "hidden")
    joined: dict[str, Any] = {"slices": "experts", "is_joined": not ending}
    up, out = (f"{at}mlp.{name}{ending}" for name in ("w1", "w2"))
    return (
        *linear(T.FFN_UP, None, f"{_N}mlp.fc1", "ffn", "hidden", where=dense),
        *linear(T.FFN_DOWN, None, f"{_N}mlp.fc2", "hidden", "ffn", where=dense),
        layer(T.FFN_UP_BIAS, f"{_N}mlp.fc1.bias", "ffn", flag="mlp_fc1_bias", where=dense),
        layer(T.FFN_DOWN_BIAS, f"{_N}mlp.fc2.bias", "hidden", flag="mlp_fc2_bias", where=dense),
        layer(T.FFN_DOWN_BIAS, f"{at}bias", "hidden", flag="experts_bias", where=Where.ROUTED),
        r.router(f"{_N}mlp.router.layer.weight"),
        TensorRule(Place.EXPERT, T.FFN_UP, up, shape, **joined),
        TensorRule(Place.EXPERT, T.FFN_DOWN, out, shape[::-1], transposed=not ending, **joined),
    )


_QKV = {T.Q: T.Q_BIAS, T.K: T.K_BIAS, T.V: T.V_BIAS}
_GATE_UP = {T.FFN_GATE: T.FFN_GATE_BIAS, T.FFN_UP: T.FFN_UP_BIAS}
_QB: Mapping[str, Any] = {"bias_flag": "qkv_proj_bias"}
_AB: Mapping[str, Any] = {"bias_flag": "attention_bias"}
_MB: Mapping[str, Any] = {"bias_flag": "mlp_bias"}
_MODERN: Mapping[str, Any] = {
    "model_type": "modernbert",
    "norm": Norm.LAYER,
    "rules": (
        _DENSE,
        TensorRule(
            Place.EMBEDDING, T.EMBEDDING, "embeddings.tok_embeddings.weight", ("vocab", "hidden")
        ),
        *_modern_norm(T.INPUT_NORM, T.INPUT_NORM_BIAS, "embeddings.norm"),
        *_modern_norm(T.ATTN_NORM, T.ATTN_NORM_BIAS, "layers.{later}.attn_norm"),
        *_modern_norm(T.FFN_NORM, T.FFN_NORM_BIAS, f"{_M}mlp_norm"),
        *fused(_QKV, f"{_M}attn.Wqkv", ("q", "kv", "kv"), **_AB),
        *linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_M}attn.Wo", "hidden", "q", **_AB),
        *fused(_GATE_UP, f"{_M}mlp.Wi", ("ffn", "ffn"), **_MB),
        *linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, f"{_M}mlp.Wo", "hidden", "ffn", **_MB),
        *(
            replace(rule, place=Place.FINAL)
            for rule in _modern_norm(T.FINAL_NORM, T.FINAL_NORM_BIAS, "final_norm")
        ),
    ),
    "renames": {"norm_epsilon": "norm_eps", "hidden_act": "hidden_activation"},
    "defaults": {
        "vocab_size": 50368,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
    },
    "flags": {"norm_bias": False, "attention_bias": False, "mlp_bias": False},
    "ignored_suffixes": tuple(  # of a head that guesses words
        f"{part}.{kind}"
        for part in ("head.dense", "head.norm", "decoder")
        for kind in ("weight", "bias")
    ),
    "windows": _modern_windows,
    "rope_parameters": _rope_of_modern,
    "adjust": as_encoder,
    # Of heads and training.
    "ignored_keys": "classifier_(activation|bias|pooling)|decoder_bias|deterministic_flash_attn"
    "|layer_norm_eps|position_embedding_type|reference_compile|repad_logits_with_grad"
    "|sparse_prediction|sparse_pred_ignore_index|embedding_dropout",
}

# ---- GGUF files ----

_CLS, _RANK = 2, 4  # llama.cpp's numbers of poolings; the second one is of rerankers


def _gguf(fields: Fields, shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("attention.causal", False):
        raise QsfConversionError("its metadata's attention.causal = True is not supported")
    types = shapes.get("token_types.weight", (1, 0))
    n_types = {"type_vocab_size": types[0] if len(types) > 1 else 1}
    if fields.get("pooling_type") != _RANK and "cls.output.weight" not in shapes:
        return n_types
    is_modern = "token_types.weight" not in shapes and "position_embd.weight" not in shapes
    name = "ModernBert" if is_modern else "Bert"
    return {**n_types, "architectures": [f"{name}ForSequenceClassification"]}


def _gguf_gemma(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    assert gemma.GGUF_GEMMA3.more is not None
    return {
        **gemma.GGUF_GEMMA3.more(fields, shapes, config),
        **_gguf(fields, shapes, config),
        "use_bidirectional_attention": True,
    }


def _gguf_modern(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """The first layer of each period has no window; without a theta for windows there is one."""
    types = layer_types(fields, {"sliding_window": config.get("local_attention")}, 3)
    every = types.pop("sliding_window_pattern", 1)
    return {
        **_gguf(fields, shapes, config),
        "classifier_pooling": "cls" if fields.get("pooling_type") == _CLS else "mean",
        "local_rope_theta": fields.get("rope.freq_base_swa", config.get("global_rope_theta")),
        **(types or {"global_attn_every_n_layers": every}),
    }


def _head_of(dense: str, out: str) -> dict[str, str]:
    return {
        f"{here}.{kind}": f"{there}.{kind}"
        for here, there in (("cls", dense), ("cls.output", out), ("cls.norm", "head.norm"))
        for kind in ("weight", "bias")
    }


_GGUF_BERT = Gguf(
    "bert",  # XLM-RoBERTa too, whose positions llama.cpp has cut
    more=_gguf,
    ignores=("classifier.output_labels",),
    others=("BertForSequenceClassification",),
    prefix="",
    tensors=_head_of("classifier.dense", "classifier.out_proj"),
)
_GGUF_NOMIC = replace(
    _GGUF_BERT,
    name="nomic-bert",
    may=("rotary_emb_base",),
    without=("rope_theta",),
    keys={"rotary_emb_base": "rope.freq_base"},
    others=(),
)
_GGUF_NOMIC_MOE = replace(
    _GGUF_NOMIC, name="nomic-bert-moe",
    needs=("num_experts", "moe_top_k"),
    may=("rotary_emb_base", "moe_every_n_layers"),
    keys={**_GGUF_NOMIC.keys, "moe_top_k": KEYS["num_experts_per_tok"],
          "moe_every_n_layers": "moe_every_n_layers"},
    constants={"hidden_act": "gelu"},
    layouts=(1, 2),
)  # fmt: skip
_GGUF_MODERN = Gguf("modern-bert",
    may=("global_rope_theta", "local_attention", "hidden_activation"),
    without=("rope_theta",),
    keys={"global_rope_theta": "rope.freq_base", "local_attention": KEYS["sliding_window"],
          "hidden_activation": "hidden_activation"},
    more=_gguf_modern,
    ignores=("classifier.output_labels",),
    others=("ModernBertForSequenceClassification",),
    prefix="",
    tensors=_head_of("head.dense", "classifier"),
)  # fmt: skip
_GGUF_GEMMA = replace(
    gemma.GGUF_GEMMA3,
    name="gemma-embedding",
    more=_gguf_gemma,
    prefix="",
)


_PLE = "layers.{layer}.ple_block."
_ENCODERS = (
    Family(
        name="BertModel",
        title="BERT: bge, e5, GTE, all-MiniLM",
        gguf=_GGUF_BERT,
        model_type="bert",
        prefixes=("bert.",),
        defaults={"vocab_size": 30522},
        adjust=as_encoder,
        **_BERT,
    ),
    *(
        Family(
            name=name,
            title=title,
            model_type=model_type,
            prefixes=("roberta.",),
            defaults={"pad_token_id": 1},
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
        title="Nomic Embed 1, 1.5, 2 (a mixture)",
        gguf=replace(_GGUF_NOMIC, also=(_GGUF_NOMIC_MOE,)),
        model_type="nomic_bert",
        norm=Norm.LAYER,
        prefixes=("nomic_bert.",),
        rules=(
            *ends("embeddings."),
            *post_norms("emb_ln", f"{_N}norm1", f"{_N}norm2"),
            *fused(_QKV, f"{_N}attn.Wqkv", ("q", "kv", "kv"), **_QB),
            *linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_N}attn.out_proj", "hidden", "q", **_QB),
        ),
        layouts=(
            _mixture(""),
            _mixture(".weight"),
            (
                *linear(T.FFN_GATE, None, f"{_N}mlp.fc12", "ffn", "hidden"),
                *linear(T.FFN_UP, None, f"{_N}mlp.fc11", "ffn", "hidden"),
                *linear(T.FFN_DOWN, None, f"{_N}mlp.fc2", "hidden", "ffn"),
            ),
        ),
        flags={
            **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
            "experts_bias": True,
        },
        renames=GPT2_RENAMES,
        defaults={"max_position_embeddings": 512, "norm_epsilon": 1e-12},
        kind={"is_post_norm": True},
        adjust=_as_nomic,
        ignored_keys="max_trained_positions|pad_vocab_size_multiple",
        rope_parameters=partial(parameters_of, theta="rotary_emb_base"),
        neutral={
            "dense_seq_output": True,
            "use_xentropy": True,
            "scale_attn_weights": True,
            "rotary_emb_fraction": 1,
            "moe_impl": "megablocks",
            "ffn_div": 1,
        },
    ),
    Family(
        name="ModernBertModel",
        title="ModernBERT: gte-modernbert, modernbert-embed",
        gguf=_GGUF_MODERN,
        **_MODERN,
    ),
    Family(name="ModernBertForMaskedLM", title="ModernBERT (base, large)", **_MODERN),
    Family(
        name="Gemma3TextModel",
        title="EmbeddingGemma",
        gguf=_GGUF_GEMMA,
        model_type="gemma3_text",
        rules=(
            *gemma.BLOCK,
            *r.qk_norms(add=1.0),
            *r.gated(),
            TensorRule(Place.EMBEDDING, T.EMBEDDING, "embed_tokens.weight", ("vocab", "hidden")),
            TensorRule(Place.FINAL, T.FINAL_NORM, "norm.weight", ("hidden",), add=1.0),
            _DENSE,
        ),
        renames=gemma.RENAMES,
        defaults=gemma.GEMMA3_DEFAULTS,
        windows=window_but_every,
        rope_parameters=gemma.rope_of_gemma3,
        adjust=_as_embedding_gemma,
    ),
    Family(
        name="EmbeddingGemma2TextModel",
        title="EmbeddingGemma 2, text",
        model_type="embedding_gemma2_text",
        rules=(
            *gemma.LAYER_RULES,
            *r.gated(),
            layer(T.OWN_IN_NORM, "ple.per_layer_projection_norm.weight", "own", of_all=True),
            layer(T.OWN_IN, "ple.per_layer_model_projection.weight", "own", "hidden", of_all=True),
            layer(T.OWN_GATE, f"{_PLE}per_layer_input_gate.weight", "own", "hidden"),
            layer(T.OWN_OUT, f"{_PLE}per_layer_projection.weight", "hidden", "own"),
            *norm(T.OWN_NORM, f"{_PLE}post_per_layer_input_norm"),
            TensorRule(Place.EMBEDDING, T.EMBEDDING, "embed_tokens.weight", ("vocab", "hidden")),
            TensorRule(Place.FINAL, T.FINAL_NORM, "norm.weight", ("hidden",)),
            TensorRule(Place.FINAL, T.DENSE, "embedding_projection.weight", ("vector", "hidden")),
        ),
        nested=("EmbeddingGemma2Model",),
        renames=gemma.RENAMES,
        flags={"attention_bias": False},
        kind={"qk_norm": QkNorm.PER_HEAD},
        defaults={
            "global_head_dim": 512,
            "num_attention_heads": 4,
            "vocab_size": 262144,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "default", "rope_theta": 1000000.0},
            },
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 24,
            "num_global_key_value_heads": 1,
        },
        windows=gemma.gemma4_types,
        rope_parameters=gemma.gemma4_rope,
        has_partial_rope=True,
        adjust=_as_embedding_gemma2,
    ),
)
_TYPES = "embeddings.token_type_embeddings.weight"
_SECOND = layer(T.SECOND_SHIFT, _TYPES, "hidden", slices="types", first_slice=1, flag="pairs")
_OF_PAIRS: Mapping[str, Mapping[str, Any]] = {
    "BertModel": {"title": "BERT rerankers: ms-marco-MiniLM", "adjust": _as_pairs},
    "XLMRobertaModel": {"title": "XLM-RoBERTa rerankers: bge-reranker"},
    "RobertaModel": {"title": "RoBERTa rerankers"},
    "ModernBertModel": {"title": "ModernBERT rerankers: gte-reranker-modernbert"},
}
FAMILIES = (
    *_ENCODERS,
    *(
        replace(
            family,
            name=family.name.replace("Model", "ForSequenceClassification"),
            rules=(*family.rules, _SECOND),
            gguf=None,
            **_OF_PAIRS[family.name],
        )
        for family in _ENCODERS
        if family.name in _OF_PAIRS
    ),
)
