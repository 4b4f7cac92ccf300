"""Describes the machine and the build of QSF: the ``machine`` of a result.

No value names a folder, a user or a host: results are committed and published.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from qsf.system import process
from qsf_bench.run.baseline import compiler_of

_GIT_SECONDS = 10


def describe(baselines: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts about machine and build that readers of figures need, as JSON's types.

    Unknown values are left out: ``commit`` if QSF does not run from a checkout, ``baseline`` if
    there is none, ``compiler`` if the extension does not state it.
    """
    from qsf.native import _qsf, binding

    machine = binding.describe_machine()
    facts: dict[str, Any] = {
        "cpu": process.processor_name(),
        "n_cores": machine.n_cores,
        "isa": machine.isa_name,
        "isa_available": list(machine.isa_available),
        "memory_bytes": machine.memory_bytes,
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "qsf": _version(),
        "commit": commit_of(Path(__file__).resolve().parents[3]),
        "baseline": "; ".join(baselines),
        "compiler": compiler_of(Path(str(_qsf.__file__))),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def command_line(argv: Sequence[str]) -> str:
    """Return the command line with names of files instead of paths, for publication."""
    words = [re.sub(r"[^=,]*/(?=[^/=,])", "", word.rstrip("/")) for word in argv[1:]]
    return " ".join(["python -m qsf.bench", *words])


def commit_of(root: Path) -> str | None:
    """Return the commit that is checked out in ``root``; None: not a checkout.

    "-dirty" is appended if tracked files were changed: such figures cannot be reproduced.
    """
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version() -> str:
    try:
        return metadata.version("qsf")
    except metadata.PackageNotFoundError:
        return ""
