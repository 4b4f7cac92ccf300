"""The list of running servers: each server writes a file that describes it and locks that file.

An unlocked file was left by a server that was killed. While the file is locked, its process number
cannot belong to another process.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from qsf.foreign_json import JsonError, read_json_file
from qsf.system import files

_MAX_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Running:
    """One server.

    Attributes:
        url: its address, or the path of its socket.
        memory: what it takes of its budget, in words.
        started: seconds since 1970.
    """

    pid: int
    name: str
    url: str
    memory: str
    started: int

    def is_of(self, path: Path) -> bool:
        """Return whether a server can have written this to ``path``."""
        numbers = (self.pid, self.started)
        return (
            all(type(number) is int and 0 <= number < 2**31 for number in numbers)
            and isinstance(self.name, str)
            and isinstance(self.url, str)
            and isinstance(self.memory, str)
            and self.pid > 1  # 0 would be our own group, 1 the system
            and path.stem == str(self.pid)
        )

    @property
    def is_there(self) -> bool:
        return _is_locked(_folder() / f"{self.pid}.json")


def _folder() -> Path:
    return files.user_folder("XDG_STATE_HOME", "~/.local/state") / "servers"


@contextlib.contextmanager
def announced(name: str, url: str, memory: str) -> Iterator[None]:
    """Announce this server to ``qsf ps``; does nothing if no folder is writable."""
    facts = Running(os.getpid(), name, url, memory, int(time.time()))
    path = _folder() / f"{facts.pid}.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = files.open_lock(path, 0o600)
            stack.callback(os.close, fd)
            files.try_lock(fd)
            stack.callback(files.unlink_locked, fd, path)
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps(asdict(facts)).encode())
        yield


def running_servers() -> list[Running]:
    """Return the running servers, the oldest first; removes the files of servers that ended."""
    servers = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, JsonError, TypeError, ValueError):
            if _is_locked(path):
                facts = Running(**read_json_file(path, max_bytes=_MAX_BYTES))
                servers.append(facts) if facts.is_of(path) else None
            else:
                path.unlink(missing_ok=True)
    return sorted(servers, key=lambda server: server.started)


def _is_locked(path: Path) -> bool:
    try:
        fd = files.open_no_link(path)
    except OSError:
        return False
    try:
        files.try_lock(fd)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
