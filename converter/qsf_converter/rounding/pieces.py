"""Tensors in pieces of about 32 MB of f32: read, rounded on a few threads, handed over in order.

What is under way at one time is bounded, so that memory does not grow with the checkpoint.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.outliers import PackedOutliers
from qsf_converter.rounding.outliers import Entries, round_apart, table_mask
from qsf_converter.rounding.plan import OutlierPlan, Target
from qsf_converter.rounding.quantisers import (
    F16_MAX,
    ErrorSums,
    UnrepresentableError,
    quantise_rows,
)
from qsf_converter.rounding.tiles import TILE_ROWS
from qsf_converter.sources.architectures import Place
from qsf_converter.sources.checkpoint import Checkpoint, RawArray, to_float32

_PIECE_BYTES = 32 << 20  # of f32
_IN_FLIGHT_BYTES = 128 << 20  # of f32; at least one piece
_SLAB_BYTES = 16 << 20  # of source rows, when columns are gathered
_MAX_THREADS = 4


@dataclass(slots=True)
class Piece:
    """Rows [start, stop) of a target."""

    target: Target
    start: int
    stop: int
    errors: ErrorSums = field(default_factory=ErrorSums)
    action: str | None = None  # what the report says was done, if not plain rounding
    output_error: float | None = None  # see ``TensorReport``
    entries: Entries | None = None  # of a side table: what the tiles lack
    table: PackedOutliers | None = None  # this is no piece, but the side table of the matrix

    @property
    def float_bytes(self) -> int:
        """Its size as f32."""
        return (self.stop - self.start) * self.target.n_cols * 4


def quantised_pieces(
    targets: Sequence[Target], checkpoint: Checkpoint, n_threads: int | None
) -> Generator[tuple[Piece, bytes], None, None]:
    """Yield all pieces in file order with their bytes, a bounded number of them under way."""
    n_workers = n_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    under_way: deque[tuple[Piece, Future[bytes]]] = deque()
    in_flight_bytes = 0
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="quantise")
    try:
        for piece in pieces_of(targets):
            while under_way and (
                len(under_way) > n_workers or in_flight_bytes + piece.float_bytes > _IN_FLIGHT_BYTES
            ):
                oldest, future = under_way.popleft()
                yield oldest, future.result()
                in_flight_bytes -= oldest.float_bytes
                del future
            in_flight_bytes += piece.float_bytes
            under_way.append((piece, pool.submit(_quantise, piece, read_piece(piece, checkpoint))))
        while under_way:
            oldest, future = under_way.popleft()
            yield oldest, future.result()
            del future
    finally:
        pool.shutdown(cancel_futures=True)


def pieces_of(targets: Sequence[Target]) -> Iterator[Piece]:
    """Yield the pieces of all targets in file order; each but a last one is whole tile rows."""
    for target in targets:
        band_bytes = TILE_ROWS * target.n_cols * 4
        step = max(1, _PIECE_BYTES // band_bytes) * TILE_ROWS
        for start in range(0, target.n_rows, step):
            yield Piece(target, start, min(start + step, target.n_rows))


def read_piece(piece: Piece, checkpoint: Checkpoint) -> RawArray:
    """Read a piece as it is stored: [n_rows, n_cols], or [n_cols, n_rows] of a transposed one."""
    target = piece.target
    source = target.source
    if target.is_vector:
        stop = target.first_row + target.n_cols
        return checkpoint.read_rows(source.name, 0, 1)[:, target.first_row : stop]
    first, last = target.first_row + piece.start, target.first_row + piece.stop
    if not target.rule.transposed:
        return checkpoint.read_rows(source.name, first, last)
    slab_rows = max(1, _SLAB_BYTES // source.row_bytes)
    columns: NDArray[np.generic] | None = None
    for start in range(0, source.n_rows, slab_rows):
        stop = min(start + slab_rows, source.n_rows)
        slab = checkpoint.read_rows(source.name, start, stop)
        if columns is None:
            columns = np.empty((source.n_rows, last - first), slab.dtype)
        columns[start:stop] = slab[:, first:last]
    assert columns is not None  # a matrix has at least one row
    return columns


def read_target(
    target: Target, checkpoint: Checkpoint, piece: Piece | None = None
) -> NDArray[np.float32]:
    """Return a tensor, or a piece of it, as f32 [n_rows, n_cols] in the orientation of the file.

    Raises QsfConversionError for a value that is not finite, before it spreads.
    """
    piece = piece or Piece(target, 0, target.n_rows)
    raw = read_piece(piece, checkpoint)
    rows = to_float32(np.ascontiguousarray(raw.T) if target.rule.transposed else raw)
    if not np.isfinite(rows).all():
        row, col = (int(idx) for idx in np.argwhere(~np.isfinite(rows))[0])
        error = UnrepresentableError(row, col, float(rows[row, col]), math.inf)
        raise QsfConversionError(
            f"tensor {target.source.name} at {source_position(piece, error)}: {error.reason}"
        )
    return rows


def _quantise(piece: Piece, raw: RawArray) -> bytes:
    """Turn what ``_read`` returned into the bytes of the file; runs on a worker."""
    target = piece.target
    try:
        if target.rule.transposed:
            raw = np.ascontiguousarray(raw.T)
        rows = to_float32(raw)
        del raw
        if target.rule.place is Place.POSITIONS:
            return plain_rows(rows, np.dtype("<f2"), F16_MAX, piece.errors)
        if target.is_vector:
            return plain_rows(rows, np.dtype("<f4"), np.inf, piece.errors)
        if target.outliers is not None and target.outliers.has_table:
            return _with_entries(piece, rows, target.outliers)
        return quantise_rows(
            target.dtype,
            rows,
            piece.errors,
            rule="search" if target.tensor_scale is None else "absmean",
            tensor_scale=target.tensor_scale,
        )
    except UnrepresentableError as error:
        raise QsfConversionError(
            f"tensor {target.source.name} at {source_position(piece, error)}: {error.reason}"
        ) from error


def _with_entries(piece: Piece, rows: NDArray[np.float32], found: OutlierPlan) -> bytes:
    """Round a piece without its outliers, and note these."""
    mask = table_mask(rows, found.mean, found.sigma)
    tiles, stored, entries = round_apart(piece.target.dtype, rows, mask)
    piece.entries = entries.below(piece.start)
    piece.errors.observe(rows, stored)
    return tiles


def plain_rows(
    rows: NDArray[np.float32], dtype: np.dtype[Any], limit: float, errors: ErrorSums
) -> bytes:
    """Rows one after another, without tiles."""
    with np.errstate(over="ignore"):
        stored = rows.astype(dtype)
    bad = np.argwhere(~np.isfinite(stored))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
        raise UnrepresentableError(row, col, float(rows[row, col]), limit)
    errors.observe(rows, stored.astype(np.float32))
    return stored.tobytes()


def source_position(piece: Piece, error: UnrepresentableError) -> list[int]:
    """Where the value is in the source tensor."""
    target = piece.target
    if target.is_vector:
        return [target.first_row + error.col]
    position = [target.first_row + piece.start + error.row, error.col]
    return position[::-1] if target.rule.transposed else position
