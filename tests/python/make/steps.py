"""Counts the steps of a reader, so that a test can show that they grow as the input does."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(call: Callable[[], object]) -> int:
    """Return how many lines of the package's Python a call executes."""
    n_lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return trace if "qsf" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return n_lines


def is_linear(count: Callable[[int], int], n: int) -> bool:
    """Return whether twice the input takes at most about twice the steps."""
    return count(2 * n) <= 2.2 * count(n) + 200
