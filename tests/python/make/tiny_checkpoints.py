# SPDX-License-Identifier: Apache-2.0
"""Random HuggingFace checkpoints of a few kilobytes, made in milliseconds from a seed.

The weights are small enough that activations stay near 1 and large enough that every part of the
model changes the logits: a converter or an engine that drops a bias or a scaling is caught.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Storage = Literal["fp32", "fp16", "bf16"]
Shapes = dict[str, tuple[int, ...]]

_STORED_NAMES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With 32 original tokens a head of 16 or more has pairs in all three of the ranges."""

LINEAR_SCALING: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}


def make_llama(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a LLaMA checkpoint to `folder` (made if missing) and return it.

    Options, beside those of `write_checkpoint`: n_layers, dim, n_heads, n_kv_heads, head_dim,
    ffn_dim, n_vocab, max_tokens, rope_theta, rope_scaling (a dict as in config.json), tied_head,
    attention_bias, mlp_bias, hidden_act, norm_epsilon.
    """
    return _make_gated(folder, "llama", seed, options)


def make_mistral(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Like `make_llama`, plus the option sliding_window (tokens or None; 8 if not given)."""
    return _make_gated(folder, "mistral", seed, {"sliding_window": 8, **options})


def make_gpt2(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """Write a GPT-2 checkpoint; by default with a width that is no multiple of 16 or 64.

    Options, beside those of `write_checkpoint`: n_layers, dim, n_heads, ffn_dim, n_vocab,
    max_tokens, hidden_act, tied_head, norm_epsilon.
    """
    dim = options.pop("dim", 78)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": dim,
        "n_layer": options.pop("n_layers", 2),
        "n_head": options.pop("n_heads", 3),
        "n_inner": options.pop("ffn_dim", 3 * dim + 1),
        "vocab_size": options.pop("n_vocab", 101),
        "n_positions": options.pop("max_tokens", 64),
        "layer_norm_epsilon": options.pop("norm_epsilon", 1e-5),
        "activation_function": options.pop("hidden_act", "gelu_new"),
        "tie_word_embeddings": options.pop("tied_head", True),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return write_checkpoint(folder, config, _weights(gpt2_shapes(config), seed), **options)


def _make_gated(folder: Path, model_type: str, seed: int, options: dict[str, Any]) -> Path:
    config = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": options.pop("dim", 80),
        "intermediate_size": options.pop("ffn_dim", 120),
        "num_hidden_layers": options.pop("n_layers", 2),
        "num_attention_heads": options.pop("n_heads", 4),
        "num_key_value_heads": options.pop("n_kv_heads", 2),
        "head_dim": options.pop("head_dim", 24),
        "vocab_size": options.pop("n_vocab", 101),
        "max_position_embeddings": options.pop("max_tokens", 64),
        "rms_norm_eps": options.pop("norm_epsilon", 1e-5),
        "rope_theta": options.pop("rope_theta", 10000.0),
        "rope_scaling": options.pop("rope_scaling", None),
        "hidden_act": options.pop("hidden_act", "silu"),
        "tie_word_embeddings": options.pop("tied_head", False),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model_type == "llama":
        config |= {key: options.pop(key, False) for key in ("attention_bias", "mlp_bias")}
    else:
        config["sliding_window"] = options.pop("sliding_window")
    return write_checkpoint(folder, config, _weights(llama_shapes(config), seed), **options)


def llama_shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of a LLaMA or Mistral checkpoint, by name."""
    dim, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, dim)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, bias, sizes in (
            ("self_attn", "attention_bias", {"q": (q, dim), "k": (kv, dim), "v": (kv, dim),
                                             "o": (dim, q)}),
            ("mlp", "mlp_bias", {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}),
        ):  # fmt: skip
            for name, shape in sizes.items():
                shapes[f"{at}{part}.{name}_proj.weight"] = shape
                if config.get(bias):
                    shapes[f"{at}{part}.{name}_proj.bias"] = shape[:1]
        shapes[f"{at}input_layernorm.weight"] = (dim,)
        shapes[f"{at}post_attention_layernorm.weight"] = (dim,)
    shapes["model.norm.weight"] = (dim,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of a GPT-2 checkpoint, by name: matrices of layers are [inputs, outputs]."""
    dim, vocab = config["n_embd"], config["vocab_size"]
    ffn = config["n_inner"] or 4 * dim
    shapes: Shapes = {
        "transformer.wte.weight": (vocab, dim),
        "transformer.wpe.weight": (config["n_positions"], dim),
        "transformer.ln_f.weight": (dim,),
        "transformer.ln_f.bias": (dim,),
    }
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}."
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}{name}.weight": (dim,), f"{at}{name}.bias": (dim,)}
        for name, n_in, n_out in (
            ("attn.c_attn", dim, 3 * dim),
            ("attn.c_proj", dim, dim),
            ("mlp.c_fc", dim, ffn),
            ("mlp.c_proj", ffn, dim),
        ):
            shapes |= {f"{at}{name}.weight": (n_in, n_out), f"{at}{name}.bias": (n_out,)}
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def _weights(shapes: Shapes, seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: _values(rng, name, shape) for name, shape in shapes.items()}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name.endswith("bias"):
        return rng.normal(0.0, 0.3, shape).astype(np.float32)
    if len(shape) == 1:
        return rng.normal(1.0, 0.2, shape).astype(np.float32)
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return rng.normal(0.0, 0.7, shape).astype(np.float32)
    is_turned = ".h." in name  # GPT-2's
    n_out, n_in = shape[::-1] if is_turned else shape
    matrix = rng.normal(0.0, 1 / math.sqrt(n_in), (n_out, n_in)).astype(np.float32)
    return np.ascontiguousarray(matrix.T) if is_turned else matrix


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    storage: Storage = "fp16",
    n_shards: int = 1,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write config.json, generation_config.json and the weights in the HuggingFace layout.

    With more than one shard the files are `model-00001-of-0000N.safetensors` with an index.
    `tokenizer_from` is a folder whose tokenizer.json and tokenizer_config.json are copied; the
    caller sees to it that n_vocab covers its ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[storage]
    _write_json(folder / "config.json", {**config, "torch_dtype": torch_dtype})
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(folder / "generation_config.json", ends)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(n_shards):
        file_name = f"model-{shard + 1:05}-of-{n_shards:05}.safetensors"
        if n_shards == 1:
            file_name = "model.safetensors"
        part = {name: tensors[name] for name in names[shard::n_shards]}
        (folder / file_name).write_bytes(safetensors_bytes(part, storage))
        weight_map |= dict.fromkeys(part, file_name)
    if n_shards > 1:
        n_bytes = sum(array.size for array in tensors.values()) * (4 if storage == "fp32" else 2)
        index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    if tokenizer_from is not None:
        for file_name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_from / file_name, folder / file_name)
    return folder


def safetensors_bytes(tensors: Mapping[str, NDArray[np.float32]], storage: Storage) -> bytes:
    """The bytes of one safetensors file; bf16 is rounded to nearest, ties to even."""
    name = _STORED_NAMES[storage]
    return raw_safetensors({n: (name, x.shape, _stored(x, storage)) for n, x in tensors.items()})


def raw_safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """The bytes of one safetensors file, of (type, shape, bytes) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _stored(array: NDArray[np.float32], storage: Storage) -> bytes:
    if storage == "fp32":
        return array.astype("<f4").tobytes()
    if storage == "fp16":
        return array.astype("<f2").tobytes()
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "<u2").tobytes()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


# ---- checkpoints whose key channels differ in size as those of real models do ----
Arrays = dict[str, NDArray[np.float32]]


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and the tensors as f32 of a folder with one safetensors file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return config, {name: array.astype(np.float32) for name, array in tensors.items()}


def with_large_keys(folder: Path, out: Path, *, size: float, n_pairs: int = 2) -> Path:
    """Write a LLaMA checkpoint again, with biases of ``size`` in the K channels that turn slowest.

    As in Qwen 2, these change the scores of all positions alike, so that the model hardly changes.
    """
    config, tensors = read_checkpoint(folder)
    config["attention_bias"] = True
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, dim = config["head_dim"], config["hidden_size"]
    rng = np.random.default_rng(1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        keys = np.zeros((n_kv_heads, 2, head_dim // 2), np.float32)
        keys[:, :, -n_pairs:] = size * rng.choice((-1, 1), (n_kv_heads, 2, n_pairs))
        biases = {
            "q": np.zeros(n_heads * head_dim, np.float32),
            "k": keys.ravel(),
            "v": np.zeros(n_kv_heads * head_dim, np.float32),
            "o": np.zeros(dim, np.float32),
        }
        tensors |= {f"{at}.{name}_proj.bias": bias for name, bias in biases.items()}
    has_tokenizer = (folder / "tokenizer.json").exists()
    return write_checkpoint(out, config, tensors, tokenizer_from=folder if has_tokenizer else None)
