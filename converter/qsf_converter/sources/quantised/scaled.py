"""FP8, int8, int4, NVFP4 and MXFP4 with scales of blocks, groups, rows or whole matrices.

DeepSeek's fp8, fbgemm_fp8, compressed-tensors, NVIDIA's modelopt: NAME.weight or .weight_packed,
and beside it .weight_scale or .weight_scale_inv, by which all multiply. The form of the tensors
decides: those that a model keeps unquantised have no scales. torchao's safetensors have NAME's
._weight_qdata, ._weight_scale and ._weight_zero_point.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources import checkpoint
from qsf_converter.sources.checkpoint import MXFP4, MXFP4_COLS, Matrix, RawArray, SourceTensor
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised import matrix
from qsf_converter.sources.quantised.matrix import FLOATS, FP8, Stored, affine, scales_of, unpack

_PACKED: Final = "_packed"
_SCALES: Final = (*FLOATS, "F8_E8M0", "F8_E4M3", "U8")  # U8: exponents, as of E8M0
_QDATA: Final = "._weight_qdata"
_FORMATS: Final = (
    None, "dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized",
    "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip


def matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices with scales; raises QsfConversionError if parts do not fit."""
    if own.get("quant_method") == "compressed-tensors" and own.get("format") not in _FORMATS:
        raise own.error("format", f"= {shown(own['format'])} is not supported")
    for key in ("transform_config", "sparsity_config"):
        stated = own.get(key)
        if stated and not (isinstance(stated, dict) and stated.get("format") == "dense"):
            raise own.error(key, f"= {shown(stated)} is not supported")
    groups = own.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [w for g in groups if isinstance(g, dict) and isinstance(w := g.get("weights"), dict)]
    block = _block_of([own.get("weight_block_size"), *(w.get("block_structure") for w in weights)])
    bits = {w["num_bits"] for w in weights if w.get("num_bits") in (1, 2, 4, 8)}
    for tensor in stored.tensors.values():
        name = tensor.name
        ends = [end for end in ("_scale_inv", "_scale") if f"{name}{end}" in stored.tensors]
        if name.endswith(("_scale", "_scale_inv", "_zero_point")):
            continue
        if name.endswith(_PACKED):
            yield _packed(stored, tensor, bits)
        elif tensor.dtype == "U8" and ends:
            own_total = f"{name}_amax" if f"{name}_amax" in stored.tensors else f"{name}_scale_2"
            yield _nvfp4(stored, name, tensor, f"{name}_scale", own_total)
        elif tensor.dtype in (*FP8, "I8") and ends:
            yield _scaled(stored, name, tensor, f"{name}{ends[0]}", f"{name}_zero_point", block)
        elif tensor.dtype in (*FP8, "I8") and own:
            raise QsfConversionError(f"tensor {name} is {tensor.dtype} and has no {name}_scale_inv")
        elif tensor.dtype in FP8:  # a cast, not a quantisation
            yield Matrix(name, tensor.shape, "FP8", [name], _rows(stored, name))


def torchao_matrices(stored: Stored, _own: Config) -> Iterator[Matrix]:
    for codes in [tensor for name, tensor in stored.tensors.items() if name.endswith(_QDATA)]:
        base = codes.name.removesuffix(_QDATA)
        name, scale, zero = f"{base}.weight", f"{base}._weight_scale", f"{base}._weight_zero_point"
        if scale not in stored.tensors or codes.dtype not in (*FP8, "I8", "U8"):
            raise QsfConversionError(
                f"tensor {codes.name} is {codes.dtype} of torchao in an order for one GPU; convert "
                "the original, or save it with Int4WeightOnlyConfig(int4_packing_format='plain')"
            )
        if zero in stored.tensors and stored.tensors[zero].dtype in FLOATS:
            yield _torchao_int4(stored, name, codes, scale, zero)
        else:
            yield _scaled(stored, name, codes, scale, zero, ())


def _rows(stored: Stored, name: str) -> Any:
    return lambda start, stop: stored.rows(name, start, stop)


def _block_of(stated: list[Any]) -> Sequence[int]:
    block: Any = next((block for block in stated if block), [])
    if isinstance(block, str):  # "128x128"
        block = [int(size) if size.isdecimal() else None for size in block.lower().split("x")]
    if block and not (isinstance(block, list) and len(block) == 2 and {*map(type, block)} == {int}):
        raise QsfConversionError(f"config.json: weight_block_size = {shown(block)} is no two sizes")
    return [*block]


def _scaled(
    stored: Stored, name: str, of: SourceTensor, scale: str, zero: str, block: Sequence[int]
) -> Matrix:
    """Values times scales; minus zeros first, if there are such tensors."""
    stored.need(scale, _SCALES)
    parts = [of.name, scale]
    zeros = None
    if zero in stored.tensors:
        parts.append(zero)
        zeros = scales_of(stored, zero, of.shape, block=block, is_zero=True)
    scales = scales_of(stored, scale, of.shape, block=block)
    kind = "FP8" if of.dtype in FP8 else "INT8"
    return affine(name, of.shape, kind, parts, _rows(stored, of.name), scales, zeros)


def _packed(stored: Stored, words: SourceTensor, bits: set[int]) -> Matrix:
    """Codes in words of 32 bits, or two of FP4 in a byte, as compressed-tensors packs them."""
    name = words.name.removesuffix(_PACKED)
    scale = stored.need(f"{name}_scale", _SCALES)
    if words.dtype == "U8" and scale.dtype == "U8":
        n_cols = 2 * words.shape[-1]
        if scale.shape != (*words.shape[:-1], n_cols // MXFP4_COLS) or n_cols % MXFP4_COLS:
            raise QsfConversionError(f"tensor {scale.name} has no scales of blocks of 32 of {name}")
        return _mxfp4(stored, name, (*words.shape[:-1], n_cols), words.name, scale.name)
    if words.dtype == "U8":
        return _nvfp4(stored, name, words, scale.name, f"{name}_global_scale")
    stored.need(words.name, ("I32",))
    sizes = stored.whole(stored.need(f"{name}_shape", matrix.INTEGERS).name)
    n_cols = int(sizes[-1])
    shape = (*words.shape[:-1], n_cols)
    fitting = [b for b in bits if n_cols > 0 and -(-n_cols * b // 32) == words.shape[-1]]
    if len(fitting) != 1 or sizes.tolist() != [*shape]:
        raise QsfConversionError(
            f"tensor {words.name} of shape {list(words.shape)} has no codes of a matrix "
            f"{sizes.tolist()} of {' or '.join(map(str, sorted(bits))) or 'unknown'} bits"
        )
    (width,) = fitting
    optional = [f"{name}_g_idx", f"{name}_zero_point"]
    parts = [words.name, scale.name, f"{name}_shape", *(p for p in optional if p in stored.tensors)]
    groups = _groups(stored, optional[0], n_cols, scale) if optional[0] in parts else None
    scales = scales_of(stored, scale.name, shape, groups=groups)
    kept = None
    if optional[1] in parts:
        zero = _zeros(stored, optional[1], shape, scale.shape[-1], width, groups)
    else:
        middle = np.array([[1 << (width - 1)]])
        zero = lambda _start, _stop: middle  # noqa: E731
        if groups is None:
            group = n_cols // math.prod(scale.shape[-1:])
            kept = matrix.kept_type(stored, scale.name, width, n_cols, group)

    def codes(start: int, stop: int) -> RawArray:
        return unpack(stored.rows(words.name, start, stop), width)[:, :n_cols]

    return affine(name, shape, f"INT{width}", parts, codes, scales, zero, kept)


def _groups(stored: Stored, name: str, n_cols: int, scale: SourceTensor) -> RawArray | None:
    """Return the group of each column if these are not in order."""
    groups = stored.whole(stored.need(name, matrix.INTEGERS).name)
    if len(groups) != n_cols or groups.max(initial=0) >= scale.shape[-1]:
        raise QsfConversionError(
            f"tensor {name} has {len(groups)} numbers up to {groups.max(initial=0)}, expected "
            f"{n_cols} below {scale.shape[-1]}"
        )
    return None if groups.min(initial=0) < 0 else groups  # -1: not used


def _zeros(
    stored: Stored,
    name: str,
    shape: tuple[int, ...],
    n_groups: int,
    bits: int,
    groups: RawArray | None,
) -> Any:
    """Return a function of rows: zeros, which are packed along the rows of the matrix."""
    words = stored.need(name, ("I32",))
    if words.shape != (-(-shape[0] * bits // 32), n_groups) or len(shape) != 2:
        raise QsfConversionError(
            f"tensor {name} of shape {list(words.shape)} has no zeros of {n_groups} groups of a "
            f"matrix {list(shape)}"
        )
    groups = np.arange(shape[1]) // -(-shape[1] // n_groups) if groups is None else groups

    def read(start: int, stop: int) -> RawArray:
        first, last = start * bits // 32, -(-stop * bits // 32)
        codes = unpack(stored.rows(name, first, last).T, bits)
        skipped = start - first * 32 // bits
        return np.transpose(codes[:, skipped : skipped + stop - start])[:, groups]

    return read


def _nvfp4(stored: Stored, name: str, codes: SourceTensor, scale: str, total: str) -> Matrix:
    """Two E2M1 in a byte, a scale of E4M3 for 16, and one of f32: modelopt multiplies by it,
    compressed-tensors divides. Inkling has the largest value of each expert, and what divides it.
    """
    stored.need(scale, ("F8_E4M3",))
    parts = [codes.name, scale, total]
    factor = stored.whole(stored.need(total, FLOATS).name).astype(np.float32)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    n_factors = 1
    if total.endswith("_amax"):
        parts.append(f"{name}_outer_scale_denominator")
        below = stored.whole(stored.need(parts[-1], FLOATS).name).astype(np.float32)
        factor = factor / below if below.size in (1, factor.size) else factor[:0]
        n_factors = math.prod(shape[:-2])
    if factor.size != n_factors or stored.tensors[scale].shape[-1] * 16 != shape[-1]:
        raise QsfConversionError(f"tensor {scale} has no scales of blocks of 16 of {name}")
    blocks = scales_of(stored, scale, shape)
    join = np.divide if total.endswith("_global_scale") else np.multiply

    def values(start: int, stop: int) -> RawArray:
        return checkpoint.MXFP4_VALUES[unpack(stored.rows(codes.name, start, stop), 4)]

    if n_factors > 1:  # the product of a value and its block's scale is exact
        return affine(
            name, shape, "NVFP4", parts,
            lambda start, stop: values(start, stop) * blocks(start, stop),
            lambda start, stop: factor[np.arange(start, stop) // shape[-2]][:, None],
        )  # fmt: skip
    return affine(
        name, shape, "NVFP4", parts, values,
        lambda start, stop: join(blocks(start, stop), factor),
    )  # fmt: skip


def mxfp4_matrices(stored: Stored, _own: Config) -> Iterator[Matrix]:
    """Yield gpt-oss' experts: NAME_blocks [..., rows, blocks, 16] has the codes of 32 columns in 16
    bytes, the even columns in the low halves, NAME_scales [..., rows, blocks] the exponents, as in
    transformers' integrations/mxfp4.py. Raises QsfConversionError for bytes that are others.
    """
    for tensor in (tensor for tensor in stored.tensors.values() if tensor.dtype == "U8"):
        base, _, kind = tensor.name.rpartition("_")
        if kind == "blocks":
            scales, shape = stored.tensors.get(f"{base}_scales"), tensor.shape
            if scales is None or scales.dtype != "U8":
                raise QsfConversionError(f"tensor {tensor.name} has no scales {base}_scales")
            if len(shape) < 3 or shape[-1] != MXFP4_COLS // 2 or scales.shape != shape[:-1]:
                raise QsfConversionError(
                    f"tensor {tensor.name} has shape {list(shape)}, its scales "
                    f"{list(scales.shape)}: no blocks of MXFP4, which are 16 bytes and a scale for "
                    "32 weights"
                )
            n_cols = shape[-2] * MXFP4_COLS
            yield _mxfp4(stored, tensor.name, (*shape[:-2], n_cols), tensor.name, scales.name)
        elif kind != "scales" or f"{base}_blocks" not in stored.tensors:
            raise QsfConversionError(f"tensor {tensor.name}: bytes without codes of MXFP4")


def _mxfp4(stored: Stored, name: str, shape: tuple[int, ...], codes: str, scales: str) -> Matrix:
    n_blocks = shape[-1] // MXFP4_COLS
    per_row = stored.tensors[codes].n_rows // math.prod(shape[:-1])  # rows of codes

    def read(start: int, stop: int) -> RawArray:
        raw = np.empty((stop - start, n_blocks), checkpoint.MXFP4_BLOCK)
        raw["codes"] = stored.rows(codes, start * per_row, stop * per_row).reshape(*raw.shape, -1)
        raw["scale"] = stored.rows(scales, start, stop)
        return raw

    return Matrix(name, shape, MXFP4, [codes, scales], read)


def _torchao_int4(stored: Stored, name: str, codes: SourceTensor, scale: str, zero: str) -> Matrix:
    n_rows, n_cols = codes.shape[0], 2 * codes.shape[-1]
    shape = stored.need(scale, FLOATS).shape
    n_groups = shape[0] if shape else 0
    if shape != (n_groups, n_rows) or stored.tensors[zero].shape != shape or n_cols % n_groups:
        raise QsfConversionError(f"tensor {scale} of shape {list(shape)} has no scales of {name}")

    def read(start: int, stop: int) -> RawArray:
        values = unpack(stored.rows(codes.name, start, stop), 4).astype(np.float32)
        values -= 16 * (values > 7)
        for part, join in ((scale, np.multiply), (zero, np.add)):
            of_groups = stored.columns(part, start, stop).T.astype(np.float32)
            join(values, np.repeat(of_groups, n_cols // n_groups, axis=1), out=values)
        return values

    return Matrix(name, (n_rows, n_cols), "INT4", [codes.name, scale, zero], read)
