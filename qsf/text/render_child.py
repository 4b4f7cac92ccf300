"""The program of the process that renders an untrusted chat template.

A template may loop, multiply strings or nest until the stack is full, and the rendering library
does not limit bytes. So it runs here, under the system's limits, where a crash harms nothing.
``qsf.text.render`` starts this file by its path, without its package: imports here take memory
that the budget must leave free. Its arguments are the folders of ``qsf.system.confine`` and of the
package minijinja.

Standard input, by ``marshal``: the limits, a dict; then the template and the values by name.
Standard output: ``!`` when the limits hold, then a letter and UTF-8 text: ``T`` the rendered text,
``L`` its length where that is too much, ``R`` why the template refuses the messages, ``E`` why it
cannot be rendered, ``M`` nothing (out of memory). ``!`` alone: the template ended the process.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import marshal
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import minijinja

# Marks the model's own text, for training; rendered as the text alone.
_GENERATION_TAG = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


class _RefusedError(Exception):
    """The exception of a template's ``raise_exception``."""


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    import datetime

    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _plain_generation_tags(source: str) -> str:
    return _GENERATION_TAG.sub(
        lambda tag: "{%" + tag[1] + (" endif " if tag[2] else " if true ") + tag[3] + "%}", source
    )


def _describe(error: minijinja.TemplateError, fuel: int) -> str:
    where = f"line {error.line}: " if error.line else ""
    if error.kind == "OutOfFuel":
        return f"{where}it takes more than {fuel} steps"
    return f"{where}{error.detail or error.kind}"


def _render(source: str, values: dict[str, Any], fuel: int) -> tuple[str, str]:
    """Return the letter and the text of the answer."""
    import minijinja

    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        debug=False,
        fuel=fuel,
        filters={"tojson": _tojson},
        globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
    )
    try:
        environment.add_template("chat", _plain_generation_tags(source))
        return "T", str(environment.render_template("chat", **values))
    except minijinja.TemplateError as error:
        cause = error.__cause__
        if isinstance(cause, _RefusedError):
            return "R", str(cause)
        return ("M", "") if isinstance(cause, MemoryError) else ("E", _describe(error, fuel))


def main() -> None:
    """Answer the request on standard input."""
    sys.path += sys.argv[1:3]
    import minijinja  # noqa: F401  (before the limits, so that they count the template only)
    from confine import confine  # type: ignore[import-not-found]

    limits = marshal.load(sys.stdin.buffer)
    confine(limits["free_bytes"], limits["n_seconds"], limits["stack_bytes"])
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    try:
        source, values = marshal.load(sys.stdin.buffer)
        kind, text = _render(source, values, limits["fuel"])
        answer = text.encode("utf-8", "replace")
        if len(answer) > limits["max_bytes"]:
            kind, answer = ("L", b"%d" % len(answer)) if kind == "T" else (kind, answer[:1000])
    except _RefusedError as error:
        kind, answer = "R", str(error).encode("utf-8", "replace")[:1000]
    except MemoryError:
        kind, answer = "M", b""
    except Exception as error:  # any error that a template provokes in a filter
        kind, answer = "E", f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:1000]
    sys.stdout.buffer.write(kind.encode() + answer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
