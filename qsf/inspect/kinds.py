"""What each layer computes, for people and for programs: the sections KIND and ROPE."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from qsf.file.kinds import (
    ROPE_NONE,
    ExpertScore,
    ExpertWeights,
    Ffn,
    GroupScore,
    LayerKind,
    Mixer,
    QkNorm,
)
from qsf.file.layout import Activation

if TYPE_CHECKING:
    from qsf.file.reader import Reader

_NAMES_OF: Final = {
    "activation": Activation,
    "ffn": Ffn,
    "qk_norm": QkNorm,
    "mixer": Mixer,
    "expert_score": ExpertScore,
    "expert_weights": ExpertWeights,
    "group_score": GroupScore,
}
_IN_HEAD: Final = ("n_heads", "n_kv_heads", "head_dim", "window_tokens", "rope_set")
_IN_HEAD_TOO: Final = ("ffn", "ffn_dim", "activation")


def describe_kinds(reader: Reader) -> list[dict[str, Any]]:
    """Return the kinds of layers in the order of their first layer, each with its layers."""
    return [{"layers": layers, **asdict(kind), **_names(kind)} for kind, layers in _kinds(reader)]


def describe_rope(reader: Reader) -> list[dict[str, Any]]:
    """Return the RoPE sets of the section ROPE, with the number of their frequencies."""
    return [{**asdict(s), "frequencies": len(s.frequencies)} for s in reader.rope_sets]


def kind_lines(reader: Reader) -> Iterator[str]:
    """Yield two lines or three for each kind of layer; none for files without KIND."""
    if "KIND" not in reader.sections:
        return
    yield ""
    yield "layers"
    for kind, layers in _kinds(reader):
        yield f"  {_runs(layers)}"
        window = f"window {kind.window_tokens}" if kind.window_tokens else "no window"
        rope = "no rotation" if kind.rope_set == ROPE_NONE else f"RoPE set {kind.rope_set}"
        names = _names(kind)
        ffn = f"FFN {names['ffn']} {kind.ffn_dim} {names['activation']}"
        if kind.has_attention:
            heads = f"{kind.n_heads} heads of {kind.head_dim}"
            yield f"    {heads}, {kind.n_kv_heads} for keys and values, {window}, {rope}, {ffn}"
        else:
            yield f"    {ffn}"
        others = [
            f"{field.name} {_shown(names.get(field.name, getattr(kind, field.name)))}"
            for field in fields(LayerKind)
            if field.name not in (*_IN_HEAD, *_IN_HEAD_TOO)
            and getattr(kind, field.name) != field.default
        ]
        if others:
            yield f"    {', '.join(others)}"
    for s in reader.rope_sets:
        pairs = "pairs side by side" if s.is_interleaved else "pairs of halves"
        least = f", contexts from {s.least_context}" if s.least_context else ""
        yield (f"  RoPE set {s.number}: {len(s.frequencies)} {pairs}, factor {s.factor:.7g}{least}")


def _kinds(reader: Reader) -> list[tuple[LayerKind, list[int]]]:
    layers_of: dict[LayerKind, list[int]] = {}
    for i, kind in enumerate(reader.layer_kinds):
        layers_of.setdefault(kind, []).append(i)
    return list(layers_of.items())


def _names(kind: LayerKind) -> dict[str, str]:
    return {name: names(getattr(kind, name)).name.lower() for name, names in _NAMES_OF.items()}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({len(value)})"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _runs(layers: Sequence[int]) -> str:
    """Return ascending layers as text: layers 0 .. 4, 6."""
    runs = []
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        first, last = numbers[0], numbers[-1]
        runs.append(str(first) if first == last else f"{first} .. {last}")
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(runs)}"
