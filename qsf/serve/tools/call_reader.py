"""``CallReader``: finds calls of functions in a model's answer while it arrives."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qsf.foreign_json import JsonError
from qsf.serve.tools.call_formats import JSON_HEAD, Format, read_output, read_whole
from qsf.serve.tools.pythonic import read_call, read_head
from qsf.text.sampling import n_overlap

# Mistral's templates refuse ids of another form; other templates accept any.
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_TAGS = ("<|python_tag|>", "<|python_start|>")  # of Llama: before a call that is the whole answer
_OBJECT_START = '{"name":'
_MAX_HEAD = 200  # characters held back while the answer may begin a call


@dataclass(slots=True)
class CallPart:
    """A call; with an empty name, more arguments of the last one.

    Attributes:
        index: number of the call in the answer.
        arguments: JSON.
    """

    index: int
    arguments: str
    name: str = ""
    id: str = ""

    def values(self) -> Any:
        """Return the arguments; {} if the most tokens cut them, so that they are not JSON."""
        try:
            return read_output(self.arguments)
        except JsonError:
            return {}


class _Braces:
    """Finds the end of a JSON object or list."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._is_text = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return the index after the end of the value; None: ``text`` ends inside of it."""
        for i, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = letter == "\\"
                self._is_text = letter != '"'
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


class CallReader:
    """Receives the text of an answer piece by piece; returns the text outside of calls, and the
    calls.

    A call of an unknown function counts as text.
    """

    def __init__(self, form: Format, schemas: Mapping[str, Any], *, is_parallel: bool) -> None:
        """Start an answer; ``schemas`` are those of arguments by function name."""
        self._form = form
        self._schemas = schemas
        self._is_parallel = is_parallel
        self._head = form.head
        self._rest = ""  # not looked at yet
        self._raw = ""  # what has begun the calls, should they be none
        self._state: Callable[[], bool] = self._in_text if form.begin else self._at_start
        if form.begin and form.arguments == "json" and self._head is JSON_HEAD:
            self._state = self._at_bare_start
        self._braces = _Braces(0)
        self._text: list[str] = []
        self._space = ""  # space at the end of the text, held back
        self._parts: list[CallPart] = []
        self._is_behind_call = False  # after a call, before any text
        self.n_calls = 0
        self.is_full = False  # the answer has all its calls
        self.open_name: str | None = None  # function whose arguments are arriving
        self.open_arguments = ""

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Read more text; return the text and the parts of calls that are complete."""
        self._rest += text
        while not self.is_full and self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, tuple[CallPart, ...]]:
        """Return the rest at the end of the answer."""
        if self.is_full:
            return "", ()
        if self._state == self._in_head:
            self._take_whole(self._rest, "")
        elif self._state in (
            *(self._in_text, self._at_start, self._at_bare_start),
            self._behind_calls,
        ):
            self._say(self._rest)
        if not self._is_behind_call:
            self._text.append(self._space)
        self._rest = self._space = ""
        return self._taken()

    def _taken(self) -> tuple[str, tuple[CallPart, ...]]:
        text, parts = "".join(self._text), tuple(self._parts)
        self._text.clear()
        self._parts.clear()
        return text, parts

    def _tell(self, arguments: str) -> None:
        """Report more arguments of the last call."""
        if self._parts:
            self._parts[-1].arguments += arguments
        else:
            self._parts.append(CallPart(self.n_calls - 1, arguments))

    def _say(self, text: str) -> None:
        """Report text; holds back space at its end, and drops it next to calls."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._is_behind_call:
            shown = shown.lstrip()
        if shown:
            self._text.append(shown)
            self._is_behind_call = False

    def _begin(self, name: str, arguments: str = "") -> None:
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        self._parts.append(CallPart(self.n_calls, arguments, name, letters))
        self.n_calls += 1
        self._space = ""
        self._is_behind_call = True

    def _take_whole(self, body: str, end: str) -> None:
        calls = read_whole(self._form, body, self._schemas)
        for name, arguments in calls if self._is_parallel else calls[:1]:
            self._begin(name, arguments)
        if not calls:
            self._say(self._raw + body + end)
        self.is_full = bool(calls) and not self._is_parallel

    # ---- states: each returns whether the next one may run ----

    def _at_start(self) -> bool:
        """State: the answer may be a call as a whole."""
        text = self._rest.lstrip()
        if not text:
            return False
        self._raw = self._rest[: len(self._rest) - len(text)]
        for tag in _TAGS:
            if text.startswith(tag):
                self._raw, text = self._raw + tag, text[len(tag) :].lstrip()
            elif tag.startswith(text):
                return False
        self._rest = text
        self._state = self._in_head
        return True

    def _at_bare_start(self) -> bool:
        """State: a small model may write a call as the whole answer, without the begin mark."""
        text = self._rest.lstrip()
        match = JSON_HEAD.match(text)
        if match is not None and match["name"] in self._schemas:
            self._state = self._in_head
            return True
        start = re.sub(r"\s", "", text[:100])[: len(_OBJECT_START)]
        if match is None and _OBJECT_START.startswith(start) and len(text) < _MAX_HEAD:
            return False
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        begin = self._form.begin
        at = self._rest.find(begin) if begin else -1
        if at < 0:
            n_shown = len(self._rest) - (n_overlap(self._rest, begin) if begin else 0)
            self._say(self._rest[:n_shown])
            self._rest = self._rest[n_shown:]
            return False
        self._say(self._rest[:at])
        self._raw, self._rest = begin, self._rest[at + len(begin) :]
        self._state = self._in_head
        return True

    def _in_head(self) -> bool:
        form = self._form
        match = None if form.is_elements else self._head.match(self._rest)
        if match is not None and match["name"] in self._schemas:
            self._begin(match["name"])
            self.open_name, self.open_arguments = match["name"], ""
            self._rest = self._rest[match.end() :]
            self._braces = _Braces(0)
            self._state = self._in_arguments
            return True
        if form.arguments == "python" and (is_taken := self._take_python()) is not None:
            return is_taken
        if form.end:
            body, end, rest = self._rest.partition(form.end)
            if not end:
                return False
            self._rest = rest
            self._state = self._in_text
            self._take_whole(body, end)
            return True
        start = re.sub(r"\s", "", self._rest[:100])[: len(_OBJECT_START)]
        if not form.begin and not _OBJECT_START.startswith(start):
            self._rest = self._raw + self._rest
            self._state = self._in_text
            return True
        return False

    def _take_python(self) -> bool | None:
        """Report a complete call; return whether there was one, or None if there is no call."""
        name = read_head(self._rest)
        if name is None or (name and name not in self._schemas):
            return None
        try:
            call = read_call(self._rest) if ")" in self._rest else None
            if call is None:
                return None if self._form.end and self._form.end in self._rest else False
            arguments = json.dumps(read_output(call[1]), ensure_ascii=False)
        except ValueError:
            return None
        self._begin(call[0], arguments)
        self._rest = self._rest[call[2] :]
        self._state = self._behind_calls
        return True

    def _in_arguments(self) -> bool:
        end = self._braces.end(self._rest)
        text = self._rest[:end]
        if text:
            self.open_arguments += text
            self._tell(text)
        self._rest = self._rest[len(text) :]
        if end is None:
            return False
        self.open_name = None
        self._braces = _Braces(1)
        is_object = self._head is JSON_HEAD
        self._state = self._behind_arguments if is_object else self._behind_calls
        return True

    def _behind_arguments(self) -> bool:
        """State: inside the object that is the call."""
        end = self._braces.end(self._rest)
        self._rest = "" if end is None else self._rest[end:]
        if end is None:
            return False
        self._state = self._behind_calls
        return True

    def _behind_calls(self) -> bool:
        form = self._form
        if not self._is_parallel:
            self.is_full = True
            return False
        text = self._rest = self._rest.lstrip()
        for sign in form.behind:
            if text.startswith(sign):
                self._rest = text[len(sign) :]
                self._state = self._in_text if sign == form.end else self._behind_calls
                return True
        mark = "" if self._head is JSON_HEAD else form.before.removeprefix(form.begin)
        is_object = text[:1] == "{" and (form.first or not form.begin)
        if text[:1] in (",", ";") or is_object or (mark and text.startswith(mark)):
            self._raw, self._rest = "", text.lstrip(",;")
            self._state = self._in_head
            return True
        if not text or any(sign.startswith(text) for sign in (*form.behind, mark)):
            return False
        self._state = self._in_text
        return True
