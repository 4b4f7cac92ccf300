"""HuggingFace checkpoints in safetensors files, single or sharded.

The files are read here and not through the ``safetensors`` package: its numpy interface lacks
bf16, and it maps files into memory, so pages of the weights count in our memory. The format is
small: u64 header size, a JSON header of ``name -> dtype, shape, [begin, end)``, the bytes. Every
number in the header is checked against the file before a tensor is read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError
from qsf.foreign_json import JsonError, read_json
from qsf_converter.sources.checkpoint import SourceTensor
from qsf_converter.sources.checkpoint_files import FileCheckpoint, Located, is_count
from qsf_converter.sources.metadata import INDEX_MEMORY_BYTES

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100 << 20
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class SafetensorsCheckpoint(FileCheckpoint[Located]):
    """The weights of one model directory; a ``Checkpoint``.

    Raises QsfConversionError when the directory holds no safetensors file or a damaged one,
    QsfIOError when the system refuses to read.
    """

    def _open(self, model_dir: Path) -> None:
        if not self._open_named(model_dir, SINGLE_NAME, INDEX_NAME):
            raise QsfConversionError(_describe_absence(model_dir))

    def _open_file(self, path: Path) -> dict[str, Located]:
        file = self._open_raw(path)
        n_file_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        prefix = file.read(8)
        n_header_bytes = int.from_bytes(prefix or b"", "little")
        if n_file_bytes < 8 or n_header_bytes > n_file_bytes - 8:
            raise QsfConversionError(
                f"{path}: truncated: {n_file_bytes} bytes, "
                f"but its header alone takes {8 + n_header_bytes}"
                if n_file_bytes >= 8 and n_header_bytes <= _MAX_HEADER_BYTES
                else f"{path}: not a safetensors file"
            )
        if n_header_bytes > _MAX_HEADER_BYTES:
            raise QsfConversionError(
                f"{path}: not a safetensors file: header of {n_header_bytes} bytes"
            )
        data_off = 8 + n_header_bytes
        entries = _parse_header(path, file.read(n_header_bytes) or b"", n_file_bytes - data_off)
        return {
            tensor.name: Located(tensor, file, path, data_off + begin) for tensor, begin in entries
        }


def _describe_absence(model_dir: Path) -> str:
    others = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if others:
        return (
            f"{model_dir}: neither {SINGLE_NAME} nor {INDEX_NAME} is there, "
            f"only {', '.join(others[:4])}"
        )
    return f"{model_dir}: no safetensors weights ({SINGLE_NAME} or {INDEX_NAME})"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _parse_header(path: Path, header: bytes, n_data_bytes: int) -> list[tuple[SourceTensor, int]]:
    try:
        parsed = read_json(header, memory_bytes=INDEX_MEMORY_BYTES, object_pairs_hook=_unique_keys)
    except JsonError as error:
        raise QsfConversionError(f"{path}: damaged safetensors header: {error}") from error
    if not isinstance(parsed, dict):
        raise QsfConversionError(f"{path}: damaged safetensors header: not an object")
    entries = [
        _parse_entry(path, name, entry) for name, entry in parsed.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry[1], entry[0].n_bytes))
    end = 0
    for tensor, begin in entries:
        if begin != end:
            fault = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise QsfConversionError(
                f"{path}: tensor {tensor.name} at byte {begin} {fault}, which ends at {end}"
            )
        end = begin + tensor.n_bytes
    if end != n_data_bytes:
        problem = "truncated" if end > n_data_bytes else "damaged"
        raise QsfConversionError(
            f"{path}: {problem}: {n_data_bytes} bytes of tensors, the header describes {end}"
        )
    return entries


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[SourceTensor, int]:
    if not isinstance(entry, dict):
        raise QsfConversionError(f"{path}: tensor {name}: its entry is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or len(shape) > 16
        or not all(map(is_count, shape))
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise QsfConversionError(f"{path}: tensor {name}: damaged entry in the header")
    n_bytes = offsets[1] - offsets[0]
    if dtype in _DTYPE_BYTES and math.prod(shape) * _DTYPE_BYTES[dtype] != n_bytes:
        raise QsfConversionError(
            f"{path}: tensor {name}: {dtype} of shape {shape} takes "
            f"{math.prod(shape) * _DTYPE_BYTES[dtype]} bytes, its entry has {n_bytes}"
        )
    return SourceTensor(name, tuple(shape), dtype, n_bytes), offsets[0]
