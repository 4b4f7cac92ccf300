"""The body of a request: JSON, as the struct that describes its fields.

msgspec checks types and ranges; what it refuses is said with the client's name of the field, its
rule and the value. The same structs describe the API at ``/openapi.json``.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from qsf.errors import shown
from qsf.foreign_json import JsonError, needed_bytes, read_json, scan_json
from qsf.options import Kind, Number, Whole
from qsf.serve.http.problems import Problem, invalid

DURATION = r"^(-?)((?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+|[0-9]{1,9})$"
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_RULES = {
    "bool": "true or false", "str": "a text", "array": "a list", "object": "an object",
    "int": "a whole number", "float": "a number",
}  # fmt: skip
_MISSING = re.compile(r"missing required field `(\w+)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`(?: of length (<=|>=) (\d+))?")
_MAX_FLOATS = 16  # in places of whole numbers: each is a new attempt
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
# Memory that JSON inside texts of the body may still take, in the thread that parses it.
_left_bytes: ContextVar[int] = ContextVar("left_bytes", default=1 << 20)


class Part(msgspec.Struct, kw_only=True):
    """An object of a request. A null field counts as absent.

    Attributes:
        IGNORED: fields that are accepted without effect.
        REFUSED: fields that are refused unless they are false, empty or 0, with the reason.
        OFF: values of such fields that are accepted instead.
    """

    IGNORED: ClassVar[tuple[str, ...]] = ()
    REFUSED: ClassVar[Mapping[str, str]] = {}
    OFF: ClassVar[Mapping[str, Any]] = {}


class _Head(msgspec.Struct):
    """What decides which model a request needs; the values of other fields are not made."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_EMPTY = (b"", b"null", b'""', b"[]")
_P = TypeVar("_P", bound=Part)


def within(kind: Whole | Number, rule: str = "", **more: Any) -> Meta:
    """Return the range of a number in a struct; ``more`` is for its JSON schema."""
    least: dict[str, Any] = {"gt" if getattr(kind, "is_open", False) else "ge": kind.least}
    return Meta(**least, le=kind.most, description=rule or kind.rule, extra_json_schema=more)


def read_body(data: bytes, memory_bytes: int) -> dict[str, Any]:
    """Parse the body of a request, which is one JSON object.

    ``memory_bytes`` covers the body and all JSON that ``read_inner`` parses in it. Raises Problem.
    """
    try:
        value = read_json(data, memory_bytes=memory_bytes)
    except JsonError as error:
        raise Problem(400, "invalid_json", f"the body cannot be read: {error}") from None
    _left_bytes.set(memory_bytes - needed_bytes(data))
    if not isinstance(value, dict):
        raise Problem(400, "invalid_json", f"the body must be an object, not {shown(value)}")
    return value


def read_inner(text: str) -> Any:
    """Return the value of JSON inside a text of the body. Raises JsonError."""
    left_bytes = _left_bytes.get()
    value = read_json(text, memory_bytes=left_bytes)
    _left_bytes.set(left_bytes - needed_bytes(text.encode()))
    return value


def read_part(kind: type[_P], values: Any, place: str = "") -> tuple[_P, list[str]]:
    """Return an object of a request, and the names of fields that nobody knows.

    Raises Problem, which names fields behind ``place``, such as "tools.".
    """
    for n_left in range(_MAX_FLOATS, -1, -1):
        try:
            part = msgspec.convert(values, kind)
            break
        except msgspec.ValidationError as error:
            if n_left == 0 or not _make_whole(str(error), values):
                raise _problem(str(error), kind, values, place) from None
    return part, _rest(part, values, place)


def _make_whole(text: str, values: Any) -> bool:
    """Make 4.0 the whole number that JSON Schema says it is, where ``text`` says that one lacks."""
    error, _, path = text.partition(" - at `$")
    if not error.startswith("Expected `int") or not error.endswith("got `float`"):
        return False
    *outer, last = [name or int(index) for name, index in _STEP.findall(path)]
    for key in outer:
        values = values[key]
    is_whole = bool(values[last].is_integer())
    if is_whole:
        values[last] = int(values[last])
    return is_whole


def _rest(part: Part, values: Mapping[str, Any], place: str) -> list[str]:
    for name, why in part.REFUSED.items():
        value = values.get(name)
        is_off = value in (None, part.OFF[name]) if name in part.OFF else not value
        if not is_off:
            name = place + name
            raise invalid(name, f"{name} is not supported: {why}", "unsupported_parameter")
    known = {*part.__struct_fields__, *part.IGNORED, *part.REFUSED, *(() if place else ("model",))}
    unknown = (name for name, value in values.items() if name not in known and value is not None)
    names = [place + name for name in unknown]
    for name in part.__struct_fields__:
        inner = getattr(part, name)
        if isinstance(inner, Part):
            names += _rest(inner, values[name], f"{place}{name}.")
    return sorted(names)


def _problem(text: str, kind: type[Part], values: Any, place: str) -> Problem:
    """Return what msgspec says about a value with the field's name, its rule and the value."""
    text, _, path = text.partition(" - at `$")
    missing = _MISSING.search(text)
    if missing is not None:
        name = f"{place}{path[1:-1]}.{missing[1]}" if path else place + missing[1]
        return invalid(name, f"{name} is missing")
    names: list[str] = []
    for name, index in _STEP.findall(path):
        values = values[name or int(index)]
        names += [name] if name else []
    name = place + ".".join(names)
    expected = _EXPECTED.search(text)
    if expected is not None and expected[2] == "<=":
        what = f"{len(values)} entries"
        what = f"a text of {len(values)} characters" if isinstance(values, str) else what
        return invalid(name, f"{name} has {what}, and {expected[3]} is the limit")
    rule = _described(msgspec.inspect.type_info(kind), names)
    if not rule:
        words = [] if expected is None else expected[1].split(" | ")
        rule = " or ".join(_RULES[word] for word in words if word in _RULES) or "another value"
        rule += " that is not empty" if expected is not None and expected[2] else ""
    return invalid(name, f"{name} must be {rule}, not {shown(values)}")


def _described(kind: Any, names: list[str]) -> str:
    """Return the rule in the description of a field; "": there is none."""
    for inner in (kind, *getattr(kind, "types", ())):
        if isinstance(inner, msgspec.inspect.Metadata):
            rule = _described(inner.type, names) if names else ""
            rule = rule or (inner.extra_json_schema or {}).get("description", "")
        elif isinstance(inner, msgspec.inspect.StructType) and names:
            field = next(field for field in inner.fields if field.encode_name == names[0])
            rule = _described(field.type, names[1:])
        elif isinstance(inner, msgspec.inspect.LiteralType) and not names:
            rule = " or ".join(map(str, inner.values))
        elif isinstance(inner, msgspec.inspect.ListType):
            rule = _described(inner.item_type, names)
        else:
            continue
        if rule:
            return str(rule)
    return ""


def read_name(data: bytes, memory_bytes: int) -> tuple[str | None, bool]:
    """Return the model that a request names, and whether it only wants that to leave memory.

    Raises Problem for a body that is no object.
    """
    try:
        head = scan_json(data, _Head, memory_bytes=memory_bytes)
    except JsonError:  # read_body says what is wrong
        values = read_body(data, memory_bytes)
        has_text = any(map(values.get, ("prompt", "messages", "input")))
        raw = msgspec.Raw(b"1" if has_text else b"")
        head = _Head(values.get("model"), values.get("name"), values.get("keep_alive"), raw)
    texts = (bytes(raw) for raw in (head.prompt, head.messages, head.input))
    is_leaving = Duration.seconds(head.keep_alive) == 0 and all(text in _EMPTY for text in texts)
    for name in (head.model, head.name):
        if not isinstance(name, str | None):
            raise invalid("model", f"model must be a text, not {shown(name)}")
    return head.model or head.name or None, is_leaving


class Duration(Kind):
    """How long something stays, as ollama has it."""

    metavar = "TIME"
    rule = 'seconds, or a text such as "5m" or "1h30m"; below 0: for ever'

    def is_valid(self, value: Any) -> bool:
        return self.seconds(value) is not None

    def parse(self, text: str) -> float:
        seconds = self.seconds(text)
        if seconds is None:
            raise ValueError(f"{text!r} is not {self.rule}")
        return seconds

    @staticmethod
    def seconds(value: Any) -> float | None:
        """Return the seconds, infinity for ever; None: the value is not valid, or absent."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if 0 <= value < 1e9 else math.inf
        match = re.fullmatch(DURATION, value) if isinstance(value, str) else None
        if match is None or match[1]:
            return match and math.inf
        parts = re.findall(r"([0-9.]+)([a-z]*)", match[2])
        return sum(float(n) * _UNIT_SECONDS[unit] for n, unit in parts)
