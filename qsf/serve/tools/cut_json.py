"""Arguments of a call that was cut: its complete part. Linear, as all readers of foreign text."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

# A text without closing quote goes to the end, else the search would take quadratic time.
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*(?:"|\\?\Z))|(?P<sign>[{}\[\],])|(?P<word>[-+.\w]+)|\S', re.DOTALL
)
# Kinds of the tokens that may follow the last complete value.
_RESTS: tuple[list[str], ...] = (
    [],
    ["text"],
    ["word"],
    ["text", ":"],
    ["text", ":", "text"],
    ["text", ":", "word"],
)


def completed(text: str) -> list[str]:
    """Return completions of the beginning of an object, the longest first.

    Each may be invalid JSON. []: the text does not begin an object.
    """
    closers: list[str] = []
    at, rest = 0, [""]  # the end of the last complete value, and what follows it
    for match in _TOKEN.finditer(text):
        sign = match[0]
        if match.lastgroup != "sign":
            if len(rest) < 4:
                rest.append(match.lastgroup or sign)
            continue
        if sign in "{[":
            closers.append("}" if sign == "{" else "]")
        elif sign in "}]" and (not closers or closers.pop() != sign):
            return []
        at, rest = match.start() if sign == "," else match.end(), []
    if not closers or rest not in _RESTS:
        return []
    ends = "".join(reversed(closers))
    return [f'{text}"{ends}', text + ends, text[:at] + ends]
