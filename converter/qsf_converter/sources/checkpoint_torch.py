"""HuggingFace checkpoints that torch.save wrote: pytorch_model.bin, single or sharded.

Such a file is a zip file with a pickle that describes the tensors and one record of plain
numbers for each storage. The pickle is not executed (see ``torch_pickle``) and torch is not
needed. Rows are read from the file on request.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import SourceTensor
from qsf_converter.sources.checkpoint_files import FileCheckpoint, Located
from qsf_converter.sources.torch_pickle import MAX_PICKLE_BYTES, TorchTensor, read_state_dict

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"

_LOCAL: Final = struct.Struct("<4s22x2H")  # of a record's header: signature, bytes behind it
_SLAB_BYTES = 4 << 20  # of a wider matrix held at once
_MAX_ORDER_BYTES = 16
_OLD_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")  # the first number of torch's old format


@dataclass(slots=True, kw_only=True)
class _View(Located):
    """A tensor in a storage: [row, col] is item row * row_step + col * col_step after its offset.

    The steps count items. ``problem`` is the reason if it cannot be read.
    """

    row_step: int
    col_step: int
    item_bytes: int
    problem: str | None


class TorchCheckpoint(FileCheckpoint[_View]):
    """The weights of one model directory; a ``Checkpoint``.

    Raises QsfConversionError when the directory holds no file of torch.save, or one that is
    damaged, in torch's old format, or contains more than tensors; QsfIOError when the system
    refuses to read.
    """

    def _open(self, model_dir: Path) -> None:
        if not self._open_named(model_dir, SINGLE_NAME, INDEX_NAME):
            raise QsfConversionError(
                f"{model_dir}: no PyTorch weights ({SINGLE_NAME} or {INDEX_NAME})"
            )

    def _open_file(self, path: Path) -> dict[str, _View]:
        file = self._open_raw(path)
        _check_format(path, file)
        archive = _open_zip(path, file)
        records = {record.filename: record for record in archive.infolist()}
        pickles = [name for name in records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise QsfConversionError(
                f"{path}: not a file of torch.save: {len(pickles)} records called data.pkl"
            )
        top = pickles[0].removesuffix("data.pkl")
        order = records.get(f"{top}byteorder")
        if order is not None and (
            order.file_size > _MAX_ORDER_BYTES or _read_record(path, archive, order) != b"little"
        ):
            raise QsfConversionError(
                f"{path}: its numbers are big-endian, which is not supported; save it again on a "
                "little-endian machine"
            )
        if records[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise QsfConversionError(
                f"{path}: its pickle of {records[pickles[0]].file_size} bytes is too large to be "
                f"right (at most {MAX_PICKLE_BYTES})"
            )
        data = _read_record(path, archive, records[pickles[0]])
        try:
            tensors = read_state_dict(data)
        except QsfConversionError as error:
            raise QsfConversionError(f"{path}: {error}") from error
        return {
            name: _locate(path, file, name, tensor, records.get(f"{top}data/{tensor.storage.key}"))
            for name, tensor in tensors.items()
        }

    def _stored_rows(self, located: _View, start: int, stop: int) -> bytearray:
        if located.problem is not None:
            raise QsfConversionError(f"tensor {located.tensor.name} {located.problem}")
        n_rows, item_bytes = stop - start, located.item_bytes
        n_cols = located.tensor.row_bytes // item_bytes
        if not n_rows or not n_cols or (located.row_step, located.col_step) == (n_cols, 1):
            return super()._stored_rows(located, start, stop)
        dtype: np.dtype[np.generic] = np.dtype((np.void, item_bytes))
        rows = bytearray(n_rows * n_cols * item_bytes)
        out = np.frombuffer(rows, dtype).reshape(n_rows, n_cols)
        if located.col_step == 1:  # columns of a wider matrix
            step = max(1, _SLAB_BYTES // (located.row_step * item_bytes))
            for first in range(start, stop, step):
                n = min(step, stop - first)
                n_items = (n - 1) * located.row_step + n_cols
                slab = self._items(located, first * located.row_step, n_items, dtype)
                starts = np.arange(n)[:, None] * located.row_step
                out[first - start : first - start + n] = slab[starts + np.arange(n_cols)]
            return rows
        for col in range(n_cols):  # transposed: neighbours in the file form a column
            out[:, col] = self._items(located, col * located.col_step + start, n_rows, dtype)
        return rows

    def _items(
        self, located: _View, first: int, n_items: int, dtype: np.dtype[np.generic]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        size = located.item_bytes
        return np.frombuffer(self._read_at(located, first * size, n_items * size), dtype)


def _check_format(path: Path, file: io.RawIOBase) -> None:
    """Raise QsfConversionError if the file is not a zip file; the text says what it is."""
    head = file.read(512) or b""
    if head.startswith(b"PK\x03\x04"):
        return
    is_old_pickle = head[:1] == b"\x80" and _OLD_MAGIC in head[:32]
    if is_old_pickle or head[257:262] == b"ustar":
        raise QsfConversionError(
            f"{path}: written in torch.save's old format (before PyTorch 1.6); to renew it, in "
            "Python with torch installed: torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if head.startswith(b"version https://git-lfs"):
        raise QsfConversionError(f"{path}: a Git LFS pointer, not the file itself; git lfs pull")
    raise QsfConversionError(f"{path}: not a file of torch.save: it is no zip file")


class _Bounded:
    """A file of which nobody reads more at once than a pickle, or a directory, may have."""

    def __init__(self, file: io.RawIOBase) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def seekable(self) -> bool:
        return True

    def read(self, n: int = -1) -> bytes:
        if n > MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile(f"{n} bytes at once are too many to be right")
        return self._read(min(n, MAX_PICKLE_BYTES) if n >= 0 else MAX_PICKLE_BYTES) or b""


def _open_zip(path: Path, file: io.RawIOBase) -> zipfile.ZipFile:
    """Return the zip file, whose records are neither packed nor called alike.

    Raises QsfConversionError if it is damaged or has other records.
    """
    try:
        archive = zipfile.ZipFile(_Bounded(file))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OSError) as error:
        raise _damaged(path, error) from error
    names = set[str]()
    for record in archive.infolist():
        name = f"{record.filename[:200]!r}"
        if record.filename in names:
            raise _damaged(path, f"two records are called {name}")
        names.add(record.filename)
        if record.flag_bits & 1:
            raise QsfConversionError(f"{path}: its record {name} is encrypted")
        if record.compress_type or record.compress_size != record.file_size:
            raise QsfConversionError(
                f"{path}: its record {name} is compressed, which torch.save never does; "
                "unpack the file and pack it again with zip -0"
            )
        if not 0 <= record.header_offset <= archive.start_dir - record.file_size:
            raise _damaged(path, f"truncated: {name} does not end before {archive.start_dir}")
    return archive


def _read_record(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(record)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError) as error:
        raise _damaged(path, error) from error


def _begin_of(path: Path, file: io.RawIOBase, record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin, behind a header of its own."""
    file.seek(record.header_offset)
    header = file.read(_LOCAL.size) or b""
    if len(header) != _LOCAL.size or not header.startswith(b"PK\x03\x04"):
        raise _damaged(path, f"no header of {record.filename[:200]!r} at {record.header_offset}")
    _, n_name, n_extra = _LOCAL.unpack(header)
    return record.header_offset + _LOCAL.size + int(n_name) + int(n_extra)


def _damaged(path: Path, fault: object) -> QsfConversionError:
    return QsfConversionError(
        f"{path}: damaged or truncated zip file: {' '.join(str(fault)[:300].split())}"
    )


def _locate(
    path: Path, file: io.RawIOBase, name: str, tensor: TorchTensor, record: zipfile.ZipInfo | None
) -> _View:
    storage = tensor.storage
    if record is None:
        raise QsfConversionError(f"{path}: tensor {name}: no record data/{storage.key[:40]}")
    n_bytes = storage.n_items * storage.item_bytes
    if n_bytes > record.file_size:
        raise QsfConversionError(
            f"{path}: tensor {name}: {storage.n_items} items of {storage.dtype} take {n_bytes} "
            f"bytes, their record {record.filename[:200]} has {record.file_size}"
        )
    steps, problem = _steps(tensor)
    n_items = math.prod(tensor.shape)
    if problem is not None and n_items > storage.n_items:
        n_items = 0  # an expanded tensor: the file does not hold as many values
    return _View(
        tensor=SourceTensor(name, tensor.shape, storage.dtype, n_items * storage.item_bytes),
        file=file,
        path=path,
        file_off=_begin_of(path, file, record) + tensor.offset * storage.item_bytes,
        row_step=steps[0],
        col_step=steps[1],
        item_bytes=storage.item_bytes,
        problem=problem,
    )


def _steps(tensor: TorchTensor) -> tuple[tuple[int, int], str | None]:
    shape = tensor.shape
    dense = []
    size = 1
    for length in reversed(shape):
        dense.append(size)
        size *= length
    dense.reverse()
    n_cols = dense[0] if len(shape) > 1 else size
    # The step along an axis of length 1 is unused.
    given = [d if n <= 1 else s for n, s, d in zip(shape, tensor.strides, dense, strict=True)]
    if given == dense or 0 in shape:
        return (n_cols, 1), None
    if len(shape) == 2:
        (n_rows, n_cols), (row_step, col_step) = shape, given
        if col_step == 1 and row_step >= n_cols:
            return (row_step, 1), None
        if row_step == 1 and col_step >= n_rows:
            return (1, col_step), None
    return (n_cols, 1), (
        f"of shape {list(shape)} has strides {list(tensor.strides)}, which is neither a matrix nor "
        "a transposed one; save it with .contiguous()"
    )
