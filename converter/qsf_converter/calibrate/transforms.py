"""Changes of a layer's weights that keep its output and make it easier to round.

- Scaling (AWQ, Lin et al. 2023): a matrix's columns are multiplied by s, and its input is divided
by s. The division costs nothing: it is merged into the norm before Q, K, V and before gate and up,
into the rows of V for the attention's output matrix, and into the rows of up for down. - Rotation
of the heads (as R2 of SpinQuant, Liu et al. 2024): the values of a head are rotated by a Hadamard
matrix, and the attention's output matrix rotates them back.

A layer gets those that lower its weighted error of rounding to nearest, which is measured.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.kinds import LayerKind
from qsf.file.layout import Dtype, TensorType
from qsf_converter.original.weights import BIASES, Weights
from qsf_converter.rounding.quantisers import UnrepresentableError, quantise_rows
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType

ROTATED: Final = "rotated"
SCALED: Final = "scaled"

# Exponents that turn the root mean square of an input into its scale
_EXPONENTS: Final = (0.25, 0.5)
_LARGEST_LOG: Final = math.log(16)
_MOST_ROWS: Final = 1024  # rows of a matrix to measure with
_LEAST_GAIN: Final = 0.02  # of the error; a smaller gain is noise
_PLAIN: Final = (Dtype.F16, Dtype.F32)

Energies = Mapping[tuple[TensorType, ...], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to the inputs of matrices that share them.

    Attributes:
        is_rotated: by heads, and so the rows of V.
        scales: [n_inputs], which multiply the columns; empty: none.
        divided: the matrix or norm whose rows were divided by them.
    """

    is_rotated: bool
    scales: Float32Array
    divided: TensorType


def choose(
    weights: Weights, dtypes: Mapping[TensorType, Dtype], energies: Energies
) -> tuple[Weights, dict[TensorType, str], dict[TensorType, Change]]:
    """Return equivalent weights of a layer, the transforms of each matrix, and the changes by the
    first matrix of each group.

    ``energies`` has, by the matrices that read an input (those of ``INPUT_GROUPS`` that exist),
    the sum over tokens of input x input, [n_inputs, n_inputs], in the unchanged layer.
    """
    chosen, actions = weights.changed(), dict[TensorType, str]()
    changes: dict[TensorType, Change] = {}
    for group, inputs in energies.items():
        if all(dtypes[kind] in _PLAIN for kind in group):
            continue
        action = ""
        best_error = _error(chosen, group, dtypes, np.diag(inputs))
        if group == (T.ATTN_OUT,) and not weights.kind.has_attention:
            continue  # another mixer's rows are no heads
        turned = rotate_heads(chosen) if group == (T.ATTN_OUT,) else None
        if turned is not None:
            rotated = _rotated(inputs, weights.kind.head_dim)
            error = _error(turned, group, dtypes, np.diag(rotated))
            if error < best_error * (1 - _LEAST_GAIN):
                chosen, inputs, best_error, action = turned, rotated, error, ROTATED
        unscaled, best = chosen, np.empty(0, np.float32)
        for exponent in _EXPONENTS:
            scales = _scales(np.diag(inputs), exponent, group, weights.kind)
            scaled = scale_inputs(unscaled, group, scales)
            if scaled is None:
                break
            error = _error(scaled, group, dtypes, np.diag(inputs) / scales.astype(np.float64) ** 2)
            if error < best_error * (1 - _LEAST_GAIN):
                chosen, best_error, best = scaled, error, scales
                action = f"{ROTATED}, {SCALED}" if action.startswith(ROTATED) else SCALED
        if action:
            actions.update(dict.fromkeys(group, action))
            divided = _divided(weights, group) if len(best) else None
            changes[group[0]] = Change(ROTATED in action, best, divided or group[0])
    return chosen, actions, changes


def scale_inputs(
    weights: Weights, group: tuple[TensorType, ...], scales: Float32Array
) -> Weights | None:
    """Multiply the columns of a group by ``scales`` [n_inputs] and divide the group's input by
    them.

    Returns None if nothing before the group can absorb the division. The scales of attention's
    output are equal for all heads that share values.
    """
    out = weights.changed()
    readers = (*group, T.BETA, T.DECAY, T.SSD_STEP) if _is_of_mixer(group) else group
    for kind in readers:
        if kind in weights:
            out[kind] = weights[kind] * scales
    divided = _divided(weights, group)
    if divided is None:
        return None
    _divide(out, divided, divisors(divided, scales, weights.kind))
    return out


def _divided(weights: Weights, group: tuple[TensorType, ...]) -> TensorType | None:
    """The norm or matrix before a group that can absorb the division of its inputs."""
    in_front = _norm_in_front(weights, group)
    if in_front is not None:
        return in_front
    if group == (T.ATTN_OUT,):
        of = weights.kind
        if of.value_norm or of.values_are_keys or of.kv_source or of.qkv_limit:
            return None  # a norm or limit takes the factor back; keys, other layers do not change
        return T.V_UP if of.latent_rank else T.V
    if group == (T.FFN_DOWN,) and T.FFN_GATE in weights:
        return T.FFN_UP
    return None  # neither a plain FFN's activation nor the stream itself can absorb a factor


def divisors(divided: TensorType, scales: Float32Array, of: LayerKind) -> Float32Array:
    """Return what the rows of a norm or matrix are divided by: heads that share values share it."""
    if divided != T.V:
        return scales
    return scales.reshape(-1, _n_shared(of), of.head_dim)[:, 0].ravel()


def _norm_in_front(weights: Weights, group: tuple[TensorType, ...]) -> TensorType | None:
    """The norm that only this group reads, whose weights can absorb a factor of each input."""
    if group == (T.ATTN_OUT,):
        kind = T.ATTN_SUB_NORM
    elif group == (T.SSD_OUT,):
        kind = T.SSD_NORM
    elif group == (T.FFN_DOWN,):
        kind = T.FFN_SUB_NORM
    elif weights.is_shared_norm or (not _is_of_mixer(group) and weights.kind.n_experts):
        return None  # router and experts read the norm, too
    else:
        kind = T.ATTN_NORM if _is_of_mixer(group) else T.FFN_NORM
    return kind if kind in weights else None


def _is_of_mixer(group: tuple[TensorType, ...]) -> bool:
    """Does it read what the mixer reads?"""
    return T.Q in group or T.SSD_IN in group


def rotate_heads(weights: Weights) -> Weights | None:
    """Rotate the values of each head, and rotate them back in the attention's output matrix.

    None if the head dimension is not a power of two, or a norm, limit or gate is between the two.
    """
    n = weights.kind.head_dim
    kind = weights.kind
    is_apart = kind.value_norm or kind.qkv_limit or {T.ATTN_SUB_NORM, T.MIX_GATE} & weights.keys()
    if n < 2 or n & (n - 1) or is_apart or T.V not in weights:
        return None
    turn = hadamard(n)
    out = weights.changed()
    values = weights[T.V]
    out[T.V] = np.ascontiguousarray(
        np.einsum("ij,hjc->hic", turn, values.reshape(-1, n, values.shape[1])).reshape(values.shape)
    )
    if T.V_BIAS in weights:
        out[T.V_BIAS] = (weights[T.V_BIAS].reshape(-1, n) @ turn.T).ravel()
    output = weights[T.ATTN_OUT]
    out[T.ATTN_OUT] = (output.reshape(len(output), -1, n) @ turn.T).reshape(output.shape)
    return out


def _divide(weights: Weights, kind: TensorType, scales: Float32Array) -> None:
    """Divide rows of a matrix, or a vector, and its bias by ``scales``."""
    values = weights[kind]
    weights[kind] = values / (scales if values.ndim == 1 else scales[:, None])
    bias = BIASES.get(kind)
    if bias is not None and bias in weights:
        weights[bias] = weights[bias] / scales


def _n_shared(kind: LayerKind) -> int:
    """Heads that share the values of one KV head."""
    return kind.n_heads // kind.n_kv_heads


def _scales(
    energies: NDArray[np.float64], exponent: float, group: tuple[TensorType, ...], kind: LayerKind
) -> Float32Array:
    """Return rms ^ exponent of each input, around 1."""
    if group == (T.ATTN_OUT,) and not kind.latent_rank:
        shared = energies.reshape(-1, _n_shared(kind), kind.head_dim).mean(axis=1)
        energies = np.repeat(shared.reshape(-1, 1, kind.head_dim), _n_shared(kind), axis=1).ravel()
    floor = energies.max() * 1e-8
    if floor <= 0:
        return np.ones(len(energies), np.float32)
    logs = 0.5 * exponent * np.log(np.maximum(energies, floor))
    logs -= (logs.max() + logs.min()) / 2
    return np.asarray(np.exp(np.clip(logs, -_LARGEST_LOG, _LARGEST_LOG)), np.float32)


def _error(
    weights: Mapping[TensorType, Float32Array],
    group: tuple[TensorType, ...],
    dtypes: Mapping[TensorType, Dtype],
    energies: NDArray[np.float64],
) -> float:
    """Squared error of rounding to nearest, weighted by the energy of each column's input."""
    total = 0.0
    of_columns = energies.astype(np.float32)
    for kind in group:
        rows = weights[kind][:: max(1, len(weights[kind]) // _MOST_ROWS)]
        stored = np.empty_like(rows)
        try:
            quantise_rows(
                dtypes[kind],
                np.ascontiguousarray(rows),
                weights=of_columns if dtypes[kind] not in _PLAIN else None,
                stored=stored,
            )
        except UnrepresentableError:
            return math.inf
        stored -= rows
        stored *= stored
        total += (
            float(stored.sum(axis=0, dtype=np.float64) @ energies) * len(weights[kind]) / len(rows)
        )
    return total


def _rotated(inputs: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """The sums of input x input, with the inputs of each head rotated."""
    turn = hadamard(head_dim).astype(np.float64)
    n_heads = len(inputs) // head_dim
    grid = inputs.reshape(n_heads, head_dim, n_heads, head_dim)
    turned: NDArray[np.float64] = np.einsum("ij,hjgk,lk->higl", turn, grid, turn, optimize=True)
    return turned.reshape(inputs.shape)


def hadamard(n: int) -> Float32Array:
    """Sylvester's matrix of n rows, scaled to be orthogonal."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / math.sqrt(n), np.float32)
