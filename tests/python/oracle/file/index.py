"""The section UNIT: what the units of a file are and where (docs/format.md, section 3)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.file import layout as lay
from qsf.file.kinds import LayerKind
from qsf.file.layout import Compression, Dtype, Role, Unit, UnitId

_MAX_EXPERTS = 65536  # of a file


def _parse_id(i: int, role: int, layer: int, expert: int, n_layers: int) -> UnitId:
    if role > max(Role):
        raise QsfUnsupportedError(f"unit {i} has role {role}, this release knows 0 .. {max(Role)}")
    n_allowed = n_layers if role in (Role.LAYER, Role.EXPERT) else 1
    if layer >= n_allowed or (expert and role != Role.EXPERT):
        raise QsfFormatError(
            f"unit {i} of role {role} is of layer {layer}, expert {expert}; the file has"
            f" {n_layers} layers"
        )
    return UnitId(Role(role), layer, expert)


def _check_unit(unit: Unit, file_bytes: int) -> None:
    name = f"unit {unit.idx}"
    if (
        unit.off % lay.UNIT_ALIGN != 0
        or unit.off > file_bytes
        or unit.stored_bytes > file_bytes - unit.off
    ):
        raise QsfFormatError(
            f"{name}: {unit.stored_bytes} bytes at {unit.off}, allowed: at a multiple of"
            f" {lay.UNIT_ALIGN}, inside the file of {file_bytes} bytes"
        )
    if unit.stored_bytes == 0 or unit.raw_bytes == 0:
        raise QsfFormatError(
            f"{name}: {unit.stored_bytes} bytes stored, {unit.raw_bytes} raw, allowed: 1 or more"
        )
    if unit.dtype > max(Dtype):
        raise QsfFormatError(
            f"{name}: quantisation type is {unit.dtype}, allowed: 0 .. {max(Dtype)}"
        )
    most = max(Compression) if unit.id.role == Role.LAYER else Compression.NONE
    if unit.compression > most:
        raise QsfFormatError(f"{name}: compression is {unit.compression}, allowed: 0 .. {most}")
    if unit.compression == Compression.NONE and unit.stored_bytes != unit.raw_bytes:
        raise QsfFormatError(
            f"{name}: {unit.stored_bytes} bytes stored, {unit.raw_bytes} raw, allowed: the same"
            " without compression"
        )
    if not math.isfinite(unit.importance) or unit.importance < 0:
        raise QsfFormatError(
            f"{name}: importance is {unit.importance:g}, allowed: finite, 0 or more"
        )


def _check_template(units: Sequence[Unit], unit: Unit, counts: Sequence[int]) -> None:
    first = unit.template_idx
    if first == unit.idx:
        return
    if (
        first > unit.idx
        or unit.id.role != Role.EXPERT
        or units[first].id.role != Role.EXPERT
        or units[first].template_idx != first
    ):
        raise QsfFormatError(
            f"unit {unit.idx} has the tensors of unit {first}, allowed: itself; of an expert also"
            " an earlier one with tensors of its own"
        )
    mine = (unit.raw_bytes, unit.dtype, counts[unit.idx])
    model = (units[first].raw_bytes, units[first].dtype, counts[first])
    if mine != model:
        raise QsfFormatError(
            f"unit {unit.idx} has (bytes, type, tensors) {mine}; unit {first}, whose tensors it"
            f" has: {model}"
        )


def _check_ascent(last: Unit, unit: Unit) -> None:
    """Refuse an expert before the end of the one before it: a prompt reads them as one run."""
    if unit.off < last.off + last.stored_bytes:
        raise QsfFormatError(
            f"unit {unit.idx} is at {unit.off}, allowed: behind expert unit {last.idx}"
        )


def parse_units(data: bytes, n_layers: int, file_bytes: int) -> tuple[list[Unit], list[int]]:
    """Return the units of the section UNIT, and how many tensors each has.

    Raises:
        QsfFormatError: it breaks a rule of section 3.
        QsfUnsupportedError: a unit of a role that this release does not know.
    """
    if len(data) % lay.UNIT_ENTRY.size != 0:
        raise QsfFormatError(
            f"section UNIT has {len(data)} bytes, allowed: multiples of {lay.UNIT_ENTRY.size}"
        )
    units: list[Unit] = []
    counts: list[int] = []
    for i, entry in enumerate(lay.UNIT_ENTRY.iter_unpack(data)):
        off, stored, raw, crc32, importance, role, dtype, compression, reserved, *rest = entry
        layer, expert, n_tensors, template_idx = rest
        if reserved:
            raise QsfFormatError(f"unit {i}: reserved is {reserved:02x}, allowed: 0")
        unit_id = _parse_id(i, role, layer, expert, n_layers)
        if units and unit_id <= units[-1].id:
            raise QsfFormatError(
                f"unit {i} ({unit_id.name}) comes after {units[-1].id.name}, allowed: ascending"
            )
        unit = Unit(
            i, unit_id, off, stored, raw, crc32, dtype, compression, importance, (), template_idx
        )
        _check_unit(unit, file_bytes)
        counts.append(n_tensors)
        _check_template(units, unit, counts)
        if units and unit_id.role == units[-1].id.role == Role.EXPERT:
            _check_ascent(units[-1], unit)
        units.append(unit)
    _check_roles(units, n_layers)
    return units, counts


def _check_roles(units: Sequence[Unit], n_layers: int) -> None:
    n = Counter(unit.id.role for unit in units)
    real = (n[Role.EMBEDDING], n[Role.LAYER], n[Role.FINAL])
    if real != (1, n_layers, 1):
        raise QsfFormatError(
            f"section UNIT has (embeddings, layers, final units) {real}, allowed:"
            f" {(1, n_layers, 1)}"
        )
    if n[Role.EXPERT] > _MAX_EXPERTS:
        raise QsfFormatError(
            f"section UNIT has {n[Role.EXPERT]} experts, allowed: up to {_MAX_EXPERTS}"
        )


def check_experts(units: Sequence[Unit], kinds: Sequence[LayerKind]) -> None:
    """Raise QsfFormatError if the layers do not have the experts that their kinds say."""
    wanted = [
        lay.layer_unit(layer).of_expert(expert)
        for layer, kind in enumerate(kinds)
        for expert in range(kind.n_experts)
    ]
    real = [unit.id for unit in units if unit.id.role == Role.EXPERT]
    if real != wanted:
        missing = sorted(set(wanted) - set(real)) or sorted(set(real) - set(wanted))
        where = "section UNIT" if set(wanted) - set(real) else "the kind of the layer"
        raise QsfFormatError(f"{where} has no {missing[0].name}")
