"""The sections ARCH, KIND and ROPE, read by Python: docs/format.md, sections 6 to 8."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from oracle.file.rules import (
    ARCH_RULES,
    Key,
    check_arch,
    check_kind,
    check_set,
    check_sources,
    check_value,
    kind_keys,
    rotary_dims_of,
)
from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.file.kinds import F32, F32_ARRAY, SET_HEAD, U32, LayerKind, RopeSet, Value, plain_kind
from qsf.file.layout import (
    DEFAULT_ARCH,
    MAX_LAYER_KINDS,
    MAX_ROPE_SETS,
    Arch,
    Header,
    padded,
)

_FIRST_OPTIONAL_KEY = 0x8000
_MAX_ARRAY_VALUES = 65536


def _value_end(section: str, data: bytes, at: int, key: int, kind: int) -> int:
    """Return where the value that begins at ``at`` ends; its floats are finite."""
    if not U32 <= kind <= F32_ARRAY:
        raise QsfFormatError(f"{section}: key {key} has value type {kind}, allowed: 1 .. 3")
    n_left = len(data) - at
    n_bytes = 4
    if kind == F32_ARRAY and n_left >= 4:
        (count,) = struct.unpack_from("<I", data, at)
        if count > _MAX_ARRAY_VALUES:
            raise QsfFormatError(
                f"{section}: key {key} has {count} values, allowed: 0 .. {_MAX_ARRAY_VALUES}"
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
            raise QsfFormatError(
                f"{section}: key {number} after key {last_key}, allowed: ascending"
            )
        last_key = number
        key = known.get(number)
        # Before its value: a newer key may have a type that this release cannot measure.
        if key is None and number < _FIRST_OPTIONAL_KEY:
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


def parse_arch(data: bytes, header: Header) -> Arch:
    """Return the checked ``ARCH`` section with its defaults filled in.

    Raises:
        QsfFormatError: an entry is malformed or a value outside its limits.
        QsfUnsupportedError: a key below 0x8000 that this release does not know.
    """
    values: dict[str, Any] = dict(parse_values("ARCH", ARCH_RULES, data))
    check_arch(values, header, QsfFormatError)
    for name in ("rope_interleaved", "tied_head", "is_encoder"):
        if name in values:
            values[name] = bool(values[name])
    return replace(DEFAULT_ARCH, **{"rope_dims": header.head_dim, **values})


def parse_kinds(
    data: bytes, header: Header, arch: Arch, sets: Sequence[RopeSet]
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer from the section KIND; layers share the records.

    Raises:
        QsfFormatError: the section breaks a rule.
        QsfUnsupportedError: a key below 0x8000 that this release does not know.
    """
    head_bytes = padded(4 + header.n_layers, 4)
    if len(data) < head_bytes:
        raise QsfFormatError(f"KIND: {len(data)} bytes, its head alone has {head_bytes}")
    n_kinds, reserved = struct.unpack_from("<HH", data)
    if not 1 <= n_kinds <= MAX_LAYER_KINDS or reserved != 0:
        raise QsfFormatError(
            f"KIND: {n_kinds} kinds, reserved {reserved}, allowed: 1 .. {MAX_LAYER_KINDS},"
            " reserved 0"
        )
    of_layer = data[4 : 4 + header.n_layers]
    for i, kind_idx in enumerate(of_layer):
        if kind_idx >= n_kinds:
            raise QsfFormatError(f"KIND: layer {i} is of kind {kind_idx}, there are {n_kinds}")
    if any(data[4 + header.n_layers : head_bytes]):
        raise QsfFormatError("KIND: the padding behind the layers is not zero")
    rotary_dims = rotary_dims_of(header, arch, sets)
    keys = kind_keys(header)
    plain = plain_kind(header, arch)
    kinds = []
    at = head_bytes
    for i in range(n_kinds):
        name = f"KIND: kind {i}"
        n_bytes = struct.unpack_from("<I", data, at)[0] if len(data) - at >= 4 else len(data)
        if n_bytes > len(data) - at - 4:
            raise QsfFormatError(f"{name} has more bytes than are left, {len(data) - at}")
        values: dict[str, Any] = dict(parse_values(name, keys, data[at + 4 : at + 4 + n_bytes]))
        if "is_parallel" in values:
            values["is_parallel"] = bool(values["is_parallel"])
        kind = replace(plain, **values)
        check_kind(name, kind, header, rotary_dims, QsfFormatError)
        kinds.append(kind)
        at += 4 + n_bytes
    if at != len(data):
        raise QsfFormatError(f"KIND: {len(data) - at} bytes behind the last kind")
    check_sources([kinds[i] for i in of_layer], QsfFormatError)
    return tuple(kinds[i] for i in of_layer)


def parse_rope(data: bytes) -> tuple[RopeSet, ...]:
    """Return the sets of the section ROPE; QsfFormatError where it breaks a rule."""
    if len(data) < 4:
        raise QsfFormatError(f"ROPE: {len(data)} bytes, its head alone has 4")
    n_sets, reserved = struct.unpack_from("<HH", data)
    if not 1 <= n_sets <= MAX_ROPE_SETS or reserved != 0:
        raise QsfFormatError(
            f"ROPE: {n_sets} sets, reserved {reserved}, allowed: 1 .. {MAX_ROPE_SETS}, reserved 0"
        )
    sets: list[RopeSet] = []
    at = 4
    for i in range(n_sets):
        name = f"ROPE: set {i}"
        if len(data) - at < SET_HEAD.size:
            raise QsfFormatError(f"{name}: {len(data) - at} bytes left, a set begins with 12")
        number, pairing, n_pairs, least_context, factor = SET_HEAD.unpack_from(data, at)
        at += SET_HEAD.size
        if pairing > 1:
            raise QsfFormatError(f"{name}: pairing is {pairing}, allowed: 0, 1")
        if 4 * n_pairs > len(data) - at:
            raise QsfFormatError(f"{name}: {n_pairs} pairs, {len(data) - at} bytes are left")
        frequencies = struct.unpack_from(f"<{n_pairs}f", data, at)
        at += 4 * n_pairs
        s = RopeSet(number, frequencies, bool(pairing), least_context, factor)
        check_set(name, s, sets[-1] if sets else None, QsfFormatError)
        sets.append(s)
    if at != len(data):
        raise QsfFormatError(f"ROPE: {len(data) - at} bytes behind the last set")
    return tuple(sets)
