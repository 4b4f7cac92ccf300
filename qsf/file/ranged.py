"""Files of the hub, read by ranges of bytes: weights that stay there, and downloads that continue.

For a conversion without a copy, a pointer with the file's address and size replaces it. Pointers
are followed only in the folder named by the environment variable ``PIECES_FOLDER``, so a pointer in
an untrusted model is ignored.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, QsfIOError
from qsf.file.open_file import PIECES_FOLDER
from qsf.foreign_json import JsonError, read_json_file

_MAX_POINTER_BYTES = 4096
_BLOCK_BYTES = 1 << 20  # smaller reads use cached blocks, because neighbouring reads follow soon
_RANGE_BYTES = 32 << 20  # of one request, whose answer shows whether the file is still the same
_MAX_BLOCKS = 16  # cached blocks
_MAX_FAILURES = 6  # failures in a row without a byte received
_MAX_WAIT_SECONDS = 16.0
_SECONDS = 60.0  # longest time without a byte
_FATAL = {401: "refuses", 403: "refuses", 404: "no longer has", 416: "has less of"}


def is_ranged(path: Path) -> bool:
    """Return whether ``path`` is a pointer that may be followed."""
    folder = os.environ.get(PIECES_FOLDER)
    return bool(folder) and path.suffix != ".json" and path.parent == Path(str(folder))


class RangedFile(io.RawIOBase):
    """A file of the hub, read only. Raises QsfIOError if the hub's answer differs from the
    pointer."""

    _pause = staticmethod(time.sleep)

    def __init__(self, name: str, url: str, n_bytes: int) -> None:
        """Set the name for errors, the address and the size; nothing is read yet."""
        super().__init__()
        self._name, self._url, self._n_bytes = name, url, n_bytes
        # Imported late: only needed for models on the hub
        hub: Any = import_module("huggingface_hub.utils")
        self._session: Any = hub.get_session()
        self._headers = {**hub.build_hf_headers(), "accept-encoding": "identity"}
        self._etag = ""
        self._at = 0
        self._blocks: dict[int, bytes] = {}  # by number, the last used one at the end

    @classmethod
    def of_pointer(cls, path: Path) -> RangedFile:
        """Read the pointer at ``path``. Raises QsfConversionError if it is malformed."""
        try:
            facts = read_json_file(path, max_bytes=_MAX_POINTER_BYTES)
            return cls(path.name, str(facts["url"]), int(facts["size"]))
        except (JsonError, KeyError, TypeError, ValueError) as error:
            raise QsfConversionError(f"{path}: no pointer to a file of the hub: {error}") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, off: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte; see ``io.RawIOBase.seek``."""
        self._at = off + (0, self._at, self._n_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as the file's rest allows."""
        view = memoryview(buffer).cast("B")[: max(0, self._n_bytes - self._at)]
        if not view:
            return 0
        if len(view) >= _BLOCK_BYTES:
            self._fetch(view, self._at)
        else:
            n_done = 0
            while n_done < len(view):
                number, begin = divmod(self._at + n_done, _BLOCK_BYTES)
                part = self._block(number)[begin : begin + len(view) - n_done]
                view[n_done : n_done + len(part)] = part
                n_done += len(part)
        self._at += len(view)
        return len(view)

    def _block(self, number: int) -> bytes:
        block = self._blocks.pop(number, b"")
        if not block:
            off = number * _BLOCK_BYTES
            fetched = bytearray(min(_BLOCK_BYTES, self._n_bytes - off))
            self._fetch(memoryview(fetched), off)
            block = bytes(fetched)
        self._blocks[number] = block
        if len(self._blocks) > _MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _fetch(self, view: memoryview, off: int) -> None:
        n_done = 0
        for piece in self.pieces(off, off + len(view)):
            view[n_done : n_done + len(piece)] = piece
            n_done += len(piece)

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [begin, end) as they arrive; a broken connection is resumed."""
        at, n_failures = begin, 0
        while at < end:
            last, stop = at, min(end, at + _RANGE_BYTES)
            problem: object = "it sends fewer bytes than it says"
            try:
                for piece in self._answer(at, stop):
                    if at + len(piece) > stop:
                        raise QsfIOError(f"{self._name}: the hub sends more than was asked for")
                    at += len(piece)
                    yield piece
            except QsfIOError:
                raise
            except Exception as error:  # errors of the library and of its dependencies
                problem = error
            n_failures = n_failures + 1 if at == last else 0
            if n_failures > _MAX_FAILURES:
                raise QsfIOError(
                    f"{self._name}: the hub stopped at byte {at} of {self._n_bytes} "
                    f"({type(problem).__name__}: {problem}); begin the same command again"
                )
            if at < stop:
                self._pause(min(_MAX_WAIT_SECONDS, 0.5 * (2**n_failures - 1)))

    def _answer(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [begin, end) as they arrive. Raises the library's errors."""
        headers = {**self._headers, "range": f"bytes={begin}-{end - 1}"}
        with self._session.stream(
            "GET", self._url, headers=headers, timeout=_SECONDS, follow_redirects=True
        ) as answer:
            status = answer.status_code
            if status in _FATAL:
                raise QsfIOError(f"{self._name}: the hub {_FATAL[status]} it (status {status})")
            if status == 200:
                raise QsfIOError(f"{self._name}: the hub sends whole files only")
            answer.raise_for_status()
            wanted = f"bytes {begin}-{end - 1}/{self._n_bytes}"
            content_range = answer.headers.get("content-range", "")
            etag = answer.headers.get("etag", "")
            if content_range != wanted or etag != (self._etag or etag):
                raise QsfIOError(
                    f"{self._name}: the hub has another file than it said: {content_range!r} "
                    f"instead of {wanted!r}"
                )
            self._etag = etag
            yield from answer.iter_raw()
