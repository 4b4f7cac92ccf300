"""A file that is written front to back under a temporary name, and renamed when complete."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file import layout as lay
from qsf.file.partial import create_partial
from qsf.system import files

Data = bytes | bytearray | memoryview

_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


class Output:
    """The bytes of a file that is being written; QsfIOError if the system refuses."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        progress: Callable[[int], None] | None,
        needed_bytes: int | None,
    ) -> None:
        self.path = Path(path)
        self._progress = progress
        self._needed_bytes = needed_bytes
        self._at = lay.HEADER_BYTES  # offset of the next byte
        self._fd = -1
        self._is_synced = True  # before the rename, so that a power cut leaves a whole file

    def _create(self) -> None:
        folder = self.path.parent
        try:
            if not self.path.name or self.path.is_dir():
                raise QsfIOError(f"{self.path}: is a directory, not a file to write")
            if self.path.exists() and not self.path.is_file():
                raise QsfIOError(f"{self.path}: exists and is not a regular file")
            if not folder.is_dir():
                raise QsfIOError(f"{self.path}: there is no folder {folder}")
            self._fd, self._temporary = create_partial(self.path)
            self._put_at(0, bytes(lay.HEADER_BYTES))
        except QsfIOError:
            raise
        except OSError as e:
            raise QsfIOError(f"{self.path}: cannot write here: {e.strerror}") from e
        except ValueError as e:  # a path with a zero byte
            raise QsfIOError(f"{self.path}: {e}") from e
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the temporary; the file at the path stays as it was. May be called again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _require_open(self) -> None:
        if self._fd < 0:
            raise QsfArgumentError(f"{self.path}: the writer is finished or was aborted")

    @contextlib.contextmanager
    def _system_calls(self) -> Iterator[None]:
        """Turn an error of the system into QsfIOError; the file cannot be continued after it."""
        try:
            yield
        except OSError as e:
            self.abort()
            text = f"{self.path}: {e.strerror} after {self._at} bytes"
            if e.errno in _FULL and self._needed_bytes is not None:
                text += f", about {self._needed_bytes} are needed"
            raise QsfIOError(text) from e

    def _put_at(self, off: int, data: Data) -> None:
        view = memoryview(data).cast("B")
        with self._system_calls():
            while view:
                n = files.write_at(self._fd, view, off)
                view = view[n:]
                off += n

    def _get_at(self, off: int, n_bytes: int) -> bytes:
        """Read back all bytes written so far."""
        data = bytearray()
        with self._system_calls():
            while len(data) < n_bytes:
                part = files.read_at(self._fd, n_bytes - len(data), off + len(data))
                if not part:
                    raise OSError(errno.EIO, "the temporary became shorter")
                data += part
        return bytes(data)

    def _append(self, data: Data) -> None:
        self._put_at(self._at, data)
        self._at += memoryview(data).nbytes
        if self._progress is not None:
            self._progress(self._at)

    def _align(self, align: int) -> None:
        """Move to a multiple of ``align``; skipped bytes read as zero."""
        self._at = lay.padded(self._at, align)

    def _truncate(self, n_bytes: int) -> None:
        """Cut the file to ``n_bytes`` or extend it with zeros, and continue from there."""
        with self._system_calls():
            os.ftruncate(self._fd, n_bytes)
        self._at = n_bytes

    def _take_name(self) -> None:
        """Rename the complete temporary to the path; both are on the disk first if it is synced."""
        with self._system_calls():
            if self._is_synced:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._rename()

    def _rename(self) -> None:
        self._temporary.replace(self.path)
        if self._is_synced:
            files.sync_folder(self.path.parent)
