"""The section TOKN, unpacked: at run time the engine does that."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct

from qsf.errors import QsfFormatError
from qsf.file.blocks import unpack_block
from qsf.file.layout import MAX_TEXT_BYTES, Compression

_MARK = b"LZ4\n"
_HEAD = struct.Struct("<4sI")  # mark, bytes of tokenizer.json


def unpack_tokenizer(section: bytes) -> bytes:
    """Return ``tokenizer.json``.

    Raises:
        QsfFormatError: the section is not of its form.
    """
    if not section.startswith(_MARK):
        return section
    if len(section) <= _HEAD.size:
        raise QsfFormatError(f"section TOKN is compressed and has only {len(section)} bytes")
    n_bytes = int(_HEAD.unpack_from(section)[1])
    if not len(section) - _HEAD.size < n_bytes <= MAX_TEXT_BYTES["TOKN"]:
        raise QsfFormatError(
            f"section TOKN announces {n_bytes} bytes in {len(section)} compressed ones, allowed: "
            f"more, and at most {MAX_TEXT_BYTES['TOKN']}"
        )
    return unpack_block(Compression.LZ4HC, section[_HEAD.size :], n_bytes)
