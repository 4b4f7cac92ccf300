"""The architectures that can be converted: what their checkpoints call things, as data.

Each ``Family`` names its tensors with rules and reads its ``config.json`` into the header and
architecture values of a QSF file. A field that changes the computation in a way the engine
does not have is refused here, before any weight is read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf.file.arch import pack_arch
from qsf.file.layout import (
    Activation,
    Arch,
    Architecture,
    Dtype,
    Header,
    Norm,
    Positions,
    RopeScaling,
    TensorType,
    check_header,
)
from qsf_converter.sources.metadata import shown

Config = Mapping[str, Any]

_MAX_LAYERS = 4096
_MAX_DIM = 1 << 20
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
_MAX_VOCAB = 1 << 24
_MAX_TOKENS = 1 << 24
_MAX_FFN_DIM = 1 << 22


# The matrices of a layer by the input that they share, in the order of the forward pass.
INPUT_GROUPS: Final = (
    (TensorType.Q, TensorType.K, TensorType.V),
    (TensorType.ATTN_OUT,),
    (TensorType.FFN_GATE, TensorType.FFN_UP),
    (TensorType.FFN_DOWN,),
)


class Place(enum.Enum):
    """The part of the file that a tensor belongs to."""

    EMBEDDING = enum.auto()
    LAYER = enum.auto()
    FINAL = enum.auto()
    POSITIONS = enum.auto()  # the WPOS section


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How one kind of source tensor becomes one QSF tensor.

    ``source`` is the name without the family's prefix. ``shape`` names the dimensions of the
    source tensor. A matrix is transposed if the source stores [in, out] (GPT-2's Conv1D).
    A fused source holds ``n_parts`` tensors along its output axis; ``part`` says which.
    ``flag``, if given, is a fact of the configuration without which the tensor does not exist.
    """

    place: Place
    target: TensorType | None
    source: str
    shape: tuple[str, ...]
    transposed: bool = False
    part: int = 0
    n_parts: int = 1
    flag: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a configuration says: everything but the weights. ``header.dtype`` is provisional."""

    header: Header
    arch: Arch
    dims: Mapping[str, int]
    flags: frozenset[str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of transformers, by the name its ``config.json`` has."""

    name: str
    model_type: str
    prefix: str  # with or without it in front, a name is the same
    rules: tuple[TensorRule, ...]
    read_config: Callable[[Config], Facts]
    ignored_suffixes: tuple[str, ...]
    # Field -> the values with which the engine computes the same; anything else is refused.
    neutral_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def family_of(config: Config) -> Family:
    """Return the family a configuration belongs to; raises QsfConversionError if none does."""
    names = config.get("architectures")
    supported = ", ".join(sorted(FAMILIES))
    if isinstance(names, list) and names:
        name = str(names[0])
        if name in FAMILIES:
            return FAMILIES[name]
        raise QsfConversionError(
            f"architecture {name[:60]} is not supported; supported: {supported}"
        )
    for family in FAMILIES.values():
        if family.model_type == config.get("model_type"):
            return family
    raise QsfConversionError(
        f"config.json names no architecture (model_type {shown(config.get('model_type'))}); "
        f"supported: {supported}"
    )


def read_facts(family: Family, config: Config) -> Facts:
    """Return what ``config`` says; raises QsfConversionError for what cannot be computed."""
    for name, neutral in {**_NEUTRAL_VALUES, **family.neutral_values}.items():
        if name in config and config[name] not in neutral:
            hint = (
                "; convert the original, unquantised checkpoint"
                if name == "quantization_config"
                else ""
            )
            raise QsfConversionError(
                f"config.json: {name} = {shown(config[name])} is not supported{hint}"
            )
    facts = family.read_config(config)
    check_header(facts.header, QsfConversionError)
    pack_arch(facts.arch, facts.header, QsfConversionError)
    return facts


def _count(config: Config, name: str, maximum: int, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise QsfConversionError(f"config.json: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise QsfConversionError(f"config.json: {name} = {shown(value)} is not within 1..{maximum}")
    return value


def _positive(config: Config, name: str, default: float | None, where: str = "") -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problem = "is missing" if value is None else f"= {shown(value)} is not a number"
        raise QsfConversionError(f"config.json: {where}{name} {problem}")
    if not math.isfinite(value) or value <= 0:
        raise QsfConversionError(
            f"config.json: {where}{name} = {shown(value)} is not a positive number"
        )
    return float(value)


def _boolean(config: Config, name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise QsfConversionError(f"config.json: {name} = {shown(value)} is not true or false")
    return value


def _activation(config: Config, name: str, default: str) -> Activation:
    value = config.get(name, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise QsfConversionError(
            f"config.json: {name} = {shown(value)} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _token_id(config: Config, name: str, n_vocab: int, warnings: list[str]) -> int | None:
    """The id, or the first of a list of ids; None when there is none in the vocabulary."""
    value = config.get(name)
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise QsfConversionError(f"config.json: {name} = {shown(value)} is not a token id")
    if not 0 <= value < n_vocab:
        warnings.append(f"{name} {value} is outside the vocabulary of {n_vocab} and is left out")
        return None
    return value


def _rope(config: Config) -> tuple[float, dict[str, Any]]:
    """Return rope_theta and the scaling fields of ``Arch``, from either spelling."""
    modern = config.get("rope_parameters")
    name = "rope_parameters" if modern else "rope_scaling"
    scaling = modern or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise QsfConversionError(f"config.json: {name} is not an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise QsfConversionError(
            f"config.json: {name} differs between layers, which is not supported"
        )
    where = f"{name}."
    theta = _positive({**config, **scaling}, "rope_theta", 10000.0)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise QsfConversionError(f"config.json: {where}partial_rotary_factor is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, {}
    if kind == "linear":
        factor = _positive(scaling, "factor", None, where)
        return theta, {"rope_scaling": RopeScaling.LINEAR, "rope_factor": factor}
    if kind == "llama3":
        low = _positive(scaling, "low_freq_factor", None, where)
        high = _positive(scaling, "high_freq_factor", None, where)
        if high <= low:
            raise QsfConversionError(
                f"config.json: {where}high_freq_factor = {high:g} "
                f"is not above low_freq_factor = {low:g}"
            )
        original = _count({**config, **scaling}, "original_max_position_embeddings", _MAX_TOKENS)
        return theta, {
            "rope_scaling": RopeScaling.LLAMA3,
            "rope_factor": _positive(scaling, "factor", None, where),
            "rope_low_freq_factor": low,
            "rope_high_freq_factor": high,
            "rope_original_tokens": original,
        }
    raise QsfConversionError(
        f"config.json: RoPE scaling {shown(kind)} is not supported; "
        "supported: default, linear, llama3"
    )


def _head_dims(config: Config, default_kv_heads: int | None) -> tuple[int, int, int, int]:
    """Return hidden size, attention heads, key-value heads and the size of a head."""
    dim = _count(config, "hidden_size", _MAX_DIM)
    n_heads = _count(config, "num_attention_heads", _MAX_HEADS)
    if "num_key_value_heads" in config or default_kv_heads is None:
        default_kv_heads = n_heads
    n_kv_heads = _count(config, "num_key_value_heads", n_heads, default_kv_heads)
    if n_heads % n_kv_heads:
        raise QsfConversionError(
            f"config.json: {n_heads} attention heads cannot share {n_kv_heads} key-value heads"
        )
    if config.get("head_dim") is None and dim % n_heads:
        raise QsfConversionError(
            f"config.json: hidden_size {dim} is not a multiple of {n_heads} attention heads"
        )
    head_dim = _count(config, "head_dim", _MAX_HEAD_DIM, max(1, dim // n_heads))
    if head_dim % 2:
        raise QsfConversionError(f"config.json: RoPE needs an even head_dim, not {head_dim}")
    return dim, n_heads, n_kv_heads, head_dim


def _read_llama_like(
    config: Config,
    *,
    architecture: Architecture,
    default_kv_heads: int | None,
    default_tokens: int,
    default_window: int | None,
) -> Facts:
    warnings: list[str] = []
    dim, n_heads, n_kv_heads, head_dim = _head_dims(config, default_kv_heads)
    n_vocab = _count(config, "vocab_size", _MAX_VOCAB)
    max_tokens = _count(config, "max_position_embeddings", _MAX_TOKENS, default_tokens)
    theta, scaling = _rope(config)
    tied = _boolean(config, "tie_word_embeddings", False)
    window_tokens = 0
    if config.get("sliding_window", default_window) is not None and default_window is not None:
        window_tokens = _count(config, "sliding_window", _MAX_TOKENS, default_window)
        window_tokens = _window_of_layers(config, window_tokens)
    header = Header(
        architecture=architecture,
        n_layers=_count(config, "num_hidden_layers", _MAX_LAYERS),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_vocab=n_vocab,
        max_tokens=max_tokens,
        ffn_dim=_count(config, "intermediate_size", _MAX_FFN_DIM),
        head_dim=head_dim,
        dtype=Dtype.F16,
        activation=_activation(config, "hidden_act", "silu"),
        norm=Norm.RMS,
        positions=Positions.ROPE,
        rope_theta=theta,
        bos_id=_token_id(config, "bos_token_id", n_vocab, warnings),
        eos_id=_token_id(config, "eos_token_id", n_vocab, warnings),
        pad_id=_token_id(config, "pad_token_id", n_vocab, warnings),
    )
    arch = Arch(
        norm_epsilon=_positive(config, "rms_norm_eps", 1e-6),
        tied_head=tied,
        window_tokens=window_tokens,
        **scaling,
    )
    dims = {
        "hidden": dim,
        "q": n_heads * head_dim,
        "kv": n_kv_heads * head_dim,
        "ffn": header.ffn_dim,
        "vocab": n_vocab,
    }
    flags = {name for name in ("attention_bias", "mlp_bias") if _boolean(config, name, False)}
    return Facts(header, arch, dims, frozenset(flags), tuple(warnings))


def _window_of_layers(config: Config, window_tokens: int) -> int:
    """The window, given that ``layer_types`` may switch it off for all layers, not for some."""
    kinds = config.get("layer_types") or ["sliding_attention"]
    if not isinstance(kinds, list):
        raise QsfConversionError(f"config.json: layer_types = {shown(kinds)} is not a list")
    if all(kind == "sliding_attention" for kind in kinds):
        return window_tokens
    if all(kind == "full_attention" for kind in kinds):
        return 0
    raise QsfConversionError("config.json: layer_types with different attention is not supported")


def _read_llama(config: Config) -> Facts:
    return _read_llama_like(
        config,
        architecture=Architecture.LLAMA,
        default_kv_heads=None,
        default_tokens=2048,
        default_window=None,
    )


def _read_mistral(config: Config) -> Facts:
    return _read_llama_like(
        config,
        architecture=Architecture.MISTRAL,
        default_kv_heads=8,
        default_tokens=131072,
        default_window=4096,
    )


def _read_gpt2(config: Config) -> Facts:
    warnings: list[str] = []
    # transformers accepts its general names in place of GPT-2's own.
    aliases = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    renamed = {old: config[new] for old, new in aliases.items() if new in config}
    config = {**renamed, **config}
    dim = _count(config, "n_embd", _MAX_DIM)
    n_heads = _count(config, "n_head", _MAX_HEADS)
    if dim % n_heads:
        raise QsfConversionError(
            f"config.json: n_embd {dim} is not a multiple of {n_heads} attention heads"
        )
    n_vocab = _count(config, "vocab_size", _MAX_VOCAB)
    max_tokens = _count(config, "n_positions", _MAX_TOKENS)
    ffn_dim = _count(config, "n_inner", _MAX_FFN_DIM, 4 * dim)
    if ffn_dim > _MAX_FFN_DIM or dim // n_heads > _MAX_HEAD_DIM:
        raise QsfConversionError(
            f"config.json: FFN of {ffn_dim} or heads of {dim // n_heads} are too wide"
        )
    header = Header(
        architecture=Architecture.GPT2,
        n_layers=_count(config, "n_layer", _MAX_LAYERS),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        n_vocab=n_vocab,
        max_tokens=max_tokens,
        ffn_dim=ffn_dim,
        head_dim=dim // n_heads,
        dtype=Dtype.F16,
        activation=_activation(config, "activation_function", "gelu_new"),
        norm=Norm.LAYER,
        positions=Positions.LEARNED,
        rope_theta=0.0,
        bos_id=_token_id(config, "bos_token_id", n_vocab, warnings),
        eos_id=_token_id(config, "eos_token_id", n_vocab, warnings),
        pad_id=_token_id(config, "pad_token_id", n_vocab, warnings),
    )
    arch = Arch(
        norm_epsilon=_positive(config, "layer_norm_epsilon", 1e-5),
        tied_head=_boolean(config, "tie_word_embeddings", True),
    )
    dims = {
        "hidden": dim,
        "3 hidden": 3 * dim,
        "ffn": ffn_dim,
        "vocab": n_vocab,
        "positions": max_tokens,
    }
    return Facts(header, arch, dims, frozenset(), tuple(warnings))


_ACTIVATIONS = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "rope_interleave": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "alibi": (None, False),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


def _layer(
    target: TensorType, source: str, *shape: str, prefix: str = "layers", **options: Any
) -> TensorRule:
    return TensorRule(Place.LAYER, target, f"{prefix}.{{layer}}.{source}", shape, **options)


# In the order of docs/format.md, section 4: every small vector before the matrix that needs it.
_LLAMA_RULES = (
    TensorRule(Place.EMBEDDING, TensorType.EMBEDDING, "embed_tokens.weight", ("vocab", "hidden")),
    _layer(TensorType.ATTN_NORM, "input_layernorm.weight", "hidden"),
    _layer(TensorType.Q_BIAS, "self_attn.q_proj.bias", "q", flag="attention_bias"),
    _layer(TensorType.K_BIAS, "self_attn.k_proj.bias", "kv", flag="attention_bias"),
    _layer(TensorType.V_BIAS, "self_attn.v_proj.bias", "kv", flag="attention_bias"),
    _layer(TensorType.Q, "self_attn.q_proj.weight", "q", "hidden"),
    _layer(TensorType.K, "self_attn.k_proj.weight", "kv", "hidden"),
    _layer(TensorType.V, "self_attn.v_proj.weight", "kv", "hidden"),
    _layer(TensorType.ATTN_OUT_BIAS, "self_attn.o_proj.bias", "hidden", flag="attention_bias"),
    _layer(TensorType.ATTN_OUT, "self_attn.o_proj.weight", "hidden", "q"),
    _layer(TensorType.FFN_NORM, "post_attention_layernorm.weight", "hidden"),
    _layer(TensorType.FFN_GATE_BIAS, "mlp.gate_proj.bias", "ffn", flag="mlp_bias"),
    _layer(TensorType.FFN_UP_BIAS, "mlp.up_proj.bias", "ffn", flag="mlp_bias"),
    _layer(TensorType.FFN_GATE, "mlp.gate_proj.weight", "ffn", "hidden"),
    _layer(TensorType.FFN_UP, "mlp.up_proj.weight", "ffn", "hidden"),
    _layer(TensorType.FFN_DOWN_BIAS, "mlp.down_proj.bias", "hidden", flag="mlp_bias"),
    _layer(TensorType.FFN_DOWN, "mlp.down_proj.weight", "hidden", "ffn"),
    TensorRule(Place.FINAL, TensorType.FINAL_NORM, "norm.weight", ("hidden",)),
    TensorRule(
        Place.FINAL, TensorType.HEAD, "lm_head.weight", ("vocab", "hidden"), flag="separate_head"
    ),
)


def _gpt2_layer(target: TensorType, source: str, *shape: str, **options: Any) -> TensorRule:
    return _layer(target, source, *shape, prefix="h", **options)


def _gpt2_qkv(target: TensorType, part: int, kind: str) -> TensorRule:
    shape = ("hidden", "3 hidden") if kind == "weight" else ("3 hidden",)
    return _gpt2_layer(
        target,
        f"attn.c_attn.{kind}",
        *shape,
        transposed=kind == "weight",
        part=part,
        n_parts=3,
    )


_GPT2_RULES = (
    TensorRule(Place.POSITIONS, None, "wpe.weight", ("positions", "hidden")),
    TensorRule(Place.EMBEDDING, TensorType.EMBEDDING, "wte.weight", ("vocab", "hidden")),
    _gpt2_layer(TensorType.ATTN_NORM, "ln_1.weight", "hidden"),
    _gpt2_layer(TensorType.ATTN_NORM_BIAS, "ln_1.bias", "hidden"),
    _gpt2_qkv(TensorType.Q_BIAS, 0, "bias"),
    _gpt2_qkv(TensorType.K_BIAS, 1, "bias"),
    _gpt2_qkv(TensorType.V_BIAS, 2, "bias"),
    _gpt2_qkv(TensorType.Q, 0, "weight"),
    _gpt2_qkv(TensorType.K, 1, "weight"),
    _gpt2_qkv(TensorType.V, 2, "weight"),
    _gpt2_layer(TensorType.ATTN_OUT_BIAS, "attn.c_proj.bias", "hidden"),
    _gpt2_layer(TensorType.ATTN_OUT, "attn.c_proj.weight", "hidden", "hidden", transposed=True),
    _gpt2_layer(TensorType.FFN_NORM, "ln_2.weight", "hidden"),
    _gpt2_layer(TensorType.FFN_NORM_BIAS, "ln_2.bias", "hidden"),
    _gpt2_layer(TensorType.FFN_UP_BIAS, "mlp.c_fc.bias", "ffn"),
    _gpt2_layer(TensorType.FFN_UP, "mlp.c_fc.weight", "hidden", "ffn", transposed=True),
    _gpt2_layer(TensorType.FFN_DOWN_BIAS, "mlp.c_proj.bias", "hidden"),
    _gpt2_layer(TensorType.FFN_DOWN, "mlp.c_proj.weight", "ffn", "hidden", transposed=True),
    TensorRule(Place.FINAL, TensorType.FINAL_NORM, "ln_f.weight", ("hidden",)),
    TensorRule(Place.FINAL, TensorType.FINAL_NORM_BIAS, "ln_f.bias", ("hidden",)),
    TensorRule(
        Place.FINAL, TensorType.HEAD, "lm_head.weight", ("vocab", "hidden"), flag="separate_head"
    ),
)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="LlamaForCausalLM",
            model_type="llama",
            prefix="model.",
            rules=_LLAMA_RULES,
            read_config=_read_llama,
            ignored_suffixes=("rotary_emb.inv_freq",),
        ),
        Family(
            name="MistralForCausalLM",
            model_type="mistral",
            prefix="model.",
            rules=_LLAMA_RULES,
            read_config=_read_mistral,
            ignored_suffixes=("rotary_emb.inv_freq",),
            neutral_values={"attention_bias": (None, False), "mlp_bias": (None, False)},
        ),
        Family(
            name="GPT2LMHeadModel",
            model_type="gpt2",
            prefix="transformer.",
            rules=_GPT2_RULES,
            read_config=_read_gpt2,
            ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
            neutral_values={
                "scale_attn_weights": (None, True),
                "scale_attn_by_inverse_layer_idx": (None, False),
                "position_embedding_type": (None, "absolute"),
            },
        ),
    )
}
