# SPDX-License-Identifier: Apache-2.0
"""What a file or a checkpoint computes, by the converter's own numpy model.

Golden outputs of transformers judge that model (api/test_families.py). Here it also reads the
tensors of a ``.qsf`` file, as the reader of the tests decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from make.stored import Reader, decode_outliers
from oracle.kept_tiles import decode_tiles
from qsf.file import layout
from qsf.file.kinds import LayerKind, RopeSet, plain_kind
from qsf.file.layout import FINAL_UNIT, Arch, Header, Role, TensorType, UnitId, layer_unit
from qsf_converter.original import layers
from qsf_converter.original import weights as routing
from qsf_converter.original.layers import Observer, Original
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.pieces import read_tensor
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.source import open_source

Array = NDArray[Any]
T = TensorType


@dataclass(frozen=True, slots=True)
class Model:
    """What a model computes, and its weights by names such as ``layer.0.q`` and ``final_norm``.

    ``outliers`` has what the outlier table of a matrix adds to it.
    """

    header: Header
    arch: Arch
    kinds: Sequence[LayerKind]
    sets: Sequence[RopeSet]
    weights: Mapping[str, Array]
    outliers: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of `forward`: a row for each token."""

    logits: Array  # empty for an encoder
    final_norm: Array


def _place_of(unit: UnitId) -> str:
    """What the names of a unit's tensors begin with."""
    layer = f"layer.{unit.layer}."
    places = {Role.LAYER: layer, Role.EXPERT: f"{layer}expert.{unit.expert}."}
    return places.get(unit.role, "")


def load_huggingface(folder: Path) -> Model:
    """Read a checkpoint with the tables of the converter."""
    weights: dict[str, Array] = {}
    with open_source(folder) as source:
        facts = source.facts
        policy = Policy(layout.Dtype.F16, layout.Dtype.F16)  # only names and shapes are used
        for target in make_plan(source.family, facts, source.checkpoint, policy).targets:
            kind = target.rule.target
            name = "positions" if kind is None else TensorType(kind).name.lower()
            values = read_tensor(target, source.checkpoint)
            weights[_place_of(target.unit) + name] = values[0] if target.is_vector else values
    is_gated = "layer.0.ffn_gate" in weights
    plain = plain_kind(facts.header, facts.arch, is_gated=is_gated)
    kinds = facts.layer_kinds or (plain,) * facts.header.n_layers
    return Model(facts.header, facts.arch, kinds, facts.rope_sets, weights)


def load_qsf(path: Path, context: int = 0) -> Model:
    """Read a ``.qsf`` file: the weights are the values that its codes stand for.

    `context` is that of the session, which picks among RoPE sets; 0: the model's own.
    """
    weights: dict[str, Array] = {}
    outliers: dict[str, Array] = {}
    floats = {layout.Dtype.F16: "<f2", layout.Dtype.F32: "<f4"}
    with Reader(path) as reader:
        header = reader.header
        for unit, tensor in [(of, tensor) for of in reader.units for tensor in of.tensors]:
            name = _place_of(unit.id) + TensorType(tensor.type).name.lower()
            data, dtype = reader.read_tensor(tensor, unit.idx), layout.Dtype(tensor.dtype)
            if tensor.layout == layout.Layout.VECTOR:
                weights[name] = np.frombuffer(data, floats[dtype], tensor.n_cols).astype(np.float32)
            elif tensor.layout == layout.Layout.OUTLIERS:
                table = decode_outliers(data, tensor.n_rows, tensor.n_cols)
                outliers[name.removesuffix("_outliers")] = table
            else:
                weights[name] = decode_tiles(dtype, data, tensor.n_rows, tensor.n_cols)
        if header.positions == layout.Positions.LEARNED:
            shape, data = (header.max_tokens, header.dim), reader.read_section("WPOS")
            kind = "<f4" if len(data) == 4 * shape[0] * shape[1] else "<f2"
            weights["positions"] = np.frombuffer(data, kind).astype(np.float32).reshape(shape)
        fits = (s for s in reader.rope_sets if s.least_context <= (context or header.max_tokens))
        sets = tuple(replace(s, least_context=0) for s in fits)
        return Model(header, reader.arch, reader.layer_kinds, sets, weights, outliers)


class _Stored(Original):
    """The weights of a `Model` in place of a checkpoint's; encoders too."""

    def __init__(self, model: Model) -> None:
        facts = SimpleNamespace(
            header=model.header, n_trunk_layers=model.header.n_layers,
            arch=replace(model.arch, is_encoder=False), layer_kinds=model.kinds,
            rope_sets=model.sets,
        )  # fmt: skip
        super().__init__(SimpleNamespace(facts=facts, targets=()), SimpleNamespace())  # type: ignore[arg-type]
        self.model = model

    def of(self, name: str) -> Array:
        values = self.model.weights[name]
        return values + self.model.outliers[name] if name in self.model.outliers else values

    def _of_unit(self, unit: UnitId) -> dict[TensorType, Array]:
        at = _place_of(unit)
        names = (name for name in self.model.weights if name.rpartition(".")[0] + "." == at or
                 (not at and "." not in name and name != "positions"))  # fmt: skip
        return {TensorType[name.removeprefix(at).upper()]: self.of(name) for name in names}

    def weights(self, unit: UnitId) -> Weights:
        kind = self.model.kinds[unit.layer]

        def expert(number: int) -> Weights:
            return Weights(self._of_unit(unit.of_expert(number)), kind)

        return Weights(self._of_unit(unit), kind, expert, layer=unit.layer)

    def vectors(self, unit: UnitId) -> dict[TensorType, Array]:
        return {kind: w for kind, w in self._of_unit(unit).items() if w.ndim == 1}

    def embed(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        whole = np.zeros((*tokens.shape, self.width), np.float32)
        x, beside = self.parts(whole)
        x[:] = self.of("embedding")[tokens] * np.float32(self.arch.embedding_factor)
        if "positions" in self.model.weights:
            x += self.of("positions")[: tokens.shape[1]]
        if "own_table" in self.model.weights:
            self._own_rows = self.of("own_table")
            beside[..., self.header.dim] = tokens
        self.keep_embedded(whole)
        return whole

    def head_rows(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        heads = [name for name in ("head", "head_rest") if name in self.model.weights]
        yield 0, np.concatenate([self.of(name) for name in heads or ["embedding"]])

    def _parts_of_sample(
        self, w: Weights, x: Array, beside: Array, observe: Observer | None
    ) -> tuple[Array, Array, Array]:
        x = x + w[T.INPUT_SHIFT] if T.INPUT_SHIFT in w else x
        behind, y, out = super()._parts_of_sample(w, x, beside, observe)
        if T.FFN_UP not in w and T.FFN_DOWN_BIAS in w:  # of all experts together
            out = out + w[T.FFN_DOWN_BIAS]
        return y if w.kind.is_post_norm else behind, y, out


def forward(
    model: Model,
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    *,
    skip: Sequence[int] = (),
    window: tuple[int, int] = (0, 0),
) -> Trace:
    """Evaluate `tokens` from position 0, in f32.

    The layers of `skip` are not run. `window`: tokens that layers without a window of their own
    see, and how many first ones beside them.
    """
    stored = _Stored(model)

    def hidden(behind: Array, window_tokens: int) -> Array:
        n_seen, n_pinned = (window_tokens, 0) if window_tokens else window
        is_late: Array = np.zeros(behind.shape, bool) if model.arch.is_encoder else behind < 0
        is_far = (abs(behind) >= n_seen) & (np.arange(len(behind)) >= n_pinned)
        return is_late | is_far if n_seen else is_late

    with patch.object(layers, "_hidden_positions", hidden):
        x = stored.embed(np.array([tokens]))
        for i in set(range(model.header.n_layers)) - set(skip):
            x = stored.layer(stored.weights(layer_unit(i)), x)
        final = stored.final_norm(stored.vectors(FINAL_UNIT), x[0])
        logits = np.empty(0) if model.arch.is_encoder else stored.logits(x[0])
    return Trace(logits, final)


@contextmanager
def noted_choices() -> Iterator[list[routing.Choice]]:
    """Yield a list to which each routed layer that runs adds what its tokens chose."""
    choices: list[routing.Choice] = []

    def noted(*arguments: Any) -> routing.Choice:
        choices.append(routing.route(*arguments))
        return choices[-1]

    with patch.object(layers, "route", noted):
        yield choices


def tokens_for(n_vocab: int, n_tokens: int = 48) -> list[int]:
    """Some tokens, always the same."""
    return [int(token) for token in np.random.default_rng(5).integers(0, n_vocab, n_tokens)]


def assert_near(got: Array, want: Array, bound: float = 1e-4) -> None:
    """Equal up to the order of f32 sums, by the largest value of all.

    Each logit passes through a few thousand roundings; the terms of its sums are no larger than
    the largest logit, so 1e-4 of that is generous to rounding and far below any real difference.
    """
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


def hidden_states(model: Model, tokens: Sequence[int]) -> Array:
    """What an encoder computes of each token, behind its dense matrix if there is one."""
    rows = forward(model, tokens).final_norm
    dense = model.weights.get("dense")
    return rows if dense is None else rows @ dense.T
