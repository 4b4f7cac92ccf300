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
from qsf.serve.tools.call_formats import (
    JSON_HEAD,
    PYTHON_ENDS,
    Format,
    read_head,
    read_output,
    read_python,
    read_whole,
)
from qsf.text.sampling import n_overlap
from qsf.text.schemas import Check

# Mistral's templates refuse ids of another form; other templates accept any.
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
_TAGS = ("<|python_tag|>", "<|python_start|>")  # of Llama: before a call that is the whole answer
_OBJECT_START = '{"name":'
_FENCE = re.compile(r"```(?:json)?\s*(?=\{)")
_FENCE_START = re.compile(r"`{1,3}|```j(?:s(?:on?)?)?|```(?:json)?\s*")
_MAX_HEAD = 500  # characters that are held back while they may begin a call


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


_JSON_ENDS = ("{[", "}]", '"')


class _Braces:
    """Finds the end of a JSON object or list, or of a call in Python's syntax."""

    def __init__(self, depth: int, signs: tuple[str, str, str] = _JSON_ENDS) -> None:
        """Start inside so many brackets; ``signs`` are what opens and closes, and the quotes."""
        self._depth = depth
        self._openers, self._closers, self._quotes = signs
        self._quote = ""  # of the text that the next letter belongs to
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return the index after the end of the value; None: ``text`` ends inside of it."""
        for i, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = letter == "\\"
                self._quote = "" if letter == self._quote else self._quote
            elif letter in self._quotes:
                self._quote = letter
            elif letter in self._openers:
                self._depth += 1
            elif letter in self._closers:
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


class CallReader:
    """Receives the text of an answer piece by piece; returns the text outside of calls, and the
    calls.

    A call of an unknown function counts as text. What arrives is looked at once, and again only in
    a head, which has at most ``_MAX_HEAD`` characters: a model may write anything in a loop.
    """

    def __init__(self, form: Format, schemas: Mapping[str, Any], *, is_parallel: bool) -> None:
        """Start an answer; ``schemas`` are those of arguments by function name."""
        self._form = form
        self._schemas = schemas
        self._is_parallel = is_parallel
        self._head = form.head
        self._rest = ""  # not looked at yet
        self._raw: list[str] = []  # what has begun the calls, should they be none
        self._body: list[str] = []  # of a call that is read when it is complete
        self._state: Callable[[], bool] = self._at_bare_start if form.begin else self._at_start
        self._braces = _Braces(0)
        self._tail = ""  # what must still follow an object that is the whole answer
        self._text: list[str] = []
        self._space: list[str] = []  # space at the end of the text, held back
        self._parts: list[CallPart] = []
        self._is_behind_call = False  # after a call, before any text
        self.n_calls = 0
        self.is_full = False  # the answer has all its calls
        self.open_name: str | None = None  # function whose arguments are arriving
        self._bare_name = ""
        self._open_arguments: list[str] = []

    @property
    def open_arguments(self) -> str:
        return "".join(self._open_arguments)

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        self._rest += text
        while not self.is_full and self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, tuple[CallPart, ...]]:
        if self.is_full:
            return "", ()
        if self._state == self._behind_bare and "}" not in self._tail and self._fits():
            self._begin(self._bare_name, self.open_arguments)
        elif self._state in (self._at_start, self._at_bare_start, self._in_bare, self._behind_bare):
            self._give_up()
        if self._state in (self._in_head, self._in_body, self._in_python):
            self._take_whole("".join([*self._body, self._rest]), "")
        elif self._state in (self._in_text, self._behind_calls):
            self._say(self._rest)
        if not self._is_behind_call:
            self._text += self._space
        self._rest = ""
        self._space = []
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
        shown = text.rstrip()
        if shown:
            self._text += [shown.lstrip()] if self._is_behind_call else [*self._space, shown]
            self._space = []
            self._is_behind_call = False
        self._space.append(text[len(shown) :])

    def _begin(self, name: str, arguments: str = "") -> None:
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        self._parts.append(CallPart(self.n_calls, arguments, name, letters))
        self.n_calls += 1
        self._space = []
        self._is_behind_call = True

    def _take_whole(self, body: str, end: str) -> None:
        calls = read_whole(self._form, body, self._schemas)
        for name, arguments in calls if self._is_parallel else calls[:1]:
            self._begin(name, arguments)
        if not calls:
            self._say("".join([*self._raw, body, end]))
        self._body = []
        self.is_full = bool(calls) and not self._is_parallel

    # ---- states: each returns whether the next one may run ----

    def _at_start(self) -> bool:
        """State: the answer may be a call as a whole."""
        if not self._skip_space():
            return False
        for tag in _TAGS:
            if self._rest.startswith(tag):
                self._raw.append(tag)
                self._rest = self._rest[len(tag) :]
                return True
            if tag.startswith(self._rest):
                return False
        self._state = self._at_bare_start if self._rest[0] == "`" else self._in_head
        return True

    def _skip_space(self) -> bool:
        """Move space from the rest to what may have begun a call; return whether text is left."""
        text = self._rest.lstrip()
        if len(text) < len(self._rest):
            self._raw.append(self._rest[: len(self._rest) - len(text)])
        self._rest = text
        return bool(text)

    def _give_up(self) -> None:
        """Read what may have begun a call as text."""
        self._rest = "".join([*self._raw, *self._body, self._rest])
        self._raw, self._body = [], []
        self.open_name = None
        self._state = self._in_text

    def _at_bare_start(self) -> bool:
        """State: a model may write a call as its whole answer: one JSON object without the begin
        mark, bare or in a code fence.
        """
        if not self._skip_space():
            return False
        fence = _FENCE.match(self._rest)
        if fence is not None:
            self._raw.append(fence[0])
            self._rest = self._rest[fence.end() :]
        if self._rest[0] == "{":
            self._tail = "}" if fence is None else "}```"
            self._state = self._in_bare
            return True
        if len(self._rest) < _MAX_HEAD and _FENCE_START.fullmatch(self._rest):
            return False
        self._give_up()
        return True

    def _in_bare(self) -> bool:
        """State: inside an object that may be the whole answer."""
        if self.open_name is None:
            match = JSON_HEAD.match(self._rest)
            if match is None and self._may_be_object() and len(self._rest) < _MAX_HEAD:
                return False
            if match is None or match["name"] not in self._schemas:
                self._give_up()
                return True
            self.open_name = self._bare_name = match["name"]
            self._open_arguments = []
            self._body, self._rest = [match[0]], self._rest[match.end() :]
        end = self._braces.end(self._rest)
        text = self._rest[:end]
        self._open_arguments.append(text)
        self._body.append(text)
        self._rest = self._rest[len(text) :]
        if end is None:
            return False
        self.open_name = None
        self._state = self._behind_bare
        return True

    def _behind_bare(self) -> bool:
        """State: only the end of the object, and of its fence, may follow."""
        text = self._rest.lstrip()
        self._body.append(self._rest[: len(self._rest) - len(text)])
        self._rest = text
        if not text:
            return False
        if text[0] == self._tail[:1]:
            self._body.append(text[0])
            self._rest, self._tail = text[1:], self._tail[1:]
        else:
            self._give_up()
        return True

    def _fits(self) -> bool:
        """Return whether the arguments of the object are what the function takes."""
        try:
            value = read_output(self.open_arguments)
        except JsonError:
            return False
        return Check(self._schemas[self._bare_name]).fits(value) is not False

    def _may_be_object(self) -> bool:
        start = re.sub(r"\s", "", self._rest[:100])[: len(_OBJECT_START)]
        return _OBJECT_START.startswith(start)

    def _in_text(self) -> bool:
        begin = self._form.begin
        at = self._rest.find(begin) if begin else -1
        if at < 0:
            n_shown = len(self._rest) - (n_overlap(self._rest, begin) if begin else 0)
            self._say(self._rest[:n_shown])
            self._rest = self._rest[n_shown:]
            return False
        self._say(self._rest[:at])
        self._raw, self._rest = [begin], self._rest[at + len(begin) :]
        self._state = self._in_head
        return True

    def _in_head(self) -> bool:
        form = self._form
        if not self._skip_space():
            return False
        match = None if form.is_elements else self._head.match(self._rest)
        if match is not None and match["name"] in self._schemas:
            self._begin(match["name"])
            self.open_name, self._open_arguments = match["name"], []
            self._rest = self._rest[match.end() :]
            self._braces = _Braces(0)
            self._state = self._in_arguments
            return True
        if form.is_elements:
            self._state = self._in_body
            return True
        is_undecided = True
        if form.is_python:
            name, n_head = read_head(self._rest)
            if name in self._schemas:
                self._body, self._rest = [self._rest[:n_head]], self._rest[n_head:]
                self._braces = _Braces(1, PYTHON_ENDS)
                self._state = self._in_python
                return True
            is_undecided = name == ""
        if not form.begin and not self._may_be_object() and not (form.is_python and is_undecided):
            self._give_up()
            return True
        is_whole = bool(form.end) and (form.end in self._rest or not is_undecided)
        if is_whole or len(self._rest) > _MAX_HEAD:
            self._state = self._in_body
            return True
        return False

    def _up_to_end(self) -> tuple[str, bool]:
        """Take the rest up to the end mark, which stays; return it, and whether there is a mark."""
        end = self._form.end
        at = self._rest.find(end) if end else -1
        n_read = at if at >= 0 else len(self._rest) - (n_overlap(self._rest, end) if end else 0)
        text, self._rest = self._rest[:n_read], self._rest[n_read:]
        return text, at >= 0

    def _in_body(self) -> bool:
        """State: a call that is read when it is complete."""
        text, is_complete = self._up_to_end()
        self._body.append(text)
        if is_complete:
            self._rest = self._rest[len(self._form.end) :]
            self._state = self._in_text
            self._take_whole("".join(self._body), self._form.end)
        return is_complete

    def _in_python(self) -> bool:
        """State: after the opening bracket of a call in Python's syntax."""
        text, is_over = self._up_to_end()
        n_read = self._braces.end(text)
        self._body.append(text[:n_read])
        if n_read is None:
            self._state = self._in_body if is_over else self._in_python
            return is_over
        self._rest = text[n_read:] + self._rest
        try:
            name, values = read_python("".join(self._body))
            self._begin(name, json.dumps(read_output(values), ensure_ascii=False))
        except ValueError:
            self._state = self._in_body
            if not self._form.end:
                self._give_up()
            return True
        self._body = []
        self._state = self._behind_calls
        return True

    def _in_arguments(self) -> bool:
        end = self._braces.end(self._rest)
        text = self._rest[:end]
        if text:
            self._open_arguments.append(text)
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
            self._raw, self._rest = [], text.lstrip(",;")
            self._state = self._in_head
            return True
        if not text or any(sign.startswith(text) for sign in (*form.behind, mark)):
            return False
        self._state = self._in_text
        return True
