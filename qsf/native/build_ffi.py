"""Writes the C source of ``qsf.native._qsf``, the extension module that contains the C engine.

The declarations come from the marked parts of the headers that csrc/include/qsf.h includes, and of
those with the records of a file, so there is one copy of them. The C compiler checks them against
the headers when it builds.

Usage: python build_ffi.py OUT.c
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = CSRC / "include" / "qsf.h"
INTERNAL = ("format/records.h", "stream/contents.h")


def marked_part(header: Path) -> str:
    """Return the marked part of a header without parts for the C compiler alone."""
    text = header.read_text(encoding="ascii")
    marked = text.split("/* ---- cdef begin ----", 1)[1].split("/* ---- cdef end ----", 1)[0]
    return marked.split("*/", 1)[1].replace("QSF_API ", "")


def declarations() -> str:
    """Return the marked parts of all headers that qsf.h includes, in its order, and the others."""
    names = re.findall(r'^#include "(\w+\.h)"', HEADER.read_text(encoding="ascii"), re.MULTILINE)
    headers = [HEADER.with_name(name) for name in names] + [CSRC / name for name in INTERNAL]
    return "".join(marked_part(header) for header in headers)


def build(out: Path) -> None:
    """Write the generated C source to ``out``."""
    ffi = FFI()
    ffi.cdef(declarations())
    includes = '#include "qsf.h"\n#include "stream/contents.h"'
    ffi.set_source("qsf.native._qsf", includes, py_limited_api=True)
    ffi.emit_c_code(str(out))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
