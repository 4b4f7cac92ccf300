"""Tables of tests/data; those of what is refused: how the input is changed, and what is said."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(name: str) -> Any:
    """The content of a file of tests/data."""
    return json.loads((Path(__file__).parents[2] / "data" / f"{name}.json").read_text("utf-8"))


def refusals(name: str) -> list[list[Any]]:
    """The rows of a table; the message, a pattern, is the last of each."""
    rows: list[list[Any]] = table("refusals")[name]
    return rows
