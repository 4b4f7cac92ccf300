"""The table of weight types: what C compiles is what Python reads."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qsf.file.layout import Dtype, Layout, dtype_name, tensor_bytes

TABLE = Path(__file__).parents[3] / "csrc/types/table.h"
ROW = re.compile(r'X\( *(\d+), \w+, +\w+, +"([^"]+)", +(\d+)')


def test_rows_of_c_are_rows_of_python() -> None:
    if not TABLE.exists():
        pytest.skip("the sources are not here")
    rows = {int(n): (name, int(size)) for n, name, size in ROW.findall(TABLE.read_text("ascii"))}
    ours = {
        int(kind): (dtype_name(kind), tensor_bytes(16, 64, kind, Layout.TILES))
        for kind in Dtype
        if kind != Dtype.MIXED
    }
    assert rows == ours
