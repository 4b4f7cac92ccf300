"""Run a command under a limit on memory that the kernel enforces: in a memory control group.

The group is made for one command, which enters it before it starts, and removed afterwards, also
when this process is interrupted. Swap is not allowed. What the command reads into the page cache
is charged to the group, so that a reader of large files always comes to the limit; only memory
that the kernel cannot take back gets it killed.

Linux, version 1 or 2 of control groups, as root or where a group is delegated to the user.
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

FACTS_NAME = "CAPPED_FACTS"  # the environment variable that says where a command writes facts


class CapError(Exception):
    """The control group cannot be had."""


# ---- the control group ----


def parse_limit(text: str) -> int:
    """Return the bytes of "300M" or "1.5G"."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([MG])", text)
    n_mb = float(found[1]) * (1024 if found[2] == "G" else 1) if found else 0.0
    if n_mb < 1 or n_mb != int(n_mb):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of MB, as 300M or 1.5G")
    return int(n_mb) << 20


def limit_name(n_bytes: int) -> str:
    """Return what parse_limit reads."""
    return f"{n_bytes >> 30}G" if n_bytes % (1 << 30) == 0 else f"{n_bytes >> 20}M"


def group_folders(mountinfo: str, own_groups: str) -> list[tuple[int, Path]]:
    """Return where groups might be made, (version, folder), likely ones first.

    The arguments are the texts of /proc/self/mountinfo and /proc/self/cgroup.
    """
    found: list[tuple[int, Path]] = []
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
            # Beside all other groups, and if that is not allowed inside of our own.
            found += [(1, folder) for folder in dict.fromkeys((top, own))]
        else:
            # A group of version 2 that has processes has no groups with limits: beside our own.
            above = [folder for folder in own.parents if folder.is_relative_to(top)]
            found += [(2, folder) for folder in above or [top]]
    return sorted(found, key=lambda one: one[0])


def own_folder(own_groups: str, controller: str, *, visible_from: str, top: Path) -> Path:
    """Return the folder of the group that this process is in, or the topmost one."""
    for line in own_groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(",") and "/.." not in group:
            below = group.removeprefix(visible_from.rstrip("/"))
            return top / below.lstrip("/")
    return top


def number_after(text: str, key: str) -> int:
    """Return the number behind ``key`` at the beginning of a line; 0: there is none."""
    found = re.search(rf"^{re.escape(key)}:?\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a limit, and no processes yet."""

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

    def peaks(self) -> dict[str, int]:
        """Return what the kernel counted; what it does not count is absent."""
        v1 = self.version == 1
        files = {
            "peak_bytes": "memory.max_usage_in_bytes" if v1 else "memory.peak",
            "kernel_peak_bytes": "memory.kmem.max_usage_in_bytes",
            "n_at_limit": "memory.failcnt",
        }
        found = {key: int(text) for key, name in files.items() if (text := self._read(name))}
        events = self._read("memory.oom_control" if v1 else "memory.events")
        found["n_oom_kills"] = number_after(events, "oom_kill")
        if not v1:
            found["n_at_limit"] = number_after(events, "max")
        return found

    def remove(self) -> None:
        """Remove it, with whatever still runs inside."""
        for _ in range(100):
            for pid in self._read("cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
            else:
                return
        print(f"{self.folder} could not be removed", file=sys.stderr)


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


def drop_caches() -> str:
    """Let the system forget what it has read. Returns why it did not, or nothing."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process inside a group ended, and what it took."""

    exit_code: int  # negative: the signal that ended it
    wall_seconds: float
    max_rss_bytes: int  # of it, or of this process if that had more when it started it
    group: dict[str, int]
    output: str
    errors: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process itself has had."""
        return int(self.facts.get("peak_bytes", self.max_rss_bytes))


def run_capped(command: list[str], limit_bytes: int) -> Outcome:
    """Run a command inside a new group. Raises CapError."""
    with tempfile.TemporaryDirectory(prefix="qsf-cap-") as folder, contextlib.ExitStack() as stack:
        facts_path = Path(folder, "facts")
        group = stack.enter_context(memory_group(limit_bytes))
        output = stack.enter_context(Path(folder, "output").open("w+", errors="replace"))
        errors = stack.enter_context(Path(folder, "errors").open("w+", errors="replace"))
        began = time.perf_counter()
        process = subprocess.Popen(
            group.enter_and_run(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=os.environ | {FACTS_NAME: str(facts_path)},
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_seconds = time.perf_counter() - began
        output.seek(0)
        errors.seek(0)
        return Outcome(
            exit_code=process.returncode,
            wall_seconds=wall_seconds,
            max_rss_bytes=usage.ru_maxrss * 1024,
            group=group.peaks(),
            output=output.read(),
            errors=errors.read(),
            facts=json.loads(facts_path.read_text()) if facts_path.exists() else {},
        )
