"""Rounds a model layer by layer, each knowing what the layers before it have done to its input.

Two residual streams go through the layers: the original's and the rounded model's. For each group
of matrices that read the same input, sums over the calibration text are taken of both, and the
group is rounded by them (``compensation``); then both streams go on, the second through the
rounded matrices. Before, the layer may be changed into an equivalent one that rounds better
(``transforms``). Memory holds one layer, its sums and the streams, whatever the model's size.

Some windows of the text are held out: nothing is fitted to them, and in the end they say how far
the rounded model is from the original.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import Dtype, TensorType
from qsf_converter.calibrate import transforms
from qsf_converter.calibrate.compensation import InputSums, Rounded, Rounding
from qsf_converter.calibrate.state import CalibrationState
from qsf_converter.original.divergence import Divergence
from qsf_converter.original.layers import INPUT_GROUPS, Original, Weights, for_each, linear
from qsf_converter.rounding.pieces import Piece, plain_rows, quantised_pieces, read_target
from qsf_converter.rounding.plan import Plan, Target
from qsf_converter.rounding.quantisers import UnrepresentableError
from qsf_converter.rounding.tiles import dequantise_tiles
from qsf_converter.sources.architectures import Place
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array

T = TensorType
Group = tuple[TensorType, ...]
Written = tuple[Piece, bytes]

_HEAD_ROWS: Final = 16384  # of the head at once
_WINDOWS_AT_ONCE: Final = 8  # in sums
_WINDOWS_TO_CHOOSE: Final = 16  # transforms by: they need no more

FEEDBACK: Final = "feedback"


@dataclass(slots=True)
class Streams:
    """The residual streams [n_windows, n_tokens, dim] in front of a layer."""

    exact: Float32Array
    rounded: Float32Array


@dataclass(slots=True)
class _Heads:
    """What the attention's output matrix reads, of all windows; the other inputs are recomputed."""

    exact: dict[int, Float32Array] = field(default_factory=dict)  # [n_tokens, heads * head_dim]
    rounded: dict[int, Float32Array] = field(default_factory=dict)


class Calibration:
    """The rounding of one model on one text."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        windows: NDArray[np.integer],
        held_out: NDArray[np.integer],
        *,
        n_threads: int | None = None,
        state: CalibrationState | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Take token ids: windows [n_windows, n_tokens] to fit to, and held-out ones.

        ``state`` keeps what is done, for a later call to go on from. ``progress`` is called with
        the source bytes that are done, also within a layer.
        """
        self._plan = plan
        self._checkpoint = checkpoint
        self._original = Original(plan, checkpoint)
        self._tokens = np.concatenate([windows, held_out])
        self._n_fitted = len(windows)
        self._n_threads = n_threads or os.cpu_count() or 1
        self._state = state
        self._progress = progress
        self._done_bytes = 0
        self._embedding: list[tuple[Piece, bytes]] = []  # kept for a tied head
        self.divergence: Divergence | None = None

    def pieces(self) -> Iterator[Written]:
        """Yield all tensors in file order; see ``Piece`` for what is known of each.

        Afterwards ``divergence`` is what the held-out windows say. Raises QsfConversionError when
        a weight cannot be stored or the activations are not finite.
        """
        streams = yield from self._embed()
        n_layers = self._plan.facts.header.n_layers
        n_done = 0
        if self._state is not None:
            n_done = self._state.n_layers
        for unit_idx in range(1, n_layers + 1):
            targets = self._original.targets(unit_idx)
            if unit_idx <= n_done:
                assert self._state is not None
                self._read_through(targets)
                yield from self._state.pieces(unit_idx, targets)
                if unit_idx == n_done:
                    streams = Streams(*self._state.streams())
                self._advance(sum(t.source_bytes for t in targets))
                continue
            written = self._layer(unit_idx, streams)
            if self._state is not None:
                self._state.save(unit_idx, written, (streams.exact, streams.rounded))
            yield from written
        yield from self._final(n_layers + 1, streams)

    # ---- units ----

    def _embed(self) -> Generator[Written, None, Streams]:
        """Write the embedding unit; the streams begin with its rows."""
        targets = tuple(self._original.targets(0))
        shape = (*self._tokens.shape, self._plan.facts.header.dim)
        streams = Streams(self._original.embed(self._tokens), np.zeros(shape, np.float32))
        pieces = quantised_pieces(targets, self._checkpoint, self._n_threads)
        for piece, data in pieces:
            yield piece, data
            target = piece.target
            if target.rule.place is Place.POSITIONS:
                rows = np.frombuffer(data, "<f2").astype(np.float32).reshape(-1, target.n_cols)
                stop = min(piece.stop, shape[1])
                if piece.start < stop:
                    streams.rounded[:, piece.start : stop] += rows[: stop - piece.start]
                continue
            rows = dequantise_tiles(target.dtype, data, piece.stop - piece.start, target.n_cols)
            here = (self._tokens >= piece.start) & (self._tokens < piece.stop)
            streams.rounded[here] += rows[self._tokens[here] - piece.start]
            if self._plan.facts.arch.tied_head:
                self._embedding.append((piece, data))
        self._advance(sum(t.source_bytes for t in targets))
        return streams

    def _layer(self, unit_idx: int, streams: Streams) -> list[Written]:
        """Round one layer and take both streams behind it."""
        original = self._original
        targets = {
            t.rule.target: t for t in original.targets(unit_idx) if t.rule.target is not None
        }
        dtypes = {kind: target.dtype for kind, target in targets.items()}
        plain = original.weights(unit_idx)
        energies = self._energies(plain, streams.exact)
        exact, actions = transforms.choose(plain, dtypes, energies, original.header)
        del plain, energies
        stored: Weights = dict(exact)
        rounded: dict[TensorType, Rounded] = {}
        heads = _Heads()
        layer_bytes = sum(target.source_bytes for target in targets.values())
        for n, group in enumerate(INPUT_GROUPS):
            rounding = Rounding(self._sums(group, exact, stored, streams, heads), self._n_threads)
            for kind in group:
                if kind in exact:
                    rounded[kind] = self._round(rounding, targets[kind], exact[kind])
                    stored[kind] = rounded[kind].stored
            self._pass(group, exact, stored, streams, heads)
            self._advance(
                layer_bytes * (n + 1) // len(INPUT_GROUPS) - layer_bytes * n // len(INPUT_GROUPS)
            )
        return [
            _vector(target, exact[kind])
            if target.is_vector
            else _matrix(Piece(target, 0, target.n_rows), rounded[kind], actions.get(kind, ""))
            for kind, target in targets.items()
        ]

    def _final(self, unit_idx: int, streams: Streams) -> Iterator[Written]:
        """Write norm and head; compare the predictions on the held-out windows."""
        original, dim = self._original, self._plan.facts.header.dim
        vectors = original.vectors(unit_idx)
        exact = original.final_norm(vectors, streams.exact)
        rounded = original.final_norm(vectors, streams.rounded)
        table = self._embedding
        for target in original.targets(unit_idx):
            if target.is_vector:
                assert target.rule.target is not None
                yield _vector(target, vectors[target.rule.target])
                continue
            sums = InputSums(dim)
            for i in range(self._n_fitted):
                sums.add(exact[i], rounded[i], None)
            table = list(self._head(target, Rounding(sums, self._n_threads)))
            yield from table
        held = self._tokens[self._n_fitted :]
        divergence = Divergence(held)
        for piece, data in table:
            rows = read_target(piece.target, self._checkpoint, piece)
            stored = dequantise_tiles(piece.target.dtype, data, *rows.shape)
            for i in range(len(held)):
                at = self._n_fitted + i
                divergence.add(i, piece.start, exact[at] @ rows.T, rounded[at] @ stored.T)
        self.divergence = divergence
        self._advance(sum(target.source_bytes for target in original.targets(unit_idx)))

    def _head(self, target: Target, rounding: Rounding) -> Iterator[Written]:
        for start in range(0, target.n_rows, _HEAD_ROWS):
            piece = Piece(target, start, min(start + _HEAD_ROWS, target.n_rows))
            rows = read_target(target, self._checkpoint, piece)
            yield _matrix(piece, self._round(rounding, target, rows), "")

    # ---- parts of a layer ----

    def _energies(self, w: Weights, x: Float32Array) -> dict[Group, NDArray[np.float64]]:
        """Sums of input x input of the unchanged layer, of the original's stream."""
        found: dict[Group, NDArray[np.float64]] = {}

        def observe(kinds: Group, y: Float32Array) -> None:
            product = y.T @ y
            found[kinds] = found[kinds] + product if kinds in found else product.astype(np.float64)

        step = max(1, self._n_fitted // _WINDOWS_TO_CHOOSE)
        self._original.layer(w, x[: self._n_fitted : step], observe)
        return found

    def _inputs(
        self, group: Group, w: Weights, x: Float32Array, heads: Float32Array | None
    ) -> Float32Array:
        """What a group reads in one window, given ``x`` [n_tokens, dim] in front of it."""
        original = self._original
        if T.Q in group:
            return original.attention_input(w, x)
        if T.ATTN_OUT in group:
            assert heads is not None
            return heads
        y = original.ffn_input(w, x)
        return original.ffn_hidden(w, y) if T.FFN_DOWN in group else y

    def _sums(
        self, group: Group, exact: Weights, stored: Weights, streams: Streams, heads: _Heads
    ) -> InputSums:
        is_adding = T.ATTN_OUT in group or T.FFN_DOWN in group
        sums: InputSums | None = None
        for start in range(0, self._n_fitted, _WINDOWS_AT_ONCE):
            here = range(start, min(start + _WINDOWS_AT_ONCE, self._n_fitted))
            inputs = self._inputs_of_both(group, exact, stored, streams, heads, here)
            z, y = (np.concatenate(of) for of in inputs)
            lacking = None
            if is_adding:
                at = slice(here.start, here.stop)
                lacking = (streams.exact[at] - streams.rounded[at]).reshape(len(y), -1)
            sums = sums or InputSums(y.shape[1])
            sums.add(z, y, lacking)
        assert sums is not None  # there is at least one window
        return sums

    def _inputs_of_both(
        self,
        group: Group,
        exact: Weights,
        stored: Weights,
        streams: Streams,
        heads: _Heads,
        here: range,
    ) -> tuple[list[Float32Array], list[Float32Array]]:
        """What a group reads in some windows, in the original and in the rounded model."""
        of_exact, of_rounded = ([streams.exact[0]] * len(here) for _ in range(2))

        def compute(i: int) -> None:
            at = here[i]
            of_exact[i] = self._inputs(group, exact, streams.exact[at], heads.exact.get(at))
            of_rounded[i] = self._inputs(group, stored, streams.rounded[at], heads.rounded.get(at))

        for_each(len(here), compute)
        return of_exact, of_rounded

    def _pass(
        self, group: Group, exact: Weights, stored: Weights, streams: Streams, heads: _Heads
    ) -> None:
        """Take both streams of all windows behind a group of matrices."""
        original = self._original
        for w, xs, of in (
            (exact, streams.exact, heads.exact),
            (stored, streams.rounded, heads.rounded),
        ):

            def advance(
                i: int, w: Weights = w, xs: Float32Array = xs, of: dict[int, Float32Array] = of
            ) -> None:
                if T.Q in group:
                    of[i] = original.heads(w, original.attention_input(w, xs[i]))
                elif T.ATTN_OUT in group:
                    xs[i] += linear(w, T.ATTN_OUT, of.pop(i))
                elif T.FFN_DOWN in group:
                    xs[i] += linear(w, T.FFN_DOWN, self._inputs(group, w, xs[i], None))

            for_each(len(xs), advance)

    def _round(self, rounding: Rounding, target: Target, rows: Float32Array) -> Rounded:
        try:
            has_table = target.outliers is not None and target.outliers.has_table
            return rounding.round(target.dtype, rows, has_table=has_table)
        except UnrepresentableError as error:
            raise QsfConversionError(
                f"tensor {target.source.name}, row {error.row}, column {error.col} of "
                f"{target.name}: {error.reason}"
            ) from error

    def _read_through(self, targets: list[Target]) -> None:
        """Read what an earlier call has rounded, for the digest of the weights."""
        for target in targets:
            read_target(target, self._checkpoint)

    def _advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        if self._progress is not None:
            self._progress(self._done_bytes)


def _vector(target: Target, values: Float32Array) -> Written:
    """A norm or bias as it will lie in the file."""
    piece = Piece(target, 0, 1)
    try:
        return piece, plain_rows(values[None], np.dtype("<f4"), np.inf, piece.errors)
    except UnrepresentableError as error:
        raise QsfConversionError(
            f"tensor {target.source.name} at {[error.col]}: {error.reason}"
        ) from error


def _matrix(piece: Piece, rounded: Rounded, transform: str) -> Written:
    piece.errors = rounded.errors
    feedback = "" if piece.target.dtype in (Dtype.F16, Dtype.F32) else FEEDBACK
    piece.action = ", ".join(filter(None, (transform, feedback)))
    piece.output_error = rounded.output_error
    piece.entries = rounded.entries
    return piece, rounded.tiles
