"""bitsandbytes: NF4 and FP4, whose scales may be quantised again, and int8 with a scale a row.

As in bitsandbytes/functional.py: NAME.weight [n / 2, 1] has two codes in a byte, the first one in
the high half; NAME.weight.absmax a scale for each block of the flattened matrix, and .quant_map the
values of the codes. Nested: .absmax has codes of .nested_quant_map, blocks of them scales too.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.foreign_json import JsonError, read_json
from qsf_converter.sources.checkpoint import Matrix, RawArray
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.quantised.matrix import FLOATS, Stored, unpack

_STATE: Final = ".quant_state.bitsandbytes__"
_BYTES: Final = ("U8", "I8", "F16", "BF16", "F32", "I32")  # bnb_4bit_quant_storage
_ROW: Final = np.float32(1 / 127)  # int8_vectorwise_dequant multiplies by it
_MAX_STATE_BYTES: Final = 1 << 16


def matrices(stored: Stored, _own: Config) -> Iterator[Matrix]:
    """Yield the matrices of 4 and of 8 bits; raises QsfConversionError if parts do not fit."""
    for name in stored.tensors:
        weight, state, kind = name.partition(_STATE)
        if state:
            yield _of_four_bits(stored, weight, name, kind)
        elif name.endswith(".SCB"):
            yield _of_eight_bits(stored, f"{name.removesuffix('.SCB')}.weight", name)


def _of_eight_bits(stored: Stored, weight: str, scales: str) -> Matrix:
    shape, form = stored.need(weight, ("I8",)).shape, f"{weight}_format"
    if len(shape) != 2 or stored.need(scales, FLOATS).shape != shape[:1]:
        raise QsfConversionError(f"tensor {scales} has no scales of the rows of {weight}")
    if form in stored.tensors and stored.whole(form).any():
        raise QsfConversionError(f"tensor {weight} is not stored row by row ({form})")

    def read(start: int, stop: int) -> RawArray:
        values = stored.rows(weight, start, stop).astype(np.float32)
        values *= stored.columns(scales, start, stop).T.astype(np.float32)
        values *= _ROW
        return values

    parts = [weight, scales, *([form] if form in stored.tensors else [])]
    return Matrix(weight, shape, "INT8", parts, read)


def _of_four_bits(stored: Stored, name: str, state: str, kind: str) -> Matrix:
    codes = stored.need(name, _BYTES)
    fields = _fields(stored, state)
    shape = fields.get("shape")
    if not isinstance(shape, list) or {*map(type, shape)} != {int} or len(shape) != 2:
        raise QsfConversionError(f"tensor {state}: {shown(shape)} is no shape of a matrix")
    n, block = math.prod(shape), fields.count("blocksize", MAX_FFN_DIM)
    absmax, table = f"{name}.absmax", f"{name}.quant_map"
    n_blocks = -(-n // block)
    wanted = {absmax: n_blocks, table: 16}
    is_nested = stored.need(absmax, (*FLOATS, "U8")).dtype == "U8"
    outer, outer_table = f"{name}.nested_absmax", f"{name}.nested_quant_map"
    n_outer = fields.count("nested_blocksize", MAX_FFN_DIM) if is_nested else 1
    if is_nested:
        wanted |= {outer: -(-n_blocks // n_outer), outer_table: 256}
    found = {part: stored.need(part, (*FLOATS, "U8")).shape for part in wanted}
    if (
        min(shape) < 1
        or codes.n_bytes != -(-n // 2)
        or found != {k: (v,) for k, v in wanted.items()}
    ):
        raise QsfConversionError(
            f"tensor {name}: {codes.n_bytes} bytes and {shown([*found.values()])} numbers are not "
            f"{n} weights of 4 bits in blocks of {block}"
        )
    offset = np.float32(fields.positive("nested_offset")) if is_nested else 0

    def scales(first: int, last: int) -> RawArray:
        own = stored.columns(absmax, first, last)[0]
        if not is_nested:
            return np.asarray(own, np.float32)
        values = stored.whole(outer_table).astype(np.float32)[own]
        values *= stored.whole(outer).astype(np.float32)[np.arange(first, last) // n_outer]
        return np.asarray(values + offset)

    def read(start: int, stop: int) -> RawArray:
        first, last = start * shape[1], stop * shape[1]
        per_row = 2 * codes.row_bytes
        rows = stored.raw(name, first // per_row, -(-last // per_row)).reshape(1, -1)
        halves = unpack(rows, 4).reshape(-1, 2)[:, ::-1].reshape(-1)
        at = first // per_row * per_row
        values = stored.whole(table).astype(np.float32)[halves[first - at : last - at]]
        begin = first // block
        blocks = np.arange(first, last) // block - begin
        values *= scales(begin, -(-last // block))[blocks]
        return values.reshape(stop - start, shape[1])

    return Matrix(name, (shape[0], shape[1]), kind.upper(), [name, state, *wanted], read)


def _fields(stored: Stored, name: str) -> Config:
    try:
        if stored.need(name, ("U8",)).n_bytes > _MAX_STATE_BYTES:
            raise JsonError(f"more than {_MAX_STATE_BYTES} bytes")
        fields = read_json(stored.whole(name).tobytes())
        if not isinstance(fields, dict):
            raise JsonError("not an object")
    except JsonError as error:
        raise QsfConversionError(f"tensor {name}: {error}") from error
    return Config(fields, where=f"{name}: ")
