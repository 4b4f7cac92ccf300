"""The blocks of a compressed layer, and the section TOKN (docs/format.md, sections 3 and 2).

LZ4 is the engine's own; zstandard is imported when the first layer that wants it is met.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import importlib
import struct
from collections import deque
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Final

from qsf.errors import QsfUnsupportedError
from qsf.file.layout import Compression
from qsf.native._qsf import ffi, lib

if TYPE_CHECKING:
    from concurrent.futures import Future


# On quantised weights level 19 saves half a percent more at a fortieth of the speed, and decodes
# slower.
ZSTD_LEVEL: Final = 3
LZ4HC_LEVEL: Final = 9


def load_codec(compression: int) -> Any:
    """Return the module of ZSTD; LZ4 needs none.

    Raises:
        QsfUnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module("zstandard") if compression == Compression.ZSTD else None
    except ImportError as e:
        raise QsfUnsupportedError(
            "ZSTD compression needs the Python package zstandard: pip install zstandard"
        ) from e


def pack_block(compression: int, raw: bytes, *, level: int | None = None) -> bytes:
    """Return ``raw`` (at most 1 MiB) compressed, or itself when it does not shrink.

    ``level`` is of LZ4HC or ZSTD; the layers of files have the usual one.
    """
    if compression == Compression.ZSTD:
        packed = load_codec(compression).ZstdCompressor(level=level or ZSTD_LEVEL).compress(raw)
        return bytes(packed) if len(packed) < len(raw) else raw
    level = (level or LZ4HC_LEVEL) if compression == Compression.LZ4HC else 0
    room = ffi.new("char[]", len(raw))
    n_packed = lib.qsf_lz4_pack(ffi.from_buffer(raw), len(raw), level, room, max(len(raw), 1) - 1)
    return bytes(ffi.buffer(room, n_packed)) if n_packed else raw


def pack_blocks(
    compression: int, raw_blocks: Iterable[bytes], n_threads: int
) -> Generator[tuple[int, bytes], None, None]:
    """Yield (raw bytes, packed) of every block, in order; some of them are packed at a time.

    Both libraries release the GIL. At most ``n_threads + 2`` blocks are in memory.
    """
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and readers need none

    under_way: deque[tuple[int, Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="compress")
    try:
        for raw in raw_blocks:
            under_way.append((len(raw), pool.submit(pack_block, compression, raw)))
            if len(under_way) > n_threads:
                n_raw, future = under_way.popleft()
                yield n_raw, future.result()
        while under_way:
            n_raw, future = under_way.popleft()
            yield n_raw, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_MARK: Final = b"LZ4\n"  # JSON cannot begin so
_LEVEL: Final = 4  # level 9 saves 4 % more, and takes 0.3 s longer for 6 MB
_HEAD: Final = struct.Struct("<4sI")  # no JSON begins with it


@functools.lru_cache(maxsize=1)  # its size is requested before the section itself
def pack_tokenizer(tokenizer_json: bytes) -> bytes:
    """Return the section: one LZ4 block, or the bytes themselves if they do not shrink."""
    packed = pack_block(Compression.LZ4HC, tokenizer_json, level=_LEVEL)
    if _HEAD.size + len(packed) >= len(tokenizer_json):
        return tokenizer_json
    return _HEAD.pack(_MARK, len(tokenizer_json)) + packed
