"""The layer index and the index of experts (docs/format.md, section 3)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

from qsf.errors import QsfFormatError
from qsf.file import layout as lay
from qsf.file.kinds import LayerKind
from qsf.file.layout import Compression, Dtype, Unit

Counted = tuple[list[Unit], list[int]]  # units, and how many tensors each has

_LAYER: Final = "layer index: layer"


def _parse_entry(
    name: str, entry: tuple[int, ...], unit_idx: int, file_bytes: int
) -> tuple[Unit, int, int]:
    """Return the unit, its number of tensors, and the last field, which each index checks."""
    off, stored, raw, dtype, compression, n_tensors, crc32, importance, last = entry
    if off % lay.UNIT_ALIGN != 0 or off > file_bytes or stored > file_bytes - off:
        raise QsfFormatError(
            f"{name}: {stored} bytes at {off}, allowed: at a multiple of {lay.UNIT_ALIGN}, inside"
            f" the file of {file_bytes} bytes"
        )
    if stored == 0 or raw == 0:
        raise QsfFormatError(f"{name}: {stored} bytes stored, {raw} raw, allowed: 1 or more")
    if dtype > max(Dtype):
        raise QsfFormatError(f"{name}: quantisation type is {dtype}, allowed: 0 .. {max(Dtype)}")
    if compression > max(Compression):
        raise QsfFormatError(
            f"{name}: compression is {compression}, allowed: 0 .. {max(Compression)}"
        )
    if compression == Compression.NONE and stored != raw:
        raise QsfFormatError(
            f"{name}: {stored} bytes stored, {raw} raw, allowed: the same without compression"
        )
    if not math.isfinite(importance) or importance < 0:
        raise QsfFormatError(f"{name}: importance is {importance:g}, allowed: finite, 0 or more")
    unit = Unit(unit_idx, off, stored, raw, crc32, dtype, compression, importance, ())
    return unit, n_tensors, last


def parse_layers(data: bytes, file_bytes: int) -> Counted:
    """Return the layers of the section LAYR; QsfFormatError where it breaks a rule."""
    units, counts = [], []
    for i, entry in enumerate(lay.LAYER_ENTRY.iter_unpack(data)):
        unit, n_tensors, reserved = _parse_entry(f"{_LAYER} {i}", entry, i + 1, file_bytes)
        if reserved:
            raise QsfFormatError(f"{_LAYER} {i}: reserved is {reserved:08x}, allowed: 0")
        units.append(unit)
        counts.append(n_tensors)
    return units, counts


def parse_experts(data: bytes, first_unit: int, file_bytes: int) -> Counted:
    """Return the experts of the section EXPT; QsfFormatError where it breaks a rule."""
    n_experts = len(data) // lay.ENTRY_BYTES
    if len(data) % lay.ENTRY_BYTES != 0 or n_experts > lay.MAX_EXPERTS:
        raise QsfFormatError(
            f"section EXPT has {len(data)} bytes, allowed: multiples of {lay.ENTRY_BYTES}, up to"
            f" {lay.MAX_EXPERTS * lay.ENTRY_BYTES}"
        )
    units: list[Unit] = []
    counts: list[int] = []
    for i, entry in enumerate(lay.LAYER_ENTRY.iter_unpack(data)):
        name = f"expert {i}"
        unit, n_tensors, first = _parse_entry(name, entry, first_unit + i, file_bytes)
        if unit.compression != Compression.NONE:
            raise QsfFormatError(f"{name}: compression is {unit.compression}, allowed: 0")
        if units and unit.off < units[-1].off + units[-1].stored_bytes:
            raise QsfFormatError(f"{name} is at {unit.off}, allowed: behind expert {i - 1}")
        if first > i or (first < i and units[first].template_idx != first_unit + first):
            raise QsfFormatError(
                f"{name} has the tensors of expert {first}, allowed: itself, or an earlier one"
                " with tensors of its own"
            )
        units.append(
            Unit(unit.idx, unit.off, unit.stored_bytes, unit.raw_bytes, unit.crc32, unit.dtype,
                 unit.compression, unit.importance, (), first_unit + first)
        )  # fmt: skip
        counts.append(n_tensors)
        model = units[first]
        mine = (unit.raw_bytes, unit.dtype, n_tensors)
        if mine != (model.raw_bytes, model.dtype, counts[first]):
            raise QsfFormatError(
                f"{name} has (bytes, type, tensors) {mine}; expert {first}, whose tensors it has:"
                f" {(model.raw_bytes, model.dtype, counts[first])}"
            )
    return units, counts


def first_experts(kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    """Return the number of each layer's first expert, and behind it that of all experts."""
    return tuple(itertools.accumulate((kind.n_experts for kind in kinds), initial=0))


def check_number(first: Sequence[int], n_experts: int) -> None:
    """Raise QsfFormatError if the layers do not have the experts of the section EXPT."""
    if first[-1] != n_experts:
        raise QsfFormatError(f"section EXPT has {n_experts} experts, the layers have {first[-1]}")
