"""HuggingFace checkpoints in safetensors files, single or sharded.

The files are read here and not through the ``safetensors`` package: its numpy side has no
bf16, and it maps files into memory, so that pages of the weights count as ours. The format is
small: u64 header size, a JSON header of ``name -> dtype, shape, [begin, end)``, the bytes.
Every number in the header is checked against the file before a tensor is read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qsf.converter.checkpoint import RawArray, SourceTensor
from qsf.errors import QsfConversionError, QsfIOError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100 << 20
_MAX_INDEX_BYTES = 100 << 20
_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(slots=True)
class _Located:
    """A tensor, where it lies, and the hash of the part of it that has been read in order."""

    tensor: SourceTensor
    file: io.FileIO
    path: Path
    file_off: int
    n_hashed: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)


class SafetensorsCheckpoint:
    """The weights of one model directory; a ``Checkpoint``.

    Use it as a context manager. Raises QsfConversionError when the directory holds no
    safetensors file or a damaged one, QsfIOError when the system refuses to read.
    """

    def __init__(self, model_dir: Path) -> None:
        """Open the files and check their headers."""
        self._files: list[io.FileIO] = []
        self._located: dict[str, _Located] = {}
        self._paths: tuple[Path, ...] = ()
        try:
            self._open(model_dir)
        except OSError as error:
            self.close()
            raise QsfIOError(f"{error.filename or model_dir}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        self._tensors = {name: located.tensor for name, located in self._located.items()}

    def __enter__(self) -> SafetensorsCheckpoint:
        """Return the open checkpoint."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the files."""
        self.close()

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """All tensors by name."""
        return self._tensors

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return self._paths

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files.clear()

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        """Read rows [start, stop); see ``Checkpoint.read_rows``."""
        located = self._located[name]
        tensor = located.tensor
        dtype = _READABLE.get(tensor.dtype)
        if dtype is None:
            raise QsfConversionError(
                f"tensor {name} is stored as {tensor.dtype}; "
                f"only {', '.join(_READABLE)} weights can be converted"
            )
        if not 0 <= start <= stop <= tensor.n_rows:
            raise IndexError(f"rows [{start}, {stop}) of {name}, which has {tensor.n_rows}")
        buffer = bytearray((stop - start) * tensor.row_bytes)
        begin = start * tensor.row_bytes
        self._read_into(located, begin, memoryview(buffer))
        if begin == located.n_hashed:
            located.sha256.update(buffer)
            located.n_hashed += len(buffer)
        raw: RawArray = np.frombuffer(buffer, dtype)
        return raw.reshape(stop - start, tensor.row_bytes // dtype.itemsize)

    def digest(self) -> str:
        """SHA-256 of all tensors read completely; see ``Checkpoint.digest``."""
        total = hashlib.sha256()
        for name in sorted(self._located):
            located = self._located[name]
            if located.n_hashed == located.tensor.n_bytes:
                line = [name, located.tensor.dtype, located.tensor.shape]
                total.update(json.dumps([*line, located.sha256.hexdigest()]).encode() + b"\n")
        return total.hexdigest()

    def _read_into(self, located: _Located, begin: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``begin`` of a tensor."""
        try:
            located.file.seek(located.file_off + begin)
            n_done = 0
            while n_done < len(view):
                n_read = located.file.readinto(view[n_done:])
                if not n_read:
                    raise QsfIOError(
                        f"{located.path}: the file ends {len(view) - n_done} bytes early "
                        f"in tensor {located.tensor.name}; it shrank while it was read"
                    )
                n_done += n_read
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{located.path}: {error.strerror}") from error

    def _open(self, model_dir: Path) -> None:
        single = model_dir / SINGLE_NAME
        index = model_dir / INDEX_NAME
        if single.exists():
            self._paths = (single,)
            self._located = self._open_file(single)
        elif index.exists():
            self._open_shards(model_dir, _read_index(index))
        else:
            raise QsfConversionError(_describe_absence(model_dir))

    def _open_shards(self, model_dir: Path, weight_map: dict[str, str]) -> None:
        names_of_shard: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            names_of_shard.setdefault(shard, []).append(name)
        missing = [shard for shard in sorted(names_of_shard) if not (model_dir / shard).exists()]
        if missing:
            raise QsfConversionError(
                f"{model_dir}: {len(missing)} of {len(names_of_shard)} shards are missing: "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
            )
        paths = []
        for shard, names in sorted(names_of_shard.items()):
            paths.append(model_dir / shard)
            content = self._open_file(model_dir / shard)
            for name in names:
                if name not in content:
                    raise QsfConversionError(
                        f"{model_dir / shard}: no tensor {name}, which {INDEX_NAME} says is there"
                    )
                self._located[name] = content[name]
        self._paths = tuple(paths)

    def _open_file(self, path: Path) -> dict[str, _Located]:
        file = io.FileIO(path, "rb")
        self._files.append(file)
        n_file_bytes = path.stat().st_size
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
            tensor.name: _Located(tensor, file, path, data_off + begin) for tensor, begin in entries
        }


def _read_index(index: Path) -> dict[str, str]:
    """Return ``weight_map`` of a shard index: tensor name -> file name."""
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise QsfConversionError(f"{index}: {index.stat().st_size} bytes is too large for an index")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise QsfConversionError(f"{index}: not a shard index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise QsfConversionError(f"{index}: weight_map is not an object with entries")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise QsfConversionError(f"{index}: {name}: {shard!r} is not a plain file name")
    return weight_map


def _describe_absence(model_dir: Path) -> str:
    """Say why a directory has nothing to read, and what would help."""
    others = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if others:
        return (
            f"{model_dir}: neither {SINGLE_NAME} nor {INDEX_NAME} is there, "
            f"only {', '.join(others[:4])}"
        )
    torch_files = [*model_dir.glob("pytorch_model*.bin"), *model_dir.glob("*.pth")]
    if torch_files:
        return (
            f"{model_dir}: only safetensors weights are read, not {torch_files[0].name}; to convert"
            " it, in Python with transformers installed:"
            " AutoModelForCausalLM.from_pretrained(DIR, dtype='auto')"
            ".save_pretrained(DIR, safe_serialization=True)"
        )
    return f"{model_dir}: no safetensors weights ({SINGLE_NAME} or {INDEX_NAME})"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _parse_header(path: Path, header: bytes, n_data_bytes: int) -> list[tuple[SourceTensor, int]]:
    """Check a header against the number of bytes behind it; return tensors and their offsets."""
    try:
        parsed = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
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
            what = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise QsfConversionError(
                f"{path}: tensor {tensor.name} at byte {begin} {what}, which ends at {end}"
            )
        end = begin + tensor.n_bytes
    if end != n_data_bytes:
        problem = "truncated" if end > n_data_bytes else "damaged"
        raise QsfConversionError(
            f"{path}: {problem}: {n_data_bytes} bytes of tensors, the header describes {end}"
        )
    return entries


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[SourceTensor, int]:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

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
