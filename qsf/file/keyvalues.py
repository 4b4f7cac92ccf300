"""Key-values of the sections ARCH and KIND: one grammar, a table of keys each (docs/format.md)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from qsf.errors import QsfError
from qsf.file.layout import F32_MAX, to_f32

U32: Final = 1
F32: Final = 2
F32_ARRAY: Final = 3

Value = int | float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A key that this release knows."""

    number: int
    name: str  # of the field
    type: int  # U32, F32 or F32_ARRAY
    least: int = 0  # of a u32; an f32 is above 0, the values of an array are 0 or more
    most: int = 0xFFFFFFFF


def check_value(section: str, key: Key, value: Value, error: type[QsfError]) -> None:
    if isinstance(value, tuple):
        for i, v in enumerate(value):
            if not 0.0 <= v <= F32_MAX:
                raise error(f"{section}: {key.name}[{i}] is {v:g}, allowed: finite, 0 or more")
    elif key.type == F32:
        if not 0.0 < value <= F32_MAX:
            raise error(f"{section}: {key.name} is {value:g}, allowed: finite, above 0")
    elif not key.least <= value <= key.most:
        raise error(f"{section}: {key.name} is {value}, allowed: {key.least} .. {key.most}")


def pack_values(
    section: str, keys: Iterable[Key], values: Mapping[str, Value], error: type[QsfError]
) -> bytes:
    """Return the entries of the keys that have a value; raises ``error`` if a value is out of
    range.
    """
    out = bytearray()
    for key in keys:
        if key.name not in values:
            continue
        value = values[key.name]
        check_value(section, key, value, error)
        out += struct.pack("<HBB", key.number, key.type, 0)
        if isinstance(value, tuple):
            out += struct.pack(f"<I{len(value)}f", len(value), *value)
        else:
            out += struct.pack("<f" if key.type == F32 else "<I", value)
    return bytes(out)


def as_stored(value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(to_f32(v) for v in value)
    return to_f32(value) if isinstance(value, float) else value
