"""Dimensions of well-known models."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from qsf.errors import QsfArgumentError
from qsf.file.layout import TensorType
from qsf_converter.sources.architectures import FAMILIES, read_facts
from qsf_converter.sources.families.family import Facts, Family
from qsf_converter.sources.families.rules import Place, in_file_order

T = TensorType
Entry = tuple[TensorType, int, int]  # a matrix [n_rows, n_cols], or a vector: n_rows is 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model.

    ``family`` is its ``model_type``, such as llama. ``head_dim`` 0 becomes dim / n_heads, and
    ``is_tied`` None the family's default: the head of GPT-2 is its embedding. ``window_tokens`` is
    the window of layers that have one. In a mixture of experts all layers have ``n_experts``, of
    which a token uses ``n_chosen``, and ``ffn_dim`` is the width of one. ``n_value_heads`` are
    those of the delta rule, if the family has it. Of Gemma 4 E2B and E4B ``own_width`` is the width
    of each layer's own embeddings, ``n_sharing`` how many of the last layers read the keys of
    others, and ``is_wide`` says that their FFNs are twice as wide.
    """

    n_layers: int
    dim: int
    ffn_dim: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int = 32000
    max_tokens: int = 2048
    family: str = "llama"
    head_dim: int = 0
    is_tied: bool | None = None
    window_tokens: int = 0
    n_experts: int = 0
    n_chosen: int = 0
    n_value_heads: int = 0
    own_width: int = 0
    n_sharing: int = 0
    is_wide: bool = False

    def __post_init__(self) -> None:
        """Fill in values that follow from others, so that equal shapes compare equal."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.is_tied is None:
            object.__setattr__(self, "is_tied", self.family == "gpt2")


_QWEN3: Final = functools.partial(
    Shape, n_vocab=151936, max_tokens=40960, family="qwen3", head_dim=128
)
_QWEN3_5: Final = functools.partial(
    Shape, n_vocab=248320, max_tokens=262144, family="qwen3_5_text", head_dim=256
)
_GEMMA3: Final = functools.partial(Shape, family="gemma3_text", head_dim=256, is_tied=True)
_GEMMA4: Final = functools.partial(
    Shape, n_vocab=262144, max_tokens=262144, family="gemma4_text", head_dim=256, is_tied=True,
    window_tokens=1024,
)  # fmt: skip
_GRANITE4: Final = functools.partial(
    Shape, n_vocab=100352, max_tokens=131072, family="granitemoehybrid", is_tied=True
)
_LATENT: Final = functools.partial(Shape, head_dim=64)
SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(4, 256, 768, 4, 2, n_vocab=2048),
    "gpt2": Shape(12, 768, 3072, 12, 12, n_vocab=50257, max_tokens=1024, family="gpt2"),
    "llama-110m": Shape(12, 768, 2048, 12, 12),
    "tinyllama-1.1b": Shape(22, 2048, 5632, 32, 4, max_tokens=4096),
    "llama2-7b": Shape(32, 4096, 11008, 32, 32, max_tokens=4096),
    "llama2-13b": Shape(40, 5120, 13824, 40, 40, max_tokens=4096),
    "llama2-70b": Shape(80, 8192, 28672, 64, 8, max_tokens=4096),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, max_tokens=32768),
    "qwen3-0.6b": _QWEN3(28, 1024, 3072, 16, 8, is_tied=True),
    "qwen3-4b": _QWEN3(36, 2560, 9728, 32, 8, is_tied=True),
    "qwen3-8b": _QWEN3(36, 4096, 12288, 32, 8),
    "gemma3-270m": _GEMMA3(18, 640, 2048, 4, 1, 262144, 32768, window_tokens=512),
    "gemma3-1b": _GEMMA3(26, 1152, 6912, 4, 1, 262144, 32768, window_tokens=512),
    "gemma3-4b": _GEMMA3(34, 2560, 10240, 8, 4, 262208, 131072, window_tokens=1024),
    "gemma4-e2b": _GEMMA4(
        35, 1536, 6144, 8, 1, max_tokens=131072, window_tokens=512, own_width=256, n_sharing=20,
        is_wide=True,
    ),
    "gemma4-e4b": _GEMMA4(
        42, 2560, 10240, 8, 2, max_tokens=131072, window_tokens=512, own_width=256, n_sharing=18
    ),
    "gemma4-31b": _GEMMA4(60, 5376, 21504, 32, 16),
    "gemma4-26b-a4b": _GEMMA4(30, 2816, 2112, 16, 8, n_experts=128, n_chosen=8),
    "phi4-mini": Shape(
        32, 3072, 8192, 24, 8, 200064, 131072, family="phi3", head_dim=128, is_tied=True
    ),
    "smollm3-3b": Shape(
        36, 2048, 11008, 16, 4, 128256, 65536, family="smollm3", head_dim=128, is_tied=True
    ),
    "olmoe-1b-7b": Shape(
        16, 2048, 1024, 16, 16, 50304, 4096, family="olmoe", n_experts=64, n_chosen=8
    ),
    "qwen3-30b-a3b": _QWEN3(48, 2048, 768, 32, 4, family="qwen3_moe", n_experts=128, n_chosen=8),
    "qwen3.5-0.8b": _QWEN3_5(24, 1024, 3584, 8, 2, is_tied=True, n_value_heads=16),
    "qwen3.5-9b": _QWEN3_5(32, 4096, 12288, 16, 4, n_value_heads=32),
    "qwen3.8-27b": _QWEN3_5(64, 5120, 17408, 24, 4, n_value_heads=48),
    "qwen3.6-35b-a3b": _QWEN3_5(
        40, 2048, 512, 16, 2, family="qwen3_5_moe_text", n_value_heads=32, n_experts=256,
        n_chosen=8,
    ),
    "olmo-hybrid-7b": Shape(
        32, 3840, 11008, 30, 30, 100352, 65536, "olmo_hybrid", n_value_heads=30
    ),
    "minicpm3-4b": Shape(62, 2560, 6400, 40, 40, 73448, 32768, "minicpm3", 32, is_tied=True),
    "deepseek-v2-lite": _LATENT(
        27, 2048, 1408, 16, 16, 102400, 163840, "deepseek_v2", n_experts=64, n_chosen=6
    ),
    "glm-4.7-flash": _LATENT(
        47, 2048, 1536, 20, 20, 154880, 202752, "glm4_moe_lite", n_experts=64, n_chosen=4
    ),
    "kimi-linear-48b-a3b": _LATENT(
        27, 2304, 1024, 32, 32, 163840, 1048576, "kimi_linear", n_experts=256, n_chosen=8
    ),
    "deepseek-v3": _LATENT(
        61, 7168, 2048, 128, 128, 129280, 163840, "deepseek_v3", n_experts=256, n_chosen=8
    ),
    "lfm2-1.2b": Shape(
        16, 2048, 12288, 32, 8, 65536, 128000, family="lfm2", head_dim=64, is_tied=True
    ),
    "granite4-h-micro": _GRANITE4(40, 2048, 8192, 32, 8, n_value_heads=64),
    "granite4-h-tiny": _GRANITE4(
        40, 1536, 512, 12, 4, n_value_heads=48, n_experts=64, n_chosen=6
    ),
    "falcon-h1-1.5b": Shape(
        24, 2048, 4096, 8, 2, 65537, 131072, family="falcon_h1", head_dim=128, n_value_heads=48
    ),
    "nemotron3-nano-30b-a3b": Shape(
        52, 2688, 1856, 32, 2, 131072, 262144, family="nemotron_h", head_dim=128,
        n_value_heads=64, n_experts=128, n_chosen=6,
    ),
    "gpt-oss-20b": Shape(
        24, 2880, 2880, 64, 8, 201088, 131072, family="gpt_oss", head_dim=64, window_tokens=128,
        n_experts=32, n_chosen=4,
    ),
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """Return the shape of that name. Raises QsfArgumentError with the known names."""
    shape = SHAPES.get(name)
    if shape is None:
        raise QsfArgumentError(f"shape {name!r} is unknown; known: {', '.join(SHAPES)}")
    return shape


# Values of published configurations that are not sizes.
_MORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3": {"rope_theta": 1000000.0},
    "qwen3_moe": {"rope_theta": 1000000.0, "norm_topk_prob": True},
    "phi3": {"partial_rotary_factor": 0.75},
    "gemma3_text": {"query_pre_attn_scalar": 256},
    "minicpm3": {"v_head_dim": 64},
    # Of a mixture ``ffn_dim`` is that of an expert; this is that of the first layers.
    "deepseek_v2": {"intermediate_size": 10944, "q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"intermediate_size": 10240},
    "kimi_linear": {"intermediate_size": 9216},
    "deepseek_v3": {"intermediate_size": 18432},
    # The converter makes 8192 of 12288.
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_auto_adjust_ff_dim": True},
    # Four layers of forty have attention.
    "granitemoehybrid": {
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "mamba_d_state": 128,
    },
    "falcon_h1": {"mamba_d_state": 256},
    "nemotron_h": {
        "hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME",
        "routed_scaling_factor": 2.5,
    },
    "gemma4_text": {"final_logit_softcapping": 30.0},
}


def family_of(shape: Shape) -> Family:
    """Return the converter's table of the shape's family."""
    return next(family for family in FAMILIES.values() if family.model_type == shape.family)


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the shape as a config.json."""
    family = family_of(shape)
    config = {
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.n_vocab,
        "max_position_embeddings": shape.max_tokens,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": 0,
        "sliding_window": shape.window_tokens or None,
        **_MORE.get(shape.family, {}),
    }
    if shape.n_experts:
        config |= {"num_experts": shape.n_experts, "num_experts_per_tok": shape.n_chosen}
    if "moe_intermediate_size" in family.defaults:
        config["moe_intermediate_size"] = shape.ffn_dim
    if shape.family == "gemma4_text":
        config |= {
            "attention_k_eq_v": not shape.own_width,
            "num_global_key_value_heads": None if shape.own_width else shape.n_kv_heads // 4,
            "hidden_size_per_layer_input": shape.own_width,
            "vocab_size_per_layer_input": shape.n_vocab,
            "num_kv_shared_layers": shape.n_sharing,
            "use_double_wide_mlp": shape.is_wide,
            "sliding_window_pattern": 5 if shape.n_layers % 6 else 6,
            "enable_moe_block": shape.n_experts > 0,
            "moe_intermediate_size": shape.ffn_dim // 3,
        }
    if shape.family in _OF_MAMBA:
        config |= _mamba_sizes(shape)
    elif shape.n_value_heads:
        config["linear_num_value_heads"] = shape.n_value_heads
    return {family.renames.get(name, name): value for name, value in config.items()}


_OF_MAMBA: Final = ("granitemoehybrid", "falcon_h1", "nemotron_h")


def _mamba_sizes(shape: Shape) -> dict[str, Any]:
    """The heads of Mamba-2 have 64 values; a shared expert is twice as wide as the others."""
    sizes: dict[str, Any] = {
        "mamba_n_heads": shape.n_value_heads,
        "mamba_d_head": 64,
        "num_experts": shape.n_experts,
    }
    if shape.family == "nemotron_h":
        return {**sizes, "moe_shared_expert_intermediate_size": 2 * shape.ffn_dim}
    if shape.family == "falcon_h1":
        del sizes["num_experts"]
        return {**sizes, "mamba_d_ssm": 64 * shape.n_value_heads}
    shared = 2 * shape.ffn_dim if shape.n_experts else shape.ffn_dim
    return {**sizes, "shared_intermediate_size": shared}


@functools.cache
def facts_of(shape: Shape) -> Facts:
    """Return the converter's plan for the shape; no token ends a text, so runs have equal length.

    Raises QsfConversionError for sizes that its family cannot have.
    """
    return read_facts(family_of(shape), config_of(shape))


def experts_of(shape: Shape, layer: int) -> int:
    """Return how many experts a layer has: first layers may have none."""
    kinds = facts_of(shape).layer_kinds
    return kinds[layer].n_experts if kinds else 0


def layer_entries(shape: Shape, layer: int) -> list[Entry]:
    """Return the tensors of a layer in the order of a .qsf file."""
    return _entries(shape, Place.LAYER, layer)


def expert_entries(shape: Shape) -> list[Entry]:
    """Return the tensors of an expert in the order of a .qsf file; none without experts."""
    return _entries(shape, Place.EXPERT) if shape.n_experts else []


def final_entries(shape: Shape) -> list[Entry]:
    """Return the tensors of the final unit in the order of a .qsf file."""
    return _entries(shape, Place.FINAL)


def _entries(shape: Shape, place: Place, layer: int = 0) -> list[Entry]:
    facts, family = facts_of(shape), family_of(shape)
    flags = facts.flags if shape.is_tied else facts.flags | {"separate_head"}
    kind = facts.kinds[layer]
    return [
        (rule.target, *_size(tuple(facts.dims[dim] for dim in rule.shape), rule.is_vector))
        for rule in in_file_order((*family.rules, *(family.layouts or ((),))[0]))
        if rule.place is place
        and rule.target is not None
        and rule.flag in (None, *flags)
        and (place is not Place.LAYER or rule.where.holds(kind))
    ]


def _size(dims: tuple[int, ...], is_vector: bool) -> tuple[int, int]:
    return (0, math.prod(dims)) if is_vector else (dims[0], dims[1])
