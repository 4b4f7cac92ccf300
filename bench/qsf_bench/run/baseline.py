"""llama.cpp through llama-cpp-python: its place, and how it was built.

Asked in a separate process: importing it takes memory, and a llama.cpp built for another processor
crashes.
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
_MARK = "qsf-baseline "  # begins the line with the answer: imports may print others
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
    """llama.cpp is missing or does not work; the text says how to install it.

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
    """Return the llama.cpp of the given interpreter, else of this one.

    Raises:
        BaselineMissingError: llama.cpp is missing or does not work here.
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
    """Return the compiler that made a library, by the note it leaves; "": unknown."""
    try:
        made = path.read_bytes()
    except OSError:
        return ""
    # Clang's note, besides that of gcc, which made the C library
    clang = re.search(rb"clang version ([\d.]+)", made)
    gcc = re.search(rb"GCC: \([^)\0]{0,80}\) ([\d.]+)", made)
    compiler = clang or gcc
    return f"{'clang' if clang else 'gcc'} {compiler[1].decode()}" if compiler else ""


def isa_words(system_info: str) -> str:
    """Return the instruction sets marked 1 in llama.cpp's "CPU : AVX2 = 1 | FMA = 0 | ...".

    Leaves out sets that all processors of an architecture have, and names that are not sets.
    """
    names = re.findall(r"\b([A-Z][A-Z0-9_]*) = 1\b", system_info)
    sets = ("AVX", "AMX", "NEON", "DOTPROD", "MATMUL_INT8", "SVE", "SME", "RVV", "VSX")
    return " ".join(name for name in names if name.startswith(sets))
