"""Rounds the experts of a layer, each with the tokens that its router sends to it.

The original's router decides, and its weights count. An expert with few tokens is rounded without
feedback: its sums would describe these tokens rather than its inputs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsf.file.layout import TensorType
from qsf_converter.calibrate.compensation import InputSums, Rounded, Rounding
from qsf_converter.original.layers import Original
from qsf_converter.original.routing import Choice, route
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.plan import Target
from qsf_converter.rounding.quantisers import ErrorSums, quantise_rows
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType

LEAST_TOKENS: Final = 64  # tokens for fitting that feedback needs

# Rounds a matrix with the sums of its inputs; None: to nearest.
Round = Callable[[Rounding | None, Target, Float32Array], Rounded]


@dataclass(frozen=True, slots=True)
class RoundedExpert:
    number: int
    weights: Weights  # of the original
    rounded: dict[TensorType, Rounded]  # of its matrices
    share: float  # of the tokens that chose it
    is_plain: bool  # was rounded to nearest, for lack of tokens


class RoutedPart:
    """The experts of one layer, and their inputs [n_tokens, dim] in both models."""

    def __init__(
        self,
        original: Original,
        exact: Weights,
        stored: Weights,
        of_router: tuple[Float32Array, Float32Array],
        inputs: tuple[Float32Array, Float32Array],
        n_fitted: int,
    ) -> None:
        """Store the layer, the inputs of router and experts, and the number of fitted tokens."""
        self._original = original
        self._exact, self._stored = exact, stored
        self._z, self._y = inputs
        self._n_fitted = n_fitted
        kind = exact.kind
        self._of_exact = route(kind, exact, of_router[0])
        self._of_rounded = route(kind, stored, of_router[1])

    def round_into(
        self,
        targets: Callable[[int], dict[TensorType, Target]],
        round_: Round,
        n_threads: int,
        streams: tuple[Float32Array, Float32Array],
    ) -> Iterator[RoundedExpert]:
        """Yield each expert, rounded, whose output is then in both streams [n_tokens, dim]."""
        assert self._exact.expert is not None
        for number in range(self._exact.kind.n_experts):
            weights = self._exact.expert(number)
            yield self._rounded(number, weights, targets(number), round_, n_threads, streams)

    def _rounded(
        self,
        number: int,
        exact: Weights,
        targets: dict[TensorType, Target],
        round_: Round,
        n_threads: int,
        streams: tuple[Float32Array, Float32Array],
    ) -> RoundedExpert:
        tokens, share_of = self._of_exact.tokens_of(number)
        is_fitted = tokens < self._n_fitted
        tokens, share_of = tokens[is_fitted], share_of[is_fitted]
        is_plain = len(tokens) < LEAST_TOKENS
        stored, rounded = exact.changed(), dict[TensorType, Rounded]()

        def round_group(kinds: tuple[TensorType, ...], z: Float32Array, y: Float32Array) -> None:
            rounding = None
            if not is_plain:
                sums = InputSums(y.shape[1])
                sums.add(z * share_of, y * share_of, None)
                rounding = Rounding(sums, n_threads)
            for kind in kinds:
                rounded[kind] = round_(rounding, targets[kind], exact[kind])
                stored[kind] = rounded[kind].stored

        z, y = self._z[tokens], self._y[tokens]
        round_group(tuple(kind for kind in (T.FFN_GATE, T.FFN_UP) if kind in exact), z, y)
        hidden = (self._original.ffn_hidden(w, x) for w, x in ((exact, z), (stored, y)))
        round_group((T.FFN_DOWN,), *hidden)
        for choice, w, inputs, stream in (
            (self._of_exact, exact, self._z, streams[0]),
            (self._of_rounded, stored, self._y, streams[1]),
        ):
            self._add(choice, number, w, inputs, stream)
        share = len(tokens) / max(1, self._n_fitted)
        return RoundedExpert(number, exact, rounded, share, is_plain)

    def _add(
        self, choice: Choice, number: int, w: Weights, inputs: Float32Array, stream: Float32Array
    ) -> None:
        tokens, weights = choice.tokens_of(number)
        if len(tokens):
            hidden = self._original.ffn_hidden(w, inputs[tokens])
            stream[tokens] += weights * self._original.ffn_output(w, hidden)


def round_plainly(target: Target, rows: Float32Array) -> Rounded:
    """Round a matrix to nearest, without sums of its inputs."""
    errors, stored = ErrorSums(), np.empty_like(rows)
    tiles = quantise_rows(target.dtype, rows, errors, stored=stored)
    return Rounded(tiles, stored, errors, 0.0)
