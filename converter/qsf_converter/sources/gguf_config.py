"""What a GGUF file says of its model, in the words of HuggingFace's config.json.

Architectures of llama.cpp that the engine can compute are tables here: the names of metadata and
of tensors. Whatever would change the computation and is not in a table is refused.
Source: gguf-py/gguf/constants.py and convert_hf_to_gguf.py of llama.cpp.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.architectures import FAMILIES, Family

Metadata = Mapping[str, Any]

ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # what all published models of that scaling use
_FACTOR_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Dialect:
    """How llama.cpp stores one architecture."""

    family: str
    config: Mapping[str, str]  # field of config.json -> key of the metadata
    optional: Mapping[str, str]
    tensors: Mapping[str, str]  # name here -> name there; {layer} is its number
    # Tensors whose rows are stored in the order of interleaved RoPE -> the field with their heads.
    permuted: Mapping[str, str]


def _llama_layer() -> dict[str, str]:
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    return {
        f"blk.{{layer}}.{here}.{kind}": f"model.layers.{{layer}}.{there}.{kind}"
        for here, there in names.items()
        for kind in ("weight", "bias")
        if kind == "weight" or not here.endswith("norm")
    }


def _gpt2_layer() -> dict[str, str]:
    names = {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    return {
        f"blk.{{layer}}.{here}.{kind}": f"transformer.h.{{layer}}.{there}.{kind}"
        for here, there in names.items()
        for kind in ("weight", "bias")
    }


DIALECTS: Final[Mapping[str, Dialect]] = {
    "llama": Dialect(
        family="LlamaForCausalLM",
        config={
            "num_hidden_layers": "block_count",
            "hidden_size": "embedding_length",
            "intermediate_size": "feed_forward_length",
            "num_attention_heads": "attention.head_count",
            "max_position_embeddings": "context_length",
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        },
        optional={
            "num_key_value_heads": "attention.head_count_kv",
            "head_dim": "attention.key_length",
            "rope_theta": "rope.freq_base",
            "sliding_window": "attention.sliding_window",
        },
        tensors={
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
            **_llama_layer(),
        },
        permuted={
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        },
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
        tensors={
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
            **_gpt2_layer(),
        },
        permuted={},
    ),
}

# Key behind the architecture's name -> values with which the engine computes the same.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0, 1),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "swin_norm": (False,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Looked at elsewhere, or without a meaning for the computation.
_KNOWN = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
    "tensor_data_layout",
    "expert_used_count",
    "attention.head_count_kv",  # GPT-2 states it, though it is no choice there
}


def dialect_of(metadata: Metadata) -> Dialect:
    """Return the table of the file's architecture; raises QsfConversionError if none has it."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in DIALECTS:
        raise QsfConversionError(
            f"architecture {shown(name)} of a GGUF file is not supported; "
            f"supported: {', '.join(DIALECTS)}"
        )
    n_parts = metadata.get("split.count", 0)
    if isinstance(n_parts, int) and n_parts > 1:
        raise QsfConversionError(
            f"it is one of {n_parts} parts; join them with llama.cpp's llama-gguf-split --merge"
        )
    return DIALECTS[name]


def config_of(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: Any = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of config.json, and warnings.

    ``shapes`` are those of the tensors by their names in the GGUF file, ``rope_factors`` [n] is
    what the tensor ``ROPE_FACTORS`` holds, if it is there. Raises QsfConversionError for what the
    engine cannot compute.
    """
    dialect = dialect_of(metadata)
    name = metadata["general.architecture"]
    fields = {
        key.removeprefix(f"{name}."): _plain(key, value)
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    _check_neutral(name, fields)
    config: dict[str, Any] = {}
    for field, key in {**dialect.config, **dialect.optional}.items():
        if key in fields:
            config[field] = fields[key]
        elif field in dialect.config:
            raise QsfConversionError(f"its metadata has no {name}.{key}")
    embedding = shapes.get("token_embd.weight", ())
    config["vocab_size"] = embedding[0] if embedding else fields.get("vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if name == "llama":
        config.update(_llama_fields(fields, shapes, config, rope_factors))
    else:
        config["activation_function"] = "gelu_new"
    family = config.pop("architectures", [dialect.family])
    config = {
        "architectures": family,
        "model_type": FAMILIES[family[0]].model_type,
        **config,
        **_token_ids(metadata),
    }
    known = {*_KNOWN, *_NEUTRAL, *dialect.config.values(), *dialect.optional.values()}
    unknown = sorted(key[:80] for key in fields if key not in known)
    warnings = [f"{name}.{key} of the metadata is not understood and left out" for key in unknown]
    return config, tuple(warnings[:8])


def shown(value: Any) -> str:
    """Return a value of the file as an error message shows it, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def name_there(dialect: Dialect, name: str) -> str:
    """Return HuggingFace's name of a tensor; the given name if the architecture lacks it."""
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(.*)", name)
    if match is None:
        return dialect.tensors.get(name, name)
    there = dialect.tensors.get(f"blk.{{layer}}.{match[2]}")
    return name if there is None else there.format(layer=int(match[1]))


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family, with all matrices [outputs, inputs] as GGUF files store them."""
    family = FAMILIES[config["architectures"][0]]
    rules = tuple(
        dataclasses.replace(rule, transposed=False, shape=rule.shape[::-1])
        if rule.transposed
        else rule
        for rule in family.rules
    )
    return dataclasses.replace(family, rules=rules)


def _plain(key: str, value: Any) -> Any:
    """Return the one value of all layers if the file states one per layer; floats as written."""
    if isinstance(value, np.ndarray):
        values = value.tolist()
        if not values or any(one != values[0] for one in values):
            raise QsfConversionError(
                f"its metadata's {key} differs between layers, which is not supported"
            )
        value = values[0]
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        if narrow == value:
            # An f32 in the file: 1e-5 is meant, not 9.999999747378752e-06.
            return float(np.format_float_scientific(narrow, unique=True))
    return value


def _check_neutral(name: str, fields: Mapping[str, Any]) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in fields and fields[key] not in neutral:
            raise QsfConversionError(
                f"its metadata's {name}.{key} = {shown(fields[key])} is not supported"
            )


def _llama_fields(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    rope_factors: Any,
) -> dict[str, Any]:
    """Return the settings of a LLaMA that have no key of their own."""
    more: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": any("attn_q.bias" in name for name in shapes),
        "mlp_bias": any("ffn_up.bias" in name for name in shapes),
    }
    if config.get("sliding_window"):
        more["architectures"] = ["MistralForCausalLM"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        dim, n_heads = config["hidden_size"], config["num_attention_heads"]
        if not isinstance(dim, int) or not isinstance(n_heads, int) or not n_heads:
            raise QsfConversionError(
                f"its metadata has {shown(n_heads)} heads for {shown(dim)} dimensions"
            )
        head_dim = dim // n_heads
        more["head_dim"] = head_dim
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise QsfConversionError(
                f"its metadata's llama.{key} = {shown(fields[key])} is not supported with heads of "
                f"{shown(head_dim)}"
            )
    if "num_key_value_heads" not in config:
        more["num_key_value_heads"] = config["num_attention_heads"]
    scaling = _rope_scaling(fields)
    if rope_factors is not None:
        if scaling is not None:
            raise QsfConversionError("it scales RoPE twice, which is not supported")
        scaling = llama3_scaling(rope_factors, config.get("rope_theta", 10000.0), head_dim)
    if scaling is not None:
        more["rope_scaling"] = scaling
    return more


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    raise QsfConversionError(
        f"its RoPE scaling {shown(kind)} is not supported; supported: none, linear, llama3"
    )


def llama3_scaling(factors: Any, theta: Any, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of LLaMA 3 whose divisors [head_dim / 2] of the angles are ``factors``.

    A GGUF file holds the divisors and not the numbers that they come from: the factor is the
    largest of them, and the original length is the power of two that gives the others. Raises
    QsfConversionError when none does.
    """
    factors = np.asarray(factors, np.float64).reshape(-1)
    if len(factors) * 2 != head_dim or not isinstance(theta, (int, float)) or not theta > 0:
        raise QsfConversionError(
            f"its {len(factors)} RoPE factors do not fit to heads of {shown(head_dim)}"
        )
    if not np.all((factors > 0) & np.isfinite(factors)):
        raise QsfConversionError("its RoPE factors are not positive numbers")
    if np.all(factors == 1):
        return None
    frequencies = float(theta) ** -(np.arange(0, head_dim, 2) / head_dim)
    factor = float(factors.max())
    for original in (1 << i for i in range(4, 24)):
        turns = original * frequencies / (2 * math.pi)
        kept = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
        expected = 1 / (kept + (1 - kept) / factor)
        if np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": float(f"{factor:.6g}"),
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise QsfConversionError("its RoPE factors are not those of LLaMA 3, which is not supported")


def _token_ids(metadata: Metadata) -> dict[str, Any]:
    """Return the ids of BOS, EOS (and the end of a turn, if that is another token) and PAD."""
    ids = {
        field: metadata[f"tokenizer.ggml.{key}_token_id"]
        for field, key in (
            ("bos_token_id", "bos"),
            ("eos_token_id", "eos"),
            ("pad_token_id", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    eot = metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(eot, int) and eot != ids.get("eos_token_id", eot):
        ids["eos_token_id"] = [ids["eos_token_id"], eot]
    return ids
