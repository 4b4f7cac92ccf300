"""The head of a GGUF file: its metadata and its table of tensors.

Not read through the ``gguf`` package, whose reader maps the file (so pages of the weights count in
our memory), keeps two numpy arrays for each word of the vocabulary, and trusts every count in the
file. Here each count and length is checked against the file's size before memory is taken. Source:
docs/gguf.md of ggml, versions 2 and 3.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf.file.gguf_parts import MAX_PARTS, part_names

MAGIC: Final = b"GGUF"

_VERSIONS = (2, 3)
# The largest vocabularies (260 000 words and as many merges) take 15 MB.
_MAX_HEAD_BYTES = 64 << 20
_MAX_TENSORS = 1 << 17
# Memory beyond their bytes: 53 MB for so many keys, 64 for so many texts of two letters.
_MAX_KEYS = 1 << 16
_MAX_TEXTS = 1 << 20
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_BUFFER_BYTES = 1 << 20

# Numpy's names of the types of the metadata's numbers, by their number; 8 and 9 are below.
_SCALARS: Final = dict(
    zip(
        (*range(8), 10, 11, 12),
        ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "<u8", "<i8", "<f8"],
        strict=True,
    )
)
# bitnet.cpp's type of ternary matrices. Behind all blocks of one are 32 bytes: an f32, its scale.
I2_S: Final = "I2_S"
_SCALE_BYTES: Final = 32

_STRING = 8
_ARRAY = 9


@functools.cache
def types() -> Mapping[int, tuple[str, int, int]]:
    """Return by the number of a type: its name, the numbers in a block, the bytes of a block."""
    sizes = importlib.import_module("gguf").GGML_QUANT_SIZES
    return {kind.value: (kind.name, *size) for kind, size in sizes.items()} | {36: (I2_S, 128, 32)}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` in numpy's order, the last axis contiguous; bytes from ``offset``.

    ``part`` is the number of its file, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    block_items: int
    block_bytes: int
    offset: int
    n_bytes: int  # of the blocks
    part: int = 0


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The metadata and the tensor list of a file.

    ``metadata`` holds numbers, bools and texts, lists of texts, and other lists as numpy arrays.
    """

    metadata: Mapping[str, Any]
    metadata_sha256: str
    tensors: Mapping[str, GgufTensor]


def read_head(path: Path, raw: io.RawIOBase) -> GgufHead:
    """Read and return the head of the file. The file stays open.

    Raises QsfConversionError when it is no GGUF file, of another version, or damaged.
    """
    n_file_bytes = raw.seek(0, io.SEEK_END)
    raw.seek(0)
    reader = _Reader(path, raw, n_file_bytes)
    try:
        return reader.head()
    finally:
        reader.detach()


class _Reader:
    """Reads numbers and texts from the start of a file, never past its end."""

    def __init__(self, path: Path, raw: io.RawIOBase, n_file_bytes: int) -> None:
        self._path = path
        self._file = io.BufferedReader(raw, _BUFFER_BYTES)
        self._n_file_bytes = n_file_bytes
        self._end = min(n_file_bytes, _MAX_HEAD_BYTES)
        self._at = 0
        self._n_texts = 0
        self._sha256 = hashlib.sha256()

    def detach(self) -> None:
        self._file.detach()

    def head(self) -> GgufHead:
        magic = self._file.peek(4)[:4]
        if magic != MAGIC:
            start = f"begins with {magic!r}" if magic else "is an empty file: copy it again"
            raise QsfConversionError(f"{self._path}: not a GGUF file: it {start}")
        self._take(4, "the magic number")
        version = self._number(4, "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            variant = "big-endian" if swapped in _VERSIONS else f"GGUF version {version}"
            raise QsfConversionError(
                f"{self._path}: {variant} is not supported (little-endian version 2 and 3 are); "
                "convert the original model again"
            )
        n_tensors = self._number(8, "the number of tensors")
        n_keys = self._number(8, "the number of keys")
        self._check_count(n_keys, 13, "keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._text("a key", _MAX_NAME_BYTES)
            if key in metadata:
                raise self._damaged(f"key {key[:200]!r} occurs twice")
            metadata[key] = self._value(key)
        metadata_sha256 = self._sha256.hexdigest()
        self._check_count(n_tensors, 32, "tensors", _MAX_TENSORS)
        entries = [self._tensor_entry() for _ in range(n_tensors)]
        data_off = _aligned(self._at, self._alignment(metadata))
        return GgufHead(metadata, metadata_sha256, self._located(entries, data_off, metadata))

    # ---- values ----

    def _take(self, n_bytes: int, part: str) -> bytes:
        if self._at + n_bytes > self._end:
            raise self._short(n_bytes, part)
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise self._short(n_bytes, part)
        self._at += n_bytes
        self._sha256.update(data)
        return data

    def _number(self, n_bytes: int, part: str) -> int:
        return int.from_bytes(self._take(n_bytes, part), "little")

    def _text(self, part: str, max_bytes: int = _MAX_HEAD_BYTES) -> str:
        n_bytes = self._number(8, part)
        if n_bytes > max_bytes:
            raise self._damaged(f"{part} of {n_bytes} bytes at byte {self._at}")
        # Some files contain words that are not whole characters.
        return self._take(n_bytes, part).decode("utf-8", "replace")

    def _value(self, key: str) -> Any:
        kind = self._number(4, f"the type of {key!r}")
        part = f"the value of {key[:200]!r}"
        if kind == _STRING:
            return self._text(part)
        if kind == _ARRAY:
            return self._array(key, part)
        return self._scalars(kind, 1, key, part)[0].item()

    def _array(self, key: str, part: str) -> Any:
        kind = self._number(4, part)
        count = self._number(8, part)
        if kind == _STRING:
            self._check_count(count, 8, f"texts in {key[:200]!r}", _MAX_TEXTS - self._n_texts)
            self._n_texts += count
            return self._texts(count, part)
        return self._scalars(kind, count, key, part)

    def _texts(self, count: int, part: str) -> list[str]:
        """Read texts as ``_text`` does, several times as fast: vocabularies have many."""
        read, texts = self._file.read, []
        pieces: list[bytes] = []
        for _ in range(count):
            size = read(8)
            n_bytes = int.from_bytes(size, "little")
            if len(size) != 8 or self._at + 8 + n_bytes > self._end:
                raise self._short(8 + n_bytes, part)
            data = read(n_bytes)
            self._at += 8 + n_bytes
            pieces += (size, data)
            # Some files contain words that are not whole characters.
            texts.append(data.decode("utf-8", "replace"))
        self._sha256.update(b"".join(pieces))
        return texts

    def _scalars(self, kind: int, count: int, key: str, part: str) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise self._damaged(f"key {key[:200]!r} has a value of type {kind}, which is unknown")
        dtype: np.dtype[Any] = np.dtype(_SCALARS[kind])
        self._check_count(count, dtype.itemsize, f"numbers in {key[:200]!r}")
        data = self._take(count * dtype.itemsize, part)
        if dtype.kind == "b":
            return np.asarray(np.frombuffer(data, np.uint8) != 0)
        return np.frombuffer(data, dtype)

    # ---- tensors ----

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {str(alignment)[:40]!r}, not a power of two")
        return alignment

    def _tensor_entry(self) -> GgufTensor:
        name = self._text("a tensor's name", _MAX_NAME_BYTES)
        part = f"the entry of tensor {name[:200]!r}"
        n_dims = self._number(4, part)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._damaged(f"tensor {name[:200]!r} has {n_dims} dimensions")
        shape = tuple(self._number(8, part) for _ in range(n_dims))[::-1]
        type_number = self._number(4, part)
        offset = self._number(8, part)
        if type_number not in types():
            raise QsfConversionError(
                f"{self._path}: tensor {name[:200]!r} has type {type_number}, which is unknown; "
                f"supported: {', '.join(kind for kind, _, _ in types().values())}"
            )
        kind, block_items, block_bytes = types()[type_number]
        if shape[-1] % block_items:
            raise self._damaged(
                f"tensor {name[:200]!r}: rows of {shape[-1]} are no whole blocks of {kind}, "
                f"which have {block_items}"
            )
        n_bytes = math.prod(shape) // block_items * block_bytes
        return GgufTensor(name, shape, kind, block_items, block_bytes, offset, n_bytes)

    def _located(
        self, entries: list[GgufTensor], data_off: int, metadata: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """Return the tensors with absolute offsets. They must lie side by side in the file."""
        n_data_bytes = max(0, self._n_file_bytes - data_off)
        alignment = self._alignment(metadata)
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for entry in sorted(entries, key=lambda entry: (entry.offset, entry.n_bytes)):
            name = entry.name[:200]
            if entry.name in tensors:
                raise self._damaged(f"tensor {name!r} occurs twice")
            if entry.offset % alignment:
                raise self._damaged(
                    f"tensor {name!r} at {entry.offset}, which is no multiple of {alignment}"
                )
            if entry.offset < end:
                raise self._damaged(f"tensor {name!r} overlaps the one before it")
            end = entry.offset + entry.n_bytes + (_SCALE_BYTES if entry.type == I2_S else 0)
            if end > n_data_bytes:
                raise QsfConversionError(
                    f"{self._path}: truncated: tensor {name!r} ends at {end} of "
                    f"{n_data_bytes} bytes of tensors"
                )
            tensors[entry.name] = replace(entry, offset=data_off + entry.offset)
        return tensors

    # ---- refusals ----

    def _check_count(
        self, count: int, least_bytes: int, part: str, max_count: int = _MAX_HEAD_BYTES
    ) -> None:
        if count * least_bytes > self._end - self._at:
            raise self._damaged(
                f"{count} {part} do not fit in the {self._end - self._at} bytes behind {self._at}"
            )
        if count > max_count:
            raise self._damaged(f"{count} {part} are too many, allowed: up to {max_count}")

    def _short(self, n_bytes: int, part: str) -> QsfConversionError:
        if self._end < self._n_file_bytes:
            return self._damaged(f"{part} ends behind {_MAX_HEAD_BYTES} bytes of metadata")
        return QsfConversionError(
            f"{self._path}: truncated: {part}, {n_bytes} bytes at {self._at}, "
            f"ends behind the file's {self._n_file_bytes} bytes"
        )

    def _damaged(self, part: str) -> QsfConversionError:
        return QsfConversionError(f"{self._path}: damaged GGUF file: {part}")


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def read_parts(
    place: Path, open_raw: Callable[[Path], io.RawIOBase]
) -> tuple[GgufHead, tuple[Path, ...]]:
    """Read the head of a file, or of all parts of which it is the first.

    Returns the head, whose tensors name their parts, and the paths of all parts. The files, opened
    by ``open_raw`` in this order, stay open. Raises QsfConversionError if a part is missing or
    another model's, or if the file is not the first part.
    """
    head = read_head(place, open_raw(place))
    n_parts = _count(head, "split.count", 1)
    if n_parts in (0, 1):
        return head, (place,)
    names = part_names(place.name)
    if _count(head, "split.no") != 0 or n_parts != len(names) or place.name != names[0]:
        raise _not_the_first(place, head, names)
    tensors = dict(head.tensors)
    paths = [place.with_name(name) for name in names]
    for i, path in enumerate(paths[1:], 1):
        if not path.exists():
            raise QsfConversionError(
                f"{path} is missing: it is part {i + 1} of the {n_parts} parts of {place.name}"
            )
        part = read_head(path, open_raw(path))
        if (_count(part, "split.no"), _count(part, "split.count")) != (i, n_parts):
            raise QsfConversionError(
                f"{path}: by its metadata this is not part {i + 1} of {n_parts}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise QsfConversionError(f"{path}: tensor {name[:200]} is in an earlier part too")
            tensors[name] = dataclasses.replace(tensor, part=i)
    n_tensors = _count(head, "split.tensors.count", len(tensors))
    if n_tensors != len(tensors):
        raise QsfConversionError(
            f"{place}: its {n_parts} parts have {len(tensors)} tensors, and it says {n_tensors}"
        )
    return dataclasses.replace(head, tensors=tensors), tuple(paths)


def _count(head: GgufHead, key: str, default: int = -1) -> int:
    """Return a number of the metadata; -1 if the value is not a number."""
    value = head.metadata.get(key, default)
    return value if isinstance(value, int) else -1


def _not_the_first(place: Path, head: GgufHead, names: tuple[str, ...]) -> QsfConversionError:
    if len(names) > 1 and place.name != names[0]:
        return QsfConversionError(
            f"{place} is one of {len(names)} parts: name the first, {place.with_name(names[0])}"
        )
    number, n_parts = (str(head.metadata.get(f"split.{key}"))[:20] for key in ("no", "count"))
    return QsfConversionError(
        f"{place}: its metadata say that it is part {number} (the first is 0) of {n_parts}, which "
        f"must be up to {MAX_PARTS} and part of the name: NAME-00001-of-00003.gguf"
    )
