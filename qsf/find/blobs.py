"""Blobs of the hub's cache: their unfinished files, which a download continues or removes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from qsf.errors import QsfIOError
from qsf.file.ranged import RangedFile
from qsf.find.names import cache_folder
from qsf.system import files

# ETAG.incomplete, or ETAG.RANDOM.incomplete of huggingface_hub from 2.0 on
_UNFINISHED = re.compile(r"(.+?)(\.[0-9a-f]{8})?\.incomplete")


class Blobs:
    """The blobs of one model, locked one by one as the library locks them."""

    def __init__(self, repo: str) -> None:
        folder = cache_folder(repo)
        self._folder, self._locks = folder / "blobs", folder.parent / ".locks" / folder.name

    def fetch(self, url: str, n_bytes: int, on_bytes: Callable[[int], object]) -> Path:
        """Download a file of the hub from where an earlier call stopped; return its blob.

        Raises QsfIOError, and the library's errors.
        """
        etag: str | None = import_module("huggingface_hub").get_hf_file_metadata(url).etag
        name = url.rpartition("/")[2]
        if not etag:
            raise QsfIOError(f"{name}: the hub names no etag, by which a file is kept")
        blob = self._folder / etag
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked(etag, files.lock):
            if blob.exists():
                on_bytes(n_bytes)
                return blob
            part = blob.with_name(f"{etag}.incomplete")
            with part.open("ab") as file:
                n_done = file.tell() if file.tell() <= n_bytes else 0
                file.truncate(n_done)
                on_bytes(n_done)
                for piece in RangedFile(name, url, n_bytes).pieces(n_done, n_bytes):
                    file.write(piece)
                    on_bytes(len(piece))
            part.replace(blob)
        return blob

    def remove_unfinished(self) -> int:
        """Remove what nobody works on; return the number of bytes."""
        n_bytes = 0
        for path in self._folder.glob("*.incomplete"):
            match = _UNFINISHED.fullmatch(path.name)
            etag = match[1] if match else path.stem
            with contextlib.suppress(OSError), self._locked(etag, files.try_lock):
                size = path.stat().st_size
                path.unlink()  # no other process works on it
                n_bytes += size
        return n_bytes

    @contextlib.contextmanager
    def _locked(self, etag: str, lock: Callable[[int], None]) -> Iterator[None]:
        self._locks.mkdir(parents=True, exist_ok=True)
        fd = files.open_lock(self._locks / f"{etag}.lock", 0o664)
        try:
            lock(fd)
            yield
        finally:
            os.close(fd)
