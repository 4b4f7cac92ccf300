"""Rounds a model with error feedback after one pass of the original over a short text.

A calibration (``calibration``) sends two streams through the layers, so that each layer makes up
for the errors of those before. This takes a tenth of its time: the original alone computes the text
once, layer by layer, and the columns of each matrix make up for one another's errors under the sums
y^T y of its inputs (GPTQ, Frantar et al. 2022). Wide inputs are cut into parts of neighbouring
columns, which know nothing of each other: a factor takes the cube of its columns.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import FINAL_UNIT, HEAD_COLS, Dtype, TensorType
from qsf_converter.calibrate.calibration import (
    FEEDBACK,
    HEAD_ROWS,
    as_matrix,
    as_vector,
    refusal,
)
from qsf_converter.calibrate.compensation import (
    DAMPING,
    LEAST_DAMPING,
    activation_order,
    damp,
    inverse_factor,
    round_plainly,
    row_ranges,
)
from qsf_converter.original.layers import Original, for_each
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.pieces import (
    Piece,
    RoundedPiece,
    RoundedTensor,
    RoundedUnit,
    read_rows,
    rounded_units,
)
from qsf_converter.rounding.plan import Plan, PlannedUnit, Target
from qsf_converter.rounding.quantisers import ErrorSums, UnrepresentableError, feedback_rows
from qsf_converter.rounding.tiles import TILE_ROWS, bits_per_weight
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array
from qsf_converter.sources.families.rules import Place

_PART_COLS: Final = 2048  # of an input, that make up for one another's errors
_COARSE_BITS: Final = 8  # types of more bits lose nothing that feedback could mend


@dataclass(slots=True)
class _Part:
    """Neighbouring columns of an input, and what feedback makes of their sums y^T y."""

    cols: slice
    order: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    factor: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))
    costs: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))

    def factorise(self, sums: Float32Array, damping: float) -> None:
        diagonal = np.diag(sums).astype(np.float64)
        if not np.isfinite(diagonal).all():
            raise QsfConversionError("the activations on the calibration text are not finite")
        self.order = activation_order(diagonal)
        self.factor = inverse_factor(damp(sums[np.ix_(self.order, self.order)], damping))
        self.costs = np.empty(len(self.order), np.float32)
        self.costs[self.order] = np.diag(self.factor) ** -2


class _Input:
    """What matrices of one layer read: [n_tokens, n_inputs]."""

    def __init__(self, y: Float32Array) -> None:
        n_inputs = y.shape[1]
        n_parts = -(-n_inputs // _PART_COLS)
        whole = max(HEAD_COLS.values())
        width = -(-n_inputs // n_parts // whole) * whole
        starts = range(0, n_inputs, width)
        self.y = y
        self.parts = [_Part(slice(at, min(at + width, n_inputs))) for at in starts]

    def factorise(self, part: _Part) -> None:
        here = self.y[:, part.cols]
        n_tokens, n_inputs = here.shape
        part.factorise(here.T @ here, max(LEAST_DAMPING, DAMPING * n_inputs / n_tokens))

    def round(self, dtype: Dtype, weights: Float32Array, n_threads: int) -> tuple[bytes, ErrorSums]:
        """Return the tiles of ``weights`` [n_rows, n_inputs], and the errors."""
        n_tile_rows = -(-len(weights) // TILE_ROWS)

        def band(rows: slice, part: _Part) -> tuple[bytes, ErrorSums]:
            errors = ErrorSums()
            here = np.ascontiguousarray(weights[rows, part.cols])
            factor, order, costs = part.factor, part.order, part.costs
            return feedback_rows(dtype, here, factor, order, errors, weights=costs), errors

        jobs = [(rows, part) for part in self.parts for rows in row_ranges(len(weights))]
        with ThreadPoolExecutor(n_threads) as pool:
            bands = list(pool.map(lambda job: band(*job), jobs))
        n_bands = len(jobs) // len(self.parts)
        of_parts = [
            np.frombuffer(b"".join(tiles for tiles, _ in bands[i : i + n_bands]), np.uint8)
            for i in range(0, len(jobs), n_bands)
        ]
        errors = ErrorSums()
        for _, of_band in bands:
            errors.add(of_band)
        tiles = np.concatenate([of.reshape(n_tile_rows, -1) for of in of_parts], axis=1)
        return tiles.tobytes(), errors


class OnePass:
    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        tokens: NDArray[np.integer],
        *,
        n_threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Store token ids [n_samples, n_tokens]. ``progress``: called with source bytes."""
        self._plan, self._checkpoint, self._tokens = plan, checkpoint, tokens
        self._original = Original(plan, checkpoint)
        self._n_threads = n_threads or os.cpu_count() or 1
        self._advance = progress or (lambda _n_bytes: None)

    def units(self) -> Iterator[RoundedUnit]:
        """Yield all units in file order; `RoundedUnit` says how to iterate.

        Raises QsfConversionError when a weight cannot be stored or the activations are not finite.
        """
        layers = {unit.id for unit in self._plan.layers}
        plain: list[PlannedUnit] = []
        x = self._original.embed(self._tokens)
        for unit in self._plan.units:
            is_head = unit.place is Place.FINAL or self._is_tied_head(unit)
            if unit.id not in layers and not is_head:
                plain.append(unit)
                continue
            yield from self._plainly(plain)
            plain = []
            tensors: Iterable[RoundedTensor]
            if not is_head:
                tensors, x = self._layer(unit, x)
            elif unit.place is Place.FINAL:
                tensors = self._final(unit, x)
            else:
                tensors = self._final(unit, self._behind_layers(x))
            yield RoundedUnit(unit, tensors)
            self._advance(sum(target.source_bytes for target in unit.targets))
        yield from self._plainly(plain)

    def _plainly(self, units: Sequence[PlannedUnit]) -> Iterator[RoundedUnit]:
        for unit in rounded_units(units, self._checkpoint, self._n_threads):
            yield unit
            self._advance(sum(target.source_bytes for target in unit.unit.targets))

    def _is_tied_head(self, unit: PlannedUnit) -> bool:
        """True if the embedding multiplies the final states, and feedback can mend its errors."""
        is_tied = self._plan.facts.arch.tied_head and unit.place is Place.EMBEDDING
        return is_tied and any(map(_is_fed, unit.targets))

    def _behind_layers(self, x: Float32Array) -> Float32Array:
        x = x[::2]  # enough for a tied head, which has few columns
        for unit in self._plan.layers:
            x = self._original.layer(self._original.weights(unit.id), x)
        return x

    def _layer(
        self, unit: PlannedUnit, x: Float32Array
    ) -> tuple[list[RoundedTensor], Float32Array]:
        """Round a layer except its experts; return it and the stream behind it."""
        weights = self._original.weights(unit.id)
        after = np.empty_like(x)
        # Experts are read once for all samples.
        step = len(x) if weights.kind.n_experts else 1
        seen: dict[tuple[TensorType, ...], Float32Array] = {}  # [n_samples, n_tokens, n_inputs]

        def compute(i: int) -> None:
            n_seen: Counter[tuple[TensorType, ...]] = Counter()

            def observe(kinds: tuple[TensorType, ...], y: Float32Array) -> None:
                of_all = seen.setdefault(kinds, np.empty((*x.shape[:2], y.shape[-1]), np.float32))
                of_all[i * step + n_seen[kinds]] = y
                n_seen[kinds] += 1

            rows = slice(i * step, (i + 1) * step)
            after[rows] = self._original.layer(weights, x[rows], observe)

        for_each(len(x) // step, compute, n_threads=self._n_threads)
        inputs: dict[TensorType, _Input] = {}
        for kinds, of_all in seen.items():
            inputs |= dict.fromkeys(kinds, _Input(of_all.reshape(-1, of_all.shape[-1])))
        parts = [
            (one, part)
            for one in {id(one): one for one in inputs.values()}.values()
            for part in one.parts
        ]
        for_each(
            len(parts), lambda i: parts[i][0].factorise(parts[i][1]), n_threads=self._n_threads
        )
        return [self._tensor(target, weights, inputs) for target in unit.targets], after

    def _final(self, unit: PlannedUnit, x: Float32Array) -> Iterator[RoundedTensor]:
        vectors = self._original.vectors(FINAL_UNIT)
        y = self._original.final_norm(vectors, x)
        one = _Input(y.reshape(-1, y.shape[-1]))
        for part in one.parts:
            one.factorise(part)
        for target in unit.targets:
            kind = target.rule.target
            assert kind is not None
            if target.is_vector:
                yield RoundedTensor(target, (as_vector(target, vectors[kind]),))
            else:
                action = FEEDBACK if _is_fed(target) else None
                yield RoundedTensor(target, self._head(target, one), action)

    def _head(self, target: Target, one: _Input) -> Iterator[RoundedPiece]:
        for start in range(0, target.n_rows, HEAD_ROWS):
            piece = Piece(target, start, min(start + HEAD_ROWS, target.n_rows))
            yield self._rounded(piece, read_rows(piece, self._checkpoint), one)

    def _tensor(
        self, target: Target, weights: Weights, inputs: Mapping[TensorType, _Input]
    ) -> RoundedTensor:
        kind = target.rule.target
        assert kind is not None  # only learned positions have none
        if target.is_vector:
            return RoundedTensor(target, (as_vector(target, weights[kind]),))
        piece = self._rounded(Piece.whole(target), weights[kind], inputs.get(kind))
        is_fed = kind in inputs and _is_fed(target)
        return RoundedTensor(target, (piece,), FEEDBACK if is_fed else None)

    def _rounded(self, piece: Piece, rows: Float32Array, one: _Input | None) -> RoundedPiece:
        target = piece.target
        try:
            if one is None or not _is_fed(target):
                return as_matrix(piece, round_plainly(target, rows))
            return RoundedPiece(piece, *one.round(target.dtype, rows, self._n_threads))
        except UnrepresentableError as error:
            raise refusal(target, error) from error


def _is_fed(target: Target) -> bool:
    return bits_per_weight(target.dtype) < _COARSE_BITS
