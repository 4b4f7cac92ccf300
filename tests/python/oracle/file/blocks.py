"""Unpacks a block of a compressed layer, whatever is in it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib

from qsf.errors import QsfFormatError
from qsf.file.layout import Compression


def unpack_block(compression: int, stored: bytes, raw_bytes: int) -> bytes:
    """Return the bytes of a block whose sizes have been checked. QsfFormatError: it is damaged."""
    if len(stored) == raw_bytes:
        return stored
    is_zstd = compression == Compression.ZSTD
    codec = importlib.import_module("zstandard" if is_zstd else "lz4.block")
    try:
        if is_zstd:
            # The size that the frame announces would be allocated, so it is checked first.
            if codec.frame_content_size(stored) != raw_bytes:
                raise QsfFormatError("a ZSTD frame announces another size than the block")
            raw = codec.ZstdDecompressor().decompress(stored, allow_extra_data=False)
        else:
            raw = codec.decompress(stored, uncompressed_size=raw_bytes)
    except QsfFormatError:
        raise
    except Exception as error:  # both libraries have error classes of their own
        raise QsfFormatError(f"damaged {Compression(compression).name} block") from error
    if len(raw) != raw_bytes:
        raise QsfFormatError(f"a block has {len(raw)} bytes, {raw_bytes} were announced")
    return bytes(raw)
