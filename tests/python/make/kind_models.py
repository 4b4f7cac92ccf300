# SPDX-License-Identifier: Apache-2.0
"""Small .qsf files with random weights whose layers compute different things.

Made without the converter, so that what the engine computes can be looked at field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from make.refusals import table
from make.unit_shapes import expert_shapes, unit_order, unit_shapes
from qsf.file.kinds import (
    ROPE_NONE,
    ExpertScore,
    ExpertWeights,
    Ffn,
    GroupScore,
    LayerKind,
    Mixer,
    QkNorm,
    RopeSet,
)
from qsf.file.layout import (
    EMBEDDING_UNIT,
    EXACT,
    FINAL_UNIT,
    OWN_TABLE_UNIT,
    TABLES,
    Activation,
    Arch,
    Architecture,
    Dtype,
    Header,
    Layout,
    Norm,
    Positions,
    Role,
    TensorType,
    UnitId,
    layer_unit,
)
from qsf.file.writer import Writer
from qsf_converter.rounding.quantisers import quantise_rows

T = TensorType

DIM: Final = 72
VOCAB: Final = 101
HEAD_ROWS: Final = 48  # of the first part of the head
MAX_TOKENS: Final = 512
PLAIN: Final = LayerKind(
    n_heads=4, n_kv_heads=2, head_dim=16, window_tokens=0, rope_set=0, ffn=Ffn.GATED, ffn_dim=80,
    activation=Activation.SILU,
)  # fmt: skip
SETS: Final = (
    RopeSet(0, tuple(0.7**i for i in range(8))),
    RopeSet(0, tuple(0.5**i for i in range(8)), least_context=300, factor=1.25),
    RopeSet(1, (1.0, 0.3, 0.0), is_interleaved=True),
)
_MATRICES: Final = (T.Q, T.K, T.V, T.ATTN_OUT)
_FFN: Final = {
    Ffn.NONE: (),
    Ffn.PLAIN: (T.FFN_NORM, T.FFN_UP, T.FFN_DOWN),
    Ffn.GATED: (T.FFN_NORM, T.FFN_GATE, T.FFN_UP, T.FFN_DOWN),
}
_SSD: Final = (T.SSD_IN, T.SSD_GATE, T.SSD_STEP, T.SSD_RATE, T.SSD_STEP_BIAS, T.SSD_SKIP,
               T.SSD_CONV, T.SSD_OUT)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its kind, optional tensors that it has, and usual ones that it does not have."""

    kind: LayerKind
    extra: tuple[TensorType, ...] = ()
    without: tuple[TensorType, ...] = ()
    of_experts: tuple[TensorType, ...] = ()  # biases of its experts

    def types(self) -> set[TensorType]:
        """Return the types of its tensors."""
        norms = (T.Q_NORM, T.K_NORM) if self.kind.qk_norm else ()
        routed = (T.FFN_NORM, T.EXPERT_ROUTER) if self.kind.n_experts else ()
        usual = {*norms, *routed, *_FFN[Ffn(self.kind.ffn)]}
        if self.kind.mixer != Mixer.NONE:
            usual.add(T.ATTN_NORM)
        if self.kind.mixer not in (Mixer.SSD, Mixer.NONE):
            usual.update(_MATRICES)
        if self.kind.has_ssd:
            usual.update(_SSD)
        if self.kind.values_are_keys or self.kind.latent_rank:
            usual.remove(T.V)
        if self.kind.latent_rank:
            usual |= {T.K_NORM, T.K_UP, T.V_UP}
        if self.kind.query_rank:
            usual |= {T.Q_NORM, T.Q_UP}
        if self.kind.kv_source:
            usual -= {T.K, T.V, T.K_NORM}
        if self.kind.mixer == Mixer.DELTA:
            usual |= {T.MIX_GATE, T.BETA, T.DECAY, T.DECAY_RATE, T.DECAY_BIAS, T.MIX_NORM, T.CONV}
            usual |= {T.GATE_UP, T.DECAY_UP} if self.kind.gate_rank else set()
        elif self.kind.output_gate:
            usual.add(T.MIX_GATE)
        return (usual | set(self.extra)) - set(self.without)


def kind(**changes: object) -> LayerKind:
    """Return ``PLAIN`` with other fields."""
    return replace(PLAIN, **changes)  # type: ignore[arg-type]


_ENUMS: Final[dict[str, type[IntEnum]]] = {
    "activation": Activation, "expert_ffn": Ffn, "expert_score": ExpertScore,
    "expert_weights": ExpertWeights, "ffn": Ffn, "group_score": GroupScore, "mixer": Mixer,
    "qk_norm": QkNorm,
}  # fmt: skip


def _value(field: str, value: Any) -> Any:
    if field == "rope_set" and value == "NONE":
        return ROPE_NONE
    if isinstance(value, list):
        return tuple(value)
    return _ENUMS[field][value] if isinstance(value, str) else value


def _layers(name: str) -> tuple[Layer, ...]:
    """Layers of tests/data/layers.json: fields unlike those of PLAIN, then tensors by name."""
    return tuple(
        Layer(
            kind(**{field: _value(field, value) for field, value in fields.items()}),
            *(tuple(TensorType[name] for name in names) for names in more),
        )
        for fields, *more in table("layers")[name]
    )


MIXED: Final = _layers("MIXED")
LAYER_NORMS: Final = _layers("LAYER_NORMS")
LATENT: Final = _layers("LATENT")
ROUTED: Final = (*LATENT, *_layers("ROUTED"))
RECURRENT: Final = _layers("RECURRENT")
SHARED: Final = _layers("SHARED")
EXPERT_BIASES: Final = (T.FFN_GATE_BIAS, T.FFN_UP_BIAS, T.FFN_DOWN_BIAS)
OWN_ARCH: Final = Arch(embedding_factor=1.5, logit_cap=4.0, own_width=20, tied_head=True)
_OWN: Final = (T.OWN_IN_NORM, T.OWN_IN, T.OWN_GATE, T.OWN_OUT, T.OWN_NORM)


def _values(
    rng: np.random.Generator, type: TensorType, shape: tuple[int, int]
) -> NDArray[np.float32]:
    x: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    if type.name.endswith(("NORM", "SCALE")):
        return np.asarray(np.float32(1.0) + np.float32(0.3) * x)
    if type in (T.DECAY_RATE, T.SSD_RATE):  # positive
        return np.asarray(np.exp(x - np.float32(2.0)))
    if shape[0] == 1:
        return np.asarray(np.float32(0.2) * x)
    return np.asarray(x * np.float32(1.0 if type in TABLES else 1.5 / np.sqrt(shape[1])))


def write_model(
    path: Path,
    layers: Sequence[Layer],
    *,
    dtype: Dtype = Dtype.F16,
    norm: Norm = Norm.RMS,
    arch: Arch = Arch(embedding_factor=1.5, logit_cap=4.0),  # noqa: B008
    rope_sets: Sequence[RopeSet] = SETS,
    seed: int = 0,
) -> Path:
    """Write a model of these layers and return its path; importances differ, for skipping."""
    rng = np.random.default_rng(seed)
    kinds = [layer.kind for layer in layers]
    header = Header(
        architecture=Architecture.OTHER, n_layers=len(layers), dim=DIM,
        n_heads=max(k.n_heads for k in kinds), n_kv_heads=0, n_vocab=VOCAB, max_tokens=MAX_TOKENS,
        ffn_dim=max(max(k.ffn_dim, k.expert_dim) for k in kinds),
        head_dim=max(k.head_dim for k in kinds),
        dtype=dtype, activation=Activation.SILU, norm=norm, positions=Positions.ROPE,
        rope_theta=10000.0, bos_id=1, eos_id=2, pad_id=None,
    )  # fmt: skip
    with Writer(path, header, arch, layer_kinds=kinds, rope_sets=rope_sets) as w:
        ids = [EMBEDDING_UNIT, *map(layer_unit, range(len(layers))), FINAL_UNIT]
        ids += [OWN_TABLE_UNIT] if arch.own_width else []
        for n, unit in enumerate(ids, 1):
            order = unit_order(unit.role, is_tied=arch.tied_head)
            is_layer = unit.role == Role.LAYER
            types = layers[unit.layer].types() if is_layer else set(order)
            types |= set(_OWN) if is_layer and arch.own_width else set()
            types -= {T.DENSE, T.SECOND_SHIFT, T.JOIN, T.FINAL_QUERY}  # of other models
            if not is_layer and norm == Norm.RMS:
                types -= {T.FINAL_NORM_BIAS}
            w.begin_unit(unit, dtype=dtype, importance=0.1 * n)
            shapes = unit_shapes(header, kinds, unit, arch.own_width, HEAD_ROWS)
            for type in order:
                if type not in types:
                    continue
                is_fine = type is T.HEAD and dtype is Dtype.Q4  # the first part of the head
                _write_tensor(w, rng, type, shapes[type], Dtype.Q8 if is_fine else dtype)
            w.end_unit()
            if is_layer:
                _write_experts(w, rng, layers[unit.layer], unit, dtype)
    return path


def _write_experts(
    w: Writer, rng: np.random.Generator, layer: Layer, unit: UnitId, dtype: Dtype
) -> None:
    """Write the experts of a layer; every third has 8 bits, so that there are two templates."""
    for i in range(layer.kind.n_experts):
        of_expert = Dtype.Q8 if i % 3 == 2 and dtype is Dtype.Q4 else dtype
        shapes = expert_shapes(w.header, layer.kind)
        w.begin_unit(unit.of_expert(i), dtype=of_expert, importance=i / 10)
        for type in unit_order(Role.EXPERT, is_tied=False):
            is_gate = type is T.FFN_GATE and layer.kind.expert_ffn == Ffn.PLAIN
            if not is_gate and (type not in EXPERT_BIASES or type in layer.of_experts):
                _write_tensor(w, rng, type, shapes[type], of_expert)
        w.end_unit()


def _write_tensor(
    w: Writer, rng: np.random.Generator, type: TensorType, shape: tuple[int, int], dtype: Dtype
) -> None:
    rows = _values(rng, type, shape)
    is_vector = rows.shape[0] == 1
    stored = Dtype.F32 if is_vector or type in EXACT else dtype
    layout = Layout.VECTOR if is_vector else Layout.TILES
    w.begin_tensor(type, rows.shape[0], rows.shape[1], stored, layout)
    w.write(rows.tobytes() if is_vector else quantise_rows(stored, rows))
    w.end_tensor()
