"""A limit on memory that the kernel enforces: a memory control group for one process.

The group is made for one command, which enters it before it starts, and is removed afterwards,
even if this process is interrupted. Swap is not allowed. Pages of the cache that the command reads
are charged to the group, so a reader of large files always reaches the limit; the kernel kills it
only for memory that cannot be reclaimed.

Linux, version 1 or 2 of control groups, as root or in a group delegated to the user.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from qsf.errors import QsfError

_REMOVE_TRIES = 100
_REMOVE_WAIT_SECONDS = 0.1


class CapError(QsfError):
    """The control group cannot be made; the text says which users can make one."""


def group_folders(mountinfo: str, own_groups: str) -> list[tuple[int, Path]]:
    """Return folders where groups may be allowed, (version, folder), the most probable first.

    The arguments are the texts of /proc/self/mountinfo and /proc/self/cgroup.
    """
    folders: list[tuple[int, Path]] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        places, system = left.split(), right.split()
        if len(places) < 5 or len(system) < 3:
            continue
        is_v1 = system[0] == "cgroup" and "memory" in system[2].split(",")
        if not is_v1 and system[0] != "cgroup2":
            continue
        top = Path(places[4])
        own = own_folder(own_groups, "memory" if is_v1 else "", visible_from=places[3], top=top)
        if is_v1:
            # Places for the group: at the top, or, if that is refused, inside of our own group.
            folders += [(1, folder) for folder in dict.fromkeys((top, own))]
        else:
            # In version 2 a group with processes cannot contain groups with limits, so the new
            # group is beside our own.
            above = [folder for folder in own.parents if folder.is_relative_to(top)]
            folders += [(2, folder) for folder in above or [top]]
    return sorted(folders, key=lambda folder: folder[0])


def own_folder(own_groups: str, controller: str, *, visible_from: str, top: Path) -> Path:
    """Return the folder of the group that this process is in, or the topmost one."""
    for line in own_groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(",") and "/.." not in group:
            below = group.removeprefix(visible_from.rstrip("/"))
            return top / below.lstrip("/")
    return top


def number_after(text: str, key: str) -> int:
    """Return the number after ``key`` at the beginning of a line; 0 without such a line."""
    match = re.search(rf"^{re.escape(key)}:?\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a limit, without processes yet."""

    version: int
    folder: Path

    def enter_and_run(self, command: list[str]) -> list[str]:
        """Return the command that becomes ``command`` inside the group."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", script, str(self.folder / "cgroup.procs"), *command]

    def set_limit(self, n_bytes: int) -> None:
        """Limit memory, and allow no swap beyond it."""
        if self.version == 1:
            self._write("memory.limit_in_bytes", n_bytes)
            self._write("memory.memsw.limit_in_bytes", n_bytes, is_optional=True)
        else:
            self._write("memory.max", n_bytes)
            self._write("memory.swap.max", 0, is_optional=True)
        if not os.access(self.folder / "cgroup.procs", os.W_OK):
            raise PermissionError(f"{self.folder}/cgroup.procs cannot be written")

    def _write(self, name: str, value: int, *, is_optional: bool = False) -> None:
        path = self.folder / name
        if path.exists():
            path.write_text(str(value))
        elif not is_optional:
            raise FileNotFoundError(f"{path} does not exist: no memory controller there")

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except OSError:
            return ""

    def peak_bytes(self) -> int | None:
        """Return the group's peak memory, page cache included; None: not counted."""
        text = self._read("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(text) if text else None

    def n_oom_kills(self) -> int:
        """Return how many processes the kernel has killed because of the limit."""
        events = self._read("memory.oom_control" if self.version == 1 else "memory.events")
        return number_after(events, "oom_kill")

    def remove(self) -> None:
        """Remove the group and kill its remaining processes."""
        for _ in range(_REMOVE_TRIES):
            for pid in self._read("cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(_REMOVE_WAIT_SECONDS)
            else:
                return
        warnings.warn(
            f"{self.folder} could not be removed in {_REMOVE_TRIES * _REMOVE_WAIT_SECONDS:g} s: "
            "rmdir it when its processes have ended",
            RuntimeWarning,
            stacklevel=2,
        )


_group_numbers = count()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """Make a group with that limit and remove it at the end. Raises CapError."""
    why = []
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        own_groups = Path("/proc/self/cgroup").read_text()
    except OSError as error:
        raise CapError(f"memory control groups are a matter of Linux: {error}") from error
    name = f"qsf-cap-{os.getpid()}-{next(_group_numbers)}"
    for version, parent in group_folders(mountinfo, own_groups):
        group = Group(version, parent / name)
        try:
            group.folder.mkdir()
        except OSError as error:
            why.append(str(error))
            continue
        try:
            try:
                group.set_limit(limit_bytes)
            except OSError as error:
                why.append(str(error))
                continue
            yield group
            return
        finally:
            group.remove()
    tried = "; ".join(why) or "nothing, for no memory controller is mounted"
    raise CapError(
        "no memory control group can be made: run this as root, or in a delegated group "
        f"(systemd-run --user --scope -p Delegate=yes ...). Tried: {tried}"
    )
