"""Key-values of the sections ARCH and KIND: one grammar, a table of keys each (docs/format.md)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from qsf.errors import QsfError, QsfFormatError, QsfUnsupportedError
from qsf.file.layout import F32_MAX, FIRST_OPTIONAL_KEY, MAX_ARRAY_VALUES, to_f32

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
    """Raise ``error`` if a value is outside the limits of its key."""
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
    """Return the entries of those keys that have a value; ``error`` for one outside its limits."""
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
    """Return the number that the file would hold."""
    if isinstance(value, tuple):
        return tuple(to_f32(v) for v in value)
    return to_f32(value) if isinstance(value, float) else value


def _value_end(section: str, data: bytes, at: int, key: int, kind: int) -> int:
    """Return where the value that begins at ``at`` ends; its floats are finite."""
    if not U32 <= kind <= F32_ARRAY:
        raise QsfFormatError(f"{section}: key {key} has value type {kind}, allowed: 1 .. 3")
    n_left = len(data) - at
    n_bytes = 4
    if kind == F32_ARRAY and n_left >= 4:
        (count,) = struct.unpack_from("<I", data, at)
        if count > MAX_ARRAY_VALUES:
            raise QsfFormatError(
                f"{section}: key {key} has {count} values, allowed: 0 .. {MAX_ARRAY_VALUES}"
            )
        n_bytes += 4 * count
    if n_bytes > n_left:
        raise QsfFormatError(
            f"{section}: the value of key {key} needs {n_bytes} bytes, {n_left} are left"
        )
    first = at if kind == F32 else at + 4
    if kind != U32:
        for (value,) in struct.iter_unpack("<f", data[first : at + n_bytes]):
            if not math.isfinite(value):
                raise QsfFormatError(f"{section}: key {key} has a value that is not finite")
    return at + n_bytes


def _value(data: bytes, at: int, end: int, kind: int) -> Value:
    if kind == F32_ARRAY:
        return struct.unpack(f"<{(end - at) // 4 - 1}f", data[at + 4 : end])
    value: int | float = struct.unpack_from("<f" if kind == F32 else "<I", data, at)[0]
    return value


def parse_values(section: str, keys: Iterable[Key], data: bytes) -> dict[str, Value]:
    """Return the checked values by the names of their keys.

    Raises:
        QsfFormatError: an entry is malformed or a value outside its limits.
        QsfUnsupportedError: a key below 0x8000 that this release does not know.
    """
    known = {key.number: key for key in keys}
    values: dict[str, Value] = {}
    at = 0
    last_key = -1
    while at < len(data):
        if len(data) - at < 4:
            raise QsfFormatError(
                f"{section}: {len(data) - at} bytes left at {at}, an entry begins with 4"
            )
        number, kind, reserved = struct.unpack_from("<HBB", data, at)
        if reserved != 0:
            raise QsfFormatError(
                f"{section}: reserved byte of key {number} is {reserved}, allowed: 0"
            )
        if number <= last_key:
            raise QsfFormatError(f"{section}: key {number} after key {last_key}, allowed: ascending")
        last_key = number
        key = known.get(number)
        # Before its value: a newer key may have a type that this release cannot measure.
        if key is None and number < FIRST_OPTIONAL_KEY:
            raise QsfUnsupportedError(f"{section}: this release does not know key {number}")
        at += 4
        end = _value_end(section, data, at, number, kind)
        if key is not None:
            if kind != key.type:
                raise QsfFormatError(
                    f"{section}: {key.name} (key {number}) has value type {kind}, allowed:"
                    f" {key.type}"
                )
            values[key.name] = _value(data, at, end, kind)
            check_value(section, key, values[key.name], QsfFormatError)
        at = end
    return values
