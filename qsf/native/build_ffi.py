"""Writes ``qsf.native._qsf``, which opens the library with the C engine and knows its declarations.

These come from the marked parts of the headers that csrc/include/qsf.h includes, and of those with
the records of a file, so there is one copy of them. A second file makes the C compiler compare the
size of each struct and the place of each field with what cffi derives from them. A third,
``qsf.native._facts``, has what Python needs without the library: the constants, enumerations and
weight types of a file, and classes with the fields of structs.

Usage: python build_ffi.py OUT.py LAYOUT.c FACTS.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from cffi import FFI

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = CSRC / "include" / "qsf.h"
INTERNAL = ("format/records.h", "stream/contents.h")
FORMAT = ("format/layout.h", "types/dtype.h")

# Enumeration in C -> its name in Python and the beginning of its members' names
ENUMS = {
    "qsf_unit_role": ("Role", "QSF_UNIT_"),
    "qsf_architecture": ("Architecture", "QSF_ARCHITECTURE_"),
    "qsf_activation": ("Activation", "QSF_ACTIVATION_"),
    "qsf_norm": ("Norm", "QSF_NORM_"),
    "qsf_positions": ("Positions", "QSF_POSITIONS_"),
    "qsf_compression": ("Compression", "QSF_COMPRESSION_"),
    "qsf_layout": ("Layout", "QSF_LAYOUT_"),
    "qsf_mixer_kind": ("Mixer", "QSF_MIXER_"),
    "qsf_rope_scaling": ("RopeScaling", "QSF_ROPE_SCALING_"),
    "qsf_qk_norm": ("QkNorm", "QSF_QK_NORM_"),
    "qsf_ffn": ("Ffn", "QSF_FFN_"),
    "qsf_expert_score": ("ExpertScore", "QSF_EXPERT_"),
    "qsf_expert_weights": ("ExpertWeights", "QSF_EXPERT_WEIGHTS_"),
    "qsf_group_score": ("GroupScore", "QSF_GROUP_"),
    "qsf_tensor_type": ("TensorType", "QSF_TENSOR_"),
}
# Struct -> the class with its fields. Those of no simple type are left to who uses the class.
RECORDS = {
    "qsf_model_facts": "ModelFields",
    "qsf_options": "OptionFields",
    "qsf_plan": "PlanFields",
    "qsf_stats": "StatsFields",
    "qsf_header": "HeaderFields",
    "qsf_arch": "ArchFields",
    "qsf_layer_kind": "KindFields",
}
# Struct -> the file that has the defaults of its fields; those of the others are 0
DEFAULTS = {"qsf_arch": "arch.c", "qsf_layer_kind": "kinds.c"}
NOT_STORED = (
    ("qsf_layer_kind", "is_encoder"),
    ("qsf_layer_kind", "pinned_tokens"),
    ("qsf_options", "n_adapters"),
)
# Fields that only Python knows, behind those of the struct
MORE_FIELDS = {"qsf_plan": ("is_enough: bool", "text_bytes: int = 0", 'kv_policy: str = "none"')}
PYTHON_TYPES = {
    "char[]": "str",
    "char *": "str | PathLike[str]",
    "float": "float",
    "double": "float",
    "uint8_t": "int",
    "uint32_t": "int",
    "uint64_t": "int",
    "uint64_t[]": "tuple[int, ...]",
    "qsf_floats": "tuple[float, ...]",
    "qsf_adapter_choice *": "tuple[tuple[str, float], ...]",
}

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


def facts(ffi: FFI) -> str:
    """Return the module ``qsf.native._facts``."""
    text = "".join((CSRC / name).read_text(encoding="ascii") for name in FORMAT)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = ["from __future__ import annotations", "from dataclasses import dataclass"]
    lines += ["from enum import IntEnum", "from os import PathLike", ""]
    for name, number in re.findall(r"^#define QSF_(\w+) ([(\w< )]+?) *$", text, re.MULTILINE):
        lines.append(f"{name} = {eval(re.sub(r'(?<=[0-9])U', '', number), {})}")
    layer_rows = LAYER_TENSOR.findall(text.replace("MATRIX(", "TILES("))
    layer_types = [
        (f"{kind}_OUTLIERS" if layout == "OUTLIERS" else kind, number)
        for layout, number, kind, *_ in layer_rows
    ]
    for enum, (name, prefix) in ENUMS.items():
        body = re.search(rf"enum {enum} \{{(.*?)\}}", text, re.DOTALL)
        assert body is not None, enum
        members = re.findall(rf"{prefix}(\w+) = (\w+)", body[1])
        if enum == "qsf_tensor_type":
            members = sorted(members + layer_types, key=lambda member: int(member[1]))
        lines += ["", f"class {name}(IntEnum):"]
        lines += [f"    {member} = {n}" for member, n in members if not HELPERS.search(member)]
    rows = re.findall(
        r'X\( *(\d+), *(\w+), +\w+, +("[^"]+"), +(\d+)',
        (CSRC / "types/table.h").read_text(encoding="ascii"),
    )
    rows = sorted([*rows, ("5", "MIXED", '"mixed"', "0")], key=lambda row: int(row[0]))
    lines += ["", "# Tensors of a layer as a pass uses them: type, layout, group, rows, columns"]
    lines += ["LAYER_TENSORS = ("] + [
        f'    (TensorType.{kind}, Layout.{layout}, "{group}", "{n_rows or "ONE"}", "{n_cols}"),'
        for (kind, _), (layout, _, _, group, n_rows, n_cols) in zip(
            layer_types, layer_rows, strict=True
        )
    ]
    lines += [")", "", "class Dtype(IntEnum):"]
    lines += [f"    {re.sub('^([0-9])BIT', 'Q' + chr(92) + '1', s)} = {n}" for n, s, _, _ in rows]
    lines += ["", "# Name, bytes of a tile", "DTYPES = {"]
    lines += [f"    {n}: ({name}, {n_bytes})," for n, _, name, n_bytes in rows]
    lines.append("}")
    for section, file in (("KIND", "kinds.c"), ("ARCH", "arch.c")):
        lines += ["", "# Number, field, type of a value (qsf_value_type)", f"{section}_KEYS = ("]
        lines += [
            f'    ({number}, "{field}", {1 + VALUE_TYPES.index(kind or array)}),'
            for kind, number, array, field in KEY.findall(
                (CSRC / "format" / file).read_text("ascii")
            )
        ]
        lines.append(")")
    for struct, name in RECORDS.items():
        lines += ["", "@dataclass(frozen=True, slots=True)", f"class {name}:"]
        lines += [
            f"    {field}: {kind}{default_of(struct, field, kind, text)}"
            for field, place in ffi.typeof(struct).fields
            if (kind := python_type(field, place.type)) and (struct, field) not in NOT_STORED
        ]
        lines += [f"    {field}" for field in MORE_FIELDS.get(struct, ())]
    return "\n".join([*lines, ""])


# A row of a table of keys: U32(1, "mixer", mixer, ..., or {43, QSF_VALUE_F32_ARRAY, "slopes", ...
KEY = re.compile(
    r"(?:\b(U32|F32)\(|\{)(0x\w+|\d+), (?:QSF_VALUE_(F32_ARRAY), )?"
    r'"[^"]+", (?:offsetof\(\w+, )?(\w+)'
)
# A row of QSF_LAYER_TABLE; a vector has no rows of its own
LAYER_TENSOR = re.compile(
    r'(VECTOR|TILES|OUTLIERS)\((\d+), (\w+), "\w+", IN_(\w+), \w+, (?:OF_(\w+), )?OF_(\w+)\)'
)
VALUE_TYPES = ("U32", "F32", "F32_ARRAY")
FLAGS = ("rope_interleaved", "tied_head")
HELPERS = re.compile("COUNT$|^FIRST_FREE$")  # names that are no values of a file


def default_of(struct: str, field: str, kind: str, text: str) -> str:
    """Return what follows the type of a field: its default, if the struct has defaults."""
    if struct == "qsf_options":
        return " | None = None"
    if struct not in DEFAULTS:
        return ""
    code = (CSRC / "format" / DEFAULTS[struct]).read_text("ascii")
    given = re.search(rf"\.{field} = ([-\w.]+?)F?,", code)
    if given is None:
        return f" = {eval(kind.partition('[')[0], {})()}"  # 0, False or ()
    member = re.search(rf"\b{re.escape(given[1])} = (\d+)", text)
    # One that is ABSENT depends on the header
    return " | None = None" if given[1] == "ABSENT" else f" = {member[1] if member else given[1]}"


def python_type(field: str, kind: Any) -> str | None:
    """Return the type of a struct's field in Python; None: of another kind."""
    if field in ("bos_id", "eos_id", "pad_id"):
        return "int | None"
    if field in FLAGS or field.startswith(("is_", "kv_is_", "io_is_")):
        return "bool"
    return PYTHON_TYPES.get(re.sub(r"^const |\d+(?=\])", "", kind.cname))


def build(out: Path, layout_c: Path, facts_py: Path) -> None:
    """Write the module to ``out``, the comparison to ``layout_c``, the facts to ``facts_py``."""
    ffi = FFI()
    ffi.cdef(declarations())
    layout_c.write_text(layout(ffi), encoding="ascii")
    facts_py.parent.mkdir(parents=True, exist_ok=True)
    facts_py.write_text(facts(ffi), encoding="ascii")
    ffi.set_source("qsf.native._qsf", None)
    ffi.emit_python_code(str(out))
    with out.open("a", encoding="ascii") as file:
        file.write(OPEN)


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:4]))
