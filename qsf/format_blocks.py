"""The blocks of a compressed layer: packing and unpacking one (docs/format.md, section 3).

lz4 and zstandard are imported when the first compressed layer is met, so that files
without compression need neither.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
from typing import Any

from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.format_layout import Compression

_PACKAGES = {  # module, name on the package index
    Compression.LZ4: ("lz4.block", "lz4"),
    Compression.LZ4HC: ("lz4.block", "lz4"),
    Compression.ZSTD: ("zstandard", "zstandard"),
}


def load_codec(compression: int) -> Any:
    """Return the module that knows this compression.

    Raises:
        QsfUnsupportedError: it is not installed.
    """
    module, package = _PACKAGES[Compression(compression)]
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise QsfUnsupportedError(
            f"{Compression(compression).name} compression needs the Python package {package}:"
            f" pip install {package}"
        ) from e


def pack_block(compression: int, raw: bytes) -> bytes:
    """Return ``raw`` (at most 1 MiB) compressed, or itself when it does not shrink."""
    codec = load_codec(compression)
    if compression == Compression.ZSTD:
        packed = codec.ZstdCompressor(level=19).compress(raw)
    else:
        mode = "high_compression" if compression == Compression.LZ4HC else "default"
        packed = codec.compress(raw, mode=mode, store_size=False)
    return bytes(packed) if len(packed) < len(raw) else raw


def unpack_block(compression: int, stored: bytes, raw_bytes: int) -> bytes:
    """Return the ``raw_bytes`` bytes of one block, whose sizes have been checked.

    Raises:
        QsfFormatError: the block is damaged.
        QsfUnsupportedError: the package that knows this compression is not installed.
    """
    if len(stored) == raw_bytes:
        return stored
    codec = load_codec(compression)
    try:
        if compression == Compression.ZSTD:
            # The size that the frame announces would be allocated, so it is checked first.
            announced = codec.frame_content_size(stored)
            if announced != raw_bytes:
                raise QsfFormatError(
                    f"damaged ZSTD block: its frame announces {announced} bytes, the block"
                    f" {raw_bytes}"
                )
            raw = codec.ZstdDecompressor().decompress(stored, allow_extra_data=False)
        else:
            raw = codec.decompress(stored, uncompressed_size=raw_bytes)
    except QsfFormatError:
        raise
    except Exception as e:  # both libraries have error classes of their own
        raise QsfFormatError(
            f"damaged {Compression(compression).name} block of {len(stored)} bytes: {e}"
        ) from e
    if len(raw) != raw_bytes:
        raise QsfFormatError(
            f"damaged {Compression(compression).name} block: {len(stored)} bytes decode to"
            f" {len(raw)}, {raw_bytes} were announced"
        )
    return bytes(raw)
