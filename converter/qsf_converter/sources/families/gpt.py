"""Families with LayerNorm or a plain FFN: GPT-2 and its heirs, Command R, Nemotron, Arcee."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsf.errors import QsfConversionError
from qsf.file.kinds import ROPE_NONE, QkNorm
from qsf.file.layout import Architecture, Norm, Positions, TensorType
from qsf_converter.sources.families import family
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.family import Draft, Family
from qsf_converter.sources.families.gguf import Fields, Gguf, Shapes
from qsf_converter.sources.families.positions import alibi_slopes, mpt_slopes, parameters_of
from qsf_converter.sources.families.rules import T


def _norms(mixer: str | None, ffn: str | None, **options: Any) -> r.Rules:
    names = ((T.ATTN_NORM, T.ATTN_NORM_BIAS, mixer), (T.FFN_NORM, T.FFN_NORM_BIAS, ffn))
    rules = (r.norm(weight, name, bias=bias, **options) for weight, bias, name in names if name)
    return tuple(rule for of_norm in rules for rule in of_norm)


def _plain(up: str, down: str, *, bias: str = "", **options: Any) -> r.Rules:
    options = {"bias_flag": bias, **options}
    return (
        *r.linear(T.FFN_UP, T.FFN_UP_BIAS, up, "ffn", "hidden", **options),
        *r.linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, down, "hidden", "ffn", **options),
    )


def _qkv(source: str, *, bias: str = "", **options: Any) -> r.Rules:
    """Q, K and V from one matrix; with ``groups`` each head, or group, has its own three."""
    names = {T.Q: T.Q_BIAS, T.K: T.K_BIAS, T.V: T.V_BIAS}
    return r.fused(names, source, ("q", "kv", "kv"), bias_flag=bias, **options)


def _out(source: str, *, bias: str = "", **options: Any) -> r.Rules:
    options["bias_flag"] = bias
    return r.linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, source, "hidden", "q", **options)


def _cohere(draft: Draft) -> None:
    if "use_qk_norm" in draft.flags:
        draft.set_all(qk_norm=QkNorm.OWN_WEIGHTS)
    draft.factors["logits"] = draft.config.positive("logit_scale")
    draft.set_all(is_parallel=True)


def _cohere2(draft: Draft) -> None:
    _cohere(draft)
    draft.unrotate_full()


def _plus_one(rules: r.Rules) -> r.Rules:
    """Norm weights are stored as w of 1 + w, norm biases unchanged."""
    norms = (T.ATTN_NORM, T.FFN_NORM, T.FINAL_NORM)
    return tuple(replace(rule, add=1.0) if rule.target in norms else rule for rule in rules)


_OF_HEADS: dict[str, Any] = {"flag": "use_qk_norm", "is_flat": True}
_COHERE_RULES = (
    *r.norm(T.ATTN_NORM, f"{r.AT}input_layernorm"),
    *r.ATTENTION,
    r.layer(T.Q_NORM, f"{r.ATTN}q_norm.weight", "heads", "head", **_OF_HEADS),
    r.layer(T.K_NORM, f"{r.ATTN}k_norm.weight", "kv heads", "head", **_OF_HEADS),
    *r.gated(),
    *r.ends("embed_tokens", "norm", scale="logits"),
)
_BIASED_ENDS = r.ends("embed_tokens", "norm", bias=True)
_EPSILON = {"norm_epsilon": "layer_norm_eps"}


def _norm_of_heads(target: TensorType, dim: str, groups: str) -> r.Rules:
    source = f"{r.ATTN}{'q' if dim == 'q' else 'k'}_layernorm.norms.{{head}}"
    return r.norm(target, source, dim, groups=groups, flag="qk_layernorm")


# ---- special cases ----


def _parallel(draft: Draft) -> None:
    if draft.config.boolean("use_parallel_residual"):
        draft.set_all(is_parallel=True)
    else:
        draft.flags.add("sequential")


def _stablelm(draft: Draft) -> None:
    _parallel(draft)
    if "qk_layernorm" in draft.flags:
        draft.set_all(qk_norm=QkNorm.OWN_WEIGHTS)


def _with_slopes(draft: Draft, slopes: tuple[float, ...]) -> None:
    """Positions by ALiBi instead of RoPE."""
    draft.header = replace(draft.header, positions=Positions.ALIBI, rope_theta=0.0)
    draft.ropes.clear()
    draft.set_all(rope_set=ROPE_NONE, alibi_slopes=slopes)


def _rope_of_neox(config: Config, layer_type: str) -> Config:
    part = {"partial_rotary_factor": config.positive("rotary_pct")}
    return parameters_of(config, layer_type, theta="rotary_emb_base", defaults=part)


def _rope_of_gptj(config: Config, _layer_type: str) -> Config:
    return Config({"rotary_dims": config["rotary_dim"]})


def _falcon(draft: Draft) -> None:
    """Three generations: several query heads a group, one group for all, a group for each head."""
    config, header = draft.config, draft.header
    is_new = config.boolean("new_decoder_architecture")
    is_parallel = is_new or config.boolean("parallel_attn")
    n_groups = config.count("num_kv_heads", header.n_heads, header.n_heads)
    is_shared = config.boolean("multi_query")
    n_kv_heads = n_groups if is_new else 1 if is_shared else header.n_heads
    if header.n_heads % n_kv_heads:
        raise config.error("num_kv_heads", f"= {n_kv_heads} does not divide {header.n_heads} heads")
    if is_new and not config.boolean("parallel_attn"):
        raise config.error("parallel_attn", "= False is not supported with the new decoder")
    has_two_norms = config.get("num_ln_in_parallel_attn") in (None, 2) and is_new
    draft.header = replace(header, n_kv_heads=n_kv_heads)
    draft.dims |= {"kv": n_kv_heads * header.head_dim, "kv heads": n_kv_heads}
    draft.set_all(n_kv_heads=n_kv_heads, is_parallel=is_parallel)
    draft.flags.add("two norms" if has_two_norms else "one norm")
    if not is_parallel:
        draft.flags.add("sequential")
    if config.boolean("alibi"):
        # Falcon adds the slopes before the scores are scaled.
        scale = 1 / math.sqrt(header.head_dim)
        _with_slopes(draft, tuple(slope * scale for slope in alibi_slopes(header.n_heads)))


def _bloom(draft: Draft) -> None:
    _with_slopes(draft, alibi_slopes(draft.header.n_heads))


def _mpt(draft: Draft) -> None:
    stated = draft.config.get("attn_config") or {}
    if not isinstance(stated, dict):
        raise draft.config.error("attn_config", "is not an object")
    own = Config(stated, defaults={"alibi": True, "alibi_bias_max": 8}, where="attn_config.")
    if own.get("clip_qkv"):
        draft.set_all(qkv_limit=own.positive("clip_qkv"))
    for name in ("softmax_scale", "qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        if own.get(name) not in (None, False):
            raise own.error(name, f"= {own[name]} is not supported")
    if own.get("attn_type", "multihead_attention") != "multihead_attention":
        raise own.error("attn_type", "other than multihead_attention is not supported")
    if not own.boolean("alibi"):
        raise own.error("alibi", "= False is not supported")
    ratio = draft.config.count("expansion_ratio", 64)
    if ratio != 4:
        raise draft.config.error("expansion_ratio", f"= {ratio}; transformers computes with 4")
    _with_slopes(draft, mpt_slopes(draft.header.n_heads, own.positive("alibi_bias_max")))


_plain_family = functools.partial(Family, norm=Norm.LAYER, defaults={"ffn_multiple": 4})
# transformers accepts its general names besides GPT-2's own.
GPT2_RENAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
}
_GPT_EPSILON = {"norm_epsilon": "layer_norm_eps"}
_AT = "layers.{layer}."
_H = "h.{layer}."
_B = "blocks.{layer}."

# ---- GGUF files ----


def _gguf_stablelm(_fields: Fields, shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    if any("attn_q_norm" in name for name in shapes):
        raise QsfConversionError(
            "norms of single heads' queries are not supported in GGUF files; convert the "
            "original model"
        )
    return {"use_parallel_residual": not any("ffn_norm" in name for name in shapes)}


def _gguf_falcon(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    n_kv_heads = fields.get("attention.head_count_kv", config["num_attention_heads"])
    is_new = any("attn_norm_2" in name for name in shapes)
    return {
        "multi_query": n_kv_heads == 1,
        "num_kv_heads": n_kv_heads,
        "new_decoder_architecture": is_new,
    }


def _gguf_unused(config: Mapping[str, Any]) -> str:
    """The name of the norm before attention is that before the FFN where there are two."""
    return "one norm" if config["new_decoder_architecture"] else "two norms"


def _gguf_mpt(fields: Fields, _shapes: Shapes, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_config": {
            "alibi_bias_max": fields.get("attention.max_alibi_bias", 8.0),
            "clip_qkv": fields.get("attention.clamp_kqv"),
        }
    }


_GGUF_NEOX = Gguf(
    "gptneox",
    may=("rotary_emb_base", "use_parallel_residual"),
    without=("rope_theta",),
    keys={"rotary_emb_base": "rope.freq_base", "use_parallel_residual": "use_parallel_residual"},
    is_ungrouped=True,
)


FAMILIES = (
    Family(
        name="CohereForCausalLM",
        title="Command R, R+",
        gguf=Gguf("command-r", needs=("logit_scale",)),
        norm=Norm.LAYER,
        is_interleaved=True,
        rules=_COHERE_RULES,
        renames=_EPSILON,
        flags={"attention_bias": False, "use_qk_norm": False},
        adjust=_cohere,
    ),
    Family(
        name="Cohere2ForCausalLM",
        title="Command R7B, Command A",
        gguf=Gguf("cohere2", needs=("logit_scale",), may=("sliding_window",)),
        norm=Norm.LAYER,
        is_interleaved=True,
        rules=_COHERE_RULES,
        renames=_EPSILON,
        defaults={"head_dim": 128, "sliding_window_pattern": 4},
        windows=family.window_but_every,
        neutral={
            # Windows and RoPE as the model's own code places them, which layer_types states too.
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "layer_switch": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": (False, True),
        },
        adjust=_cohere2,
    ),
    Family(
        name="NemotronForCausalLM",
        title="Nemotron, Minitron",
        gguf=Gguf("nemotron", has_one_in_norms=True),
        norm=Norm.LAYER,
        has_partial_rope=True,
        rules=_plus_one(
            (
                *_norms(f"{r.AT}input_layernorm", f"{r.AT}post_attention_layernorm"),
                *r.ATTENTION,
                *_plain(f"{r.MLP}up_proj", f"{r.MLP}down_proj", bias="mlp_bias"),
                *_BIASED_ENDS,
            )
        ),
        renames={"norm_epsilon": "norm_eps"},
        neutral={"normalization": "layernorm1p"},
    ),
    Family(
        name="Jais2ForCausalLM",
        title="Jais 2",
        gguf=Gguf("jais2"),
        norm=Norm.LAYER,
        rules=(
            *_norms(f"{r.AT}input_layernorm", f"{r.AT}post_attention_layernorm"),
            *r.ATTENTION,
            *_plain(f"{r.MLP}up_proj", f"{r.MLP}down_proj", bias="mlp_bias"),
            *_BIASED_ENDS,
        ),
        renames=_EPSILON,
        flags={"attention_bias": True, "mlp_bias": True},
    ),
    Family(
        name="ArceeForCausalLM",
        title="Arcee AFM",
        gguf=Gguf("arcee", is_permuted=True),
        rules=(
            *r.pre_norms(),
            *r.ATTENTION,
            *_plain(f"{r.MLP}up_proj", f"{r.MLP}down_proj", bias="mlp_bias"),
            *r.ENDS,
        ),
    ),
    _plain_family(
        name="GPT2LMHeadModel",
        title="GPT-2",
        gguf=Gguf("gpt2"),
        model_type="gpt2",
        architecture=Architecture.GPT2,
        positions=Positions.LEARNED,
        prefixes=("transformer.",),
        ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
        rules=(
            r.TensorRule(r.Place.POSITIONS, None, "wpe.weight", ("positions", "hidden")),
            *_norms(f"{_H}ln_1", f"{_H}ln_2"),
            *_qkv(f"{_H}attn.c_attn", bias="always", transposed=True),
            *_out(f"{_H}attn.c_proj", bias="always", transposed=True),
            *_plain(f"{_H}mlp.c_fc", f"{_H}mlp.c_proj", bias="always", transposed=True),
            *r.ends("wte", "ln_f", bias=True),
        ),
        renames=GPT2_RENAMES,
        defaults={"max_position_embeddings": None, "ffn_multiple": 4},
        neutral={
            "scale_attn_weights": True,
            "reorder_and_upcast_attn": (False, True),
            "position_embedding_type": "absolute",
        },
    ),
    _plain_family(
        name="PhiForCausalLM",
        title="Phi-1, 1.5, 2",
        gguf=Gguf("phi2"),
        has_partial_rope=True,
        architecture=Architecture.PHI,
        rules=(
            *_norms(f"{_AT}input_layernorm", None),
            *r.qkv(bias="always"),
            *_out(f"{_AT}self_attn.dense", bias="always"),
            *_plain(f"{_AT}mlp.fc1", f"{_AT}mlp.fc2", bias="always"),
            *r.ends("embed_tokens", "final_layernorm", bias=True, head_bias="always"),
        ),
        renames=_GPT_EPSILON,
        kind={"is_parallel": True},
    ),
    Family(
        name="StableLmForCausalLM",
        title="StableLM",
        gguf=Gguf("stablelm", more=_gguf_stablelm),
        has_partial_rope=True,
        model_type="stablelm",
        norm=Norm.LAYER,
        rules=(
            *_norms(f"{_AT}input_layernorm", None),
            *_norms(None, f"{_AT}post_attention_layernorm", flag="sequential"),
            *r.qkv(bias="use_qkv_bias"),
            *_norm_of_heads(T.Q_NORM, "q", "heads"),
            *_norm_of_heads(T.K_NORM, "kv", "kv heads"),
            *r.out(),
            *r.gated(),
            *r.ends("embed_tokens", "norm", bias=True),
        ),
        renames=_GPT_EPSILON,
        defaults={"ffn_multiple": 4},
        flags={"use_qkv_bias": False, "qk_layernorm": False},
        adjust=_stablelm,
    ),
    _plain_family(
        name="Starcoder2ForCausalLM",
        title="StarCoder 2",
        gguf=Gguf("starcoder2"),
        renames={},
        rules=(
            *_norms(f"{_AT}input_layernorm", f"{_AT}post_attention_layernorm"),
            *r.attention(bias="use_bias"),
            *_plain(f"{_AT}mlp.c_fc", f"{_AT}mlp.c_proj", bias="use_bias"),
            *r.ends("embed_tokens", "norm", bias=True),
        ),
        flags={"use_bias": True},
        windows=family.window_of_all,
        neutral={"mlp_type": "default"},
    ),
    _plain_family(
        name="GPTNeoXForCausalLM",
        title="GPT-NeoX, Pythia",
        gguf=_GGUF_NEOX,
        has_partial_rope=True,
        model_type="gpt_neox",
        prefixes=("gpt_neox.",),
        ignored_suffixes=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
        rules=(
            *_norms(f"{_AT}input_layernorm", f"{_AT}post_attention_layernorm"),
            *_qkv(f"{_AT}attention.query_key_value", bias="attention_bias", groups="heads"),
            *_out(f"{_AT}attention.dense", bias="attention_bias"),
            *_plain(f"{_AT}mlp.dense_h_to_4h", f"{_AT}mlp.dense_4h_to_h", bias="always"),
            *r.ends("embed_in", "final_layer_norm", bias=True, head="embed_out"),
        ),
        renames=_GPT_EPSILON,
        defaults={
            "ffn_multiple": 4,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000.0,
            "partial_rotary_factor": None,
        },
        flags={"attention_bias": True},
        rope_parameters=_rope_of_neox,
        adjust=_parallel,
    ),
    _plain_family(
        name="GPTJForCausalLM",
        title="GPT-J",
        has_partial_rope=True,
        is_interleaved=True,
        prefixes=("transformer.",),
        ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
        rules=(
            *_norms(f"{_H}ln_1", None),
            *r.qkv(f"{_H}attn."),
            *_out(f"{_H}attn.out_proj"),
            *_plain(f"{_H}mlp.fc_in", f"{_H}mlp.fc_out", bias="always"),
            *r.ends("wte", "ln_f", bias=True, head_bias="always"),
        ),
        renames=GPT2_RENAMES,
        kind={"is_parallel": True},
        rope_parameters=_rope_of_gptj,
        neutral={"rotary": True, "scale_attn_weights": True},
    ),
    _plain_family(
        name="FalconForCausalLM",
        title="Falcon",
        gguf=Gguf("falcon", is_ungrouped=True, more=_gguf_falcon, unused_flag=_gguf_unused),
        prefixes=("transformer.",),
        rules=(
            *_norms(f"{_H}input_layernorm", None, flag="one norm"),
            *_norms(None, f"{_H}post_attention_layernorm", flag="sequential"),
            *_norms(f"{_H}ln_attn", f"{_H}ln_mlp", flag="two norms"),
            *_qkv(f"{_H}self_attention.query_key_value", bias="bias", groups="kv heads"),
            *_out(f"{_H}self_attention.dense", bias="bias"),
            *_plain(f"{_H}mlp.dense_h_to_4h", f"{_H}mlp.dense_4h_to_h", bias="bias"),
            *r.ends("word_embeddings", "ln_f", bias=True),
        ),
        renames={
            "norm_epsilon": "layer_norm_epsilon",
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
        },
        flags={"bias": False},
        adjust=_falcon,
    ),
    _plain_family(
        name="BloomForCausalLM",
        title="BLOOM",
        gguf=Gguf("bloom", is_ungrouped=True),
        positions=Positions.ALIBI,
        prefixes=("transformer.",),
        rules=(
            # The norm of the embeddings is stored as the norm of the first layer's input.
            *r.norm(T.INPUT_NORM, "word_embeddings_layernorm", bias=T.INPUT_NORM_BIAS),
            *_norms(f"{_H}input_layernorm", f"{_H}post_attention_layernorm"),
            *_qkv(f"{_H}self_attention.query_key_value", bias="always", groups="heads"),
            *_out(f"{_H}self_attention.dense", bias="always"),
            *_plain(f"{_H}mlp.dense_h_to_4h", f"{_H}mlp.dense_4h_to_h", bias="always"),
            *r.ends("word_embeddings", "ln_f", bias=True),
        ),
        renames={
            "hidden_size": "n_embed",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "seq_length",
            "norm_epsilon": "layer_norm_epsilon",
        },
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 2048,
            "ffn_multiple": 4,
        },
        adjust=_bloom,
        neutral={"offset_alibi": 100},
    ),
    _plain_family(
        name="MptForCausalLM",
        title="MPT",
        gguf=Gguf("mpt", more=_gguf_mpt),
        positions=Positions.ALIBI,
        prefixes=("transformer.",),
        rules=(
            *r.norm(T.ATTN_NORM, f"{_B}norm_1"),
            *r.norm(T.FFN_NORM, f"{_B}norm_2"),
            *_qkv(f"{_B}attn.Wqkv"),
            *_out(f"{_B}attn.out_proj"),
            *_plain(f"{_B}ffn.up_proj", f"{_B}ffn.down_proj"),
            *r.ends("wte", "norm_f"),
        ),
        renames={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
            "norm_epsilon": "layer_norm_epsilon",
        },
        defaults={"hidden_act": "gelu", "ffn_multiple": 4},
        adjust=_mpt,
        neutral={
            "no_bias": True,
            "norm_type": ("low_precision_layernorm", "layernorm"),
            "learned_pos_emb": (True, False),  # not used with ALiBi
            "embedding_fraction": 1.0,
            "init_device": ("cpu", "meta"),
        },
    ),
)
