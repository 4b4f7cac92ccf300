"""Which matrices get a sparse outlier table, and where the tables lie in the file.

The decision uses a sample of a matrix's rows, so that no matrix is read twice. The weights
that are outliers are found row by row when the matrix is rounded (`outliers`).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsf.file.layout import Dtype, PackedOutliers, TensorType
from qsf_converter.rounding.outliers import (
    MOST_FRACTION,
    TABLE_ACTION,
    Action,
    OutlierStats,
    choose_action,
    find_outliers,
    gain,
    join,
    pack_outliers,
)
from qsf_converter.rounding.pieces import Piece, RoundedTensor, RoundedUnit, read_rows
from qsf_converter.rounding.plan import OutlierPlan, Plan, Target
from qsf_converter.rounding.quantisers import UnrepresentableError
from qsf_converter.rounding.tiles import TILE_ROWS, bits_per_weight
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array
from qsf_converter.sources.families.rules import INPUT_GROUPS, Place

_SAMPLE_TILE_ROWS: Final = 8
# The whole matrix may have more outliers than its sample
_MOST_SAMPLED: Final = 0.8 * MOST_FRACTION


@dataclass(frozen=True, slots=True)
class OutlierTable:
    matrix: Target
    packed: PackedOutliers


def with_outlier_plans(plan: Plan, checkpoint: Checkpoint, *, may_add_bytes: bool) -> Plan:
    """Return the plan with an `OutlierPlan` for each matrix of the layers.

    Without ``may_add_bytes`` outliers are only counted: types stay, and no table is added.
    """
    targets = []
    for target in plan.targets:
        if target.has_choice and target.rule.place is Place.LAYER:
            targets.append(_with_outlier_plan(target, checkpoint, may_add_bytes=may_add_bytes))
        else:
            targets.append(target)
    return dataclasses.replace(plan, targets=tuple(targets))


def _with_outlier_plan(target: Target, checkpoint: Checkpoint, *, may_add_bytes: bool) -> Target:
    rows = _sample(target, checkpoint)
    if not np.isfinite(rows).all():
        return target  # rounding will refuse the value and name its place
    stats = OutlierStats.of(rows)
    action: Action = "none"
    if may_add_bytes and stats.n_far:
        mask = find_outliers(rows, stats.mean, stats.sigma)
        with contextlib.suppress(UnrepresentableError):  # rounding will refuse it too
            action = choose_action(stats, target.dtype, gain(target.dtype, rows, mask))
        if action == TABLE_ACTION and stats.far_fraction > _MOST_SAMPLED:
            action = "more bits" if bits_per_weight(target.dtype) < 4 else "clamp"
    has_table = action == TABLE_ACTION
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
    matrix, entries = tensor.target, join(parts)
    shape = (matrix.n_rows, matrix.n_cols)
    packed = pack_outliers(entries.rows, entries.cols, entries.values, shape)
    return OutlierTable(matrix, packed)
