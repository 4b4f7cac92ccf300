"""Which tensors a unit may have, in which order and of which shape (docs/format.md, section 4)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.file import layout as lay
from qsf.file.layout import OUTLIERS_OF, Header, Tensor, TensorType

_T = TensorType
_LAYER_ORDER: Final = (  # every vector and outlier table before the matrix that needs it
    _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.Q_BIAS, _T.K_BIAS, _T.V_BIAS, _T.Q_NORM, _T.K_NORM,
    _T.Q_OUTLIERS, _T.K_OUTLIERS, _T.V_OUTLIERS, _T.Q, _T.K, _T.V, _T.ATTN_SUB_NORM,
    _T.ATTN_OUT_BIAS, _T.ATTN_OUT_OUTLIERS, _T.ATTN_OUT, _T.POST_ATTN_NORM,
    _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.EXPERT_ROUTER, _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_GATE, _T.FFN_UP, _T.FFN_SUB_NORM,
    _T.FFN_DOWN_BIAS, _T.FFN_DOWN_OUTLIERS, _T.FFN_DOWN, _T.POST_FFN_NORM,
)  # fmt: skip
_FINAL_ORDER: Final = (_T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.HEAD)
EXPERT_TYPES: Final = (
    _T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_DOWN_OUTLIERS,
)  # fmt: skip


def shapes(h: Header) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of the tensors whose shape follows from the header."""
    q = h.n_heads * h.head_dim
    kv = (h.n_kv_heads or h.n_heads) * h.head_dim
    hidden = (
        _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.ATTN_OUT_BIAS,
        _T.FFN_DOWN_BIAS, _T.POST_ATTN_NORM, _T.POST_FFN_NORM, _T.FINAL_NORM, _T.FINAL_NORM_BIAS,
    )  # fmt: skip
    matrices: dict[int, tuple[int, int]] = {
        _T.Q: (q, h.dim),
        _T.K: (kv, h.dim),
        _T.V: (kv, h.dim),
        _T.ATTN_OUT: (h.dim, q),
        _T.FFN_GATE: (h.ffn_dim, h.dim),
        _T.FFN_UP: (h.ffn_dim, h.dim),
        _T.FFN_DOWN: (h.dim, h.ffn_dim),
    }
    return {
        **matrices,
        **{OUTLIERS_OF[kind]: shape for kind, shape in matrices.items()},
        _T.Q_BIAS: (1, q),
        _T.K_BIAS: (1, kv),
        _T.V_BIAS: (1, kv),
        _T.FFN_GATE_BIAS: (1, h.ffn_dim),
        _T.FFN_UP_BIAS: (1, h.ffn_dim),
        _T.EMBEDDING: (h.n_vocab, h.dim),
        _T.HEAD: (h.n_vocab, h.dim),
        **dict.fromkeys(hidden, (1, h.dim)),
    }


def unit_order(unit_idx: int, n_layers: int, *, is_tied: bool) -> tuple[TensorType, ...]:
    """Return the types that a unit may have, in their order."""
    if unit_idx == 0:
        return (_T.EMBEDDING,)
    if unit_idx <= n_layers:
        return _LAYER_ORDER
    return _FINAL_ORDER[: 2 if is_tied else 3]


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
    if kind > max(TensorType):
        raise QsfUnsupportedError(
            f"{name} has tensor type {kind}, this release knows 0 .. {max(TensorType)}"
        )
    fault = lay.tensor_fault(kind, n_rows, n_cols, dtype, layout, n_entries)
    if fault is not None:
        raise QsfFormatError(f"{name}: {fault}")
    n_bytes = lay.tensor_bytes(n_rows, n_cols, dtype, layout, n_entries)
    return Tensor(
        unit_idx, kind, n_rows, n_cols, dtype, layout, index, data_off, n_bytes, n_entries
    )


def pack_tensor(t: Tensor) -> bytes:
    """Return the entry of the tensor table."""
    return lay.TENSOR_ENTRY.pack(
        t.unit_idx, t.type, t.n_rows, t.n_cols, t.dtype, t.layout, t.index, t.n_entries, t.data_off
    )
