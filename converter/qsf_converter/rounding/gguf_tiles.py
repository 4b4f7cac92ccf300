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
from qsf.native.quantise import repack_rows
from qsf_converter.rounding.tiles import tile_bytes

_ANY_SHIFT: Final = 99  # of zeros
# The bytes of a block, its columns, and where its f16 scale and min are.
_BLOCKS: Final[Mapping[Dtype, tuple[int, int, tuple[int, ...]]]] = {
    Dtype.Q4_0: (18, 32, (0,)),
    Dtype.Q4_1: (20, 32, (0, 2)),
    Dtype.Q5_0: (22, 32, (0,)),
    Dtype.Q5_1: (24, 32, (0, 2)),
    Dtype.Q8_0: (34, 32, (0,)),
    Dtype.Q4_K: (144, 256, (0, 2)),
    Dtype.Q5_K: (176, 256, (0, 2)),
    Dtype.Q6_K: (210, 256, (208,)),
}


def gguf_tiles(
    dtype: Dtype, stored: NDArray[np.uint8], exponents: tuple[int, ...] = ()
) -> tuple[bytes, NDArray[np.float16]]:
    """Return the tiles of rows of blocks, and their f16 scales and mins for checking.

    ``stored`` [n_rows, bytes of a row] are the bytes of the file. Row i is multiplied by 2 to the
    power of ``exponents[i]``, which `exact_shifts` allows.
    """
    n_bytes, n_cols, _ = _BLOCKS[dtype]
    halves = _halves(dtype, stored)
    if exponents:
        halves = np.ldexp(halves, np.asarray(exponents)[:, None]).astype("<f2")
        stored = _with_halves(dtype, stored, halves)
    n_rows, n_cols = len(stored), stored.shape[1] // n_bytes * n_cols
    tiles = np.empty(tile_bytes(dtype, n_rows, n_cols), np.uint8)
    repack_rows(dtype, stored, n_cols, tiles)
    return tiles.tobytes(), halves


def exact_shifts(
    dtype: Dtype, stored: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    values = np.concatenate(_halves(dtype, stored), axis=1)
    fractions, exponents = np.frexp(np.abs(values.astype(np.float32)))
    significands = (fractions * 2048).astype(np.int64)  # 11 bits
    lowest = np.log2(np.maximum(significands & -significands, 1)).astype(np.int64)
    is_zero = values == 0
    halvings = np.where(is_zero, _ANY_SHIFT, exponents - 11 + lowest + 24)
    doublings = np.where(is_zero, _ANY_SHIFT, 16 - exponents)
    return halvings.min(axis=1), doublings.min(axis=1)


def _halves(dtype: Dtype, stored: NDArray[np.uint8]) -> NDArray[np.float16]:
    """Return the scales, then the mins if there are any, [1 or 2, n_rows, n_blocks]."""
    n_bytes, _, places = _BLOCKS[dtype]
    blocks = stored.reshape(len(stored), -1, n_bytes)
    parts = [np.ascontiguousarray(blocks[..., at : at + 2]) for at in places]
    return np.stack([part.view("<f2")[..., 0] for part in parts])


def _with_halves(
    dtype: Dtype, stored: NDArray[np.uint8], halves: NDArray[np.float16]
) -> NDArray[np.uint8]:
    n_bytes, _, places = _BLOCKS[dtype]
    changed: NDArray[np.uint8] = stored.copy()
    blocks = changed.reshape(len(stored), -1, n_bytes)
    for at, part in zip(places, halves, strict=True):
        blocks[..., at : at + 2] = np.ascontiguousarray(part)[..., None].view(np.uint8)
    return changed
