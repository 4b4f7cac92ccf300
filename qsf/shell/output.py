"""The output file of a conversion: checks early what would fail at the end."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.partial import create_partial


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that would fail at the end, or destroy another file."""
    try:
        if out.is_dir():
            raise QsfIOError(f"{out}: is a directory")
        if (out.exists() or out.is_symlink()) and not overwrite:  # includes a dangling link
            raise QsfArgumentError(f"{out} exists; --force replaces it")
        if not out.parent.is_dir():
            raise QsfIOError(f"{out.parent}: no such directory")
        if not os.access(out.parent, os.W_OK | os.X_OK):
            raise QsfIOError(f"{out.parent}: the directory is not writable")
    except QsfIOError:
        raise
    except OSError as error:
        raise QsfIOError(f"{out}: {error.strerror}") from error


def check_not_a_source(out: Path, sources: Iterable[Path]) -> None:
    """Refuse to replace a file of the model being read."""
    if not out.exists():
        return
    for path in sources:
        if path.exists() and out.samefile(path):
            raise QsfArgumentError(f"{out} is a file of the model itself")


def check_space(out: Path, needed_bytes: int) -> None:
    """Refuse when the disk has less than ``needed_bytes``."""
    free_bytes = shutil.disk_usage(out.parent).free
    if needed_bytes > free_bytes:
        raise QsfIOError(
            f"{out}: needs about {needed_bytes / 1e6:.0f} MB, only {free_bytes / 1e6:.0f} MB are"
            " free there"
        )


def write_text(out: Path, text: str, *, overwrite: bool) -> None:
    """Write a file as UTF-8, as ``write_bytes``."""
    write_bytes(out, text.encode("utf-8", "replace"), overwrite=overwrite)


def write_bytes(out: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a file, complete or not at all.

    Raises QsfArgumentError when it exists and ``overwrite`` is false, QsfIOError when the system
    refuses.
    """
    check_output(out, overwrite=overwrite)
    try:
        fd, temporary = create_partial(out)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise QsfIOError(f"{out}: {error.strerror or error}") from error
