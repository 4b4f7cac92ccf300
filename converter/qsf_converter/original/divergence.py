"""Compares the predictions of two models, from logits of one part of the vocabulary at a time.

KL(p || q) needs the sum of exp(logit) of both models and the sum of p * (difference of the logits).
All three are accumulated over the parts, relative to the largest logit so far, so memory never
holds a whole row of logits.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qsf_converter.sources.checkpoint import Float32Array

_Float64Array = NDArray[np.float64]


class Divergence:
    def __init__(self, tokens: NDArray[np.integer]) -> None:
        self._next = tokens[:, 1:]
        shape = self._next.shape
        self._largest = np.full((2, *shape), -np.inf)
        self._sums = np.zeros((2, *shape))  # of exp(logit - largest)
        self._product = np.zeros(shape)  # of exp(original - its largest) * (original - changed)
        self._chosen = np.zeros((2, *shape))  # logits of the actual token
        self._likeliest = np.zeros((2, *shape), np.int64)

    def add(self, sample: int, start: int, original: Float32Array, changed: Float32Array) -> None:
        wanted = self._next[sample]
        at = np.flatnonzero((wanted >= start) & (wanted < start + original.shape[1]))
        models: tuple[NDArray[np.floating], ...] = (original[:-1].astype(np.float64), changed[:-1])
        for i, logits in enumerate(models):
            best = logits.argmax(axis=1)
            largest = logits[np.arange(len(logits)), best]
            before = self._largest[i, sample]
            self._likeliest[i, sample][largest > before] = start + best[largest > before]
            now = np.maximum(before, largest)
            shrink = np.exp(before - now)
            grown = np.exp(logits - now[:, None])
            self._sums[i, sample] = self._sums[i, sample] * shrink + grown.sum(axis=1)
            self._largest[i, sample] = now
            self._chosen[i, sample][at] = logits[at, wanted[at] - start]
            if i == 0:
                gained = (grown * (original[:-1] - changed[:-1])).sum(axis=1)
                self._product[sample] = self._product[sample] * shrink + gained

    @property
    def n_tokens(self) -> int:
        return self._next.size

    @property
    def kl(self) -> _Float64Array:
        """KL(original || changed) in nats, [n_samples, n_tokens - 1]."""
        log_sums = np.log(self._sums) + self._largest
        kl: _Float64Array = self._product / self._sums[0] - log_sums[0] + log_sums[1]
        return kl

    @property
    def perplexities(self) -> tuple[float, float]:
        losses = np.log(self._sums) + self._largest - self._chosen
        original, changed = np.exp(losses.mean(axis=(1, 2)))
        return float(original), float(changed)

    @property
    def top1_agreement(self) -> float:
        return float((self._likeliest[0] == self._likeliest[1]).mean())
