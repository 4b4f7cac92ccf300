"""Calls as Gemma 4 has them, ``f{city:<|"|>Ulm<|"|>,days:3}``: to JSON and back."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
from typing import Any, Final

QUOTE: Final = '<|"|>'
_HEAD = re.compile(r"\s*call:\s*(?P<name>[\w.-]+)\s*(?=\{)")
_TOKEN = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|"""
    r"""(?P<word>[^\s{}\[\],:"]+)(?=\s*(?P<is>:)?)|(?P<other>[\s{}\[\],:])""",
    re.DOTALL,
)


def read_call(body: str) -> tuple[str, str]:
    """Return name and arguments in JSON, which is not checked, of what is between the marks.

    Raises ValueError where no call is.
    """
    match = _HEAD.match(body)
    if match is None:
        raise ValueError("no call")
    parts: list[str] = []
    at = match.end()
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            raise ValueError("a text without its end")
        at = token.end()
        is_text = token["text"] is not None or token["is"] is not None
        parts.append(json.dumps(token["text"] or token["word"] or "") if is_text else token[0])
    return match["name"], "".join(parts)


def write_value(value: Any) -> str:
    """Return a value of arguments as a call has it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_value, value)) + "]"
    return json.dumps(value)
