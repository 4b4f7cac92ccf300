"""Tables of what is refused: how the input is changed, and what the error says."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "data" / "refusals.json"


def refusals(name: str) -> list[list[Any]]:
    """The rows of a table; the message, a pattern, is the last of each."""
    rows: list[list[Any]] = json.loads(PATH.read_text("utf-8"))[name]
    return rows
