"""The names of KV cache types: "4bit", "f16", or keys and values apart: "k8v4"."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

_BITS = {"2bit": 2, "4bit": 4, "8bit": 8, "f16": 16, "f32": 32}
_APART = (2, 4, 8, 16)

NAMES = "f32, f16, 8bit, 4bit, 2bit, or kXvY with X, Y of 16, 8, 4, 2"


def parse_kv_type(name: str) -> tuple[int, int]:
    """Return the bits of keys and of values. Raises ValueError for what is no type."""
    if name in _BITS:
        return _BITS[name], _BITS[name]
    for key_bits in _APART:
        for value_bits in _APART:
            if name == f"k{key_bits}v{value_bits}":
                return key_bits, value_bits
    raise ValueError(f"{name!r} is not a type of KV cache: {NAMES}")


def kv_type_name(key_bits: int, value_bits: int) -> str:
    """Return the name of a type."""
    if key_bits != value_bits:
        return f"k{key_bits}v{value_bits}"
    return next(name for name, bits in _BITS.items() if bits == key_bits)
