"""Compares the symbols of the built library with the public header.

Every global symbol of libqsf.a starts with qsf_, every function that qsf.h declares with
QSF_API is there, and libqsf.so (if given) exports these functions, those of stream/contents.h for
the Python package, and nothing else. Prints one line per violation; exits with 1 if there is any.

Usage: python tools/check_exports.py LIBRARY.a [--shared LIBRARY.so]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SHARED_EXPORTS = {"_init", "_fini"}  # what the linker adds


def public_header() -> str:
    """Return the text of qsf.h, of its parts, and of what the Python package calls besides."""
    headers = [*sorted((CSRC / "include").glob("*.h")), CSRC / "stream" / "contents.h"]
    return "".join(path.read_text(encoding="ascii") for path in headers)


def declared(header: str) -> set[str]:
    """Return the names of the QSF_API functions in the text of the header."""
    return set(re.findall(r"^QSF_API\s[^;(]*?(\w+)\s*\(", header, re.MULTILINE))


def defined(nm_output: str) -> set[str]:
    """Return the names of the global definitions in what `nm -g -P` printed."""
    rows = [line.split() for line in nm_output.splitlines()]
    return {row[0] for row in rows if len(row) >= 2 and row[1] in set("TDBRVWGSC")}


def nm(path: Path, *flags: str) -> set[str]:
    """Return the global definitions of an archive or shared object."""
    run = subprocess.run(
        ["nm", "-g", "-P", *flags, str(path)], check=True, capture_output=True, text=True
    )
    return defined(run.stdout)


def check(
    library: set[str],
    header: set[str],
    shared: set[str] | None = None,
) -> list[str]:
    faults = [f"{name} is global but does not start with qsf_"
             for name in sorted(library) if not name.startswith("qsf_")]  # fmt: skip
    faults += [f"{name} is declared in qsf.h but not defined" for name in sorted(header - library)]
    if shared is not None:
        faults += [f"libqsf.so exports {name}" for name in sorted(shared - header - SHARED_EXPORTS)]
        faults += [f"libqsf.so does not export {name}" for name in sorted(header - shared)]
    return faults


def main() -> int:
    """Print the violations; the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--shared", type=Path)
    given = parser.parse_args()
    shared = None if given.shared is None else nm(given.shared, "-D")
    header = declared(public_header())
    faults = check(nm(given.library), header, shared)
    for line in faults:
        print(line)
    print(f"check_exports: {len(header)} functions, {len(faults)} violations")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
