"""META of a file as it is: texts and numbers of whoever wrote it, none of them trusted."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsf.file.reader import Reader

_MAX_DEPTH = 64  # writing JSON again takes a Python frame for each level


def read_meta(reader: Reader) -> dict[str, Any] | None:
    """Return the META object; None when there is none or it is not what it should be.

    Numbers that JSON does not have, NaN and infinity, are None in it.
    """
    if "META" not in reader.sections:
        return None
    try:
        meta = json.loads(
            reader.read_section("META"), parse_constant=lambda _: None, parse_float=_finite
        )
    except (ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) and not _is_deep(meta) else None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def _is_deep(value: Any) -> bool:
    """Is it nested deeper than anything that the converter writes?"""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
