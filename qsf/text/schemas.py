"""JSON schemas: what says nothing is left out, and what tokens do not follow is checked at the end.

llguidance enforces most keywords while tokens are chosen; it names the others in warnings.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from qsf.foreign_json import read_json_at

MAX_LEVELS = 2000
"""The most levels of rules, brackets and schemas within each other. llguidance 1.9 takes up to
3.2 KB of stack for each."""
_MAX_EXPRESSION_CHARS = 8 << 10  # llguidance 1.9 may take the square of them: 13 MB, 0.1 s

_RULE = re.compile(r"^[!?]*(\w+)(?:\.-?\d+)?(?:\[.*?\])?[ \t]*:", re.MULTILINE)
_DIRECTIVE = re.compile(r"^%(?:ignore|import|llguidance|declare|override)\b.*$", re.MULTILINE)
_TOKEN = re.compile(
    r"""//[^\n]*|\#[^\n]*|->\s*\w+
    |(?P<schema>%json\s*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>[()\[\]])
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
    """Raise ValueError for a schema that is too deep."""
    parts: dict[int, tuple[set[str], int]] = {}  # by the identity of a reference's target
    names, seen = ["#"], {"#"}
    while names:
        target = target_of(schema, names.pop())
        if id(target) not in parts:
            parts[id(target)] = _references(target)
        references, _ = parts[id(target)]
        names += references - seen
        seen |= references
    _check_levels(n_levels for references, n_levels in parts.values() if references)


def check_grammar(lark: str) -> None:
    """Raise ValueError for a Lark grammar that is too deep, or has too long expressions."""
    texts = _RULE.split(_DIRECTIVE.sub("", lark))[1:]
    rules = list(zip(texts[::2], texts[1::2], strict=True))
    check_expressions(text for name, text in rules if name[0].isupper() or "/" in text)
    _check_levels([_levels_of(text) for _, text in rules])


def _levels_of(rule: str) -> int:
    """Return the levels of a rule's brackets, 0 if it names no other rule. Checks its schemas."""
    resume = depth = deepest = 0
    has_name = False
    for token in _TOKEN.finditer(rule):
        if token.start() < resume:
            continue
        if token.lastgroup == "schema":
            schema, resume = read_json_at(rule, token.end())
            if isinstance(schema, dict):
                check_schema(schema)
        elif token.lastgroup == "sign":
            depth += 1 if token[0] in "([" else -1
            deepest = max(deepest, depth)
        has_name |= token.lastgroup == "name"
    return 1 + deepest if has_name else 0


def _check_levels(levels: Iterable[int]) -> None:
    """Raise ValueError if rules that name others, each with its levels, may be too deep."""
    n_levels = sum(levels)
    if n_levels > MAX_LEVELS:
        text = f"its rules that name others have {n_levels} levels in all"
        raise ValueError(f"{text}, and {MAX_LEVELS} is the limit")


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


_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "contains"),
    *("propertyNames", "not", "if", "then", "else"),
)
# Values with which keywords that llguidance lacks say nothing, and keywords without their partner.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"}), "not": (False,),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},),
}  # fmt: skip
_PARTNERS = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}
_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")  # look-around, back references
_BEYOND = "a pattern beyond llguidance"  # as a format, of which it warns
# llguidance reads no larger numbers; an answer within these keeps the schema's bounds.
_MOST = {"maximum": 1 << 62, "exclusiveMaximum": 1 << 62, "maxLength": 1 << 30}
_LIMIT = re.compile("min|max|exclusive")
_LEAST = {"minimum": -(1 << 62), "exclusiveMinimum": -(1 << 62)}
_MAX_STEPS = 20_000  # of one check: references may make it exponential
_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "number": (int, float), "integer": (int, float),
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def _is_beyond(pattern: str) -> bool:
    """True for a regular expression of which llguidance lacks a part."""
    from llguidance import LLMatcher

    if not LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):  # named groups are of JavaScript
        return bool(_LOOKS.search(pattern))
    return True


def _number(name: str, rule: Any) -> Any:
    """Return a keyword's value as llguidance reads it: 5.0 is a length, bounds have 63 bits."""
    if isinstance(rule, bool) or not isinstance(rule, (int, float)) or not _LIMIT.match(name):
        return rule
    if isinstance(rule, float) and rule.is_integer():
        rule = int(rule)
    rule = min(rule, _MOST.get(name, rule))
    return max(rule, _LEAST.get(name, rule))


def simplified(schema: Any) -> Any:
    """Return a schema that llguidance reads: without keywords that say nothing, patterns that it
    lacks, and numbers beyond its own.
    """
    if isinstance(schema, list):
        return [simplified(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for name, rule in schema.items():
        is_nothing = any(type(rule) is type(x) and rule == x for x in _NOTHING.get(name, ()))
        if is_nothing or _PARTNERS.get(name, name) not in schema:
            continue
        if name == "$schema" and "//json-schema.org/" not in str(rule):
            continue
        if name == "pattern" and isinstance(rule, str) and _is_beyond(rule):
            new["format"] = _BEYOND
        elif name in _NAMED and isinstance(rule, dict):
            new[name] = {key: simplified(inner) for key, inner in rule.items()}
        elif name in _INNER:
            new[name] = simplified(rule)
        else:
            new.setdefault(name, _number(name, rule))
    return new


def keywords_of(warnings: Sequence[str]) -> frozenset[str]:
    """Return the keywords that llguidance does not enforce, by its warnings."""
    names: list[str] = []
    for text in warnings:
        if text.startswith("Unimplemented keys"):
            names += re.findall(r'"([^"]+)"', text)
        elif not text.startswith("Unknown format"):  # such a format says nothing
            names.append(text.partition(" ")[0])
        elif _BEYOND in text:
            names.append("pattern")
    return frozenset(names)


class Check:
    """Checks a value that llguidance has written against all keywords of its schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = schema
        self._n_left = _MAX_STEPS
        self.n_judged = 0  # schemas around this place that llguidance does not know

    def fits(self, value: Any) -> bool | None:
        """Return whether a JSON value has the form; None: that is not known, or takes too long."""
        try:
            return self.inner(self.root, value)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return None  # a keyword with a value of the wrong kind, where llguidance does not look

    def inner(self, schema: Any, value: Any) -> bool | None:
        self._n_left -= 1
        if self._n_left < 0 or isinstance(schema, bool):
            return schema if self._n_left >= 0 else None
        kinds = [_ANY, *(rules for kind, rules in _BY_TYPE if _is_type(value, kind))]
        return _all(
            rules[name](self, rule, schema, value)
            for rules in kinds
            for name, rule in schema.items()
            if name in rules
        )

    def judge(self, schema: Any, values: Iterable[Any]) -> list[bool | None]:
        """Return whether each value has a form that llguidance did not enforce."""
        self.n_judged += 1
        fits = [self.inner(schema, value) for value in values]
        self.n_judged -= 1
        return fits


def _all(fits: Iterable[bool | None]) -> bool | None:
    values = list(fits)
    return False if False in values else None if None in values else True


def _count(fits: Sequence[bool | None], least: int, most: int) -> bool | None:
    return None if None in fits else least <= fits.count(True) <= most


def _is_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    return isinstance(value, _TYPES[kind]) and (kind != "integer" or value == int(value))


def _text(value: Any) -> str:
    """Return a text that equal values share: 1 and 1.0 are equal, 1 and true are not."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _if(check: Check, rule: Any, schema: Mapping[str, Any], value: Any) -> bool | None:
    (is_so,) = check.judge(rule, [value])
    return (
        None if is_so is None else check.inner(schema.get("then" if is_so else "else", True), value)
    )


def _needs(check: Check, rule: Mapping[str, Any], value: Mapping[str, Any]) -> bool | None:
    needed = [each for key, each in rule.items() if key in value]
    lists = [all(key in value for key in each) for each in needed if isinstance(each, list)]
    return _all([*lists, *(check.inner(e, value) for e in needed if not isinstance(e, list))])


# By keyword whether a value fits: of the check, the keyword's value, its schema, and the value.
_Rules = dict[str, Callable[[Check, Any, Mapping[str, Any], Any], bool | None]]
_ANY: _Rules = {
    "type": lambda c, r, s, v: any(
        _is_type(v, kind) for kind in ([r] if isinstance(r, str) else r)
    ),
    "const": lambda c, r, s, v: _text(r) == _text(v),
    "enum": lambda c, r, s, v: _text(v) in map(_text, r),
    "$ref": lambda c, r, s, v: c.inner(target_of(c.root, r), v),
    "allOf": lambda c, r, s, v: _all(c.inner(inner, v) for inner in r),
    "anyOf": lambda c, r, s, v: _count([c.judge(inner, [v])[0] for inner in r], 1, len(r)),
    "oneOf": lambda c, r, s, v: _count([c.judge(inner, [v])[0] for inner in r], 1, 1),
    "not": lambda c, r, s, v: _count(c.judge(r, [v]), 0, 0),
    "if": _if,
    **dict.fromkeys(("$dynamicRef", "unevaluatedItems", "unevaluatedProperties"), lambda *_: None),
}
_OF_NUMBERS: _Rules = {
    "minimum": lambda c, r, s, v: v >= r,
    "maximum": lambda c, r, s, v: v <= r,
    "exclusiveMinimum": lambda c, r, s, v: v > r,
    "exclusiveMaximum": lambda c, r, s, v: v < r,
    "multipleOf": lambda c, r, s, v: v % r == 0 or None,  # of fractions it is not exact
}
_OF_TEXTS: _Rules = {
    "minLength": lambda c, r, s, v: len(v) >= r,
    "maxLength": lambda c, r, s, v: len(v) <= r,
    "pattern": lambda c, r, s, v: None if c.n_judged or _is_beyond(r) else True,
}
_OF_LISTS: _Rules = {
    "minItems": lambda c, r, s, v: len(v) >= r,
    "maxItems": lambda c, r, s, v: len(v) <= r,
    "uniqueItems": lambda c, r, s, v: not r or len(set(map(_text, v))) == len(v),
    "prefixItems": lambda c, r, s, v: _all(map(c.inner, r, v)),
    "items": lambda c, r, s, v: _all(
        map(c.inner, r, v)
        if isinstance(r, list)
        else (c.inner(r, item) for item in v[len(s.get("prefixItems", ())) :])
    ),
    "contains": lambda c, r, s, v: _count(
        c.judge(r, v), s.get("minContains", 1), s.get("maxContains", len(v))
    ),
}
_OF_OBJECTS: _Rules = {
    "minProperties": lambda c, r, s, v: len(v) >= r,
    "maxProperties": lambda c, r, s, v: len(v) <= r,
    "required": lambda c, r, s, v: all(key in v for key in r),
    "properties": lambda c, r, s, v: _all(c.inner(r[key], v[key]) for key in v if key in r),
    "patternProperties": lambda c, r, s, v: (
        None if v.keys() - s.get("properties", {}).keys() else True
    ),
    "additionalProperties": lambda c, r, s, v: (
        _all(c.inner(r, v[key]) for key in v if key not in s.get("properties", {}))
        or (None if "patternProperties" in s else False)
    ),
    "propertyNames": lambda c, r, s, v: _all(c.judge(r, v)),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"),
        lambda c, r, s, v: _needs(c, r, v),
    ),
}
_BY_TYPE = (
    ("number", _OF_NUMBERS),
    ("string", _OF_TEXTS),
    ("array", _OF_LISTS),
    ("object", _OF_OBJECTS),
)
