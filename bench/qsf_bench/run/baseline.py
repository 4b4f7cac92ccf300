"""llama.cpp through llama-cpp-python: where it is, and how it was built.

It is asked in a process of its own: importing it takes memory, and a llama.cpp that was built for
another processor crashes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from qsf.errors import QsfError
from qsf_bench.run.launch import last_lines, run_command, signal_text
from qsf_bench.run.tasks import WorkerError

_TIMEOUT_SECONDS = 120.0
_MARK = "qsf-baseline "  # before the line that answers: anything may be printed beside it
_ASK = f"""
import glob, json, os
import llama_cpp as api
api.llama_backend_init()
print({_MARK!r} + json.dumps({{
    "version": api.__version__,
    "system": api.llama_print_system_info().decode("utf-8", "replace"),
    "made": glob.glob(os.path.join(os.path.dirname(api.__file__), "lib", "libggml-cpu*")),
}}))
"""

HOW = "`make baseline` builds it for this machine, docs/benchmarks.md says how elsewhere"


class BaselineMissingError(QsfError):
    """There is no llama.cpp that works; the text says what is missing and how to install it.

    Attributes:
        why: what is missing, without the advice.
    """

    def __init__(self, why: str, how: str) -> None:
        super().__init__(f"{why}{how}")
        self.why = why


@dataclass(frozen=True, slots=True)
class Baseline:
    """A Python that has llama-cpp-python. ``compiler`` and ``isa`` are "" if unknown."""

    python: str
    version: str
    compiler: str = ""  # such as "clang 19.1.7"
    isa: str = ""  # instruction sets that it was built with, such as "AVX2 AVX512 AVX512_VNNI"

    @property
    def words(self) -> str:
        """Version, compiler and instruction sets, for the report."""
        built = [f"built by {self.compiler}" if self.compiler else "", self.isa]
        return ", ".join([f"llama.cpp {self.version}", *filter(None, built)])


def find_baseline(python: str | None = None) -> Baseline:
    """Return the llama.cpp of the interpreter that is given, else of this one.

    Raises:
        BaselineMissingError: it has none, or none that works here.
    """
    python = python or sys.executable
    try:
        ended = run_command([python, "-c", _ASK], timeout_seconds=_TIMEOUT_SECONDS)
    except WorkerError as error:
        raise BaselineMissingError(str(error), ": --baseline-python must name a Python") from error
    answers = re.findall(rf"^{re.escape(_MARK)}(.+)$", ended.output, re.MULTILINE)
    if ended.exit_code == 0 and answers:
        answer = json.loads(answers[-1])
        compiler = "".join(compiler_of(Path(path)) for path in answer["made"][-1:])
        return Baseline(python, answer["version"], compiler, isa_words(answer["system"]))
    if "No module named 'llama_cpp'" in ended.errors:
        why = f"{python} has no llama-cpp-python"
    elif ended.is_late:
        why = f"llama-cpp-python of {python} does not answer within {_TIMEOUT_SECONDS:g} s"
    else:
        end = signal_text(ended) or f"ended with {ended.exit_code}{last_lines(ended.errors)}"
        why = f"llama-cpp-python of {python} does not work here: {end}"
    raise BaselineMissingError(why, f": {HOW}")


def compiler_of(path: Path) -> str:
    """Return the compiler that made a library, which writes its name into it; "": not known."""
    try:
        made = path.read_bytes()
    except OSError:
        return ""
    clang = re.search(rb"clang version ([\d.]+)", made)  # beside gcc's, which made the C library
    gcc = re.search(rb"GCC: \([^)\0]{0,80}\) ([\d.]+)", made)
    compiler = clang or gcc
    return f"{'clang' if clang else 'gcc'} {compiler[1].decode()}" if compiler else ""


def isa_words(system_info: str) -> str:
    """Return the instruction sets that are 1 in llama.cpp's "CPU : AVX2 = 1 | FMA = 0 | ...".

    Sets that all processors of a kind have are left out, and names that are no sets.
    """
    names = re.findall(r"\b([A-Z][A-Z0-9_]*) = 1\b", system_info)
    sets = ("AVX", "AMX", "NEON", "DOTPROD", "MATMUL_INT8", "SVE", "SME", "RVV", "VSX")
    return " ".join(name for name in names if name.startswith(sets))
