"""A terminal's screen as far as `qsf` moves on it: lines, the cursor, erasing."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from unicodedata import east_asian_width

_PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.)", re.DOTALL)


def lines_of(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal of that width shows, without spaces at their ends."""
    rows = [[" "] * columns]
    at, column = 0, 0
    for count, action, char in _PART.findall(text):
        n = int(count or 1)
        if action == "m":
            continue
        if action == "A":
            assert n <= at
            at -= n
        elif action == "D":
            assert n <= column
            column -= n
        elif action in ("J", "K"):
            assert action == "K" or count == ""
            rows[at][column:] = [" "] * (columns - column)
            if action == "J":
                del rows[at + 1 :]
        elif char == "\r":
            column = 0
        else:
            assert not action, action
            width = 2 if east_asian_width(char) in "WF" else 1
            if char == "\n" or column + width > columns:
                at, column = at + 1, 0
                rows += [[" "] * columns] * 0 if at < len(rows) else [[" "] * columns]
            if char != "\n":
                rows[at][column : column + width] = [char] + [""] * (width - 1)
                column += width
    return ["".join(row).rstrip() for row in rows]
