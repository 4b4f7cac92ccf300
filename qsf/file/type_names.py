"""Names of types of matrices: our names, and llama.cpp's with our nearest type."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

from qsf.errors import QsfArgumentError
from qsf.file.layout import KEPT, Dtype, dtype_name

TYPE_NAMES = (*(dtype_name(kind) for kind in Dtype if kind not in (Dtype.MIXED, Dtype.F32, *KEPT)),)


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
