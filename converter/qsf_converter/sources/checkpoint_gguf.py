"""The weights of a GGUF file, under the names and in the order of HuggingFace's checkpoints.

F32, F16, BF16 and MXFP4 are returned as stored; other quantised types become f32, through the
``gguf`` package but for two, a range of rows at a time, or are read as bytes (``read_stored``).

llama.cpp's converter reorders the rows of LLaMA's Q and K so that the two halves of each head,
which RoPE rotates together, are interleaved; this module restores the order. Rows are whole blocks
in every type, so the stored bytes are reordered.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources import checkpoint
from qsf_converter.sources.checkpoint_files import READABLE, FileCheckpoint, Located
from qsf_converter.sources.families.family import Family
from qsf_converter.sources.families.gguf import Gguf
from qsf_converter.sources.gguf_config import ROPE_TENSORS, dialect_of, read_model
from qsf_converter.sources.gguf_file import I2_S, GgufHead, GgufTensor, read_parts

_SLAB_BYTES = 4 << 20  # of f32 dequantised at once
_N_ROPE_FACTORS = 4096  # half the largest head_dim


# A block of Q1_0 (ggml-quants.c of llama.cpp): bit 1 is the scale, 0 its negative.
_Q1_0 = np.dtype([("scale", "<f2"), ("bits", "u1", (16,))])
_TERNARY = {"TQ1_0", "TQ2_0", "Q1_0", I2_S}  # types whose values ours has
_BITS_OF_4BIT = 4.5
# Tensors whose rows can be in the order of interleaved RoPE -> the field with their heads.
_PERMUTED = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class LeastType:
    """Our smallest type with at least the bits of a file's type; the file's bits a weight."""

    name: str
    bits: float


@dataclass(slots=True, kw_only=True)
class _Stored(Located):
    """A tensor; if ``n_heads`` is not 0, the rows of each head are interleaved in the file.

    ``scale`` is that of I2_S.
    """

    n_heads: int = 0
    scale: float = 1.0


class GgufCheckpoint(FileCheckpoint[_Stored]):
    """The weights and the configuration of a GGUF file; a ``Checkpoint``.

    A split file is named by its first part. ``head`` is the file's metadata and tensor list,
    ``config`` the same as fields of config.json, ``family`` the family of its tensors,
    ``least_type`` our smallest type with at least their bits (None: they are not quantised),
    ``keeps`` whether some blocks can be kept, ``unkept_type`` the least type of the other tensors,
    and ``warnings`` the parts that were left out.

    Raises QsfConversionError when the file is damaged or holds a model that cannot be converted,
    QsfIOError when the system refuses to read.
    """

    head: GgufHead
    config: dict[str, Any]
    family: Family
    least_type: LeastType | None
    keeps: bool
    unkept_type: LeastType | None
    warnings: tuple[str, ...]

    def _open(self, place: Path) -> None:
        self.head, self._paths = read_parts(place, self._open_raw)
        try:
            self._open_tensors()
        except QsfConversionError as error:
            raise QsfConversionError(f"{place}: {error}") from error

    def _open_tensors(self) -> None:
        """Read the configuration and the RoPE factors; name and locate the other tensors."""
        tensors = dict(self.head.tensors)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        _, form = dialect_of(self.head.metadata)
        factors: dict[str, NDArray[np.float32]] = {
            name: self._rope_factors(tensors.pop(name)) for name in ROPE_TENSORS if name in tensors
        }
        model = read_model(self.head.metadata, shapes, factors)
        self.config, self.family, self.warnings = model.config, model.family, model.warnings
        matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
        self.least_type = _least_type(matrices)
        self.keeps = any(tensor.type in checkpoint.KEPT for tensor in matrices)
        self.unkept_type = _least_type([t for t in matrices if t.type not in checkpoint.KEPT])
        for tensor in tensors.values():
            name = model.name_there(tensor.name)
            if name in self._located:
                raise QsfConversionError(f"two of its tensors are {name}")
            self._located[name] = self._locate(form, name, tensor)

    def _locate(self, form: Gguf, name: str, tensor: GgufTensor) -> _Stored:
        n_heads = 0
        for part, field in _PERMUTED.items() if form.is_permuted else ():
            if part in name:
                n_heads = self.config[field]
                n_rows = tensor.shape[0]
                if not isinstance(n_heads, int) or n_heads < 1 or n_rows % (2 * n_heads):
                    raise QsfConversionError(
                        f"tensor {tensor.name} has {n_rows} rows, which are not "
                        f"{shown(n_heads)} heads of an even size"
                    )
                if len(tensor.shape) == 1 and tensor.block_items > 1:
                    raise QsfConversionError(f"tensor {tensor.name}, a bias, is {tensor.type}")
        return self._stored(name, tensor, n_heads)

    def _stored(self, name: str, tensor: GgufTensor, n_heads: int = 0) -> _Stored:
        source = checkpoint.SourceTensor(name, tensor.shape, tensor.type, tensor.n_bytes)
        file, path = self._files[tensor.part], self._paths[tensor.part]
        stored = _Stored(source, file, path, tensor.offset, n_heads=n_heads)
        if tensor.type == I2_S:
            scale = self._read_at(stored, tensor.n_bytes, 4)
            stored.scale = float(np.frombuffer(scale, "<f4")[0])
            stored.sha256.update(scale)
        return stored

    def _rope_factors(self, tensor: GgufTensor) -> NDArray[np.float32]:
        if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _N_ROPE_FACTORS:
            raise QsfConversionError(
                f"tensor {tensor.name} is {tensor.type} of shape {list(tensor.shape)}, "
                "which is not a list of RoPE factors"
            )
        located = self._stored(tensor.name, tensor)
        return np.frombuffer(self._read_at(located, 0, tensor.n_bytes), "<f4")

    def _check_readable(self, located: _Stored) -> None:
        if located.tensor.dtype not in (*READABLE, checkpoint.MXFP4, *_OWN):
            _dequantiser(located.tensor)

    def _stored_rows(self, located: _Stored, start: int, stop: int) -> bytearray:
        tensor = located.tensor
        if not located.n_heads or not tensor.n_bytes:
            return super()._stored_rows(located, start, stop)
        if len(tensor.shape) == 1:  # rows of a bias are its columns
            item_bytes = tensor.n_bytes // tensor.shape[0]
            return self._split_heads(located, 0, tensor.shape[0], item_bytes)[: tensor.n_bytes]
        head_dim = tensor.n_rows // located.n_heads
        first = start // head_dim * head_dim
        rows = self._split_heads(located, first, -(-stop // head_dim) * head_dim, tensor.row_bytes)
        return rows[(start - first) * tensor.row_bytes : (stop - first) * tensor.row_bytes]

    def _split_heads(self, located: _Stored, first: int, last: int, row_bytes: int) -> bytearray:
        """Return rows [first, last) of whole heads, with the halves of each head de-interleaved."""
        n_rows = located.tensor.shape[0]
        stored = self._read_at(located, first * row_bytes, (last - first) * row_bytes)
        # [heads, pairs, halves, row] in the file -> [heads, halves, pairs, row]
        pairs = n_rows // located.n_heads // 2
        rows = np.frombuffer(stored, np.uint8).reshape(-1, pairs, 2, row_bytes)
        return bytearray(np.ascontiguousarray(rows.swapaxes(1, 2)))

    def _values(self, located: _Stored, stored: bytearray, n_rows: int) -> checkpoint.RawArray:
        tensor = located.tensor
        if tensor.dtype in READABLE:
            return super()._values(located, stored, n_rows)
        if tensor.dtype == checkpoint.MXFP4:
            return _mxfp4_blocks(stored, n_rows)
        n_cols = tensor.shape[-1]
        dequantise = _OWN.get(tensor.dtype)
        if dequantise is None:
            package, kind = _dequantiser(tensor)
            dequantise = partial(package.quants.dequantize, qtype=kind)
        rows = np.frombuffer(stored, np.uint8).reshape(n_rows, tensor.row_bytes)
        values = np.empty((n_rows, n_cols), np.float32)
        step = max(1, _SLAB_BYTES // max(1, n_cols * 4))
        for start in range(0, n_rows, step):
            slab = rows[start : start + step]
            # A damaged file may have scales of NaN: rounding refuses them.
            with np.errstate(all="ignore"):
                values[start : start + step] = dequantise(slab)
                if tensor.dtype == I2_S:
                    values[start : start + step] *= np.float32(located.scale)
        return values


def _signs(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of rows of Q1_0."""
    blocks = rows.view(_Q1_0)
    signs = np.unpackbits(blocks["bits"], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    return np.asarray(signs * blocks["scale"][..., None].astype(np.float32)).reshape(len(rows), -1)


def _trits(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of rows of I2_S before their scale; columns 0 .. 31 of a block are the upper bits.

    As the kernels of bitnet.cpp read them (ggml-bitnet-mad.cpp), which never writes the code 3.
    """
    codes = rows.reshape(len(rows), -1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
    values: NDArray[np.float32] = np.array([-1, 0, 1, np.nan], np.float32)[codes]
    return values.reshape(len(rows), -1)


_OWN = {"Q1_0": _signs, I2_S: _trits}  # types that the package gguf does not dequantise


def _mxfp4_blocks(stored: bytearray, n_rows: int) -> checkpoint.RawArray:
    """Return the blocks [n_rows, n_blocks]; in the file low halves of bytes are columns 0 .. 15."""
    raw = np.frombuffer(stored, checkpoint.MXFP4_BLOCK).reshape(n_rows, -1)
    codes = np.concatenate((raw["codes"] & 15, raw["codes"] >> 4), axis=-1)
    pairs = codes.reshape(*raw.shape, checkpoint.MXFP4_COLS // 2, 2)
    blocks = np.empty(raw.shape, checkpoint.MXFP4_BLOCK)
    blocks["scale"] = raw["scale"]
    blocks["codes"] = pairs[..., 0] | pairs[..., 1] << 4
    return blocks


def _least_type(tensors: Iterable[GgufTensor]) -> LeastType | None:
    """Return our smallest type with at least the bits of the layers' matrices; None: they are not
    quantised.

    Matrices of MXFP4 keep their type in any case.

    Types of 5 bits and more become 8bit, also Q8_0, whose 8.5 bits hold numbers of 8 bits.
    """
    matrices = [t for t in tensors if t.name.startswith("blk.") and t.type != checkpoint.MXFP4]
    types = {t.type for t in matrices}
    if types <= set(READABLE):
        return None
    bits = 8 * sum(t.n_bytes for t in matrices) / sum(math.prod(t.shape) for t in matrices)
    if types <= _TERNARY:
        return LeastType("ternary", bits)
    return LeastType("4bit" if bits <= _BITS_OF_4BIT else "8bit", bits)


def readable_types() -> list[str]:
    """Return the names of GGUF's types that are read: all that the installed ``gguf`` knows."""
    package: Any = importlib.import_module("gguf")
    kinds = [kind for kind in package.GGML_QUANT_SIZES if kind.name not in READABLE]
    known = [kind.name for kind in kinds if kind.name in _OWN or _is_dequantised(package, kind)]
    return [*READABLE, *known, I2_S]


def _is_dequantised(package: Any, kind: Any) -> bool:
    try:
        _, block_bytes = package.GGML_QUANT_SIZES[kind]
        package.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


def _dequantiser(tensor: checkpoint.SourceTensor) -> tuple[Any, Any]:
    """Return the ``gguf`` package and its number of the type.

    Raises QsfConversionError if the package cannot dequantise ``tensor``.
    """
    package: Any = importlib.import_module("gguf")
    kind = getattr(package.GGMLQuantizationType, tensor.dtype, None)
    if not _is_dequantised(package, kind):
        raise QsfConversionError(
            f"tensor {tensor.name} is stored as {tensor.dtype}, which the installed package gguf "
            "cannot dequantise; convert the original model, or try a newer gguf"
        )
    return package, kind
