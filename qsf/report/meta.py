"""The section META of a file, as untrusted texts and numbers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from qsf.foreign_json import JsonError, read_json
from qsf.kv import parse_kv_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qsf.file.reader import Reader


def read_meta(reader: Reader) -> dict[str, Any] | None:
    """Return the META object, or None if it is absent or malformed.

    NaN and infinity become None.
    """
    if "META" not in reader.sections:
        return None
    try:
        meta = read_json(
            reader.read_section("META"), parse_constant=lambda _: None, parse_float=_finite
        )
    except JsonError:
        return None
    return meta if isinstance(meta, dict) else None


_ACT_BITS: Final = (8, 16)


def cost_lines(meta: Mapping[str, Any] | None, *, with_kv_cache: bool = True) -> list[str]:
    """Return lines about the file's default arithmetic and its measured cost.

    Omits values that were not measured or are malformed.
    """
    lines = [
        _line_of(meta, "activations", "activations of {bits:d} bits: {measured:d} bits change")
    ]
    if with_kv_cache:
        lines.append(_line_of(meta, "kv_cache", "KV cache {type}: {measured} changes"))
    return [line for line in lines if line is not None]


def _line_of(meta: Mapping[str, Any] | None, name: str, begin: str) -> str | None:
    record: Any = (meta or {}).get(name)
    try:
        if name == "kv_cache":
            for kv_type in (record["type"], record["measured"]):
                parse_kv_type(kv_type)
        elif not {record["bits"], record["measured"]}.issubset(_ACT_BITS):
            return None
        return (
            f"{begin.format(**record)} perplexity by "
            f"{record['change_percent']:+.2f} % +- {record['change_error']:.2f} and the likeliest "
            f"token at {100 * (1 - record['agreement']):.1f} % of positions"
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
