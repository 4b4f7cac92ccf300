"""Files by their first bytes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import stat
from typing import Final

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
