"""Names that users know: a model's family, such as "qwen2", and types, such as "Q4_K_M"."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError
from qsf.file.layout import KEPT, Architecture, Dtype, dtype_name

if TYPE_CHECKING:
    from qsf.file.reader import Reader


# META is untrusted JSON of up to 16 MB; qsf convert writes the family first.
_HEAD_BYTES = 4096
_FIELD = rb'\A\{"source": \{[^{}]*"%s": "([A-Za-z0-9_.-]{1,64})"'
_ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)\Z")


def family_of(reader: Reader) -> str:
    """Return the family from META, which qsf-convert wrote, else from the header."""
    name = _ENDING.sub("", _source_field(reader, b"architecture"))
    return name.lower() if name else Architecture(reader.header.architecture).name.lower()


def type_of(reader: Reader) -> str:
    """Return the type of the weights by the name that users know: a kept GGUF's, else ours."""
    return _source_field(reader, b"type") or dtype_name(reader.header.dtype)


def _source_field(reader: Reader, name: bytes) -> str:
    if "META" not in reader.sections:
        return ""
    section = reader.sections["META"]
    with reader.path.open("rb") as file:
        file.seek(section.off)
        head = file.read(min(section.n_bytes, _HEAD_BYTES))
    match = re.match(_FIELD % name, head)
    return match[1].decode() if match else ""


_UNNAMED = (Dtype.MIXED, Dtype.F32, *KEPT)
TYPE_NAMES = ("auto", *(dtype_name(kind) for kind in Dtype if kind not in _UNNAMED))


def our_type(name: str) -> str:
    """Return our type for a name of ours or of llama.cpp's.

    Raises:
        QsfArgumentError: the name is unknown.
    """
    if name.lower() in TYPE_NAMES:
        return name.lower()
    upper = name.upper()
    if upper in ("F16", "BF16", "F32"):
        return "f16"
    match = re.fullmatch(r"(TQ|IQ|Q)([1-8])(?:_[A-Z0-9]{1,3}){0,3}", upper)
    if match is None:
        raise QsfArgumentError(f"{name!r} is not a type of weights: {', '.join(TYPE_NAMES)}")
    if match[1] + match[2] == "IQ4":
        return "4bit-nl"
    if match[1] == "TQ" or match[2] == "1":
        return "ternary"
    return {"2": "2bit", "3": "3bit", "4": "4bit"}.get(match[2], "8bit")
