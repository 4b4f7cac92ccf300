# SPDX-License-Identifier: Apache-2.0
"""Small .qsf files with random weights whose layers compute different things.

Made without the converter, so that what the engine computes can be looked at field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
from qsf.file.writer import Writer, expert_shapes, unit_order, unit_shapes
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
BIASES: Final = (T.Q_BIAS, T.K_BIAS, T.V_BIAS, T.ATTN_OUT_BIAS, T.FFN_UP_BIAS, T.FFN_DOWN_BIAS)
NORM_BIASES: Final = (T.ATTN_NORM_BIAS, T.FFN_NORM_BIAS)
POST_NORMS: Final = (T.POST_ATTN_NORM, T.POST_FFN_NORM)
SUB_NORMS: Final = (T.ATTN_SUB_NORM, T.FFN_SUB_NORM)


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


_XIELU: Final[dict[str, object]] = {
    "activation": Activation.XIELU, "xielu_square": 0.8, "xielu_exp": 0.7, "xielu_line": 0.5,
}  # fmt: skip
MIXED: Final = (
    Layer(kind(qk_norm=QkNorm.PER_HEAD, window_tokens=5), (T.INPUT_NORM, *POST_NORMS)),
    Layer(kind(n_heads=6, n_kv_heads=3, rope_set=1, score_cap=2.0, activation=Activation.GELU_TANH),
          (*BIASES, T.SINKS)),
    Layer(kind(head_dim=8, rope_set=ROPE_NONE, alibi_slopes=(0.5, 0.25, 0.125, 0.0625),
               score_cap=3.0, ffn=Ffn.PLAIN, ffn_dim=40, activation=Activation.RELU)),
    Layer(kind(qk_norm=QkNorm.WHOLE_WIDTH, residual_factor=0.3), POST_NORMS,
          (T.ATTN_NORM, T.FFN_NORM)),
    Layer(kind(is_parallel=True, qk_norm=QkNorm.OWN_WEIGHTS, score_scale=0.2), (),
          (T.FFN_NORM,)),
    Layer(kind(is_parallel=True, n_kv_heads=1, temperature_beta=0.3, temperature_step=7,
               window_tokens=40, activation=Activation.SILU_CLAMPED), (*BIASES, T.SINKS)),
    Layer(kind(n_kv_heads=4, activation=Activation.RELU_SQUARED), SUB_NORMS),
    Layer(kind(ffn=Ffn.NONE, window_tokens=33, rope_set=1)),
    Layer(kind(qk_norm=QkNorm.PER_HEAD, has_late_qk_norm=1, qkv_limit=0.5, **_XIELU)),
    Layer(kind(n_kv_heads=1, qk_norm=QkNorm.OWN_WEIGHTS, has_late_qk_norm=1, rope_set=1,
               ffn=Ffn.PLAIN, **_XIELU), BIASES),
)  # fmt: skip
LAYER_NORMS: Final = (
    Layer(kind(ffn=Ffn.PLAIN, rope_set=ROPE_NONE, alibi_slopes=(1.0, 0.5, 0.25, 0.0)),
          (T.INPUT_NORM, T.INPUT_NORM_BIAS, *NORM_BIASES, *BIASES)),
    Layer(kind(is_parallel=True, activation=Activation.GELU_ERF), NORM_BIASES),
    Layer(kind(qk_norm=QkNorm.OWN_WEIGHTS, window_tokens=20), NORM_BIASES),
)  # fmt: skip


EXPERT_BIASES: Final = (T.FFN_GATE_BIAS, T.FFN_UP_BIAS, T.FFN_DOWN_BIAS)
APART: Final = (T.ROUTER_NORM, T.EXPERT_SCALE, T.ROUTED_NORM, T.ROUTED_POST_NORM, T.LAYER_SCALE)
LATENT: Final = (
    Layer(kind(n_kv_heads=1, head_dim=80, latent_rank=64, nope_dim=24, latent_value_dim=16,
               query_rank=40, score_scale=0.15)),
    Layer(kind(n_heads=3, n_kv_heads=1, head_dim=136, latent_rank=128, nope_dim=72, rope_set=1,
               latent_value_dim=48, window_tokens=40, temperature_beta=0.3, temperature_step=7,
               n_experts=4, n_chosen=2, expert_dim=24), (T.SINKS, T.ATTN_SUB_NORM, T.Q_BIAS)),
    Layer(kind(n_heads=2, n_kv_heads=1, head_dim=65, latent_rank=64, nope_dim=5, query_rank=90,
               latent_value_dim=32, rope_set=ROPE_NONE, alibi_slopes=(0.5, 0.25), score_cap=3.0,
               output_gate=2, latent_norm_dim=40),
          (T.Q_BIAS, T.K_BIAS, T.ATTN_OUT_BIAS, *POST_NORMS)),
)  # fmt: skip
ROUTED: Final = (
    *LATENT,
    Layer(kind()),
    Layer(kind(ffn=Ffn.NONE, n_experts=6, n_chosen=2, expert_dim=40,
               expert_weights=ExpertWeights.BY_SUM)),
    Layer(kind(ffn_dim=24, n_experts=8, n_chosen=3, expert_dim=40, weights_factor=2.5,
               expert_score=ExpertScore.SIGMOID, expert_weights=ExpertWeights.BY_SUM,
               weights_epsilon=1e-20, n_groups=4, n_groups_kept=2,
               group_score=GroupScore.TWO_LARGEST), (T.SELECTION_BIAS, T.SHARED_GATE)),
    Layer(kind(ffn=Ffn.NONE, n_experts=5, n_chosen=5, expert_dim=17, residual_factor=0.5,
               expert_score=ExpertScore.LOGIT, expert_weights=ExpertWeights.SOFTMAX,
               activation=Activation.SILU_CLAMPED), (T.ROUTER_BIAS, T.SINKS, *POST_NORMS), (),
          EXPERT_BIASES),
    Layer(kind(n_experts=4, n_chosen=1, expert_dim=64, is_parallel=True), (), (T.FFN_NORM,)),
    Layer(kind(n_experts=6, n_chosen=2, expert_dim=40, value_norm=1, residual_factor=0.7),
          (*APART, T.SHARED_GATE, T.DENSE_POST_NORM, *POST_NORMS)),
    Layer(kind(ffn=Ffn.NONE, n_experts=5, n_chosen=2, expert_dim=24, values_are_keys=1,
               value_norm=1, qk_norm=QkNorm.PER_HEAD), APART),
    Layer(kind(n_experts=4, n_chosen=2, expert_dim=24, values_are_keys=1, output_gate=1),
          (T.ROUTED_NORM, T.DENSE_POST_NORM, T.K_BIAS)),
)  # fmt: skip
DELTA: Final = kind(mixer=Mixer.DELTA, n_kv_heads=4, rope_set=ROPE_NONE, n_taps=4, n_key_heads=2,
                    n_value_heads=6, key_dim=24, value_dim=40)  # fmt: skip
SSD: Final = replace(DELTA, mixer=Mixer.SSD)
RECURRENT: Final = (
    Layer(DELTA),
    Layer(replace(DELTA, n_taps=3, n_value_heads=4, value_dim=16, has_tiled_heads=1,
                  beta_factor=2.0, value_epsilon=1e-3), POST_NORMS),
    Layer(kind(qk_norm=QkNorm.PER_HEAD, output_gate=1)),
    Layer(replace(DELTA, n_taps=2, n_key_heads=1, n_value_heads=2, key_dim=17, value_dim=33,
                  ffn=Ffn.NONE, n_experts=6, n_chosen=2, expert_dim=40, residual_factor=0.5)),
    Layer(kind(n_heads=3, n_kv_heads=1, window_tokens=9, output_gate=1), (T.SINKS,)),
    Layer(kind(n_heads=3, n_kv_heads=1, head_dim=10, rope_set=ROPE_NONE, output_gate=2),
          POST_NORMS),
    Layer(replace(DELTA, gate_rank=20, has_channel_decays=1, has_sigmoid_gate=1)),
    Layer(replace(DELTA, n_value_heads=2, key_dim=72, value_dim=17, has_channel_decays=1)),
    Layer(replace(DELTA, gate_rank=200, n_taps=2), POST_NORMS),
    Layer(replace(DELTA, has_channel_decays=1, has_sigmoid_gate=1, decay_limit=3.0)),
    Layer(SSD, (T.SSD_CONV_BIAS, T.SSD_NORM)),
    Layer(replace(SSD, n_taps=2, n_key_heads=3, n_value_heads=3, key_dim=17, value_dim=33,
                  ffn=Ffn.NONE, residual_factor=0.5)),
    Layer(kind(mixer=Mixer.NONE, ffn=Ffn.PLAIN, activation=Activation.RELU_SQUARED, n_experts=6,
               n_chosen=2, expert_dim=40, expert_ffn=Ffn.PLAIN, rope_set=ROPE_NONE, n_kv_heads=4)),
    Layer(kind(mixer=Mixer.ATTENTION_AND_SSD, n_heads=3, n_kv_heads=1, n_taps=3, n_key_heads=2,
               n_value_heads=4, key_dim=20, value_dim=32, output_gate=1, is_parallel=True),
          (T.SSD_NORM, T.SINKS, *BIASES), (T.FFN_NORM,)),
)  # fmt: skip


_OF_HEADS: Final[dict[str, object]] = {"qk_norm": QkNorm.PER_HEAD, "window_tokens": 9}
SHARED: Final = (
    Layer(kind(value_norm=1, **_OF_HEADS), POST_NORMS),
    Layer(kind(kv_source=1, ffn_dim=40, **_OF_HEADS), (T.LAYER_SCALE,)),
    Layer(kind(n_kv_heads=1, head_dim=8, rope_set=1, values_are_keys=1, qk_norm=QkNorm.PER_HEAD)),
    Layer(kind(kv_source=3, n_kv_heads=1, head_dim=8, rope_set=1, output_gate=1), (T.SINKS,)),
    Layer(kind(kv_source=1, n_heads=6, ffn=Ffn.NONE, n_experts=6, n_chosen=2, expert_dim=40,
               **_OF_HEADS), (T.Q_BIAS, T.LAYER_SCALE)),
    Layer(kind(kv_source=3, n_kv_heads=1, head_dim=8, rope_set=ROPE_NONE, residual_factor=0.5,
               ffn=Ffn.NONE)),
)  # fmt: skip
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
            types -= {T.DENSE, T.SECOND_SHIFT}  # of encoders
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
