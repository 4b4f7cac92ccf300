"""Ternary matrices of BitNet b1.58 with four rows packed in one row of bytes, and their scales.

As in transformers' integrations/bitnet.py: bits 2i and 2i + 1 of the bytes [n / 4, m] of a matrix
[n, m] hold the i-th quarter of its rows, each value plus one.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import Matrix, RawArray, SourceTensor
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised.matrix import Stored

_BYTES: Final = "U8"  # the type of a packed matrix
_PACKED_ROWS: Final = 4  # in a row of bytes
# The first value is the default.
_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline", "online"),
    "use_rms_norm": (False,),
}


def is_ternary(own: Config) -> bool:
    """False for master weights, which the model rounds when it computes.

    Raises QsfConversionError for unsupported values.
    """
    for name, choices in _CHOICES.items():
        if own.get(name, choices[0]) not in choices:
            raise own.error(name, f"= {shown(own[name])} is not supported")
    is_auto = own.get("linear_class") == "autobitlinear"
    return not (is_auto and own.get("quantization_mode") == "online")


def matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the ternary matrices, unpacked and scaled.

    Raises QsfConversionError for a packed tensor that is not a matrix, or whose scale is missing or
    not positive.
    """
    if not is_ternary(own):
        return
    divides = own.get("linear_class") != "autobitlinear"
    for tensor in stored.tensors.values():
        scale = stored.tensors.get(f"{tensor.name}_scale")
        if tensor.dtype == _BYTES and (scale is None or len(tensor.shape) != 2):
            raise QsfConversionError(
                f"tensor {tensor.name}: bytes of shape {list(tensor.shape)} are not a packed "
                "matrix with a weight_scale"
            )
        if scale is not None:
            yield _matrix(stored, tensor, scale, divides=divides)


def _matrix(stored: Stored, tensor: SourceTensor, scale: SourceTensor, *, divides: bool) -> Matrix:
    name, shape, is_packed = tensor.name, tensor.shape, tensor.dtype == _BYTES
    if math.prod(scale.shape) != 1 or scale.dtype == _BYTES:
        raise QsfConversionError(
            f"tensor {scale.name} is {scale.dtype} of shape {list(scale.shape)}, "
            "which is not one scale"
        )
    value = float(stored.whole(scale.name).item())
    if not math.isfinite(value) or value <= 0:
        raise QsfConversionError(f"tensor {scale.name} = {value:g} is not a positive number")
    factor = np.float32(1 / value if divides else value)
    if is_packed:
        shape = (shape[0] * _PACKED_ROWS, shape[1])

    def read(start: int, stop: int) -> RawArray:
        if not is_packed:
            return np.asarray(stored.rows(name, start, stop).astype(np.float32) * factor)
        quarter = shape[0] // _PACKED_ROWS
        values = np.empty((stop - start, shape[1]), np.float32)
        for i in range(_PACKED_ROWS):
            first, last = max(start, i * quarter), min(stop, (i + 1) * quarter)
            if first < last:
                codes = stored.rows(name, first - i * quarter, last - i * quarter) >> 2 * i & 3
                if codes.max(initial=0) == 3:
                    raise QsfConversionError(
                        f"tensor {name}: 3 is not the code of a ternary weight"
                    )
                values[first - start : last - start] = codes
        values -= 1
        return np.asarray(values * factor)

    return Matrix(name, shape, tensor.dtype, [name, scale.name], read)
