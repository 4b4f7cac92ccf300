"""Makes key channels equally large: some are 100 times as large as others, which a KV cache of few
bits rounds away.

A block of the KV cache has one scale for 64 channels of a key, so one channel that is always
large, mostly because of its bias, makes the steps of all others coarse. The scores q . k do not
change if a channel of the keys is divided by a factor and the same channel of the queries is
multiplied by it. Powers of two cause no rounding. The two channels that RoPE rotates
together need the same factor, and so do the query heads that share a KV head.

The factors go into the weights of the Q and K norms if the model has such norms, else into the
rows and biases of the matrices Q and K: the model computes the same, at no cost.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.kinds import ROPE_NONE, LayerKind, QkNorm
from qsf.file.layout import TensorType, UnitId, layer_unit
from qsf_converter.rounding.pieces import exact_shifts_of, read_tensor
from qsf_converter.rounding.plan import Plan, Target
from qsf_converter.sources.checkpoint import Checkpoint
from qsf_converter.sources.families.family import Facts

T = TensorType

_LEAST_EXPONENT: Final = 2
# Larger shifts would move the f16 scales of blocks near the smallest f16.
_LARGEST_EXPONENT: Final = 8

_KEYS: Final = (T.K, T.K_BIAS, T.K_NORM)
_QUERIES: Final = (T.Q, T.Q_BIAS, T.Q_NORM)

Exponents = NDArray[np.int64]


def with_equal_keys(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Return the plan with factors that make the key channels of each head equally large.

    Reads the K matrices. Ternary matrices are not changed: they may have one scale for all rows.
    """
    by_unit: dict[UnitId, dict[TensorType, Target]] = {}
    for target in plan.targets:
        if target.rule.target is not None:
            by_unit.setdefault(target.unit, {})[target.rule.target] = target
    changed: dict[tuple[UnitId, TensorType | None], tuple[int, ...]] = {}
    kinds = plan.facts.kinds
    for layer_idx, kind in enumerate(kinds):
        unit = layer_unit(layer_idx)
        targets = by_unit[unit]
        if not kind.has_attention or kind.latent_rank or kind.kv_source or kind.qkv_limit:
            continue
        if kind.value_norm:  # of Gemma 4, whose drafters read these keys; and of Inkling 2
            continue
        # Layers whose queries read these keys, too.
        sharing = [i for i, other in enumerate(kinds) if other.kv_source == layer_idx + 1]
        if any(kinds[i].qk_norm != QkNorm.PER_HEAD for i in (layer_idx, *sharing) if sharing):
            continue
        if targets[T.Q].is_ternary or targets[T.K].is_ternary:
            continue
        keys = channel_sizes(_KEYS, targets, kind, checkpoint)
        queries = channel_sizes(_QUERIES, targets, kind, checkpoint)
        shared = np.square(queries).reshape(len(keys), -1, kind.head_dim).mean(axis=1)
        partners = channel_pairs(kind, plan.facts)
        exponents = equal_exponents(keys, np.sqrt(shared), partners)
        if kind.qk_norm == QkNorm.NONE:
            exponents = _within_kept(exponents, targets, partners, checkpoint)
        for tensor_type, of_rows in _of_tensors(exponents, kind).items():
            changed[unit, tensor_type] = tuple(of_rows.tolist())
            if tensor_type in _QUERIES:
                of_sharing = ((layer_unit(i), tensor_type) for i in sharing)
                changed |= dict.fromkeys(of_sharing, changed[unit, tensor_type])
    return plan.with_targets(
        lambda target: dataclasses.replace(
            target, exponents=changed.get((target.unit, target.rule.target), ())
        )
    )


def channel_sizes(
    names: tuple[TensorType, TensorType, TensorType],
    targets: Mapping[TensorType, Target],
    kind: LayerKind,
    checkpoint: Checkpoint,
) -> NDArray[np.float64]:
    """Estimate the size of each channel of queries or keys, [n_heads, head_dim].

    ``names`` are matrix, bias and norm. The matrix's input is assumed to be noise of size 1,
    normalised by the norm before it. A norm with the same weights for all heads makes one head of
    all.
    """
    matrix, bias, norm = names
    rows = read_tensor(targets[matrix], checkpoint)
    vectors = {
        tensor_type: read_tensor(targets[tensor_type], checkpoint)[0]
        for tensor_type in (T.ATTN_NORM, T.ATTN_NORM_BIAS, bias, norm)
        if tensor_type in targets
    }
    constants = vectors.get(bias, np.zeros(len(rows), np.float32))
    if T.ATTN_NORM_BIAS in vectors:
        constants = constants + rows @ vectors[T.ATTN_NORM_BIAS]
    if T.ATTN_NORM in vectors:
        rows = rows * vectors[T.ATTN_NORM]
    squares = np.square(rows).sum(axis=1, dtype=np.float64) + np.square(constants)
    squares = squares.reshape(-1, kind.head_dim)
    if kind.qk_norm == QkNorm.NONE:
        return np.asarray(np.sqrt(squares))
    is_whole = kind.qk_norm == QkNorm.WHOLE_WIDTH
    means = squares.mean() if is_whole else squares.mean(axis=1, keepdims=True)
    normed = np.sqrt(squares / np.maximum(means, np.finfo(np.float64).tiny))
    if kind.qk_norm == QkNorm.PER_HEAD:
        normed = np.sqrt(np.square(normed).mean(axis=0, keepdims=True))
    return np.asarray(np.abs(vectors[norm]).reshape(normed.shape) * normed)


def channel_pairs(kind: LayerKind, facts: Facts) -> NDArray[np.intp]:
    """Return for each channel of a head the channel that RoPE rotates it with, or itself."""
    partners = np.arange(kind.head_dim)
    if kind.rope_set == ROPE_NONE:
        return partners
    rope = next((rope for rope in facts.rope_sets if rope.number == kind.rope_set), None)
    if rope is not None:
        n_pairs, is_interleaved = len(rope.frequencies), rope.is_interleaved
    else:
        rope_dims = facts.arch.rope_dims
        n_pairs = (kind.head_dim if rope_dims is None else rope_dims) // 2
        is_interleaved = facts.arch.rope_interleaved
    first = np.arange(n_pairs) * 2 if is_interleaved else np.arange(n_pairs)
    second = first + (1 if is_interleaved else n_pairs)
    partners[first], partners[second] = second, first
    return partners


def equal_exponents(
    keys: NDArray[np.float64], queries: NDArray[np.float64], partners: NDArray[np.intp]
) -> Exponents:
    """Return e [n_heads, head_dim]: divide key channels by 2^e, and multiply those of queries.

    The arguments are the sizes of key channels and of their query channels. Rotated codes have an
    error as large as the root of sum (k / s)^2, times sum (q s)^2 in the scores, which is least
    where s^2 is k / q. Channels near the median get no factor: their weights keep the source's
    bits.
    """
    logs = [_of_pairs(sizes, partners) for sizes in (keys, queries)]
    exponents = np.rint((logs[0] - logs[1]) / 2).astype(np.int64)
    exponents[np.abs(exponents) < _LEAST_EXPONENT] = 0
    return np.clip(exponents, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)


def _within_kept(
    exponents: Exponents,
    targets: Mapping[TensorType, Target],
    partners: NDArray[np.intp],
    checkpoint: Checkpoint,
) -> Exponents:
    """Return the exponents, reduced so that kept f16 scales are not rounded."""
    least, most = np.full_like(exponents, -99), np.full_like(exponents, 99)
    for tensor_type in (T.K, T.Q):
        shifts = exact_shifts_of(targets[tensor_type], checkpoint)
        if shifts is None:
            continue
        shape = (len(exponents), -1, exponents.shape[1])  # query heads that share a KV head
        halvings, doublings = (rows.reshape(shape).min(axis=1) for rows in shifts)
        if tensor_type == T.Q:
            halvings, doublings = doublings, halvings
        most = np.minimum(most, np.minimum(halvings, halvings[:, partners]))
        least = np.maximum(least, -np.minimum(doublings, doublings[:, partners]))
    return np.clip(exponents, least, most)


def _of_pairs(sizes: NDArray[np.float64], partners: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return log2 of the sizes of pairs over the median of their head; 0 for pairs of size 0."""
    squares = np.square(sizes)
    pairs = np.sqrt(squares + squares[:, partners])
    medians = np.median(pairs, axis=1, keepdims=True)
    is_there = (pairs > 0) & (medians > 0) & np.isfinite(pairs)
    ratios = np.divide(pairs, medians, out=np.ones_like(pairs), where=is_there)
    return np.asarray(np.log2(ratios))


def _of_tensors(exponents: Exponents, kind: LayerKind) -> dict[TensorType, Exponents]:
    """Return the exponent of each output of the tensors that take the factors."""
    is_per_head = kind.qk_norm == QkNorm.PER_HEAD  # all heads have the same weights
    n_shared = 1 if is_per_head else kind.n_heads // kind.n_kv_heads
    of_keys = -exponents.ravel()
    of_queries = np.repeat(exponents, n_shared, axis=0).ravel()
    if kind.qk_norm != QkNorm.NONE:
        return {T.K_NORM: of_keys, T.Q_NORM: of_queries}
    return {T.K: of_keys, T.K_BIAS: of_keys, T.Q: of_queries, T.Q_BIAS: of_queries}
