"""Holds each room to its number of lines: code is a cost, and a room that grows says so.

Counted are the lines of .c .h .py .pyi .html .sh files that git knows. Whoever needs more lines
than the table allows raises its row in the same commit, and says why in the body. Prints one line
per violation; exits with 1 if there is any.

Usage: python tools/lint_lines.py [PROJECT_ROOT]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KINDS = (".c", ".h", ".py", ".pyi", ".html", ".sh")
# A folder to the most lines of its files; a file counts for the longest folder that holds it.
CAPS: dict[str, int] = {
    "csrc/base": 401,
    "csrc/cache": 1928,
    "csrc/checksum": 426,
    "csrc/engine": 4000,
    "csrc/format": 3771,
    "csrc/include": 1008,
    "csrc/io": 380,
    "csrc/kernels": 7536,
    "csrc/machine": 318,
    "csrc/memory": 227,
    "csrc/model": 5860,
    "csrc/plan": 1399,
    "csrc/platform": 3673,
    "csrc/quantise": 1692,
    "csrc/speculate": 531,
    "csrc/stream": 3331,
    "csrc/text": 2838,
    "csrc/types": 254,
    "qsf": 3646,
    "qsf/cli": 5391,
    "qsf/evaluate": 751,
    "qsf/file": 2251,
    "qsf/find": 1046,
    "qsf/native": 1500,
    "qsf/ray": 728,
    "qsf/report": 746,
    "qsf/serve": 9087,
    "qsf/shell": 1587,
    "qsf/system": 635,
    "qsf/text": 3181,
    "converter/qsf_converter": 1986,
    "converter/qsf_converter/calibrate": 3045,
    "converter/qsf_converter/original": 992,
    "converter/qsf_converter/rounding": 2213,
    "converter/qsf_converter/sources": 11943,
    "converter/qsf_converter/text": 1786,
    "bench": 2615,
    "tools": 2716,
    "program": 1759,
    "tests/c": 12508,
    "tests/fuzz": 1018,
    "tests/install": 530,
    "tests/clients": 102,
    "tests/python": 609,
    "tests/python/api": 5190,
    "tests/python/bench": 508,
    "tests/python/cli": 2828,
    "tests/python/converter": 9662,
    "tests/python/evaluate": 383,
    "tests/python/file": 1226,
    "tests/python/find": 560,
    "tests/python/house": 889,
    "tests/python/make": 5429,
    "tests/python/oracle": 615,
    "tests/python/real": 435,
    "tests/python/serve": 5757,
    "tests/python/text": 1930,
}
MAX_FILES = 900
MAX_LINES = 800  # of a file


def room_of(path: str) -> str:
    """Return the longest folder of the table that holds the file, or "" if none does."""
    return max((room for room in CAPS if path.startswith(f"{room}/")), key=len, default="")


def check(paths: dict[str, int]) -> list[str]:
    """Return what is wrong with files of so many lines."""
    lines = dict.fromkeys(CAPS, 0)
    faults = []
    for path, n_lines in paths.items():
        room = room_of(path)
        if room:
            lines[room] += n_lines
        if n_lines > MAX_LINES:
            faults.append(f"{path}: {n_lines} lines, at most {MAX_LINES}")
        if not room and path.split("/")[0] in {each.split("/")[0] for each in CAPS}:
            faults.append(f"{path}: in no room of tools/lint_lines.py")
    faults += [
        f"{room}: {n} lines, at most {CAPS[room]}: raise it in tools/lint_lines.py, and say why"
        for room, n in lines.items()
        if n > CAPS[room]
    ]
    return faults


def main() -> int:
    """Check the project."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    listed = subprocess.run(
        ["git", "-C", root, "ls-files"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    paths = {
        name: (root / name).read_bytes().count(b"\n")
        for name in listed
        if name.endswith(KINDS) and (root / name).is_file()
    }
    faults = check(paths)
    if len(listed) > MAX_FILES:
        faults.append(f"{len(listed)} files, at most {MAX_FILES}")
    for fault in faults:
        print(fault)
    counted = [sum(n for path, n in paths.items() if is_test == path.startswith("tests/")
                   and room_of(path)) for is_test in (False, True)]  # fmt: skip
    print(
        f"lint_lines: {len(faults)} violations, {counted[0]} lines of source, {counted[1]} of tests"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
