"""What characters become before a text is split: the tables of BERT's and SentencePiece's steps.

A key is a text, or the first bytes of characters that all become the same.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import sys
import unicodedata

import numpy as np

# The first bytes of all characters for private use; some are of no characters, which stay.
_PRIVATE = (
    b"\xee",
    *(bytes([0xEF, byte]) for byte in range(0x80, 0xA4)),
    *(bytes([0xF3, byte]) for byte in range(0xB0, 0xC0)),
    *(bytes([0xF4, byte]) for byte in range(0x80, 0x90)),
)
_LONGEST = 255  # bytes of a text and of what it becomes
_NO_CHARACTERS = ("\U000ffffe", "\U000fffff", "\U0010fffe", "\U0010ffff")


def bert_map(*, is_clean: bool, is_bare: bool, is_lower: bool) -> dict[bytes, str]:
    """Return the table of a BertNormalizer, whose NFD, if it has one, comes before.

    Args:
        is_clean: control characters go, and spaces become the usual one.
        is_bare: combining marks go.
        is_lower: letters become small ones.
    """
    table: dict[bytes, str] = {}
    if is_clean:
        table = dict.fromkeys(_PRIVATE, "")
        table |= {char.encode(): char for char in _NO_CHARACTERS}
    for char in map(chr, (*range(0xD800), *range(0xF900, sys.maxunicode + 1))):
        kind = unicodedata.category(char)
        text = char.lower() if is_lower else char
        if is_bare and kind == "Mn":
            text = ""
        elif is_clean and (kind == "Zs" or char in "\t\n\r\u2028\u2029"):
            text = " "
        elif is_clean and (kind in ("Cc", "Cf") or char == "\ufffd"):
            text = ""
        if text != char and kind != "Co":
            table[char.encode()] = text
    return table


def precompiled_map(charsmap: str) -> dict[bytes, str]:
    """Return the table of SentencePiece's rules, in base64: the bytes of a trie, the trie, texts.

    A unit of the trie (darts-clone) has a label, the distance to its children, and whether one of
    them, of label 0, is a leaf: its value is the place of a text, which a zero byte ends. Raises
    ValueError if it is no trie, or a text is longer than 255 bytes.
    """
    data = base64.b64decode(charsmap)
    n_bytes = int.from_bytes(data[:4], "little")
    units = np.frombuffer(data, "<u4", n_bytes // 4, 4).tolist()
    texts = data[4 + n_bytes :]
    table: dict[bytes, str] = {}
    todo = [(b"", _children(units[0]))]
    for _ in units:  # each has one way to it
        if not todo:
            return table
        key, at = todo.pop()
        if len(key) > _LONGEST:
            break
        for byte in range(256):
            unit = units[at ^ byte] if at ^ byte < len(units) else 0
            if unit & 0x800000FF != byte or (at ^ byte) == 0:
                continue
            if unit >> 8 & 1:
                place = units[(at ^ byte) ^ _children(unit)] & 0x7FFFFFFF
                end = texts.index(b"\0", place, place + _LONGEST + 1)
                table[key + bytes([byte])] = texts[place:end].decode()
            todo.append((key + bytes([byte]), (at ^ byte) ^ _children(unit)))
    raise ValueError("the table of characters is not a trie")


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)
