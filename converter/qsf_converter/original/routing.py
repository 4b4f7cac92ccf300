"""Routing: which experts of a layer a token uses, and their weights (docs/format.md, section 7)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsf.file.kinds import ExpertScore, ExpertWeights, GroupScore, LayerKind
from qsf.file.layout import TensorType
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType


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
