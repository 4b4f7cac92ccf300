# SPDX-License-Identifier: Apache-2.0
"""The transformer in plain numpy: the truth that the engine is tested against.

Written for reading, not for speed, and sharing no line with the engine. `forward` returns
the logits and the values inside every layer, so that a test can name the first difference
(`first_difference`). Weights come from a HuggingFace directory, from a `.qsf` file, or from
any dictionary with the names of `docs/format.md`, section 4, in lower case: `embedding`,
`positions`, `layer.0.attn_norm`, `layer.0.q`, ..., `final_norm`, `head`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from oracle.reference_tiles import decode_outliers, decode_tiles

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

Array = NDArray[Any]

BLOCK_COLS = 64
"""Columns that share one activation scale (design decision D3)."""

MATRICES = ("q", "k", "v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Config:
    """What `forward` must know about a model beside its weights."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"]
    activation: str  # a name that `activate` knows
    positions: Literal["rope", "learned"]
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"  # none, linear or llama3
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_tokens: int = 8192
    rope_dims: int | None = None
    rope_interleaved: bool = False
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration with its weights, all f32.

    Matrices are [outputs, inputs]. `integer` names the matrices that a file stores quantised, with
    the bits of the integer activations that the engine multiplies them with: 16 for 8-bit
    weights, else 8. `outliers` has what the outlier table of a matrix adds to it, [outputs,
    inputs]: that part meets the activations before they are rounded.
    """

    config: Config
    weights: Mapping[str, Array]
    integer: Mapping[str, int] = field(default_factory=dict)
    outliers: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of `forward`.

    `logits` is [n_tokens, n_vocab]. `values` maps names such as `layer.3.q_rope` to arrays with
    one row a token, in the order in which they are computed.
    """

    logits: Array
    values: dict[str, Array] = field(default_factory=dict)


def quantise_activations(x: Array, bits: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Round rows to integers of 8 or 16 bits as the engine does before an integer product.

    `x` is [n_rows, n_cols]; returned are integers [n_rows, n_blocks, 64], padded with zeros, and
    the f32 scales [n_rows, n_blocks]. The 8-bit ones are the high parts of the 16-bit ones.
    """
    n_rows, n_cols = x.shape
    n_blocks = -(-n_cols // BLOCK_COLS)
    padded = np.zeros((n_rows, n_blocks * BLOCK_COLS), np.float32)
    padded[:, :n_cols] = x
    blocks = padded.reshape(n_rows, n_blocks, BLOCK_COLS)
    largest = np.abs(blocks).max(axis=2)
    inverse = np.divide(
        np.float32(127 * 256), largest, out=np.zeros_like(largest), where=largest > 0
    ).astype(np.float32)
    codes = np.rint(blocks * inverse[:, :, None]).astype(np.int32)
    scales = largest / np.float32(127)
    return (codes, scales / np.float32(256)) if bits == 16 else ((codes + 128) >> 8, scales)


def quantise_kv(x: Array, kind: str) -> NDArray[np.float32]:
    """Round heads `x` [..., head_dim] as the cache's pages do, in blocks of 64 dimensions.

    `kind` is f32, f16, 8bit, 4bit or 2bit; a block has one f16 scale, and with 4 and 2 bits an f16
    minimum.
    """
    x = np.asarray(x, np.float32)
    if kind in ("f32", "f16"):
        return x.astype({"f32": np.float32, "f16": np.float16}[kind]).astype(np.float32)
    out = np.empty_like(x)
    for begin in range(0, x.shape[-1], BLOCK_COLS):
        block = x[..., begin : begin + BLOCK_COLS]
        if kind == "8bit":
            low = np.zeros((*x.shape[:-1], 1), np.float32)
            step = np.abs(block).max(axis=-1, keepdims=True) / np.float32(127)
            first, last = -127, 127
        else:
            low = block.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
            first, last = 0, {"4bit": 15, "2bit": 3}[kind]
            step = np.maximum(block.max(axis=-1, keepdims=True) - low, 0) / np.float32(last)
        scale = step.astype(np.float16)
        too_small = scale.astype(np.float32) < step
        scale = np.where(too_small, np.nextafter(scale, np.float16(np.inf)), scale)
        scale32 = scale.astype(np.float32)
        steps = np.divide(block - low, scale32, out=np.zeros_like(block), where=scale32 > 0)
        out[..., begin : begin + BLOCK_COLS] = np.clip(np.rint(steps), first, last) * scale32 + low
    return out


def hadamard(n: int) -> NDArray[np.float64]:
    """The rotation of n dimensions: orthonormal Walsh-Hadamard blocks, the largest power first."""
    turned = np.eye(n)
    begin = 0
    for size in (2**i for i in range(12, 3, -1)):
        if n & size:
            matrix = np.ones((1, 1))
            while len(matrix) < size:
                matrix = np.block([[matrix, matrix], [matrix, -matrix]])
            turned[begin : begin + size, begin : begin + size] = matrix / math.sqrt(size)
            begin += size
    return turned


def rope_frequencies(config: Config) -> NDArray[np.float32]:
    """Radians per position for every rotated pair, f32 [rope_dims / 2]."""
    if config.rope_scaling not in ("none", "linear", "llama3"):
        message = f"unknown RoPE scaling {config.rope_scaling!r}"
        raise ValueError(message)
    n_dims = config.head_dim if config.rope_dims is None else config.rope_dims
    exponents = np.arange(0, n_dims, 2, dtype=np.float64) / n_dims
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling == "linear":
        frequencies = frequencies / config.rope_factor
    elif config.rope_scaling == "llama3":
        # Short waves stay, long ones are stretched, those between are blended.
        turns = config.rope_original_tokens * frequencies / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / config.rope_factor
    return frequencies.astype(np.float32)


def rotate(x: Array, config: Config, first_position: int = 0) -> Array:
    """RoPE on `x` [n_tokens, n_heads, head_dim]; dimensions past `rope_dims` stay as they are."""
    frequencies = rope_frequencies(config)
    n_pairs = len(frequencies)
    positions = np.arange(first_position, first_position + len(x), dtype=np.float32)
    # The angle is an f32 product also in f64 runs: that is what models were trained with.
    angles = (positions[:, None] * frequencies).astype(x.dtype)[:, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    if config.rope_interleaved:
        first, second = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    else:
        first, second = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    out: Array = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def activate(x: Array, name: str) -> Array:
    """The activation function `name`, element by element."""
    if name == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    if name == "gelu_erf":
        erf = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)).astype(x.dtype)
        return np.asarray(0.5 * x * (1 + erf))
    if name == "relu":
        return np.maximum(x, 0)
    if name == "relu_squared":
        return np.asarray(np.maximum(x, 0) ** 2)
    message = f"unknown activation {name!r}"
    raise ValueError(message)


def attend(q: Array, k: Array, v: Array, window_tokens: int = 0) -> Array:
    """Causal attention of every position over those before it and itself.

    `q` is [n_tokens, n_heads, head_dim], `k` and `v` [n_tokens, n_kv_heads, head_dim]; returned
    is [n_tokens, n_heads * head_dim]. Position i sees position j when 0 <= i - j, and also
    i - j < window_tokens if there is a window.
    """
    n_tokens, n_heads, head_dim = q.shape
    n_queries_per_kv = n_heads // k.shape[1]
    distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
    seen = distance >= 0
    if window_tokens > 0:
        seen &= distance < window_tokens
    out = np.empty_like(q)
    for head in range(n_heads):
        kv_head = head // n_queries_per_kv
        scores = (q[:, head] @ k[:, kv_head].T) * q.dtype.type(1 / math.sqrt(head_dim))
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
    return out.reshape(n_tokens, n_heads * head_dim)


class _Pass:
    """One run of `forward`: the weights in the chosen precision and what was computed so far."""

    def __init__(
        self, model: Model, dtype: type, activations: str, kv: tuple[str, str], is_rotated: bool
    ) -> None:
        self.config = model.config
        self.model = model
        self.dtype = dtype
        self.activations = activations
        self.kv = kv
        self.is_rotated = is_rotated
        self.values: dict[str, Array] = {}

    def weight(self, name: str) -> Array:
        return np.asarray(self.model.weights[name], self.dtype)

    def keep(self, name: str, value: Array) -> Array:
        self.values[name] = value
        return value

    def linear(self, x: Array, name: str) -> Array:
        """`x` [n_tokens, n_inputs] times the matrix, plus its bias if it has one."""
        far: Array | float = 0.0
        if name in self.model.outliers:
            far = x @ np.asarray(self.model.outliers[name], self.dtype).T
        if self.activations == "integer" and name in self.model.integer:
            codes, scales = quantise_activations(x, self.model.integer[name])
            x = (codes * scales[:, :, None].astype(self.dtype)).reshape(len(x), -1)[:, : x.shape[1]]
        y = x @ self.weight(name).T + far
        if f"{name}_bias" in self.model.weights:
            y = y + self.weight(f"{name}_bias")
        return np.asarray(y)

    def normalise(self, x: Array, name: str) -> Array:
        epsilon = self.dtype(self.config.norm_epsilon)
        if self.config.norm == "layer":
            x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon)
        y = x * self.weight(name)
        if f"{name}_bias" in self.model.weights:
            y = y + self.weight(f"{name}_bias")
        return np.asarray(y)

    def attention(self, x: Array, at: str) -> Array:
        config, n_tokens = self.config, len(x)
        q = self.linear(x, f"{at}.q").reshape(n_tokens, config.n_heads, config.head_dim)
        k = self.linear(x, f"{at}.k").reshape(n_tokens, config.n_kv_heads, config.head_dim)
        v = self.linear(x, f"{at}.v").reshape(n_tokens, config.n_kv_heads, config.head_dim)
        if config.positions == "rope":
            q, k = rotate(q, config), rotate(k, config)
        turned: Array | None = None
        if self.is_rotated:
            turned = hadamard(config.head_dim).astype(self.dtype)
        if turned is not None:
            q, k, v = q @ turned, k @ turned, v @ turned
        q = self.round_queries(q)
        k = k if self.kv[0] == "float" else quantise_kv(k, self.kv[0]).astype(self.dtype)
        v = v if self.kv[1] == "float" else quantise_kv(v, self.kv[1]).astype(self.dtype)
        self.keep(f"{at}.q_rope", q.reshape(n_tokens, -1))
        self.keep(f"{at}.k_rope", k.reshape(n_tokens, -1))
        self.keep(f"{at}.v", v.reshape(n_tokens, -1))
        mixed = attend(q, k, v, config.window_tokens)
        if turned is not None:
            mixed = (mixed.reshape(q.shape) @ turned).reshape(n_tokens, -1)
        self.keep(f"{at}.heads", mixed)
        return self.keep(f"{at}.attn_out", self.linear(mixed, f"{at}.attn_out"))

    def round_queries(self, q: Array) -> Array:
        """Queries [n_tokens, n_heads, head_dim] as they meet keys of few bits."""
        if self.kv[0] in ("float", "f32", "f16"):
            return q
        rows = q.reshape(-1, self.config.head_dim)
        codes, scales = quantise_activations(rows, 16 if self.kv[0] == "8bit" else 8)
        rounded = (codes * scales[:, :, None]).reshape(len(rows), -1)[:, : rows.shape[1]]
        return np.asarray(rounded.reshape(q.shape), self.dtype)

    def ffn(self, x: Array, at: str) -> Array:
        up = self.linear(x, f"{at}.ffn_up")
        if f"{at}.ffn_gate" in self.model.weights:
            gate = self.linear(x, f"{at}.ffn_gate")
            hidden = activate(gate, self.config.activation) * up
        else:
            hidden = activate(up, self.config.activation)
        self.keep(f"{at}.ffn_hidden", hidden)
        return self.keep(f"{at}.ffn_out", self.linear(hidden, f"{at}.ffn_down"))

    def run(self, tokens: Sequence[int] | NDArray[np.integer[Any]], skip: Collection[int]) -> Trace:
        x = self.weight("embedding")[np.asarray(tokens)]
        if self.config.positions == "learned":
            x = x + self.weight("positions")[: len(x)]
        self.keep("embedded", x)
        for layer in sorted(set(range(self.config.n_layers)) - set(skip)):
            at = f"layer.{layer}"
            y = self.keep(f"{at}.attn_norm", self.normalise(x, f"{at}.attn_norm"))
            x = self.keep(f"{at}.residual_attn", x + self.attention(y, at))
            y = self.keep(f"{at}.ffn_norm", self.normalise(x, f"{at}.ffn_norm"))
            x = self.keep(f"{at}.residual_ffn", x + self.ffn(y, at))
        x = self.keep("final_norm", self.normalise(x, "final_norm"))
        head = "head" if "head" in self.model.weights else "embedding"
        return Trace(self.linear(x, head), self.values)


def forward(
    model: Model,
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    *,
    dtype: type[np.float32] | type[np.float64] = np.float32,
    activations: Literal["float", "integer"] = "float",
    kv: str | tuple[str, str] = "float",
    is_kv_rotated: bool = False,
    skip: Collection[int] = (),
) -> Trace:
    """Evaluate `tokens` from position 0.

    `activations="integer"` rounds the inputs of the quantised matrices as the engine's default
    path does, `kv`, for keys and values or for each, rounds K (after RoPE) and V as its cache does:
    f32, f16, 8bit, 4bit or 2bit, with `is_kv_rotated` after a Hadamard transform. The order of the
    sums is numpy's, so that the engine is near these numbers, not equal to them. The layers of
    `skip` are not run: what goes into one comes out of it.

    Raises ValueError for integer activations on a model without quantised matrices.
    """
    if activations == "integer" and not model.integer:
        message = "integer activations asked for, but no matrix of this model is quantised"
        raise ValueError(message)
    kinds = (kv, kv) if isinstance(kv, str) else kv
    return _Pass(model, dtype, activations, kinds, is_kv_rotated).run(tokens, skip)


def greedy(
    model: Model, prompt: Sequence[int], n_new: int, *, eos_id: int | None = None
) -> list[int]:
    """The `n_new` likeliest continuations of `prompt`, or fewer if `eos_id` comes (it is kept)."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(forward(model, tokens).logits[-1].argmax()))
        if tokens[-1] == eos_id:
            break
    return tokens[len(prompt) :]


def first_difference(
    got: Mapping[str, Array], want: Mapping[str, Array], tolerance: float
) -> str | None:
    """Name the first value, in the order of computation, that is further off than `tolerance`.

    Only names in both are compared. Returns e.g. `layer.2.q_rope: 0.31 at token 5, element 7`.
    """
    for name, wanted in want.items():
        if name not in got:
            continue
        if got[name].shape != wanted.shape:
            return f"{name}: shape {got[name].shape} instead of {wanted.shape}"
        error = np.abs(got[name] - wanted)
        if not (error <= tolerance).all():  # also true of NaN
            token, element = np.unravel_index(
                int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape
            )
            return f"{name}: {error[token, element]:.3g} at token {token}, element {element}"
    return None


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of one file as f32, by name."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + header_bytes])
    out: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        raw = data[start:end]
        if entry["dtype"] == "BF16":
            values: Array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]])
        out[name] = values.astype(np.float32).reshape(entry["shape"])
    return out


_LLAMA_NAMES = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.weight": "k",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.weight": "v",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.weight": "attn_out",
    "self_attn.o_proj.bias": "attn_out_bias",
    "post_attention_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "ffn_gate",
    "mlp.gate_proj.bias": "ffn_gate_bias",
    "mlp.up_proj.weight": "ffn_up",
    "mlp.up_proj.bias": "ffn_up_bias",
    "mlp.down_proj.weight": "ffn_down",
    "mlp.down_proj.bias": "ffn_down_bias",
}

_GPT2_NAMES = {
    "ln_1.weight": "attn_norm",
    "ln_1.bias": "attn_norm_bias",
    "attn.c_proj.weight": "attn_out",
    "attn.c_proj.bias": "attn_out_bias",
    "ln_2.weight": "ffn_norm",
    "ln_2.bias": "ffn_norm_bias",
    "mlp.c_fc.weight": "ffn_up",
    "mlp.c_fc.bias": "ffn_up_bias",
    "mlp.c_proj.weight": "ffn_down",
    "mlp.c_proj.bias": "ffn_down_bias",
}

_ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "relu": "relu",
    "relu2": "relu_squared",
}


def _llama(config: Mapping[str, Any], source: Mapping[str, Array]) -> Model:
    n_heads = config["num_attention_heads"]
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    weights: dict[str, Array] = {
        "embedding": source["model.embed_tokens.weight"],
        "final_norm": source["model.norm.weight"],
    }
    if not config.get("tie_word_embeddings", False):
        weights["head"] = source["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LLAMA_NAMES.items():
            name = f"model.layers.{layer}.{theirs}"
            if name in source:
                weights[f"layer.{layer}.{ours}"] = source[name]
    parsed = Config(
        n_layers=config["num_hidden_layers"],
        dim=config["hidden_size"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // n_heads,
        norm="rms",
        activation=_ACTIVATIONS[config.get("hidden_act", "silu")],
        positions="rope",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope["rope_theta"],
        rope_scaling="none" if kind == "default" else kind,
        rope_factor=rope.get("factor", 1.0),
        rope_low_freq_factor=rope.get("low_freq_factor", 1.0),
        rope_high_freq_factor=rope.get("high_freq_factor", 4.0),
        rope_original_tokens=rope.get("original_max_position_embeddings", 8192),
        window_tokens=config.get("sliding_window") or 0,
    )
    return Model(parsed, weights)


def _gpt2(config: Mapping[str, Any], source: Mapping[str, Array]) -> Model:
    weights: dict[str, Array] = {
        "embedding": source["transformer.wte.weight"],
        "positions": source["transformer.wpe.weight"],
        "final_norm": source["transformer.ln_f.weight"],
        "final_norm_bias": source["transformer.ln_f.bias"],
    }
    if not config.get("tie_word_embeddings", True):
        weights["head"] = source["lm_head.weight"]
    for layer in range(config["n_layer"]):
        at, ours_at = f"transformer.h.{layer}", f"layer.{layer}"
        for theirs, ours in _GPT2_NAMES.items():
            # These matrices are stored [inputs, outputs]; vectors are their own transpose.
            weights[f"{ours_at}.{ours}"] = source[f"{at}.{theirs}"].T
        for suffix, stored in (("", "weight"), ("_bias", "bias")):
            fused = source[f"{at}.attn.c_attn.{stored}"].T
            for name, part in zip("qkv", np.split(fused, 3), strict=True):
                weights[f"{ours_at}.{name}{suffix}"] = part
    parsed = Config(
        n_layers=config["n_layer"],
        dim=config["n_embd"],
        n_heads=config["n_head"],
        n_kv_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        norm="layer",
        activation=_ACTIVATIONS[config.get("activation_function", "gelu_new")],
        positions="learned",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )
    return Model(parsed, weights)


def load_huggingface(folder: Path) -> Model:
    """Read a LLaMA, Mistral or GPT-2 checkpoint, single or sharded."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    source: dict[str, Array] = {}
    for shard in shards:
        source |= read_safetensors(folder / shard)
    return _gpt2(config, source) if config["model_type"] == "gpt2" else _llama(config, source)


def load_qsf(path: Path) -> Model:
    """Read a `.qsf` file: the weights are the values that its codes stand for."""
    from qsf.file import layout
    from qsf.file.reader import Reader

    weights: dict[str, Array] = {}
    integer: dict[str, int] = {}
    outliers: dict[str, Array] = {}
    with Reader(path) as reader:
        header, arch = reader.header, reader.arch
        for tensor in reader.tensors:
            tensor_name = layout.TensorType(tensor.type).name.lower()
            in_layer = 1 <= tensor.unit_idx <= header.n_layers
            at = f"layer.{tensor.unit_idx - 1}." if in_layer else ""
            name = at + tensor_name
            data = reader.read_tensor(tensor)
            dtype = layout.Dtype(tensor.dtype)
            floats = {layout.Dtype.F16: "<f2", layout.Dtype.F32: "<f4"}
            if tensor.layout == layout.Layout.VECTOR:
                weights[name] = np.frombuffer(data, floats[dtype], tensor.n_cols).astype(np.float32)
                continue
            if tensor.layout == layout.Layout.OUTLIERS:
                table = decode_outliers(data, tensor.n_rows, tensor.n_cols)
                outliers[name.removesuffix("_outliers")] = table
                continue
            kind = layout.dtype_name(dtype)
            weights[name] = decode_tiles(kind, data, tensor.n_rows, tensor.n_cols)
            if dtype not in floats:
                integer[name] = 16 if dtype == layout.Dtype.Q8 else 8
        learned = header.positions == layout.Positions.LEARNED
        if learned:
            table = np.frombuffer(reader.read_section("WPOS"), "<f2").astype(np.float32)
            weights["positions"] = table.reshape(header.max_tokens, header.dim)
    config = Config(
        n_layers=header.n_layers,
        dim=header.dim,
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads or header.n_heads,
        head_dim=header.head_dim,
        norm="layer" if header.norm == layout.Norm.LAYER else "rms",
        activation=layout.Activation(header.activation).name.lower(),
        positions="learned" if learned else "rope",
        norm_epsilon=arch.norm_epsilon,
        rope_theta=header.rope_theta,
        rope_scaling=layout.RopeScaling(arch.rope_scaling).name.lower(),
        rope_factor=arch.rope_factor,
        rope_low_freq_factor=arch.rope_low_freq_factor,
        rope_high_freq_factor=arch.rope_high_freq_factor,
        rope_original_tokens=arch.rope_original_tokens,
        rope_dims=arch.rope_dims,
        rope_interleaved=arch.rope_interleaved,
        window_tokens=arch.window_tokens,
    )
    return Model(config, weights, integer, outliers)
