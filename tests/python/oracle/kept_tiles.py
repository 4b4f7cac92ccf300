"""What tiles of a GGUF file's types say, in plain numpy from docs/format.md, section 5.

The converter makes these tiles and never reads them. Other types are read by the converter, which
naive_tiles judges, one value at a time.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import Dtype, dtype_name
from qsf_converter.rounding.tiles import dequantise_tiles, tile_bytes

Array = NDArray[Any]
COLS = 64  # of a tile

# Columns of a scale, bits of a code, zero (None: there is a min), columns whose tiles have their
# scales in common.
PARTS: dict[str, tuple[int, int, int | None, int]] = {
    "q4_0": (32, 4, 8, 64),
    "q4_1": (32, 4, None, 64),
    "q5_0": (32, 5, 16, 64),
    "q5_1": (32, 5, None, 64),
    "q8_0": (32, 8, 128, 64),
    "q4_k": (32, 4, None, 256),
    "q5_k": (32, 5, None, 256),
    "q6_k": (16, 6, 32, 256),
    "q2_k": (16, 2, None, 256),
    "q3_k": (16, 3, 4, 256),
    "iq4_nl": (32, 4, 0, 64),
    "iq4_xs": (32, 4, 0, 256),
}

IQ4_LEVELS = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float64
)


def decode_tiles(dtype: int, data: bytes, n_rows: int, n_cols: int) -> Array:
    """Return the f32 values [n_rows, n_cols] of a matrix in tiles, rounded as the engine rounds."""
    kind = dtype_name(dtype)
    if kind not in PARTS:
        return dequantise_tiles(dtype, data, n_rows, n_cols)
    n_bands, n_blocks = -(-n_rows // 16), -(-n_cols // COLS)
    part_cols, bits, zero, head_cols = PARTS[kind]
    n_tiles = head_cols // COLS
    heads = np.frombuffer(data, np.uint8).reshape(-1, n_tiles * tile_bytes(Dtype(dtype), 16, COLS))
    code_bytes = 128 * bits
    head_bytes = heads.shape[1] - n_tiles * code_bytes
    r, c = np.arange(16)[:, None], np.arange(head_cols)[None, :]
    part = c // part_cols
    tiles = heads[:, head_bytes:].reshape(-1, code_bytes)
    codes = _codes(bits, tiles, r, np.arange(COLS)[None, :])
    codes = codes.reshape(len(heads), n_tiles, 16, COLS).transpose(0, 2, 1, 3)
    codes = codes.reshape(len(heads), 16, head_cols).astype(np.float64)
    if kind.startswith("iq4"):
        codes = IQ4_LEVELS[codes.astype(int)]
    halves = np.ascontiguousarray(heads[:, : head_bytes // 2 * 2]).view("<f2").astype(np.float64)
    if kind in ("q4_k", "q5_k"):
        scales = halves[:, r] * _six_bits(heads[:, 64:], 0, part, r)
        mins = -halves[:, 16 + r] * _six_bits(heads[:, 64:], 1, part, r)
    elif kind == "q2_k":
        integers = heads[:, 64 + part * 16 + r].astype(np.int64)
        scales, mins = halves[:, r] * (integers & 15), -halves[:, 16 + r] * (integers >> 4)
    elif kind in ("q3_k", "q6_k", "iq4_xs"):
        scales = halves[:, r] * (heads[:, 32 + part * 16 + r].astype(np.float64) - 128)
    else:
        scales = halves[:, part * 16 + r]
        mins = halves[:, 32 + part * 16 + r] if zero is None else scales
    values = (codes * scales + mins if zero is None else (codes - zero) * scales).astype(np.float32)
    matrix = values.reshape(n_bands, -1, 16, head_cols).transpose(0, 2, 1, 3)
    out: Array = matrix.reshape(n_bands * 16, n_blocks * COLS)[:n_rows, :n_cols]
    return out


def _six_bits(packed: Array, of_min: int, part: Array, r: Array) -> Array:
    """The integers of 6 bits, [n, 16, columns], of scales or of mins."""
    whole = packed[:, of_min * 64 + part % 4 * 16 + r].astype(np.int64)
    low = packed[:, 128 + part % 4 * 16 + r].astype(np.int64) >> (4 * of_min) & 15
    return np.where(part < 4, whole & 63, low | whole >> 6 << 4)


def _codes(bits: int, codes: NDArray[np.uint8], r: Array, c: Array) -> Array:
    g, j = c // 4, c % 4
    wide = codes.astype(np.int64)
    if bits == 8:
        out: Array = wide[:, g * 64 + r * 4 + j]
        return out
    if bits < 4:
        out = wide[:, g % 4 * 64 + r * 4 + j] >> (g // 4 * 2) & 3
        thirds = wide[:, (256 if bits == 3 else 0) + g % 4 // 2 * 64 + r * 4 + j]
        return out + 4 * (thirds >> (4 * (g % 2) + g // 4) & 1) if bits == 3 else out
    out = wide[:, g % 8 * 64 + r * 4 + j] >> (g // 8 * 4) & 15
    if bits == 5:
        out = out + 16 * (wide[:, 512 + g % 2 * 64 + r * 4 + j] >> g // 2 & 1)
    if bits == 6:
        out = out + 16 * (wide[:, 512 + g % 4 * 64 + r * 4 + j] >> (2 * (g // 4)) & 3)
    return out
