"""The mixers with recurrent states in full precision, token by token."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import TensorType
from qsf_converter.original.weights import Weights, linear
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType


def convolve(
    w: Weights, x: Float32Array, conv: TensorType = T.CONV, bias: TensorType = T.CONV_BIAS
) -> Float32Array:
    """Return the causal convolution of each channel of x [n_tokens, n_channels]."""
    taps = w[conv].reshape(w.kind.n_taps, -1)
    padded = np.concatenate([np.zeros((len(taps) - 1, x.shape[1]), np.float32), x])
    y = np.zeros_like(x)
    for t, tap in enumerate(taps):
        y += tap * padded[t : t + len(x)]
    return y + w[bias] if bias in w else y


def delta_rule(w: Weights, y: Float32Array, epsilon: float) -> Float32Array:
    """Return the input of the gated delta rule's output matrix, [n_tokens, values].

    Token by token: the state [value heads, key_dim, value_dim] is f64. ``epsilon`` is that of the
    model's norms.
    """
    k, n_tokens = w.kind, len(y)
    mixed = convolve(w, np.concatenate([linear(w, part, y) for part in (T.Q, T.K, T.V)], axis=1))
    mixed /= 1 + np.exp(-mixed)
    n_keys = k.n_key_heads * k.key_dim
    heads = np.arange(k.n_value_heads)
    n_each = k.n_value_heads // k.n_key_heads
    key_heads = heads % k.n_key_heads if k.has_tiled_heads else heads // n_each

    def of_keys(first: int) -> NDArray[np.float64]:
        rows = mixed[:, first : first + n_keys].reshape(n_tokens, -1, k.key_dim)[:, key_heads]
        rows = rows.astype(np.float64)
        return np.asarray(rows / np.sqrt((rows * rows).sum(axis=-1, keepdims=True) + 1e-6))

    queries, keys = of_keys(0) / math.sqrt(k.key_dim), of_keys(n_keys)
    values = mixed[:, 2 * n_keys :].reshape(n_tokens, -1, k.value_dim).astype(np.float64)
    beta = k.beta_factor / (1 + np.exp(-linear(w, T.BETA, y).astype(np.float64)))
    low, gate = linear(w, T.DECAY, y), linear(w, T.MIX_GATE, y)
    if k.gate_rank:
        low, gate = linear(w, T.DECAY_UP, low), linear(w, T.GATE_UP, gate)
    step = low.astype(np.float64) + w[T.DECAY_BIAS]
    rate = w[T.DECAY_RATE].astype(np.float64)
    if k.decay_limit:
        forgotten = k.decay_limit / (1 + np.exp(-rate * step))
    else:
        forgotten = rate * np.logaddexp(0, step)
    decay = np.exp(-forgotten).reshape(n_tokens, k.n_value_heads, -1, 1)
    state = np.zeros((k.n_value_heads, k.key_dim, k.value_dim))
    out = np.empty_like(values)
    for t in range(n_tokens):
        state *= decay[t]
        recalled = np.einsum("hij,hi->hj", state, keys[t])
        delta = (values[t] - recalled) * beta[t][:, None]
        state += keys[t][:, :, None] * delta[:, None, :]
        out[t] = np.einsum("hij,hi->hj", state, queries[t])
    squares = (out * out).mean(axis=-1, keepdims=True) + (k.value_epsilon or epsilon)
    normed = out / np.sqrt(squares) * w[T.MIX_NORM]
    factor = (1 if k.has_sigmoid_gate else gate) / (1 + np.exp(-gate))
    return np.asarray(normed.reshape(n_tokens, -1) * factor, np.float32)


def ssd(
    w: Weights, y: Float32Array, normalised: Callable[[Float32Array], Float32Array]
) -> Float32Array:
    """Return the input of SSD's output matrix, [n_tokens, values]; see ``delta_rule``.

    ``normalised`` divides the last axis by its root mean square.
    """
    k, n_tokens = w.kind, len(y)
    rows = convolve(w, linear(w, T.SSD_IN, y), T.SSD_CONV, T.SSD_CONV_BIAS)
    rows /= 1 + np.exp(-rows)
    ends = k.values, k.values + k.n_key_heads * k.key_dim
    x, b, c = np.split(rows.astype(np.float64), ends, axis=1)
    x = x.reshape(n_tokens, -1, k.value_dim)
    n_each = k.n_value_heads // k.n_key_heads
    b, c = (of.reshape(n_tokens, -1, k.key_dim).repeat(n_each, axis=1) for of in (b, c))
    step = np.logaddexp(0, linear(w, T.SSD_STEP, y).astype(np.float64) + w[T.SSD_STEP_BIAS])
    decay = np.exp(-w[T.SSD_RATE] * step)
    state = np.zeros((k.n_value_heads, k.key_dim, k.value_dim))
    out = x * w[T.SSD_SKIP][:, None]
    for t in range(n_tokens):
        state *= decay[t][:, None, None]
        state += b[t][:, :, None] * (x[t] * step[t][:, None])[:, None, :]
        out[t] += np.einsum("hij,hi->hj", state, c[t])
    gate = linear(w, T.SSD_GATE, y)
    gated = np.asarray(out.reshape(n_tokens, -1) * (gate / (1 + np.exp(-gate))), np.float32)
    if T.SSD_NORM not in w:
        return gated
    of_groups = normalised(gated.reshape(n_tokens, k.n_key_heads, -1))
    return np.asarray(of_groups.reshape(gated.shape) * w[T.SSD_NORM])
