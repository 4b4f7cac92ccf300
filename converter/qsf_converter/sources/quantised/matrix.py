"""Quantised matrices of a checkpoint, as families see them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    Float32Array,
    RawArray,
    SourceTensor,
    WrappedCheckpoint,
)
from qsf_converter.sources.quantised.stored import EXPONENTS, FLOATS, FP8, POWERS, Stored

Rows = Callable[[int, int], RawArray]
SCALES: Final = (*FLOATS, EXPONENTS, "F8_E4M3", "U8")  # U8: the exponents of E8M0

# How other engines round activations and caches; this one measures that itself.
_OF_ACTIVATIONS: Final = re.compile(
    r"\.((input|activation|output|[qkv]|kv)(_activation)?_(scale|zero_point|global_scale)"
    r"|input_scale_ub)$"
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix made of several stored tensors.

    ``type`` is for reports. ``read`` returns rows; ``blocks``, if given, reads them as bytes of the
    type, which is one that files keep.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    parts: tuple[str, ...]
    read: Rows
    blocks: Rows | None = None


class DequantisedCheckpoint(WrappedCheckpoint):
    """Another checkpoint with matrices instead of their parts; a ``Checkpoint``."""

    def __init__(self, stored: Checkpoint, matrices: Iterable[Matrix]) -> None:
        super().__init__(stored)
        self._matrices = {matrix.name: matrix for matrix in matrices}
        parts = {part for matrix in self._matrices.values() for part in matrix.parts}
        self._tensors = {
            name: tensor
            for name, tensor in stored.tensors.items()
            if name not in parts and not _OF_ACTIVATIONS.search(name)
        }
        for name, matrix in self._matrices.items():
            if name in self._tensors:
                raise QsfConversionError(f"tensor {name} is stored twice, quantised and as it is")
            n_bytes = sum(stored.tensors[part].n_bytes for part in matrix.parts)
            self._tensors[name] = SourceTensor(name, matrix.shape, matrix.type, n_bytes)

    @property
    def matrices(self) -> Collection[Matrix]:
        """The quantised matrices."""
        return self._matrices.values()

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows [start, stop); see ``Checkpoint.read_rows``."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._stored.read_rows(name, start, stop)
        n_rows = self._tensors[name].n_rows
        if not 0 <= start <= stop <= n_rows:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has {n_rows}")
        if start == stop:
            return np.empty((0, matrix.shape[-1]), np.float32)
        return matrix.read(start, stop)

    def read_stored(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows as bytes: of a matrix those of its kept type, else of its values."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._stored.read_stored(name, start, stop)
        rows = (matrix.blocks or matrix.read)(start, stop)
        return np.ascontiguousarray(rows).view(np.uint8).reshape(stop - start, -1)


def scales_of(
    stored: Stored,
    name: str,
    shape: tuple[int, ...],
    *,
    block: Sequence[int] = (),
    groups: NDArray[np.int64] | None = None,
    is_scale: bool = True,
) -> Rows:
    """Return a function of rows [start, stop) of a matrix: the numbers of the blocks that they are
    in, [n, n_cols] or [n, 1].

    ``block``: the rows and columns of one; by default blocks are equal parts. ``groups``: the block
    of each column. Bytes are exponents of a scale, and numbers of a zero.

    Raises QsfConversionError if the shape is not one of blocks.
    """
    tensor = stored.tensors[name]
    n_rows, n_cols = shape[-2:]
    grid = tensor.shape
    if math.prod(grid) == 1:
        grid = (1,) * len(shape)
    elif len(grid) == len(shape) - 1:
        grid = (*grid, 1) if len(shape) == 2 else (*grid, 1, 1)[: len(shape)]
    n_high, n_wide = grid[-2:] if len(grid) > 1 else (0, 0)
    high = _block(n_rows, n_high, block[0] if block else 0)
    wide = 1 if groups is not None else _block(n_cols, n_wide, block[-1] if block else 0)
    leading = grid[:-2]
    if not high or not wide or (leading != shape[:-2] and math.prod(grid) != 1):
        raise QsfConversionError(
            f"tensor {name} of shape {list(tensor.shape)} has no numbers of blocks of a matrix "
            f"{list(shape)}" + (f" in blocks of {list(block)}" if block else "")
        )
    n_grid_rows = math.prod(grid[:-1])

    def numbers(first: int, last: int) -> Float32Array:
        if tensor.n_rows == n_grid_rows:
            rows = stored.rows(name, first, last)
        else:
            rows = stored.columns(name, first * n_wide, last * n_wide).reshape(-1, n_wide)
        if is_scale and tensor.dtype == "U8":
            rows = POWERS[rows]
        found: Float32Array = rows.astype(np.float32, copy=False)
        return found

    def read(start: int, stop: int) -> RawArray:
        row = np.arange(start, stop)
        at = 0 * row
        if n_grid_rows > 1:
            at = row // n_rows * n_high + row % n_rows // high
        found: RawArray = numbers(int(at[0]), int(at[-1]) + 1)[at - at[0]]
        if groups is not None:
            return found[:, groups]
        return found if n_wide == 1 else np.repeat(found, wide, axis=1)[:, :n_cols]

    return read


def _block(size: int, n_blocks: int, stated: int) -> int:
    """Return the size of a block; 0: there is none that fits."""
    if stated > 0 and -(-size // stated) == n_blocks:
        return stated
    return size // n_blocks if n_blocks and size % n_blocks == 0 else 0


def scaled(
    stored: Stored,
    name: str,
    of: SourceTensor,
    parts: tuple[str, ...],
    *,
    block: Sequence[int] = (),
    kind: str | None = None,
) -> Matrix:
    """Return the matrix ``name`` whose values ``of``, minus a zero if there is one, times a scale.

    ``parts``: the tensors of the values, of the scales and, perhaps, of the zeros.
    """
    stored.need(parts[1], SCALES, of=name)
    scale = scales_of(stored, parts[1], of.shape, block=block)
    zero = None
    if len(parts) > 2:
        zero = scales_of(stored, parts[2], of.shape, block=block, is_scale=False)

    def read(start: int, stop: int) -> Float32Array:
        values: Float32Array = stored.rows(of.name, start, stop).astype(np.float32, copy=False)
        if zero is not None:
            values = values - zero(start, stop)
        return np.asarray(values * scale(start, stop))

    return Matrix(name, of.shape, kind or ("FP8" if of.dtype in FP8 else "INT8"), parts, read)
