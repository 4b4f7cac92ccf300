"""The original model in full precision, one layer at a time.

Calibration and evaluation need the outputs of the unrounded model. A layer's weights are read as
f32 matrices before the layer runs and dropped afterwards, so memory holds one layer and the
activations of the texts, whatever the model's size. Layers have the shapes of docs/format.md;
products are numpy's, so sums are those of the machine's BLAS, not of the engine.

What layers read besides the residual stream goes with it, in the columns after its ``dim``: where
layers have embeddings of their own, the token's embedding and the index of its own rows; then the
keys and values of each layer that others read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file import layout
from qsf.file.kinds import ROPE_NONE, LayerKind, Mixer, QkNorm, plain_kind
from qsf.file.layout import EMBEDDING_UNIT, FINAL_UNIT, Activation, TensorType, UnitId
from qsf_converter.original.weights import (
    BIASES,
    Weights,
    convolve,
    delta_rule,
    linear,
    rope_frequencies,
    rotate,
    route,
    ssd,
)
from qsf_converter.rounding.pieces import Piece, read_rows, read_tensor
from qsf_converter.rounding.plan import Plan, Target
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array
from qsf_converter.sources.families.rules import INPUT_GROUPS, Place

T = TensorType
# Called with the matrices that share an input, and this input [n_tokens, n_inputs].
Observer = Callable[[tuple[TensorType, ...], Float32Array], None]

_HEAD_ROWS: Final = 16384  # of the head at once
_EXPERTS_BYTES: Final = 256 << 20  # a layer's experts are kept as f32 up to this size


class Original:
    """A checkpoint as a function, layer by layer; samples of tokens are independent texts."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint) -> None:
        # without the MTP head, which only guesses
        self.header: layout.Header = replace(plan.facts.header, n_layers=plan.facts.n_trunk_layers)
        self.arch: layout.Arch = plan.facts.arch
        if plan.facts.arch.is_encoder:
            raise QsfConversionError(
                "an encoder predicts no tokens, by which calibration and qsf eval judge: convert it"
                " without --calibration (8bit by default), and compare what qsf embed prints"
            )
        if plan.facts.arch.target_dim:
            raise QsfConversionError(
                "a drafter reads another model's keys, which calibration and qsf eval lack: convert"
                " it without --calibration"
            )
        if plan.facts.arch.block_layers:
            raise QsfConversionError(
                "a model whose layers are in residual blocks (Inkling 2) is not computed layer by"
                " layer: convert it without --calibration and --target-size"
            )
        self._checkpoint = checkpoint
        self._by_unit: dict[UnitId, list[Target]] = {}
        self._kept_experts: dict[UnitId, Weights] = {}  # the tensors of one layer
        for target in plan.targets:
            self._by_unit.setdefault(target.unit, []).append(target)
        facts = plan.facts
        is_gated = any(target.rule.target == T.FFN_GATE for target in plan.targets)
        plain = plain_kind(self.header, self.arch, is_gated=is_gated)
        self._kinds = facts.layer_kinds or (plain,) * self.header.n_layers
        self._rope_sets = facts.rope_sets
        self._frequencies = rope_frequencies(self.header, self.arch)
        dim = self.header.dim
        self.width = 2 * dim + 1 if self.arch.own_width else dim  # of the stream, with all columns
        self._keys_at: dict[int, slice] = {}  # after ``dim``: of layers whose keys others read
        for source in sorted({kind.kv_source - 1 for kind in self._kinds if kind.kv_source}):
            n_columns = 2 * self._kinds[source].n_kv_heads * self._kinds[source].head_dim
            self._keys_at[source] = slice(self.width - dim, self.width - dim + n_columns)
            self.width += n_columns
        self._own_rows = np.empty((0, self.header.n_layers * self.arch.own_width), np.float32)
        self._n_own = 0  # of them as they are in the checkpoint; rounded ones follow

    def targets(self, unit: UnitId) -> list[Target]:
        return self._by_unit.get(unit, [])

    def weights(self, unit: UnitId) -> Weights:
        """Read all tensors of a unit as f32: matrices [n_rows, n_cols], vectors [n].

        Experts of a layer are read on first use, and kept if all of them together are small.
        """

        def expert(number: int) -> Weights:
            return self._expert(unit.of_expert(number))

        empty = Weights({}, self._kinds[unit.layer], expert, layer=unit.layer)
        return self._read(self._by_unit[unit], empty)

    def _expert(self, unit: UnitId) -> Weights:
        if unit in self._kept_experts:
            return self._kept_experts[unit]
        targets, kind = self._by_unit[unit], self._kinds[unit.layer]
        weights = self._read(targets, Weights({}, kind))
        self._kept_experts = {
            of: kept for of, kept in self._kept_experts.items() if of.layer == unit.layer
        }
        if kind.n_experts * sum(values.nbytes for values in weights.values()) <= _EXPERTS_BYTES:
            self._kept_experts[unit] = weights
        return weights

    def _read(self, targets: list[Target], weights: Weights) -> Weights:
        for target in targets:
            if target.rule.target is None:  # learned positions
                continue
            values = read_tensor(target, self._checkpoint)
            weights[target.rule.target] = values[0] if target.is_vector else values
        return weights

    def vectors(self, unit: UnitId) -> dict[TensorType, Float32Array]:
        """Read the norms and biases of a unit, [n] each."""
        return {
            target.rule.target: read_tensor(target, self._checkpoint)[0]
            for target in self._by_unit[unit]
            if target.is_vector and target.rule.target is not None
        }

    def embed(self, tokens: NDArray[np.integer]) -> Float32Array:
        """Return the residual stream [n_samples, n_tokens, width] of ids [n_samples, n_tokens].

        Reads only the needed rows of the embedding, and the positions. The stream can be used until
        the next call.
        """
        whole = np.zeros((*tokens.shape, self.width), np.float32)
        x, beside = self.parts(whole)
        for start, rows in self.embedding_rows():
            here = (tokens >= start) & (tokens < start + len(rows))
            x[here] = rows[tokens[here] - start]
        x *= np.float32(self.arch.embedding_factor)
        for target in self._by_unit[EMBEDDING_UNIT]:
            if target.rule.place is Place.POSITIONS:
                x += read_tensor(target, self._checkpoint)[: tokens.shape[1]]
        for table in self.targets(layout.OWN_TABLE_UNIT):
            ids, places = np.unique(tokens, return_inverse=True)
            pieces = (Piece(table, int(idx), int(idx) + 1) for idx in ids)
            self._own_rows = np.concatenate([read_rows(p, self._checkpoint) for p in pieces])
            self._n_own = len(ids)
            beside[..., self.header.dim] = places.reshape(tokens.shape)
        self.keep_embedded(whole)
        return whole

    def parts(self, whole: Float32Array) -> tuple[Float32Array, Float32Array]:
        """Return views of the stream proper, [..., dim], and of the columns beside it."""
        return whole[..., : self.header.dim], whole[..., self.header.dim :]

    def keep_embedded(self, whole: Float32Array) -> None:
        """Note that the stream holds the tokens' embeddings, which layers may read later."""
        x, beside = self.parts(whole)
        if self.arch.own_width:
            beside[..., : self.header.dim] = x

    def round_own(
        self, whole: Float32Array, round_rows: Callable[[Float32Array], Float32Array]
    ) -> None:
        """Let a stream that reads the checkpoint's own rows read rounded ones."""
        whole[..., 2 * self.header.dim] += len(self._own_rows)
        rounded = round_rows(self._own_rows[: self._n_own])
        self._own_rows = np.concatenate([self._own_rows, rounded])

    def layer(
        self, weights: Weights, x: Float32Array, observe: Observer | None = None
    ) -> Float32Array:
        """Return the residual stream after a layer; ``x`` [n_samples, n_tokens, width] is not
        changed.

        ``observe`` is called with the input of every matrix outside of experts: all tokens of a
        sample at once, one sample after another.
        """
        whole = np.zeros_like(x)
        behind, beside = self.parts(whole)
        inputs, dense = (np.zeros(behind.shape, np.float32) for _ in range(2))

        def pass_sample(i: int) -> None:
            before, beside[i] = self.parts(x[i])
            behind[i], inputs[i], dense[i] = self._parts_of_sample(
                weights, before, beside[i], observe
            )

        for_each(len(x), pass_sample, n_threads=1 if observe is not None else None)
        routed = self._routed(weights, inputs, behind) if weights.kind.n_experts else None
        behind[:] = self.joined(weights, behind, beside, dense, routed)
        return whole

    def joined(
        self,
        w: Weights,
        behind: Float32Array,
        beside: Float32Array,
        dense: Float32Array,
        routed: Float32Array | None = None,
    ) -> Float32Array:
        """Return the stream behind a layer, of that behind attention, ``beside`` and the FFN's."""
        y = dense
        if routed is not None:
            dense = self._normalise(w, T.DENSE_POST_NORM, dense)
            y = dense + self._normalise(w, T.ROUTED_POST_NORM, routed)
        y = self._normalise(w, T.POST_FFN_NORM, y)
        factor = np.float32(w.kind.residual_factor)
        out = behind + (y if factor == 1 else y * factor)
        if T.OWN_GATE in w:
            out += factor * self._own(w, out, beside)
        return out * w[T.LAYER_SCALE] if T.LAYER_SCALE in w else out

    def _own(self, w: Weights, x: Float32Array, beside: Float32Array) -> Float32Array:
        """Return what the layer's own embeddings add to the stream ``x`` [..., dim]."""
        dim, width = self.header.dim, self.arch.own_width
        p = linear(w, T.OWN_IN, beside[..., :dim]) / np.float32(math.sqrt(dim))
        p = self._normalise(w, T.OWN_IN_NORM, p)
        if len(self._own_rows):  # an encoder has no table
            at = slice(w.layer * width, (w.layer + 1) * width)
            own = self._own_rows[beside[..., dim].astype(np.intp), at]
            p = (p + own * np.float32(math.sqrt(width))) * np.float32(math.sqrt(0.5))
        gate = _activate(w.kind, linear(w, T.OWN_GATE, x))
        y = linear(w, T.OWN_OUT, gate * p)
        return self._normalise(w, T.OWN_NORM, y)

    def routed_inputs(
        self, w: Weights, y: Float32Array, behind: Float32Array
    ) -> tuple[Float32Array, Float32Array]:
        """Return the input of router and experts: the FFN's ``y``, or the normalised stream."""
        of_router, of_experts = (
            self._normalise(w, norm, behind) if norm in w else y
            for norm in (T.ROUTER_NORM, T.ROUTED_NORM)
        )
        return of_router, of_experts

    def _routed(self, w: Weights, inputs: Float32Array, behind: Float32Array) -> Float32Array:
        assert w.expert is not None
        of_router, of_experts = self.routed_inputs(w, inputs, behind)
        out = np.zeros_like(inputs)
        y, rows = (of.reshape(-1, of.shape[-1]) for of in (of_experts, out))
        choice = route(w.kind, w, of_router.reshape(y.shape))
        for expert in range(w.kind.n_experts):
            tokens, weights = choice.tokens_of(expert)
            if len(tokens):
                own = w.expert(expert)
                rows[tokens] += weights * self.ffn_output(own, self.ffn_hidden(own, y[tokens]))
        return out

    def final_norm(
        self, weights: Mapping[TensorType, Float32Array], x: Float32Array
    ) -> Float32Array:
        """Return the input of the head, [..., dim]; ``weights`` are the final unit's."""
        return self._normalise(weights, T.FINAL_NORM, self.parts(x)[0])

    def finish_logits(
        self, weights: Mapping[TensorType, Float32Array], products: Float32Array, start: int
    ) -> Float32Array:
        """Turn the head's products [..., n], rows from ``start`` on, into logits, in place."""
        if T.HEAD_BIAS in weights:
            products += weights[T.HEAD_BIAS][start : start + products.shape[-1]]
        if self.arch.logit_cap:
            cap = np.float32(self.arch.logit_cap)
            np.tanh(products / cap, out=products)
            products *= cap
        return products

    def embedding_rows(self) -> Iterator[tuple[int, Float32Array]]:
        for target in self._by_unit[EMBEDDING_UNIT]:
            if target.rule.place is Place.EMBEDDING:
                yield from _row_ranges(target, self._checkpoint)

    def head_rows(self) -> Iterator[tuple[int, Float32Array]]:
        place = Place.EMBEDDING if self.arch.tied_head else Place.FINAL
        for target in self._by_unit[EMBEDDING_UNIT] + self._by_unit[FINAL_UNIT]:
            if target.is_matrix and target.rule.place is place:
                for start, rows in _row_ranges(target, self._checkpoint):
                    yield target.share.first + start, rows

    def logits(
        self, x: Float32Array, head_rows: Iterable[tuple[int, Float32Array]] | None = None
    ) -> Float32Array:
        """Return the logits of a stream [n_tokens, width]; ``head_rows``: as the method's."""
        vectors = self.vectors(FINAL_UNIT)
        x = self.final_norm(vectors, x)
        out = np.empty((len(x), self.header.n_vocab), np.float32)
        for start, rows in self.head_rows() if head_rows is None else head_rows:
            out[:, start : start + len(rows)] = self.finish_logits(vectors, x @ rows.T, start)
        return out

    # ---- parts of a layer; x, y: [n_tokens, ...] of one sample ----

    def layer_input(self, w: Weights, x: Float32Array) -> Float32Array:
        """Return the stream in the form that the layer uses, [n_tokens, dim]."""
        return self._normalise(w, T.INPUT_NORM, x)

    def attention_input(self, w: Weights, x: Float32Array) -> Float32Array:
        """Return the input of Q, K and V, [n_tokens, dim]."""
        return self._normalise(w, T.ATTN_NORM, x)

    def mixed(
        self, w: Weights, y: Float32Array, beside: Float32Array
    ) -> dict[TensorType, Float32Array]:
        """Return what the output matrices of the mixer read, [n_tokens, n_inputs] each.

        Keys and values that later layers read are left in ``beside``.
        """
        if w.kind.mixer == Mixer.SHORT_CONV:
            inner = linear(w, T.K, y) * linear(w, T.V, y)
            return {T.ATTN_OUT: convolve(w, inner) * linear(w, T.Q, y)}
        if w.kind.mixer == Mixer.DELTA:
            return {T.ATTN_OUT: delta_rule(w, y, self.arch.norm_epsilon)}
        out = {T.ATTN_OUT: self._attended(w, y, beside)} if w.kind.has_attention else {}
        if w.kind.has_ssd:
            out[T.SSD_OUT] = ssd(w, y, self._normalised)
        return out

    def _attended(self, w: Weights, y: Float32Array, beside: Float32Array) -> Float32Array:
        """Return the heads of attention, [n_tokens, n_heads * head_dim]."""
        kind, n_tokens = w.kind, len(y)
        n_shared = kind.n_heads // kind.n_kv_heads
        # [heads, tokens, head_dim]
        q, k, v = self._latents(w, y) if kind.latent_rank else self._qkv(w, y, beside)
        scale = np.float32(kind.score_scale or 1 / math.sqrt(kind.head_dim))
        behind = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        hidden = _hidden_positions(behind, kind.window_tokens)
        out = np.empty((n_tokens, kind.n_heads, kind.value_head_dim), np.float32)
        for head in range(kind.n_heads):
            scores = q[head] @ k[head // n_shared].T
            scores *= scale
            if kind.alibi_slopes:
                scores -= np.float32(kind.alibi_slopes[head]) * behind.astype(np.float32)
            if kind.score_cap:
                cap = np.float32(kind.score_cap)
                scores = cap * np.tanh(scores / cap)
            scores[hidden] = -np.inf
            largest = scores.max(axis=1, keepdims=True)
            if T.SINKS in w:
                largest = np.maximum(largest, w[T.SINKS][head])
            scores -= largest
            np.exp(scores, out=scores)
            total = scores.sum(axis=1, keepdims=True)
            if T.SINKS in w:
                total += np.exp(w[T.SINKS][head] - largest)
            scores /= total
            out[:, head] = scores @ v[head // n_shared]
        if kind.latent_rank:
            out = np.matmul(out.transpose(1, 0, 2), _by_head(w, T.V_UP).transpose(0, 2, 1))
            out = out.transpose(1, 0, 2)
        mixed = out.reshape(n_tokens, -1)
        if T.MIX_GATE in w:
            gate = 1 + np.exp(-linear(w, T.MIX_GATE, y))
            mixed /= np.repeat(gate, mixed.shape[1] // gate.shape[1], axis=1)
        return self._normalise(w, T.ATTN_SUB_NORM, mixed)

    def mixer_output(self, w: Weights, matrix: TensorType, mixed: Float32Array) -> Float32Array:
        """Return what an output matrix of the mixer adds to the stream, [n_tokens, dim]."""
        y = linear(w, matrix, mixed)
        if matrix == T.ATTN_OUT:
            y = self._normalise(w, T.POST_ATTN_NORM, y)
        return y if w.kind.residual_factor == 1 else y * np.float32(w.kind.residual_factor)

    def ffn_input(self, w: Weights, x: Float32Array, behind: Float32Array) -> Float32Array:
        """Return the input of gate and up, [n_tokens, dim].

        ``x`` is the stream before attention, ``behind`` the stream after it.
        """
        if w.is_shared_norm:
            return self.attention_input(w, x)
        return self._normalise(w, T.FFN_NORM, x if w.kind.is_parallel else behind)

    def ffn_hidden(self, w: Weights, y: Float32Array) -> Float32Array:
        up = linear(w, T.FFN_UP, y)
        if T.FFN_GATE not in w:
            hidden = _activate(w.kind, up)
        else:
            hidden = _activate(w.kind, linear(w, T.FFN_GATE, y))
            hidden *= _gated(w.kind.activation, up)
        if T.SHARED_GATE in w:  # the gate applies to the output, with the same result
            hidden /= 1 + np.exp(-(y @ w[T.SHARED_GATE]))[:, None]
        return self._normalise(w, T.FFN_SUB_NORM, hidden)

    def ffn_output(self, w: Weights, hidden: Float32Array) -> Float32Array:
        """Return the output of the FFN, or of an expert, [n_tokens, dim]; see ``joined``."""
        return linear(w, T.FFN_DOWN, hidden)

    def _parts_of_sample(
        self, w: Weights, x: Float32Array, beside: Float32Array, observe: Observer | None
    ) -> tuple[Float32Array, Float32Array, Float32Array]:
        """Return the stream after attention, and the input and output of the dense part."""

        def observed(kinds: tuple[TensorType, ...], y: Float32Array) -> Float32Array:
            if observe is not None:
                observe(tuple(kind for kind in kinds if kind in w), y)
            return y

        of_mixer, *_, of_gate, of_down = INPUT_GROUPS
        x = behind = self.layer_input(w, x)
        if w.kind.mixer != Mixer.NONE:
            read = observed(of_mixer, self.attention_input(w, x))
            for matrix, mixed in self.mixed(w, read, beside).items():
                behind = behind + self.mixer_output(w, matrix, observed((matrix,), mixed))
        y = self.ffn_input(w, x, behind)
        if T.FFN_UP not in w:
            return behind, y, np.zeros_like(y)
        observed(of_gate, y)
        hidden = observed(of_down, self.ffn_hidden(w, y))
        return behind, y, self.ffn_output(w, hidden)

    def _qkv(
        self, w: Weights, y: Float32Array, beside: Float32Array
    ) -> tuple[Float32Array, Float32Array, Float32Array]:
        n_tokens, kind = len(y), w.kind
        q = self._turned(w, T.Q, T.Q_NORM, y)
        if kind.kv_source:
            kept = beside[:, self._keys_at[kind.kv_source - 1]]
            k, v = kept.reshape(n_tokens, 2, -1, kind.head_dim).transpose(1, 2, 0, 3)
            return q, k, v
        k = self._turned(w, T.K, T.K_NORM, y)
        v = _limited(kind, linear(w, T.K if kind.values_are_keys else T.V, y))
        v = v.reshape(n_tokens, -1, kind.head_dim).transpose(1, 0, 2)
        v = self._normalised(v) if kind.value_norm else v
        if w.layer in self._keys_at:
            kept = np.stack([k, v]).transpose(2, 0, 1, 3)
            beside[:, self._keys_at[w.layer]] = kept.reshape(n_tokens, -1)
        return q, k, v

    def _latents(
        self, w: Weights, y: Float32Array
    ) -> tuple[Float32Array, Float32Array, Float32Array]:
        """Queries [heads, n_tokens, head_dim], and the latent as the one key and value of all."""
        kind, n_tokens = w.kind, len(y)
        q, k = linear(w, T.Q, y), linear(w, T.K, y)
        if kind.query_rank:
            q = _latent_norm(q) * w[T.Q_NORM] @ w[T.Q_UP].T
        q = q.reshape(n_tokens, kind.n_heads, kind.query_dim).transpose(1, 0, 2)
        latent = _latent_norm(k[:, : kind.latent_rank], kind.latent_norm_dim) * w[T.K_NORM]
        rope, key = q[..., kind.nope_dim :], k[None, :, kind.latent_rank :]
        if kind.rope_set != ROPE_NONE:
            angles = self._angles(kind, n_tokens)
            rope, key = rotate(rope, *angles), rotate(key, *angles)
        nope = np.matmul(q[..., : kind.nope_dim], _by_head(w, T.K_UP).transpose(0, 2, 1))
        q = _heated(kind, np.concatenate([nope, rope], axis=-1))
        return q, np.concatenate([latent[None], key], axis=-1), latent[None]

    def _turned(
        self, w: Weights, matrix: TensorType, norm: TensorType, y: Float32Array
    ) -> Float32Array:
        """Queries or keys, normalised and rotated: [heads, n_tokens, head_dim]."""
        kind, n_tokens = w.kind, len(y)
        x = _limited(kind, linear(w, matrix, y))
        if kind.qk_norm == QkNorm.WHOLE_WIDTH:
            x = self._normalise(w, norm, x)
        x = x.reshape(n_tokens, -1, kind.head_dim)

        def normed(x: Float32Array) -> Float32Array:
            if kind.qk_norm == QkNorm.PER_HEAD:
                return self._normalise(w, norm, x)
            if kind.qk_norm == QkNorm.OWN_WEIGHTS:
                return self._normalised(x) * w[norm].reshape(x.shape[1:])
            return x

        x = (x if kind.has_late_qk_norm else normed(x)).transpose(1, 0, 2)
        if kind.rope_set != ROPE_NONE:
            x = rotate(x, *self._angles(kind, n_tokens))
        if kind.has_late_qk_norm:
            x = normed(x.transpose(1, 0, 2)).transpose(1, 0, 2)
        return np.asarray(_heated(kind, x) if matrix == T.Q else x, np.float32)

    def _angles(self, kind: LayerKind, n_tokens: int) -> tuple[Float32Array, Float32Array, bool]:
        """Return cos and sin [n_tokens, pairs], and whether pairs are interleaved."""
        frequencies, is_interleaved = self._frequencies, self.arch.rope_interleaved
        factor = 1.0
        for (
            entry
        ) in self._rope_sets:  # the last entry of a number whose least context is reached wins
            if entry.number == kind.rope_set and entry.least_context <= n_tokens:
                frequencies, is_interleaved = np.array(entry.frequencies), entry.is_interleaved
                factor = entry.factor
        angles = np.arange(n_tokens)[:, None] * frequencies
        cos, sin = (np.asarray(f(angles) * factor, np.float32) for f in (np.cos, np.sin))
        return cos, sin, is_interleaved

    def _normalise(
        self, w: Mapping[TensorType, Float32Array], kind: TensorType, x: Float32Array
    ) -> Float32Array:
        """Normalise the last axis of ``x``; without such a norm, return ``x``."""
        if kind not in w:
            return x
        y = self._normalised(x) * w[kind]
        bias = BIASES.get(kind)
        if bias is not None and bias in w:
            y += w[bias]
        return np.asarray(y, np.float32)

    def _normalised(self, x: Float32Array) -> Float32Array:
        if self.header.norm == layout.Norm.LAYER:
            x = x - x.mean(axis=-1, keepdims=True)
        square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(square + np.float32(self.arch.norm_epsilon)))


def for_each(n: int, act: Callable[[int], None], *, n_threads: int | None = None) -> None:
    """Call ``act`` with 0 .. n - 1 on several threads, in any order.

    Raises the exception of the first failed call.
    """
    n_threads = min(n, n_threads or os.cpu_count() or 1)
    if n_threads <= 1:
        for i in range(n):
            act(i)
        return
    with ThreadPoolExecutor(n_threads, thread_name_prefix="compute") as pool:
        for _ in pool.map(act, range(n)):
            pass


def _by_head(w: Weights, matrix: TensorType) -> Float32Array:
    """A matrix of latent attention as [heads, rows of a head, columns]."""
    return w[matrix].reshape(w.kind.n_heads, -1, w[matrix].shape[1])


def _latent_norm(x: Float32Array, n: int = 0) -> Float32Array:
    """The norm of latents, whose epsilon is not the model's; after the first n they are 0."""
    kept = x[:, : n or None]
    square = np.mean(kept * kept, axis=-1, keepdims=True)
    out = np.zeros_like(x)
    out[:, : kept.shape[1]] = kept / np.sqrt(square + np.float32(1e-6))
    return out


def _limited(kind: LayerKind, x: Float32Array) -> Float32Array:
    """Clamp queries, keys or values if the layer does."""
    return np.clip(x, -kind.qkv_limit, kind.qkv_limit) if kind.qkv_limit else x


def _heated(kind: LayerKind, q: Float32Array) -> Float32Array:
    if not kind.temperature_step:
        return q
    factors = 1 + kind.temperature_beta * np.log1p(np.arange(q.shape[1]) // kind.temperature_step)
    return np.asarray(q * factors.astype(np.float32)[:, None])


def _row_ranges(target: Target, checkpoint: Checkpoint) -> Iterator[tuple[int, Float32Array]]:
    for start in range(0, target.n_rows, _HEAD_ROWS):
        piece = Piece(target, start, min(start + _HEAD_ROWS, target.n_rows))
        yield start, read_rows(piece, checkpoint)


def _hidden_positions(behind: NDArray[np.int_], window_tokens: int) -> NDArray[np.bool_]:
    """Mask of keys [columns] that a query [rows] does not see: later ones, and those outside of the
    window.

    ``behind`` is the distance from the query back to the key.
    """
    hidden: NDArray[np.bool_] = behind < 0
    if window_tokens:
        hidden |= behind >= window_tokens
    return hidden


def _gated(kind: int, up: Float32Array) -> Float32Array:
    """The factor by which the up projection is multiplied: the activated gate."""
    return np.clip(up, -7, 7) + 1 if kind == Activation.SILU_CLAMPED else up


def _activate(of: LayerKind, x: Float32Array) -> Float32Array:
    kind = of.activation
    if kind == Activation.XIELU:
        curve = np.expm1(np.minimum(x, 0)) - x
        sides = np.float32(of.xielu_square) * x * x, np.float32(of.xielu_exp) * curve
        return np.asarray(np.where(x > 0, *sides) + np.float32(of.xielu_line) * x)
    if kind == Activation.SILU:
        with np.errstate(over="ignore"):
            y = np.negative(x)
            return np.divide(x, np.add(np.exp(y, out=y), 1, out=y), out=y)
    if kind == Activation.GELU_TANH:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))
    if kind == Activation.GELU_ERF:
        erf = np.frompyfunc(math.erf, 1, 1)(x * np.float32(math.sqrt(0.5)))
        return np.asarray(np.float32(0.5) * x * (1 + erf.astype(np.float32)))
    if kind == Activation.SILU_CLAMPED:
        gate = np.minimum(x, np.float32(7))
        with np.errstate(over="ignore"):
            return np.asarray(gate / (1 + np.exp(np.float32(-1.702) * gate)))
    positive: Float32Array = np.maximum(x, 0)
    if kind == Activation.RELU_SQUARED:
        positive *= positive
    return positive
