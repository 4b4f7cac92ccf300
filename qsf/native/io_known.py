"""Remembers which way of reading a probe found fastest, disk by disk.

The engine's probe takes up to a quarter of a second of reading, so its result is kept in
``io.json`` in the user's cache folder: ``$XDG_CACHE_HOME/qsf`` or ``~/.cache/qsf``. It is a
hint and nothing else. A folder that cannot be written, a file that is damaged, old or not ours:
all of it means "not known", and nothing is said.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

METHODS = {"auto": 0, "buffered": 1, "direct": 2, "uring": 3, "mmap": 4}
"""The names of ``qsf_io_method`` in qsf.h."""

MAX_DEPTH = 32
_MAX_DISKS = 32
_MAX_BYTES = 1 << 16
_MAX_KEY = 300
_MAX_AGE_SECONDS = 30 * 24 * 3600
_CLOCK_SECONDS = 24 * 3600  # clocks may differ by so much: later than that is not to be trusted


def recall(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the method (a ``qsf_io_method``) and depth for the disk of ``path``; None: unknown."""
    try:
        entry = _read().get(_disk_of(path))
    except (OSError, ValueError):
        return None
    return None if entry is None else (METHODS[entry["method"]], entry["depth"])


def remember(path: str | os.PathLike[str], method: int, depth: int) -> None:
    """Keep what a probe has just found on the disk of ``path``."""
    with contextlib.suppress(OSError, ValueError):
        disk = _disk_of(path)
        names = {number: name for name, number in METHODS.items()}
        disks = _read()
        disks[disk] = {"method": names.get(method), "depth": depth, "seconds": int(time.time())}
        latest = sorted(disks.items(), key=lambda item: item[1]["seconds"])[-_MAX_DISKS:]
        kept = {key: entry for key, entry in latest if _is_sound(key, entry)}
        _write(json.dumps({"version": 1, "disks": kept}, indent=1).encode())


def _cache_file() -> Path:
    """Return the path of io.json. Raises OSError where the user has no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # as its specification wants it
        try:
            folder = Path.home() / ".cache"
        except RuntimeError as error:
            raise OSError("no home") from error
    if not folder.is_absolute():
        raise OSError("no home")
    return folder / "qsf" / "io.json"


def _disk_of(path: str | os.PathLike[str]) -> str:
    """Return what a result is good for: device, file system and kernel."""
    device = Path(path).stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    return f"{numbers} {_file_system(numbers)} {os.uname().release}"


def _file_system(numbers: str) -> str:
    """Return the type and source of what is mounted from a device; "?" where that is not known.

    Numbers of devices are given anew at each start of the system, names less so.
    """
    with contextlib.suppress(OSError), Path("/proc/self/mountinfo").open("rb") as file:
        for line in file:
            words = line.decode("utf-8", "replace").split()
            if len(words) > 6 and words[2] == numbers and "-" in words[6:]:
                at = words.index("-", 6)
                return " ".join(words[at + 1 : at + 3])
    return "?"


def _read() -> dict[str, dict[str, Any]]:
    """Return the entries that can be trusted; none where there is no such file."""
    data = b""
    with contextlib.suppress(OSError):
        # Without O_NONBLOCK a named pipe would wait here for a writer.
        fd = os.open(_cache_file(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                data = file.read(_MAX_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    disks = value.get("disks") if isinstance(value, dict) and value.get("version") == 1 else None
    if not isinstance(disks, dict):
        return {}
    return {key: entry for key, entry in disks.items() if _is_sound(key, entry)}


def _is_sound(key: str, entry: object) -> bool:
    if not isinstance(entry, dict) or len(key) > _MAX_KEY:
        return False
    method, depth, seconds = (entry.get(name) for name in ("method", "depth", "seconds"))
    if not isinstance(method, str) or METHODS.get(method, 0) == 0:
        return False
    if type(depth) is not int or type(seconds) is not int:  # a bool is an int, too
        return False
    age_seconds = int(time.time()) - seconds
    return 1 <= depth <= MAX_DEPTH and -_CLOCK_SECONDS <= age_seconds <= _MAX_AGE_SECONDS


def _write(data: bytes) -> None:
    """Replace the file at once, so that a reader finds the old one or the new one."""
    path = _cache_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink()
        raise
