"""Which tensors a unit may have, in which order and of which shape (docs/format.md, section 4)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from qsf.errors import QsfArgumentError
from qsf.file import layout as lay
from qsf.file.kinds import LayerKind, QkNorm
from qsf.file.layout import (
    OUTLIERS_OF,
    Header,
    Role,
    Tensor,
    TensorType,
    UnitId,
)

_T = TensorType
_LAYER_ORDER: Final = (  # vectors and outlier tables come before the matrix that uses them
    _T.MTP_TRUNK_NORM, _T.MTP_TOKEN_NORM, _T.MTP_HIDDEN_NORM, _T.MTP_JOIN,
    _T.INPUT_SHIFT, _T.SECOND_SHIFT, _T.INPUT_NORM, _T.INPUT_NORM_BIAS,
    _T.ATTN_NORM, _T.ATTN_NORM_BIAS, _T.Q_BIAS, _T.K_BIAS, _T.V_BIAS, _T.Q_NORM, _T.K_NORM,
    _T.SINKS, _T.DECAY_RATE, _T.DECAY_BIAS, _T.MIX_NORM,
    _T.Q_OUTLIERS, _T.K_OUTLIERS, _T.V_OUTLIERS, _T.Q, _T.K, _T.V, _T.Q_UP, _T.K_UP, _T.V_UP,
    _T.MIX_GATE, _T.BETA, _T.DECAY, _T.GATE_UP, _T.DECAY_UP,
    _T.CONV, _T.CONV_BIAS, _T.ATTN_SUB_NORM, _T.ATTN_OUT_BIAS, _T.ATTN_OUT_OUTLIERS, _T.ATTN_OUT,
    _T.POST_ATTN_NORM,
    _T.SSD_RATE, _T.SSD_STEP_BIAS, _T.SSD_SKIP, _T.SSD_GATE, _T.SSD_IN, _T.SSD_STEP, _T.SSD_CONV,
    _T.SSD_CONV_BIAS, _T.SSD_NORM, _T.SSD_OUT,
    _T.ROUTER_NORM, _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.ROUTER_BIAS, _T.SELECTION_BIAS,
    _T.EXPERT_SCALE, _T.EXPERT_ROUTER, _T.SHARED_GATE, _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_GATE, _T.FFN_UP, _T.FFN_SUB_NORM,
    _T.FFN_DOWN_BIAS, _T.FFN_DOWN_OUTLIERS, _T.FFN_DOWN,
    _T.DENSE_POST_NORM, _T.ROUTED_NORM, _T.ROUTED_POST_NORM, _T.POST_FFN_NORM,
    _T.OWN_IN_NORM, _T.OWN_IN, _T.OWN_GATE, _T.OWN_OUT, _T.OWN_NORM, _T.LAYER_SCALE,
    _T.MTP_END_NORM,
)  # fmt: skip
_EXPERT_ORDER: Final = (
    _T.FFN_GATE_BIAS, _T.FFN_UP_BIAS, _T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN_BIAS, _T.FFN_DOWN,
)  # fmt: skip
_FINAL_ORDER: Final = (_T.FINAL_NORM, _T.FINAL_NORM_BIAS, _T.DENSE, _T.HEAD_BIAS)
EXPERT_TYPES: Final = (
    _T.FFN_GATE, _T.FFN_UP, _T.FFN_DOWN,
    _T.FFN_GATE_OUTLIERS, _T.FFN_UP_OUTLIERS, _T.FFN_DOWN_OUTLIERS,
)  # fmt: skip


def layer_shapes(h: Header, kind: LayerKind, own_width: int) -> dict[int, tuple[int, int]]:
    q, k, v, mixed = kind.mixer_dims(h.dim)
    per_head = kind.qk_norm == QkNorm.PER_HEAD
    hidden = (
        _T.INPUT_SHIFT, _T.SECOND_SHIFT, _T.INPUT_NORM, _T.INPUT_NORM_BIAS, _T.ATTN_NORM,
        _T.ATTN_NORM_BIAS,
        _T.FFN_NORM, _T.FFN_NORM_BIAS, _T.ATTN_OUT_BIAS, _T.FFN_DOWN_BIAS, _T.POST_ATTN_NORM,
        _T.POST_FFN_NORM, _T.ROUTER_NORM, _T.ROUTED_NORM, _T.ROUTED_POST_NORM, _T.DENSE_POST_NORM,
        _T.OWN_NORM, _T.MTP_TRUNK_NORM, _T.MTP_TOKEN_NORM, _T.MTP_HIDDEN_NORM, _T.MTP_END_NORM,
    )  # fmt: skip
    matrices: dict[int, tuple[int, int]] = {
        _T.Q: (q, h.dim),
        _T.K: (k, h.dim),
        _T.V: (v, h.dim),
        _T.ATTN_OUT: (h.dim, mixed),
        _T.FFN_GATE: (kind.ffn_dim, h.dim),
        _T.FFN_UP: (kind.ffn_dim, h.dim),
        _T.FFN_DOWN: (h.dim, kind.ffn_dim),
    }
    return {
        **matrices,
        **{OUTLIERS_OF[matrix]: shape for matrix, shape in matrices.items()},
        _T.Q_BIAS: (1, q),
        _T.K_BIAS: (1, k),
        _T.V_BIAS: (1, v),
        _T.Q_NORM: (1, kind.head_dim if per_head else q),
        _T.K_NORM: (1, kind.head_dim if per_head else kind.latent_rank or k),
        _T.Q_UP: (kind.n_heads * kind.query_dim, kind.query_rank),
        _T.K_UP: (kind.n_heads * kind.latent_rank, kind.nope_dim),
        _T.V_UP: (mixed, kind.latent_rank),
        _T.SINKS: (1, kind.n_heads),
        _T.MIX_GATE: (kind.n_heads if kind.output_gate == 2 else kind.gate_rank or mixed, h.dim),
        _T.BETA: (kind.n_value_heads, h.dim),
        _T.DECAY: (kind.gate_rank or kind.n_decays, h.dim),
        _T.GATE_UP: (mixed, kind.gate_rank),
        _T.DECAY_UP: (kind.n_decays, kind.gate_rank),
        _T.DECAY_RATE: (1, kind.n_decays),
        _T.DECAY_BIAS: (1, kind.n_decays),
        _T.MIX_NORM: (1, kind.value_dim),
        _T.CONV: (1, kind.n_taps * kind.channels(h.dim)),
        _T.CONV_BIAS: (1, h.dim),
        **_ssd_shapes(h, kind),
        _T.ATTN_SUB_NORM: (1, mixed),
        _T.FFN_SUB_NORM: (1, kind.ffn_dim),
        _T.FFN_GATE_BIAS: (1, kind.ffn_dim),
        _T.FFN_UP_BIAS: (1, kind.ffn_dim),
        **dict.fromkeys(hidden, (1, h.dim)),
        _T.EXPERT_ROUTER: (kind.n_experts, h.dim),
        _T.ROUTER_BIAS: (1, kind.n_experts),
        _T.SELECTION_BIAS: (1, kind.n_experts),
        _T.SHARED_GATE: (1, h.dim),
        _T.EXPERT_SCALE: (1, kind.n_experts),
        _T.LAYER_SCALE: (1, 1),
        _T.OWN_IN_NORM: (1, own_width),
        _T.OWN_IN: (own_width, h.dim),
        _T.OWN_GATE: (own_width, h.dim),
        _T.OWN_OUT: (h.dim, own_width),
        _T.MTP_JOIN: (h.dim, 2 * h.dim),
    }


def _ssd_shapes(h: Header, kind: LayerKind) -> dict[int, tuple[int, int]]:
    return {
        _T.SSD_GATE: (kind.values, h.dim),
        _T.SSD_IN: (kind.channels(h.dim), h.dim),
        _T.SSD_STEP: (kind.n_value_heads, h.dim),
        _T.SSD_RATE: (1, kind.n_value_heads),
        _T.SSD_STEP_BIAS: (1, kind.n_value_heads),
        _T.SSD_SKIP: (1, kind.n_value_heads),
        _T.SSD_CONV: (1, kind.n_taps * kind.channels(h.dim)),
        _T.SSD_CONV_BIAS: (1, kind.channels(h.dim)),
        _T.SSD_NORM: (1, kind.values),
        _T.SSD_OUT: (h.dim, kind.values),
    }


def expert_shapes(h: Header, kind: LayerKind) -> dict[int, tuple[int, int]]:
    return {
        _T.FFN_GATE_BIAS: (1, kind.expert_dim),
        _T.FFN_UP_BIAS: (1, kind.expert_dim),
        _T.FFN_GATE: (kind.expert_dim, h.dim),
        _T.FFN_UP: (kind.expert_dim, h.dim),
        _T.FFN_DOWN_BIAS: (1, h.dim),
        _T.FFN_DOWN: (h.dim, kind.expert_dim),
    }


def unit_shapes(
    h: Header, kinds: Sequence[LayerKind], unit: UnitId, own_width: int, head_rows: int = 0
) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of each tensor of a unit; ``kinds`` are those of the layers.

    ``head_rows`` are the rows of HEAD if HEAD_REST has the others.
    """
    if unit.role == Role.LAYER:
        return layer_shapes(h, kinds[unit.layer], own_width)
    if unit.role == Role.EXPERT:
        return expert_shapes(h, kinds[unit.layer])
    return {
        _T.EMBEDDING: (h.n_vocab, h.dim),
        _T.FINAL_NORM: (1, h.dim),
        _T.FINAL_NORM_BIAS: (1, h.dim),
        _T.DENSE: (h.dim, h.dim),
        _T.HEAD_BIAS: (1, h.n_vocab),
        _T.HEAD: (head_rows or h.n_vocab, h.dim),
        _T.HEAD_REST: (h.n_vocab - head_rows, h.dim),
        _T.OWN_TABLE: (h.n_vocab, h.n_layers * own_width),
    }


def unit_order(role: Role, *, is_tied: bool) -> tuple[TensorType, ...]:
    return {
        Role.EMBEDDING: (_T.EMBEDDING,),
        Role.LAYER: _LAYER_ORDER,
        Role.FINAL: _FINAL_ORDER if is_tied else (*_FINAL_ORDER, *lay.HEADS),
        Role.EXPERT: _EXPERT_ORDER,
        Role.OWN_TABLE: (_T.OWN_TABLE,),
    }[role]


def head_rows_of(h: Header, tensors: Iterable[tuple[int, int]]) -> int:
    """Return the rows of HEAD if HEAD_REST may follow, else 0; ``tensors`` are (type, rows)."""
    rows = next((n_rows for kind, n_rows in tensors if kind == _T.HEAD), 0)
    return rows if rows < h.n_vocab and rows % lay.TILE_ROWS == 0 else 0


def check_order(
    order: Sequence[int], earlier: Sequence[tuple[int, int]], kind: int, index: int, name: str
) -> None:
    """Refuse a tensor that may not follow the ``earlier`` ones, each (type, index).

    Experts repeat gate, up and down, so only types are compared.
    """
    if kind not in order:
        raise QsfArgumentError(f"{name}: does not belong in this unit")
    if (kind, index) in earlier:
        raise QsfArgumentError(f"{name}: index {index} is written twice")
    if index == 0 and any(order.index(t) > order.index(kind) for t, _ in earlier):
        raise QsfArgumentError(f"{name}: comes after type {earlier[-1][0]}, allowed: before it")


def pack_tensor(t: Tensor, unit_idx: int) -> bytes:
    return lay.TENSOR_ENTRY.pack(
        unit_idx, t.type, t.n_rows, t.n_cols, t.dtype, t.layout, t.index, t.n_entries, t.data_off
    )
