# SPDX-License-Identifier: Apache-2.0
"""The pieces of the reference: rounding, rotation, activations, attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.reference_models import Config, Layer, rope_frequencies

Array = NDArray[Any]

BLOCK_COLS = 64
"""Columns that share one activation scale, unless `Model.scale_cols` says 32."""


def quantise_activations(
    x: Array, bits: int, scale_cols: int = BLOCK_COLS
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Round rows to integers of 8 or 16 bits as the engine does before an integer product.

    `x` is [n_rows, n_cols]; returned are integers [n_rows, n, scale_cols], padded with zeros, and
    the f32 scales [n_rows, n]. The 8-bit ones are the high parts of the 16-bit ones.
    """
    n_rows, n_cols = x.shape
    n_scales = -(-n_cols // scale_cols)
    padded = np.zeros((n_rows, n_scales * scale_cols), np.float32)
    padded[:, :n_cols] = x
    blocks = padded.reshape(n_rows, n_scales, scale_cols)
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


def rotate(x: Array, config: Config, first_position: int = 0) -> Array:
    """RoPE on `x` [n_tokens, n_heads, head_dim]; dimensions past `rope_dims` stay as they are."""
    frequencies = rope_frequencies(config)
    return rotate_by(x, frequencies, config.rope_interleaved, first_position=first_position)


def rotate_by(
    x: Array,
    frequencies: Array,
    is_interleaved: bool,
    factor: float = 1.0,
    first_position: int = 0,
) -> Array:
    """RoPE with these `frequencies` [pairs], cos and sin times `factor`."""
    n_pairs = len(frequencies)
    positions = np.arange(first_position, first_position + len(x), dtype=np.float32)
    # The angle is an f32 product also in f64 runs: that is what models were trained with.
    angles = (positions[:, None] * frequencies).astype(x.dtype)[:, None, :]
    cos, sin = np.cos(angles) * x.dtype.type(factor), np.sin(angles) * x.dtype.type(factor)
    if is_interleaved:
        first, second = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    else:
        first, second = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    out: Array = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def activate(x: Array, name: str, xielu: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Array:
    """The activation function `name`, element by element."""
    if name == "xielu":
        square, exp, line = xielu
        low = np.minimum(x, 0)
        return np.asarray(np.where(x > 0, square * x * x, exp * (np.expm1(low) - low)) + line * x)
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


def silu_clamped(gate: Array, up: Array, limit: float = 7.0, alpha: float = 1.702) -> Array:
    """The product of gpt-oss's gate and up."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray((up + 1) * gate / (1 + np.exp(-gate.dtype.type(alpha) * gate)))


def limited(x: Array, layer: Layer) -> Array:
    """Queries, keys or values within the layer's limit."""
    return np.clip(x, -layer.qkv_limit, layer.qkv_limit) if layer.qkv_limit else x


def attend(q: Array, k: Array, v: Array, window_tokens: int = 0) -> Array:
    """`attend_layer` with nothing special but a window."""
    layer = Layer(q.shape[1], k.shape[1], q.shape[2], "silu", window_tokens)
    return attend_layer(q, k, v, layer)


def attend_layer(q: Array, k: Array, v: Array, layer: Layer, sinks: Array | None = None) -> Array:
    """Attention of every position over itself and those before it, or over all.

    `q` is [n_tokens, n_heads, head_dim], `k` and `v` [n_tokens, n_kv_heads, head_dim]; returned
    is [n_tokens, n_heads * head_dim]. Position i sees position j when 0 <= i - j or if
    the layer sees later ones, and also |i - j| < window_tokens or j < pinned_tokens if there is a
    window. `sinks` [n_heads] are scores
    without a value.
    """
    n_tokens, n_heads, head_dim = q.shape
    n_queries_per_kv = n_heads // k.shape[1]
    distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
    seen = distance >= (-n_tokens if layer.sees_later else 0)
    if layer.window_tokens > 0:
        seen &= (abs(distance) < layer.window_tokens) | (np.arange(n_tokens) < layer.pinned_tokens)
    scale = q.dtype.type(layer.score_scale or 1 / math.sqrt(head_dim))
    out = np.empty((n_tokens, n_heads, v.shape[-1]), q.dtype)
    for head in range(n_heads):
        kv_head = head // n_queries_per_kv
        scores = (q[:, head] @ k[:, kv_head].T) * scale
        if layer.slopes:
            scores = scores - q.dtype.type(layer.slopes[head]) * distance.astype(q.dtype)
        if layer.score_cap:
            cap = q.dtype.type(layer.score_cap)
            scores = cap * np.tanh(scores / cap)
        scores = np.where(seen, scores, -np.inf)
        largest = scores.max(axis=1, keepdims=True)
        total: Array | float = 0.0
        if sinks is not None:
            largest = np.maximum(largest, sinks[head])
            total = np.exp(sinks[head] - largest)
        weights = np.exp(scores - largest)
        total = total + weights.sum(axis=1, keepdims=True)
        out[:, head] = weights / total @ v[:, kv_head]
    return out.reshape(n_tokens, -1)
