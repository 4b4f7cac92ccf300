"""Schemas and grammars that are refused before llguidance sees them.

No finite text satisfies some, because their recursion cannot end. Others are so deep that the
library, which follows rules within rules on its stack, would end the process.

Both are read as rules of a context-free grammar. A rule is finite if all its required parts are.
Unknown parts count as finite: llguidance judges them. All of this takes linear time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from qsf.foreign_json import read_json_at

# A rule's name, a truth value, or ("all" or "any", parts): all or any of the parts must be finite.
_Part = bool | str | tuple[str, list[Any]]

MAX_LEVELS = 2000
"""The most levels of rules, brackets and schemas within each other. llguidance 1.9 takes up to
3.2 KB of stack for each."""
_MAX_EXPRESSION_CHARS = 8 << 10  # llguidance 1.9 may take the square of them: 13 MB, 0.1 s
_ENDLESS = "its recursion never ends: each text of this form would contain another one"

_RULE = re.compile(r"^[!?]*(\w+)(?:\.-?\d+)?(?:\[.*?\])?[ \t]*:", re.MULTILINE)
_DIRECTIVE = re.compile(r"^%(?:ignore|import|llguidance|declare|override)\b.*$", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<schema>%json\s*)
    |(?P<optional>[?*]|(?:~\s*|\{\s*)(?![0-9]*[1-9])[^}\s]*\}?)
    |(?P<repeated>\+|~\s*[\d.]+|\{[\s\d,]*\})
    |(?P<name>[a-z_]\w*)
    |(?P<sign>[(\[)\]|])
    |(?P<terminal>[A-Z]\w*)
    |"(?:\\.|[^"\\])*(?:"i?|\\?\Z)|/(?:\\.|[^/\\\n])+(?:/[a-z]*|(?=\\?(?:\n|\Z)))
    |\w+|<[^<>]*>?|.""",
    re.VERBOSE | re.DOTALL,
)


def check_expressions(texts: Iterable[str]) -> None:
    """Raise ValueError if regular expressions are too long together."""
    n_chars = sum(map(len, texts))
    if n_chars > _MAX_EXPRESSION_CHARS:
        text = f"its regular expressions have {n_chars} characters"
        raise ValueError(f"{text}, and {_MAX_EXPRESSION_CHARS} is the limit")


def check_schema(schema: dict[str, Any]) -> None:
    """Raise ValueError for a schema each of whose values contains another, or that is too deep."""
    if not _is_finite_schema(schema):
        raise ValueError(_ENDLESS)


def check_grammar(lark: str) -> None:
    """Raise ValueError for a Lark grammar all of whose texts are infinite, or that is too deep."""
    texts = _RULE.split(_DIRECTIVE.sub("", lark))[1:]
    rules: dict[str, _Part] = {}
    levels: list[int] = []
    for name, text in zip(texts[::2], texts[1::2], strict=True):
        tokens = list(_tokens(text))
        rules[name] = _alternatives(iter(tokens))
        if any(kind in ("name", "terminal") for kind, _ in tokens):
            steps = ((word in ("(", "[")) - (word in (")", "]")) for _, word in tokens)
            levels.append(1 + max(itertools.accumulate(steps)))
    named = zip(texts[::2], texts[1::2], strict=True)
    check_expressions(text for name, text in named if name[0].isupper() or "/" in text)
    _check_levels(levels)
    if not _is_finite("start", rules):
        raise ValueError(_ENDLESS)


def _is_finite_schema(schema: dict[str, Any]) -> bool:
    rules: dict[str, _Part] = {}
    parts: dict[int, tuple[_Part, set[str], int]] = {}  # by the identity of a reference's target
    names, seen = ["#"], {"#"}
    while names:
        name = names.pop()
        target = target_of(schema, name)
        if id(target) not in parts:
            parts[id(target)] = (_schema_part(target), *_references(target))
        rules[name], references, _ = parts[id(target)]
        names += references - seen
        seen |= references
    _check_levels(n_levels for _, references, n_levels in parts.values() if references)
    return _is_finite("#", rules)


def _check_levels(levels: Iterable[int]) -> None:
    """Raise ValueError if rules that name others, each with its levels, may be too deep."""
    n_levels = sum(levels)
    if n_levels > MAX_LEVELS:
        text = f"its rules that name others have {n_levels} levels in all"
        raise ValueError(f"{text}, and {MAX_LEVELS} is the limit")


def _is_finite(start: str, rules: Mapping[str, _Part]) -> bool:
    """Return whether a rule is finite; each finite part is reported to its users once."""
    numbers = {name: number for number, name in enumerate(rules)}
    n_missing = [1] * len(rules)  # by part: how many of its parts must still become finite
    users: list[list[int]] = [[] for _ in rules]  # by part: the parts that need it
    ready: list[int] = []  # finite parts whose users do not know

    def add(part: _Part, user: int) -> None:
        if isinstance(part, str) and part in numbers:
            users[numbers[part]].append(user)
            return
        kind, inner = part if isinstance(part, tuple) else ("all" if part else "any", [])
        number = len(users)
        users.append([user])
        n_missing.append(len(inner) if kind == "all" else 1)
        if not n_missing[number]:
            ready.append(number)
        for each in inner:
            add(each, number)

    for name, part in rules.items():
        add(part, numbers[name])
    while ready:
        for user in users[ready.pop()]:
            n_missing[user] -= 1
            if n_missing[user] == 0:
                ready.append(user)
    return start not in numbers or n_missing[numbers[start]] <= 0


def _references(schema: Any) -> tuple[set[str], int]:
    """Return the references in a schema, and how many levels it has."""
    references: set[str] = set()
    level, n_levels = [schema], 0
    while level:
        n_levels += 1
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                if isinstance(part.get("$ref"), str):
                    references.add(part["$ref"])
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        level = inner
    return references, n_levels


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


def target_of(schema: Any, reference: str) -> Any:
    """Return the target of a reference within the schema; None: another kind of reference."""
    root, _, path = reference.partition("#")
    for step in [] if root else path.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return None if root or (path and path[0] != "/") else schema


def _tokens(text: str) -> Iterator[tuple[str | None, str | bool]]:
    """Yield kind and text of each token of a rule; of a schema, whether it is finite."""
    resume = 0
    for token in _TOKEN.finditer(text):
        if token.start() < resume or token.lastgroup in ("space", "repeated"):
            continue
        if token.lastgroup == "schema":
            value, resume = read_json_at(text, token.end())
            yield "schema", not isinstance(value, dict) or _is_finite_schema(value)
        else:
            yield token.lastgroup, token[0]


def _alternatives(tokens: Iterator[tuple[str | None, str | bool]]) -> _Part:
    """Return the alternatives up to the closing bracket, which is consumed too."""
    choices: list[list[_Part]] = [[]]
    for kind, word in tokens:
        if kind == "optional":
            choices[-1][-1:] = []
        elif word in ("(", "["):
            inner = _alternatives(tokens)
            choices[-1].append(inner if word == "(" else True)
        elif word in (")", "]"):
            break
        elif word == "|":
            choices.append([])
        else:
            choices[-1].append(word if kind in ("name", "schema") else True)
    return ("any", [("all", parts) for parts in choices])
