"""The outlier table of a matrix: weights too large for its few bits (docs/format.md, section 5).

    u32 first [tile rows + 1]   entries before each tile row, and all
    entries                     u16 step, f16 delta

The position of a weight is 16 * column + row in its tile row. The first entry of a tile row is at
step - 1, each other one step after the one before it. Plain Python: reading a file needs no numpy.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Final, NamedTuple

MAX_STEP: Final = 0xFFFF


class PackedOutliers(NamedTuple):
    """An outlier table as bytes of a file; ``n_entries`` is for ``Writer.begin_tensor``."""

    data: bytes
    n_entries: int
