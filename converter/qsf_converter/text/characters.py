"""Sets of characters by the names that regular expressions have for them, as Oniguruma knows them.

A set has a place for each code point, and one for the edge: what is before a text and behind it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Chars = NDArray[np.bool_]

# Written by tools/make_unicode_tables.py from tokenizers 0.23.3.
_SETS: Final = Path(__file__).with_name("character_sets.bin")
EDGE: Final = 0x110000
_MOST_CASED: Final = 0x1F000  # no letter from here on has a case

_CATEGORIES: Final = {
    "letter": "l", "uppercaseletter": "lu", "lowercaseletter": "ll", "titlecaseletter": "lt",
    "casedletter": "lc", "modifierletter": "lm", "otherletter": "lo", "mark": "m",
    "nonspacingmark": "mn", "spacingmark": "mc", "enclosingmark": "me", "number": "n",
    "decimalnumber": "nd", "letternumber": "nl", "othernumber": "no", "punctuation": "p",
    "connectorpunctuation": "pc", "dashpunctuation": "pd", "openpunctuation": "ps",
    "closepunctuation": "pe", "initialpunctuation": "pi", "finalpunctuation": "pf",
    "otherpunctuation": "po", "symbol": "s", "mathsymbol": "sm", "currencysymbol": "sc",
    "modifiersymbol": "sk", "othersymbol": "so", "separator": "z", "spaceseparator": "zs",
    "lineseparator": "zl", "paragraphseparator": "zp", "other": "c", "control": "cc",
    "format": "cf", "privateuse": "co", "unassigned": "cn",
    "digit": "nd", "alpha": "alphabetic", "upper": "uppercase", "lower": "lowercase",
    "whitespace": "space", "cntrl": "cc",
}  # fmt: skip
_UNIONS: Final = {"lc": ("lu", "ll", "lt"), "alnum": ("alphabetic", "nd")}


def empty() -> Chars:
    return np.zeros(EDGE + 1, np.bool_)


def listed(ranges: Iterable[tuple[int, int]]) -> Chars:
    chars = empty()
    for first, last in ranges:
        chars[first : last + 1] = True
    return chars


def union(sets: Sequence[Chars]) -> Chars:
    chars: Chars = np.logical_or.reduce(sets)
    return chars


def others(chars: Chars) -> Chars:
    rest = ~chars
    rest[EDGE] = False
    return rest


@functools.cache
def _edges() -> dict[str, NDArray[np.int64]]:
    lines = zlib.decompress(_SETS.read_bytes()).decode().split("\n")
    rows = (line.split(" ") for line in lines)
    return {
        name.lower().replace("_", ""): np.cumsum([int(distance, 16) for distance in distances])
        for name, *distances in rows
    }


@functools.lru_cache(maxsize=24)
def named(name: str) -> Chars:
    name = name.lower().translate(str.maketrans("", "", " _-"))
    name = _CATEGORIES.get(name, name)
    parts = _UNIONS.get(name)
    if len(name) == 1:
        parts = tuple(key for key in _edges() if len(key) == 2 and key[0] == name)
        parts += ("cn",) if name == "c" else ()
    if name == "cn":
        assigned = (named(key) for key in _edges() if len(key) == 2)
        surrogates = listed([(0xD800, 0xDFFF)])
        return others(union([*assigned, surrogates]))
    if name in ("any", "ascii"):
        return listed([(0, 127 if name == "ascii" else EDGE - 1)])
    if name == "blank":
        return listed([(9, 9)]) | named("zs")
    if name == "xdigit":
        return listed([(48, 57), (65, 70), (97, 102)])
    if parts:
        return union([named(part) for part in parts])
    marks = empty()
    marks[_edges()[name]] = True
    chars: Chars = np.logical_xor.accumulate(marks)
    return chars


@functools.cache
def _cases() -> tuple[NDArray[np.int64], NDArray[np.int64], frozenset[str]]:
    """Return the characters that equal others without case, their groups, and what is longer."""
    groups: dict[str, list[int]] = {}
    for point in range(_MOST_CASED):
        if (folded := chr(point).casefold()) != chr(point):
            groups.setdefault(folded, []).append(point)
    longer = frozenset(text for text in groups if len(text) > 1)
    cased = [sorted((ord(text), *points)) for text, points in groups.items() if len(text) == 1]
    cased += [groups[text] for text in longer if len(groups[text]) > 1]
    ids = np.repeat(np.arange(len(cased)), [len(points) for points in cased])
    return np.concatenate(cased).astype(np.int64), ids, longer


def without_case(chars: Chars) -> Chars:
    members, groups, _ = _cases()
    is_hit: Chars = np.bincount(groups, weights=chars[members]) > 0
    wider: Chars = chars.copy()
    wider[members[is_hit[groups]]] = True
    return wider


def is_cased_as_one(text: str) -> bool:
    """Return whether a single character equals a part of ``text`` of several, as ß equals ss."""
    return any(part in text.casefold() for part in _cases()[2])
