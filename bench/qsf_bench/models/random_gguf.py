"""A GGUF model of a shape of LLaMA with random weights, for llama.cpp as the baseline.

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

from qsf.errors import QsfIOError
from qsf.file.partial import create_partial
from qsf_bench.models.shapes import Shape
from qsf_converter.sources.gguf_file import types

GENERATOR: Final = 3  # increased when the same arguments give another file

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

# QSF's type -> the mixture that it is compared with.
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
_BLOCKS: Final = {name: (n_values, n_bytes) for name, n_values, n_bytes in types().values()}

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


def gguf_bytes(shape: Shape, mixture: str) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.n_bytes for tensor in tensors(shape, mixture))


# ---- the tensors ----


def tensors(shape: Shape, mixture: str) -> Iterator[Tensor]:
    """Yield the tensors in file order."""
    base = FILE_TYPES[mixture][0]
    head = base if base in ("Q8_0", "F16") else "Q6_K"
    embedding = "Q4_K" if base in ("TQ1_0", "TQ2_0") else base
    table = (shape.n_vocab, shape.dim)
    yield _matrix("token_embd.weight", table, head if shape.is_tied else embedding)
    yield Tensor("output_norm.weight", (shape.dim,), "F32")
    if not shape.is_tied:
        yield _matrix("output.weight", table, head)
    n_queries, n_keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    matrices = {
        "attn_q": (n_queries, shape.dim),
        "attn_k": (n_keys, shape.dim),
        "attn_v": (n_keys, shape.dim),
        "attn_output": (shape.dim, n_queries),
        "ffn_gate": (shape.ffn_dim, shape.dim),
        "ffn_up": (shape.ffn_dim, shape.dim),
        "ffn_down": (shape.dim, shape.ffn_dim),
    }
    for layer in range(shape.n_layers):
        for kind, dims in matrices.items():
            wanted = _layer_type(mixture, kind, layer, shape)
            yield _matrix(f"blk.{layer}.{kind}.weight", dims, wanted)
        for norm in ("attn_norm", "ffn_norm"):
            yield Tensor(f"blk.{layer}.{norm}.weight", (shape.dim,), "F32")


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
    base = FILE_TYPES[mixture][0]
    if mixture == "Q4_K_M" and kind in ("attn_v", "ffn_down"):
        return "Q6_K" if _gets_more_bits(layer, shape.n_layers) else base
    if mixture == "Q3_K_M" and kind in ("attn_v", "ffn_down", "attn_output"):
        n_first = {"attn_v": 2, "ffn_down": shape.n_layers // 16}.get(kind, 0)
        return "Q5_K" if layer < n_first else "Q4_K"
    if mixture == "Q2_K" and kind == "attn_v" and shape.n_heads >= 4 * shape.n_kv_heads:
        return "Q4_K"
    if mixture == "Q2_K" and kind in ("attn_v", "attn_output", "ffn_down"):
        return "Q3_K"
    return base


# ---- the file ----


def _metadata(shape: Shape, mixture: str) -> dict[str, int | float | str]:
    """Return the metadata in the file's order, without the tokenizer's lists."""
    return {
        "general.file_type": FILE_TYPES[mixture][1],
        "general.quantization_version": 2,
        "llama.block_count": shape.n_layers,
        "llama.context_length": shape.max_tokens,
        "llama.embedding_length": shape.dim,
        "llama.feed_forward_length": shape.ffn_dim,
        "llama.attention.head_count": shape.n_heads,
        "llama.attention.head_count_kv": shape.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": shape.n_vocab,
        "tokenizer.ggml.model": "llama",
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

    ``progress`` is called with bytes written and all bytes. Raises QsfIOError if the system
    refuses, such as for a full disk.
    """
    import gguf  # late: a tenth of a second

    total_bytes = gguf_bytes(shape, mixture)
    if out.is_dir() or not out.parent.is_dir():
        raise QsfIOError(f"{out}: no file can be written there")
    try:
        fd, temporary = create_partial(out)
        try:
            writer = gguf.GGUFWriter(temporary, "llama")
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
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    # Byte tokens and made-up words: llama.cpp's server does not start without a vocabulary.
    n_words = shape.n_vocab - 259
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_token_list([*words, *(f"t{i}" for i in range(n_words))])
    writer.add_token_scores([0.0] * shape.n_vocab)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * n_words])
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
        return np.ones(tensor.dims, np.float32)
    data = random.integers(0, 256, tensor.n_bytes, np.uint8)
    if tensor.type == "TQ2_0":
        data &= ~(data & (data << 1) & 0xAA)  # three of the four codes are used: 3 becomes 1
    blocks = data.reshape(-1, _BLOCKS[tensor.type][1])
    for offset, scale in _SCALES[tensor.type]:
        blocks[:, offset : offset + 2] = np.array([scale], "<f2").view(np.uint8)
    return data.reshape(tensor.byte_dims)
