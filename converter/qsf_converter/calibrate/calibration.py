"""Rounds a model layer by layer; each layer compensates for the error of its input.

Two residual streams go through the layers: the original's and the rounded model's. For each group
of matrices that read the same input, sums over the calibration text are computed for both streams,
and the group is rounded with these sums (``compensation``). Then both streams go through the
group, the second one through the rounded matrices. Before a layer is rounded it may be changed
into an equivalent one that rounds better (``transforms``). Memory holds one layer, its sums and
the streams, whatever the model's size.

Nothing is fitted to the held-out samples of the text. At the end they measure how far the rounded
model is from the original.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import EXACT, FINAL_UNIT, FINE, OWN_TABLE_UNIT, Dtype, Role, TensorType, UnitId
from qsf_converter.calibrate import transforms
from qsf_converter.calibrate.changes import Changes
from qsf_converter.calibrate.compensation import InputSums, Rounded, Rounding, round_plainly
from qsf_converter.calibrate.sensitivity import Divergence, round_matrix
from qsf_converter.calibrate.state import CalibrationState
from qsf_converter.original.layers import Original, for_each
from qsf_converter.original.weights import Choice, Weights, route
from qsf_converter.rounding.pieces import (
    Piece,
    RoundedPiece,
    RoundedTensor,
    RoundedUnit,
    kept_tensor,
    read_rows,
    read_tensor,
    round_plain,
    rounded_units,
)
from qsf_converter.rounding.plan import Plan, PlannedUnit, Target
from qsf_converter.rounding.quantisers import UnrepresentableError
from qsf_converter.rounding.tiles import dequantise_tiles
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array
from qsf_converter.sources.families.rules import INPUT_GROUPS, Place

T = TensorType
Group = tuple[TensorType, ...]

_FINE_HEADS: Final = (Dtype.F32, Dtype.F16, Dtype.Q8)  # not worth a pass of the original
HEAD_ROWS: Final = 16384  # of the head at once
_SAMPLES_AT_ONCE: Final = 8  # in sums
LEAST_TOKENS: Final = 64  # tokens for fitting that feedback of an expert needs
_SAMPLES_TO_CHOOSE: Final = 16  # enough samples to choose transforms, and for a tied head

FEEDBACK: Final = "feedback"


@dataclass(slots=True)
class Streams:
    """Both residual streams before a layer: ``whole`` [n_samples, n_tokens, width] each."""

    whole: tuple[Float32Array, Float32Array]
    exact: Float32Array  # views, [n_samples, n_tokens, dim]
    rounded: Float32Array
    beside: tuple[Float32Array, Float32Array]  # views of their further columns

    @classmethod
    def of(cls, original: Original, whole: tuple[Float32Array, Float32Array]) -> Streams:
        (exact, beside_exact), (rounded, beside_rounded) = map(original.parts, whole)
        return cls(whole, exact, rounded, (beside_exact, beside_rounded))


_Mixed = dict[TensorType, Float32Array]
_OUTS: Final = (T.ATTN_OUT, T.SSD_OUT)  # of mixers


@dataclass(slots=True)
class _Side:
    """A layer in one of both models: its weights, its stream, and by sample what is not computed
    anew from the stream: the inputs of the mixer's output matrices; in a parallel layer the stream
    before attention, [n_tokens, dim]; if the layer has experts, the output of its dense part.
    """

    weights: Weights
    xs: Float32Array  # [n_samples, n_tokens, dim]
    beside: Float32Array
    mixed: dict[int, _Mixed] = field(default_factory=dict)  # [n_tokens, n_inputs]
    before: dict[int, Float32Array] = field(default_factory=dict)
    dense: dict[int, Float32Array] = field(default_factory=dict)
    ffn_inputs: Float32Array | None = None  # in a layer that has experts

    def dense_outputs(self) -> Float32Array:
        if not self.dense:
            return np.zeros_like(self.xs)
        return np.stack([self.dense[i] for i in range(len(self.xs))])


@dataclass(slots=True)
class _Routed:
    """The experts of a layer in one of both models; ``inputs`` and ``total``, the sum of their
    outputs, are [n_tokens, dim], of all samples.
    """

    weights: Weights
    choice: Choice
    inputs: Float32Array
    total: Float32Array

    @classmethod
    def of(cls, original: Original, side: _Side) -> _Routed:
        assert side.ffn_inputs is not None
        of_router, inputs = (
            of.reshape(-1, of.shape[-1])
            for of in original.routed_inputs(side.weights, side.ffn_inputs, side.xs)
        )
        choice = route(side.weights.kind, side.weights, of_router)
        return cls(side.weights, choice, inputs, np.zeros_like(inputs))

    def add(self, original: Original, number: int, expert: Weights) -> None:
        """Add the outputs of an expert for the tokens that chose it."""
        tokens, shares = self.choice.tokens_of(number)
        if len(tokens):
            hidden = original.ffn_hidden(expert, self.inputs[tokens])
            self.total[tokens] += shares * original.ffn_output(expert, hidden)


_Sides = tuple[_Side, _Side]  # of the original, and of the rounded model


class Calibration:
    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        fitted: NDArray[np.integer],
        held_out: NDArray[np.integer],
        *,
        n_threads: int | None = None,
        state: CalibrationState | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Store token ids [n_samples, n_tokens]: samples to fit to, and held-out samples.

        ``state`` saves finished layers, so that a later call can continue; layers with experts,
        which are not held in memory, are not saved. ``progress`` is called with the source bytes
        of each finished step, several times a layer.
        """
        self._plan = plan
        self._checkpoint = checkpoint
        self._original = Original(plan, checkpoint)
        self._tokens = np.concatenate([fitted, held_out])
        self._n_fitted = len(fitted)
        self._n_threads = n_threads or os.cpu_count() or 1
        self._state = state
        self._advance = progress or (lambda _n_bytes: None)
        self._is_mixture = any(target.unit.role == Role.EXPERT for target in plan.targets)
        self._embedding: list[RoundedPiece] = []  # kept if the head is tied
        self.divergence: Divergence | None = None
        self.changes: Changes = {}  # of the layers so far

    def units(self) -> Iterator[RoundedUnit]:
        """Yield all units in file order; `RoundedUnit` says how to iterate.

        After the last tensor, ``divergence`` is measured on the held-out samples. Raises
        QsfConversionError when a weight cannot be stored or the activations are not finite.
        """
        streams = yield from self._embed()
        n_saved = 0 if self._state is None else self._state.n_layers
        for unit in self._plan.layers:
            if self._original.targets(unit.id.of_expert(0)):
                yield from self._routed_layer(unit, streams)
                continue
            if unit.id.layer < n_saved:
                assert self._state is not None
                self._read_through(unit)
                yield RoundedUnit(unit, self._state.tensors(unit.id.layer, unit.targets))
                self.changes |= self._state.changes(unit.id.layer)
                if unit.id.layer + 1 == n_saved:  # the last saved layer
                    streams = Streams.of(self._original, self._state.streams())
                self._advance(sum(t.source_bytes for t in unit.targets))
                continue
            tensors, _ = self._layer(unit, streams)
            if self._state is not None and not self._is_mixture:
                here = {at: change for at, change in self.changes.items() if at[0] == unit.id.layer}
                self._state.save(unit.id.layer, tensors, streams.whole, here)
            yield RoundedUnit(unit, tensors)
        yield from self._plainly(self._plan.mtp_units)
        units = {unit.id: unit for unit in self._plan.units}
        yield RoundedUnit(units[FINAL_UNIT], self._final(units[FINAL_UNIT], streams))
        yield from self._plainly([units[id] for id in units if id == OWN_TABLE_UNIT])

    # ---- units ----

    def _plainly(self, units: Sequence[PlannedUnit]) -> Iterator[RoundedUnit]:
        for unit in rounded_units(units, self._checkpoint, self._n_threads):
            yield unit
            self._advance(sum(t.source_bytes for t in unit.unit.targets))

    def _embed(self) -> Generator[RoundedUnit, None, Streams]:
        """Yield positions and embeddings; return the residual streams, made from their rows."""
        units = [u for u in self._plan.units if u.place in (Place.POSITIONS, Place.EMBEDDING)]
        whole = self._original.embed(self._tokens)
        streams = Streams.of(self._original, (whole, whole.copy()))
        streams.rounded[:] = 0
        for planned in units:
            rounded: Iterable[RoundedUnit]
            if self._has_coarse_tied_head and planned.place is Place.EMBEDDING:
                rounded = (self._tied_head(planned, whole),)
            else:
                rounded = rounded_units([planned], self._checkpoint, self._n_threads)
            for unit in rounded:
                yield RoundedUnit(planned, self._embedded(unit, streams))
        self._original.keep_embedded(streams.whole[1])
        for table in self._original.targets(OWN_TABLE_UNIT):
            self._original.round_own(streams.whole[1], partial(round_matrix, table.dtype))
        self._advance(sum(t.source_bytes for unit in units for t in unit.targets))
        return streams

    @property
    def _has_coarse_tied_head(self) -> bool:
        dtypes = [t.dtype for t in self._plan.targets if t.rule.place is Place.EMBEDDING]
        return self._plan.facts.arch.tied_head and not {*dtypes} & {*_FINE_HEADS}

    def _tied_head(self, unit: PlannedUnit, embedded: Float32Array) -> RoundedUnit:
        """Return the embedding, rounded as what multiplies the original's final states.

        They are measured before the layers are rounded. Most of what a table of few bits costs, it
        costs as the head.
        """
        (target,) = unit.targets
        original = self._original
        step = max(1, self._n_fitted // _SAMPLES_TO_CHOOSE)
        x = embedded[: self._n_fitted : step]
        for layer in self._plan.layers:
            x = original.layer(original.weights(layer.id), x)
        sums = InputSums(target.n_cols)
        for y in original.final_norm(original.vectors(FINAL_UNIT), x):
            sums.add(y, y, None)
        head = self._head(target, Rounding(sums, self._n_threads))
        return RoundedUnit(unit, [RoundedTensor(target, head, _action(target, ""))])

    def _embedded(self, unit: RoundedUnit, streams: Streams) -> Iterator[RoundedTensor]:
        """Yield the tensors of a unit whose rows are added to the rounded stream."""

        def add(pieces: Iterable[RoundedPiece]) -> Iterator[RoundedPiece]:
            for rounded in pieces:
                self._add_rows(rounded, streams.rounded)
                yield rounded

        for tensor in unit.tensors:
            yield RoundedTensor(tensor.target, add(tensor.pieces), tensor.action)

    def _add_rows(self, rounded: RoundedPiece, stream: Float32Array) -> None:
        """Add rows of the positions or of the embedding to a stream [n_samples, n_tokens, dim]."""
        piece, n_cols = rounded.piece, rounded.piece.target.n_cols
        if piece.target.rule.place is Place.POSITIONS:
            rows = np.frombuffer(rounded.data, "<f2").astype(np.float32).reshape(-1, n_cols)
            stop = min(piece.stop, stream.shape[1])
            if piece.start < stop:
                stream[:, piece.start : stop] += rows[: stop - piece.start]
            return
        rows = dequantise_tiles(piece.target.dtype, rounded.data, piece.n_rows, n_cols)
        here = (self._tokens >= piece.start) & (self._tokens < piece.stop)
        factor = np.float32(self._plan.facts.arch.embedding_factor)
        stream[here] += rows[self._tokens[here] - piece.start] * factor
        if self._plan.facts.arch.tied_head:
            self._embedding.append(rounded)

    def _layer(self, unit: PlannedUnit, streams: Streams) -> tuple[list[RoundedTensor], _Sides]:
        """Round one layer except its experts, and run both streams through it."""
        original = self._original
        targets = {t.rule.target: t for t in unit.targets if t.rule.target is not None}
        dtypes = {kind: target.dtype for kind, target in targets.items()}
        plain = original.weights(unit.id)
        energies = self._energies(plain, streams.whole[0])
        exact, actions, changes = transforms.choose(plain, dtypes, energies)
        self.changes |= {(unit.id.layer, kind): change for kind, change in changes.items()}
        del plain, energies
        stored = exact.changed()
        rounded: dict[TensorType, Rounded] = {}
        for kind in {*EXACT, *FINE, T.Q_UP} & set(targets):  # of no group
            rounded[kind] = round_plainly(targets[kind], exact[kind])
            stored[kind] = rounded[kind].stored
        sides = (
            _Side(exact, streams.exact, streams.beside[0]),
            _Side(stored, streams.rounded, streams.beside[1]),
        )
        layer_bytes = sum(target.source_bytes for target in targets.values())
        for n, group in enumerate(INPUT_GROUPS):
            if group[0] is T.FFN_GATE and exact.kind.n_experts:
                for side in sides:
                    side.ffn_inputs = original.ffn_input(side.weights, side.xs, side.xs)
            if any(kind in exact for kind in group):
                rounding = Rounding(self._sums(group, sides), self._n_threads)
                for kind in group:
                    if kind in exact:
                        rounded[kind] = self._round(rounding, targets[kind], exact[kind])
                        stored[kind] = rounded[kind].stored
                for side in sides:
                    self._pass(group, side)
            self._advance(
                layer_bytes * (n + 1) // len(INPUT_GROUPS) - layer_bytes * n // len(INPUT_GROUPS)
            )
        tensors = [
            RoundedTensor(target, (as_vector(target, exact[kind]),))
            if target.is_vector
            else RoundedTensor(
                target,
                (as_matrix(Piece.whole(target), rounded[kind]),),
                _action(target, actions.get(kind, "")),
            )
            for kind, target in targets.items()
        ]
        return tensors, sides

    def _routed_layer(self, unit: PlannedUnit, streams: Streams) -> Iterator[RoundedUnit]:
        """Yield a layer and its experts, one after another."""
        tensors, sides = self._layer(unit, streams)
        yield RoundedUnit(unit, tensors)
        routed = [_Routed.of(self._original, side) for side in sides]
        for number in range(sides[0].weights.kind.n_experts):
            targets = self._original.targets(unit.id.of_expert(number))
            yield self._expert(number, unit.id.of_expert(number), tuple(targets), routed)
            self._advance(sum(target.source_bytes for target in targets))
        for side, of_side in zip(sides, routed, strict=True):
            dense, total = side.dense_outputs(), of_side.total.reshape(side.xs.shape)
            side.xs[:] = self._original.joined(side.weights, side.xs, side.beside, dense, total)

    def _expert(
        self, number: int, id_: UnitId, targets: tuple[Target, ...], routed: Sequence[_Routed]
    ) -> RoundedUnit:
        """Round an expert with what the fitted tokens that chose it read, and add its outputs."""
        exact, rounded = routed
        assert exact.weights.expert is not None
        weights = exact.weights.expert(number)
        by_kind = {t.rule.target: t for t in targets if t.rule.target is not None}
        n_fitted = self._n_fitted * self._tokens.shape[1]
        tokens, shares = exact.choice.tokens_of(number)
        tokens, shares = tokens[tokens < n_fitted], shares[tokens < n_fitted]
        is_plain = len(tokens) < LEAST_TOKENS
        stored, done = weights.changed(), dict[TensorType, Rounded]()
        z, y = exact.inputs[tokens], rounded.inputs[tokens]
        for group in ((T.FFN_GATE, T.FFN_UP), (T.FFN_DOWN,)):
            if T.FFN_DOWN in group:
                z, y = (self._original.ffn_hidden(w, x) for w, x in ((weights, z), (stored, y)))
            rounding = None
            if not is_plain:
                sums = InputSums(y.shape[1])
                sums.add(z * shares, y * shares, None)
                rounding = Rounding(sums, self._n_threads)
            for kind in (kind for kind in group if kind in weights):
                done[kind] = self._round_expert(rounding, by_kind[kind], weights[kind])
                stored[kind] = done[kind].stored
        exact.add(self._original, number, weights)
        rounded.add(self._original, number, stored)
        tensors = [
            RoundedTensor(target, (as_vector(target, weights[kind]),))
            if target.is_vector
            else RoundedTensor(
                target,
                (as_matrix(Piece.whole(target), done[kind]),),
                None if is_plain or target.dtype == Dtype.MXFP4 else FEEDBACK,
            )
            for kind, target in by_kind.items()
        ]
        share = len(tokens) / max(1, n_fitted)
        return RoundedUnit(PlannedUnit(Place.EXPERT, id_, targets), tensors, share)

    def _round_expert(
        self, rounding: Rounding | None, target: Target, rows: Float32Array
    ) -> Rounded:
        if target.dtype == Dtype.MXFP4:
            kept = kept_tensor(target, self._checkpoint)
            return Rounded(kept.data, rows, kept.errors, 0.0)
        if rounding is not None:
            return self._round(rounding, target, rows)
        try:
            return round_plainly(target, rows)
        except UnrepresentableError as error:
            raise refusal(target, error) from error

    def _final(self, unit: PlannedUnit, streams: Streams) -> Iterator[RoundedTensor]:
        """Yield norm and head, then compare the predictions on the held-out samples."""
        original, dim = self._original, self._plan.facts.header.dim
        vectors = original.vectors(unit.id)
        exact, rounded = (original.final_norm(vectors, whole) for whole in streams.whole)
        head = list(self._embedding)
        rounding: Rounding | None = None
        for target in unit.targets:
            if target.is_vector:
                assert target.rule.target is not None
                yield RoundedTensor(target, (as_vector(target, vectors[target.rule.target]),))
                continue
            if rounding is None:
                sums = InputSums(dim)
                for i in range(self._n_fitted):
                    sums.add(exact[i], rounded[i], None)
                rounding = Rounding(sums, self._n_threads)
            part = list(self._head(target, rounding))
            head += part
            yield RoundedTensor(target, part, _action(target, ""))
        self.divergence = self._compare(head, exact, rounded, vectors)
        self._advance(sum(target.source_bytes for target in unit.targets))

    def _head(self, target: Target, rounding: Rounding) -> Iterator[RoundedPiece]:
        for start in range(0, target.n_rows, HEAD_ROWS):
            piece = Piece(target, start, min(start + HEAD_ROWS, target.n_rows))
            rows = read_rows(piece, self._checkpoint)
            yield as_matrix(piece, self._round(rounding, target, rows))

    def _compare(
        self,
        head: list[RoundedPiece],
        exact: Float32Array,
        rounded: Float32Array,
        vectors: Mapping[TensorType, Float32Array],
    ) -> Divergence:
        """Compare both models' logits of the held-out samples, some rows of the head at a time."""
        held_out = self._tokens[self._n_fitted :]
        divergence = Divergence(held_out)
        for part in head:
            piece = part.piece
            rows = read_rows(piece, self._checkpoint)
            stored = dequantise_tiles(piece.target.dtype, part.data, *rows.shape)
            first = piece.target.share.first + piece.start
            for i in range(len(held_out)):
                at = self._n_fitted + i
                z, y = (
                    self._original.finish_logits(vectors, products, first)
                    for products in (exact[at] @ rows.T, rounded[at] @ stored.T)
                )
                divergence.add(i, first, z, y)
        return divergence

    # ---- parts of a layer ----

    def _energies(self, w: Weights, x: Float32Array) -> dict[Group, NDArray[np.float64]]:
        """Return sums of y^T y over inputs y of the unchanged layer, from the original's stream."""
        sums: dict[Group, NDArray[np.float64]] = {}

        def observe(kinds: Group, y: Float32Array) -> None:
            product = y.T @ y
            sums[kinds] = sums[kinds] + product if kinds in sums else product.astype(np.float64)

        step = max(1, self._n_fitted // _SAMPLES_TO_CHOOSE)
        kind = dataclasses.replace(w.kind, n_experts=0)  # experts are not compared
        w = Weights(w, kind, layer=w.layer)
        self._original.layer(w, x[: self._n_fitted : step], observe)
        return sums

    def _inputs(self, group: Group, side: _Side, i: int) -> Float32Array:
        """Return a group's input in one sample, [n_tokens, n_inputs]."""
        original, w, x = self._original, side.weights, side.xs[i]
        if T.Q in group:
            return original.attention_input(w, original.layer_input(w, x))
        if group[0] in _OUTS:
            return side.mixed[i][group[0]]
        y = original.ffn_input(w, side.before.get(i, x), x)
        return original.ffn_hidden(w, y) if T.FFN_DOWN in group else y

    def _sums(self, group: Group, sides: _Sides) -> InputSums:
        exact, rounded = sides
        post = {**dict.fromkeys(_OUTS, T.POST_ATTN_NORM), T.FFN_DOWN: T.POST_FFN_NORM}.get(group[0])
        # Before the addition to the stream, a norm changes the matrix's output.
        is_adding = post is not None and not {post, T.DENSE_POST_NORM} & exact.weights.keys()
        sums: InputSums | None = None
        for start in range(0, self._n_fitted, _SAMPLES_AT_ONCE):
            here = range(start, min(start + _SAMPLES_AT_ONCE, self._n_fitted))
            inputs: tuple[list[Float32Array], ...] = tuple([exact.xs[0]] * len(here) for _ in sides)

            def compute(k: int, here: range = here, inputs: Any = inputs) -> None:
                for of_side, side in zip(inputs, sides, strict=True):
                    of_side[k] = self._inputs(group, side, here[k])

            for_each(len(here), compute)
            z, y = (np.concatenate(of_side) for of_side in inputs)
            lacking = None
            if is_adding:
                at = slice(here.start, here.stop)
                lacking = (exact.xs[at] - rounded.xs[at]).reshape(len(y), -1)
                lacking /= np.float32(exact.weights.kind.residual_factor)
            sums = sums or InputSums(y.shape[1])
            sums.add(z, y, lacking)
        assert sums is not None  # there is at least one sample
        return sums

    def _pass(self, group: Group, side: _Side) -> None:
        """Run the stream of all samples through a group of matrices."""
        original, w, xs = self._original, side.weights, side.xs

        def advance(i: int) -> None:
            if T.Q in group:
                xs[i] = original.layer_input(w, xs[i])
                side.mixed[i] = original.mixed(
                    w, original.attention_input(w, xs[i]), side.beside[i]
                )
            elif group[0] in _OUTS:
                if w.kind.is_parallel and i not in side.before:
                    side.before[i] = xs[i].copy()
                xs[i] += original.mixer_output(w, group[0], side.mixed[i].pop(group[0]))
            elif T.FFN_DOWN in group:
                y = original.ffn_output(w, self._inputs(group, side, i))
                side.before.pop(i, None)
                if w.kind.n_experts:
                    side.dense[i] = y
                else:
                    xs[i] = original.joined(w, xs[i], side.beside[i], y)

        for_each(len(xs), advance)

    def _round(self, rounding: Rounding, target: Target, rows: Float32Array) -> Rounded:
        try:
            has_table = target.outliers is not None and target.outliers.has_table
            return rounding.round(target.dtype, rows, has_table=has_table)
        except UnrepresentableError as error:
            raise refusal(target, error) from error

    def _read_through(self, unit: PlannedUnit) -> None:
        """Read a layer that an earlier call has rounded, for the digest of the weights."""
        for target in unit.targets:
            read_tensor(target, self._checkpoint)


def as_vector(target: Target, values: Float32Array) -> RoundedPiece:
    """Return a norm or bias [n] with its values in the file."""
    try:
        return round_plain(Piece.whole(target), values[None])
    except UnrepresentableError as error:
        raise QsfConversionError(
            f"tensor {target.source.name} at {[error.col]}: {error.reason}"
        ) from error


def refusal(target: Target, error: UnrepresentableError) -> QsfConversionError:
    return QsfConversionError(
        f"tensor {target.source.name}, row {error.row}, column {error.col} of "
        f"{target.name}: {error.reason}"
    )


def as_matrix(piece: Piece, rounded: Rounded) -> RoundedPiece:
    return RoundedPiece(piece, rounded.tiles, rounded.errors, rounded.entries, rounded.output_error)


def _action(target: Target, transform: str) -> str:
    feedback = "" if target.dtype in (Dtype.F16, Dtype.F32) else FEEDBACK
    return ", ".join(filter(None, (transform, feedback)))
