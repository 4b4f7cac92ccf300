# SPDX-License-Identifier: Apache-2.0
"""One tile of every type, worked out by hand from docs/format.md, section 5.

Rows that nothing is said about are zero. In the others the values follow the column c in three
ways, each of which another mistake in the layout disturbs:

- quarters: one value for each of the columns 0-15, 16-31, 32-47 and 48-63
- neighbours: by c % 4, the place in a group of four
- groups: by (c // 4) % 4

A dense byte of codes t0 .. t4 is ceil(256 n / 243), n = 81 t0 + 27 t1 + 9 t2 + 3 t3 + t4.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import Dtype

Pattern = Literal["quarters", "neighbours", "groups"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a tile: its values, and the bytes that hold it."""

    row: int
    pattern: Pattern
    values: tuple[float, float, float, float]
    scale: float
    planes: str  # hex: what each plane of 64 bytes holds for the row, four bytes of each
    last: int = 0  # dense ternary: the byte of columns 60 .. 63
    min: float | None = None


@dataclass(frozen=True, slots=True)
class Golden:
    """A tile; `zero` is what a byte of a row of zeros is."""

    rows: tuple[Row, ...]
    n_planes: int
    zero: int = 0
    zero_last: int | None = None
    has_min: bool = field(default=False)

    def values(self) -> NDArray[np.float32]:
        """The weights [16, 64]."""
        out = np.zeros((16, 64), np.float32)
        for row in self.rows:
            for c in range(64):
                which = {"quarters": c // 16, "neighbours": c % 4, "groups": c // 4 % 4}
                out[row.row, c] = row.values[which[row.pattern]]
        return out

    def tile(self) -> bytes:
        """The bytes."""
        scales, mins = [0.0] * 16, [0.0] * 16
        planes = bytearray([self.zero] * (64 * self.n_planes))
        last = bytearray() if self.zero_last is None else bytearray([self.zero_last] * 16)
        for row in self.rows:
            scales[row.row] = row.scale
            mins[row.row] = row.min or 0.0
            held = bytes.fromhex(row.planes)
            assert len(held) == 4 * self.n_planes
            for p in range(self.n_planes):
                at = p * 64 + row.row * 4
                planes[at : at + 4] = held[4 * p : 4 * p + 4]
            if self.zero_last is not None:
                last[row.row] = row.last
        head = struct.pack("<16e", *scales)
        if self.has_min:
            head += struct.pack("<16e", *mins)
        return head + bytes(planes + last)


# Codes 0, 1, 2, 3 by quarter are the bits 11 10 01 00 of a byte; one code fills a byte with
# 00, 55, aa or ff.
_TWO_BITS = {
    "quarters": "e4e4e4e4" * 4,
    "neighbours": "0055aaff" * 4,
    "groups": "0000000055555555aaaaaaaaffffffff",
}

# Codes 0, 5, 10, 15 by quarter: planes 0-3 hold the first (low) and the third, 4-7 the others.
_FOUR_BITS = {
    "quarters": "a0a0a0a0" * 4 + "f5f5f5f5" * 4,
    "neighbours": "006699ff" * 8,  # codes 0, 6, 9, 15
    "groups": ("ffffffff33333333cccccccc00000000") * 2,  # codes 15, 3, 12, 0
}

_TERNARY = {  # values of the codes 0 1 2 0, 0 1 2 1, 2 0 1 0 with scale 3
    "quarters": (-3.0, 0.0, 3.0, -3.0),
    "neighbours": (-3.0, 0.0, 3.0, 0.0),
    "groups": (3.0, -3.0, 0.0, -3.0),
}

GOLDEN: dict[Dtype, Golden] = {
    Dtype.Q2: Golden(
        (
            Row(2, "quarters", (-1, -0.5, 0, 0.5), 0.5, _TWO_BITS["quarters"], min=-1),
            Row(7, "neighbours", (3, 5, 7, 9), 2, _TWO_BITS["neighbours"], min=3),
            Row(15, "groups", (-8, -7, -6, -5), 1, _TWO_BITS["groups"], min=-8),
        ),
        n_planes=4,
        has_min=True,
    ),
    Dtype.Q2_SYM: Golden(
        (
            Row(0, "quarters", (-0.75, -0.25, 0.25, 0.75), 0.5, _TWO_BITS["quarters"]),
            Row(7, "neighbours", (-3, -1, 1, 3), 2, _TWO_BITS["neighbours"]),
            Row(14, "groups", (-1.5, -0.5, 0.5, 1.5), 1, _TWO_BITS["groups"]),
        ),
        n_planes=4,
        zero=0xAA,  # code 2
    ),
    Dtype.Q3: Golden(
        (
            # codes 0 3 5 7: low bits 0 3 1 3, third bits 0 0 1 1 in both halves of a byte
            Row(1, "quarters", (-6, 0, 4, 8), 2, "dc" * 16 + "cc" * 8, min=-6),
            # codes 0 2 5 7: low bits 0 2 1 3, third bits 0 0 1 1
            Row(6, "neighbours", (1, 2, 3.5, 4.5), 0.5, "00aa55ff" * 4 + "0000ffff" * 2, min=1),
            # codes 7 2 4 0: third bits of groups 0 and 2 are the low halves of the two planes
            Row(
                15, "groups", (0, -5, -3, -7), 1,
                "ffffffff" "aaaaaaaa" "00000000" "00000000" "0f0f0f0f" "0f0f0f0f", min=-7,
            ),
        ),
        n_planes=6,
        has_min=True,
    ),
    Dtype.Q4: Golden(
        (
            Row(0, "quarters", (1, 2.25, 3.5, 4.75), 0.25, _FOUR_BITS["quarters"], min=1),
            Row(3, "neighbours", (-8, -2, 1, 7), 1, _FOUR_BITS["neighbours"], min=-8),
            Row(15, "groups", (20, -4, 14, -10), 2, _FOUR_BITS["groups"], min=-10),
        ),
        n_planes=8,
        has_min=True,
    ),
    Dtype.Q4_SYM: Golden(
        (
            Row(0, "quarters", (-2, -0.75, 0.5, 1.75), 0.25, _FOUR_BITS["quarters"]),
            Row(3, "neighbours", (-8, -2, 1, 7), 1, _FOUR_BITS["neighbours"]),
            # the largest magnitude is positive: a negative scale
            Row(15, "groups", (-14, 10, -8, 16), -2, _FOUR_BITS["groups"]),
        ),
        n_planes=8,
        zero=0x88,
    ),
    Dtype.Q4_NL: Golden(
        (
            Row(0, "quarters", (-8, -2, 1.5, 7), 0.25, _FOUR_BITS["quarters"]),
            Row(3, "neighbours", (-32, -5, 3, 28), 1, _FOUR_BITS["neighbours"]),
            Row(15, "groups", (-56, 30, -24, 64), -2, _FOUR_BITS["groups"]),
        ),
        n_planes=8,
        zero=0x88,
    ),
    Dtype.TERNARY: Golden(
        (
            Row(1, "quarters", _TERNARY["quarters"], 3, "24" * 16),
            Row(8, "neighbours", _TERNARY["neighbours"], 3, "0055aa55" * 4),
            Row(15, "groups", _TERNARY["groups"], 3, "aaaaaaaa" "00000000" "55555555" "00000000"),
        ),
        n_planes=4,
        zero=0x55,  # code 1
    ),
    Dtype.TERNARY_DENSE: Golden(
        (
            # groups 0-4: 0 0 0 0 1, n = 1; 5-9: 1 1 1 2 2, n = 125; 10-14: 2 2 0 0 0, n = 216
            Row(1, "quarters", _TERNARY["quarters"], 3, "02020202" "84848484" "e4e4e4e4", last=0),
            # n = 0, 121, 242, 121 by neighbour; the last byte is 0 1 2 1 0, n = 48
            Row(8, "neighbours", _TERNARY["neighbours"], 3, "0080ff80" * 3, last=0x33),
            # groups 0-4: 2 0 1 0 2, n = 173; 5-9: 0 1 0 2 0, n = 33; 10-14: 1 0 2 0 1, n = 100
            Row(15, "groups", _TERNARY["groups"], 3, "b7b7b7b7" "23232323" "6a6a6a6a", last=0),
        ),
        n_planes=3,
        zero=0x80,  # 1 1 1 1 1, n = 121
        zero_last=0x7F,  # 1 1 1 1 0, n = 120
    ),
    Dtype.Q8: Golden(
        (
            Row(
                0, "quarters", (-127, -28, 0, 127), 1,
                "01010101" * 4 + "64646464" * 4 + "80808080" * 4 + "ffffffff" * 4,
            ),
            Row(9, "neighbours", (-63.5, -32, 32, 63.5), 0.5, "0140c0ff" * 16),
            Row(
                15, "groups", (254, -254, 0, 32), 2,
                ("ffffffff" "01010101" "80808080" "90909090") * 4,
            ),
        ),
        n_planes=16,
        zero=0x80,
    ),
}  # fmt: skip
