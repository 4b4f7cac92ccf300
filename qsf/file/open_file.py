"""An open file that one handle has checked and reads."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from qsf.closable import Closing
from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.file.layout import MAGIC
from qsf.system.files import READ_FLAGS

# The environment variable that names a folder whose weights are pointers to files of the hub.
PIECES_FOLDER: Final = "QSF_IN_PIECES"


def begins_with(path: str | os.PathLike[str], magic: bytes) -> bool:
    """Return whether ``path`` is a regular file that begins with ``magic``."""
    try:
        fd = os.open(path, READ_FLAGS)
    except (OSError, ValueError):
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(magic)) == magic
    except OSError:
        return False
    finally:
        os.close(fd)


def is_qsf_file(path: str | os.PathLike[str]) -> bool:
    return begins_with(path, MAGIC)


class OpenedFile(Closing):
    """An open file; each kind of file overrides ``_check``, which opening calls.

    Attributes:
        path: the file.
        file_bytes: its size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check the file.

        Raises:
            QsfIOError: the system refused to open or to read it.
            QsfFormatError: it is damaged or of another kind.
            QsfUnsupportedError: it needs another release.
        """
        self.path = Path(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, READ_FLAGS)
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise QsfIOError(f"{self.path}: not a regular file")
            self.file_bytes = info.st_size
            self._check()
        except BaseException as error:
            self.close()
            if isinstance(error, QsfFormatError):
                raise error.located(self.path) from error
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, QsfError):
                # ValueError: a path with a zero byte.
                raise QsfIOError(f"{self.path}: {getattr(error, 'strerror', error)}") from error
            raise

    def _check(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
