"""The section TOKN: ``tokenizer.json``, as it is or compressed (docs/format.md, section 2)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import struct
from typing import Final

from qsf.errors import QsfFormatError
from qsf.file.blocks import pack_block, unpack_block
from qsf.file.layout import MAX_TEXT_BYTES, Compression

_MARK: Final = b"LZ4\n"  # JSON cannot begin so
_HEAD: Final = struct.Struct("<4sI")  # mark, bytes of tokenizer.json


@functools.lru_cache(maxsize=1)  # its size is wanted before the section is
def pack_tokenizer(tokenizer_json: bytes) -> bytes:
    """Return the section: one LZ4 block, or the bytes themselves if they do not shrink."""
    packed = pack_block(Compression.LZ4HC, tokenizer_json)
    if _HEAD.size + len(packed) >= len(tokenizer_json):
        return tokenizer_json
    return _HEAD.pack(_MARK, len(tokenizer_json)) + packed


def tokenizer_bytes(section: bytes) -> int:
    """Return the size of ``tokenizer.json``.

    Raises:
        QsfFormatError: the size is not an allowed one.
    """
    if not section.startswith(_MARK):
        return len(section)
    if len(section) <= _HEAD.size:
        raise QsfFormatError(f"section TOKN is compressed and has only {len(section)} bytes")
    n_bytes = int(_HEAD.unpack_from(section)[1])
    if not len(section) - _HEAD.size < n_bytes <= MAX_TEXT_BYTES["TOKN"]:
        raise QsfFormatError(
            f"section TOKN announces {n_bytes} bytes in {len(section)} compressed ones, allowed: "
            f"more, and at most {MAX_TEXT_BYTES['TOKN']}"
        )
    return n_bytes


def unpack_tokenizer(section: bytes) -> bytes:
    """Return ``tokenizer.json``.

    Raises:
        QsfFormatError: the section is not of its form.
    """
    n_bytes = tokenizer_bytes(section)
    if not section.startswith(_MARK):
        return section
    return unpack_block(Compression.LZ4HC, section[_HEAD.size :], n_bytes)
