"""The fields of a request: read one by one and checked; the rest are reported."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from qsf.errors import shown
from qsf.foreign_json import JsonError, needed_bytes, read_json
from qsf.options import Kind
from qsf.serve.http.problems import Problem, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DURATION = r"^(-?)((?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+|[0-9]{1,9})$"
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_NAMES = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


# Memory that JSON inside texts of the body may still take, in the thread that parses it.
_left_bytes: ContextVar[int] = ContextVar("left_bytes", default=1 << 20)


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


class Duration(Kind):
    """How long something stays, as ollama has it."""

    metavar = "TIME"
    rule = 'seconds, or a text such as "5m" or "1h30m"; below 0: for ever'

    def is_valid(self, value: Any) -> bool:
        """Return whether ``value`` is a number, or such a text."""
        return self.seconds(value) is not None

    def parse(self, text: str) -> float:
        """Return the seconds."""
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


class Probe(dict[str, Any]):
    """An object of a request that records the fields its reader takes: for /openapi.json.

    Attributes:
        taken: by name the kind of a field, its JSON type, the Probe of an object, or None if the
            reader checks the value itself.
        names: what the client calls fields that were renamed.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.names = names or {}
        self.taken: dict[str, Kind | type | Probe | None] = {}


def as_body(
    values: Mapping[str, Any], source: Mapping[str, Any], names: Mapping[str, str]
) -> Probe:
    """Return the body of another request with the fields of ``source``; a Probe records both.

    ``names``: the new names of fields by those of the client.
    """
    body = Probe(values, {new: old for old, new in names.items()})
    body.taken = source.taken if isinstance(source, Probe) else body.taken
    return body


class Fields:
    """The fields of one object of a request. A null field counts as absent."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        """Wrap the object; errors put ``place``, such as "stream.", before field names."""
        self._values = {name: value for name, value in values.items() if value is not None}
        self._place = place
        self._probe = values if isinstance(values, Probe) else Probe({})
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def name(self, name: str) -> str:
        """Return the field's name with ``place`` before it."""
        return self._place + self._probe.names.get(name, name)

    def raw(self, name: str) -> Any:
        """Return a field unchecked; None: absent."""
        return self._get(name, None)

    def _get(self, name: str, kind: Kind | type | None) -> Any:
        self._taken.add(name)
        self._probe.taken.setdefault(name, kind)
        return self._values.get(name)

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """Return a field that is of ``kind``. Raises Problem with the value and the range."""
        value = self._get(name, kind)
        if value is None:
            return default
        if not kind.is_valid(value):
            raise invalid(
                self.name(name), f"{self.name(name)} must be {kind.rule}, not {shown(value)}"
            )
        return value

    def _of(self, name: str, kind: type, default: Any) -> Any:
        value = self._get(name, kind)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise invalid(
                self.name(name), f"{self.name(name)} must be {_NAMES[kind]}, not {shown(value)}"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that is true or false."""
        value: bool = self._of(name, bool, default)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text field."""
        value: str | None = self._of(name, str, default)
        return value

    def list(self, name: str, most: int) -> list[Any]:
        """Return a list field of at most ``most`` entries; absent: []."""
        value: list[Any] = self._of(name, list, [])
        if len(value) > most:
            name = self.name(name)
            raise invalid(name, f"{name} has {len(value)} entries, and {most} is the limit")
        return value

    def object(self, name: str) -> Fields:
        """Return an object field as ``Fields``; absent: empty."""
        inner = Fields(self._of(name, dict, {}), f"{self.name(name)}.")
        self._probe.taken[name] = inner._probe
        return inner

    def mapping(self, name: str, most: int) -> dict[str, Any]:
        """Return an object field unchanged."""
        value: dict[str, Any] = self._of(name, dict, {})
        if len(value) > most:
            name = self.name(name)
            raise invalid(name, f"{name} has {len(value)} entries, and {most} is the limit")
        return value

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect here."""
        self._taken.update(names)

    def refuse(self, names: Mapping[str, str]) -> None:
        """Raise Problem if one of these fields is set, with the reason why it is refused.

        A value that is false, empty or 0 counts as not set.
        """
        for name, why in names.items():
            self._taken.add(name)
            if self._values.get(name):
                name = self.name(name)
                raise invalid(name, f"{name} is not supported: {why}", "unsupported_parameter")

    def rest(self) -> Sequence[str]:
        """Return the names of fields that no reader took."""
        return sorted(self._place + name for name in set(self._values) - self._taken)
