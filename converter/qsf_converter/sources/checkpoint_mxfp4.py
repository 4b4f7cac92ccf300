"""Checkpoints of gpt-oss: experts in MXFP4, with codes in one tensor and scales in another.

NAME_blocks [..., rows, blocks, 16] has the codes of 32 columns in 16 bytes, the even columns in the
low halves, NAME_scales [..., rows, blocks] the exponents. The layout is that of transformers'
integrations/mxfp4.py.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import (
    MXFP4,
    MXFP4_BLOCK,
    MXFP4_COLS,
    Checkpoint,
    RawArray,
    SourceTensor,
    WrappedCheckpoint,
)

_BYTES: Final = "U8"
_CODES, _SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint(WrappedCheckpoint):
    """The tensors of another checkpoint, codes and scales joined; a ``Checkpoint``.

    A joined tensor has the name of its codes, the type ``MXFP4`` and the shape of its weights.
    Raises QsfConversionError for codes or scales that are not bytes, whose shapes do not match, or
    that are alone.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        for tensor in stored.tensors.values():
            if tensor.dtype != _BYTES:
                self._tensors[tensor.name] = tensor
            elif tensor.name.endswith(_CODES):
                self._tensors[tensor.name] = self._joined(tensor)
            elif f"{tensor.name.removesuffix(_SCALES)}{_CODES}" not in stored.tensors:
                raise QsfConversionError(f"tensor {tensor.name}: bytes without codes of MXFP4")

    def _joined(self, codes: SourceTensor) -> SourceTensor:
        scales = self._stored.tensors.get(_scales_of(codes.name))
        if scales is None or scales.dtype != _BYTES:
            raise QsfConversionError(f"tensor {codes.name} has no scales {_scales_of(codes.name)}")
        shape = codes.shape
        if len(shape) < 3 or shape[-1] != MXFP4_COLS // 2 or scales.shape != shape[:-1]:
            raise QsfConversionError(
                f"tensor {codes.name} has shape {list(shape)}, its scales {list(scales.shape)}: "
                "no blocks of MXFP4, which are 16 bytes and a scale for 32 weights"
            )
        weights = (*shape[:-2], shape[-2] * MXFP4_COLS)
        return SourceTensor(codes.name, weights, MXFP4, codes.n_bytes + scales.n_bytes)

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        tensor = self._tensors[name]
        if tensor.dtype != MXFP4:
            return self._stored.read_rows(name, start, stop)
        if not 0 <= start <= stop <= tensor.n_rows:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has {tensor.n_rows}")
        n_blocks = tensor.shape[-1] // MXFP4_COLS
        raw = np.empty((stop - start, n_blocks), MXFP4_BLOCK)
        codes = self._stored.read_stored(name, start * n_blocks, stop * n_blocks)
        raw["codes"] = codes.reshape(stop - start, n_blocks, -1)
        raw["scale"] = self._stored.read_stored(_scales_of(name), start, stop)
        return raw


def _scales_of(name: str) -> str:
    return name.removesuffix(_CODES) + _SCALES
