"""Write a GGUF model of a given shape with random weights, for llama.cpp as the peer.

Every tensor has the type that `llama-quantize` would give it, so that size and speed are those
of a real model; the quantised codes are random bytes and only the scales of the blocks are chosen,
to make weights of a standard deviation near 0.02. Tensors are made and written one at a time.

Needs: pip install gguf
Usage: python bench/make_gguf.py OUT.gguf --shape 1.1b --type Q4_K_M
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from make_checkpoint import SHAPES, Shape, n_values

Type = gguf.GGMLQuantizationType

# What most matrices are, and the number that llama.cpp has for the mixture.
FILE_TYPES = {
    "Q4_0": (Type.Q4_0, 2),
    "Q8_0": (Type.Q8_0, 7),
    "Q2_K": (Type.Q2_K, 10),
    "Q3_K_M": (Type.Q3_K, 12),
    "Q4_K_M": (Type.Q4_K, 15),
    "TQ1_0": (Type.TQ1_0, 36),
    "TQ2_0": (Type.TQ2_0, 37),
}

# Where the f16 factors of a block are, in bytes, and their values: codes and sub-scales are
# uniform, and the mins are such that the weights have a mean near 0.
SCALES = {
    Type.Q4_0: ((0, 4.3e-3),),
    Type.Q8_0: ((0, 2.7e-4),),
    Type.Q2_K: ((80, 1.4e-3), (82, 2.1e-3)),
    Type.Q3_K: ((108, 4.6e-4),),
    Type.Q4_K: ((0, 7.8e-5), (2, 5.9e-4)),
    Type.Q5_K: ((0, 3.9e-5), (2, 6.0e-4)),
    Type.Q6_K: ((208, 1.5e-5),),
    Type.TQ1_0: ((52, 2.4e-2),),
    Type.TQ2_0: ((64, 2.8e-2),),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file: [rows, columns], or a vector."""

    name: str
    dims: tuple[int, ...]
    type: gguf.GGMLQuantizationType

    @property
    def byte_dims(self) -> tuple[int, ...]:
        """The dimensions of its bytes."""
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        if self.dims[-1] % block_values:
            raise SystemExit(f"{self.name}: rows of {self.dims[-1]} do not fit {self.type.name}")
        return (*self.dims[:-1], self.dims[-1] // block_values * block_bytes)


def gets_more_bits(layer: int, n_layers: int) -> bool:
    """Whether the mixtures of type M give this layer's V and FFN down more bits."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def layer_type(mixture: str, kind: str, layer: int, shape: Shape) -> gguf.GGMLQuantizationType:
    """Return what llama-quantize makes of one matrix of a layer, without importance matrix."""
    base = FILE_TYPES[mixture][0]
    is_v = kind in ("attn_v", "attn_qkv")
    if mixture == "Q4_K_M" and (is_v or kind == "ffn_down"):
        return Type.Q6_K if gets_more_bits(layer, shape.n_layers) else base
    if mixture == "Q3_K_M":
        n_first = {"attn_v": 2, "attn_qkv": 2, "ffn_down": shape.n_layers // 16}.get(kind, 0)
        if is_v or kind in ("ffn_down", "attn_output"):
            return Type.Q5_K if layer < n_first else Type.Q4_K
    if mixture == "Q2_K":
        if is_v and shape.n_heads >= 4 * shape.n_kv_heads:
            return Type.Q4_K
        if is_v or kind in ("attn_output", "ffn_down"):
            return Type.Q3_K
    return base


def tensors(shape: Shape, mixture: str) -> Iterator[Tensor]:
    """Yield the tensors in file order."""
    base = FILE_TYPES[mixture][0]
    head = Type.Q8_0 if base == Type.Q8_0 else Type.Q6_K
    is_gpt2 = shape.family == "gpt2"
    embedding = Type.Q4_K if base in (Type.TQ1_0, Type.TQ2_0) else base
    dim, ffn_dim = shape.dim, shape.ffn_dim
    kv_dim = dim // shape.n_heads * shape.n_kv_heads
    table = (shape.n_vocab, dim)
    yield Tensor("token_embd.weight", table, head if is_gpt2 else embedding)
    if is_gpt2:
        yield Tensor("position_embd.weight", (shape.max_tokens, dim), Type.F32)
        matrices = {"attn_qkv": (3 * dim, dim), "attn_output": (dim, dim)}
        matrices |= {"ffn_up": (ffn_dim, dim), "ffn_down": (dim, ffn_dim)}
    else:
        yield Tensor("output.weight", table, head)
        matrices = {"attn_q": (dim, dim), "attn_k": (kv_dim, dim), "attn_v": (kv_dim, dim)}
        matrices |= {"attn_output": (dim, dim), "ffn_gate": (ffn_dim, dim)}
        matrices |= {"ffn_up": (ffn_dim, dim), "ffn_down": (dim, ffn_dim)}
    vectors = {"output_norm": dim}
    for layer in range(shape.n_layers):
        prefix = f"blk.{layer}."
        vectors |= {f"{prefix}attn_norm": dim, f"{prefix}ffn_norm": dim}
        for kind, dims in matrices.items():
            yield Tensor(f"{prefix}{kind}.weight", dims, layer_type(mixture, kind, layer, shape))
            if is_gpt2:
                yield Tensor(f"{prefix}{kind}.bias", dims[:1], Type.F32)
    for name, length in vectors.items():
        yield Tensor(f"{name}.weight", (length,), Type.F32)
        if is_gpt2:
            yield Tensor(f"{name}.bias", (length,), Type.F32)


def random_data(tensor: Tensor, random: np.random.Generator) -> npt.NDArray[np.generic]:
    """Return what is stored of one tensor."""
    if tensor.type == Type.F32:
        if len(tensor.dims) == 2:
            values: npt.NDArray[np.float32] = random.standard_normal(tensor.dims, np.float32)
            values *= np.float32(0.02)
            return values
        value = 0 if tensor.name.endswith(".bias") else 1
        return np.full(tensor.dims, value, np.float32)
    data = random.integers(0, 256, n_values(tensor.byte_dims), np.uint8)
    if tensor.type == Type.TQ2_0:
        data &= ~(data & (data << 1) & 0xAA)  # of the four codes three are in use: 3 becomes 1
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.type][1])
    for offset, scale in SCALES[tensor.type]:
        blocks[:, offset : offset + 2] = np.array([scale], "<f2").view(np.uint8)
    return data.reshape(tensor.byte_dims)


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, mixture: str) -> None:
    """Add what llama.cpp must know; there is no tokenizer."""
    writer.add_file_type(FILE_TYPES[mixture][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.max_tokens)
    writer.add_embedding_length(shape.dim)
    writer.add_feed_forward_length(shape.ffn_dim)
    writer.add_head_count(shape.n_heads)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.family == "gpt2":
        writer.add_layer_norm_eps(1e-5)
        return
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.dim // shape.n_heads)
    writer.add_rope_freq_base(10000.0)


def write(path: Path, shape: Shape, mixture: str) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, shape.family)
    add_metadata(writer, shape, mixture)
    all_tensors = list(tensors(shape, mixture))
    for tensor in all_tensors:
        is_plain = tensor.type == Type.F32
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        dims = tensor.dims if is_plain else tensor.byte_dims
        writer.add_tensor_info(tensor.name, dims, dtype, n_values(tensor.byte_dims), tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for tensor in all_tensors:
        writer.write_tensor_data(random_data(tensor, random))
    writer.close()


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_0")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write(args.out, shape, args.type)
    n_weights = sum(n_values(t.dims) for t in tensors(shape, args.type))
    n_bytes = args.out.stat().st_size
    print(f"{args.out}: {n_bytes / 1e6:.0f} MB, {n_bytes * 8 / n_weights:.2f} bits per weight")


if __name__ == "__main__":
    main()
