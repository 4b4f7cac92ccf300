# SPDX-License-Identifier: Apache-2.0
"""Plain rounding (rule ``nearest``) and packing one value at a time: what C must equal to the bit.

Arithmetic is f32 in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from qsf.file.layout import Dtype

F = np.float32
Block = Sequence[np.float32]
Codes = tuple[list[int], np.float16, np.float16]  # codes, scale, min


def ceil_f16(value: np.float32) -> np.float16:
    """The smallest f16 that is not below `value`, which is not negative; never -0."""
    half: np.float16 = np.float16(value)
    if np.float32(half) < value:
        bits = int.from_bytes(half.tobytes(), "little") + 1
        half = np.frombuffer(bits.to_bytes(2, "little"), np.float16)[0]
    half += np.float16(0)
    return half


def from_min(block: Block, scale: np.float16, minimum: np.float16, n_steps: int) -> Codes:
    """Codes of the nearest of evenly spaced levels that begin at `minimum`."""
    codes = [0] * len(block)
    if scale != 0:
        steps = [(w - F(minimum)) / F(scale) for w in block]
        codes = [int(np.clip(np.rint(step), 0, n_steps)) for step in steps]
    return codes, scale, minimum


def code_asymmetric(block: Block, n_steps: int) -> Codes:
    """2, 3 and 4 bits: from the smallest to the largest value."""
    low, high = min(block), max(block)
    minimum = np.float16(low) + np.float16(0)
    if low == high:
        return [0] * len(block), np.float16(0), minimum
    step = max((high - F(minimum)) / F(n_steps), F(0))
    return from_min(block, ceil_f16(step), minimum, n_steps)


def code_2bit_sym(block: Block) -> Codes:
    """Levels -1.5, -0.5, 0.5 and 1.5: the outer ones reach amax."""
    scale = ceil_f16(max(abs(w) for w in block) / F(1.5))
    codes = [2] * len(block)
    if scale != 0:
        off = F(scale) * F(0.5)
        codes = [int(np.clip(np.rint((w - off) / F(scale)), -2, 1)) + 2 for w in block]
    return codes, scale, np.float16(0)


def code_ternary(block: Block) -> Codes:
    """From -amax to amax."""
    return symmetric(block, ceil_f16(max(abs(w) for w in block)), 1, -1, 1)


def signed_scale(block: Block, most: int) -> np.float16:
    """The value of the largest magnitude is -most scales; of two, the positive one."""
    low, high = min(block), max(block)
    extreme = high if high >= -low else low
    scale = ceil_f16(abs(extreme) / F(most))
    return -scale if extreme > 0 else scale


def code_4bit_sym(block: Block) -> Codes:
    """From -8 to 7 scales."""
    return symmetric(block, signed_scale(block, 8), 8, -8, 7)


NL_LEVELS = (-32, -25, -19, -15, -11, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 28)


def code_4bit_nl(block: Block) -> Codes:
    """The nearest of uneven levels; of two that are as near, the lower one."""
    scale = signed_scale(block, 32)
    if scale == 0:
        return [NL_LEVELS.index(0)] * len(block), scale, np.float16(0)
    levels = np.array(NL_LEVELS, F)
    middles = (levels[1:] + levels[:-1]) / F(2)
    return [int((middles < w / F(scale)).sum()) for w in block], scale, np.float16(0)


def code_8bit(block: Block) -> Codes:
    """From -amax to amax."""
    return symmetric(block, ceil_f16(max(abs(w) for w in block) / F(127)), 128, -127, 127)


def symmetric(block: Block, scale: np.float16, zero: int, low: int, high: int) -> Codes:
    """Codes of the nearest multiple of `scale` within the range."""
    codes = [zero] * len(block)
    if scale != 0:
        codes = [int(np.clip(np.rint(w / F(scale)), low, high)) + zero for w in block]
    return codes, scale, np.float16(0)


CODERS: dict[Dtype, Callable[[Block], Codes]] = {
    Dtype.Q2: lambda block: code_asymmetric(block, 3),
    Dtype.Q2_SYM: code_2bit_sym,
    Dtype.Q3: lambda block: code_asymmetric(block, 7),
    Dtype.Q4: lambda block: code_asymmetric(block, 15),
    Dtype.Q4_SYM: code_4bit_sym,
    Dtype.Q4_NL: code_4bit_nl,
    Dtype.TERNARY: code_ternary,
    Dtype.TERNARY_DENSE: code_ternary,
    Dtype.Q8: code_8bit,
}

WITH_MIN = (Dtype.Q2, Dtype.Q3, Dtype.Q4)


def pack(dtype: Dtype, codes: list[list[int]]) -> bytes:
    """The codes of a tile, [16][64], as bytes."""
    is_4bit = dtype in (Dtype.Q4, Dtype.Q4_SYM, Dtype.Q4_NL)
    n_bytes = 512 if is_4bit else {Dtype.Q8: 1024, Dtype.Q3: 384}.get(dtype, 256)
    out = bytearray(n_bytes)
    if dtype == Dtype.TERNARY_DENSE:
        return bytes(pack_dense(codes, plane, r, j) for plane, r, j in dense_places())
    for r in range(16):
        for c in range(64):
            code = codes[r][c]
            g, j = divmod(c, 4)
            at = r * 4 + j
            if dtype == Dtype.Q8:
                out[g * 64 + at] = code
            elif is_4bit:
                out[g % 8 * 64 + at] |= code << (g // 8 * 4)
            else:
                out[g % 4 * 64 + at] |= (code & 3) << (g // 4 * 2)
                if dtype == Dtype.Q3:
                    h, i = divmod(g % 4, 2)
                    out[256 + h * 64 + at] |= (code >> 2) << (4 * i + g // 4)
    return bytes(out)


def dense_places() -> list[tuple[int, int, int]]:
    """Plane, row and place of each byte of a dense tile; plane 3 is the bytes of the ends."""
    planes = [(p, r, j) for p in range(3) for r in range(16) for j in range(4)]
    return planes + [(3, r, 0) for r in range(16)]


def pack_dense(codes: list[list[int]], plane: int, r: int, j: int) -> int:
    """Five trits as one byte."""
    if plane == 3:
        trits = [*codes[r][60:64], 0]
    else:
        trits = [codes[r][4 * (5 * plane + k) + j] for k in range(5)]
    n = 0
    for trit in trits:
        n = 3 * n + trit
    return -(-256 * n // 243)


def naive_tiles(dtype: Dtype, rows: np.ndarray) -> bytes:
    """The tiles of a matrix by rule ``nearest``: docs/format.md, section 5, value by value."""
    n_rows, n_cols = rows.shape
    out = bytearray()
    for row0 in range(0, n_rows, 16):
        for col0 in range(0, n_cols, 64):
            part = rows[row0 : row0 + 16, col0 : col0 + 64]
            if dtype in (Dtype.F16, Dtype.F32):
                values = np.zeros((64, 16))
                values[: part.shape[1], : part.shape[0]] = part.T
                letter = "e" if dtype == Dtype.F16 else "f"
                out += struct.pack(f"<1024{letter}", *values.ravel())
                continue
            scales, mins = [np.float16(0)] * 16, [np.float16(0)] * 16
            codes = [[0] * 64 for _ in range(16)]
            for r, block in enumerate(part):
                found, scales[r], mins[r] = CODERS[dtype](list(block))
                codes[r][: len(found)] = found
            out += struct.pack("<16e", *scales)
            if dtype in WITH_MIN:
                out += struct.pack("<16e", *mins)
            out += pack(dtype, codes)
    return bytes(out)
