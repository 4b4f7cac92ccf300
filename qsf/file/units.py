"""Which tensors a unit may have, in which order and of which shape (docs/format.md, section 4)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.file import layout as lay
from qsf.file.kinds import LayerKind, QkNorm
from qsf.file.layout import (
    OUTLIERS_OF,
    Header,
    Layout,
    Role,
    Tensor,
    TensorType,
    Unit,
    UnitId,
)

_T = TensorType
_LAYER_ORDER: Final = (  # every vector and outlier table before the matrix that needs it
    _T.INPUT_NORM, _T.INPUT_NORM_BIAS,
    _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.Q_BIAS, _T.K_BIAS, _T.V_BIAS, _T.Q_NORM, _T.K_NORM,
    _T.SINKS, _T.Q_OUTLIERS, _T.K_OUTLIERS, _T.V_OUTLIERS, _T.Q, _T.K, _T.V, _T.ATTN_SUB_NORM,
    _T.ATTN_OUT_BIAS, _T.ATTN_OUT_OUTLIERS, _T.ATTN_OUT, _T.POST_ATTN_NORM,
    _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.ROUTER_BIAS, _T.SELECTION_BIAS, _T.EXPERT_ROUTER,
    _T.SHARED_GATE, _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_GATE, _T.FFN_UP, _T.FFN_SUB_NORM,
    _T.FFN_DOWN_BIAS, _T.FFN_DOWN_OUTLIERS, _T.FFN_DOWN, _T.POST_FFN_NORM,
)  # fmt: skip
_EXPERT_ORDER: Final = (
    _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS, _T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN_BIAS, _T.FFN_DOWN,
)  # fmt: skip
_FINAL_ORDER: Final = (_T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.HEAD_BIAS, _T.HEAD)
_TYPES_OF_ENDS: Final = (
    _T.EMBEDDING, _T.HEAD, _T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.HEAD_BIAS,
)  # fmt: skip
EXPERT_TYPES: Final = (
    _T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_DOWN_OUTLIERS,
)  # fmt: skip


def layer_shapes(h: Header, kind: LayerKind) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of the tensors that a layer of this kind may have."""
    q = kind.n_heads * kind.head_dim
    kv = kind.n_kv_heads * kind.head_dim
    per_head = kind.qk_norm == QkNorm.PER_HEAD
    hidden = (
        _T.INPUT_NORM, _T.INPUT_NORM_BIAS, _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.FFN_NORM,
        _T.FFN_NORM_BIAS, _T.ATTN_OUT_BIAS, _T.FFN_DOWN_BIAS, _T.POST_ATTN_NORM, _T.POST_FFN_NORM,
    )  # fmt: skip
    matrices: dict[int, tuple[int, int]] = {
        _T.Q: (q, h.dim),
        _T.K: (kv, h.dim),
        _T.V: (kv, h.dim),
        _T.ATTN_OUT: (h.dim, q),
        _T.FFN_GATE: (kind.ffn_dim, h.dim),
        _T.FFN_UP: (kind.ffn_dim, h.dim),
        _T.FFN_DOWN: (h.dim, kind.ffn_dim),
    }
    return {
        **matrices,
        **{OUTLIERS_OF[matrix]: shape for matrix, shape in matrices.items()},
        _T.Q_BIAS: (1, q),
        _T.K_BIAS: (1, kv),
        _T.V_BIAS: (1, kv),
        _T.Q_NORM: (1, kind.head_dim if per_head else q),
        _T.K_NORM: (1, kind.head_dim if per_head else kv),
        _T.SINKS: (1, kind.n_heads),
        _T.ATTN_SUB_NORM: (1, q),
        _T.FFN_SUB_NORM: (1, kind.ffn_dim),
        _T.FFN_GATE_BIAS: (1, kind.ffn_dim),
        _T.FFN_UP_BIAS: (1, kind.ffn_dim),
        **dict.fromkeys(hidden, (1, h.dim)),
        _T.EXPERT_ROUTER: (kind.n_experts, h.dim),
        _T.ROUTER_BIAS: (1, kind.n_experts),
        _T.SELECTION_BIAS: (1, kind.n_experts),
        _T.SHARED_GATE: (1, h.dim),
    }


def expert_shapes(h: Header, kind: LayerKind) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of the tensors that an expert of a layer of this kind may have."""
    return {
        _T.FFN_GATE_BIAS: (1, kind.expert_dim),
        _T.FFN_UP_BIAS: (1, kind.expert_dim),
        _T.FFN_GATE: (kind.expert_dim, h.dim),
        _T.FFN_UP: (kind.expert_dim, h.dim),
        _T.FFN_DOWN_BIAS: (1, h.dim),
        _T.FFN_DOWN: (h.dim, kind.expert_dim),
    }


def unit_shapes(h: Header, kinds: Sequence[LayerKind], unit: UnitId) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of the tensors that a unit may have; kinds: of the layers."""
    if unit.role == Role.LAYER:
        return layer_shapes(h, kinds[unit.layer])
    if unit.role == Role.EXPERT:
        return expert_shapes(h, kinds[unit.layer])
    return {
        _T.EMBEDDING: (h.n_vocab, h.dim),
        _T.FINAL_NORM: (1, h.dim),
        _T.FINAL_NORM_BIAS: (1, h.dim),
        _T.HEAD_BIAS: (1, h.n_vocab),
        _T.HEAD: (h.n_vocab, h.dim),
    }


def unit_order(role: Role, *, is_tied: bool) -> tuple[TensorType, ...]:
    """Return the types that a unit may have, in their order."""
    return {
        Role.EMBEDDING: (_T.EMBEDDING,),
        Role.LAYER: _LAYER_ORDER,
        Role.FINAL: _FINAL_ORDER[: 2 if is_tied else 4],
        Role.EXPERT: _EXPERT_ORDER,
    }[role]


def check_order(
    order: Sequence[int], earlier: Sequence[tuple[int, int]], kind: int, index: int, name: str
) -> None:
    """Refuse a tensor that may not come after the ``earlier`` ones, each (type, index).

    Experts repeat gate, up and down, so only types count.
    """
    if kind not in order:
        raise QsfArgumentError(f"{name}: does not belong in this unit")
    if (kind, index) in earlier:
        raise QsfArgumentError(f"{name}: index {index} is written twice")
    if index == 0 and any(order.index(t) > order.index(kind) for t, _ in earlier):
        raise QsfArgumentError(f"{name}: comes after type {earlier[-1][0]}, allowed: before it")


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
    if kind > max(TensorType) or kind in lay.FREE_TENSOR_TYPES:
        raise QsfUnsupportedError(
            f"{name} has tensor type {kind}, this release knows 0 .. 35, 44 .. 46 and 66 .."
            f" {max(TensorType)}"
        )
    fault = lay.tensor_fault(kind, n_rows, n_cols, dtype, layout, n_entries)
    if fault is not None:
        raise QsfFormatError(f"{name}: {fault}")
    n_bytes = lay.tensor_bytes(n_rows, n_cols, dtype, layout, n_entries)
    return Tensor(
        unit_idx, kind, n_rows, n_cols, dtype, layout, index, data_off, n_bytes, n_entries
    )


def pack_tensor(t: Tensor, unit_idx: int) -> bytes:
    """Return the entry of the tensor table."""
    return lay.TENSOR_ENTRY.pack(
        unit_idx, t.type, t.n_rows, t.n_cols, t.dtype, t.layout, t.index, t.n_entries, t.data_off
    )


def check_contents(units: Sequence[Unit], h: Header, *, is_tied: bool) -> None:
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
    shapes = unit_shapes(h, (), embd.id)
    _check_is(embd.tensors[0], _T.EMBEDDING, shapes)
    for u in units:
        if u is embd or u is finl or u.template_idx != u.idx:
            continue
        for t in u.tensors:
            if t.type in _TYPES_OF_ENDS:
                raise QsfFormatError(
                    f"tensor table: unit {u.idx} has type {t.type}, allowed there: all"
                    " but 25 .. 28 and 66"
                )
    wanted = [_T.FINAL_NORM]
    for kind in unit_order(Role.FINAL, is_tied=is_tied)[1:]:
        is_optional = kind in (_T.FINAL_NORM_BIAS, _T.HEAD_BIAS)
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


def _check_is(t: Tensor, kind: TensorType, shapes: dict[int, tuple[int, int]]) -> None:
    is_matrix = kind in (_T.EMBEDDING, _T.HEAD)
    wanted = (0, Layout.TILES if is_matrix else Layout.VECTOR, *shapes[kind])
    real = (t.index, t.layout, t.n_rows, t.n_cols)
    if t.type != kind or real != wanted:
        raise QsfFormatError(
            f"tensor table: unit {t.unit_idx} has type {t.type} (index, layout, rows, columns:"
            f" {real}) where type {kind} {tuple(int(i) for i in wanted)} belongs"
        )
