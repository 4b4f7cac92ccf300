# SPDX-License-Identifier: Apache-2.0
"""Routed layers of the reference: which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose among the experts of a layer."""

    n_experts: int
    n_chosen: int
    score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    weights: Literal["as_is", "by_sum", "softmax"] = "as_is"  # softmax: over the chosen
    epsilon: float = 0.0  # is added to the sum that weights are divided by
    factor: float = 1.0
    n_groups: int = 1
    n_groups_kept: int = 1
    group_score: Literal["max", "sum_of_2"] = "max"


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token in ascending order: indices and weights [n_tokens, n_chosen]."""

    experts: NDArray[np.intp]
    weights: Array


def scores_of(logits: Array, kind: str) -> Array:
    """Scores [n_tokens, n_experts] of the router's products."""
    if kind == "softmax":
        return _softmax(logits)
    return np.asarray(1 / (1 + np.exp(-logits))) if kind == "sigmoid" else logits


def choose(logits: Array, bias: Array | None, routing: Routing) -> Choice:
    """Choose by `logits` [n_tokens, n_experts]; `bias` [n_experts] has a say in the choice only."""
    scores = scores_of(logits, routing.score)
    ranked = scores if bias is None else scores + bias
    if routing.n_groups > 1:
        grouped = ranked.reshape(len(ranked), routing.n_groups, -1)
        best = np.sort(grouped, axis=2)[:, :, ::-1]
        of_group = best[:, :, : 1 if routing.group_score == "max" else 2].sum(axis=2)
        kept = _largest(of_group, routing.n_groups_kept)
        is_kept = np.zeros(of_group.shape, bool)
        np.put_along_axis(is_kept, kept, True, axis=1)
        ranked = np.where(is_kept[:, :, None], grouped, -np.inf).reshape(ranked.shape)
    experts = np.sort(_largest(ranked, routing.n_chosen), axis=1)
    weights = np.take_along_axis(scores, experts, axis=1)
    if routing.weights == "softmax":
        weights = _softmax(weights)
    elif routing.weights == "by_sum":
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / (total + weights.dtype.type(routing.epsilon))
    return Choice(experts, weights * weights.dtype.type(routing.factor))


def _largest(values: Array, n: int) -> NDArray[np.intp]:
    """The places of the n largest of each row; of equals the lower ones."""
    return np.argsort(-values, axis=1, kind="stable")[:, :n]


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
