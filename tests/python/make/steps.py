"""Counts the steps of a reader, to show that they grow as the input does; calls of functions."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from make.refusals import table
from qsf.serve.tools.call_formats import FORMATS, Format


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


# ---- functions that a model may call, and the forms of calls by family ----
WEATHER: Any = table("tables")["weather"]
ARGUMENTS: Any = {"city": "Ulm } ]", "days": 3, "unit": "C"}


def form_of(name: str) -> Format:
    return next(form for form in FORMATS if form.name.startswith(name))


HERMES = form_of("Hermes")
