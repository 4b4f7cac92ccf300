# SPDX-License-Identifier: Apache-2.0
"""What the reference computes: a configuration, the weights, and where they are read from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from oracle.reference_experts import Routing
from oracle.reference_tiles import decode_outliers, decode_tiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from qsf.file.kinds import LayerKind, RopeSet
    from qsf.file.layout import Arch, Header, UnitId

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer computes; which norms, biases and matrices it has, its weights say."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    activation: str  # a name that `activate` knows
    window_tokens: int = 0
    frequencies: Array | None = None  # radians per position of each rotated pair; None: no RoPE
    rope_interleaved: bool = False
    rope_factor: float = 1.0  # of cos and sin
    score_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    score_cap: float = 0.0  # 0: none
    temperature: tuple[float, int] | None = None  # beta, step
    slopes: tuple[float, ...] = ()  # of ALiBi
    qk_norm: Literal["none", "per_head", "whole_width", "own_weights"] = "none"
    has_late_qk_norm: bool = False  # behind RoPE
    qkv_limit: float = 0.0  # 0: none
    latent_norm_dim: int = 0  # 0: all
    decay_limit: float = 0.0  # 0: none
    xielu: tuple[float, float, float] = (0.0, 0.0, 0.0)
    is_parallel: bool = False
    is_post_norm: bool = False
    sees_later: bool = False
    residual_factor: float = 1.0
    routing: Routing | None = None  # of layers with experts
    pinned_tokens: int = 0  # first positions, seen beside the window
    n_taps: int = 0  # of a convolution
    mixer: str = "attention"  # short_conv, delta, ssd, attention_and_ssd, none
    state: tuple[int, int, int, int] = (0, 0, 0, 0)  # heads of keys, of values, dims of both
    has_tiled_heads: bool = False  # value heads of a key head are n_key_heads apart
    has_sigmoid_gate: bool = False
    beta_factor: float = 1.0
    value_epsilon: float = 0.0  # of the norm of a value; 0: the model's
    has_value_norm: bool = False
    values_are_keys: bool = False  # before their norm
    latent: tuple[int, int] | None = None  # rank, and dimensions of a query without RoPE
    kv_source: int | None = None  # the layer whose keys and values it reads


@dataclass(frozen=True, slots=True)
class Config:
    """What `forward` must know about a model beside its weights."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"]
    activation: str  # a name that `activate` knows
    positions: Literal["rope", "learned", "none"]
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"  # none, linear or llama3
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_tokens: int = 8192
    rope_dims: int | None = None
    rope_interleaved: bool = False
    window_tokens: int = 0
    embedding_factor: float = 1.0
    logit_cap: float = 0.0  # 0: none
    layers: tuple[Layer, ...] = ()  # empty: all as the fields above say

    def layer(self, i: int) -> Layer:
        """What layer `i` computes."""
        if self.layers:
            return self.layers[i]
        return Layer(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            activation=self.activation,
            window_tokens=self.window_tokens,
            frequencies=rope_frequencies(self) if self.positions == "rope" else None,
            rope_interleaved=self.rope_interleaved,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration with its weights, all f32.

    Matrices are [outputs, inputs]. `integer` names the matrices that a file stores quantised, with
    the bits of the integer activations that the engine multiplies them with: 16 for 8-bit
    weights, else 8, with a scale for `scale_cols` columns. `outliers` has what the outlier table
    of a matrix adds to it: that part meets the activations before they are rounded.
    """

    config: Config
    weights: Mapping[str, Array]
    integer: Mapping[str, int] = field(default_factory=dict)
    outliers: Mapping[str, Array] = field(default_factory=dict)
    scale_cols: int = 64


def rope_frequencies(config: Config) -> NDArray[np.float32]:
    """Radians per position for every rotated pair, f32 [rope_dims / 2]."""
    if config.rope_scaling not in ("none", "linear", "llama3"):
        message = f"unknown RoPE scaling {config.rope_scaling!r}"
        raise ValueError(message)
    n_dims = config.head_dim if config.rope_dims is None else config.rope_dims
    exponents = np.arange(0, n_dims, 2, dtype=np.float64) / n_dims
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling == "linear":
        frequencies = frequencies / config.rope_factor
    elif config.rope_scaling == "llama3":
        # Short waves stay, long ones are stretched, those between are blended.
        turns = config.rope_original_tokens * frequencies / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = keep * frequencies + (1 - keep) * frequencies / config.rope_factor
    return frequencies.astype(np.float32)


def load_huggingface(folder: Path) -> Model:
    """Read a checkpoint with the tables of the converter, and nothing that computes."""
    from qsf.file.layout import Dtype, TensorType
    from qsf_converter.rounding.pieces import read_tensor
    from qsf_converter.rounding.plan import Policy, make_plan
    from qsf_converter.sources.source import open_source

    weights: dict[str, Array] = {}
    with open_source(folder) as source:
        facts = source.facts
        policy = Policy(Dtype.F16, Dtype.F16)  # of the plan only names and shapes are used
        plan = make_plan(source.family, facts, source.checkpoint, policy)
        for target in plan.targets:
            kind = target.rule.target
            name = "positions" if kind is None else TensorType(kind).name.lower()
            values = read_tensor(target, source.checkpoint)
            weights[_place_of(target.unit) + name] = values[0] if target.is_vector else values
    kinds = facts.layer_kinds if "KIND" in facts.tables() else ()
    sets = {s.number: s for s in facts.rope_sets}
    return Model(_config_of(facts.header, facts.arch, kinds, sets), weights)


def load_qsf(path: Path, context: int = 0) -> Model:
    """Read a `.qsf` file: the weights are the values that its codes stand for.

    `context` is that of the session, which picks among RoPE sets; 0: the model's own.
    """
    from oracle.file.reader import Reader
    from qsf.file import layout

    weights: dict[str, Array] = {}
    integer: dict[str, int] = {}
    multiplied: dict[str, layout.Dtype] = {}
    outliers: dict[str, Array] = {}
    with Reader(path) as reader:
        header, arch = reader.header, reader.arch
        for unit, tensor in [(of, tensor) for of in reader.units for tensor in of.tensors]:
            name = _place_of(unit.id) + layout.TensorType(tensor.type).name.lower()
            data = reader.read_tensor(tensor, unit.idx)
            dtype = layout.Dtype(tensor.dtype)
            floats = {layout.Dtype.F16: "<f2", layout.Dtype.F32: "<f4"}
            if tensor.layout == layout.Layout.VECTOR:
                weights[name] = np.frombuffer(data, floats[dtype], tensor.n_cols).astype(np.float32)
                continue
            if tensor.layout == layout.Layout.OUTLIERS:
                table = decode_outliers(data, tensor.n_rows, tensor.n_cols)
                outliers[name.removesuffix("_outliers")] = table
                continue
            kind = layout.dtype_name(dtype)
            weights[name] = decode_tiles(kind, data, tensor.n_rows, tensor.n_cols)
            if dtype not in floats:
                multiplied[name] = dtype
                is_fine = dtype in (layout.Dtype.Q8, layout.Dtype.Q8_0)
                integer[name] = 16 if is_fine else arch.act_bits
        learned = header.positions == layout.Positions.LEARNED
        if learned:
            data = reader.read_section("WPOS")
            shape = header.max_tokens, header.dim
            kind = "<f4" if len(data) == 4 * shape[0] * shape[1] else "<f2"
            weights["positions"] = np.frombuffer(data, kind).astype(np.float32).reshape(shape)
        has_kinds = "KIND" in reader.sections or "ROPE" in reader.sections
        kinds = reader.layer_kinds
        # The last one of a number that begins at this context at most.
        fits = (s for s in reader.rope_sets if s.least_context <= (context or header.max_tokens))
        sets = {s.number: s for s in fits}
    config = _config_of(header, arch, kinds if has_kinds else (), sets)
    if "head" in weights:  # the embedding is only looked up
        multiplied.pop("embedding", None)
    # Scales of the kept types are of 32 columns or fewer.
    has_only_parts = all(dtype in layout.KEPT for dtype in multiplied.values())
    return Model(config, weights, integer, outliers, 32 if has_only_parts else 64)


def _config_of(
    header: Header, arch: Arch, kinds: Sequence[LayerKind], sets: Mapping[int, RopeSet]
) -> Config:
    """What a header says; with ``kinds`` each layer says it of itself."""
    from qsf.file import layout

    config = Config(
        n_layers=header.n_layers,
        dim=header.dim,
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads or header.n_heads,
        head_dim=header.head_dim,
        norm="layer" if header.norm == layout.Norm.LAYER else "rms",
        activation=layout.Activation(header.activation).name.lower(),
        positions=("learned", "rope", "none")[header.positions],
        norm_epsilon=arch.norm_epsilon,
        rope_theta=header.rope_theta,
        rope_scaling=layout.RopeScaling(arch.rope_scaling).name.lower(),
        rope_factor=arch.rope_factor,
        rope_low_freq_factor=arch.rope_low_freq_factor,
        rope_high_freq_factor=arch.rope_high_freq_factor,
        rope_original_tokens=arch.rope_original_tokens,
        rope_dims=arch.rope_dims,
        rope_interleaved=arch.rope_interleaved,
        window_tokens=arch.window_tokens,
        embedding_factor=arch.embedding_factor,
        logit_cap=arch.logit_cap,
    )
    plain = config.layer(0).frequencies
    layers = tuple(
        _layer_of(kind, sets, plain, config, is_encoder=arch.is_encoder) for kind in kinds
    )
    return dataclasses.replace(config, layers=layers)


def _place_of(unit: UnitId) -> str:
    """What the names of a unit's tensors begin with."""
    from qsf.file.layout import Role

    layer = f"layer.{unit.layer}."
    places = {Role.LAYER: layer, Role.EXPERT: f"{layer}expert.{unit.expert}."}
    return places.get(unit.role, "")


def _routing_of(kind: LayerKind) -> Routing | None:
    scores: tuple[Any, ...] = ("softmax", "sigmoid", "logits")
    weights: tuple[Any, ...] = ("as_is", "by_sum", "softmax")
    group_scores: tuple[Any, ...] = ("max", "sum_of_2")
    if not kind.n_experts:
        return None
    return Routing(
        n_experts=kind.n_experts,
        n_chosen=kind.n_chosen,
        score=scores[kind.expert_score],
        weights=weights[kind.expert_weights],
        epsilon=kind.weights_epsilon,
        factor=kind.weights_factor,
        n_groups=kind.n_groups,
        n_groups_kept=kind.n_groups_kept,
        group_score=group_scores[kind.group_score],
    )


def _layer_of(
    kind: LayerKind,
    sets: Mapping[int, RopeSet],
    plain: Array | None,
    config: Config,
    *,
    is_encoder: bool,
) -> Layer:
    """What a layer of a `.qsf` file computes; `plain` are the frequencies without section ROPE."""
    from qsf.file import kinds, layout

    rope: dict[str, Any] = {}
    if kind.rope_set in sets:
        chosen = sets[kind.rope_set]
        rope = {
            "frequencies": np.array(chosen.frequencies, np.float32),
            "rope_interleaved": chosen.is_interleaved,
            "rope_factor": chosen.factor,
        }
    elif kind.rope_set != kinds.ROPE_NONE:
        rope = {"frequencies": plain, "rope_interleaved": config.rope_interleaved}
    names: tuple[Any, ...] = ("none", "per_head", "whole_width", "own_weights")
    beta, step = kind.temperature_beta, kind.temperature_step
    return Layer(
        n_heads=kind.n_heads,
        n_kv_heads=kind.n_kv_heads,
        head_dim=kind.head_dim,
        activation=layout.Activation(kind.activation).name.lower(),
        window_tokens=kind.window_tokens,
        score_scale=kind.score_scale,
        score_cap=kind.score_cap,
        temperature=(beta, step) if step else None,
        slopes=kind.alibi_slopes,
        qk_norm=names[kind.qk_norm],
        has_late_qk_norm=bool(kind.has_late_qk_norm),
        qkv_limit=kind.qkv_limit,
        latent_norm_dim=kind.latent_norm_dim,
        decay_limit=kind.decay_limit,
        xielu=(kind.xielu_square, kind.xielu_exp, kind.xielu_line),
        is_parallel=kind.is_parallel,
        is_post_norm=bool(kind.is_post_norm),
        sees_later=is_encoder,
        residual_factor=kind.residual_factor,
        routing=_routing_of(kind),
        n_taps=kind.n_taps,
        mixer=kinds.Mixer(kind.mixer).name.lower(),
        state=(kind.n_key_heads, kind.n_value_heads, kind.key_dim, kind.value_dim),
        has_tiled_heads=bool(kind.has_tiled_heads),
        has_sigmoid_gate=bool(kind.has_sigmoid_gate),
        beta_factor=kind.beta_factor,
        value_epsilon=kind.value_epsilon,
        has_value_norm=bool(kind.value_norm),
        values_are_keys=bool(kind.values_are_keys),
        latent=(kind.latent_rank, kind.nope_dim) if kind.latent_rank else None,
        kv_source=kind.kv_source - 1 if kind.kv_source else None,
        **rope,
    )
