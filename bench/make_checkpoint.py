"""Write a HuggingFace-style LLaMA or GPT-2 checkpoint of a given shape with random weights.

For measuring conversion, memory and speed on real sizes without downloading a model.
Tensors are written one at a time, so any size fits in little memory.

Usage: python bench/make_checkpoint.py OUT_DIR --shape tinyllama-1.1b [--tokenizer-from DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qsf_bench.models.shapes import SHAPES, Shape, find_shape

MAX_SHARD_BYTES = 2 << 30


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, in file order."""
    return gpt2_tensors(shape) if shape.family == "gpt2" else llama_tensors(shape)


def gpt2_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of GPT-2: matrices are [in, out], the head is the embedding."""
    dim = shape.dim
    yield "transformer.wte.weight", (shape.n_vocab, dim)
    yield "transformer.wpe.weight", (shape.max_tokens, dim)
    for layer in range(shape.n_layers):
        prefix = f"transformer.h.{layer}."
        yield prefix + "ln_1.weight", (dim,)
        yield prefix + "ln_1.bias", (dim,)
        yield prefix + "attn.c_attn.weight", (dim, 3 * dim)
        yield prefix + "attn.c_attn.bias", (3 * dim,)
        yield prefix + "attn.c_proj.weight", (dim, dim)
        yield prefix + "attn.c_proj.bias", (dim,)
        yield prefix + "ln_2.weight", (dim,)
        yield prefix + "ln_2.bias", (dim,)
        yield prefix + "mlp.c_fc.weight", (dim, shape.ffn_dim)
        yield prefix + "mlp.c_fc.bias", (shape.ffn_dim,)
        yield prefix + "mlp.c_proj.weight", (shape.ffn_dim, dim)
        yield prefix + "mlp.c_proj.bias", (dim,)
    yield "transformer.ln_f.weight", (dim,)
    yield "transformer.ln_f.bias", (dim,)


def llama_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of LLaMA: matrices are [out, in]."""
    kv_dim = shape.dim // shape.n_heads * shape.n_kv_heads
    yield "model.embed_tokens.weight", (shape.n_vocab, shape.dim)
    for layer in range(shape.n_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (shape.dim,)
        yield prefix + "self_attn.q_proj.weight", (shape.dim, shape.dim)
        yield prefix + "self_attn.k_proj.weight", (kv_dim, shape.dim)
        yield prefix + "self_attn.v_proj.weight", (kv_dim, shape.dim)
        yield prefix + "self_attn.o_proj.weight", (shape.dim, shape.dim)
        yield prefix + "post_attention_layernorm.weight", (shape.dim,)
        yield prefix + "mlp.gate_proj.weight", (shape.ffn_dim, shape.dim)
        yield prefix + "mlp.up_proj.weight", (shape.ffn_dim, shape.dim)
        yield prefix + "mlp.down_proj.weight", (shape.dim, shape.ffn_dim)
    yield "model.norm.weight", (shape.dim,)
    yield "lm_head.weight", (shape.n_vocab, shape.dim)


def n_values(dims: tuple[int, ...]) -> int:
    """Return the number of elements of an array of these dimensions."""
    return int(np.prod(dims, dtype=np.int64))


def shards(shape: Shape) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Group the tensors into files of at most MAX_SHARD_BYTES (one tensor at least)."""
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, dims in tensors(shape):
        size = 2 * n_values(dims)
        if groups[-1] and used + size > MAX_SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append((name, dims))
        used += size
    return groups


def write_shard(path: Path, group: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    """Write one safetensors file of fp16 tensors: matrices normal, norms one, biases 0."""
    header: dict[str, object] = {}
    offset = 0
    for name, dims in group:
        end = offset + 2 * n_values(dims)
        header[name] = {"dtype": "F16", "shape": list(dims), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dims in group:
            if len(dims) == 1:
                value = 0 if name.endswith(".bias") else 1
                file.write(np.full(dims, value, np.float16).tobytes())
                continue
            for first in range(0, dims[0], 1024):
                rows = min(1024, dims[0] - first)
                values = random.standard_normal((rows, dims[1]), dtype=np.float32)
                file.write((values * np.float32(0.02)).astype(np.float16).tobytes())


def llama_config(shape: Shape) -> dict[str, object]:
    """Return what ``config.json`` of a LLaMA model says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def gpt2_config(shape: Shape) -> dict[str, object]:
    """Return what ``config.json`` of a GPT-2 model says."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": shape.dim,
        "n_inner": shape.ffn_dim,
        "n_layer": shape.n_layers,
        "n_head": shape.n_heads,
        "n_positions": shape.max_tokens,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--tokenizer-from", type=Path, help="folder to copy tokenizer files from")
    args = parser.parse_args()
    shape = find_shape(args.shape)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    specific = gpt2_config(shape) if shape.family == "gpt2" else llama_config(shape)
    config = {
        **specific,
        "model_type": shape.family,
        "vocab_size": shape.n_vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }
    (args.out_dir / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    groups = shards(shape)
    index: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        write_shard(args.out_dir / name, group, seed=i)
        index.update(dict.fromkeys((tensor for tensor, _ in group), name))
    index_text = json.dumps({"metadata": {}, "weight_map": index})
    (args.out_dir / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    if args.tokenizer_from:
        for path in args.tokenizer_from.glob("*token*.json"):
            shutil.copyfile(path, args.out_dir / path.name)


if __name__ == "__main__":
    main()
