"""The bytes of a tile: where codes, scales and mins lie (docs/format.md, section 5).

A tile is 16 rows x 64 columns. Its columns form 16 groups of four neighbours; the four codes of a
row and group are the bytes of one u32, so the codes of a plane are shifted and joined four at a
time. The C library writes tiles (csrc/quantise/quantise.c); this module reads them. ``quantisers``
chooses codes, scales and mins.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import Dtype, Layout, tensor_bytes
from qsf.native.quantise import repack_rows
from qsf_converter.sources.checkpoint import MXFP4_COLS, MXFP4_VALUES, RawArray

Float32Array = NDArray[np.float32]
CodeArray = NDArray[np.uint8]
TileArray = NDArray[np.void]

TILE_ROWS: Final = 16
BLOCK: Final = 64

_HALVES = ("<f2", (TILE_ROWS,))


def _plane(n: int) -> tuple[str, tuple[int, int]]:
    """The type of n planes of 64 bytes: the codes of 16 rows and one group are 16 u32."""
    return "<u4", (n, TILE_ROWS)


def _head(*fields: tuple[str, str, tuple[int, ...]]) -> np.dtype[np.void]:
    tile = np.dtype([("codes", *_plane(8)), *fields])
    return np.dtype([*_HEAD, ("tiles", tile, (4,))])


_PARTS = ("<f2", (2, TILE_ROWS))  # of 32 columns each
_FIFTHS = ("fifths", *_plane(2))
_HEAD = (("d", *_HALVES), ("d_min", *_HALVES), ("integers", "u1", (12, TILE_ROWS)))

# The bytes of one tile, or of four.
TILE_DTYPES: Final[dict[int, np.dtype[np.void]]] = {
    Dtype.Q2_SYM: np.dtype([("scales", *_HALVES), ("codes", *_plane(4))]),
    Dtype.Q2: np.dtype([("scales", *_HALVES), ("mins", *_HALVES), ("codes", *_plane(4))]),
    Dtype.Q3: np.dtype(
        [("scales", *_HALVES), ("mins", *_HALVES), ("codes", *_plane(4)), ("thirds", *_plane(2))]
    ),
    Dtype.Q4: np.dtype([("scales", *_HALVES), ("mins", *_HALVES), ("codes", *_plane(8))]),
    Dtype.Q4_SYM: np.dtype([("scales", *_HALVES), ("codes", *_plane(8))]),
    Dtype.Q4_NL: np.dtype([("scales", *_HALVES), ("codes", *_plane(8))]),
    Dtype.MXFP4: np.dtype([("scales", "u1", (2, TILE_ROWS)), ("codes", *_plane(8))]),
    Dtype.TERNARY: np.dtype([("scales", *_HALVES), ("codes", *_plane(4))]),
    Dtype.TERNARY_DENSE: np.dtype(
        [("scales", *_HALVES), ("codes", *_plane(3)), ("last", "u1", (TILE_ROWS,))]
    ),
    Dtype.Q8: np.dtype([("scales", *_HALVES), ("codes", *_plane(16))]),
    Dtype.Q4_0: np.dtype([("scales", *_PARTS), ("codes", *_plane(8))]),
    Dtype.Q4_1: np.dtype([("scales", *_PARTS), ("mins", *_PARTS), ("codes", *_plane(8))]),
    Dtype.Q5_0: np.dtype([("scales", *_PARTS), ("codes", *_plane(8)), _FIFTHS]),
    Dtype.Q5_1: np.dtype([("scales", *_PARTS), ("mins", *_PARTS), ("codes", *_plane(8)), _FIFTHS]),
    Dtype.Q8_0: np.dtype([("scales", *_PARTS), ("codes", *_plane(16))]),
    Dtype.Q4_K: _head(),
    Dtype.Q5_K: _head(_FIFTHS),
    Dtype.Q6_K: np.dtype(
        [
            ("d", *_HALVES),
            ("integers", "u1", (16, TILE_ROWS)),
            ("tiles", [("codes", *_plane(8)), ("highs", *_plane(4))], (4,)),
        ]
    ),
    Dtype.F16: np.dtype([("values", "<f2", (BLOCK, TILE_ROWS))]),
    Dtype.F32: np.dtype([("values", "<f4", (BLOCK, TILE_ROWS))]),
}

# By code of 4bit-nl: the weight is (level - 32) * scale.
LEVELS: Final = np.array([0, 7, 13, 17, 21, 24, 27, 30, 32, 35, 38, 41, 44, 48, 53, 60], np.uint8)

# A code c of a symmetric type means (c - centre) * scale.
CENTRES: Final[dict[int, float]] = {
    Dtype.Q2_SYM: 1.5,
    Dtype.Q4_SYM: 8,
    Dtype.Q4_NL: 32,
    Dtype.Q5_0: 16,
    Dtype.TERNARY: 1,
    Dtype.TERNARY_DENSE: 1,
    Dtype.Q8: 128,
}


def tile_bytes(dtype: int, n_rows: int, n_cols: int) -> int:
    return tensor_bytes(n_rows, n_cols, dtype, Layout.TILES)


def bits_per_weight(dtype: int) -> float:
    """Bits of a weight in whole tiles, with its share of scales."""
    return 8 * tile_bytes(dtype, TILE_ROWS, BLOCK) / (TILE_ROWS * BLOCK)


def dequantise_tiles(dtype: int, data: bytes, n_rows: int, n_cols: int) -> Float32Array:
    n_tile_rows, n_blocks = -(-n_rows // TILE_ROWS), -(-n_cols // BLOCK)
    tiles = np.frombuffer(data, TILE_DTYPES[dtype]).reshape(n_tile_rows, n_blocks)
    if dtype in (Dtype.F16, Dtype.F32):
        # [tile row, block, col, row] -> [tile row, row, block, col]
        values = tiles["values"].transpose(0, 3, 1, 2).astype(np.float32)
    elif dtype == Dtype.MXFP4:
        scales = np.ldexp(np.float32(1), tiles["scales"].astype(np.int32) - 127)
        # [tile row, block, half, row] -> [tile row, row, block, half]
        scales = np.repeat(scales.transpose(0, 3, 1, 2), MXFP4_COLS, axis=-1)
        with np.errstate(over="ignore"):
            values = MXFP4_VALUES[_unpack(dtype, tiles)] * scales
    else:
        codes = _unpack(dtype, tiles).astype(np.float32)
        scales = tiles["scales"].reshape(n_tile_rows, n_blocks, -1, TILE_ROWS)
        # [tile row, block, part, row] -> [tile row, row, block, col]
        scales = scales.transpose(0, 3, 1, 2).astype(np.float32)
        scales = np.repeat(scales, BLOCK // scales.shape[-1], axis=-1)
        if dtype in CENTRES:
            values = (codes - np.float32(CENTRES[dtype])) * scales
        else:
            mins = tiles["mins"].transpose(0, 2, 1)[..., None].astype(np.float32)
            values = codes * scales + mins
    shape = (n_tile_rows * TILE_ROWS, n_blocks * BLOCK)
    return np.ascontiguousarray(values.reshape(shape)[:n_rows, :n_cols])


def mxfp4_tiles(raw: RawArray) -> bytes:
    """Return the tiles of a checkpoint's MXFP4 blocks [n_rows, n_blocks], bit by bit."""
    n_rows, n_halves = raw.shape
    n_tile_rows, n_blocks = -(-n_rows // TILE_ROWS), -(-n_halves // 2)
    padded = np.zeros((n_tile_rows * TILE_ROWS, 2 * n_blocks), raw.dtype)
    padded[:n_rows, :n_halves] = raw
    shape = (n_tile_rows, TILE_ROWS, n_blocks, 2)
    tiles = np.empty((n_tile_rows, n_blocks), TILE_DTYPES[Dtype.MXFP4])
    tiles["scales"] = padded["scale"].reshape(shape).transpose(0, 2, 3, 1)
    pairs = padded["codes"].reshape(*shape, 8, 2)  # [..., groups, two tiles of four columns]
    codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*shape, 8, 4)
    planes = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(0, 2, 3, 1, 4)
    tiles["codes"] = np.ascontiguousarray(planes).view("<u4")[..., 0]
    return tiles.tobytes()


def _unpack(dtype: int, tiles: TileArray) -> CodeArray:
    """The codes of ``tiles`` [tile rows, blocks], as [tile row, row, block, 64]; of 4bit-nl the
    levels."""
    n_tile_rows, n_blocks = tiles.shape
    planes = tiles["codes"].transpose(2, 0, 1, 3)  # [planes, tile rows, blocks, 16 rows]
    groups = np.empty((16, n_tile_rows, n_blocks, TILE_ROWS), "<u4")
    if dtype == Dtype.Q8:
        groups[:] = planes
    elif dtype in (Dtype.Q4, Dtype.Q4_SYM, Dtype.Q4_NL, Dtype.MXFP4, Dtype.Q5_0):
        groups[:8] = planes & 0x0F0F0F0F
        groups[8:] = planes >> 4 & 0x0F0F0F0F
        if dtype == Dtype.Q5_0:
            fifths = tiles["fifths"].transpose(2, 0, 1, 3)
            for g in range(16):
                groups[g] |= (fifths[g % 2] >> g // 2 & 0x01010101) << 4
    elif dtype == Dtype.TERNARY_DENSE:
        trits = np.ascontiguousarray(planes).view(np.uint8)
        for k in range(5):
            groups[k:15:5] = _trit(trits, k).view("<u4")
        last = [_trit(tiles["last"], k) for k in range(4)]
        groups[15] = np.ascontiguousarray(np.stack(last, axis=-1)).view("<u4")[..., 0]
    else:
        for b in range(4):
            groups[4 * b : 4 * b + 4] = planes >> (2 * b) & 0x03030303
        if dtype == Dtype.Q3:
            thirds = tiles["thirds"].transpose(2, 0, 1, 3)
            for g in range(16):
                h, i, b = g // 2 % 2, g % 2, g // 4
                groups[g] |= (thirds[h] >> (4 * i + b) & 0x01010101) << 2
    codes = np.ascontiguousarray(groups.transpose(1, 3, 2, 0)).view(np.uint8)
    return LEVELS[codes] if dtype == Dtype.Q4_NL else codes


def _trit(dense: CodeArray, k: int) -> CodeArray:
    """Digit k, counted from 0, of the fraction that each byte represents."""
    fraction = dense * np.uint8(3**k)  # modulo 256
    digit: CodeArray = (fraction.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digit


# ---- blocks of GGUF: the same codes, scales and mins in another order, bit by bit ----

_ANY_SHIFT: Final = 99  # of zeros
# llama.cpp's ggml-common.h: the bytes of a block, its columns, and where its f16 scale and min are.
_BLOCKS: Final[Mapping[Dtype, tuple[int, int, tuple[int, ...]]]] = {
    Dtype.Q4_0: (18, 32, (0,)),
    Dtype.Q4_1: (20, 32, (0, 2)),
    Dtype.Q5_0: (22, 32, (0,)),
    Dtype.Q5_1: (24, 32, (0, 2)),
    Dtype.Q8_0: (34, 32, (0,)),
    Dtype.Q4_K: (144, 256, (0, 2)),
    Dtype.Q5_K: (176, 256, (0, 2)),
    Dtype.Q6_K: (210, 256, (208,)),
    Dtype.Q2_K: (84, 256, (80, 82)),
    Dtype.Q3_K: (110, 256, (108,)),
    Dtype.IQ4_NL: (18, 32, (0,)),
    Dtype.IQ4_XS: (136, 256, (0,)),
}


def gguf_tiles(
    dtype: Dtype, stored: CodeArray, exponents: tuple[int, ...] = ()
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


def exact_shifts(dtype: Dtype, stored: CodeArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    values = np.concatenate(_halves(dtype, stored), axis=1)
    fractions, exponents = np.frexp(np.abs(values.astype(np.float32)))
    significands = (fractions * 2048).astype(np.int64)  # 11 bits
    lowest = np.log2(np.maximum(significands & -significands, 1)).astype(np.int64)
    is_zero = values == 0
    halvings = np.where(is_zero, _ANY_SHIFT, exponents - 11 + lowest + 24)
    doublings = np.where(is_zero, _ANY_SHIFT, 16 - exponents)
    return halvings.min(axis=1), doublings.min(axis=1)


def _halves(dtype: Dtype, stored: CodeArray) -> NDArray[np.float16]:
    """Return the scales, then the mins if there are any, [1 or 2, n_rows, n_blocks]."""
    n_bytes, _, places = _BLOCKS[dtype]
    blocks = stored.reshape(len(stored), -1, n_bytes)
    parts = [np.ascontiguousarray(blocks[..., at : at + 2]) for at in places]
    return np.stack([part.view("<f2")[..., 0] for part in parts])


def _with_halves(dtype: Dtype, stored: CodeArray, halves: NDArray[np.float16]) -> CodeArray:
    n_bytes, _, places = _BLOCKS[dtype]
    changed: CodeArray = stored.copy()
    blocks = changed.reshape(len(stored), -1, n_bytes)
    for at, part in zip(places, halves, strict=True):
        blocks[..., at : at + 2] = np.ascontiguousarray(part)[..., None].view(np.uint8)
    return changed
