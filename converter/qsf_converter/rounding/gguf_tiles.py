"""Blocks of GGUF as tiles: the same codes, scales and mins in another order, bit by bit.

Blocks: llama.cpp's ggml-common.h. Tiles: docs/format.md, section 5.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import Dtype
from qsf_converter.rounding.tiles import BLOCK, TILE_DTYPES, TILE_ROWS, CodeArray, TileArray

_SMALL: Final = 32  # columns of a block of the types without K
_LARGE: Final = 256
_ANY_SHIFT: Final = 99  # of zeros
# The fields of a block, each with its bytes.
_FIELDS: Final[Mapping[Dtype, tuple[tuple[str, int], ...]]] = {
    Dtype.Q4_0: (("d", 2), ("low", 16)),
    Dtype.Q4_1: (("d", 2), ("m", 2), ("low", 16)),
    Dtype.Q5_0: (("d", 2), ("high", 4), ("low", 16)),
    Dtype.Q5_1: (("d", 2), ("m", 2), ("high", 4), ("low", 16)),
    Dtype.Q8_0: (("d", 2), ("low", 32)),
    Dtype.Q4_K: (("d", 2), ("m", 2), ("scales", 12), ("low", 128)),
    Dtype.Q5_K: (("d", 2), ("m", 2), ("scales", 12), ("high", 32), ("low", 128)),
    Dtype.Q6_K: (("low", 128), ("high", 64), ("scales", 16), ("d", 2)),
}


def gguf_tiles(
    dtype: Dtype, stored: NDArray[np.uint8], exponents: tuple[int, ...] = ()
) -> tuple[bytes, NDArray[np.float16]]:
    """Return the tiles of rows of blocks, and their f16 scales and mins for checking.

    ``stored`` [n_rows, bytes of a row] are the bytes of the file. Row i is multiplied by 2 to the
    power of ``exponents[i]``, which `exact_shifts` allows.
    """
    blocks = _blocks(dtype, stored)
    if exponents:
        blocks = blocks.copy()
        for name in _halves(blocks):
            scaled = np.ldexp(_half(blocks, name), np.asarray(exponents)[:, None])
            blocks[name] = scaled.astype("<f2")[..., None].view(np.uint8)
    is_large = blocks["low"].shape[-1] == _LARGE // 2
    n_rows, n_cols = len(blocks), blocks.shape[1] * (_LARGE if is_large else _SMALL)
    codes = np.zeros((-(-n_rows // TILE_ROWS) * TILE_ROWS, -(-n_cols // BLOCK) * BLOCK), np.uint8)
    codes[:n_rows, :n_cols] = (_large_codes if is_large else _small_codes)(dtype, blocks)
    heads = _heads(dtype, blocks, codes.shape[1], is_large=is_large)
    _put_codes(heads, codes)
    return heads.tobytes(), np.stack([_half(blocks, name) for name in _halves(blocks)])


def exact_shifts(
    dtype: Dtype, stored: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    blocks = _blocks(dtype, stored)
    values = np.concatenate([_half(blocks, name) for name in _halves(blocks)], axis=1)
    fractions, exponents = np.frexp(np.abs(values.astype(np.float32)))
    significands = (fractions * 2048).astype(np.int64)  # 11 bits
    lowest = np.log2(np.maximum(significands & -significands, 1)).astype(np.int64)
    is_zero = values == 0
    halvings = np.where(is_zero, _ANY_SHIFT, exponents - 11 + lowest + 24)
    doublings = np.where(is_zero, _ANY_SHIFT, 16 - exponents)
    return halvings.min(axis=1), doublings.min(axis=1)


def _blocks(dtype: Dtype, stored: NDArray[np.uint8]) -> TileArray:
    block = np.dtype([(name, "u1", (n_bytes,)) for name, n_bytes in _FIELDS[dtype]])
    return np.ascontiguousarray(stored).view(block)


def _halves(blocks: TileArray) -> tuple[str, ...]:
    return tuple(name for name in ("d", "m") if name in (blocks.dtype.names or ()))


def _half(blocks: TileArray, name: str) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[name]).view("<f2")[..., 0]


def _by_rows(values: NDArray[np.generic], n_parts: int) -> NDArray[np.generic]:
    """Values [n_rows, n, ...] as [tile rows, n / n_parts, n_parts, ..., 16 rows], padded by 0."""
    n_rows, n = values.shape[:2]
    shape = (-(-n_rows // TILE_ROWS) * TILE_ROWS, -(-n // n_parts) * n_parts, *values.shape[2:])
    padded = np.zeros(shape, values.dtype)
    padded[:n_rows, :n] = values
    split = padded.reshape(-1, TILE_ROWS, shape[1] // n_parts, n_parts, *shape[2:])
    return np.moveaxis(split, 1, -1)


def _heads(dtype: Dtype, blocks: TileArray, n_cols: int, *, is_large: bool) -> TileArray:
    n_tile_rows = -(-len(blocks) // TILE_ROWS)
    heads = np.zeros((n_tile_rows, n_cols // (_LARGE if is_large else BLOCK)), TILE_DTYPES[dtype])
    names = blocks.dtype.names or ()
    d = _half(blocks, "d")
    if is_large:
        heads["d"] = _by_rows(d, 1)[:, :, 0]
        if "m" in names:
            heads["d_min"] = _by_rows(_half(blocks, "m"), 1)[:, :, 0]
        scales = blocks["scales"] if dtype != Dtype.Q6_K else blocks["scales"] ^ np.uint8(128)
        heads["integers"] = _by_rows(scales, 1)[:, :, 0]
        return heads
    heads["scales"] = _by_rows(d, 2)
    if "m" in names:
        heads["mins"] = _by_rows(_half(blocks, "m"), 2)
    return heads


def _small_codes(dtype: Dtype, blocks: TileArray) -> CodeArray:
    low: CodeArray = blocks["low"]
    if dtype == Dtype.Q8_0:
        biased: CodeArray = low ^ np.uint8(128)
        return biased.reshape(len(blocks), -1)
    codes: CodeArray = np.concatenate((low & 15, low >> 4), axis=-1)  # columns 0 .. 15, 16 .. 31
    if dtype in (Dtype.Q5_0, Dtype.Q5_1):
        codes |= np.unpackbits(blocks["high"], axis=-1, bitorder="little") << 4
    return codes.reshape(len(blocks), -1)


def _large_codes(dtype: Dtype, blocks: TileArray) -> CodeArray:
    n_rows, n_blocks = blocks.shape
    codes = np.empty((n_rows, n_blocks, 8, 32), np.uint8)  # by 32 columns
    if dtype == Dtype.Q6_K:
        low = blocks["low"].reshape(n_rows, n_blocks, 2, 2, 32)
        high = blocks["high"].reshape(n_rows, n_blocks, 2, 1, 32)
        quarters = codes.reshape(n_rows, n_blocks, 2, 4, 32)
        quarters[..., :2, :] = low & 15
        quarters[..., 2:, :] = low >> 4
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        quarters |= (high >> shifts & 3) << 4
        return codes.reshape(n_rows, -1)
    low = blocks["low"].reshape(n_rows, n_blocks, 4, 32)
    codes[:, :, 0::2] = low & 15
    codes[:, :, 1::2] = low >> 4
    if dtype == Dtype.Q5_K:
        high = blocks["high"][:, :, None]
        codes |= (high >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return codes.reshape(n_rows, -1)


def _put_codes(heads: TileArray, codes: CodeArray) -> None:
    """Pack codes [rows, cols], padded to whole tiles, into the planes of the tiles."""
    n_tile_rows = len(codes) // TILE_ROWS
    quads = codes.reshape(n_tile_rows, TILE_ROWS, -1, 16, 4).view("<u4")[..., 0]
    words = quads.transpose(0, 2, 3, 1)  # [tile rows, blocks, groups, rows] of four codes each
    to = heads["tiles"] if "tiles" in (heads.dtype.names or ()) else heads
    words = words.reshape(*to.shape, 16, TILE_ROWS)
    if to["codes"].shape[-2] == 16:
        to["codes"] = words
        return
    nibbles = words & 0x0F0F0F0F
    to["codes"] = nibbles[..., :8, :] | nibbles[..., 8:, :] << 4
    for name, n_planes, mask in (("fifths", 2, 0x01010101), ("highs", 4, 0x03030303)):
        if name not in (to.dtype.names or ()):
            continue
        for g in range(16):
            high = words[..., g, :] >> 4 & mask
            to[name][..., g % n_planes, :] |= high << (g // n_planes * n_planes // 2)
