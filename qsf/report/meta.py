"""The section META of a file: its texts and numbers are not trusted."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qsf.foreign_json import JsonError, read_json
from qsf.kv import parse_kv_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qsf.file.reader import Reader


def read_meta(reader: Reader) -> dict[str, Any] | None:
    """Return the META object; None if it is absent or malformed.

    Numbers that JSON does not have, NaN and infinity, are None in it.
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


def kv_cache_line(meta: Mapping[str, Any] | None) -> str | None:
    """Return the default type of the KV cache and its measured cost.

    None if nothing was measured or the record is malformed.
    """
    record: Any = (meta or {}).get("kv_cache")
    try:
        for name in ("type", "measured"):
            parse_kv_type(record[name])
        return (
            f"KV cache {record['type']}: {record['measured']} changes perplexity by "
            f"{record['change_percent']:+.2f} % +- {record['change_error']:.2f} and the likeliest "
            f"token at {100 * (1 - record['agreement']):.1f} % of positions"
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
