"""The program of the process that renders an untrusted chat template.

The engine is Jinja2, configured as HuggingFace transformers configures it. A template may loop,
multiply strings or nest until the stack is full, and Jinja2 bounds none of it. So it runs here,
under the system's limits, where a crash harms nothing.
``qsf.text.render`` starts this file by its path, without its package: imports here take memory
that the budget must leave free. Its further arguments are the folders of ``qsf.system.confine``,
of Jinja2 and of MarkupSafe.

With the argument ``stay`` each template has a fork of its own, so that the libraries are imported
once and nothing of one rendering reaches the next. With ``once`` the process renders one and ends.

Standard output begins with ``+`` when all is imported. Standard input, by ``marshal``: bytes, which
are by ``marshal`` the limits, a dict; then the template and the values by name. Standard output, by
``marshal``: the exit code of the fork and its answer. That is ``!`` when the limits hold, then a
letter and UTF-8 text: ``T`` the rendered text, ``L`` its length where that is too much, ``R`` why
the template refuses the messages, ``F`` why it fails with them, ``E`` why it fails with any, ``M``
nothing (out of memory). ``!`` alone: the template ended the process.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import io
import marshal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Environment, nodes
    from jinja2.parser import Parser

_MOST_BYTES = 16 << 20  # of an answer; twice what any may have
_NAME = "<template>"  # of the template's frames in a traceback


class _RefusedError(Exception):
    """The exception of a template's ``raise_exception``."""


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    import json

    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> Environment:
    """Return Jinja2 as transformers configures it for chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag around the model's own text, for training; rendered as the text alone."""

        tags = {"generation"}  # noqa: RUF012 (as Extension declares it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("text_of")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def text_of(self, caller: Any) -> Any:
            return caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while line is None and trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"line {line}: " if line else ""
    text = str(getattr(error, "message", None) or error) or "no reason given"
    is_jinjas = type(error).__module__.startswith("jinja2")
    return where + (text if is_jinjas else f"{type(error).__name__}: {text}")


def _render(source: str, values: dict[str, Any]) -> tuple[str, str]:
    kind = "E"
    try:
        template = _environment().from_string(source)
        kind = "F"
        return "T", template.render(values)
    except _RefusedError as error:
        return "R", str(error)
    except (MemoryError, SystemError):  # the second: a call without memory, in some Pythons
        return "M", ""
    except Exception as error:  # any error that a template provokes
        return kind, _describe(error)


def _answer(request: bytes, write: Callable[[bytes], object]) -> None:
    from confine import confine  # type: ignore[import-not-found]

    file = io.BytesIO(request)
    limits = marshal.load(file)
    confine(limits["free_bytes"], limits["n_seconds"], limits["stack_bytes"])
    write(b"!")
    try:
        kind, text = _render(*marshal.load(file))
        answer = text.encode("utf-8", "strict" if kind == "T" else "replace")
        if len(answer) > limits["max_bytes"]:
            kind, answer = ("L", b"%d" % len(answer)) if kind == "T" else (kind, answer[:1000])
    except MemoryError:
        kind, answer = "M", b""
    except UnicodeEncodeError:
        kind, answer = "E", b"its text is not valid Unicode: it has lone surrogates"
    write(kind.encode() + answer)


def main() -> None:
    sys.path += sys.argv[2:]
    # All that a template may need, before the limits, which count the template only and forbid to
    # open files. Nothing needs the hashes of OpenSSL, which take 3.5 MB.
    sys.modules["_hashlib"] = None  # type: ignore[assignment]
    import codecs
    import datetime  # noqa: F401
    import html  # noqa: F401
    import json  # noqa: F401
    import textwrap  # noqa: F401
    import unicodedata  # noqa: F401 (names with letters that are not ASCII)

    import jinja2.debug  # noqa: F401
    from confine import run_in_fork

    codecs.lookup("unicode-escape")  # of texts in a template
    environment = _environment()

    out = sys.stdout.buffer
    out.write(b"+")
    out.flush()
    if sys.argv[1] == "once":
        parts: list[bytes] = []
        _answer(marshal.load(sys.stdin.buffer), parts.append)
        marshal.dump((0, b"".join(parts)), out)
        return
    environment.from_string("{{ 1 }}").render()  # fills Jinja2's caches
    gc.freeze()  # the collector then leaves these pages to be shared
    while True:
        try:
            request = marshal.load(sys.stdin.buffer)
        except EOFError:
            return
        marshal.dump(run_in_fork(partial(_answer, request), _MOST_BYTES), out)
        out.flush()


if __name__ == "__main__":
    main()
