"""FP8, int8, int4, NVFP4 and MXFP4 with scales of blocks, groups, rows or whole matrices.

DeepSeek's fp8, fbgemm_fp8, compressed-tensors (vllm-project/compressed-tensors) and NVIDIA's
modelopt: NAME.weight or NAME.weight_packed, and beside it NAME.weight_scale or _scale_inv, by which
both multiply. The form of the tensors decides: those that a model keeps unquantised have no scales.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import (
    MXFP4,
    MXFP4_BLOCK,
    MXFP4_COLS,
    MXFP4_VALUES,
    RawArray,
    SourceTensor,
)
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised.matrix import SCALES, Matrix, scaled, scales_of
from qsf_converter.sources.quantised.stored import FLOATS, FP8, Stored, unpack

_PACKED: Final = "_packed"
_FORMATS: Final = (
    None, "dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized",
    "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
_NVFP4_COLS: Final = 16


def matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices with scales. Raises QsfConversionError if a part is missing or does not
    fit.
    """
    _check(own)
    block, bits = _block_of(own), _bits_of(own)
    for tensor in stored.tensors.values():
        name = tensor.name
        if name.endswith(("_scale", "_scale_inv", "_zero_point")):
            continue
        if name.endswith(_PACKED):
            yield _packed(stored, tensor, bits)
        elif tensor.dtype == "U8" and f"{name}_scale" in stored.tensors:
            yield _nvfp4(stored, name, tensor, f"{name}_scale", f"{name}_scale_2")
        elif tensor.dtype in (*FP8, "I8"):
            scales = [f"{name}{end}" for end in ("_scale_inv", "_scale")]
            scale = next((end for end in scales if end in stored.tensors), None)
            zero = f"{name}_zero_point"
            if scale is not None:
                parts = (name, scale, *([zero] if zero in stored.tensors else []))
                yield scaled(stored, name, tensor, parts, block=block)
            elif own:
                raise QsfConversionError(f"tensor {name} is {tensor.dtype} and has no {scales[0]}")
            elif tensor.dtype in FP8:  # a cast, not a quantisation
                yield Matrix(name, tensor.shape, "FP8", (name,), _cast(stored, name))


def _check(own: Config) -> None:
    if own.get("quant_method") == "compressed-tensors" and own.get("format") not in _FORMATS:
        raise own.error("format", f"= {shown(own['format'])} is not supported")
    for name in ("transform_config", "sparsity_config"):
        stated = own.get(name)
        if stated and not (isinstance(stated, dict) and stated.get("format") == "dense"):
            raise own.error(name, f"= {shown(stated)} is not supported")


def _weights_of(own: Config) -> list[dict[str, Any]]:
    """Return how each group of compressed-tensors stores its weights."""
    groups = own.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") for group in groups if isinstance(group, dict)]
    return [stated for stated in weights if isinstance(stated, dict)]


def _block_of(own: Config) -> Sequence[int]:
    blocks = [own.get("weight_block_size"), *(w.get("block_structure") for w in _weights_of(own))]
    block: Any = next((block for block in blocks if block), [])
    if isinstance(block, str):  # "128x128"
        block = [int(size) if size.isdecimal() else 0 for size in block.lower().split("x")]
    if block and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) for b in block)
    ):
        raise own.error("weight_block_size", f"= {shown(block)} is not two sizes")
    return [*block]


def _bits_of(own: Config) -> set[int]:
    return {w["num_bits"] for w in _weights_of(own) if w.get("num_bits") in (1, 2, 4, 8)}


def _cast(stored: Stored, name: str) -> Any:
    def read(start: int, stop: int) -> RawArray:
        return stored.rows(name, start, stop)

    return read


def _packed(stored: Stored, words: SourceTensor, bits: set[int]) -> Matrix:
    """Codes in words of 32 bits, or two of FP4 in a byte; see the compressors pack_quantized,
    nvfp4 and mxfp4 of compressed-tensors.
    """
    name = words.name.removesuffix(_PACKED)
    scale = stored.need(f"{name}_scale", SCALES, of=name)
    if words.dtype == "U8" and scale.dtype == "U8":
        return _mxfp4(name, words, scale, stored)
    if words.dtype == "U8":
        return _nvfp4(stored, name, words, scale.name, f"{name}_global_scale")
    stored.need(words.name, ("I32",), of=name)
    sizes = stored.whole(stored.need(f"{name}_shape", ("I64", "I32"), of=name).name)
    n_cols = int(sizes[-1])
    shape = (*words.shape[:-1], n_cols)
    fitting = [b for b in bits if n_cols > 0 and -(-n_cols * b // 32) == words.shape[-1]]
    if len(fitting) != 1 or sizes.tolist() != list(shape):
        raise QsfConversionError(
            f"tensor {words.name} of shape {list(words.shape)} has no codes of a matrix "
            f"{sizes.tolist()} of {' or '.join(map(str, sorted(bits))) or 'unknown'} bits"
        )
    parts = [words.name, scale.name, f"{name}_shape"]
    groups = _groups(stored, f"{name}_g_idx", n_cols, scale)
    parts += [f"{name}_g_idx"] if f"{name}_g_idx" in stored.tensors else []
    scales = scales_of(stored, scale.name, shape, groups=groups)
    width = fitting[0]
    zeros = None
    if f"{name}_zero_point" in stored.tensors:
        parts.append(f"{name}_zero_point")
        zeros = _zeros(stored, parts[-1], shape, scale.shape[-1], width)
        if groups is None:
            groups = np.arange(n_cols) // -(-n_cols // scale.shape[-1])

    def read(start: int, stop: int) -> RawArray:
        codes = unpack(stored.rows(words.name, start, stop), width)[:, :n_cols]
        values: RawArray = codes.astype(np.float32)
        values -= 1 << (width - 1) if zeros is None else zeros(start, stop)[:, groups]
        values *= scales(start, stop)
        return values

    return Matrix(name, shape, f"INT{width}", tuple(parts), read)


def _groups(
    stored: Stored, name: str, n_cols: int, scale: SourceTensor
) -> NDArray[np.int64] | None:
    """Return the group of each column if these are not in order."""
    if name not in stored.tensors:
        return None
    groups = stored.whole(stored.need(name, ("I32", "I64"), of=scale.name).name).astype(np.int64)
    if len(groups) != n_cols or groups.max(initial=0) >= scale.shape[-1]:
        raise QsfConversionError(
            f"tensor {name} has {len(groups)} numbers up to {groups.max(initial=0)}, expected "
            f"{n_cols} below {scale.shape[-1]}"
        )
    return None if groups.min(initial=0) < 0 else groups  # -1: not used


def _zeros(stored: Stored, name: str, shape: tuple[int, ...], n_groups: int, bits: int) -> Any:
    """Return a function of rows: zeros, which are packed along the rows of the matrix."""
    words = stored.need(name, ("I32",), of=name)
    if words.shape != (-(-shape[0] * bits // 32), n_groups) or len(shape) != 2:
        raise QsfConversionError(
            f"tensor {name} of shape {list(words.shape)} has no zeros of {n_groups} groups of a "
            f"matrix {list(shape)}"
        )

    def read(start: int, stop: int) -> RawArray:
        first, last = start * bits // 32, -(-stop * bits // 32)
        codes = unpack(stored.rows(name, first, last).T, bits)
        skipped = start - first * 32 // bits
        zeros: RawArray = codes[:, skipped : skipped + stop - start].T.astype(np.float32)
        return zeros

    return read


def _nvfp4(stored: Stored, name: str, codes: SourceTensor, scale: str, total: str) -> Matrix:
    """Two E2M1 in a byte, a scale of E4M3 for 16, and one of f32: modelopt multiplies by it,
    compressed-tensors divides.
    """
    stored.need(scale, ("F8_E4M3",), of=name)
    stored.need(total, FLOATS, of=name)
    factor = stored.whole(total).astype(np.float32)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    if factor.size != 1 or stored.tensors[scale].shape[-1] * _NVFP4_COLS != shape[-1]:
        raise QsfConversionError(f"tensor {scale} has no scales of blocks of 16 of {name}")
    scales = scales_of(stored, scale, shape)

    def read(start: int, stop: int) -> RawArray:
        values = MXFP4_VALUES[unpack(stored.rows(codes.name, start, stop), 4)]
        of_blocks = scales(start, stop)
        is_divided = total.endswith("_global_scale")
        values *= of_blocks / factor if is_divided else of_blocks * factor
        return values

    return Matrix(name, shape, "NVFP4", (codes.name, scale, total), read)


def _mxfp4(name: str, codes: SourceTensor, scale: SourceTensor, stored: Stored) -> Matrix:
    """MXFP4 as gpt-oss has it, by other names: it is kept."""
    n_cols = 2 * codes.shape[-1]
    if scale.shape != (*codes.shape[:-1], n_cols // MXFP4_COLS) or n_cols % MXFP4_COLS:
        raise QsfConversionError(f"tensor {scale.name} has no scales of blocks of 32 of {name}")

    def read(start: int, stop: int) -> RawArray:
        raw = np.empty((stop - start, n_cols // MXFP4_COLS), MXFP4_BLOCK)
        raw["codes"] = stored.rows(codes.name, start, stop).reshape(*raw.shape, -1)
        raw["scale"] = stored.rows(scale.name, start, stop)
        return raw

    return Matrix(name, (*codes.shape[:-1], n_cols), MXFP4, (codes.name, scale.name), read)
