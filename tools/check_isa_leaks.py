"""Finds instructions that a processor may lack, where code is not chosen at run time.

Disassembles each object file of the library. The default is what every processor of the kind has;
a file in the folder of an instruction set, or a function that is named here, may use that set. One
instruction elsewhere is an "illegal instruction" on somebody's machine. Prints one line per
function at fault; exits with 1 if there is any.

Usage: python tools/check_isa_leaks.py OBJECTS_FOLDER [OBJDUMP]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# What each step above the baseline adds, matched with a line "mnemonic operands".
_X86 = {
    "sse4": (
        r"p(shufb|maddubsw|alignr|abs[bwd]|sign[bwd]|mulhrsw|h(add|sub)\w+|mulld|muldq"
        r"|cmp(eq|gt)q|(max|min)(sb|sd|uw|ud)|mov[sz]x\w+|blend\w+|extr[bdq]|insr[bdq]|test"
        r"|ackusdw|opcnt)\b|(round|blend|dp)[sp][sd]\b|blendv|movntdqa|insertps|extractps|crc32"
        r"|lddqu|movddup|h(add|sub)p"
    ),
    "clmul": r"v?pclmul",
    # Not tzcnt: an older processor reads it as bsf, and clang writes it where both are equal.
    "avx2": r"v(?!er[rw]\b)|(andn|bextr|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt)\b",
    "avx512": r".*(%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01]))",
    "vnni": r"(\{vex\} )?vpdp",
    "amx": r"tile|ldtilecfg|sttilecfg|tdp",
}
_ARM = {"dotprod": r"[su]dot\b", "i8mm": r"(u?s|u)mmla\b|usdot\b", "crc": r"crc32"}
# Part of a file's name, or a function's -> what it may use.
_FILES = {
    "_avx2": {"sse4", "avx2"},
    "_avxvnni": {"sse4", "avx2", "vnni"},
    "_avx512": {"sse4", "avx2", "avx512", "vnni"},
    "_amx": {"sse4", "avx2", "avx512", "vnni", "amx"},
    "_dotprod": {"dotprod"},
    "_i8mm": {"dotprod", "i8mm"},
    "crc32_arm": {"crc"},
}
_FUNCTIONS = {
    "crc32_x86": {r".*clmul512.*|.*512.*": {"sse4", "clmul", "avx2", "avx512"},
                  r".*": {"sse4", "clmul"}},
    "roofline": {r".*avx512.*": {"sse4", "avx2", "avx512"}, r".*avx2.*": {"sse4", "avx2"}},
}  # fmt: skip


def allowed(file: str, function: str) -> set[str]:
    """Return what a function of the source `file` may use beside the baseline."""
    for pattern, names in _FUNCTIONS.get(file, {}).items():
        if re.fullmatch(pattern, function):
            return names
    return next((names for part, names in _FILES.items() if file.endswith(part)), set())


def leaks(file: str, disassembly: str) -> Iterator[str]:
    """Yield a line for each function of `file` that has what it may not use."""
    sets = _X86 if "file format elf64-x86-64" in disassembly else _ARM
    function = ""
    reported: set[tuple[str, str]] = set()
    for line in disassembly.splitlines():
        head = re.match(r"[0-9a-f]+ <([^>]+)>:", line)
        if head:
            function = head[1]
        _, tab, code = line.partition("\t")
        for name, pattern in sets.items():
            is_new = (function, name) not in reported and name not in allowed(file, function)
            if tab and is_new and re.match(pattern, code):
                reported.add((function, name))
                yield f"{file}: {function} has an instruction of {name}: {code.strip()}"


def main() -> int:
    """Print the leaks; the exit code is 1 if there are any, or no object files."""
    objdump = sys.argv[2] if len(sys.argv) > 2 else "objdump"
    objects = sorted(Path(sys.argv[1]).rglob("*.c.o"))
    lines: list[str] = []
    n_special = 0
    for path in objects:
        run = subprocess.run(
            [objdump, "-d", "--no-show-raw-insn", str(path)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        file = path.name.removesuffix(".c.o")
        lines += leaks(file, run.stdout)
        n_special += bool(_FUNCTIONS.get(file)) or any(file.endswith(part) for part in _FILES)
    for line in lines:
        print(line)
    print(f"check_isa_leaks: {len(objects)} files, {n_special} of them above the baseline, "
          f"{len(lines)} leaks")  # fmt: skip
    return 1 if lines or not n_special else 0


if __name__ == "__main__":
    sys.exit(main())
