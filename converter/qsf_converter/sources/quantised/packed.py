"""Checkpoints whose matrices are packed in bytes or words: GPTQ, AWQ, bitsandbytes, BitNet."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.foreign_json import JsonError, read_json
from qsf_converter.sources.checkpoint import Matrix, RawArray, SourceTensor
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.quantised import matrix
from qsf_converter.sources.quantised.matrix import FLOATS, INTEGERS, Stored, affine, unpack

# ---- GPTQ and AWQ: codes in words of 32 bits; each group of inputs has zeros and scales ----

# As in AutoGPTQ's nn_modules/qlinear and AutoAWQ's modules/linear: NAME.qweight holds several
# inputs in a word (GPTQ, [words, outputs]) or several outputs (AWQ, [inputs, words], in an order of
# its own; its version gemv [outputs, words]). NAME.g_idx, if there is one, has the group of each
# input.

_CODES: Final = ".qweight"
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of the codes of 8 outputs
_SPAN: Final = 32  # outputs whose codes fill whole words, whatever their bits
_CHECKED: Final = 4096  # outputs at once

_Read = Callable[[str, int, int], RawArray]  # of outputs [start, stop)


def gptq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of GPTQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits", (2, 3, 4, 8))
    form = _choice(own, "checkpoint_format", ("gptq", "gptq_v2"))
    add = np.uint8(form == "gptq")  # AutoGPTQ stores the zeros less one
    mask = np.uint8(255 if bits == 3 else (1 << bits) - 1)  # of 3 bits it lets the zero be 8

    def zeros(name: str, start: int, stop: int) -> RawArray:
        first, last = start // _SPAN * bits, -(-stop // _SPAN) * bits
        words = stored.columns(name, first, min(last, stored.tensors[name].shape[-1]))
        found = unpack(words, bits)[:, start % _SPAN :][:, : stop - start]
        return np.transpose(found + add & mask)

    def codes(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.columns(name, start, stop).T, bits)

    for words in _words(stored):
        shape = (words.shape[1], words.shape[0] * 32 // bits)
        yield _matrix(stored, own, words, shape, bits, codes, zeros, _transposed(stored))


def awq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of AWQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits" if own.has("bits") else "w_bit", (4,))
    version = _choice(own, "version", ("gemm", "gemv", "GEMM", "GEMV")).lower()

    def turned(name: str, start: int, stop: int) -> RawArray:
        found = unpack(stored.columns(name, start // 8, -(-stop // 8)), bits)
        found = found.reshape(len(found), -1, 8)[..., _AWQ_ORDER].reshape(len(found), -1)
        return np.transpose(found[:, start % 8 :][:, : stop - start])

    def plain(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.rows(name, start, stop), bits)

    for words in _words(stored):
        n, m = words.shape
        if version == "gemv":
            yield _matrix(stored, own, words, (n, m * 8), bits, plain, plain, stored.rows)
        else:
            scales = _transposed(stored)
            yield _matrix(stored, own, words, (m * 8, n), bits, turned, turned, scales)


def _transposed(stored: Stored) -> _Read:
    return lambda name, start, stop: np.transpose(stored.columns(name, start, stop))


def _choice(own: Config, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return the value of a key, by default the first one allowed; bits must be stated."""
    value = own.get(name, None if name == "bits" else allowed[0]) or allowed[0]
    if isinstance(value, bool) or value not in allowed or (name == "bits" and not own.has(name)):
        options = ", ".join(map(str, allowed))
        raise own.error(name, f"= {shown(own.get(name))} is not supported; allowed: {options}")
    return value


def _words(stored: Stored) -> Iterator[SourceTensor]:
    for name in [name for name in stored.tensors if name.endswith(_CODES)]:
        words = stored.need(name, ("I32",))
        if len(words.shape) != 2 or 0 in words.shape:
            raise QsfConversionError(f"tensor {name} of shape {list(words.shape)} is no matrix")
        yield words


def _matrix(
    stored: Stored, own: Config, words: SourceTensor, shape: tuple[int, int], bits: int,
    codes: _Read, zeros: _Read, scales: _Read,
) -> Matrix:  # fmt: skip
    base = words.name.removesuffix(_CODES)
    g_idx, n_outputs, n_inputs = f"{base}.g_idx", *shape
    factor, zero = stored.need(f"{base}.scales", FLOATS), stored.need(f"{base}.qzeros", ("I32",))
    parts = [words.name, zero.name, factor.name]
    if g_idx in stored.tensors:
        parts.append(stored.need(g_idx, INTEGERS).name)
        n_inputs = min(n_inputs, stored.tensors[g_idx].shape[0])
    size = own.get("group_size", own.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else n_inputs
    n_groups = -(-n_inputs // size)
    in_order = np.arange(n_inputs) // size
    if scales == stored.rows:  # of gemv: both are padded
        fits = factor.shape[0] == zero.shape[0] == n_outputs
        fits &= min(factor.shape[-1], zero.shape[-1] * 32 // bits) >= n_groups
    else:
        fits = factor.shape == (n_groups, n_outputs)
        fits &= zero.shape == (n_groups, -(-n_outputs * bits // 32))
    if not fits:
        raise QsfConversionError(
            f"tensor {words.name} of shape {list(words.shape)}: scales {list(factor.shape)} and "
            f"zeros {list(zero.shape)} are not those of {n_groups} groups of {bits} bits"
        )

    def groups() -> RawArray:
        found = stored.whole(g_idx) if g_idx in parts else in_order
        if found.min(initial=0) < 0 or found.max(initial=0) >= n_groups:
            raise QsfConversionError(f"tensor {g_idx} names a group that is not there")
        return found

    kept = None
    spans = ((at, min(at + _CHECKED, n_outputs)) for at in range(0, n_outputs, _CHECKED))
    middle = 1 << (bits - 1)
    if np.array_equal(groups(), in_order) and all(
        (zeros(zero.name, *span)[:, :n_groups] == middle).all() for span in spans
    ):
        kept = matrix.kept_type(stored, factor.name, bits, n_inputs, min(size, n_inputs))
    return affine(
        f"{base}.weight", (n_outputs, n_inputs), f"INT{bits}", parts,
        lambda start, stop: codes(words.name, start, stop)[:, :n_inputs],
        lambda start, stop: scales(factor.name, start, stop)[:, groups()],
        lambda start, stop: zeros(zero.name, start, stop)[:, groups()],
        kept,
    )  # fmt: skip


# ---- bitsandbytes: NF4 and FP4, whose scales may be quantised again, and int8 by rows ----

# As in bitsandbytes/functional.py: NAME.weight [n / 2, 1] has two codes in a byte, the first one in
# the high half; NAME.weight.absmax a scale for each block of the flattened matrix, and .quant_map
# the values of the codes. Nested: .absmax has codes of .nested_quant_map, and scales of blocks.

_STATE: Final = ".quant_state.bitsandbytes__"
_BYTES: Final = ("U8", "I8", "F16", "BF16", "F32", "I32")  # bnb_4bit_quant_storage
_ROW: Final = np.float32(1 / 127)  # int8_vectorwise_dequant multiplies by it
_MAX_STATE_BYTES: Final = 1 << 16


def bitsandbytes_matrices(stored: Stored, _own: Config) -> Iterator[Matrix]:
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


# ---- BitNet b1.58: ternary matrices with four rows in a row of bytes, and their scales ----

# As in transformers' integrations/bitnet.py: bits 2i and 2i + 1 of the bytes [n / 4, m] of a matrix
# [n, m] hold the i-th quarter of its rows, each value plus one.

_TERNARY_BYTES: Final = "U8"  # the type of a packed matrix
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


def bitnet_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the ternary matrices, unpacked and scaled.

    Raises QsfConversionError for a packed tensor that is not a matrix, or whose scale is missing or
    not positive.
    """
    if not is_ternary(own):
        return
    divides = own.get("linear_class") != "autobitlinear"
    for tensor in stored.tensors.values():
        scale = stored.tensors.get(f"{tensor.name}_scale")
        if tensor.dtype == _TERNARY_BYTES and (scale is None or len(tensor.shape) != 2):
            raise QsfConversionError(
                f"tensor {tensor.name}: bytes of shape {list(tensor.shape)} are not a packed "
                "matrix with a weight_scale"
            )
        if scale is not None:
            yield _ternary(stored, tensor, scale, divides=divides)


def _ternary(stored: Stored, tensor: SourceTensor, scale: SourceTensor, *, divides: bool) -> Matrix:
    name, shape, is_packed = tensor.name, tensor.shape, tensor.dtype == _TERNARY_BYTES
    if math.prod(scale.shape) != 1 or scale.dtype == _TERNARY_BYTES:
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
