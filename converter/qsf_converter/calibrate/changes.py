"""What a calibration did to a layer's matrices: the section XFRM (docs/format.md).

An adapter is made for the checkpoint's matrices, and has to be changed as they were.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file.kinds import LayerKind
from qsf.file.layout import TensorType
from qsf_converter.calibrate.transforms import Change, divisors, hadamard

T = TensorType
Floats = NDArray[np.float64]
Changes = dict[tuple[int, TensorType], Change]  # by layer, and the first matrix of the group

TAG: Final = "XFRM"
_HEAD: Final = struct.Struct("<IHHII")  # layer, first matrix, what was divided, rotated, scales
_FIRST: Final = {T.K: T.Q, T.V: T.Q, T.FFN_UP: T.FFN_GATE}
# Of the groups that exist, these have one each.
_ONE_OF_GROUP: Final = (T.Q, T.SSD_IN, T.ATTN_OUT, T.SSD_OUT, T.FFN_UP, T.FFN_DOWN)


def pack(changes: Changes) -> bytes:
    parts = []
    for (layer, kind), change in changes.items():
        scales = np.asarray(change.scales, "<f4")
        parts.append(_HEAD.pack(layer, kind, change.divided, change.is_rotated, len(scales)))
        parts.append(scales.tobytes())
    return b"".join(parts)


def unpack(data: bytes) -> Changes:
    """Raises QsfConversionError for a section that is damaged."""
    changes: Changes = {}
    at = 0
    try:
        while at < len(data):
            layer, kind, divided, is_rotated, n = _HEAD.unpack_from(data, at)
            scales = np.frombuffer(data, "<f4", n, at + _HEAD.size)
            if is_rotated > 1 or not (np.isfinite(scales) & (scales > 0)).all():
                raise ValueError
            changes[layer, T(kind)] = Change(bool(is_rotated), scales, T(divided))
            at += _HEAD.size + 4 * n
    except (struct.error, ValueError):
        raise QsfConversionError(f"the section {TAG} is malformed") from None
    return changes


def most_bytes(matrices: Mapping[tuple[int, TensorType], int]) -> int:
    """Return the most that the section takes, for the inputs of each matrix of the layers."""
    sizes = (n for (_, kind), n in matrices.items() if kind in _ONE_OF_GROUP)
    return sum(_HEAD.size + 4 * n for n in sizes)


@dataclass(frozen=True, slots=True)
class Factors:
    """B A, which an adapter adds to a matrix; changed as the matrix was."""

    a: Floats  # [rank, in]
    b: Floats  # [out, rank]

    def changed(self, changes: Changes, layer: int, kind: TensorType, of: LayerKind) -> Factors:
        """Raises QsfConversionError if the changes do not fit the layer."""
        try:
            return self._changed(changes, layer, kind, of)
        except ValueError:
            raise QsfConversionError(f"the section {TAG} does not fit {kind.name}") from None

    def _changed(self, changes: Changes, layer: int, kind: TensorType, of: LayerKind) -> Factors:
        a, b = self.a, self.b
        inputs = changes.get((layer, kind)) or changes.get((layer, _FIRST.get(kind, kind)))
        if inputs is not None:
            if inputs.is_rotated:
                a = _turned(a.T, of.head_dim).T
            a = a * inputs.scales if len(inputs.scales) else a
        for (of_layer, _), change in changes.items():
            if of_layer != layer:
                continue
            if change.is_rotated and kind == T.V:
                b = _turned(b, of.head_dim)
            if change.divided == kind and len(change.scales):
                b = b / divisors(kind, change.scales, of)[:, None]
        return Factors(a, b)


def _turned(rows: Floats, n: int) -> Floats:
    """Rotate rows [heads * n, ...] by heads."""
    turned = np.einsum("ij,hjc->hic", hadamard(n), rows.reshape(-1, n, rows.shape[1]))
    return np.asarray(turned.reshape(rows.shape), np.float64)
