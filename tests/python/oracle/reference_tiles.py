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
    "mxfp4": 544,
    "ternary": 288,
    "ternary-dense": 240,
    "8bit": 1056,
    "f16": 2048,
    "f32": 4096,
}
"""Bytes of a tile of 16 rows and 64 columns (docs/format.md, section 5)."""


# The table of the OCP's specification of microscaling formats, version 1.0, but for -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_tiles(kind: str, data: bytes, n_rows: int, n_cols: int) -> Array:
    """The f32 values [n_rows, n_cols] of a matrix in tiles of the type called `kind`.

    Written from the table and the rules of docs/format.md, section 5, and sharing no line with the
    converter. Each value is rounded to f32 as often as the engine rounds it.
    """
    n_bands, n_blocks = -(-n_rows // 16), -(-n_cols // BLOCK_COLS)
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
            zero = {"2bit-sym": 1.5, "4bit-sym": 8, "8bit": 128}.get(kind, 1)
            values = ((codes - zero) * scales).astype(np.float32)
    matrix = values.reshape(n_bands, n_blocks, 16, BLOCK_COLS).transpose(0, 2, 1, 3)
    out: Array = matrix.reshape(n_bands * 16, n_blocks * BLOCK_COLS)[:n_rows, :n_cols]
    return out


def _codes(kind: str, codes: NDArray[np.uint8], r: Array, c: Array) -> NDArray[np.int64]:
    """The codes [n_tiles, 16, 64] of rows `r` [16, 1] and columns `c` [1, 64] of tiles."""
    g, j = c // 4, c % 4
    found: NDArray[np.int64]
    if kind == "8bit":
        found = codes[:, g * 64 + r * 4 + j].astype(np.int64)
        return found
    if kind in ("4bit", "4bit-sym", "mxfp4"):
        found = codes[:, g % 8 * 64 + r * 4 + j].astype(np.int64) >> (g // 8 * 4) & 15
        return found
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
