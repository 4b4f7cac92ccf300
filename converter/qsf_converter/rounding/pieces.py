"""Tensors in pieces of about 32 MB of f32: read, rounded on a few threads, handed over in order.

`rounded_units` yields units, each with its tensors, each with its pieces: the nesting of the file.
The number of pieces in memory is bounded, so memory does not grow with the checkpoint.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import EXACT, Dtype, PackedOutliers, TensorType
from qsf_converter.rounding import outliers as of_matrix
from qsf_converter.rounding import quantisers
from qsf_converter.rounding.outliers import Entries, round_apart, table_mask
from qsf_converter.rounding.plan import OutlierPlan, Plan, PlannedUnit, Target
from qsf_converter.rounding.quantisers import F16_MAX, ErrorSums, UnrepresentableError, absmean
from qsf_converter.rounding.tiles import (
    TILE_ROWS,
    bits_per_weight,
    exact_shifts,
    gguf_tiles,
    mxfp4_tiles,
)
from qsf_converter.sources.checkpoint import (
    MXFP4_COLS,
    MXFP4_OVERFLOWING,
    Checkpoint,
    Float32Array,
    RawArray,
    to_float32,
)
from qsf_converter.sources.families.rules import INPUT_GROUPS, Place

_PIECE_BYTES = 32 << 20  # of f32
# Of matrices that are kept: their arrays stay below the size that the converter returns to the
# system each time, whose page faults took a third of the time.
_KEPT_PIECE_BYTES = 8 << 20
_IN_FLIGHT_BYTES = 128 << 20  # of f32; at least one piece
_SLAB_BYTES = 16 << 20  # bytes of source rows held while columns are gathered
_MAX_THREADS = 4
_LEAST_F16 = 2.0**-24  # above 0
_SAMPLE_TILE_ROWS: Final = 8
# The whole matrix may have more outliers than its sample
_MOST_SAMPLED: Final = 0.8 * of_matrix.MOST_FRACTION


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a tensor, which are read and rounded at once."""

    target: Target
    start: int
    stop: int

    @classmethod
    def whole(cls, target: Target) -> Piece:
        return cls(target, 0, target.n_rows)

    @property
    def n_rows(self) -> int:
        return self.stop - self.start

    @property
    def float_bytes(self) -> int:
        return self.n_rows * self.target.n_cols * 4


@dataclass(frozen=True, slots=True)
class RoundedPiece:
    piece: Piece
    data: bytes
    errors: ErrorSums
    outliers: Entries | None = None  # entries for the sparse outlier table
    output_error: float | None = None  # see ``TensorReport``


@dataclass(frozen=True, slots=True)
class RoundedTensor:
    """One tensor of the file. Its pieces come in the order of the rows."""

    target: Target
    pieces: Iterable[RoundedPiece]
    action: str | None = None  # for the report, if not plain rounding


@dataclass(frozen=True, slots=True)
class RoundedUnit:
    """One unit of the file, or the learned positions. Its tensors come in file order.

    Tensors and pieces are made during the iteration, as in `itertools.groupby`: use all pieces of
    a tensor before the next tensor, and all tensors of a unit before the next unit.
    """

    unit: PlannedUnit
    tensors: Iterable[RoundedTensor]
    importance: float = 1.0  # of an expert: the share of the tokens that chose it


def rounded_units(
    units: Sequence[PlannedUnit], checkpoint: Checkpoint, n_threads: int | None
) -> Generator[RoundedUnit, None, None]:
    """Yield the units in file order, rounded on ``n_threads`` (default: up to four, one per core).

    Raises QsfConversionError for a weight that cannot be stored.
    """
    targets = [target for unit in units for target in unit.targets]
    with contextlib.closing(_rounded_pieces(targets, checkpoint, n_threads)) as pieces:
        for unit in units:
            tensors = (RoundedTensor(target, _take(target, pieces)) for target in unit.targets)
            yield RoundedUnit(unit, tensors)


def _take(target: Target, rounded: Iterator[RoundedPiece]) -> Iterator[RoundedPiece]:
    for piece in pieces_of(target):
        head = next(rounded)
        assert head.piece == piece, "pieces must be taken in file order"
        yield head


def _rounded_pieces(
    targets: Sequence[Target], checkpoint: Checkpoint, n_threads: int | None
) -> Generator[RoundedPiece, None, None]:
    """Yield all pieces in file order; a bounded number of them is in memory."""
    n_workers = n_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    under_way: deque[tuple[int, Future[RoundedPiece]]] = deque()  # bytes as f32, and the result
    in_flight_bytes = 0
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="quantise")
    try:
        for piece in (piece for target in targets for piece in pieces_of(target)):
            while under_way and (
                len(under_way) > n_workers or in_flight_bytes + piece.float_bytes > _IN_FLIGHT_BYTES
            ):
                n_bytes, future = under_way.popleft()
                yield future.result()
                in_flight_bytes -= n_bytes
                del future
            in_flight_bytes += piece.float_bytes
            raw = _read_raw(piece, checkpoint, is_kept=_has_blocks(piece.target))
            future = pool.submit(_quantise, piece, raw)
            del raw
            under_way.append((piece.float_bytes, future))
        while under_way:
            _, future = under_way.popleft()
            yield future.result()
            del future
    finally:
        pool.shutdown(cancel_futures=True)


def pieces_of(target: Target) -> Iterator[Piece]:
    """Yield the pieces of a tensor in order; each but the last one is whole tile rows."""
    band_bytes = TILE_ROWS * target.n_cols * 4
    piece_bytes = _KEPT_PIECE_BYTES if target.is_kept else _PIECE_BYTES
    step = max(1, piece_bytes // band_bytes) * TILE_ROWS
    for start in range(0, target.n_rows, step):
        yield Piece(target, start, min(start + step, target.n_rows))


def with_tensor_scales(plan: Plan, checkpoint: Checkpoint, ternary_rule: str) -> Plan:
    """Return the plan with one scale for each ternary matrix by rule absmean (BitNet b1.58).

    Reads these matrices once; of another rule nothing.
    """
    if ternary_rule != "absmean":
        return plan

    def with_scale(target: Target) -> Target:
        if not target.is_ternary:
            return target
        parts = (read_rows(piece, checkpoint) for piece in pieces_of(target))
        return dataclasses.replace(target, tensor_scale=absmean(parts))

    return plan.with_targets(with_scale)


def with_exact_types(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """Return the plan with a type for each matrix of EXACT: f16 if that is exact, or else f32.

    f16 loses values below 6e-8, which occur in checkpoints of bf16. Reads all these matrices.
    """

    def exact(target: Target) -> Target:
        if target.rule.target not in EXACT:
            return target
        rows = read_tensor(target, checkpoint)
        with np.errstate(over="ignore"):
            lost = np.abs(rows - rows.astype(np.float16).astype(np.float32)).max()
        return dataclasses.replace(target, dtype=Dtype.F16 if lost <= _LEAST_F16 / 2 else Dtype.F32)

    return plan.with_targets(exact)


def _read_raw(piece: Piece, checkpoint: Checkpoint, *, is_kept: bool = False) -> RawArray:
    """Read a stored piece: [n_rows, n_cols], or [n_cols, n_rows] if transposed.

    ``is_kept``: blocks of a GGUF file, as bytes.
    """
    target = piece.target
    source, share = target.source, target.share
    if target.rule.is_flat:
        names = (source.name, *target.joined)
        parts = [checkpoint.read_rows(name, 0, checkpoint.tensors[name].n_rows) for name in names]
        rows = np.concatenate(parts)
        if target.rule.is_repeated:
            rows = np.repeat(rows.reshape(-1, 1), target.n_cols // rows.size, axis=1)
        return np.ascontiguousarray(rows.T if target.rule.transposed else rows).reshape(1, -1)
    if target.is_vector:
        places = share.places(0, target.n_cols) + share.span(0, target.n_cols)[0]
        names, row = (source.name, *target.joined), target.slice_idx
        parts = [checkpoint.read_rows(name, row, row + 1) for name in names]
        return np.concatenate(parts, axis=1)[:, places]
    if target.rule.is_turned:
        return _turned(piece, checkpoint)
    first, last = share.span(piece.start, piece.stop)
    places = share.places(piece.start, piece.stop)
    n_rows = source.n_rows // target.n_slices
    slice_row = n_rows * target.slice_idx
    if not target.rule.transposed:
        read = checkpoint.read_stored if is_kept else checkpoint.read_rows
        rows = read(source.name, slice_row + first, slice_row + last)
        return rows[places] if share.is_grouped else rows
    slab_rows = max(1, _SLAB_BYTES // max(1, source.row_bytes))
    columns: NDArray[np.generic] | None = None
    for start in range(0, n_rows, slab_rows):
        stop = min(start + slab_rows, n_rows)
        slab = checkpoint.read_rows(source.name, slice_row + start, slice_row + stop)
        if columns is None:
            columns = np.empty((n_rows, piece.n_rows), slab.dtype)
        columns[start:stop] = slab[:, first:last][:, places]
    assert columns is not None  # a matrix has at least one row
    return columns


def _turned(piece: Piece, checkpoint: Checkpoint) -> RawArray:
    share, source = piece.target.share, piece.target.source
    n_rows = source.shape[-1]  # of a group
    first, last = piece.start // n_rows, -(-piece.stop // n_rows)
    rows = checkpoint.read_rows(source.name, first * share.stride, last * share.stride)
    groups = rows.reshape(last - first, share.stride, n_rows)
    turned = groups[:, share.first : share.first + share.n].transpose(0, 2, 1)
    start = first * n_rows
    return np.ascontiguousarray(
        turned.reshape(-1, share.n)[piece.start - start : piece.stop - start]
    )


def read_rows(piece: Piece, checkpoint: Checkpoint) -> NDArray[np.float32]:
    """Return a piece as f32 [n_rows, n_cols] in the orientation of the file.

    Raises QsfConversionError for a value that is not finite, before it affects others.
    """
    rows = _oriented(piece, _read_raw(piece, checkpoint))
    _check_finite(piece, rows)
    return rows


def kept_tensor(target: Target, checkpoint: Checkpoint) -> RoundedPiece:
    piece = Piece.whole(target)
    return _keep(piece, _read_raw(piece, checkpoint, is_kept=_has_blocks(target)))


def exact_shifts_of(
    target: Target, checkpoint: Checkpoint
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    if not _has_blocks(target):
        return None
    raw = _read_raw(Piece.whole(target), checkpoint, is_kept=True)
    return exact_shifts(target.dtype, raw)


def _has_blocks(target: Target) -> bool:
    return target.is_kept and target.dtype != Dtype.MXFP4


def _check_finite(piece: Piece, rows: NDArray[np.float32]) -> None:
    if not np.isfinite(rows).all():
        row, col = (int(idx) for idx in np.argwhere(~np.isfinite(rows))[0])
        error = UnrepresentableError(row, col, float(rows[row, col]), math.inf)
        raise _refusal(piece, error)


def read_tensor(target: Target, checkpoint: Checkpoint) -> NDArray[np.float32]:
    return read_rows(Piece.whole(target), checkpoint)


def _oriented(piece: Piece, raw: RawArray) -> NDArray[np.float32]:
    target = piece.target
    is_turned = target.rule.transposed and not target.rule.is_flat
    rows = to_float32(np.ascontiguousarray(raw.T) if is_turned else raw)
    if target.rule.add:
        rows = rows + np.float32(target.rule.add)
    if target.rule.is_log:
        rows = np.exp(rows.astype(np.float64)).astype(np.float32)
    if isinstance(target.factor, tuple):
        rows = rows * np.array(target.factor, np.float32)[piece.start : piece.stop, None]
    elif target.factor != 1:
        rows = rows * np.float32(target.factor)
    if target.exponents:
        exponents = np.asarray(target.exponents)
        of_rows = exponents if target.is_vector else exponents[piece.start : piece.stop, None]
        rows = np.ldexp(rows, of_rows)
    return rows


def _quantise(piece: Piece, raw: RawArray) -> RoundedPiece:
    target = piece.target
    if target.is_kept:
        return _keep(piece, raw)
    rows = _oriented(piece, raw)
    del raw
    try:
        if not target.is_matrix:
            return round_plain(piece, rows)
        if target.outliers is not None and target.outliers.has_table:
            return _round_apart(piece, rows, target.outliers)
        errors = ErrorSums()
        tiles = quantisers.quantise_rows(
            target.dtype,
            rows,
            errors,
            rule="search" if target.tensor_scale is None else "absmean",
            tensor_scale=target.tensor_scale,
        )
        return RoundedPiece(piece, tiles, errors)
    except UnrepresentableError as error:
        raise _refusal(piece, error) from error


def _keep(piece: Piece, raw: RawArray) -> RoundedPiece:
    if piece.target.dtype != Dtype.MXFP4:
        of_rows = piece.target.exponents[piece.start : piece.stop]
        tiles, scales = gguf_tiles(piece.target.dtype, raw, of_rows)
        if not np.isfinite(scales).all():
            row = int(np.argwhere(~np.isfinite(scales))[0][1])
            name = piece.target.source.name
            raise QsfConversionError(
                f"tensor {name}: a scale of row {piece.start + row} is infinite or no number"
            )
        n_values = piece.n_rows * piece.target.n_cols
        return RoundedPiece(piece, tiles, ErrorSums(n_values=n_values))
    if raw["scale"].max(initial=0) >= MXFP4_OVERFLOWING:
        _check_finite(piece, to_float32(raw))
    return RoundedPiece(piece, mxfp4_tiles(raw), ErrorSums(n_values=raw.size * MXFP4_COLS))


def _round_apart(piece: Piece, rows: NDArray[np.float32], outliers: OutlierPlan) -> RoundedPiece:
    mask = table_mask(rows, outliers.mean, outliers.sigma)
    tiles, stored, entries = round_apart(piece.target.dtype, rows, mask)
    errors = ErrorSums()
    errors.observe(rows, stored)
    return RoundedPiece(piece, tiles, errors, outliers=entries.below(piece.start))


def round_plain(piece: Piece, rows: NDArray[np.float32]) -> RoundedPiece:
    """Store rows one after another, without tiles: f16 or f32.

    Raises UnrepresentableError for a value that the type cannot store.
    """
    is_half = piece.target.dtype == Dtype.F16
    dtype: np.dtype[Any] = np.dtype("<f2" if is_half else "<f4")
    with np.errstate(over="ignore"):
        stored = rows.astype(dtype)
    bad = np.argwhere(~np.isfinite(stored))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
        limit = F16_MAX if is_half else math.inf
        raise UnrepresentableError(row, col, float(rows[row, col]), limit)
    errors = ErrorSums()
    errors.observe(rows, stored.astype(np.float32))
    return RoundedPiece(piece, stored.tobytes(), errors)


def _refusal(piece: Piece, error: UnrepresentableError) -> QsfConversionError:
    target = piece.target
    if target.is_vector:
        position = [target.share.place_of(error.col)]
    else:
        position = [target.share.place_of(piece.start + error.row), error.col]
        if target.rule.transposed:
            position.reverse()
    if target.rule.slices is not None:
        position.insert(0, target.slice_idx)
    return QsfConversionError(f"tensor {target.source.name} at {position}: {error.reason}")


# ---- outliers: which matrices get a table, by a sample of their rows, and where it lies ----


@dataclass(frozen=True, slots=True)
class OutlierTable:
    matrix: Target
    packed: PackedOutliers


def with_outlier_plans(plan: Plan, checkpoint: Checkpoint, *, may_add_bytes: bool) -> Plan:
    """Return the plan with an `OutlierPlan` for each matrix of the layers.

    Without ``may_add_bytes`` outliers are only counted: types stay, and no table is added.
    """
    return plan.with_targets(
        lambda target: (
            _with_outlier_plan(target, checkpoint, may_add_bytes=may_add_bytes)
            if target.has_choice and target.rule.place is Place.LAYER
            else target
        )
    )


def _with_outlier_plan(target: Target, checkpoint: Checkpoint, *, may_add_bytes: bool) -> Target:
    rows = _sample(target, checkpoint)
    if not np.isfinite(rows).all():
        return target  # rounding will refuse the value and name its place
    stats = of_matrix.OutlierStats.of(rows)
    action: of_matrix.Action = "none"
    if may_add_bytes and stats.n_far:
        mask = of_matrix.find_outliers(rows, stats.mean, stats.sigma)
        with contextlib.suppress(UnrepresentableError):  # rounding will refuse it too
            action = of_matrix.choose_action(
                stats, target.dtype, of_matrix.gain(target.dtype, rows, mask)
            )
        if action == of_matrix.TABLE_ACTION and stats.far_fraction > _MOST_SAMPLED:
            action = "more bits" if bits_per_weight(target.dtype) < 4 else "clamp"
    has_table = action == of_matrix.TABLE_ACTION
    outliers = OutlierPlan(stats.mean, stats.sigma, stats.near_fraction, action, has_table)
    dtype = Dtype.Q4 if action == "more bits" else target.dtype
    return dataclasses.replace(target, dtype=dtype, outliers=outliers)


def _sample(target: Target, checkpoint: Checkpoint) -> Float32Array:
    """Return some whole tile rows, evenly spread."""
    n_tile_rows = -(-target.n_rows // TILE_ROWS)
    n = min(_SAMPLE_TILE_ROWS, n_tile_rows)
    parts = []
    for i in range(n):
        start = i * n_tile_rows // n * TILE_ROWS
        piece = Piece(target, start, min(start + TILE_ROWS, target.n_rows))
        parts.append(read_rows(piece, checkpoint))
    return np.concatenate(parts)


def with_outlier_tables(unit: RoundedUnit) -> Iterator[RoundedTensor | OutlierTable]:
    """Yield the tensors of a unit; the tables of a group of matrices come before the group.

    A group is the matrices that read the same input; a group with a table is held in memory whole.
    """
    groups_with_table = {
        _input_group(target)
        for target in unit.unit.targets
        if target.outliers is not None and target.outliers.has_table
    }
    groups = itertools.groupby(unit.tensors, key=lambda tensor: _input_group(tensor.target))
    for group, members in groups:
        if group not in groups_with_table:
            yield from members
            continue
        held = [dataclasses.replace(t, pieces=tuple(t.pieces)) for t in members]
        yield from filter(None, map(_table_of, held))
        yield from held


def _input_group(target: Target) -> tuple[TensorType, ...] | None:
    kind = target.rule.target
    return next((group for group in INPUT_GROUPS if kind in group), None)


def _table_of(tensor: RoundedTensor) -> OutlierTable | None:
    parts = [piece.outliers for piece in tensor.pieces if piece.outliers is not None]
    if not any(map(len, parts)):
        return None
    matrix, entries = tensor.target, of_matrix.join(parts)
    shape = (matrix.n_rows, matrix.n_cols)
    packed = of_matrix.pack_outliers(entries.rows, entries.cols, entries.values, shape)
    return OutlierTable(matrix, packed)
