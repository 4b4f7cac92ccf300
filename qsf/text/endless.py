"""Schemas and grammars that no finite text satisfies, because their recursion cannot end.

Both are read as rules of a context-free grammar. A rule is finite if all its required parts are.
Unknown parts count as finite: llguidance judges them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from qsf.foreign_json import read_json_at

# A rule's name, a truth value, or ("all" or "any", parts): all or any of the parts must be finite.
_Part = bool | str | tuple[str, list[Any]]

_RULE = re.compile(r"^[!?]*(\w+)(?:\.-?\d+)?(?:\[.*?\])?[ \t]*:", re.MULTILINE)
_DIRECTIVE = re.compile(r"^%(?:ignore|import|llguidance|declare|override)\b.*$", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<schema>%json\s*)
    |(?P<optional>[?*]|(?:~\s*|\{\s*)0*(?![1-9])[^}\s]*\}?)
    |(?P<repeated>\+|~\s*[\d.]+|\{[\s\d,]*\})
    |(?P<name>[a-z_]\w*)
    |(?P<sign>[(\[)\]|])
    |"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|\w+|<[^>]*>|.""",
    re.VERBOSE | re.DOTALL,
)


def is_endless_schema(schema: dict[str, Any]) -> bool:
    """Return whether every value of a JSON schema must contain another such value."""
    rules: dict[str, _Part] = {}
    names = ["#"]
    while names:
        name = names.pop()
        rules[name] = part = _schema_part(_target(schema, name))
        names += [needed for needed in set(_names(part)) if needed not in {*rules, *names}]
    return not _is_finite("#", rules)


def is_endless_grammar(lark: str) -> bool:
    """Return whether every text that the rule ``start`` of a Lark grammar allows is infinite."""
    texts = _RULE.split(_DIRECTIVE.sub("", lark))[1:]
    rules = {
        name: _alternatives(text, _TOKEN.finditer(text))
        for name, text in zip(texts[::2], texts[1::2], strict=True)
    }
    return not _is_finite("start", rules)


def _is_finite(name: str, rules: dict[str, _Part]) -> bool:
    finite: set[str] = set()

    def ends(part: _Part) -> bool:
        if isinstance(part, tuple):
            return (all if part[0] == "all" else any)(map(ends, part[1]))
        return (part in finite or part not in rules) if isinstance(part, str) else part

    while more := {rule for rule in rules if rule not in finite and ends(rules[rule])}:
        finite |= more
    return ends(name)


def _names(part: _Part) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for inner in part[1]:
            yield from _names(inner)


def _schema_part(schema: Any) -> _Part:
    if not isinstance(schema, dict):
        return True
    needed: list[_Part] = []
    if isinstance(schema.get("$ref"), str):
        needed.append(schema["$ref"])
    for key, kind in (("allOf", "all"), ("anyOf", "any"), ("oneOf", "any")):
        if isinstance(schema.get(key), list):
            needed.append((kind, [_schema_part(branch) for branch in schema[key]]))
    if schema.get("type") == "object" and isinstance(schema.get("required"), list):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            needed += [_schema_part(properties.get(str(name))) for name in schema["required"]]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        items = first[:least] if isinstance(first, list) else []
        items += [schema.get("items")] * (len(items) < least)
        needed += map(_schema_part, items)
    return ("all", needed)


def _target(schema: Any, reference: str) -> Any:
    """Return the target of a reference within the schema; None: another kind of reference."""
    root, _, path = reference.partition("#")
    for step in [] if root else path.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return None if root or (path and path[0] != "/") else schema


def _alternatives(text: str, tokens: Iterator[re.Match[str]]) -> _Part:
    """Return the alternatives up to the closing bracket, which is consumed too."""
    choices: list[list[_Part]] = [[]]
    resume = 0
    for token in tokens:
        kind, word = token.lastgroup, token[0]
        if kind in ("space", "repeated") or token.start() < resume:
            continue
        if kind == "optional":
            choices[-1][-1:] = []
        elif kind == "schema":
            value, resume = read_json_at(text, token.end())
            choices[-1].append(not (isinstance(value, dict) and is_endless_schema(value)))
        elif word in ("(", "["):
            inner = _alternatives(text, tokens)
            choices[-1].append(inner if word == "(" else True)
        elif word in (")", "]"):
            break
        elif word == "|":
            choices.append([])
        else:
            choices[-1].append(word if kind == "name" else True)
    return ("any", [("all", parts) for parts in choices])
