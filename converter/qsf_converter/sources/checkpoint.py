"""The interface of a checkpoint, the same for every file format.

A checkpoint is a set of named tensors that are read in ranges of rows: no caller ever holds a
whole tensor that it does not need whole.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
RawArray = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """The type and the shape of one tensor of a checkpoint."""

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
        """Bytes of one row."""
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

        The array holds the stored numbers; ``to_float32`` makes them computable. Raises
        QsfIOError when the system refuses, QsfConversionError when the type is not F32, F16
        or BF16.
        """

    def digest(self) -> str:
        """SHA-256 over name, type, shape and bytes of all tensors that were read completely.

        It does not depend on how the tensors are spread over files, nor on their order.
        """

    def close(self) -> None:
        """Close the files."""


def to_float32(raw: RawArray) -> Float32Array:
    """Return stored numbers as f32; u16 is bf16, the upper half of an f32."""
    if raw.dtype == np.uint16:
        wide = raw.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    return raw.astype(np.float32, copy=False)
