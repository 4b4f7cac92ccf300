"""Calls in Python's syntax, ``f(city="Ulm", days=3)``: to JSON and back."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_HEAD = re.compile(r"[\s\[,]*(?P<name>[A-Za-z_][\w.-]*)\s*\(")
_UNDECIDED = re.compile(r"[\s\[,]*(?:[\w.-]+\s*)?")
_TOKEN = re.compile(  # the quotes of a call come in pairs
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_]\w*)(?P<is>\s*=)?|"""
    r"""(?P<other>[^'"A-Za-z_])""",
    re.DOTALL,
)
PYTHON_ENDS = ("", ")", "'\"")  # what opens and closes a call's arguments, and quotes
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LETTER = re.compile(r'\\(?:x([0-9a-fA-F]{2})|(.))|(["\x00-\x1f])', re.DOTALL)


def read_head(text: str) -> tuple[str | None, int]:
    """Return the name of the function whose call begins a text, and the length up to its arguments.

    The name is "" if the text is too short to say, None if no call begins it.
    """
    match = _HEAD.match(text)
    if match is not None:
        return match["name"], match.end()
    return ("" if _UNDECIDED.fullmatch(text) else None), 0


def read_call(text: str) -> tuple[str, str]:
    """Return the name and the arguments in JSON of a call. The JSON is not checked.

    Raises ValueError if the text is no call.
    """
    match = _HEAD.match(text)
    if match is None or text[-1] != ")":
        raise ValueError("no call")
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(text, match.end(), len(text) - 1):
        if token["text"] is not None:
            parts.append(_as_json(token["text"]))
        elif token["is"] is not None:
            if depth:
                raise ValueError("a name where a value belongs")
            parts.append(json.dumps(token["word"]) + ": ")
        elif token["word"] is not None:
            parts.append(_WORDS.get(token["word"], token["word"]))
        else:
            depth += token["other"] in "[{"
            depth -= token["other"] in "]}"
            parts.append(token["other"])
    return match["name"], "{" + "".join(parts).strip() + "}"


def _as_json(literal: str) -> str:
    """Return a Python string literal as JSON."""

    def letter(match: re.Match[str]) -> str:
        code, escaped, plain = match.groups()
        if code is not None or plain is not None:
            return f"\\u{int(code, 16) if code is not None else ord(plain):04x}"
        if escaped in '"\\/bfnrtu':
            return f"\\{escaped}"
        return "" if escaped == "\n" else escaped if escaped == "'" else f"\\\\{escaped}"

    return f'"{_LETTER.sub(letter, literal[1:-1])}"'


def write_arguments(values: Mapping[str, Any]) -> str:
    """Return arguments as they are written between the brackets of a call."""
    return ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else repr(value)}"
        for name, value in values.items()
    )
