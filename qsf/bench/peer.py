"""Where llama.cpp is, and what to do where it is not.

It is asked for in a process of its own: to import it takes memory, and a llama.cpp that was built
for another processor crashes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from qsf.bench.launch import WorkerError, last_lines, run_command, signal_text
from qsf.errors import QsfError

_TIMEOUT_SECONDS = 120.0
_MARK = "qsf-peer "  # before the line that answers: anything may be printed beside it
_ASK = f"""
import llama_cpp
llama_cpp.llama_backend_init()
print({_MARK!r} + llama_cpp.__version__)
"""

_PACKAGES = "llama-cpp-python gguf"
_NO_AMX = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
_GCC_WITH_AMX = 13  # gcc 12 loses stores before _tile_loadconfig, and its llama.cpp crashes


class PeerMissingError(QsfError):
    """There is no llama.cpp that works; the text says what is missing and how to install it.

    Attributes:
        why: what is missing alone.
    """

    def __init__(self, why: str, how: str) -> None:
        """Say what is missing, and what to do."""
        super().__init__(f"{why}{how}")
        self.why = why


@dataclass(frozen=True, slots=True)
class Peer:
    """A Python that has llama-cpp-python."""

    python: str
    version: str


def find_peer(peer_python: str | None = None) -> Peer:
    """Return the peer of the interpreter that is given, else of this one.

    Raises:
        PeerMissingError: it has none, or none that works here.
    """
    python = peer_python or sys.executable
    try:
        ended = run_command([python, "-c", _ASK], timeout_seconds=_TIMEOUT_SECONDS)
    except WorkerError as error:
        raise PeerMissingError(str(error), ": --peer-python must name a Python") from error
    found = re.findall(rf"^{re.escape(_MARK)}(.+)$", ended.output, re.MULTILINE)
    if ended.exit_code == 0 and found:
        return Peer(python, found[-1].strip())
    if "No module named 'llama_cpp'" in ended.errors:
        why = f"{python} has no llama-cpp-python"
    elif ended.is_late:
        why = f"llama-cpp-python of {python} does not answer within {_TIMEOUT_SECONDS:g} s"
    else:
        said = signal_text(ended) or f"ended with {ended.exit_code}{last_lines(ended.errors)}"
        why = f"llama-cpp-python of {python} does not work here: {said}"
    how = f". This builds it for this machine: {install_command(python)}"
    raise PeerMissingError(why, how)


def install_command(python: str = sys.executable) -> str:
    """Return the line for a shell that installs the peer, built for this processor.

    gguf, which makes files of random weights, comes with it: ``qsf[bench]`` would be the same, but
    only where QSF is installed already.
    """
    flags = "-DGGML_NATIVE=ON"
    has_amx = re.search(r"^flags\s*:.*\bamx_tile\b", _cpuinfo(), re.MULTILINE) is not None
    gcc = _gcc_major()
    if has_amx and gcc is not None and gcc < _GCC_WITH_AMX:
        flags += f" -DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"
        flags = f'"{flags}"'
    pip = f"{shlex.quote(python)} -m pip install"
    return f"CMAKE_ARGS={flags} {pip} --no-binary llama-cpp-python {_PACKAGES}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return ""


def _gcc_major() -> int | None:
    """Return the version of gcc, which builds the peer unless CC says otherwise; None: none."""
    try:
        done = subprocess.run(
            ["gcc", "-dumpversion"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+", done.stdout)
    return int(found[0]) if found else None


if __name__ == "__main__":  # for a shell: eval "$(python -m qsf.bench.peer)"
    sys.stdout.write(install_command() + "\n")
