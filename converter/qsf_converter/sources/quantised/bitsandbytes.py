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

from qsf.errors import QsfConversionError
from qsf.foreign_json import JsonError, read_json
from qsf_converter.sources.checkpoint import RawArray
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.quantised.matrix import Matrix
from qsf_converter.sources.quantised.stored import FLOATS, Stored, unpack

_STATE: Final = ".quant_state.bitsandbytes__"
_BYTES: Final = ("U8", "I8", "F16", "BF16", "F32", "I32")  # bnb_4bit_quant_storage
_ROW: Final = np.float32(1 / 127)  # int8_vectorwise_dequant multiplies by it
_MAX_STATE_BYTES: Final = 1 << 16


def matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of 4 and of 8 bits. Raises QsfConversionError for parts that do not
    fit.
    """
    del own  # the tensors say it all
    for name, tensor in stored.tensors.items():
        weight, state, kind = name.partition(_STATE)
        if state:
            yield _of_four_bits(stored, weight, name, kind)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            codes = stored.need(weight, ("I8",), of=weight)
            stored.need(name, FLOATS, of=weight)
            form = f"{weight}_format"
            if len(codes.shape) != 2 or tensor.shape != codes.shape[:1]:
                raise QsfConversionError(f"tensor {name} has no scales of the rows of {weight}")
            if form in stored.tensors and stored.whole(form).tolist() not in ([0], []):
                raise QsfConversionError(f"tensor {weight} is not stored row by row ({form})")
            parts = (weight, name, *([form] if form in stored.tensors else []))
            yield _of_eight_bits(stored, weight, codes.shape, parts)


def _of_eight_bits(
    stored: Stored, weight: str, shape: tuple[int, ...], parts: tuple[str, ...]
) -> Matrix:
    def read(start: int, stop: int) -> RawArray:
        scales = stored.columns(parts[1], start, stop).T.astype(np.float32)
        values = stored.rows(weight, start, stop).astype(np.float32)
        values *= scales
        values *= _ROW
        return values

    return Matrix(weight, shape, "INT8", parts, read)


def _of_four_bits(stored: Stored, name: str, state: str, kind: str) -> Matrix:
    codes = stored.need(name, _BYTES, of=name)
    stated = stored.need(state, ("U8",), of=name)
    try:
        if stated.n_bytes > _MAX_STATE_BYTES:
            raise JsonError(f"{stated.n_bytes} bytes")
        fields = Config(read_json(stored.whole(state).tobytes()), where=f"{state}: ")
    except (JsonError, TypeError, AttributeError) as error:
        raise QsfConversionError(f"tensor {state}: {error}") from error
    shape = fields.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(n) for n in shape):
        raise QsfConversionError(f"tensor {state}: {shape} is no shape of a matrix")
    n = math.prod(shape)
    block = fields.count("blocksize", MAX_FFN_DIM)
    absmax, table = f"{name}.absmax", f"{name}.quant_map"
    n_blocks = stored.need(absmax, (*FLOATS, "U8"), of=name).shape
    sizes = stored.need(table, FLOATS, of=name).shape
    if n_blocks != (-(-n // block),) or sizes != (16,) or codes.n_bytes != -(-n // 2):
        raise QsfConversionError(
            f"tensor {name}: {codes.n_bytes} bytes, {n_blocks} scales and {sizes} values are not "
            f"{n} weights of 4 bits in blocks of {block}"
        )
    parts = [name, state, absmax, table]
    is_nested = stored.tensors[absmax].dtype == "U8"
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if is_nested else []
    for part in nested:
        stored.need(part, FLOATS, of=name)
    n_outer = fields.count("nested_blocksize", MAX_FFN_DIM) if is_nested else 1
    if is_nested and (
        stored.tensors[nested[0]].shape != (-(-n_blocks[0] // n_outer),)
        or stored.tensors[nested[1]].shape != (256,)
    ):
        raise QsfConversionError(f"tensor {name}: its nested scales do not fit")
    offset = np.float32(fields.get("nested_offset", 0))

    def scales(first: int, last: int) -> RawArray:
        own = stored.columns(absmax, first, last)[0]
        if not is_nested:
            return np.asarray(own, np.float32)
        outer = stored.whole(nested[0]).astype(np.float32)
        values: RawArray = stored.whole(nested[1]).astype(np.float32)[own]
        values *= outer[np.arange(first, last) // n_outer]
        values += offset
        return values

    def read(start: int, stop: int) -> RawArray:
        first, last = start * shape[1], stop * shape[1]
        per_row = 2 * codes.row_bytes
        rows = stored.raw(name, first // per_row, -(-last // per_row)).reshape(1, -1)
        halves = unpack(rows, 4).reshape(-1, 2)[:, ::-1].reshape(-1)
        at = first // per_row * per_row
        values: RawArray = stored.whole(table).astype(np.float32)[halves[first - at : last - at]]
        blocks = np.arange(first, last) // block
        begin = first // block
        values *= scales(begin, -(-last // block))[blocks - begin]
        return values.reshape(stop - start, shape[1])

    return Matrix(name, (shape[0], shape[1]), kind.upper(), (*parts, *nested), read)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
