"""What a stranger's ``tokenizer.json`` may ask the tokenizers library to do.

The library has no limits: a chain of replacements doubles a text until the memory is gone, and it
does so while the file is loaded, because added tokens are normalised then. So the parts that can
multiply a text are read here before, without the vocabulary, which would take too much memory.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import contextlib
import re
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.foreign_json import JsonError, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_GROWTH = 256  # 33 bytes for one character by compatibility rules, times what a Replace makes

_MAX_PART_BYTES = 4 << 20  # a precompiled table of characters has 300 KB
_MAX_PREFIX_TOKENS = 64
_KEY = re.compile(rb'[ \t\n\r]*"([^"]{0,64})"[ \t\n\r]*:[ \t\n\r]*')
_SCALAR = re.compile(rb"[^\"\[\]{},\s]{1,64}")
_END = re.compile(rb"[ \t\n\r]*([,}])")
# Pairs of strings without escapes, and such strings, many at a time; brackets; the beginning of any
# other string.
_STEP = re.compile(
    rb"""(?:\[\s*"[^"\\]*"\s*,\s*"[^"\\]*"\s*\]\s*,?\s*){1,64}"""
    rb"""|(?:"[^"\\]*"[^"\\\[\]{}]*){1,64}|[\[\]{}]|\""""
)

# How many bytes one byte may become.
_NORMALIZERS = {
    "Lowercase": 2, "NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "Strip": 1, "StripAccents": 1,
    "Nmt": 1, "BertNormalizer": 8, "ByteLevel": 2,
}  # fmt: skip
_PRE_TOKENIZERS = {
    "ByteLevel": 2, "Metaspace": 4, "Split": 1, "Digits": 1, "Whitespace": 1, "WhitespaceSplit": 1,
    "Punctuation": 1, "BertPreTokenizer": 1, "CharDelimiterSplit": 1, "UnicodeScripts": 1,
    "FixedLength": 1,
}  # fmt: skip


@contextlib.contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn whatever the library raises into a QsfFormatError: also its panics, no Exception."""
    try:
        yield
    except (MemoryError, QsfFormatError):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise QsfFormatError(f"the tokenizer cannot {doing}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise QsfFormatError(f"the tokenizer cannot {doing}: {error}") from error


def check_tokenizer(data: bytes) -> int:
    """Return how many times longer the normaliser may make a text.

    Raises:
        QsfFormatError: ``data`` is not a JSON object.
        QsfUnsupportedError: it is one, of parts that may make a text more than 256 times longer, or
            that are not known here.
    """
    parts = _parts(data)
    growth = _growth("normalizer", parts.get("normalizer"), _NORMALIZERS)
    later = _growth("pre_tokenizer", parts.get("pre_tokenizer"), _PRE_TOKENIZERS)
    _growth("decoder", parts.get("decoder"), None)
    if growth * later > MAX_GROWTH:
        raise _multiplies(growth * later)
    _check_prefix(parts.get("post_processor"))
    return growth


def _multiplies(growth: int) -> QsfUnsupportedError:
    return QsfUnsupportedError(
        f"the tokenizer may make a text {growth} times longer, and {MAX_GROWTH} times is the limit"
        if growth < 10**9
        else "the tokenizer may make a text a billion times longer"
    )


def _growth(place: str, step: Any, known: dict[str, int] | None) -> int:
    """Return the bytes that one byte may become; ``known`` is None for a decoder, whose own rules
    name what it may be."""
    if step is None:
        return 1
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        growth = 1
        inner = next(
            (step[k] for k in ("normalizers", "pretokenizers", "decoders") if k in step), 0
        )
        for part in inner if isinstance(inner, list) else [0]:
            growth *= _growth(place, part, known)
            if growth > MAX_GROWTH:
                raise _multiplies(growth)
        return growth
    if kind in ("Prepend", "Replace") and place != "pre_tokenizer":
        return _growth_of_text(step)
    if kind == "Precompiled" and place == "normalizer":
        return _growth_of_table(step.get("precompiled_charsmap"))
    if known is None:
        return 1
    if not isinstance(kind, str) or kind not in known:
        raise QsfUnsupportedError(f"the tokenizer's {place} has the type {kind!r}, not a known one")
    return known[kind]


def _growth_of_text(step: dict[str, Any]) -> int:
    text = step.get("prepend" if step["type"] == "Prepend" else "content")
    pattern = step.get("pattern")
    n_bytes = len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) and pattern["String"]:
        return max(1, -(-n_bytes // len(pattern["String"].encode("utf-8", "replace"))))
    return 1 + n_bytes  # before the text, or at each place that the pattern matches


def _growth_of_table(table: Any) -> int:
    """Return the longest text of a SentencePiece table: its size, a tree, texts ended by zeros."""
    try:
        data = base64.b64decode(table, validate=True)
    except (TypeError, ValueError) as error:
        raise QsfFormatError(f"the tokenizer's table of characters: {error}") from error
    n_bytes = int.from_bytes(data[:4], "little")
    if len(data) < 4 or n_bytes % 4 or n_bytes > len(data) - 4:  # the library would allocate it
        raise QsfFormatError(
            f"the tokenizer's table of characters announces {n_bytes} bytes and has {len(data)}"
        )
    texts = data[4 + n_bytes :]
    return max(1, max(map(len, texts.split(b"\0"))))


def _check_prefix(processor: Any) -> None:
    """Does encoding add no more than a few tokens to a text?"""
    if not isinstance(processor, dict):
        return
    inner = processor.get("processors")
    for part in inner if isinstance(inner, list) else []:
        _check_prefix(part)
    try:
        names = [piece["SpecialToken"]["id"] for piece in processor["single"]
                 if "SpecialToken" in piece]  # fmt: skip
        n_tokens = sum(len(processor["special_tokens"][name]["ids"]) for name in names)
    except (KeyError, TypeError):
        return  # of another type; the library says what is wrong with one of this
    if n_tokens > _MAX_PREFIX_TOKENS:
        raise QsfUnsupportedError(
            f"the tokenizer adds {n_tokens} tokens to each text, and {_MAX_PREFIX_TOKENS} is the "
            "limit"
        )


# ---- the parts, without the vocabulary ----


def _parts(data: bytes) -> dict[str, Any]:
    """Return the top-level values, but for the vocabulary and the list of added tokens."""
    at = len(data) - len(data.lstrip())
    if data[at : at + 1] != b"{":
        raise QsfFormatError("the tokenizer cannot be read: it is not a JSON object")
    at += 1
    parts: dict[str, Any] = {}
    while True:
        key = _KEY.match(data, at)
        if key is None:
            raise QsfFormatError(f"the tokenizer cannot be read: no key of JSON at byte {at}")
        at = key.end()
        end = _end_of_value(data, at)
        name = _loads(b'"' + key[1] + b'"')
        if name in parts:
            raise QsfFormatError(f"the tokenizer cannot be read: {name!r} occurs twice")
        is_wanted = name not in ("model", "added_tokens")
        if is_wanted and end - at > _MAX_PART_BYTES:
            raise QsfUnsupportedError(
                f"the tokenizer's {name!r} has {end - at} bytes, and {_MAX_PART_BYTES} is the limit"
            )
        parts[name] = _loads(data[at:end]) if is_wanted else None
        mark = _END.match(data, end)
        if mark is None:
            raise QsfFormatError(f"the tokenizer cannot be read: no JSON at byte {end}")
        if mark[1] == b"}":
            return parts
        at = mark.end()


def _loads(data: bytes) -> Any:
    try:
        return read_json(data)
    except JsonError as error:
        raise QsfFormatError(f"the tokenizer cannot be read: {error}") from error


def _end_of_value(data: bytes, at: int) -> int:
    scalar = _SCALAR.match(data, at)
    if scalar is not None:
        return scalar.end()
    depth = 0
    if data[at : at + 1] == b'"':
        return _end_of_string(data, at)
    while step := _STEP.search(data, at):
        at = step.end()
        mark = step[0]
        if mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
            if depth <= 0:
                return at
        elif mark == b'"':
            at = _end_of_string(data, at - 1)
    raise QsfFormatError("the tokenizer cannot be read: JSON without an end")


def _end_of_string(data: bytes, start: int) -> int:
    """Return where the string ends whose quote is at ``start``."""
    at = start + 1
    while (at := data.find(b'"', at)) >= 0:
        n_escapes = at
        while data[n_escapes - 1] == ord("\\"):
            n_escapes -= 1
        at += 1
        if (at - 1 - n_escapes) % 2 == 0:
            return at
    raise QsfFormatError("the tokenizer cannot be read: a string of JSON without an end")
