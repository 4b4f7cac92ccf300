"""Which matrices get a side table of their outliers, and how tables come into the file.

What is done about a matrix is decided from a sample of its rows, so that nothing is read twice;
which weights are outliers is found row by row when they are rounded (`outliers`).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Final

import numpy as np

from qsf.file.layout import Dtype, TensorType
from qsf_converter.original.layers import INPUT_GROUPS
from qsf_converter.rounding.outliers import (
    MOST_FRACTION,
    Action,
    OutlierStats,
    choose_action,
    find_outliers,
    gain,
    join,
    pack_outliers,
)
from qsf_converter.rounding.pieces import Piece, read_target
from qsf_converter.rounding.plan import OutlierPlan, Plan, Target
from qsf_converter.rounding.quantisers import UnrepresentableError
from qsf_converter.rounding.tiles import TILE_ROWS
from qsf_converter.sources.architectures import Place
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array

Written = tuple[Piece, bytes]

_SAMPLE_TILE_ROWS: Final = 8
_MOST_SAMPLED: Final = 0.8 * MOST_FRACTION  # a matrix may have more than its sample


def examine(plan: Plan, checkpoint: Checkpoint, *, is_free: bool) -> Plan:
    """Return the plan with what is to be done about the outliers of each layer matrix.

    With ``is_free`` the types may change and tables be added; otherwise outliers are counted
    only: a file of a given size has no room for surprises.
    """
    targets = []
    for target in plan.targets:
        if target.is_matrix and target.rule.place is Place.LAYER:
            targets.append(_examined(target, checkpoint, is_free=is_free))
        else:
            targets.append(target)
    return dataclasses.replace(plan, targets=tuple(targets))


def _examined(target: Target, checkpoint: Checkpoint, *, is_free: bool) -> Target:
    rows = _sample(target, checkpoint)
    if not np.isfinite(rows).all():
        return target  # rounding will say so, and where
    stats = OutlierStats.of(rows)
    action: Action = "none"
    if is_free and stats.n_far:
        mask = find_outliers(rows, stats.mean, stats.sigma)
        with contextlib.suppress(UnrepresentableError):  # again: rounding will say so
            action = choose_action(stats, target.dtype, gain(target.dtype, rows, mask))
        if action == "side table" and stats.far_fraction > _MOST_SAMPLED:
            action = "more bits" if target.dtype not in (Dtype.Q4, Dtype.Q4_SYM) else "clamp"
    has_table = action == "side table"
    found = OutlierPlan(stats.mean, stats.sigma, stats.near_fraction, action, has_table)
    dtype = Dtype.Q4 if action == "more bits" else target.dtype
    return dataclasses.replace(target, dtype=dtype, outliers=found)


def _sample(target: Target, checkpoint: Checkpoint) -> Float32Array:
    """Some whole tile rows, evenly spread."""
    n_tile_rows = -(-target.n_rows // TILE_ROWS)
    n = min(_SAMPLE_TILE_ROWS, n_tile_rows)
    parts = []
    for i in range(n):
        start = i * n_tile_rows // n * TILE_ROWS
        piece = Piece(target, start, min(start + TILE_ROWS, target.n_rows))
        parts.append(read_target(target, checkpoint, piece))
    return np.concatenate(parts)


def with_tables(plan: Plan, written: Iterator[Written]) -> Iterator[Written]:
    """Yield the same, with the side tables of a group of matrices in front of the group."""
    groups = {
        (target.unit_idx, _group(target))
        for target in plan.targets
        if target.outliers is not None and target.outliers.has_table
    }
    held: list[Written] = []
    held_group: tuple[int, tuple[TensorType, ...]] | None = None
    for piece, data in written:
        target = piece.target
        group = (target.unit_idx, _group(target)) if target.is_matrix else None
        if held and group != held_group:
            yield from _released(held)
            held = []
        if group in groups:
            held.append((piece, data))
            held_group = group
        else:
            yield piece, data
    yield from _released(held)


def _group(target: Target) -> tuple[TensorType, ...]:
    kind = target.rule.target
    return next((group for group in INPUT_GROUPS if kind in group), ())


def _released(held: list[Written]) -> Iterator[Written]:
    """Yield tables, then matrices."""
    by_target: dict[str, list[Piece]] = {}
    for piece, _ in held:
        by_target.setdefault(piece.target.name, []).append(piece)
    for pieces in by_target.values():
        parts = [piece.entries for piece in pieces if piece.entries is not None]
        if sum(map(len, parts)):
            target, entries = pieces[0].target, join(parts)
            shape = (target.n_rows, target.n_cols)
            table = pack_outliers(entries.rows, entries.cols, entries.values, shape)
            yield Piece(target, 0, target.n_rows, table=table), table.data
    yield from held
