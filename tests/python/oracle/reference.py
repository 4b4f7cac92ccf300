# SPDX-License-Identifier: Apache-2.0
"""The transformer in plain numpy: the truth that the engine is tested against.

Written for reading, not for speed, and sharing no line with the engine. `forward` returns
the logits and the values inside every layer, so that a test can name the first difference
(`first_difference`). Weights come from a checkpoint, from a `.qsf` file, or from
any dictionary with the names of `docs/format.md`, section 4, in lower case: `embedding`,
`positions`, `layer.0.attn_norm`, `layer.0.q`, ..., `final_norm`, `head`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from oracle.reference_experts import choose
from oracle.reference_models import (
    Config,
    Layer,
    Model,
    load_huggingface,
    load_qsf,
    rope_frequencies,
)
from oracle.reference_parts import (
    activate,
    attend,
    attend_layer,
    hadamard,
    limited,
    quantise_activations,
    quantise_kv,
    rotate,
    rotate_by,
    silu_clamped,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Array = NDArray[Any]

__all__ = [
    "Config",
    "Layer",
    "Model",
    "Trace",
    "attend",
    "first_difference",
    "forward",
    "greedy",
    "hadamard",
    "load_huggingface",
    "load_qsf",
    "quantise_activations",
    "quantise_kv",
    "rope_frequencies",
    "rotate",
]


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of `forward`.

    `logits` is [n_tokens, n_vocab]. `values` maps names such as `layer.3.q_rope` to arrays with
    one row a token, in the order in which they are computed.
    """

    logits: Array
    values: dict[str, Array] = field(default_factory=dict)


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
        self.tokens: Array = np.empty(0, np.int64)

    def weight(self, name: str) -> Array:
        return np.asarray(self.model.weights[name], self.dtype)

    def keep(self, name: str, value: Array) -> Array:
        self.values[name] = value
        return value

    def linear(self, x: Array, name: str) -> Array:
        """`x` [n_tokens, n_inputs] times the matrix, plus its bias if it has one."""
        y = self.product(x, name)
        if f"{name}_bias" in self.model.weights:
            y = y + self.weight(f"{name}_bias")
        return y

    def product(self, x: Array, name: str) -> Array:
        """`x` [n_tokens, n_inputs] times the matrix and its outliers."""
        far: Array | float = 0.0
        if name in self.model.outliers:
            far = x @ np.asarray(self.model.outliers[name], self.dtype).T
        if self.activations == "integer" and name in self.model.integer:
            codes, scales = quantise_activations(x, self.model.integer[name], self.model.scale_cols)
            x = (codes * scales[:, :, None].astype(self.dtype)).reshape(len(x), -1)[:, : x.shape[1]]
        return np.asarray(x @ self.weight(name).T + far)

    def normalise(self, x: Array, name: str) -> Array:
        """`x` [..., width of the weight], or as it is where the model has no such norm."""
        if name not in self.model.weights:
            return x
        y = self.normed(x) * self.weight(name)
        if f"{name}_bias" in self.model.weights:
            y = y + self.weight(f"{name}_bias")
        return np.asarray(y)

    def normed(self, x: Array, epsilon: float = 0.0) -> Array:
        if self.config.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        square = (x * x).mean(axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(square + self.dtype(epsilon or self.config.norm_epsilon)))

    def heads(self, y: Array, layer: Layer, at: str, kind: str) -> Array:
        """Queries or keys, normalised and rotated: [n_tokens, heads, head_dim]."""
        x = limited(self.linear(y, f"{at}.{kind}"), layer)
        name = f"{at}.{kind}_norm"
        if layer.qk_norm == "whole_width":
            x = self.normalise(x, name)
        x = x.reshape(len(x), -1, layer.head_dim)

        def turned(x: Array) -> Array:
            if layer.frequencies is None:
                return x
            return rotate_by(x, layer.frequencies, layer.rope_interleaved, layer.rope_factor)

        x = turned(x) if layer.has_late_qk_norm else x
        if layer.qk_norm == "per_head":
            x = self.normalise(x, name)
        elif layer.qk_norm == "own_weights":
            x = self.normed(x) * self.weight(name).reshape(x.shape[1:])
        x = x if layer.has_late_qk_norm else turned(x)
        if kind == "q" and layer.temperature is not None:
            beta, step = layer.temperature
            factors = 1 + beta * np.log1p(np.arange(len(x)) // step)
            x = x * factors.astype(self.dtype)[:, None, None]
        return x

    def convolution(self, x: Array, n_taps: int, at: str) -> Array:
        """LFM2: out(c * conv(b * x)), the oldest tap first; c, b, x in the places of Q, K, V."""
        c, b, inner = (self.linear(x, f"{at}.{part}") for part in "qkv")
        y = self.convolve(b * inner, n_taps, at)
        return self.keep(f"{at}.attn_out", self.linear(c * y, f"{at}.attn_out"))

    def convolve(self, x: Array, n_taps: int, at: str, name: str = "conv") -> Array:
        past = np.concatenate([np.zeros((n_taps - 1, x.shape[1]), self.dtype), x])
        taps = self.weight(f"{at}.{name}").reshape(n_taps, -1)
        y = np.stack([(taps * past[t : t + n_taps]).sum(axis=0) for t in range(len(x))])
        if f"{at}.{name}_bias" in self.model.weights:
            y = y + self.weight(f"{at}.{name}_bias")
        return np.asarray(y)

    def delta(self, x: Array, layer: Layer, at: str) -> Array:
        """The gated delta rule, token by token."""
        n_key, n_value, key_dim, value_dim = layer.state
        mixed = np.concatenate([self.linear(x, f"{at}.{part}") for part in "qkv"], axis=1)
        mixed = activate(self.convolve(mixed, layer.n_taps, at), "silu")
        parts = np.split(mixed, [n_key * key_dim, 2 * n_key * key_dim], axis=1)
        q, k = (part.reshape(len(x), n_key, key_dim) for part in parts[:2])
        q, k = (y / np.sqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
        q = q / np.sqrt(self.dtype(key_dim))
        n_each = n_value // n_key
        if layer.has_tiled_heads:
            q, k = (np.tile(y, (1, n_each, 1)) for y in (q, k))
        else:
            q, k = (np.repeat(y, n_each, axis=1) for y in (q, k))
        v = parts[2].reshape(len(x), n_value, value_dim)
        beta = layer.beta_factor / (1 + np.exp(-self.linear(x, f"{at}.beta")))
        low, gate = x @ self.weight(f"{at}.decay").T, self.linear(x, f"{at}.mix_gate")
        if f"{at}.gate_up" in self.model.weights:
            low, gate = low @ self.weight(f"{at}.decay_up").T, self.linear(gate, f"{at}.gate_up")
        low, rate = low + self.weight(f"{at}.decay_bias"), self.weight(f"{at}.decay_rate")
        if layer.decay_limit:
            decay = np.exp(-layer.decay_limit / (1 + np.exp(-rate * low)))
        else:
            decay = np.exp(-rate * np.logaddexp(0, low))
        decay = decay.reshape(len(x), n_value, -1, 1)  # of a head, or of each channel
        out = np.empty_like(v)
        for h in range(n_value):
            state: Array = np.zeros((key_dim, value_dim), self.dtype)
            for t in range(len(x)):
                state = state * decay[t, h]
                d = (v[t, h] - k[t, h] @ state) * beta[t, h]
                state = state + np.outer(k[t, h], d)
                out[t, h] = q[t, h] @ state
        gate = (1 if layer.has_sigmoid_gate else gate) / (1 + np.exp(-gate))
        y = self.normed(out, layer.value_epsilon) * self.weight(f"{at}.mix_norm")
        y = y.reshape(len(x), -1) * gate
        self.keep(f"{at}.heads", y)
        return self.keep(f"{at}.attn_out", self.linear(y, f"{at}.attn_out"))

    def ssd(self, x: Array, layer: Layer, at: str) -> Array:
        """The state space rule of Mamba-2, token by token and head by head."""
        n_groups, n_heads, n, p = layer.state
        ends = [n_heads * p, n_heads * p + n_groups * n]
        rows = self.convolve(self.linear(x, f"{at}.ssd_in"), layer.n_taps, at, "ssd_conv")
        parts = np.split(activate(rows, "silu"), ends, axis=1)
        inner = parts[0].reshape(len(x), n_heads, p)
        b, c = (part.reshape(len(x), n_groups, n) for part in parts[1:])
        step = np.logaddexp(0, self.linear(x, f"{at}.ssd_step"))  # which has a bias
        decay = np.exp(-self.weight(f"{at}.ssd_rate") * step)
        out = np.empty_like(inner)
        for h in range(n_heads):
            group = h * n_groups // n_heads
            state: Array = np.zeros((n, p), self.dtype)
            for t in range(len(x)):
                state = state * decay[t, h] + np.outer(b[t, group], inner[t, h] * step[t, h])
                out[t, h] = c[t, group] @ state + self.weight(f"{at}.ssd_skip")[h] * inner[t, h]
        y = out.reshape(len(x), -1) * activate(self.linear(x, f"{at}.ssd_gate"), "silu")
        if f"{at}.ssd_norm" in self.model.weights:
            y = self.normed(y.reshape(len(x), n_groups, -1)).reshape(y.shape)
            y = y * self.weight(f"{at}.ssd_norm")
        self.keep(f"{at}.states", y)
        return self.keep(f"{at}.ssd_out", self.linear(y, f"{at}.ssd_out"))

    def mixed(self, x: Array, layer: Layer, at: str) -> Array:
        """What the mixer adds to the stream, of what it reads."""
        if layer.mixer == "none":
            return np.zeros_like(x)
        if layer.mixer == "ssd":
            return self.ssd(x, layer, at)
        if layer.mixer == "delta":
            y = self.delta(x, layer, at)
        elif layer.mixer == "short_conv":
            y = self.convolution(x, layer.n_taps, at)
        else:
            y = self.attention(x, layer, at)
        y = self.normalise(y, f"{at}.post_attn_norm")
        return y + self.ssd(x, layer, at) if layer.mixer == "attention_and_ssd" else y

    def attention(self, x: Array, layer: Layer, at: str) -> Array:
        n_tokens = len(x)
        is_own = layer.kv_source is None
        if layer.latent is not None:
            q, k, v = self.latents(x, layer, at)
        else:
            q = self.heads(x, layer, at, "q")
            k, v = self.keys_and_values(x, layer, at) if is_own else self.kept_ones(layer)
        n_values = v.shape[-1]
        turned: Array | None = None
        if self.is_rotated:
            turned = np.zeros((layer.head_dim,) * 2, self.dtype)
            n_first = layer.head_dim if layer.latent is None else n_values
            turned[:n_first, :n_first] = hadamard(n_first)
            if n_first < layer.head_dim:
                turned[n_first:, n_first:] = hadamard(layer.head_dim - n_first)
            q = q @ turned
            if is_own:
                k, v = k @ turned, v @ turned[:n_values, :n_values]
        q = self.round_queries(q)
        if is_own:
            k = k if self.kv[0] == "float" else quantise_kv(k, self.kv[0]).astype(self.dtype)
            if layer.latent is not None:
                v = k[..., :n_values]
            elif self.kv[1] != "float":
                v = quantise_kv(v, self.kv[1]).astype(self.dtype)
        self.keep(f"{at}.q_rope", q.reshape(n_tokens, -1))
        self.keep(f"{at}.k_rope", k.reshape(n_tokens, -1))
        self.keep(f"{at}.v", v.reshape(n_tokens, -1))
        sinks = self.weight(f"{at}.sinks") if f"{at}.sinks" in self.model.weights else None
        mixed = attend_layer(q, k, v, layer, sinks)
        mixed = mixed.reshape(n_tokens, layer.n_heads, n_values)
        if turned is not None:
            mixed = mixed @ turned[:n_values, :n_values]
        if layer.latent is not None:
            mixed = self.by_head(mixed, f"{at}.v_up")
        mixed = mixed.reshape(n_tokens, -1)
        if f"{at}.mix_gate" in self.model.weights:
            gate = 1 + np.exp(-self.linear(x, f"{at}.mix_gate"))  # of elements or of heads
            mixed = mixed / np.repeat(gate, mixed.shape[1] // gate.shape[1], axis=1)
        self.keep(f"{at}.heads", mixed)
        mixed = self.normalise(mixed, f"{at}.attn_sub_norm")
        return self.keep(f"{at}.attn_out", self.linear(mixed, f"{at}.attn_out"))

    def latents(self, x: Array, layer: Layer, at: str) -> tuple[Array, Array, Array]:
        """Queries [n_tokens, n_heads, head_dim], and the key and the value of all heads."""
        assert layer.latent is not None
        rank, n_nope = layer.latent

        def normed(y: Array, name: str) -> Array:
            n = layer.latent_norm_dim if name.endswith("k_norm") else 0
            n = n or y.shape[1]
            size = (y[:, :n] ** 2).mean(axis=-1, keepdims=True) + self.dtype(1e-6)
            kept = np.arange(y.shape[1]) < n
            return np.asarray(y / np.sqrt(size) * self.weight(name) * kept)

        q, k = self.linear(x, f"{at}.q"), self.linear(x, f"{at}.k")
        if f"{at}.q_up" in self.model.weights:
            q = self.linear(normed(q, f"{at}.q_norm"), f"{at}.q_up")
        q = q.reshape(len(x), layer.n_heads, -1)
        rope, key = q[..., n_nope:], k[:, None, rank:]
        if layer.frequencies is not None:
            rope, key = (
                rotate_by(y, layer.frequencies, layer.rope_interleaved, layer.rope_factor)
                for y in (rope, key)
            )
        if layer.temperature is not None:
            beta, step = layer.temperature
            factors: Array = (1 + beta * np.log1p(np.arange(len(x)) // step)).astype(self.dtype)
            q, rope = q * factors[:, None, None], rope * factors[:, None, None]
        q = np.concatenate([self.by_head(q[..., :n_nope], f"{at}.k_up"), rope], axis=-1)
        latent = normed(k[:, :rank], f"{at}.k_norm")[:, None]
        return q, np.concatenate([latent, key], axis=-1), latent

    def by_head(self, x: Array, name: str) -> Array:
        """`x` [n_tokens, n_heads, n_inputs] times the part of the matrix that is the head's."""
        _, n_heads, n_inputs = x.shape
        if self.activations == "integer" and name in self.model.integer:
            rows = x.reshape(-1, n_inputs)
            codes, scales = quantise_activations(
                rows, self.model.integer[name], self.model.scale_cols
            )
            rounded = (codes * scales[:, :, None].astype(self.dtype)).reshape(len(rows), -1)
            x = rounded[:, :n_inputs].reshape(x.shape)
        w = self.weight(name).reshape(n_heads, -1, n_inputs)
        return np.asarray(np.einsum("thi,hoi->tho", x, w))

    def keys_and_values(self, x: Array, layer: Layer, at: str) -> tuple[Array, Array]:
        """Of the layer itself, each [n_tokens, n_kv_heads, head_dim]."""
        v = limited(self.linear(x, f"{at}.k" if layer.values_are_keys else f"{at}.v"), layer)
        v = v.reshape(len(x), layer.n_kv_heads, layer.head_dim)
        return self.heads(x, layer, at, "k"), self.normed(v) if layer.has_value_norm else v

    def kept_ones(self, layer: Layer) -> tuple[Array, Array]:
        """Keys and values that the layer's source left in the cache."""
        names = (f"layer.{layer.kv_source}.{name}" for name in ("k_rope", "v"))
        k, v = (self.values[name].reshape(-1, layer.n_kv_heads, layer.head_dim) for name in names)
        return k, v

    def round_queries(self, q: Array) -> Array:
        """Queries [n_tokens, n_heads, head_dim] as they meet keys of few bits."""
        if self.kv[0] in ("float", "f32", "f16"):
            return q
        rows = q.reshape(-1, q.shape[-1])
        codes, scales = quantise_activations(rows, 16 if self.kv[0] == "8bit" else 8)
        rounded = (codes * scales[:, :, None]).reshape(len(rows), -1)[:, : rows.shape[1]]
        return np.asarray(rounded.reshape(q.shape), self.dtype)

    def ffn(self, x: Array, layer: Layer, at: str) -> Array:
        up = self.linear(x, f"{at}.ffn_up")
        if f"{at}.ffn_gate" in self.model.weights:
            gate = self.linear(x, f"{at}.ffn_gate")
            if layer.activation == "silu_clamped":
                hidden = silu_clamped(gate, up)
            else:
                hidden = activate(gate, layer.activation, layer.xielu) * up
        else:
            hidden = activate(up, layer.activation, layer.xielu)
        self.keep(f"{at}.ffn_hidden", hidden)
        hidden = self.normalise(hidden, f"{at}.ffn_sub_norm")
        return self.keep(f"{at}.ffn_out", self.linear(hidden, f"{at}.ffn_down"))

    def routed(self, x: Array, of_router: Array, layer: Layer, at: str) -> Array:
        """What the chosen experts add for each row of `x`, in ascending order of the experts."""
        assert layer.routing is not None
        logits = of_router @ self.weight(f"{at}.expert_router").T
        if f"{at}.router_bias" in self.model.weights:
            logits = logits + self.weight(f"{at}.router_bias")
        self.keep(f"{at}.router", logits)
        choice = choose(logits, self.model.weights.get(f"{at}.selection_bias"), layer.routing)
        self.keep(f"{at}.chosen", choice.experts)
        weights = choice.weights
        if f"{at}.expert_scale" in self.model.weights:
            weights = weights * self.weight(f"{at}.expert_scale")[choice.experts]
        self.keep(f"{at}.chosen_weights", weights)
        out = np.zeros_like(x)
        for expert in np.unique(choice.experts):
            tokens, places = np.nonzero(choice.experts == expert)
            y = self.ffn(x[tokens], layer, f"{at}.expert.{expert}")
            out[tokens] += weights[tokens, places][:, None] * y
        return out

    def feed_forward(self, x: Array, behind: Array, layer: Layer, at: str) -> Array:
        """The dense part, which is the shared experts, and the routed part; one may be missing.

        Both read `x`, unless router or experts have a norm of the stream `behind` attention.
        """
        out = np.zeros_like(x)
        bias: Array | float = 0.0
        if f"{at}.ffn_up" in self.model.weights:
            out = self.ffn(x, layer, at)
        elif f"{at}.ffn_down_bias" in self.model.weights:
            bias = self.weight(f"{at}.ffn_down_bias")
        if f"{at}.shared_gate" in self.model.weights:
            gate = x @ self.weight(f"{at}.shared_gate")
            out = out / (1 + np.exp(-gate))[:, None]
        if layer.routing is None:
            return out
        of_router, of_experts = (
            self.normalise(behind, name) if name in self.model.weights else x
            for name in (f"{at}.router_norm", f"{at}.routed_norm")
        )
        routed = self.routed(of_experts, of_router, layer, at) + bias
        out = self.normalise(out, f"{at}.dense_post_norm")
        return out + self.normalise(routed, f"{at}.routed_post_norm")

    def layer(self, x: Array, layer: Layer, at: str) -> Array:
        """The stream behind a layer, of the stream `x` before it."""
        factor = self.dtype(layer.residual_factor)
        if f"{at}.input_shift" in self.model.weights:
            x = x + self.weight(f"{at}.input_shift")
        x = self.normalise(x, f"{at}.input_norm")
        y = self.keep(f"{at}.attn_norm", self.normalise(x, f"{at}.attn_norm"))
        behind = self.keep(f"{at}.residual_attn", x + factor * self.mixed(y, layer, at))
        if f"{at}.ffn_up" not in self.model.weights and layer.routing is None:
            return self.add_own(behind, layer, at)
        if layer.is_post_norm:
            y = behind = self.normalise(behind, f"{at}.ffn_norm")
        elif not layer.is_parallel:
            y = self.normalise(behind, f"{at}.ffn_norm")
        elif f"{at}.ffn_norm" in self.model.weights:
            y = self.normalise(x, f"{at}.ffn_norm")
        self.keep(f"{at}.ffn_norm", y)
        out = self.normalise(self.feed_forward(y, behind, layer, at), f"{at}.post_ffn_norm")
        out = self.add_own(behind + factor * out, layer, at)
        if f"{at}.layer_scale" in self.model.weights:
            out = out * self.weight(f"{at}.layer_scale")
        return self.keep(f"{at}.residual_ffn", out)

    def add_own(self, x: Array, layer: Layer, at: str) -> Array:
        """Add the embeddings that each layer has of its own, if the model has any."""
        if "own_table" not in self.model.weights:
            return x
        width = len(self.weight(f"{at}.own_in_norm"))
        begin = int(at.split(".")[1]) * width
        own = self.weight("own_table")[self.tokens, begin : begin + width]
        p = self.linear(self.values["embedded"], f"{at}.own_in") / np.sqrt(self.dtype(x.shape[1]))
        p = self.normalise(p, f"{at}.own_in_norm") + own * np.sqrt(self.dtype(width))
        gate = activate(self.linear(x, f"{at}.own_gate"), layer.activation, layer.xielu)
        y = self.linear(gate * (p / np.sqrt(self.dtype(2))), f"{at}.own_out")
        y = self.normalise(y, f"{at}.own_norm")
        return np.asarray(x + self.dtype(layer.residual_factor) * y)

    def run(self, tokens: Sequence[int] | NDArray[np.integer[Any]], skip: Collection[int]) -> Trace:
        config = self.config
        self.tokens = np.asarray(tokens)
        x = self.weight("embedding")[np.asarray(tokens)] * self.dtype(config.embedding_factor)
        if config.positions == "learned":
            x = x + self.weight("positions")[: len(x)]
        self.keep("embedded", x)
        for i in sorted(set(range(config.n_layers)) - set(skip)):
            x = self.layer(x, config.layer(i), f"layer.{i}")
        x = self.keep("final_norm", self.normalise(x, "final_norm"))
        if "dense" in self.model.weights:
            x = self.keep("dense", self.linear(x, "dense"))
        parts = [name for name in ("head", "head_rest") if name in self.model.weights]
        products = [self.product(x, name) for name in parts or ["embedding"]]
        logits = np.concatenate(products, axis=-1)
        if "head_bias" in self.model.weights:
            logits = logits + self.weight("head_bias")
        if config.logit_cap:
            cap = self.dtype(config.logit_cap)
            logits = cap * np.tanh(logits / cap)
        return Trace(logits, self.values)


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
