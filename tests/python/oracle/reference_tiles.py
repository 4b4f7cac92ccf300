# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a tile say, in plain numpy, from docs/format.md and sharing no line with
the converter or the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_COLS = 64
"""Columns of a tile."""

TILE_BYTES = {
    "2bit": 320,
    "2bit-sym": 288,
    "3bit": 448,
    "4bit": 576,
    "4bit-sym": 544,
    "4bit-nl": 544,
    "mxfp4": 544,
    "ternary": 288,
    "ternary-dense": 240,
    "8bit": 1056,
    "f16": 2048,
    "f32": 4096,
    "q4_0": 576,
    "q4_1": 640,
    "q5_0": 704,
    "q5_1": 768,
    "q8_0": 1088,
    "q4_k": 576,
    "q5_k": 704,
    "q6_k": 840,
}
"""Bytes of a tile of 16 rows and 64 columns (docs/format.md, section 5)."""


# The table of the OCP's specification of microscaling formats, version 1.0, but for -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


LEVELS = np.array([0, 7, 13, 17, 21, 24, 27, 30, 32, 35, 38, 41, 44, 48, 53, 60])
"""Of 4bit-nl, by code: the value is (level - 32) * scale."""


def decode_tiles(kind: str, data: bytes, n_rows: int, n_cols: int) -> Array:
    """The f32 values [n_rows, n_cols] of a matrix in tiles of the type called `kind`.

    Written from the table and the rules of docs/format.md, section 5, and sharing no line with the
    converter. Each value is rounded to f32 as often as the engine rounds it.
    """
    n_bands, n_blocks = -(-n_rows // 16), -(-n_cols // BLOCK_COLS)
    if kind in PARTS:
        return _decode_parts(kind, data, n_bands, n_blocks)[:n_rows, :n_cols]
    tiles = np.frombuffer(data, np.uint8).reshape(n_bands * n_blocks, TILE_BYTES[kind])
    r, c = np.arange(16)[:, None], np.arange(BLOCK_COLS)[None, :]
    if kind in ("f16", "f32"):
        elements = tiles.view("<f2" if kind == "f16" else "<f4")
        values = elements[:, c * 16 + r].astype(np.float32)
    elif kind == "mxfp4":
        codes = _codes(kind, tiles[:, 32:], r, c)
        exponents = tiles[:, c // 32 * 16 + r].astype(np.float64) - 127
        with np.errstate(over="ignore"):
            values = (E2M1[codes] * 2.0**exponents).astype(np.float32)
    else:
        scales = tiles[:, :32].view("<f2")[:, :, None].astype(np.float64)
        has_min = kind in ("2bit", "3bit", "4bit")
        codes = _codes(kind, tiles[:, 64 if has_min else 32 :], r, c).astype(np.float64)
        if has_min:
            mins = tiles[:, 32:64].view("<f2")[:, :, None].astype(np.float64)
            values = (codes * scales + mins).astype(np.float32)
        else:
            zero = {"2bit-sym": 1.5, "4bit-sym": 8, "4bit-nl": 32, "8bit": 128}.get(kind, 1)
            values = ((codes - zero) * scales).astype(np.float32)
    matrix = values.reshape(n_bands, n_blocks, 16, BLOCK_COLS).transpose(0, 2, 1, 3)
    out: Array = matrix.reshape(n_bands * 16, n_blocks * BLOCK_COLS)[:n_rows, :n_cols]
    return out


# Types whose scales are of fewer than 64 columns: columns of a scale, bits of a code, zero (None:
# there is a min), columns whose tiles have their scales in common.
PARTS: dict[str, tuple[int, int, int | None, int]] = {
    "q4_0": (32, 4, 8, 64),
    "q4_1": (32, 4, None, 64),
    "q5_0": (32, 5, 16, 64),
    "q5_1": (32, 5, None, 64),
    "q8_0": (32, 8, 128, 64),
    "q4_k": (32, 4, None, 256),
    "q5_k": (32, 5, None, 256),
    "q6_k": (16, 6, 32, 256),
}


def _decode_parts(kind: str, data: bytes, n_bands: int, n_blocks: int) -> Array:
    """The f32 values of a matrix of a type in `PARTS`, padded to whole tiles."""
    part_cols, bits, zero, head_cols = PARTS[kind]
    n_tiles = head_cols // BLOCK_COLS
    heads = np.frombuffer(data, np.uint8).reshape(-1, n_tiles * TILE_BYTES[kind])
    code_bytes = 128 * bits
    head_bytes = heads.shape[1] - n_tiles * code_bytes
    r, c = np.arange(16)[:, None], np.arange(head_cols)[None, :]
    part = c // part_cols
    tiles = heads[:, head_bytes:].reshape(-1, code_bytes)
    codes = _part_codes(bits, tiles, r, np.arange(BLOCK_COLS)[None, :])
    codes = codes.reshape(len(heads), n_tiles, 16, BLOCK_COLS).transpose(0, 2, 1, 3)
    codes = codes.reshape(len(heads), 16, head_cols).astype(np.float64)
    halves = np.ascontiguousarray(heads[:, : head_bytes // 2 * 2]).view("<f2").astype(np.float64)
    if kind in ("q4_k", "q5_k"):
        scales = halves[:, r] * _six_bits(heads[:, 64:], 0, part, r)
        mins = -halves[:, 16 + r] * _six_bits(heads[:, 64:], 1, part, r)
    elif kind == "q6_k":
        scales = halves[:, r] * (heads[:, 32 + part * 16 + r].astype(np.float64) - 128)
    else:
        scales = halves[:, part * 16 + r]
        mins = halves[:, 32 + part * 16 + r] if zero is None else scales
    values = (codes * scales + mins if zero is None else (codes - zero) * scales).astype(np.float32)
    matrix = values.reshape(n_bands, -1, 16, head_cols).transpose(0, 2, 1, 3)
    out: Array = matrix.reshape(n_bands * 16, n_blocks * BLOCK_COLS)
    return out


def _six_bits(packed: Array, of_min: int, part: Array, r: Array) -> Array:
    """The integers of 6 bits, [n, 16, columns], of scales or of mins."""
    whole = packed[:, of_min * 64 + part % 4 * 16 + r].astype(np.int64)
    low = packed[:, 128 + part % 4 * 16 + r].astype(np.int64) >> (4 * of_min) & 15
    return np.where(part < 4, whole & 63, low | whole >> 6 << 4)


def _part_codes(bits: int, codes: NDArray[np.uint8], r: Array, c: Array) -> Array:
    g, j = c // 4, c % 4
    wide = codes.astype(np.int64)
    if bits == 8:
        out: Array = wide[:, g * 64 + r * 4 + j]
        return out
    out = wide[:, g % 8 * 64 + r * 4 + j] >> (g // 8 * 4) & 15
    if bits == 5:
        out = out + 16 * (wide[:, 512 + g % 2 * 64 + r * 4 + j] >> g // 2 & 1)
    if bits == 6:
        out = out + 16 * (wide[:, 512 + g % 4 * 64 + r * 4 + j] >> (2 * (g // 4)) & 3)
    return out


def _codes(kind: str, codes: NDArray[np.uint8], r: Array, c: Array) -> NDArray[np.int64]:
    """The codes [n_tiles, 16, 64] of rows `r` [16, 1] and columns `c` [1, 64] of tiles."""
    g, j = c // 4, c % 4
    found: NDArray[np.int64]
    if kind == "8bit":
        found = codes[:, g * 64 + r * 4 + j].astype(np.int64)
        return found
    if kind in ("4bit", "4bit-sym", "4bit-nl", "mxfp4"):
        found = codes[:, g % 8 * 64 + r * 4 + j].astype(np.int64) >> (g // 8 * 4) & 15
        return LEVELS[found] if kind == "4bit-nl" else found
    if kind == "ternary-dense":
        is_last = g == 15
        byte = np.where(is_last, 192 + r, g // 5 * 64 + r * 4 + j)
        power = 3 ** np.where(is_last, j, g % 5)
        found = codes[:, byte].astype(np.int64) * power % 256 * 3 >> 8
        return found
    p, b = g % 4, g // 4
    found = codes[:, p * 64 + r * 4 + j].astype(np.int64) >> (2 * b) & 3
    if kind == "3bit":
        h, i = p // 2, p % 2
        found += 4 * (codes[:, 256 + h * 64 + r * 4 + j].astype(np.int64) >> (4 * i + b) & 1)
    return found


def decode_outliers(data: bytes, n_rows: int, n_cols: int) -> Array:
    """What an outlier table adds to a matrix: f32 values [n_rows, n_cols], most of them zero.

    Written from docs/format.md, section 5, and sharing no line with the package.
    """
    out = np.zeros((n_rows, n_cols), np.float32)
    n_tile_rows = -(-n_rows // 16)
    first = np.frombuffer(data, "<u4", n_tile_rows + 1).astype(int)
    entries = np.frombuffer(data, [("step", "<u2"), ("delta", "<f2")], offset=first.nbytes // 2)
    for tile_row in range(n_tile_rows):
        position = -1
        for step, delta in entries[first[tile_row] : first[tile_row + 1]]:
            position += int(step)
            out[tile_row * 16 + position % 16, position // 16] += np.float32(delta)
    return out
