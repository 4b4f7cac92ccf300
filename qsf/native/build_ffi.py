"""Writes the C source of ``qsf.native._qsf``, the extension module that contains the C engine.

The declarations come from the marked part of csrc/include/qsf.h, so there is one
copy of the API. The C compiler checks them against the header when it builds.

Usage: python build_ffi.py OUT.c
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "include" / "qsf.h"


def public_declarations() -> str:
    """Return the marked part of qsf.h without what only a C compiler understands."""
    header = HEADER.read_text(encoding="ascii")
    marked = header.split("/* ---- cdef begin ----", 1)[1].split("/* ---- cdef end ----", 1)[0]
    return marked.split("*/", 1)[1].replace("QSF_API ", "")


def build(out: Path) -> None:
    """Write the generated C source to ``out``."""
    ffi = FFI()
    ffi.cdef(public_declarations())
    ffi.set_source("qsf.native._qsf", '#include "qsf.h"', py_limited_api=True)
    ffi.emit_c_code(str(out))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
