"""Which tensors a unit may have, in which order and of which shape (docs/format.md, section 4)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsf.errors import QsfArgumentError
from qsf.format_layout import Header, TensorType

_T = TensorType
_LAYER_ORDER: Final = (  # every vector before the matrix that needs it
    _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.Q_BIAS, _T.K_BIAS, _T.V_BIAS, _T.Q_NORM, _T.K_NORM,
    _T.Q, _T.K, _T.V, _T.ATTN_SUB_NORM, _T.ATTN_OUT_BIAS, _T.ATTN_OUT, _T.POST_ATTN_NORM,
    _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.EXPERT_ROUTER, _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS,
    _T.FFN_GATE, _T.FFN_UP, _T.FFN_SUB_NORM, _T.FFN_DOWN_BIAS, _T.FFN_DOWN, _T.POST_FFN_NORM,
)  # fmt: skip
_FINAL_ORDER: Final = (_T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.HEAD)
EXPERT_TYPES: Final = (_T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN)


def shapes(h: Header) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of the tensors whose shape follows from the header."""
    q = h.n_heads * h.head_dim
    kv = (h.n_kv_heads or h.n_heads) * h.head_dim
    hidden = (
        _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.ATTN_OUT_BIAS,
        _T.FFN_DOWN_BIAS, _T.POST_ATTN_NORM, _T.POST_FFN_NORM, _T.FINAL_NORM, _T.FINAL_NORM_BIAS,
    )  # fmt: skip
    return {
        _T.Q: (q, h.dim),
        _T.K: (kv, h.dim),
        _T.V: (kv, h.dim),
        _T.ATTN_OUT: (h.dim, q),
        _T.FFN_GATE: (h.ffn_dim, h.dim),
        _T.FFN_UP: (h.ffn_dim, h.dim),
        _T.FFN_DOWN: (h.dim, h.ffn_dim),
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
