# SPDX-License-Identifier: Apache-2.0
"""Turns HuggingFace model directories into GGUF files, as llama.cpp's converter does.

Names of tensors come from the ``gguf`` package, so that the converter's own tables are compared
with something.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Type: Any = gguf.GGMLQuantizationType


def interleave(values: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """The rows of Q or K as llama.cpp wants them: the halves of each head one by one."""
    halves = values.reshape(n_heads, 2, len(values) // n_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def write(
    folder: Path,
    out: Path,
    *,
    kind: Any = Type.F16,
    tokenizer: bool = False,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    n_in_part: int = 0,
) -> Path:
    """Write the model in ``folder``; matrices as ``kind``, or as it says of a name, vectors as F32.

    ``changes`` are further metadata, or others: int, float, bool, str or a list of such; None
    leaves a key out. ``tensors`` are further ones, under their names in the file. With
    ``n_in_part`` the file is split into parts of so many tensors; the first one's path is returned.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    arch = config["model_type"] if config["model_type"] != "mistral" else "llama"
    writer = gguf.GGUFWriter(out, arch, split_max_tensors=n_in_part)
    said: dict[str, Any] = _gpt2(config) if arch == "gpt2" else _llama(config)
    said = {f"{arch}.{key}": value for key, value in said.items()}
    if tokenizer:
        said |= byte_level_vocabulary(folder)
    for key, value in {**said, **(changes or {})}.items():
        add(writer, key, value)
    add_tensors(writer, folder, config, arch, kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    close(writer)
    return next(iter(sorted(out.parent.glob(f"{out.stem}-00001-of-*.gguf"))), out)


def add(writer: Any, key: str, value: Any) -> None:
    """Add one key with the type that suits its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def add_blocks(
    writer: Any, name: str, shape: tuple[int, ...], number: int, blocks: NDArray[np.uint8]
) -> None:
    """Add a tensor of a type that the package gguf cannot write, with all of its bytes."""
    writer.add_tensor(name, blocks.view(np.int8))
    writer.tensors[-1][name].shape, writer.tensors[-1][name].dtype = shape, number


def close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: Any, folder: Path, config: dict[str, Any], arch: str, kind: Any) -> None:
    is_gpt2 = arch == "gpt2"
    n_layers = config["n_layer" if is_gpt2 else "num_hidden_layers"]
    model = gguf.MODEL_ARCH.GPT2 if is_gpt2 else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(model, n_layers)
    for name, stored in load_file(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        values = np.asarray(stored, np.float32)
        for part, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                values = interleave(values, config[field])
        if is_gpt2 and values.ndim == 2 and ".h." in name:
            values = np.ascontiguousarray(values.T)
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        if values.ndim == 1 or there == "position_embd.weight":
            writer.add_tensor(there, values)
        elif kind == Type.F16:
            writer.add_tensor(there, values.astype(np.float16))
        else:
            own = kind(there) if callable(kind) else kind
            writer.add_tensor(there, quantised(values, own), raw_dtype=own)


def quantised(values: NDArray[np.float32], kind: Any) -> NDArray[Any]:
    if kind != Type.Q1_0:
        return np.asarray(gguf.quants.quantize(values, kind))
    rows = bytearray()  # which the package cannot; as quantize_row_q1_0_ref of llama.cpp
    for block in values.reshape(-1, 128):
        bits = sum(1 << i for i, value in enumerate(block) if value >= 0)
        rows += np.abs(block).mean().astype("<f2").tobytes() + bits.to_bytes(16, "little")
    return np.frombuffer(bytes(rows), np.uint8).reshape(len(values), -1)


def byte_level_vocabulary(folder: Path) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer.json as metadata."""
    parsed = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    added = {token["content"]: token for token in parsed["added_tokens"]}
    vocab = {**parsed["model"]["vocab"], **{word: one["id"] for word, one in added.items()}}
    words = sorted(vocab, key=lambda word: vocab[word])
    assert [vocab[word] for word in words] == list(range(len(words)))
    merges = [m if isinstance(m, str) else " ".join(m) for m in parsed["model"]["merges"]]
    kinds = [(3 if added[word]["special"] else 4) if word in added else 1 for word in words]
    said: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    config_path = folder / "config.json"
    if config_path.exists():
        config = json.loads(config_path.read_text("utf-8"))
        said["tokenizer.ggml.bos_token_id"] = config["bos_token_id"]
        said["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    said["tokenizer.ggml.add_bos_token"] = parsed["post_processor"] is not None
    return said


def with_runs(said: dict[str, Any]) -> dict[str, Any]:
    """A byte-level vocabulary with runs of digits and signs, which splitting rules cut apart."""
    words, merges = list(said["tokenizer.ggml.tokens"]), list(said["tokenizer.ggml.merges"])
    for sign in "159!^":
        for run in (sign * 2, sign * 3, sign * 4):
            if run not in words:
                words.append(run)
                merges.append(f"{run[1:]} {sign}")
    kinds = [*said["tokenizer.ggml.token_type"], *[1] * (len(words) - 2048)]
    return {
        **said,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": kinds,
    }


def sentence_piece_vocabulary(folder: Path) -> dict[str, Any]:
    """The vocabulary of LLaMA 2: words of tokenizer.json, scores of llama2.c's tokenizer.bin."""
    vocab = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    words = sorted(vocab, key=lambda word: vocab[word])
    data = (folder / "tokenizer.bin").read_bytes()
    scores, at = [], 4
    while at < len(data):
        score, n_bytes = struct.unpack_from("<fi", data, at)
        scores.append(score)
        at += 8 + n_bytes
    assert len(scores) == len(words)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(words) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    said = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    if config.get("sliding_window"):
        said["attention.sliding_window"] = config["sliding_window"]
    return said


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": config["n_inner"] or 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }
