"""What the machine is, and which QSF ran on it: the ``machine`` of a result.

Nothing here names a folder, a user or a host: results are committed and published.
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

# Of the dozens that a processor has, those that decide which kernels can run, here or in llama.cpp.
_FLAGS = (
    *("sse4_1", "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw"),
    *("avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512vbmi"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
_CPUINFO = Path("/proc/cpuinfo")
_GIT_SECONDS = 10


def describe(baselines: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a reader of figures must know of where they come from; all values are JSON's.

    Keys of what is not known are left out: ``commit`` where QSF does not run from a checkout,
    ``baseline`` where there is none, ``compiler`` where the extension does not say.
    """
    from qsf.native import binding

    machine = binding.describe_machine()
    info = _CPUINFO.read_text("utf-8", "replace") if _CPUINFO.exists() else ""
    known: dict[str, Any] = {
        "cpu": cpu_name(info),
        "n_cores": machine.n_cores,
        "isa": machine.isa_name,
        "isa_available": list(machine.isa_available),
        "cpu_flags": cpu_flags(info),
        "memory_bytes": machine.memory_bytes,
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "qsf": _version(),
        "commit": commit_of(Path(__file__).resolve().parents[3]),
        "baseline": "; ".join(baselines),
        "compiler": _compiler(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name, from the text of /proc/cpuinfo where that has one."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*: (.*\S)", cpuinfo, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def cpu_flags(cpuinfo: str) -> list[str]:
    """Return those of the processor's flags that matter to the kernels."""
    found = re.search(r"^(?:flags|Features)\s*: (.*)", cpuinfo, re.MULTILINE)
    has = set(found[1].split()) if found else set()
    return [flag for flag in _FLAGS if flag in has]


def command_line(argv: Sequence[str]) -> str:
    """Return what was asked for, with files by their names: folders are nobody's business."""
    words = [re.sub(r"[^=,]*/(?=[^/=,])", "", word.rstrip("/")) for word in argv[1:]]
    return " ".join(["python -m qsf.bench", *words])


def commit_of(root: Path) -> str | None:
    """Return the commit that is checked out in ``root``; None: it is no checkout.

    "-dirty" follows where files that git knows were changed: such figures cannot be had again.
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


def _compiler() -> str | None:
    """Return the compiler of the engine, whose name compilers write into their output."""
    from qsf.native import _qsf

    try:
        made = Path(str(_qsf.__file__)).read_bytes()
    except OSError:
        return None
    clang = re.search(rb"clang version ([\d.]+)", made)  # beside gcc's, which made the C library
    gcc = re.search(rb"GCC: \([^)\0]{0,80}\) ([\d.]+)", made)
    if clang is not None:
        return f"clang {clang[1].decode()}"
    return f"gcc {gcc[1].decode()}" if gcc else None
