"""A GGUF model of a shape with random weights, for llama.cpp as the baseline.

Every tensor has the type that ``llama-quantize`` would give it, so that size and speed are
realistic; the quantised codes are random bytes, and only the scales of the blocks are chosen, for
weights with a standard deviation near 0.02. Tensors are made and written one at a time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.partial import create_partial
from qsf_bench.models.shapes import Shape, config_of, facts_of, family_of
from qsf_converter.sources.families.rules import Place
from qsf_converter.sources.gguf_config import ALL_DIALECTS
from qsf_converter.sources.gguf_dialects import Dialect
from qsf_converter.sources.gguf_file import TYPES

GENERATOR: Final = 2  # increased when the same arguments give another file

# Mixture -> the type of most matrices, and the number of the mixture in llama.cpp.
FILE_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    "F16": ("F16", 1),
    "Q4_0": ("Q4_0", 2),
    "Q8_0": ("Q8_0", 7),
    "Q2_K": ("Q2_K", 10),
    "Q3_K_M": ("Q3_K", 12),
    "Q4_K_M": ("Q4_K", 15),
    "TQ1_0": ("TQ1_0", 36),
    "TQ2_0": ("TQ2_0", 37),
}

# QSF's type -> the mixture that it is compared with; for "mixed" see `facts.baseline_type`.
BASELINE_TYPES: Final[Mapping[str, str]] = {
    "2bit": "Q2_K",
    "2bit-sym": "Q2_K",
    "3bit": "Q3_K_M",
    "4bit": "Q4_K_M",
    "4bit-sym": "Q4_0",
    "ternary": "TQ2_0",
    "ternary-dense": "TQ1_0",
    "8bit": "Q8_0",
    "f16": "F16",
}

_ALIGNMENT: Final = 32
_BLOCKS: Final = {name: (n_values, n_bytes) for name, n_values, n_bytes in TYPES.values()}

# The types that llama-quantize falls back to if rows are not whole blocks; after them F16.
_FALLBACKS: Final = {
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

# Positions of the f16 factors of a block, in bytes, and their values: codes and sub-scales are
# uniform, and the mins give the weights a mean near 0.
_SCALES: Final[Mapping[str, tuple[tuple[int, float], ...]]] = {
    "Q4_0": ((0, 4.3e-3),),
    "Q5_0": ((0, 2.2e-3),),
    "Q5_1": ((0, 2.2e-3), (2, -3.4e-2)),
    "Q8_0": ((0, 2.7e-4),),
    "Q2_K": ((80, 1.4e-3), (82, 2.1e-3)),
    "Q3_K": ((108, 4.6e-4),),
    "Q4_K": ((0, 7.8e-5), (2, 5.9e-4)),
    "Q5_K": ((0, 3.9e-5), (2, 6.0e-4)),
    "Q6_K": ((208, 1.5e-5),),
    "TQ1_0": ((52, 2.4e-2),),
    "TQ2_0": ((64, 2.8e-2),),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file: [rows, columns], or a vector."""

    name: str
    dims: tuple[int, ...]
    type: str

    @property
    def byte_dims(self) -> tuple[int, ...]:
        """The shape of its bytes."""
        n_values, n_bytes = _BLOCKS[self.type]
        return (*self.dims[:-1], self.dims[-1] // n_values * n_bytes)

    @property
    def n_values(self) -> int:
        """Weights."""
        return math.prod(self.dims)

    @property
    def n_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.byte_dims)


def gguf_bits_per_weight(shape: Shape, mixture: str) -> float:
    """Return the mean bits of a weight over all tensors."""
    all_tensors = list(tensors(shape, mixture))
    return 8 * sum(t.n_bytes for t in all_tensors) / sum(t.n_values for t in all_tensors)


def gguf_bytes(shape: Shape, mixture: str) -> int:
    """Return the bytes of all tensors. Raises QsfArgumentError for an unknown type."""
    return sum(tensor.n_bytes for tensor in tensors(shape, mixture))


# ---- the tensors ----


def tensors(shape: Shape, mixture: str) -> Iterator[Tensor]:
    """Yield the tensors in file order. Raises QsfArgumentError for an unknown type."""
    if mixture not in FILE_TYPES:
        raise QsfArgumentError(
            f"type {mixture!r} of a GGUF file is unknown; known: {', '.join(FILE_TYPES)}"
        )
    base = FILE_TYPES[mixture][0]
    head = base if base in ("Q8_0", "F16") else "Q6_K"
    embedding = "Q4_K" if base in ("TQ1_0", "TQ2_0") else base
    table = (shape.n_vocab, shape.dim)
    yield _matrix("token_embd.weight", table, head if shape.is_tied else embedding)
    if shape.family == "gpt2":
        yield Tensor("position_embd.weight", (shape.max_tokens, shape.dim), "F32")
    if not shape.is_tied:
        yield _matrix("output.weight", table, head)
    if shape.own_width:
        own = (shape.n_vocab, shape.n_layers * shape.own_width)
        yield _matrix("per_layer_token_embd.weight", own, head)
    yield from _tensors_of_layers(shape, mixture)


def _dialect_of(shape: Shape) -> tuple[str, Dialect]:
    """Return llama.cpp's name of the architecture, and its dialect."""
    family = family_of(shape).name
    return next(
        (arch, dialect) for arch, dialect in ALL_DIALECTS.items() if dialect.family == family
    )


def _tensors_of_layers(shape: Shape, mixture: str) -> Iterator[Tensor]:
    """Yield the tensors of the layers and the final norm, by the converter's tables."""
    family, (_, dialect) = family_of(shape), _dialect_of(shape)
    facts = facts_of(shape)
    here = {there: name for name, there in dialect.tensors.items()}
    vectors: dict[str, int] = {}
    for layer in range(shape.n_layers):
        layer_kind = facts.layer_kinds[layer] if facts.layer_kinds else None
        n_experts = 0 if layer_kind is None else layer_kind.n_experts
        done = set()
        for rule in (*family.rules, *(family.layouts or ((),))[-1]):
            if rule.place is not Place.LAYER and (rule.place is not Place.EXPERT or not n_experts):
                continue
            if not rule.where.holds(layer_kind) or (rule.of_all and layer):
                continue
            if rule.flag not in (None, *facts.flags):
                continue
            pattern = here[family.prefixes[0] + rule.source]
            name = pattern.format(layer=layer)
            dims = rule.source_shape(facts.dims)
            if name in done:  # several tensors of a .qsf file are one tensor here
                continue
            done.add(name)
            if len(dims) == 1:
                vectors[name] = dims[0]
                continue
            if shape.family == "gpt2":  # only its checkpoints have [inputs, outputs]
                dims = dims[::-1]
            kind = name.rsplit(".", 2)[-2].removesuffix("_exps")
            is_router = kind == "ffn_gate_inp"  # llama-quantize does not quantise it
            wanted = "F32" if is_router else _layer_type(mixture, kind, layer, shape)
            yield _matrix(name, dims, wanted)
    vectors["output_norm.weight"] = shape.dim
    if shape.family == "gpt2":
        vectors["output_norm.bias"] = shape.dim
    for name, length in vectors.items():
        yield Tensor(name, (length,), "F32")


def _matrix(name: str, dims: tuple[int, ...], wanted: str) -> Tensor:
    """Return a matrix of the type, or of its fallback if rows are no whole blocks."""
    for kind in (wanted, _FALLBACKS.get(wanted, "F16")):
        if dims[-1] % _BLOCKS[kind][0] == 0:
            return Tensor(name, dims, kind)
    return Tensor(name, dims, "F16")


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """Return whether mixtures of type M give this layer's V and FFN down more bits."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _layer_type(mixture: str, kind: str, layer: int, shape: Shape) -> str:
    """Return the type that llama-quantize gives a matrix of a layer, without importance matrix."""
    mixed = _mixed_type(mixture, kind, layer, shape)
    # llama.cpp gives V of LLaMA 70B more bits, because eight heads share it.
    is_70b = shape.family == "llama" and shape.n_layers == 80 and shape.n_heads > shape.n_kv_heads
    return "Q5_K" if is_70b and kind == "attn_v" and mixed in ("Q3_K", "Q4_K") else mixed


def _mixed_type(mixture: str, kind: str, layer: int, shape: Shape) -> str:
    base = FILE_TYPES[mixture][0]
    is_v = kind in ("attn_v", "attn_qkv")
    if mixture == "Q4_K_M" and (is_v or kind == "ffn_down"):
        return "Q6_K" if _gets_more_bits(layer, shape.n_layers) else base
    if mixture == "Q3_K_M":
        n_first = {"attn_v": 2, "attn_qkv": 2, "ffn_down": shape.n_layers // 16}.get(kind, 0)
        if is_v or kind in ("ffn_down", "attn_output"):
            return "Q5_K" if layer < n_first else "Q4_K"
    if mixture == "Q2_K":
        if is_v and shape.n_heads >= 4 * shape.n_kv_heads:
            return "Q4_K"
        if is_v or kind in ("attn_output", "ffn_down"):
            return "Q3_K"
    return base


# ---- the file ----


def _metadata(shape: Shape, mixture: str) -> dict[str, int | float | str]:
    """Return the metadata in the file's order; there is no tokenizer."""
    arch, dialect = _dialect_of(shape)
    config, facts = config_of(shape), facts_of(shape)
    metadata: dict[str, int | float | str] = {
        "general.architecture": arch,
        "general.file_type": FILE_TYPES[mixture][1],
        "general.quantization_version": 2,
        f"{arch}.block_count": shape.n_layers,
        f"{arch}.context_length": shape.max_tokens,
        f"{arch}.embedding_length": shape.dim,
        f"{arch}.feed_forward_length": shape.ffn_dim,
        f"{arch}.attention.head_count": shape.n_heads,
        f"{arch}.vocab_size": shape.n_vocab,
        "tokenizer.ggml.model": "no_vocab",
    }
    metadata |= {
        f"{arch}.{key}": config[field]
        for field, key in {**dialect.config, **dialect.optional}.items()
        if config.get(field) is not None
    }
    if shape.n_experts:
        metadata[f"{arch}.expert_count"] = shape.n_experts
        metadata[f"{arch}.expert_used_count"] = shape.n_chosen
    if shape.family == "gpt2":
        return metadata
    return metadata | {
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.rope.dimension_count": facts.arch.rope_dims or shape.head_dim,
        f"{arch}.rope.freq_base": facts.header.rope_theta,
    }


def write_model(
    out: Path,
    shape: Shape,
    mixture: str,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the file ``out`` atomically.

    ``progress`` is called with bytes written and all bytes. Raises QsfArgumentError for an unknown
    type, and QsfIOError if the system refuses, such as for a full disk.
    """
    import gguf  # late: a tenth of a second

    total_bytes = gguf_bytes(shape, mixture)
    if out.is_dir() or not out.parent.is_dir():
        raise QsfIOError(f"{out}: no file can be written there")
    try:
        fd, temporary = create_partial(out)
        try:
            writer = gguf.GGUFWriter(temporary, _dialect_of(shape)[0])
            try:
                _add_heads(writer, gguf.GGMLQuantizationType, shape, mixture)
                _write_data(writer, shape, mixture, seed, progress, total_bytes)
            finally:
                writer.close()
            os.fsync(fd)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(fd)
    except OSError as error:
        raise QsfIOError(
            f"{out}: {error.strerror or error}; about {total_bytes / 1e6:.0f} MB are needed"
        ) from error


def _add_heads(writer: Any, type_numbers: Any, shape: Shape, mixture: str) -> None:
    """Write metadata and tensor infos, which precede the weights."""
    for key, value in _metadata(shape, mixture).items():
        if key == "general.architecture":
            continue  # the writer adds it itself
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in tensors(shape, mixture):
        dtype = {"F32": np.float32, "F16": np.float16}.get(tensor.type, np.uint8)
        dims = tensor.byte_dims if dtype is np.uint8 else tensor.dims
        number = type_numbers[tensor.type]
        writer.add_tensor_info(tensor.name, dims, np.dtype(dtype), tensor.n_bytes, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_data(
    writer: Any,
    shape: Shape,
    mixture: str,
    seed: int,
    progress: Callable[[int, int], None] | None,
    total_bytes: int,
) -> None:
    random = np.random.default_rng(seed)
    n_done = 0
    for tensor in tensors(shape, mixture):
        writer.write_tensor_data(_random_data(tensor, random))
        n_done += tensor.n_bytes
        if progress is not None:
            progress(n_done, total_bytes)


def _random_data(tensor: Tensor, random: np.random.Generator) -> npt.NDArray[Any]:
    """Return the stored bytes of one tensor."""
    if tensor.type in ("F32", "F16"):
        if len(tensor.dims) > 1:
            values: npt.NDArray[np.float32] = random.standard_normal(tensor.dims, np.float32)
            values *= np.float32(0.02)
            return values if tensor.type == "F32" else values.astype(np.float16)
        value = 0 if tensor.name.endswith(".bias") else 1
        return np.full(tensor.dims, value, np.float32)
    data = random.integers(0, 256, tensor.n_bytes, np.uint8)
    if tensor.type == "TQ2_0":
        data &= ~(data & (data << 1) & 0xAA)  # three of the four codes are used: 3 becomes 1
    blocks = data.reshape(-1, _BLOCKS[tensor.type][1])
    for offset, scale in _SCALES[tensor.type]:
        blocks[:, offset : offset + 2] = np.array([scale], "<f2").view(np.uint8)
    return data.reshape(tensor.byte_dims)
