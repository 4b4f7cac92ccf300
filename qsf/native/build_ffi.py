"""Writes ``qsf.native._qsf``, which opens the library with the C engine and knows its declarations.

These come from the marked parts of the headers that csrc/include/qsf.h includes, and of those with
the records of a file, so there is one copy of them. A second file makes the C compiler compare the
size of each struct and the place of each field with what cffi derives from them.

Usage: python build_ffi.py OUT.py LAYOUT.c
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = CSRC / "include" / "qsf.h"
INTERNAL = ("format/records.h", "stream/contents.h")

OPEN = """
import os, sys
_suffix = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libqsf." + _suffix)
# What is collected when the interpreter ends, after `lib`, still calls the library: it stays.
if sys.platform == "win32":
    import _ctypes
    _ctypes.LoadLibrary(_path)
_stays = getattr(os, "RTLD_NODELETE", 0) | getattr(os, "RTLD_NOW", 0)
lib = ffi.dlopen(_path, _stays)
"""


def marked_part(header: Path) -> str:
    text = header.read_text(encoding="ascii")
    marked = text.split("/* ---- cdef begin ----", 1)[1].split("/* ---- cdef end ----", 1)[0]
    return marked.split("*/", 1)[1].replace("QSF_API ", "")


def declarations() -> str:
    """Return the marked parts of all headers that qsf.h includes, in its order, and the others."""
    names = re.findall(r'^#include "(\w+\.h)"', HEADER.read_text(encoding="ascii"), re.MULTILINE)
    headers = [HEADER.with_name(name) for name in names] + [CSRC / name for name in INTERNAL]
    return "".join(marked_part(header) for header in headers)


def layout(ffi: FFI) -> str:
    """Return C code that compiles only if all structs are laid out as cffi derives it."""
    lines = ["#include <stddef.h>", '#include "qsf.h"', '#include "stream/contents.h"']
    for name in ffi.list_types()[0]:
        fields = getattr(ffi.typeof(name), "fields", None) or ()
        facts = [(f"offsetof({name}, {field})", place.offset) for field, place in fields]
        if facts:
            facts.append((f"sizeof({name})", ffi.sizeof(name)))
        lines += [f'_Static_assert({fact} == {n}, "{fact}");' for fact, n in facts]
    return "\n".join([*lines, ""])


def build(out: Path, layout_c: Path) -> None:
    """Write the module to ``out`` and the comparison to ``layout_c``."""
    ffi = FFI()
    ffi.cdef(declarations())
    layout_c.write_text(layout(ffi), encoding="ascii")
    ffi.set_source("qsf.native._qsf", None)
    ffi.emit_python_code(str(out))
    with out.open("a", encoding="ascii") as file:
        file.write(OPEN)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
