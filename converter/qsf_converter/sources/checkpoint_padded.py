"""A checkpoint whose latents and their values have more dimensions, which are 0.

The engine wants ranks of latents that are multiples of 64, and values of 16 (docs/format.md, keys
44 and 46). Zeros behind those that there are change nothing: the norm of a latent reads the first
ones alone (key 52), and no output comes of a zero.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf_converter.sources.checkpoint import (
    Checkpoint,
    DerivedCheckpoint,
    Matrix,
    RawArray,
    SourceTensor,
    to_float32,
)

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
