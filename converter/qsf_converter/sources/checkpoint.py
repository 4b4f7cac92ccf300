"""The interface of a checkpoint, the same for every file format.

A checkpoint is a set of named tensors that are read in ranges of rows, so callers hold a whole
tensor only if they need it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.layout import Dtype

Float32Array = NDArray[np.float32]
RawArray = NDArray[Any]

# MXFP4 of the OCP's microscaling formats: blocks of 32 numbers of E2M1 with a scale of E8M0.
MXFP4: Final = "MXFP4"  # the type of a tensor
MXFP4_COLS: Final = 32
MXFP4_BLOCK: Final = np.dtype([("scale", "u1"), ("codes", "u1", (MXFP4_COLS // 2,))])
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES: Final = np.array((*_MAGNITUDES, *(0.0 - v for v in _MAGNITUDES)), np.float32)
MXFP4_OVERFLOWING: Final = 253  # from this scale on values may overflow f32; 255 is NaN

# GGUF's types that are kept, by GGUF's names.
_KEPT: Final = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
KEPT: Final[Mapping[str, Dtype]] = {name: Dtype[name] for name in _KEPT.split()}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # "F32", "F16", "BF16", or another name of the safetensors format
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """The product of all axes but the last; 1 for a vector, which is read as one row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.n_rows if self.n_rows else 0


class Checkpoint(Protocol):
    """Named tensors, read lazily. Not safe to use from two threads at once."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """All tensors by name."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold the weights."""

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows [start, stop) of a matrix, or a vector as row 0: [stop - start, n_cols].

        The array holds the stored numbers; ``to_float32`` converts them. Those of MXFP4
        are blocks of 32 columns, [stop - start, n_cols / 32] of ``MXFP4_BLOCK``: the even columns
        are the low halves of the bytes. Raises QsfIOError if the system refuses,
        QsfConversionError for a type other than these, F32, F16 and BF16.
        """

    def read_stored(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows [start, stop) as the bytes that store them: [stop - start, row_bytes].

        Raises QsfIOError when the system refuses.
        """

    def digest(self) -> str:
        """SHA-256 over name, type, shape and bytes of all tensors that were read completely.

        It does not depend on the distribution of tensors over files, nor on their order.
        """

    def close(self) -> None:
        """Close the files."""


Rows = Callable[[int, int], RawArray]  # rows [start, stop) of a matrix


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix made of several stored tensors, its ``parts``.

    ``type`` is for reports. ``read`` returns rows. If a file can keep the matrix, ``kept`` is the
    type and ``blocks`` reads rows of its blocks.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    parts: Sequence[str]
    read: Rows
    kept: str | None = None
    blocks: Rows | None = None


class DerivedCheckpoint:
    """A ``Checkpoint`` made of another one: matrices take the place of their parts.

    ``is_left_out`` names further tensors that are not read.
    """

    def __init__(
        self,
        stored: Checkpoint,
        matrices: Iterable[Matrix],
        is_left_out: Callable[[str], object] = lambda _name: False,
    ) -> None:
        self._stored = stored
        self.matrices = {matrix.name: matrix for matrix in matrices}
        parts = {part for matrix in self.matrices.values() for part in matrix.parts}
        self._tensors: dict[str, SourceTensor] = {}
        for name, tensor in stored.tensors.items():
            if name in self.matrices and name not in parts:
                raise QsfConversionError(f"tensor {name} is stored twice, quantised and as it is")
            if name in self.matrices or not (name in parts or is_left_out(name)):
                self._tensors[name] = tensor
        for name, matrix in self.matrices.items():
            n_bytes = sum(stored.tensors[part].n_bytes for part in matrix.parts)
            kind = matrix.kept or matrix.type
            self._tensors[name] = SourceTensor(name, matrix.shape, kind, n_bytes)

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._stored.paths

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        matrix = self.matrices.get(name)
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
        matrix = self.matrices.get(name)
        if matrix is None:
            return self._stored.read_stored(name, start, stop)
        rows = (matrix.blocks or matrix.read)(start, stop)
        return np.ascontiguousarray(rows).view(np.uint8).reshape(stop - start, -1)

    def digest(self) -> str:
        """SHA-256 of the tensors as they are stored; see ``Checkpoint.digest``."""
        return self._stored.digest()

    def close(self) -> None:
        self._stored.close()


def to_float32(raw: RawArray) -> Float32Array:
    """Return stored numbers as f32; u16 is bf16, the upper half of an f32.

    MXFP4 blocks [n_rows, n_blocks] become [n_rows, 32 * n_blocks]; a scale of NaN makes them all
    NaN.
    """
    if raw.dtype == MXFP4_BLOCK:
        codes = raw["codes"]
        values = MXFP4_VALUES[np.stack((codes & 15, codes >> 4), axis=-1)]
        values = values.reshape(*raw.shape, MXFP4_COLS)
        with np.errstate(over="ignore"):
            values = np.ldexp(values, raw["scale"].astype(np.int32)[..., None] - 127)
        values[raw["scale"] == 255] = np.nan
        return values.reshape(len(raw), -1)
    if raw.dtype == np.uint16:
        wide = raw.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    return raw.astype(np.float32, copy=False)


# Of an axis: groups, and the parts of each of them, which are in it one after another.
Part = tuple[int, int]  # its size, and that with zeros
Axis = tuple[int, tuple[Part, ...]]


def padded(stored: Checkpoint, axes: Mapping[str, Mapping[int, Axis]]) -> Checkpoint:
    """Return the checkpoint with the tensors of ``axes`` (a suffix of their name -> what is padded,
    by axis) in f32; those of other shapes are as they are, and are refused later.
    """
    return DerivedCheckpoint(stored, _matrices(stored, axes)) if axes else stored


def _matrices(stored: Checkpoint, axes: Mapping[str, Mapping[int, Axis]]) -> Iterator[Matrix]:
    for name, tensor in stored.tensors.items():
        own = next((of for suffix, of in axes.items() if re.search(suffix, name)), {})
        fits = len(tensor.shape) > max(own, default=0)
        if own and fits and all(_size(own[i], 0) == tensor.shape[i] for i in own):
            shape = (_size(own[i], 1) if i in own else n for i, n in enumerate(tensor.shape))
            yield Matrix(name, tuple(shape), "F32", [name], partial(_read, stored, tensor, own))


def _read(
    stored: Checkpoint, tensor: SourceTensor, own: Mapping[int, Axis], start: int, stop: int
) -> RawArray:
    values: NDArray[Any] = to_float32(stored.read_rows(tensor.name, 0, tensor.n_rows))
    values = values.reshape(tensor.shape)
    for i, axis in own.items():
        values = np.concatenate(list(_padded(np.moveaxis(values, i, 0), axis)))
        values = np.moveaxis(values, 0, i)
    return np.ascontiguousarray(values.reshape(-1, values.shape[-1])[start:stop])


def _size(axis: Axis, which: int) -> int:
    return axis[0] * sum(part[which] for part in axis[1])


def _padded(rows: NDArray[Any], axis: Axis) -> Iterator[NDArray[Any]]:
    """Yield the parts of all groups of rows, each with its zeros behind."""
    at = 0
    for _ in range(axis[0]):
        for n, n_all in axis[1]:
            yield rows[at : at + n]
            yield np.zeros((n_all - n, *rows.shape[1:]), np.float32)
            at += n
