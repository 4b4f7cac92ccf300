"""Write a .qsf file of a given shape and type with random weights, without a checkpoint.

For measuring speed and memory at every type: no floats are made for most weights. A pool of tiles
is quantised once from normally distributed weights, and every matrix takes its tiles from
there, beginning at a random place; so codes and scales look like those of a model, activations
stay finite, and any size fits in little memory. The text such a model writes means nothing.

With --sparse N only the first N layers have weights. The matrices of the others are holes in the
file, zeros that take no room on the disk, so that a model of 70 B parameters is made in seconds:
for seeing that it opens and runs in little memory, not for speed, since a hole is read faster
than a disk.

Usage: python bench/make_model.py OUT.qsf --shape 1.1b --quant-type 2bit
           [--embed-type 8bit] [--tokenizer-from examples/tiny-llama] [--seed 0]
           [--compress zstd | --sparse 1]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from make_checkpoint import SHAPES, Shape

from qsf.converter import metadata
from qsf.converter.compression import AUTO, COMPRESSIONS, DEFAULT_COMPRESSION, parse_compression
from qsf.converter.plan import DEFAULT_EMBED_TYPE, QUANT_TYPES
from qsf.converter.quantisers import quantise_rows
from qsf.format import (
    BLOCK,
    TILE_ROWS,
    Activation,
    Arch,
    Architecture,
    Compression,
    Dtype,
    Header,
    Layout,
    Norm,
    Positions,
    TensorType,
    Writer,
    tensor_bytes,
)

WEIGHT_STD = 0.02
POOL_TILES = 4096

T = TensorType
Entry = tuple[TensorType, int, int]  # a matrix [n_rows, n_cols], or a vector: n_rows is 0


class Weights:
    """Random weights as the bytes of a file."""

    def __init__(self, seed: int) -> None:
        """Start the generator."""
        self._random = np.random.default_rng(seed)
        self._pools: dict[Dtype, memoryview] = {}

    def _normal(self, n_rows: int, n_cols: int) -> np.ndarray:
        values: np.ndarray = self._random.standard_normal((n_rows, n_cols), dtype=np.float32)
        values *= np.float32(WEIGHT_STD)
        return values

    def positions(self, n_rows: int, n_cols: int) -> bytes:
        """Return plain rows of f16."""
        return self._normal(n_rows, n_cols).astype("<f2").tobytes()

    def write_matrix(self, writer: Writer, dtype: Dtype, n_rows: int, n_cols: int) -> None:
        """Write the tiles of a matrix; a last row of tiles that needs padding has its own."""
        tile_bytes = tensor_bytes(TILE_ROWS, BLOCK, dtype, Layout.TILES)
        if dtype not in self._pools:
            pool = quantise_rows(dtype, self._normal(TILE_ROWS, BLOCK * POOL_TILES))
            self._pools[dtype] = memoryview(pool)
        pool_view = self._pools[dtype]
        whole_rows = n_rows // TILE_ROWS * TILE_ROWS if n_cols % BLOCK == 0 else 0
        left = tensor_bytes(whole_rows, n_cols, dtype, Layout.TILES)
        at = int(self._random.integers(POOL_TILES)) * tile_bytes
        while left:
            part = pool_view[at : at + left]
            writer.write(part)
            left -= len(part)
            at = 0
        for row in range(whole_rows, n_rows, 1024):
            rows = self._normal(min(1024, n_rows - row), n_cols)
            writer.write(quantise_rows(dtype, rows))


def header_of(shape: Shape, dtype: Dtype) -> Header:
    """Return the model's numbers; it has no end-of-text token, so that runs have one length."""
    is_gpt2 = shape.family == "gpt2"
    return Header(
        architecture=Architecture.GPT2 if is_gpt2 else Architecture.LLAMA,
        n_layers=shape.n_layers,
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        n_vocab=shape.n_vocab,
        max_tokens=shape.max_tokens,
        ffn_dim=shape.ffn_dim,
        head_dim=shape.dim // shape.n_heads,
        dtype=dtype,
        activation=Activation.GELU_TANH if is_gpt2 else Activation.SILU,
        norm=Norm.LAYER if is_gpt2 else Norm.RMS,
        positions=Positions.LEARNED if is_gpt2 else Positions.ROPE,
        rope_theta=0.0 if is_gpt2 else 10000.0,
        bos_id=0,
        eos_id=None,
        pad_id=None,
    )


def layer_entries(shape: Shape) -> list[Entry]:
    """Return the tensors of a layer in the file's order."""
    dim, ffn = shape.dim, shape.ffn_dim
    kv = dim // shape.n_heads * shape.n_kv_heads
    attention: list[Entry] = [(T.Q, dim, dim), (T.K, kv, dim), (T.V, kv, dim)]
    if shape.family == "gpt2":
        return [
            *((kind, 0, dim) for kind in (T.ATTN_NORM, T.ATTN_NORM_BIAS, T.Q_BIAS)),
            *((kind, 0, kv) for kind in (T.K_BIAS, T.V_BIAS)),
            *attention,
            (T.ATTN_OUT_BIAS, 0, dim),
            (T.ATTN_OUT, dim, dim),
            *((kind, 0, dim) for kind in (T.FFN_NORM, T.FFN_NORM_BIAS)),
            (T.FFN_UP_BIAS, 0, ffn),
            (T.FFN_UP, ffn, dim),
            (T.FFN_DOWN_BIAS, 0, dim),
            (T.FFN_DOWN, dim, ffn),
        ]
    return [
        (T.ATTN_NORM, 0, dim),
        *attention,
        (T.ATTN_OUT, dim, dim),
        (T.FFN_NORM, 0, dim),
        (T.FFN_GATE, ffn, dim),
        (T.FFN_UP, ffn, dim),
        (T.FFN_DOWN, dim, ffn),
    ]


def write_unit(
    writer: Writer,
    weights: Weights | None,
    unit_idx: int,
    dtype: Dtype,
    entries: list[Entry],
    *,
    compression: Compression = Compression.NONE,
) -> None:
    """Write one unit: norms are one, biases zero, matrices random, or holes without weights."""
    writer.begin_unit(unit_idx, dtype=dtype, compression=compression)
    for kind, n_rows, n_cols in entries:
        if n_rows:
            writer.begin_tensor(kind, n_rows, n_cols, dtype, Layout.TILES)
            if weights is None:
                writer.write_zeros(tensor_bytes(n_rows, n_cols, dtype, Layout.TILES))
            else:
                weights.write_matrix(writer, dtype, n_rows, n_cols)
        else:
            value = 0 if kind.name.endswith("BIAS") else 1
            writer.begin_tensor(kind, 1, n_cols, Dtype.F32, Layout.VECTOR)
            writer.write(np.full(n_cols, value, "<f4").tobytes())
        writer.end_tensor()
    writer.end_unit()


def write_model(
    out: Path,
    shape: Shape,
    quant_type: Dtype,
    embed_type: Dtype,
    *,
    tokenizer_from: Path | None = None,
    seed: int = 0,
    compression: Compression = Compression.NONE,
    n_real_layers: int | None = None,
) -> None:
    """Write the file ``out``; the layers from ``n_real_layers`` on are holes."""
    is_gpt2 = shape.family == "gpt2"
    weights = Weights(seed)
    final: list[Entry] = [(T.FINAL_NORM, 0, shape.dim)]
    final += (
        [(T.FINAL_NORM_BIAS, 0, shape.dim)] if is_gpt2 else [(T.HEAD, shape.n_vocab, shape.dim)]
    )
    with Writer(out, header_of(shape, quant_type), Arch(tied_head=is_gpt2)) as writer:
        embedding: list[Entry] = [(T.EMBEDDING, shape.n_vocab, shape.dim)]
        write_unit(writer, weights, 0, embed_type, embedding)
        for layer in range(shape.n_layers):
            is_real = n_real_layers is None or layer < n_real_layers
            write_unit(
                writer,
                weights if is_real else None,
                layer + 1,
                quant_type,
                layer_entries(shape),
                compression=compression,
            )
        write_unit(writer, weights, shape.n_layers + 1, embed_type, final)
        if is_gpt2:
            writer.add_section("WPOS", weights.positions(shape.max_tokens, shape.dim))
        tokenizer = None if tokenizer_from is None else metadata.tokenizer_bytes(tokenizer_from)
        if tokenizer is not None:
            writer.add_section("TOKN", tokenizer)
        meta = {"source": {"name": "random weights of bench/make_model.py", "seed": seed}}
        writer.add_section("META", json.dumps(meta).encode())


def main() -> None:
    """Parse the command line, write the file, say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--quant-type", choices=QUANT_TYPES, default="4bit")
    parser.add_argument(
        "--embed-type", choices=QUANT_TYPES, help="default: 8bit, or f16 with --quant-type f16"
    )
    parser.add_argument("--tokenizer-from", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compress", choices=[c for c in COMPRESSIONS if c != AUTO], default=DEFAULT_COMPRESSION
    )
    parser.add_argument("--sparse", type=int, metavar="N", help="only N layers, the rest are holes")
    args = parser.parse_args()
    started = time.monotonic()
    quant_type = QUANT_TYPES[args.quant_type]
    default = "f16" if quant_type == Dtype.F16 else DEFAULT_EMBED_TYPE
    embed_type = QUANT_TYPES[args.embed_type or default]
    write_model(
        args.out,
        SHAPES[args.shape],
        quant_type,
        embed_type,
        tokenizer_from=args.tokenizer_from,
        seed=args.seed,
        compression=parse_compression(args.compress) or Compression.NONE,
        n_real_layers=args.sparse,
    )
    elapsed_s = time.monotonic() - started
    file = args.out.stat()
    print(
        f"{args.out}: {file.st_size / 1e6:.0f} MB, {file.st_blocks * 512 / 1e6:.0f} MB on the disk,"
        f" {elapsed_s:.1f} s"
    )


if __name__ == "__main__":
    main()
