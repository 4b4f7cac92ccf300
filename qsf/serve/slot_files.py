"""``--session-dir``: what the slots hold outlasts the server.

Written when the server stops, and read when it starts; each slot is a session file. Their owners go
along, so that what one client asked is never of use to another.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfError, QsfIOError
from qsf.file.partial import remove_abandoned

if TYPE_CHECKING:
    from qsf.serve.engine import ModelEngine
    from qsf.serve.slots import Slot


class SlotFiles:
    """A folder of one server, which is locked as long as the process lives."""

    def __init__(self, folder: Path, engine: ModelEngine, say: Callable[[str], None]) -> None:
        """Make the folder if need be. Raises QsfArgumentError if another server uses it."""
        self._folder = folder
        self._engine = engine
        self._say = say
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise QsfIOError(f"--session-dir {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise QsfArgumentError(
                f"--session-dir {folder} is in use by another server: name another folder"
            ) from error
        except OSError:  # a file system without locks
            pass

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._lock)

    def _path(self, index: int) -> Path:
        return self._folder / f"slot-{index}.qsfs"

    def load(self, slots: Sequence[Slot]) -> None:
        """Give the slots what they held. A file that cannot be used is said, and left."""
        for slot in slots:
            path = self._path(slot.index)
            remove_abandoned(path)
            if not path.exists():
                continue
            try:
                slot.held, slot.salt = self._engine.load(slot.index, path)
            except QsfError as error:
                self._say(f"not taken: {error}")

    def save(self, slots: Sequence[Slot]) -> None:
        """Write what the slots hold. What cannot be written is said."""
        for slot in slots:
            path = self._path(slot.index)
            try:
                if slot.held:
                    self._engine.save(slot.index, path, slot.salt)
            except QsfError as error:
                self._say(f"not kept: {error}")
                with contextlib.suppress(OSError):  # of another conversation
                    path.unlink(missing_ok=True)
