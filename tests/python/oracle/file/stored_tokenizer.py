"""The section TOKN, unpacked: at run time the engine does that."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct

from oracle.file.blocks import unpack_block
from qsf.file.layout import Compression


def unpack_tokenizer(section: bytes) -> bytes:
    """Return ``tokenizer.json``; older files have it as it is."""
    if not section.startswith(b"LZ4\n"):
        return section
    (n_bytes,) = struct.unpack_from("<I", section, 4)
    return unpack_block(Compression.LZ4HC, section[8:], n_bytes)
