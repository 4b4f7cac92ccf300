"""A checkpoint whose latents and their values have more dimensions, which are 0.

The engine wants ranks of latents that are multiples of 64, and values of 16 (docs/format.md, keys
44 and 46). Zeros behind those that there are change nothing: the norm of a latent reads the first
ones alone (key 52), and no output comes of a zero.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf_converter.sources.checkpoint import Checkpoint, RawArray, WrappedCheckpoint, to_float32

# Of an axis: groups, and the parts of each of them, which are in it one after another.
Part = tuple[int, int]  # its size, and that with zeros
Axis = tuple[int, tuple[Part, ...]]


class PaddedCheckpoint(WrappedCheckpoint):
    """The tensors of ``axes`` (a suffix of their name -> what is padded, by axis) are f32."""

    def __init__(self, stored: Checkpoint, axes: Mapping[str, Mapping[int, Axis]]) -> None:
        """Replace the shapes of tensors that have those of ``axes``; others are passed on."""
        super().__init__(stored)
        self._axes: dict[str, Mapping[int, Axis]] = {}
        for name, tensor in stored.tensors.items():
            own = next((of for suffix, of in axes.items() if re.search(suffix, name)), {})
            self._tensors[name] = tensor
            fits = len(tensor.shape) > max(own, default=0)  # else its shape is refused later
            if own and fits and all(_size(own[i], 0) == tensor.shape[i] for i in own):
                shape = list(tensor.shape)
                for i in own:
                    shape[i] = _size(own[i], 1)
                n_bytes = 4 * math.prod(shape)
                self._axes[name] = own
                self._tensors[name] = dataclasses.replace(
                    tensor, shape=tuple(shape), dtype="F32", n_bytes=n_bytes
                )

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows; see ``Checkpoint.read_rows``. A padded tensor is read as a whole."""
        if name not in self._axes:
            return self._stored.read_rows(name, start, stop)
        tensor = self._stored.tensors[name]
        values: NDArray[Any] = to_float32(self._stored.read_rows(name, 0, tensor.n_rows))
        values = values.reshape(tensor.shape)
        for i, axis in self._axes[name].items():
            values = np.concatenate(list(_padded(np.moveaxis(values, i, 0), axis)))
            values = np.moveaxis(values, 0, i)
        return np.ascontiguousarray(values.reshape(-1, values.shape[-1])[start:stop])

    def read_stored(self, name: str, start: int, stop: int) -> RawArray:
        if name not in self._axes:
            return super().read_stored(name, start, stop)
        return self.read_rows(name, start, stop).view(np.uint8)


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
