"""Checkpoints of BitNet b1.58: ternary matrices with four rows packed in one row of bytes, and
their scales.

As in transformers' integrations/bitnet.py: bits 2i and 2i + 1 of the bytes [n / 4, m] of a matrix
[n, m] hold the i-th quarter of its rows, each value plus one.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    Float32Array,
    RawArray,
    SourceTensor,
    WrappedCheckpoint,
    to_float32,
)
from qsf_converter.sources.families.config import Config

_BYTES: Final = "U8"  # the type of a packed matrix
_PACKED_ROWS: Final = 4  # in a row of bytes
_LARGEST_CODE: Final = 2
# The first value is the default.
_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline", "online"),
    "use_rms_norm": (False,),
}


@dataclass(frozen=True, slots=True)
class BitNet:
    is_ternary: bool  # False: master weights, which the model rounds when it computes
    divides_by_scale: bool  # True: divide by the scale; False: multiply


def bitnet_of(config: Mapping[str, Any]) -> BitNet | None:
    """Return BitNet's fields of ``quantization_config``; None: the model is not BitNet.

    Raises QsfConversionError for unsupported values.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != "bitnet":
        return None
    own = Config(stated, where="quantization_config.")
    for name, choices in _CHOICES.items():
        if own.get(name, choices[0]) not in choices:
            raise own.error(name, f"= {shown(own[name])} is not supported")
    is_auto = own.get("linear_class") == "autobitlinear"
    is_online = is_auto and own.get("quantization_mode") == "online"
    return BitNet(is_ternary=not is_online, divides_by_scale=not is_auto)


class TernaryCheckpoint(WrappedCheckpoint):
    """The ternary weights of another checkpoint, unpacked and scaled; a ``Checkpoint``.

    Raises QsfConversionError for a packed tensor that is not a matrix, or whose scale is missing or
    not positive.
    """

    def __init__(self, stored: Checkpoint, bitnet: BitNet) -> None:
        super().__init__(stored)
        self._factors: dict[str, float] = {}
        for tensor in stored.tensors.values():
            if tensor.name.endswith(".weight_scale"):
                continue
            scale = stored.tensors.get(f"{tensor.name}_scale")
            if scale is not None:
                self._factors[tensor.name] = self._factor(scale, bitnet)
            if tensor.dtype == _BYTES:
                if scale is None or len(tensor.shape) != 2:
                    raise QsfConversionError(
                        f"tensor {tensor.name}: bytes of shape {list(tensor.shape)} are not a "
                        "packed matrix with a weight_scale"
                    )
                n_rows, n_cols = tensor.shape
                tensor = dataclasses.replace(tensor, shape=(n_rows * _PACKED_ROWS, n_cols))
            self._tensors[tensor.name] = tensor

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        if name not in self._factors:
            return self._stored.read_rows(name, start, stop)
        if self._tensors[name].dtype == _BYTES:
            values = self._unpacked(name, start, stop)
        else:
            values = to_float32(self._stored.read_rows(name, start, stop))
        scaled: Float32Array = values * np.float32(self._factors[name])
        return scaled

    def _factor(self, tensor: SourceTensor, bitnet: BitNet) -> float:
        if math.prod(tensor.shape) != 1 or tensor.dtype == _BYTES:
            raise QsfConversionError(
                f"tensor {tensor.name} is {tensor.dtype} of shape {list(tensor.shape)}, "
                "which is not one scale"
            )
        scale = float(to_float32(self._stored.read_rows(tensor.name, 0, 1)).item())
        if not math.isfinite(scale) or scale <= 0:
            raise QsfConversionError(f"tensor {tensor.name} = {scale:g} is not a positive number")
        return 1 / scale if bitnet.divides_by_scale else scale

    def _unpacked(self, name: str, start: int, stop: int) -> Float32Array:
        n_rows, n_cols = self._tensors[name].shape
        if not 0 <= start <= stop <= n_rows:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has {n_rows}")
        quarter = n_rows // _PACKED_ROWS
        values = np.empty((stop - start, n_cols), np.float32)
        for i in range(_PACKED_ROWS):
            first, last = max(start, i * quarter), min(stop, (i + 1) * quarter)
            if first >= last:
                continue
            packed = self._stored.read_stored(name, first - i * quarter, last - i * quarter)
            codes = packed >> (2 * i) & 3
            if codes.max(initial=0) > _LARGEST_CODE:
                raise QsfConversionError(f"tensor {name}: 3 is not the code of a ternary weight")
            values[first - start : last - start] = codes
        values -= 1
        return values
