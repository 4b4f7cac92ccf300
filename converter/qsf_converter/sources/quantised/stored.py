"""The numbers of a quantised checkpoint's tensors: types of few bits, packed codes, columns."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import Checkpoint, RawArray, SourceTensor, to_float32

FLOATS: Final = ("F16", "BF16", "F32", "F64")
FP8: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INTEGERS: Final = ("I32", "I64")

_BAND_BYTES: Final = 16 << 20  # columns of a matrix that is stored transposed, held at once
_N_BANDS: Final = 4  # codes, zeros, scales
_SLAB_BYTES: Final = 4 << 20
_PLAIN: Final = {
    "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def _fp8(exponent_bits: int, bias: int, *, is_fnuz: bool = False) -> RawArray:
    byte = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = byte >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (byte & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    values = np.where(exponent > 0, 1 + fraction, 2 * fraction) * 2.0 ** (exponent - bias)
    values[byte >= 128] *= -1
    if is_fnuz:
        values[128] = np.nan
    elif exponent_bits == 4:
        values[[127, 255]] = np.nan
    else:
        values[exponent == 31] = np.nan
        values[[124, 252]] = np.inf, -np.inf
    return np.asarray(values, np.float32)


POWERS: Final = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32("nan"))  # E8M0
_TABLES: Final = {
    "F8_E4M3": _fp8(4, 7),
    "F8_E5M2": _fp8(5, 15),
    "F8_E4M3FNUZ": _fp8(4, 8, is_fnuz=True),
    "F8_E5M2FNUZ": _fp8(5, 16, is_fnuz=True),
    "F8_E8M0": POWERS,
}


class Stored:
    """Reads the tensors of a checkpoint as numbers; it keeps some columns for the next read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = checkpoint.tensors
        self.raw = checkpoint.read_stored
        self._bands: dict[str, tuple[int, int, RawArray]] = {}

    def need(self, name: str, types: Collection[str]) -> SourceTensor:
        """Return a tensor. Raises QsfConversionError if it is missing or of another type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise QsfConversionError(f"a quantised matrix has no tensor {name}")
        if tensor.dtype not in types:
            allowed = ", ".join(types)
            raise QsfConversionError(f"tensor {name} is {tensor.dtype}, allowed: {allowed}")
        return tensor

    def rows(self, name: str, start: int, stop: int) -> RawArray:
        """Return rows [start, stop): types of 8-bit floats and bf16 as f32, others as stored."""
        raw, dtype = self.raw(name, start, stop), self.tensors[name].dtype
        if dtype in _TABLES:
            return _TABLES[dtype][raw]
        numbers: RawArray = np.ascontiguousarray(raw).view(_PLAIN[dtype])
        return to_float32(numbers) if dtype == "BF16" else numbers

    def whole(self, name: str) -> RawArray:
        return self.rows(name, 0, self.tensors[name].n_rows).reshape(-1)

    def columns(self, name: str, start: int, stop: int) -> RawArray:
        """Return columns [start, stop); a vector is one row."""
        tensor = self.tensors[name]
        first, last, band = self._bands.pop(name, (0, 0, None))
        if band is None or not first <= start <= stop <= last:
            item_bytes = tensor.row_bytes // tensor.shape[-1]
            n_cols = max(stop - start, _BAND_BYTES // max(1, tensor.n_rows * item_bytes))
            first, last = start, min(start + n_cols, tensor.shape[-1])
            step = max(1, _SLAB_BYTES // max(1, tensor.row_bytes))
            slabs = [
                self.rows(name, row, min(row + step, tensor.n_rows))[:, first:last].copy()
                for row in range(0, tensor.n_rows, step)
            ]
            band = np.concatenate(slabs)
        self._bands[name] = first, last, band
        if len(self._bands) > _N_BANDS:
            del self._bands[next(iter(self._bands))]
        return band[:, start - first : stop - first]


def unpack(words: RawArray, bits: int) -> RawArray:
    """Return the codes in each row of ``words``, the lowest bits first; any may cross bytes."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes: RawArray = data[..., None] >> shifts & np.uint8((1 << bits) - 1)
    else:
        set_bits = np.unpackbits(data, axis=1, bitorder="little")
        codes = set_bits.reshape(len(data), -1, bits) @ (1 << np.arange(bits, dtype=np.uint8))
    return codes.reshape(len(data), -1)
