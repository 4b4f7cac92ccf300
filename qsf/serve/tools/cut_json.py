"""Arguments of a call that was cut: its complete part."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

_TEXT = r'"(?:[^"\\]|\\.)*'
_VALUE = rf'{_TEXT}["\\]?|[-+.\w]*'
# Texts that may follow the last complete value.
_REST = re.compile(rf'\s*,?\s*(?:{_TEXT}"\s*(?::\s*(?:{_VALUE}))?|{_VALUE})\s*', re.DOTALL)
_SIGNS = re.compile(rf'{_TEXT}"|[{{}}\[\],]', re.DOTALL)


def completed(text: str) -> list[str]:
    """Return completions of the beginning of an object, the longest first.

    Each may be invalid JSON. []: the text does not begin an object.
    """
    closers: list[str] = []
    # After the last complete value, and the text that closes all open values there
    at, ends = 0, ""
    for match in _SIGNS.finditer(text):
        sign = match[0]
        if sign in "{[":
            closers.append("}" if sign == "{" else "]")
        elif sign in "}]" and (not closers or closers.pop() != sign):
            return []
        if len(sign) == 1:
            at = match.start() if sign == "," else match.end()
            ends = "".join(reversed(closers))
    if not ends or _REST.fullmatch(text, at) is None:
        return []
    return [f'{text}"{ends}', text + ends, text[:at] + ends]
