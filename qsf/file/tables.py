"""The section ROPE (docs/format.md, section 8), and all three that say what a model computes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

from qsf.errors import QsfError
from qsf.file.arch import pack_arch
from qsf.file.kinds import LayerKind, RopeSet, pack_kinds
from qsf.file.layout import F32_MAX, MAX_ROPE_PAIRS, MAX_ROPE_SETS, Arch, Header, to_f32

SET_HEAD: Final = struct.Struct("<BBHIf")


def check_set(name: str, s: RopeSet, last: RopeSet | None, error: type[QsfError]) -> None:
    """Raise ``error`` for a RoPE set that breaks a rule or may not follow the set ``last``."""
    first_number = 0 if last is None else last.number + 1
    is_next = last is not None and s.number == last.number
    if not is_next and s.number != first_number:
        raise error(f"{name} has number {s.number}, allowed: ascending from 0 without gaps")
    if not is_next and s.least_context != 0:
        raise error(f"{name} is the first of its number from context {s.least_context}, allowed: 0")
    if last is not None and is_next and s.least_context <= last.least_context:
        raise error(f"{name}: context {s.least_context} after {last.least_context}")
    if (
        last is not None
        and is_next
        and (s.is_interleaved != last.is_interleaved or len(s.frequencies) != len(last.frequencies))
    ):
        raise error(f"{name} has other pairs than the one before it, of the same number")
    if not 1 <= len(s.frequencies) <= MAX_ROPE_PAIRS:
        raise error(f"{name} has {len(s.frequencies)} pairs, allowed: 1 .. {MAX_ROPE_PAIRS}")
    if not 0.0 < to_f32(s.factor) <= F32_MAX:
        raise error(f"{name}: factor is {s.factor:g}, allowed: finite, above 0")
    for frequency in s.frequencies:
        if not 0.0 <= frequency <= F32_MAX or not math.isfinite(frequency):
            raise error(f"{name}: a frequency is {frequency:g}, allowed: finite, 0 or more")


def pack_rope(sets: Sequence[RopeSet], error: type[QsfError]) -> bytes:
    """Return the section ROPE; raises ``error`` for values that no reader accepts."""
    if not 1 <= len(sets) <= MAX_ROPE_SETS:
        raise error(f"ROPE: {len(sets)} sets, allowed: 1 .. {MAX_ROPE_SETS}")
    out = bytearray(struct.pack("<HH", len(sets), 0))
    last = None
    for i, s in enumerate(sets):
        check_set(f"ROPE: set {i}", s, last, error)
        out += SET_HEAD.pack(
            s.number, s.is_interleaved, len(s.frequencies), s.least_context, s.factor
        )
        out += struct.pack(f"<{len(s.frequencies)}f", *s.frequencies)
        last = s
    return bytes(out)


def pack_tables(
    header: Header,
    arch: Arch,
    layers: Sequence[LayerKind],
    sets: Sequence[RopeSet],
    error: type[QsfError],
) -> dict[str, bytes]:
    """Return the sections ARCH, ROPE and KIND that the file needs, by their tags.

    Args:
        header: of the file.
        arch: of the file.
        layers: the kind of each layer; empty: what header and ``arch`` say.
        sets: the RoPE sets; empty: one, from header and ``arch``.
        error: raised for values that no reader accepts.
    """
    tables = {"ARCH": pack_arch(arch, header, error)}
    if sets:
        tables["ROPE"] = pack_rope(sets, error)
    kinds = pack_kinds(layers, header, arch, sets, error) if layers else None
    if kinds is not None:
        tables["KIND"] = kinds
    return tables
