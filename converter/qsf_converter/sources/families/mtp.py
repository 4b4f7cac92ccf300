"""The MTP head (multi-token prediction) of a checkpoint: one more layer, behind the last one.

DeepSeek and GLM number its tensors as those of layer ``num_hidden_layers``, and GGUF files do the
same for all families; the ``mtp.`` names of Qwen become these.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from qsf.file.kinds import plain_kind
from qsf.file.layout import MAX_LAYERS
from qsf_converter.sources.families.family import Facts
from qsf_converter.sources.families.rules import T, TensorRule, Where, layer

_AT: Final = "layers.{layer}."
_MTP: Final[dict[str, Any]] = {"where": Where.MTP}
_ENDS: Final = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
COPIES: Final = {"embed_tokens.weight": T.EMBEDDING, "shared_head.head.weight": T.HEAD}
"""Tensors of the head that repeat others of the model."""

_Tensor = TypeVar("_Tensor")


def mtp_rules(add: float = 0.0) -> tuple[TensorRule, ...]:
    """The rules of what the head has beside a layer; ``add``: of the model's norms."""
    norms = {
        T.MTP_TOKEN_NORM: f"{_AT}enorm",
        T.MTP_HIDDEN_NORM: f"{_AT}hnorm",
        T.MTP_END_NORM: f"{_AT}shared_head.norm",
    }
    return (
        layer(T.MTP_TRUNK_NORM, "norm.weight", "hidden", of_all=True, add=add, **_MTP),
        *(layer(t, f"{name}.weight", "hidden", add=add, **_MTP) for t, name in norms.items()),
        layer(T.MTP_JOIN, f"{_AT}eh_proj.weight", "hidden", "joined", **_MTP),
    )


def numbered(by_name: Mapping[str, _Tensor], n_layers: int) -> dict[str, _Tensor]:
    def name_of(name: str) -> str:
        match = re.fullmatch(r"mtp\.(?:layers\.(\d{1,6})\.)?(.*)", name)
        if match is None:
            return name
        number, rest = match.groups()
        if number is not None:
            return f"layers.{n_layers + int(number)}.{rest}"
        part, _, ending = rest.rpartition(".")
        return f"layers.{n_layers}.{_ENDS.get(part, part)}.{ending}"

    return {name_of(name): tensor for name, tensor in by_name.items()}


def with_mtp(facts: Facts) -> Facts:
    kinds = facts.layer_kinds or (plain_kind(facts.header, facts.arch),) * facts.header.n_layers
    kind = next(kind for kind in reversed(kinds) if kind.has_attention)
    return replace(
        facts,
        header=replace(facts.header, n_layers=len(kinds) + 1),
        layer_kinds=(*kinds, replace(kind, is_mtp=True)),
        dims={**facts.dims, "joined": 2 * facts.header.dim},
    )


def has_mtp(facts: Facts, rules: tuple[TensorRule, ...], names: Mapping[str, object]) -> bool:
    """True if the tensors are those of one head of a family that runs it."""
    n_layers = facts.header.n_layers
    return (
        (not facts.layer_kinds or any(kind.has_attention for kind in facts.layer_kinds))
        and any(rule.target == T.MTP_JOIN for rule in rules)
        and f"layers.{n_layers}.eh_proj.weight" in names
        and f"layers.{n_layers + 1}.eh_proj.weight" not in names
        and n_layers < MAX_LAYERS
    )
