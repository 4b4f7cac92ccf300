"""Makes small HuggingFace model directories with known random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}

GPT2_CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "vocab_size": 40,
    "n_positions": 24,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 39,
    "eos_token_id": 39,
}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("gate", ffn), ("up", ffn), ("down", dim)):
            if config.get("mlp_bias"):
                shapes[f"{layer}mlp.{name}_proj.bias"] = (rows,)
        for name, rows, cols in (("q", q, dim), ("k", kv, dim), ("v", kv, dim), ("o", dim, q)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, cols)
            if config.get("attention_bias"):
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}input_layernorm.weight"] = (dim,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (dim,)
        shapes[f"{layer}mlp.gate_proj.weight"] = (ffn, dim)
        shapes[f"{layer}mlp.up_proj.weight"] = (ffn, dim)
        shapes[f"{layer}mlp.down_proj.weight"] = (dim, ffn)
    shapes["model.norm.weight"] = (dim,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim = config["n_embd"]
    ffn = config["n_inner"] or 4 * dim
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], dim),
        "transformer.wpe.weight": (config["n_positions"], dim),
    }
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}."
        for name, n_in, n_out in (
            ("attn.c_attn", dim, 3 * dim),
            ("attn.c_proj", dim, dim),
            ("mlp.c_fc", dim, ffn),
            ("mlp.c_proj", ffn, dim),
        ):
            shapes[f"{layer}{name}.weight"] = (n_in, n_out)
            shapes[f"{layer}{name}.bias"] = (n_out,)
        for name in ("ln_1", "ln_2"):
            shapes[f"{layer}{name}.weight"] = (dim,)
            shapes[f"{layer}{name}.bias"] = (dim,)
        shapes[f"{layer}attn.bias"] = (1, 1, 24, 24)
    shapes["transformer.ln_f.weight"] = (dim,)
    shapes["transformer.ln_f.bias"] = (dim,)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: type = np.float16, seed: int = 0
) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in shapes.items()
    }


def tokenizer_json(n_first: int = 3) -> bytes:
    """A tokenizer.json of 47 tokens: some letters, numbered from ``n_first``."""
    letters = "ABCDEHOWabcdefghijklmnopqrstuvwxyz .,!0123456789"[:47]
    vocab = {letter.replace(" ", "\u0120"): n_first + i for i, letter in enumerate(letters)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    ).encode()


def write_model(folder: Path, config: dict[str, Any], weights: Weights | None) -> Path:
    """A directory with config.json, tokenizer.json and, if there are weights, model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, weights: Weights, n_shards: int) -> None:
    """model-0000N-of-0000M.safetensors and their index."""
    weight_map = {}
    for i in range(n_shards):
        shard = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::n_shards]}
        save_file(part, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_raw_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """A safetensors file written by hand, for the types numpy does not know."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def bf16_bytes(values: np.ndarray) -> bytes:
    """The upper halves of f32 values: bf16 by truncation."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def llama(folder: Path, dtype: type = np.float16, **changes: Any) -> tuple[Path, Weights]:
    config = {**LLAMA_CONFIG, **changes}
    weights = random_weights(llama_shapes(config), dtype)
    return write_model(folder, config, weights), weights


def gpt2(folder: Path, dtype: type = np.float16, **changes: Any) -> tuple[Path, Weights]:
    config = {**GPT2_CONFIG, **changes}
    weights = random_weights(gpt2_shapes(config), dtype)
    return write_model(folder, config, weights), weights
