"""The weights of a unit of the original model, and what layers compute of them beside attention."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.kinds import ExpertScore, ExpertWeights, GroupScore, LayerKind
from qsf.file.layout import Arch, Header, Positions, RopeScaling, TensorType
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType

BIASES: Final = {
    T.Q: T.Q_BIAS,
    T.K: T.K_BIAS,
    T.V: T.V_BIAS,
    T.ATTN_OUT: T.ATTN_OUT_BIAS,
    T.FFN_GATE: T.FFN_GATE_BIAS,
    T.FFN_UP: T.FFN_UP_BIAS,
    T.FFN_DOWN: T.FFN_DOWN_BIAS,
    T.ATTN_NORM: T.ATTN_NORM_BIAS,
    T.FFN_NORM: T.FFN_NORM_BIAS,
    T.FINAL_NORM: T.FINAL_NORM_BIAS,
    T.INPUT_NORM: T.INPUT_NORM_BIAS,
}


class Weights(dict[TensorType, Float32Array]):
    """The tensors of a unit by their types, and for a layer its kind.

    ``expert`` reads the tensors of an expert of the layer by its number. ``layer`` is the layer's.
    """

    def __init__(
        self,
        tensors: Mapping[TensorType, Float32Array],
        kind: LayerKind,
        expert: Callable[[int], Weights] | None = None,
        *,
        layer: int = 0,
    ) -> None:
        super().__init__(tensors)
        self.kind = kind
        self.expert = expert
        self.layer = layer

    def changed(
        self,
        changes: Mapping[TensorType, Float32Array] | None = None,
        expert: Callable[[int], Weights] | None = None,
    ) -> Weights:
        """Return a copy with some tensors replaced, or with other experts."""
        changed = {**self, **(changes or {})}
        return Weights(changed, self.kind, expert or self.expert, layer=self.layer)

    @property
    def is_shared_norm(self) -> bool:
        """True if attention and FFN read the same normalised input."""
        return self.kind.is_parallel and T.FFN_NORM not in self


def linear(w: Weights, kind: TensorType, x: Float32Array) -> Float32Array:
    """Return x [n_tokens, n_inputs] times the matrix, plus its bias if there is one."""
    y: Float32Array = x @ w[kind].T
    bias = BIASES.get(kind)
    if bias is not None and bias in w:
        y += w[bias]
    return y


def rotate(
    x: Float32Array, cos: Float32Array, sin: Float32Array, is_interleaved: bool
) -> Float32Array:
    """RoPE on the first 2 * n angles of each head; x [heads, tokens, head_dim]."""
    n = cos.shape[1]
    out: Float32Array = x.copy()
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        if is_interleaved
        else (slice(0, n), slice(n, 2 * n))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rope_frequencies(header: Header, arch: Arch) -> NDArray[np.float64]:
    """Angles per position, one for each pair of dimensions; scaled as ``scaling`` says."""
    if header.positions != Positions.ROPE:
        return np.empty(0)
    n_dims = arch.rope_dims or header.head_dim
    frequencies = header.rope_theta ** -(np.arange(0, n_dims, 2) / n_dims)
    if arch.rope_scaling == RopeScaling.LINEAR:
        return np.asarray(frequencies / arch.rope_factor)
    if arch.rope_scaling == RopeScaling.LLAMA3:
        turns = arch.rope_original_tokens * frequencies / (2 * math.pi)
        low, high = arch.rope_low_freq_factor, arch.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return np.asarray(frequencies * (kept + (1 - kept) / arch.rope_factor))
    return np.asarray(frequencies)


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token: indices and weights [n_tokens, n_chosen], unordered."""

    experts: NDArray[np.intp]
    weights: Float32Array

    def tokens_of(self, expert: int) -> tuple[NDArray[np.intp], Float32Array]:
        tokens, places = np.nonzero(self.experts == expert)
        return tokens, self.weights[tokens, places][:, None]


def route(kind: LayerKind, w: Mapping[TensorType, Float32Array], y: Float32Array) -> Choice:
    """Choose experts for the router's inputs ``y`` [n_tokens, dim] with the router of a layer."""
    logits = y @ w[T.EXPERT_ROUTER].T
    if T.ROUTER_BIAS in w:
        logits += w[T.ROUTER_BIAS]
    scores = _scores(kind, logits)
    ranked = scores + w[T.SELECTION_BIAS] if T.SELECTION_BIAS in w else scores
    if kind.n_groups > 1:
        groups = ranked.reshape(len(y), kind.n_groups, -1)
        n_best = 2 if kind.group_score == GroupScore.TWO_LARGEST else 1
        of_groups = np.sort(groups, axis=2)[:, :, -n_best:].sum(axis=2)
        is_kept = np.zeros(of_groups.shape, bool)
        np.put_along_axis(is_kept, _largest(of_groups, kind.n_groups_kept), True, axis=1)
        ranked = np.where(is_kept[:, :, None], groups, -np.inf).reshape(ranked.shape)
    experts = _largest(ranked, kind.n_chosen)
    weights = np.take_along_axis(scores, experts, axis=1)
    if kind.expert_weights == ExpertWeights.SOFTMAX:
        weights = _softmax(weights)
    elif kind.expert_weights == ExpertWeights.BY_SUM:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(kind.weights_epsilon))
    weights = weights * np.float32(kind.weights_factor)
    if T.EXPERT_SCALE in w:
        weights = weights * w[T.EXPERT_SCALE][experts]
    return Choice(experts, np.asarray(weights, np.float32))


def _scores(kind: LayerKind, logits: Float32Array) -> Float32Array:
    if kind.expert_score == ExpertScore.SOFTMAX:
        return _softmax(logits)
    if kind.expert_score == ExpertScore.SIGMOID:
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-logits)))
    return logits


def _largest(values: Float32Array, n: int) -> NDArray[np.intp]:
    """The indices of the n largest values of each row; of equal values the lower indices."""
    return np.argsort(-values, axis=1, kind="stable")[:, :n]


def _softmax(x: Float32Array) -> Float32Array:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
