# SPDX-License-Identifier: Apache-2.0
"""The tensors of a unit in their order, and their shapes, for tests that write files themselves.

A second statement of what csrc/format/config.c says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qsf.file.kinds import LayerKind, Mixer, QkNorm
from qsf.file.layout import LAYER_TENSORS, Dtype, Header, Layout, Role, TensorType, UnitId

T = TensorType
# Types whose tiles share their scales: these need whole multiples of so many columns.
HEAD_COLS: Final = dict.fromkeys(
    (Dtype.Q2_K, Dtype.Q3_K, Dtype.Q4_K, Dtype.Q5_K, Dtype.Q6_K, Dtype.IQ4_XS), 256
)
# An expert is an FFN without sparse outliers and norms.
_EXPERT_TENSORS: Final = tuple(
    row
    for row in LAYER_TENSORS
    if row[2] in ("FFN", "OUT", "GATED") and row[1] != Layout.OUTLIERS and row[0] != T.FFN_SUB_NORM
)
_FINAL_ORDER: Final = (
    T.FINAL_QUERY, T.FINAL_NORM, T.FINAL_NORM_BIAS, T.DENSE, T.JOIN, T.HEAD_BIAS, T.HEAD,
    T.HEAD_REST,
)  # fmt: skip


def _mixer_dims(kind: LayerKind, dim: int) -> tuple[int, int, int, int]:
    """Return the rows of the matrices stored as Q, K, V, and the columns of the next one."""
    if kind.latent_rank:
        queries = kind.query_rank or kind.n_heads * kind.query_dim
        return queries, kind.head_dim, 0, kind.n_heads * kind.latent_value_dim
    if kind.mixer == Mixer.DELTA:
        keys = kind.n_key_heads * kind.key_dim
        return keys, keys, kind.values, kind.values
    if kind.mixer == Mixer.SHORT_CONV:
        return dim, dim, dim, dim
    if not kind.has_attention:
        return 0, 0, 0, 0
    q, kv = kind.n_heads * kind.head_dim, kind.n_kv_heads * kind.head_dim
    return q, kv, kv, q


def layer_shapes(h: Header, kind: LayerKind, own_width: int) -> dict[int, tuple[int, int]]:
    q, k, v, mixed = _mixer_dims(kind, h.dim)
    n_decays = kind.n_value_heads * (kind.key_dim if kind.has_channel_decays else 1)
    per_head = kind.qk_norm == QkNorm.PER_HEAD
    extents = {
        "ONE": 1,
        "DIM": h.dim,
        "Q": q,
        "K": k,
        "V": v,
        "MIXED": mixed,
        "GATE": kind.n_heads if kind.output_gate == 2 else kind.gate_rank or mixed,
        "RANK": kind.gate_rank,
        "DECAY": kind.gate_rank or n_decays,
        "DECAYS": n_decays,
        "VALUE_HEADS": kind.n_value_heads,
        "VALUE": kind.value_dim,
        "VALUES": kind.values,
        "CHANNELS": kind.channels(h.dim),
        "HEADS": kind.n_heads,
        "QUERIES": kind.n_heads * kind.query_dim,
        "QUERY_RANK": kind.query_rank,
        "LATENTS": kind.n_heads * kind.latent_rank,
        "LATENT": kind.latent_rank,
        "NOPE": kind.nope_dim,
        "Q_NORM": kind.head_dim if per_head else q,
        "K_NORM": kind.head_dim if per_head else kind.latent_rank or k,
        "CONV": kind.n_taps * kind.channels(h.dim),
        "FFN": kind.ffn_dim,
        "EXPERTS": kind.n_experts,
        "PLE": own_width,
        "JOINED": 2 * h.dim,
        "QUERIED": (3 if kind.has_own_inputs else 1) * h.dim,
        "MESSAGES": 4 * h.dim,
        "LOOPED": kind.message_rank,
        "RELATIVE": kind.n_heads * kind.relative_dim,
        "PROFILES": kind.relative_dim * kind.relative_extent,
        "KV_CONV": kind.n_taps * k,
        "DIM_CONV": kind.n_taps * h.dim,
        "TAPS": kind.n_kv_heads * kind.n_taps,
    }
    return {row[0]: (extents[row[3]], extents[row[4]]) for row in LAYER_TENSORS}


def expert_shapes(h: Header, kind: LayerKind) -> dict[int, tuple[int, int]]:
    extents = {"ONE": 1, "DIM": h.dim, "FFN": kind.expert_dim}
    return {row[0]: (extents[row[3]], extents[row[4]]) for row in _EXPERT_TENSORS}


def unit_shapes(
    h: Header,
    kinds: Sequence[LayerKind],
    unit: UnitId,
    own_width: int,
    head_rows: int,
) -> dict[int, tuple[int, int]]:
    """Return [rows, cols] of each tensor of a unit; HEAD has ``head_rows``, HEAD_REST more."""
    if unit.role == Role.LAYER:
        return layer_shapes(h, kinds[unit.layer], own_width)
    if unit.role == Role.EXPERT:
        return expert_shapes(h, kinds[unit.layer])
    return {
        T.EMBEDDING: (h.n_vocab, h.dim),
        T.FINAL_NORM: (1, h.dim),
        T.FINAL_NORM_BIAS: (1, h.dim),
        T.HEAD_BIAS: (1, h.n_vocab),
        T.HEAD: (head_rows, h.dim),
        T.HEAD_REST: (h.n_vocab - head_rows, h.dim),
        T.OWN_TABLE: (h.n_vocab, h.n_layers * own_width),
    }


def unit_order(role: Role, *, is_tied: bool) -> tuple[TensorType, ...]:
    return {
        Role.EMBEDDING: (T.EMBEDDING,),
        Role.LAYER: tuple(row[0] for row in LAYER_TENSORS),
        Role.FINAL: _FINAL_ORDER[: -2 if is_tied else None],
        Role.EXPERT: tuple(row[0] for row in _EXPERT_TENSORS),
        Role.OWN_TABLE: (T.OWN_TABLE,),
    }[role]
