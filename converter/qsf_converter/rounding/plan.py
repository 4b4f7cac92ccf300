"""Plans every tensor before the first weight is read.

The rules of an architecture are matched with the names and shapes of a checkpoint, and each tensor
gets its stored type.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.family import our_type
from qsf.file.layout import (
    EMBEDDING_UNIT,
    EXACT,
    FINAL_UNIT,
    FINE,
    MAX_LAYERS,
    OWN_TABLE_UNIT,
    TILE_ROWS,
    Dtype,
    Role,
    TensorType,
    UnitId,
    dtype_name,
    layer_unit,
)
from qsf_converter.rounding.tiles import bits_per_weight, tile_bytes
from qsf_converter.sources.checkpoint import KEPT as KEPT_OF_GGUF
from qsf_converter.sources.checkpoint import MXFP4, Checkpoint, SourceTensor
from qsf_converter.sources.families.encoders import DENSE
from qsf_converter.sources.families.family import Factor, Facts, Family
from qsf_converter.sources.families.rules import Place, TensorRule, in_file_order

QUANT_TYPES: Mapping[str, Dtype] = {
    dtype_name(dtype): dtype
    for dtype in (
        *(Dtype.Q2, Dtype.Q2_SYM, Dtype.Q3, Dtype.Q4, Dtype.Q4_SYM, Dtype.Q4_NL),
        *(Dtype.Q5_0, Dtype.TERNARY, Dtype.TERNARY_DENSE, Dtype.Q8, Dtype.F16, Dtype.F32),
    )
}
TERNARY_TYPES = (Dtype.TERNARY, Dtype.TERNARY_DENSE)
KEEP = "keep"
DEFAULT_QUANT_TYPE = "4bit"
ENCODER_QUANT_TYPE = "8bit"  # 4 bits turn vectors by 15 degrees, 8 bits by one
DEFAULT_EMBED_TYPE = "8bit"

_MAX_POSITIONS_BYTES = 256 << 20  # the only tensor that is held whole
_COMPARED_BYTES = 1 << 20  # bytes of a tensor compared at once


@dataclass(frozen=True, slots=True)
class Policy:
    """The type of each tensor: its entry in ``by_name``, else the type of its place."""

    layers: Dtype
    embeddings: Dtype
    by_name: Mapping[str, Dtype] = field(default_factory=dict)  # ``Target.name`` -> type
    keeps_layers: bool = False  # quantised matrices of a GGUF file keep their types
    keeps_embeddings: bool = False

    def keeps(self, source: SourceTensor, rule: TensorRule) -> bool:
        """True if the blocks of a GGUF file's matrix are kept."""
        is_of_layer = rule.place in (Place.LAYER, Place.EXPERT)
        keeps = self.keeps_layers if is_of_layer else self.keeps_embeddings
        return keeps and source.dtype in KEPT_OF_GGUF and _is_as_stored(rule)

    def of_source(self, source: SourceTensor, rule: TensorRule, name: str) -> Dtype:
        """Like ``dtype_of``, but matrices may keep the source's type.

        Those of MXFP4 do, unless fewer bits are requested.
        """
        if self.keeps(source, rule):
            return KEPT_OF_GGUF[source.dtype]
        if (
            source.dtype == MXFP4 and not 0 < bits_per_weight(self.layers) < 4
        ):  # mixed has no weight
            return Dtype.MXFP4
        return self.dtype_of(rule, name)

    def dtype_of(self, rule: TensorRule, name: str) -> Dtype:
        """Vectors are f32, matrices of EXACT f16, position rows f16 unless the layers are f32; the
        head has the embedding's type.
        """
        if rule.place is Place.POSITIONS:
            return Dtype.F32 if self.layers == Dtype.F32 else Dtype.F16
        if rule.target in EXACT:
            return Dtype.F16
        if rule.is_vector:
            return Dtype.F32
        if rule.target in FINE:
            return Dtype.F16 if self.layers in (Dtype.F16, Dtype.F32) else Dtype.Q8
        is_of_layer = rule.place in (Place.LAYER, Place.EXPERT)
        return self.by_name.get(name, self.layers if is_of_layer else self.embeddings)


def _is_as_stored(rule: TensorRule) -> bool:
    is_changed = rule.transposed or rule.is_turned or rule.scale is not None or rule.add
    is_matrix = not rule.is_vector and rule.place is not Place.POSITIONS
    return is_matrix and not is_changed and rule.target not in EXACT


@dataclass(frozen=True, slots=True)
class OutlierPlan:
    """The outliers of a matrix, estimated from a sample, and the action against them."""

    mean: float
    sigma: float
    near_fraction: float  # share beyond three sigmas
    action: str
    has_table: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Which outputs of a source tensor belong to a target: ``n`` of each ``stride``, from
    ``first``.

    Usually the one stride is the whole tensor; tensors fused head by head have one stride for each
    head, or for each group of heads.
    """

    first: int
    n: int
    stride: int
    n_outputs: int  # of the source

    @property
    def is_grouped(self) -> bool:
        return self.stride != self.n_outputs

    def place_of(self, output: int) -> int:
        """Index in the source of output ``output`` of the target."""
        return output // self.n * self.stride + self.first + output % self.n

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the source that contains outputs [start, stop) of the target.

        Neighbouring ranges are adjacent, so that a checkpoint is read in order (see
        ``Checkpoint.digest``).
        """
        if not self.is_grouped:
            return self.first + start, self.first + stop
        return tuple(  # type: ignore[return-value]
            self.place_of(end) if end % self.n else end // self.n * self.stride
            for end in (start, stop)
        )

    def places(self, start: int, stop: int) -> NDArray[np.intp]:
        """Indices of outputs [start, stop) of the target within ``span(start, stop)``."""
        outputs = np.arange(start, stop)
        places = outputs // self.n * self.stride + self.first + outputs % self.n
        return np.asarray(places - self.span(start, stop)[0], np.intp)


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor of the file: [n_rows, n_cols], made of some outputs of a source tensor.

    Its values are those of the source plus the rule's ``add``, times ``factor``, and times 2 to the
    power of the output's entry in ``exponents``.
    """

    rule: TensorRule
    source: SourceTensor
    unit: UnitId  # learned positions: that of the embedding
    n_rows: int
    n_cols: int
    share: Share
    dtype: Dtype
    is_vector: bool
    factor: Factor = 1.0
    exponents: tuple[int, ...] = ()  # of the outputs; empty: all are 0
    joined: tuple[str, ...] = ()  # vectors of further heads, which follow that of the first
    slice_idx: int = 0  # index of the expert in a source with this tensor of all experts
    n_slices: int = 1  # tensors of this shape in the source
    is_mtp: bool = False  # of the MTP head, whose type is not chosen: no text depends on it
    is_raised: bool = False  # to more bits than its unit's type has
    has_blocks: bool = False  # of a GGUF file, which are kept while the type is theirs
    outliers: OutlierPlan | None = None
    tensor_scale: float | None = None  # rule absmean: one scale for the whole matrix

    @property
    def name(self) -> str:
        """The name in reports: ``3.FFN_DOWN``, ``EMBEDDING``, ``3.EXPERTS.FFN_DOWN`` of all."""
        return target_name(self.rule, self.unit)

    @property
    def is_of_layer(self) -> bool:
        return self.unit.role in (Role.LAYER, Role.EXPERT)

    @property
    def has_choice(self) -> bool:
        """True for a matrix whose type is chosen: no router, MTP head or block that is kept."""
        return self.has_unit_type and not self.is_kept and not self.is_mtp

    @property
    def is_kept(self) -> bool:
        """True for a matrix whose blocks are those of the source, bit for bit."""
        is_theirs = self.has_blocks and self.dtype == KEPT_OF_GGUF.get(self.source.dtype)
        return self.dtype == Dtype.MXFP4 or is_theirs

    @property
    def has_unit_type(self) -> bool:
        """True for a matrix whose type is its unit's; a router's is not."""
        return self.is_matrix and not self.is_raised and self.rule.target not in (*EXACT, *FINE)

    @property
    def is_matrix(self) -> bool:
        return not self.is_vector and self.rule.place is not Place.POSITIONS

    @property
    def is_ternary(self) -> bool:
        return self.is_matrix and self.dtype in TERNARY_TYPES

    @property
    def n_bytes(self) -> int:
        if self.rule.place is Place.POSITIONS:
            return self.n_rows * self.n_cols * (4 if self.dtype == Dtype.F32 else 2)
        if self.is_vector:
            return self.n_cols * 4
        return tile_bytes(self.dtype, self.n_rows, self.n_cols)

    @property
    def source_bytes(self) -> int:
        n_outputs = self.n_cols if self.is_vector else self.n_rows
        n_bytes = self.source.n_bytes * (1 + len(self.joined)) // self.n_slices
        return n_bytes * n_outputs // self.share.n_outputs


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    place: Place
    id: UnitId
    targets: tuple[Target, ...]

    @property
    def n_bytes(self) -> int:
        return sum(target.n_bytes for target in self.targets)

    @property
    def dtype(self) -> Dtype:
        return common_dtype(target.dtype for target in self.targets if target.has_unit_type)


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions before the first weight is rounded."""

    facts: Facts
    family: Family
    targets: tuple[Target, ...]
    warnings: tuple[str, ...]

    def with_targets(self, change: Callable[[Target], Target]) -> Plan:
        return dataclasses.replace(self, targets=tuple(map(change, self.targets)))

    @property
    def source_bytes(self) -> int:
        return sum(target.source_bytes for target in self.targets)

    @property
    def n_bytes(self) -> int:
        return sum(target.n_bytes for target in self.targets)

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        groups = itertools.groupby(self.targets, key=lambda t: (t.rule.place, t.unit))
        return tuple(PlannedUnit(*key, tuple(targets)) for key, targets in groups)

    @property
    def layers(self) -> tuple[PlannedUnit, ...]:
        """The units that are layers, without the MTP head."""
        n_layers = self.facts.n_trunk_layers
        layers = (unit for unit in self.units if unit.place is Place.LAYER)
        return tuple(unit for unit in layers if unit.id.layer < n_layers)

    @property
    def mtp_units(self) -> tuple[PlannedUnit, ...]:
        return tuple(unit for unit in self.units if any(t.is_mtp for t in unit.targets))

    @property
    def layer_dtype(self) -> Dtype:
        return common_dtype(t.dtype for t in self.targets if t.has_unit_type and t.is_of_layer)

    @property
    def embedding_dtype(self) -> Dtype:
        return common_dtype(
            target.dtype for target in self.targets if target.is_matrix and not target.is_of_layer
        )


def common_dtype(dtypes: Iterable[Dtype]) -> Dtype:
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else Dtype.MIXED


def target_name(rule: TensorRule, unit: UnitId) -> str:
    """The name of a tensor in reports: ``3.FFN_DOWN`` in layer 3, ``EMBEDDING``, ``WPOS``."""
    kind = "WPOS" if rule.target is None else TensorType(rule.target).name
    if unit.role == Role.EXPERT:
        return f"{unit.layer}.EXPERTS.{kind}"
    return f"{unit.layer}.{kind}" if unit.role == Role.LAYER else kind


def parse_quant_type(name: str, *, option: str = "quant type") -> Dtype:
    """Return the type of a tensor called ``name``. Raises QsfArgumentError for any other name."""
    if name in QUANT_TYPES:
        return QUANT_TYPES[name]
    try:
        nearest = our_type(name)
    except QsfArgumentError:
        types = ", ".join((*QUANT_TYPES, *(["mixed", KEEP] if option == "quant type" else [KEEP])))
        raise QsfArgumentError(f"{option} {name} is unknown; available: {types}") from None
    raise QsfArgumentError(f"{name} is llama.cpp's; use {option} {nearest}")


def make_plan(family: Family, facts: Facts, checkpoint: Checkpoint, policy: Policy) -> Plan:
    """Match rules with tensors; check every name and shape before any weight is rounded.

    A head equal to the embedding is stored once. Raises QsfConversionError if a tensor is missing
    or has a wrong shape.
    """
    by_name, left_out = _named(family, checkpoint)
    warnings = [*facts.warnings, *left_out]
    flags = set(facts.flags) | ({"dense"} if DENSE in by_name else set())
    if not facts.arch.is_encoder:
        is_separate, said = _separate_head(family, facts, checkpoint, by_name)
        warnings += said
        flags |= {"separate_head"} if is_separate else set()
        arch = dataclasses.replace(facts.arch, tied_head=not is_separate)
        facts = dataclasses.replace(facts, arch=arch)
    n_layers = facts.header.n_layers
    by_name = _numbered(by_name, n_layers)
    facts, used = _with_mtp(family, facts, checkpoint, by_name)
    targets = []
    rules = _rules(family, facts, by_name)
    for unit, rule in rules_in_order(rules, facts):
        if rule.flag is not None and rule.flag not in flags:
            continue
        names = rule.names(unit.layer, facts.dims, unit.expert)
        for name in names:
            if name not in by_name:
                raise QsfConversionError(f"the checkpoint has no tensor {family.prefixes[0]}{name}")
        used.update(names)
        sources = [by_name[name] for name in names]
        targets.append(_target(rule, sources, unit, facts, policy))
    same = {_source(family, TensorType.HEAD)} if facts.arch.tied_head else set()
    unused = set(by_name) - used - same
    warnings += _unused_warnings(family, unused, n_layers)
    return Plan(facts, family, tuple(targets), tuple(warnings))


def _with_mtp(
    family: Family, facts: Facts, checkpoint: Checkpoint, by_name: Mapping[str, SourceTensor]
) -> tuple[Facts, set[str]]:
    """Return the contents with the MTP head, if there is a whole one that is run, and the names of
    its tensors that repeat others of the model.
    """
    if not _has_mtp(facts, family.rules, by_name):
        return facts, set()
    n_layers, more = facts.header.n_layers, _as_layer(facts)
    names = {
        name
        for unit, rule in rules_in_order(_rules(family, more, by_name), more)
        if unit.role in (Role.LAYER, Role.EXPERT) and unit.layer == n_layers
        if rule.flag is None or rule.flag in facts.flags
        for name in rule.names(n_layers, more.dims, unit.expert)
    }
    originals = {rule.target: by_name.get(rule.source) for rule in family.rules}
    copies = {f"layers.{n_layers}.{name}": originals[of] for name, of in _COPIES.items()}
    copies = {name: of for name, of in copies.items() if name in by_name}
    is_whole = names <= by_name.keys() and all(
        _is_repeated(checkpoint, by_name[name], of) for name, of in copies.items()
    )
    return (more, set(copies)) if is_whole else (facts, set())


def _is_repeated(checkpoint: Checkpoint, matrix: SourceTensor, other: SourceTensor | None) -> bool:
    """True if two tensors are equal byte by byte; reads until they differ."""
    if other is None or (matrix.dtype, matrix.shape) != (other.dtype, other.shape):
        return False
    step = max(1, _COMPARED_BYTES // max(1, matrix.row_bytes))
    return all(
        np.array_equal(
            checkpoint.read_stored(matrix.name, start, min(start + step, matrix.n_rows)),
            checkpoint.read_stored(other.name, start, min(start + step, matrix.n_rows)),
        )
        for start in range(0, matrix.n_rows, step)
    )


def _named(family: Family, checkpoint: Checkpoint) -> tuple[dict[str, SourceTensor], list[str]]:
    """Return the tensors by names without a prefix, and a warning of parts not for text."""
    by_name: dict[str, SourceTensor] = {}
    left_out: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        bare = tensor.name.removeprefix("model.")
        sense = next((start for start in family.left_out if bare.startswith(start)), None)
        if sense is not None:
            left_out[sense.rstrip(".")] = left_out.get(sense.rstrip("."), 0) + 1
            continue
        prefixes = sorted(family.prefixes, key=len, reverse=True)
        prefix = next((start for start in prefixes if tensor.name.startswith(start)), "")
        name = tensor.name.removeprefix(prefix)
        if name in by_name:
            raise QsfConversionError(
                f"the checkpoint has {by_name[name].name} and {tensor.name}, names of one tensor"
            )
        by_name[name] = tensor
    if not left_out:
        return by_name, []
    counts = ", ".join(f"{n} tensors of {sense}" for sense, n in sorted(left_out.items()))
    return by_name, [f"only the text part is converted; left out: {counts}"]


def _rules(
    family: Family, facts: Facts, by_name: Mapping[str, SourceTensor]
) -> tuple[TensorRule, ...]:
    if not family.layouts:
        return family.rules

    def first_with(rule: TensorRule) -> int | None:
        return next(
            (
                i
                for i, kind in enumerate(facts.layer_kinds)
                if (kind.n_experts if rule.place is Place.EXPERT else rule.where.holds(kind))
            ),
            None,
        )

    def is_there(rules: tuple[TensorRule, ...], *, with_shapes: bool) -> bool:
        return all(
            name in by_name
            and (not with_shapes or by_name[name].shape == rule.source_shape(facts.dims))
            for rule in rules
            if rule.flag is None and (layer := first_with(rule)) is not None
            for name in rule.names(layer, facts.dims)
        )

    # Two layouts may differ only in shapes: experts as [out, in] or as [in, out].
    layouts = [rules for rules in family.layouts if is_there(rules, with_shapes=False)]
    fitting = (rules for rules in layouts if is_there(rules, with_shapes=True))
    layout = next(fitting, (layouts or family.layouts)[0])
    return in_file_order((*family.rules, *layout))


def rules_in_order(
    rules: Sequence[TensorRule], facts: Facts
) -> Iterator[tuple[UnitId, TensorRule]]:
    """Yield (unit, rule): positions, then units; the experts of a layer follow the layer."""
    of_place = {place: [rule for rule in rules if rule.place is place] for place in Place}
    yield from ((EMBEDDING_UNIT, rule) for rule in of_place[Place.POSITIONS])
    yield from ((EMBEDDING_UNIT, rule) for rule in of_place[Place.EMBEDDING])
    for layer_idx, kind in enumerate(facts.kinds):
        layer = layer_unit(layer_idx)
        for rule in of_place[Place.LAYER]:
            is_here = rule.is_of_later == (layer_idx > 0)
            is_here |= rule.of_all or "{layer}" in rule.source
            if rule.where.holds(kind) and is_here:
                yield layer, rule
        for expert in range(kind.n_experts):
            yield from ((layer.of_expert(expert), rule) for rule in of_place[Place.EXPERT])
    yield from ((FINAL_UNIT, rule) for rule in of_place[Place.FINAL])
    yield from ((OWN_TABLE_UNIT, rule) for rule in of_place[Place.OWN_TABLE])


def _target(
    rule: TensorRule, sources: list[SourceTensor], unit: UnitId, facts: Facts, policy: Policy
) -> Target:
    dims, source = facts.dims, sources[0]
    expected = rule.source_shape(dims)
    for part in sources:
        shape = part.shape
        if rule.is_flat:  # several parts have their rows together
            shape = (sum(of.n_rows for of in sources), shape[-1])
        if _without_ones(rule, shape) != _without_ones(rule, expected):
            raise QsfConversionError(
                f"tensor {part.name} has shape {list(part.shape)}, "
                f"config.json asks for {list(expected)}"
            )
        if part.dtype != source.dtype:
            raise QsfConversionError(
                f"tensor {part.name} is {part.dtype}, "
                f"{source.name} of the same layer {source.dtype}"
            )
    is_vector = rule.is_vector
    is_mtp = unit.role in (Role.LAYER, Role.EXPERT) and unit.layer >= facts.n_trunk_layers
    dtype = policy.of_source(source, rule, target_name(rule, unit))
    n_outputs = math.prod(dims[dim] for dim in (rule.shape if is_vector else rule.shape[:1]))
    n_inputs = 0 if is_vector else dims[rule.shape[1]]
    if rule.place is Place.POSITIONS and n_outputs * n_inputs * 2 > _MAX_POSITIONS_BYTES:
        raise QsfConversionError(
            f"tensor {source.name}: {n_outputs} x {n_inputs} positions are too many to convert"
        )
    return Target(
        rule=rule,
        source=source,
        unit=unit,
        n_rows=1 if is_vector else n_outputs,
        n_cols=n_outputs if is_vector else n_inputs,
        share=_share(rule, dims, unit.layer),
        dtype=Dtype.Q4 if is_mtp and dtype == Dtype.MIXED else dtype,
        is_mtp=is_mtp,
        is_vector=is_vector,
        has_blocks=policy.keeps(source, rule),
        factor=1.0 if rule.scale is None else facts.factors[rule.scale],
        joined=tuple(part.name for part in sources[1:]),
        slice_idx=0 if rule.slices is None else unit.expert + rule.first_slice,
        n_slices=1 if rule.slices is None else dims[rule.slices],
    )


def _without_ones(rule: TensorRule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without axes of 1: a convolution has one between channels and taps, and a
    table of one type of tokens has one or not.
    """
    return tuple(n for n in shape if n != 1) if rule.is_flat or rule.is_vector else shape


def _share(rule: TensorRule, dims: Mapping[str, int], layer_idx: int) -> Share:
    if rule.is_flat:
        n = math.prod(dims[dim] for dim in rule.shape)
        return Share(first=0, n=n, stride=n, n_outputs=n)
    sizes = [dims[part] for part in rule.parts or rule.shape[:1]]
    n_groups = 1 if rule.groups is None else dims[rule.groups]
    if rule.of_all and not rule.is_vector:
        n, n_all = sizes[0], sizes[0] * dims["layers"]
        return Share(first=n * layer_idx, n=n, stride=n_all, n_outputs=n_all)
    return Share(
        first=sum(sizes[: rule.part]) // n_groups,
        n=sizes[rule.part] // n_groups,
        stride=sum(sizes) // n_groups,
        n_outputs=sum(sizes),
    )


def _source(family: Family, target: TensorType) -> str:
    return next((rule.source for rule in family.rules if rule.target == target), "")


def _separate_head(
    family: Family, facts: Facts, checkpoint: Checkpoint, by_name: Mapping[str, SourceTensor]
) -> tuple[bool, list[str]]:
    """Return whether the head is a matrix of its own, and what is to be said of it.

    As in transformers a head that is not the embedding counts, whatever the configuration says.
    """
    head, is_tied = _source(family, TensorType.HEAD), facts.arch.tied_head
    if head not in by_name:
        return False, [] if is_tied else [f"no {head}: the embeddings are used as the head"]
    if _is_repeated(checkpoint, by_name[head], by_name.get(_source(family, TensorType.EMBEDDING))):
        said = f"{head} has the bytes of the embeddings, and is stored once with them"
        return False, [] if is_tied else [said]
    said = f"{head} is not the embeddings, although tie_word_embeddings says so: it is used"
    return True, [said] if is_tied else []


def _unused_warnings(family: Family, unused: set[str], n_layers: int) -> list[str]:
    """Name the tensors that no rule uses, except those known to hold no weights."""
    unused = {name for name in unused if not name.endswith(family.ignored_suffixes)}
    ahead = {name for name in unused if _predicts_ahead(name, n_layers)}
    lines = []
    if ahead:
        lines.append(
            f"{len(ahead)} tensors of multi-token prediction are left out: only the first head of"
            " some families is run, and no answer depends on it"
        )
    unknown = sorted(unused - ahead)
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        lines.append(f"{len(unknown)} tensors are not used: {', '.join(unknown[:8])}{more}")
    return lines


def _predicts_ahead(name: str, n_layers: int) -> bool:
    """True for a tensor of a layer after the last one, which predicts further tokens."""
    number = re.match(r"(?:model\.)?(?:layers|blk)\.(\d{1,6})\.", name)
    is_named = re.match(r"(?:model\.)?mtp[._]", name) is not None
    return is_named or (number is not None and int(number[1]) >= n_layers)


# ---- the MTP head (multi-token prediction): one more layer, behind the last one ----

# DeepSeek and GLM number its tensors as those of layer ``num_hidden_layers``, and GGUF files do the
# same for all families; the ``mtp.`` names of Qwen become these.
_MTP_ENDS: Final = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
# Tensors of the head that repeat others of the model.
_COPIES: Final = {
    "embed_tokens.weight": TensorType.EMBEDDING,
    "shared_head.head.weight": TensorType.HEAD,
}

_Tensor = TypeVar("_Tensor")


def _numbered(by_name: Mapping[str, _Tensor], n_layers: int) -> dict[str, _Tensor]:
    def name_of(name: str) -> str:
        match = re.fullmatch(r"mtp\.(?:layers\.(\d{1,6})\.)?(.*)", name)
        if match is None:
            return name
        number, rest = match.groups()
        if number is not None:
            return f"layers.{n_layers + int(number)}.{rest}"
        part, _, ending = rest.rpartition(".")
        return f"layers.{n_layers}.{_MTP_ENDS.get(part, part)}.{ending}"

    return {name_of(name): tensor for name, tensor in by_name.items()}


def _as_layer(facts: Facts) -> Facts:
    kinds = facts.kinds
    kind = next(kind for kind in reversed(kinds) if kind.has_attention)
    return dataclasses.replace(
        facts,
        header=dataclasses.replace(facts.header, n_layers=len(kinds) + 1),
        layer_kinds=(*kinds, dataclasses.replace(kind, is_mtp=True)),
        dims={**facts.dims, "joined": 2 * facts.header.dim},
    )


def _has_mtp(facts: Facts, rules: tuple[TensorRule, ...], names: Mapping[str, object]) -> bool:
    """True if the tensors are those of one head of a family that runs it."""
    n_layers = facts.header.n_layers
    return (
        any(kind.has_attention for kind in facts.kinds)
        and any(rule.target == TensorType.MTP_JOIN for rule in rules)
        and f"layers.{n_layers}.eh_proj.weight" in names
        and f"layers.{n_layers + 1}.eh_proj.weight" not in names
        and n_layers < MAX_LAYERS
    )


_LEAST_SHARED: Final = 4  # query heads of a KV head: V has a tenth of attention's weights or less
_LEAST_ROWS: Final = 16384  # of a head that is worth two matrices
_SHARE: Final = 32  # one of so many rows is of a frequent token


def with_fine_values(plan: Plan) -> Plan:
    """Return the plan with V of 8 bits where it is small and its layer has fewer.

    Ternary V and kept blocks of a GGUF file stay, and so do types that are chosen later.
    """
    q_rows: dict[UnitId, int] = {
        target.unit: target.n_rows for target in plan.targets if target.rule.target == TensorType.Q
    }

    def fine(target: Target) -> Target:
        is_small = target.n_rows * _LEAST_SHARED <= q_rows.get(target.unit, 0)
        is_coarse = 0 < bits_per_weight(target.dtype) < 8 and target.dtype not in TERNARY_TYPES
        is_value = target.rule.target == TensorType.V and target.has_choice
        if not (is_value and is_small and is_coarse):
            return target
        return dataclasses.replace(target, dtype=Dtype.Q8, is_raised=True)

    return plan.with_targets(fine)


def with_split_head(plan: Plan, *, has_free_type: bool) -> Plan:
    """Return the plan with the head as two tensors, if it is large and of fewer than 8 bits.

    With ``has_free_type`` its types are chosen later. A head that is the embedding stays one table,
    and so does one that keeps its blocks of a GGUF file.
    """
    targets: list[Target] = []
    for target in plan.targets:
        is_coarse = has_free_type or bits_per_weight(target.dtype) < 8
        is_head = target.rule.target == TensorType.HEAD and target.n_rows >= _LEAST_ROWS
        targets += _parts(target) if is_head and target.has_choice and is_coarse else [target]
    return dataclasses.replace(plan, targets=tuple(targets))


def table_type(target: Target, requested: Dtype) -> Dtype:
    """Return the type of an embedding or a head for which ``requested`` was asked."""
    is_first = target.rule.target == TensorType.HEAD and target.n_rows < target.share.n_outputs
    return Dtype.Q8 if is_first and bits_per_weight(requested) < 8 else requested


def _parts(head: Target) -> list[Target]:
    n_first = head.n_rows // _SHARE // TILE_ROWS * TILE_ROWS
    rest_rule = dataclasses.replace(head.rule, target=TensorType.HEAD_REST)
    first, rest = (
        dataclasses.replace(
            head,
            rule=rule,
            n_rows=n_rows,
            share=dataclasses.replace(head.share, first=start, n=n_rows),
        )
        for rule, start, n_rows in (
            (head.rule, 0, n_first),
            (rest_rule, n_first, head.n_rows - n_first),
        )
    )
    return [dataclasses.replace(first, dtype=table_type(first, head.dtype)), rest]
