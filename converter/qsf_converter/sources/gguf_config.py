"""Translates the metadata of a GGUF file into HuggingFace's config.json.

The families have the tables. Metadata that changes the computation and is in no table is refused.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.file.layout import Norm, Positions
from qsf_converter.sources.architectures import FAMILIES, what_it_lacks
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.family import Family
from qsf_converter.sources.families.gguf import Gguf
from qsf_converter.sources.families.rules import T, TensorRule

Metadata = Mapping[str, Any]

ALL_DIALECTS: Final[Mapping[str, tuple[Family, Gguf]]] = {
    form.name: (family, form) for family in FAMILIES.values() for form in family.forms
}

# Names of the values of general.file_type: llama.cpp's enum llama_ftype.
FILE_TYPES: Final[Mapping[Any, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip

# Tensors that belong to the configuration.
ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # values of all published models with that scaling
_FACTOR_TOLERANCE = 1e-3
_NOT_TURNED: Final = 1e29  # a divisor this large leaves no rotation


# Key after the architecture's name -> values that change nothing in the engine's computation.
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
}
# Read elsewhere, or without effect on the computation.
_KNOWN: Final = (  # GPT-2 states head_count_kv, although it is no choice there
    "vocab_size", "pooling_type", "dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in",
    "dense_3_feat_out", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier", "attention.sliding_window_pattern",
    "attention.temperature_scale", "attention.key_length", "rope.freq_base",
    "feed_forward_length", "rope.scale_linear", "tensor_data_layout", "expert_used_count",
    "attention.head_count_kv",
)  # fmt: skip


def families() -> list[tuple[str, list[str], list[str]]]:
    others = [(name, other) for name, (_, form) in ALL_DIALECTS.items() for other in form.others]
    rows = [
        (
            family.title,
            list(dict.fromkeys((family.name, *family.nested))),
            [form.name for form in family.forms] + [n for n, of in others if of == family.name],
        )
        for family in FAMILIES.values()
    ]
    return sorted(rows, key=lambda row: row[0].lower())


def dialect_of(metadata: Metadata) -> tuple[Family, Gguf]:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ALL_DIALECTS:
        plain = re.sub("[-_]", "", str(name))[:60]  # nemotron_h is NemotronH
        raise QsfConversionError(
            f"architecture {shown(name)} of a GGUF file is not supported"
            f"{what_it_lacks(plain, re.IGNORECASE)}; `qsf convert --families` lists what is"
        )
    return ALL_DIALECTS[name]


@dataclasses.dataclass(frozen=True, slots=True)
class GgufModel:
    """What a file holds: the fields of config.json, the family with its tensors as such files store
    them, HuggingFace's names of the tensors, by the names of a layer, and warnings.
    """

    config: dict[str, Any]
    family: Family
    names: Mapping[str, str]
    warnings: tuple[str, ...]

    def name_there(self, name: str) -> str:
        """Return HuggingFace's name of a tensor; the given name if the architecture lacks it."""
        match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(.*)", name)
        if match is None:
            return self.names.get(name, name)
        there = self.names.get(f"blk.{{layer}}.{match[2]}")
        return name if there is None else there.format(layer=int(match[1]))


def read_model(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_tensors: Mapping[str, Any]
) -> GgufModel:
    """Return the contents of a file but its weights.

    ``shapes`` are those of the tensors by their names in the GGUF file, ``rope_tensors`` the values
    [n] of tensors of ``ROPE_TENSORS``. Raises QsfConversionError if the engine cannot compute the
    model.
    """
    family, form = dialect_of(metadata)
    name = metadata["general.architecture"]
    fields = Config(  # which records what is read
        {
            key.removeprefix(f"{name}."): _plain(key, value, form)
            for key, value in metadata.items()
            if key.startswith(f"{name}.")
        }
    )
    config: dict[str, Any] = dict(form.constants)
    keys = form.fields(is_layer_norm=family.norm == Norm.LAYER)
    for field, (key, is_needed) in keys.items():
        if key in fields:
            config[field] = fields[key] or None if field == "sliding_window" else fields[key]
        elif is_needed:
            raise QsfConversionError(f"its metadata has no {name}.{key}")
    embedding = shapes.get("token_embd.weight", ())
    config["vocab_size"] = embedding[0] if embedding else fields.get("vocab_size")
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["num_hidden_layers"] = _own_layers(fields, config)
    if "head_dim" not in form.without:
        config.update(_head_fields(name, fields, config))
    if form.more is not None:
        config.update(form.more(fields, shapes, config))
    family = _as_stored(FAMILIES[config.pop("architectures", [family.name])[0]], form)
    if family.positions == Positions.ROPE:
        config.update(_rope_fields(name, fields, config, rope_tensors, family, form))
    names, flags = _tensor_names(name, family, form, config)
    config = {
        "architectures": [family.name],
        "model_type": family.model_type,
        **config,
        **{flag: any(_is_there(t, shapes) for t in flags.get(flag, ())) for flag in family.flags},
        **_token_ids(metadata),
    }
    unknown = sorted(key[:80] for key in _unknown(name, fields, form))
    warnings = [f"{name}.{key} of the metadata is not understood and left out" for key in unknown]
    return GgufModel(config, family, names, tuple(warnings[:8]))


def names_in_gguf(metadata: Metadata, family_name: str) -> GgufModel:
    """Return the family, and its names, in files of the architecture that an adapter states.

    Raises QsfConversionError if that architecture has not this family.
    """
    family, form = dialect_of(metadata)
    if family_name not in (family.name, *form.others) or form.unused_flag is not None:
        raise QsfConversionError(
            f"its architecture is {metadata['general.architecture']}, and the model is "
            f"{family_name}: it is an adapter of another model, or these are not supported"
        )
    family = _as_stored(FAMILIES[family_name], form)
    names, _ = _tensor_names(metadata["general.architecture"], family, form, {})
    return GgufModel({}, family, names, ())


def _is_there(pattern: str, shapes: Mapping[str, Any]) -> bool:
    """True if a layer has that tensor, or the file if it belongs to none."""
    at, _, rest = pattern.partition("{layer}")
    return any(name.startswith(at) and name.endswith(rest) for name in shapes)


def _as_stored(family: Family, form: Gguf) -> Family:
    rules = tuple(
        dataclasses.replace(
            rule,
            transposed=rule.is_flat and rule.transposed,
            add=0.0 if form.has_one_in_norms else rule.add,
            groups=None if form.is_ungrouped else rule.groups,
        )
        for rule in family.rules
    )
    return dataclasses.replace(family, rules=rules, layouts=family.layouts[slice(*form.layouts)])


# Names that the package's map lacks for some architectures, behind the layer's: GGUF's, and ours.
_MORE_NAMES: Final = (
    *((f"ffn_{part}.weight", f"mlp.{part}_proj.weight") for part in ("gate", "up", "down")),
    *((f"ffn_{part}.weight", f"mlp.shared.{part}_proj.weight") for part in ("gate", "up", "down")),
    *((f"ffn_{part}_shexp.weight", f"mlp.shared.{part}_proj.weight")
      for part in ("gate", "up", "down")),
    *((f"ffn_{part}_shexp.weight", f"mixer.shared_experts.{part}_proj.weight")
      for part in ("up", "down")),
    *((f"ffn_{part}_exps.weight", f"mixer.experts.{part}_proj.weight") for part in ("up", "down")),
    *((f"attn_{part}_norm.weight", f"self_attn.{part}_norm.weight") for part in ("q", "k")),
    *((f"nextn.{part}.weight", f"{part}.weight")
      for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")),
    ("nextn.shared_head_norm.weight", "shared_head.norm.weight"),
    ("nextn.shared_head_head.weight", "shared_head.head.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_sub_norm.weight", "attn_sub_norm.weight"),
    ("ffn_sub_norm.weight", "ffn_sub_norm.weight"),
    ("ffn_norm", "pre_ff_layernorm.weight"),  # of Falcon-H1
    ("ffn_gate_inp.weight", "mixer.gate.weight"),
    ("exp_probs_b.bias", "gate.selection.bias"),
    ("ssm_a", "minus_rate"),
    ("ssm_dt.bias", "dt_bias"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("layer_output_scale.weight", "layer_scalar"),
)  # fmt: skip
_AHEAD: Final = tuple(
    f"layers.{{layer}}.{there}" for here, there in _MORE_NAMES if here.startswith("nextn.")
)


def _tensor_names(
    architecture: str, family: Family, form: Gguf, config: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return HuggingFace's names by GGUF's, and the latter by the flag of their rules.

    Raises QsfConversionError if the installed package gguf is older than the architecture.
    """
    package: Any = importlib.import_module("gguf")
    kinds = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
    architecture = form.named_as or architecture
    if architecture not in kinds:
        raise QsfConversionError(
            f"the installed package gguf does not know the architecture {architecture}: "
            "a newer one does"
        )
    known = package.get_tensor_name_map(kinds[architecture], 1)
    prefix = family.prefixes[0] if form.prefix is None else form.prefix
    unused = None if form.unused_flag is None else form.unused_flag(config)
    names = dict(form.tensors)
    flags: dict[str, list[str]] = {}
    rules = (*family.rules, *(rule for rules in family.layouts for rule in rules))
    sources = [(s, rule) for rule in rules if rule.flag != unused or unused is None
               for s in _sources(rule)]  # fmt: skip
    for source, rule in (*sources, *((s, None) for s in _AHEAD)):
        start = "" if rule is not None and rule.target in (T.HEAD, T.HEAD_BIAS) else prefix
        here = {
            f"blk.{{layer}}.{name}"
            for name, there in _MORE_NAMES
            if "{layer}" in source and f".{source}".endswith(f".{there}")
        }
        for key in (f"{start}{source}", source, f"model.{source}"):
            found = known.get_name(key.format(layer=0), (".weight", ".bias"))
            if found is not None:
                here.add(found.replace("blk.0.", "blk.{layer}."))
                break
        if source == "lm_head.weight":
            here.add("output.weight")
        names |= dict.fromkeys(here, f"{start}{source}")
        if rule is not None and rule.flag is not None:
            flags.setdefault(rule.flag, []).extend(here)
    return names, flags


def _sources(rule: TensorRule) -> list[str]:
    if rule.target == T.DENSE or "{expert}" in rule.source or "{head}" in rule.source:
        return []
    source = re.sub(r"\{(before|later|last)\}", "{layer}", rule.source)
    if "{part}" not in source:
        return [source]
    return [source.replace("{part}", part) for part in "qkv"]


def _plain(key: str, value: Any, form: Gguf) -> Any:
    """Return the common value of all layers if the file states one per layer; floats unchanged."""
    if isinstance(value, np.ndarray):
        values = value.tolist()
        if key.partition(".")[2] in ("attention.sliding_window_pattern", *form.lists):
            return values
        if not values or any(item != values[0] for item in values):
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


def _unknown(name: str, fields: Config, form: Gguf) -> Iterator[str]:
    """Yield keys that nothing has read and nobody knows; refuse those with another effect."""
    neutral = {**_NEUTRAL, **form.neutral}
    for key, value in fields.unread():
        if value not in neutral.get(key, (value,)):
            raise QsfConversionError(
                f"its metadata's {name}.{key} = {shown(value)} is not supported"
            )
        if key not in (*_KNOWN, *neutral, *form.ignores):
            yield key


def _own_layers(fields: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the number of layers without those that predict further tokens, which come last.

    Raises QsfConversionError if the metadata's numbers are none or no layer is left.
    """
    n_more, n_all = fields.get("nextn_predict_layers", 0), config.get("num_hidden_layers")
    if type(n_more) is not int or type(n_all) is not int or not 0 <= n_more < n_all:
        raise QsfConversionError(
            f"its {shown(n_all)} layers cannot have {shown(n_more)} more in them"
        )
    return n_all - n_more


def _head_fields(name: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    head_dim = config.get("head_dim")
    if head_dim is None:
        dim, n_heads = config["hidden_size"], config["num_attention_heads"]
        if not isinstance(dim, int) or not isinstance(n_heads, int) or not n_heads:
            raise QsfConversionError(
                f"its metadata has {shown(n_heads)} heads for {shown(dim)} dimensions"
            )
        head_dim = dim // n_heads
        more["head_dim"] = head_dim
    value_dim = fields.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise QsfConversionError(
            f"its metadata's {name}.attention.value_length = {shown(value_dim)} is not supported "
            f"with heads of {shown(head_dim)}"
        )
    if "num_key_value_heads" not in config:
        more["num_key_value_heads"] = config["num_attention_heads"]
    return more


def _rope_fields(
    name: str,
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    family: Family,
    form: Gguf,
) -> dict[str, Any]:
    """The scaling of RoPE, and the rotated share of a head."""
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = config["hidden_size"] // max(1, config["num_attention_heads"])
    scaling = _rope_scaling(fields, tensors, form)
    rotary_dims = fields.get("rope.dimension_count", head_dim)
    if form.is_permuted and rotary_dims != head_dim and not family.has_partial_rope:
        raise QsfConversionError(
            f"its metadata's {name}.rope.dimension_count = {shown(rotary_dims)} is not supported "
            f"with heads of {shown(head_dim)}"
        )
    if ROPE_FACTORS in tensors:
        if scaling is not None:
            raise QsfConversionError("it scales RoPE twice, which is not supported")
        theta = config.get("rope_theta", 10000.0)
        scaling = _proportional(tensors[ROPE_FACTORS]) or llama3_scaling(
            tensors[ROPE_FACTORS], theta, rotary_dims
        )
    if "rope.dimension_count" in fields:
        scaling = {**(scaling or {"rope_type": "default"}), "rotary_dims": rotary_dims}
    return {} if scaling is None else {"rope_scaling": scaling}


def _proportional(factors: Any) -> dict[str, Any] | None:
    """Return the scaling whose ``factors`` are 1 for the first pairs and 1e30 for the rest."""
    factors = np.asarray(factors).reshape(-1)
    n_turned = int(np.count_nonzero(factors == 1))
    if n_turned in (0, len(factors)) or not np.all(factors[n_turned:] >= _NOT_TURNED):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": n_turned / len(factors)}


def _rope_scaling(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], form: Gguf
) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if {LONG_FACTORS, SHORT_FACTORS} <= tensors.keys():
        kind = "longrope"
    elif kind == "longrope":
        raise QsfConversionError(f"its RoPE is longrope, and it lacks {LONG_FACTORS} or the short")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    original = fields.get("rope.scaling.original_context_length")
    stated: dict[str, Any] = {"rope_type": kind}
    if original is not None:
        stated["original_max_position_embeddings"] = original
    attention_factor = fields.get("rope.scaling.attn_factor")
    if attention_factor:
        stated["attention_factor"] = attention_factor
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "longrope":
        return {
            **stated,
            "long_factor": _as_written(tensors[LONG_FACTORS]),
            "short_factor": _as_written(tensors[SHORT_FACTORS]),
        }
    if kind == "yarn":
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if fields.get(f"rope.scaling.{key}"):
                stated[name] = fields[f"rope.scaling.{key}"]
        scale = fields.get("attention.temperature_scale")
        if scale:
            stated["llama_4_scaling_beta"] = scale
        # The key holds mscale_all_dim (or a tenth of it); mscale is then 1 (or the same).
        multiplier = fields.get("rope.scaling.yarn_log_multiplier")
        if multiplier:
            of_all = float(f"{multiplier * (10 if form.has_tenth_of_mscale else 1):.6g}")
            of_one = of_all if form.has_tenth_of_mscale else 1.0
            stated |= {"mscale": of_one, "mscale_all_dim": of_all}
        return {**form.yarn, **stated, "factor": fields.get("rope.scaling.factor")}
    raise QsfConversionError(
        f"its RoPE scaling {shown(kind)} is not supported; "
        "supported: none, linear, llama3, yarn, longrope"
    )


def _as_written(values: Any) -> list[float]:
    """The shortest decimal numbers that f32 rounds to ``values`` [n]."""
    return [float(np.format_float_scientific(value, unique=True)) for value in values]


def llama3_scaling(factors: Any, theta: Any, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of LLaMA 3 whose divisors [head_dim / 2] of the angles are ``factors``.

    A GGUF file stores the divisors, not the parameters: the factor is the largest divisor, and the
    original length is the power of two that yields the others. Raises QsfConversionError when none
    does.
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
    """Return the ids of BOS, EOS (with the ends of a turn and of a message) and PAD."""
    ids = {
        field: metadata[f"tokenizer.ggml.{key}_token_id"]
        for field, key in (
            ("bos_token_id", "bos"),
            ("eos_token_id", "eos"),
            ("pad_token_id", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    ends = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    ends += [
        token
        for name in ("eot", "eom")
        if isinstance(token := metadata.get(f"tokenizer.ggml.{name}_token_id"), int)
        and token not in ends
    ]
    if len(ends) > 1 or ("eos_token_id" not in ids and ends):
        ids["eos_token_id"] = ends
    return ids
