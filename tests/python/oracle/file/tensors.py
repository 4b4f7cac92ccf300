"""The tensor table, read by Python: docs/format.md, section 4."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence

from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.file import layout as lay
from qsf.file.layout import Header, Layout, Role, Tensor, TensorType, Unit
from qsf.file.writer import head_rows_of, unit_order, unit_shapes

_T = TensorType
_TYPES_OF_ENDS = (
    _T.EMBEDDING, _T.HEAD, _T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.HEAD_BIAS, _T.OWN_TABLE, _T.DENSE,
    _T.HEAD_REST,
)  # fmt: skip


def parse_tensor(entry_idx: int, entry: tuple[int, ...], n_units: int) -> Tensor:
    """Return an entry of the tensor table, which has been checked by itself.

    Raises:
        QsfFormatError: it breaks a rule of section 4.
        QsfUnsupportedError: a type of tensor that this release does not know.
    """
    unit_idx, kind, n_rows, n_cols, dtype, layout, index, n_entries, data_off = entry
    name = f"tensor table: entry {entry_idx}"
    if unit_idx >= n_units:
        raise QsfFormatError(f"{name} is of unit {unit_idx}, allowed: 0 .. {n_units - 1}")
    if kind not in set(TensorType):
        raise QsfUnsupportedError(
            f"{name} has tensor type {kind}, this release knows"
            f" {', '.join(str(int(known)) for known in TensorType)}"
        )
    fault = lay.tensor_fault(kind, n_rows, n_cols, dtype, layout, n_entries)
    if fault is not None:
        raise QsfFormatError(f"{name}: {fault}")
    n_bytes = lay.tensor_bytes(n_rows, n_cols, dtype, layout, n_entries)
    return Tensor(
        unit_idx, kind, n_rows, n_cols, dtype, layout, index, data_off, n_bytes, n_entries
    )


def check_contents(units: Sequence[Unit], h: Header, own_width: int, *, is_tied: bool) -> None:
    """Check the contents of the embedding and the final unit, which no other unit may have.

    Raises:
        QsfFormatError: a tensor is missing, too many or of another shape.
    """
    embd, finl = (
        next(u for u in units if u.id.role == role) for role in (Role.EMBEDDING, Role.FINAL)
    )
    if len(embd.tensors) != 1:
        raise QsfFormatError(
            f"tensor table: the embedding unit has {len(embd.tensors)} tensors, allowed: 1"
        )
    rest = any(t.type == _T.HEAD_REST for t in finl.tensors)
    rows = head_rows_of(h, ((t.type, t.n_rows) for t in finl.tensors if rest))
    shapes = unit_shapes(h, (), embd.id, own_width, rows)
    _check_own_table(units, own_width, shapes)
    _check_is(embd.tensors[0], _T.EMBEDDING, shapes)
    for u in units:
        is_end = u is embd or u is finl or u.id.role == Role.OWN_TABLE
        if is_end or u.template_idx != u.idx:
            continue
        for t in u.tensors:
            if t.type in _TYPES_OF_ENDS:
                raise QsfFormatError(
                    f"tensor table: unit {u.idx} has type {t.type}, allowed there: all"
                    " but 25 .. 28, 66, 70, 86 and 87"
                )
    wanted = [_T.FINAL_NORM]
    for kind in unit_order(Role.FINAL, is_tied=is_tied)[1:]:
        is_optional = kind in (_T.FINAL_NORM_BIAS, _T.DENSE, _T.HEAD_BIAS, _T.HEAD_REST)
        is_next = len(finl.tensors) > len(wanted) and finl.tensors[len(wanted)].type == kind
        if is_next or not is_optional:
            wanted.append(kind)
    for t, kind in zip(finl.tensors, wanted, strict=False):
        _check_is(t, kind, shapes)
    if len(finl.tensors) != len(wanted):
        tied = "tied" if is_tied else "not tied"
        raise QsfFormatError(
            f"tensor table: the final unit has {len(finl.tensors)} tensors, allowed: {len(wanted)}"
            f" (the head is {tied})"
        )


def _check_own_table(
    units: Sequence[Unit], own_width: int, shapes: dict[int, tuple[int, int]]
) -> None:
    tables = [u for u in units if u.id.role == Role.OWN_TABLE]
    if len(tables) != (own_width != 0):
        raise QsfFormatError(
            f"ARCH: own embeddings (key 13) of width {own_width}, the file has {len(tables)}"
            " tables of them"
        )
    for u in tables:
        if len(u.tensors) != 1:
            raise QsfFormatError(
                f"tensor table: the own table has {len(u.tensors)} tensors, allowed: 1"
            )
        _check_is(u.tensors[0], _T.OWN_TABLE, shapes)


def _check_is(t: Tensor, kind: TensorType, shapes: dict[int, tuple[int, int]]) -> None:
    is_matrix = kind in (*lay.TABLES, *lay.HEADS, _T.DENSE)
    wanted = (0, Layout.TILES if is_matrix else Layout.VECTOR, *shapes[kind])
    real = (t.index, t.layout, t.n_rows, t.n_cols)
    if t.type != kind or real != wanted:
        raise QsfFormatError(
            f"tensor table: unit {t.unit_idx} has type {t.type} (index, layout, rows, columns:"
            f" {real}) where type {kind} {tuple(int(i) for i in wanted)} belongs"
        )
