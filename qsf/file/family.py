"""The name of a model's family, such as "qwen2", even if the file's header says "other"."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qsf.file.layout import Architecture

if TYPE_CHECKING:
    from qsf.file.reader import Reader

# META is untrusted JSON of up to 16 MB; qsf-convert writes the family first.
_HEAD_BYTES = 4096
_NAME = re.compile(rb'\A\{"source": \{[^{}]*"architecture": "([A-Za-z0-9_.-]{1,64})"')
_ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)\Z")


def family_of(reader: Reader) -> str:
    """Return the family from META, which qsf-convert wrote, else from the header."""
    if "META" in reader.sections:
        section = reader.sections["META"]
        with reader.path.open("rb") as file:
            file.seek(section.off)
            match = _NAME.match(file.read(min(section.n_bytes, _HEAD_BYTES)))
        name = _ENDING.sub("", match[1].decode()) if match else ""
        if name:
            return name.lower()
    return Architecture(reader.header.architecture).name.lower()
