"""The only reader of untrusted JSON: it bounds the memory before anything is parsed.

Python objects take up to 100 times the bytes of their JSON, so a limit of bytes bounds no memory.
The engine counts the elements of the text. Objects are made only if the most that these elements
can take is within the caller's limit.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from qsf.system.files import READ_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_DEPTH = 64
# For commands without a memory budget.
MEMORY_BYTES = 64 << 20

# The most bytes that CPython takes for an element, measured with tracemalloc. A key has an entry in
# its dict, which grows, and one in the parser's table of keys.
_BYTES_PER_CONTAINER = 100
_BYTES_PER_MEMBER = 240
_BYTES_PER_VALUE = 40
_BYTES_PER_STRING = 64
_MB = 1 << 20
_S = TypeVar("_S")
_SIGN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)


class JsonError(ValueError):
    """The text is not JSON or exceeds its reader's limit; one line says what is wrong."""


def read_json(
    text: bytes | str,
    *,
    memory_bytes: int = MEMORY_BYTES,
    has_nan: bool = False,
    has_surrogates: bool = False,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
    parse_int: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value of a text in UTF-8.

    If a key occurs twice, its last value counts, unless ``object_pairs_hook`` refuses.

    Args:
        text: the whole text.
        memory_bytes: most memory that parsing may take, its result included.
        has_surrogates: lone surrogates are accepted.
        has_nan: NaN, Infinity and -Infinity are accepted as numbers.
        parse_constant: called with such a name instead; see ``json.loads`` for it and the others.
        parse_float: called with the text of a fractional number.
        parse_int: called with the text of a whole number.
        object_pairs_hook: called with the keys and values of each object.

    Raises:
        JsonError: it is not JSON, takes more memory, is nested more than 64 deep or has a lone
            surrogate.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    data = data.removeprefix(codecs.BOM_UTF8)  # as Python's reader of bytes
    check_json(data, memory_bytes, has_surrogates=has_surrogates)
    if not has_nan and parse_constant is None:
        parse_constant = _refuse_constant
    try:
        return json.loads(
            data.decode(),
            parse_constant=parse_constant,
            parse_float=parse_float,
            parse_int=parse_int,
            object_pairs_hook=object_pairs_hook,
        )
    except ValueError as error:
        raise _fault(error) from None  # its message quotes the whole text


def _fault(error: ValueError) -> JsonError:
    if isinstance(error, json.JSONDecodeError) or "digits" not in str(error):
        return JsonError(f"not JSON: {error}")
    return JsonError(f"a whole number of more than {sys.get_int_max_str_digits()} digits")


def read_json_at(text: str, at: int, *, memory_bytes: int = MEMORY_BYTES) -> tuple[Any, int]:
    """Return the value at ``at`` and the index after it; other text may follow.

    Raises:
        JsonError: there is no value, or it needs more memory than allowed.
    """
    check_json(text[at : _end_of_value(text, at)].encode("utf-8", "surrogatepass"), memory_bytes)
    try:
        return json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text, at)
    except ValueError as error:
        raise _fault(error) from None


def _end_of_value(text: str, at: int) -> int:
    """Return the index after a value in brackets; of others, which take little memory, ``at``."""
    depth = 0
    for sign in _SIGN.finditer(text, at) if text[at : at + 1] in ("{", "[") else ():
        depth += (sign[0] in "{[") - (sign[0] in "}]")
        if not depth:
            return sign.end()
    return len(text) if depth else at


def scan_json(data: bytes, kind: type[_S], *, memory_bytes: int = MEMORY_BYTES) -> _S:
    """Return the fields of an object that a struct of msgspec has; other values are not made.

    Raises JsonError, also for what only Python's reader accepts.
    """
    import msgspec

    check_json(data, memory_bytes)  # its depth above all: msgspec recurses
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise JsonError(str(error)) from None


def read_json_file(path: Path, *, max_bytes: int, memory_bytes: int = MEMORY_BYTES) -> Any:
    """Return the value of a regular file of at most ``max_bytes``. Raises JsonError, OSError."""
    with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise JsonError("not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise JsonError(f"more than {max_bytes / _MB:.1f} MB")
    return read_json(data, memory_bytes=memory_bytes)


def check_json(
    data: bytes, memory_bytes: int = MEMORY_BYTES, *, has_surrogates: bool = False
) -> None:
    """Raise JsonError if parsing would exceed the memory limit; see ``read_json``."""
    size = _measure(data)
    if size.depth > MAX_DEPTH:
        raise JsonError(f"nested {size.depth} deep, allowed: up to {MAX_DEPTH}")
    if size.has_lone_surrogate and not has_surrogates:
        raise JsonError("not Unicode: it has a lone surrogate")
    most_bytes = needed_bytes(data, size)
    if most_bytes > memory_bytes:
        raise JsonError(
            f"its {len(data) / _MB:.2f} MB may take {most_bytes / _MB:.1f} MB of memory, allowed:"
            f" up to {memory_bytes / _MB:.1f}"
        )


def _measure(data: bytes) -> Any:
    from qsf.native._qsf import ffi, lib

    size = ffi.new("qsf_json_size *")
    lib.qsf_json_measure(ffi.from_buffer(data), len(data), size)
    return size


def needed_bytes(data: bytes, size: Any = None) -> int:
    """Return the most memory that parsing takes, without some KB of the parser itself."""
    size = size or _measure(data)
    return int(
        2 * size.char_bytes * len(data)  # the text decoded, and its strings
        + _BYTES_PER_CONTAINER * size.n_containers
        + _BYTES_PER_MEMBER * size.n_members
        + _BYTES_PER_VALUE * size.n_commas
        + _BYTES_PER_STRING * size.n_strings
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
