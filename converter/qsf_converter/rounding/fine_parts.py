"""Keeps 8 bits for the few weights whose rounding costs most (figures: bench/LOG-quantisation.md).

V of attention whose query heads share KV heads: in Qwen2.5-Coder-1.5B it has 0.7 % of the weights
that a token reads, and causes 9 % of what rounding them to `4bit-nl` costs.

The first rows of a large output head: tokenizers number their tokens roughly by frequency, so the
first 32nd of the rows has most of the probability, and there 0.5 % of the weights cause 24 %. Such
a head is split in two tensors, these rows and the others.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
from typing import Final

from qsf.file.layout import TILE_ROWS, Dtype, TensorType, UnitId
from qsf_converter.rounding.plan import TERNARY_TYPES, Plan, Target
from qsf_converter.rounding.tiles import bits_per_weight

_LEAST_SHARED: Final = 4  # query heads of a KV head: V has a tenth of attention's weights or less
_LEAST_ROWS: Final = 16384  # of a head that is worth two matrices
_SHARE: Final = 32  # one of so many rows is of a frequent token


def with_fine_values(plan: Plan) -> Plan:
    """Return the plan with V of 8 bits where it is small and its layer has fewer.

    Ternary V and kept blocks of a GGUF file stay, and so do types that are chosen later.
    """
    q_rows: dict[UnitId, int] = {
        target.unit: target.n_rows for target in plan.targets if target.rule.target == TensorType.Q
    }

    def is_raised(target: Target) -> bool:
        is_small = target.n_rows * _LEAST_SHARED <= q_rows.get(target.unit, 0)
        is_coarse = 0 < bits_per_weight(target.dtype) < 8 and target.dtype not in TERNARY_TYPES
        is_value = target.rule.target == TensorType.V and target.has_choice
        return is_value and is_small and is_coarse

    targets = (
        dataclasses.replace(target, dtype=Dtype.Q8, is_raised=True) if is_raised(target) else target
        for target in plan.targets
    )
    return dataclasses.replace(plan, targets=tuple(targets))


def with_split_head(plan: Plan, *, has_free_type: bool) -> Plan:
    """Return the plan with the head as two tensors, if it is large and of fewer than 8 bits.

    With ``has_free_type`` its types are chosen later. A head that is the embedding stays one table,
    and so does one that keeps its blocks of a GGUF file.
    """
    targets: list[Target] = []
    for target in plan.targets:
        is_coarse = has_free_type or bits_per_weight(target.dtype) < 8
        is_head = target.rule.target == TensorType.HEAD and target.n_rows >= _LEAST_ROWS
        targets += _parts(target) if is_head and target.has_choice and is_coarse else [target]
    return dataclasses.replace(plan, targets=tuple(targets))


def table_type(target: Target, requested: Dtype) -> Dtype:
    """Return the type of an embedding or a head for which ``requested`` was asked."""
    is_first = target.rule.target == TensorType.HEAD and target.n_rows < target.share.n_outputs
    return Dtype.Q8 if is_first and bits_per_weight(requested) < 8 else requested


def _parts(head: Target) -> list[Target]:
    n_first = head.n_rows // _SHARE // TILE_ROWS * TILE_ROWS
    rest_rule = dataclasses.replace(head.rule, target=TensorType.HEAD_REST)
    first, rest = (
        dataclasses.replace(
            head,
            rule=rule,
            n_rows=n_rows,
            share=dataclasses.replace(head.share, first=start, n=n_rows),
        )
        for rule, start, n_rows in (
            (head.rule, 0, n_first),
            (rest_rule, n_first, head.n_rows - n_first),
        )
    )
    return [dataclasses.replace(first, dtype=table_type(first, head.dtype)), rest]
