"""HuggingFace checkpoints that torch.save wrote: pytorch_model.bin, single or sharded.

Such a file is a zip file with a pickle that describes the tensors and one record of plain
numbers for each storage. The pickle is not executed, and torch is not needed. Rows are read
from the file on request.

A pickle is a program for a small stack machine that may import and call whatever it likes. Python's
``pickletools`` reads the instructions; those that torch.save uses are followed here, imports and
calls only where they describe tensors as plain data. All others are refused by name.

Python's own ``pickle.Unpickler`` with a strict ``find_class`` is not safe enough: one instruction
makes it allocate 32 GB for its memo (LONG_BINPUT), and a deeply nested tuple used as a key
overflows the C stack when it is hashed. Here keys are texts, the memo is a dictionary, and the
number of instructions is bounded.

Sources: torch/_utils.py and torch/serialization.py for what torch writes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import SourceTensor
from qsf_converter.sources.checkpoint_files import FileCheckpoint, Located, is_count

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


# ---- the pickle ----

# For 1000 tensors torch.save writes about 30 000 instructions and 200 kB.
MAX_PICKLE_BYTES = 16 << 20
_MAX_INSTRUCTIONS = 2_000_000

# The storages of torch, and safetensors' names of their types.
STORAGE_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "ComplexFloatStorage": ("C64", 8),
}
_CALLABLE = {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
}


@dataclass(frozen=True, slots=True)
class StorageType:
    name: str


@dataclass(frozen=True, slots=True)
class Function:
    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A record of numbers, ``data/<key>`` in the zip file."""

    key: str
    dtype: str
    item_bytes: int
    n_items: int


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A view of a storage; offset and strides count numbers, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _RefusedError(Exception):
    """Raised if a pickle is refused; the text is the reason on one line."""


def read_state_dict(data: bytes) -> dict[str, TorchTensor]:
    """Return the tensors of a state dict by name; other values are left out.

    Raises QsfConversionError, without a file name, if the pickle is damaged, is not a dictionary
    of tensors, or calls a function that is not torch's own for tensors.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise QsfConversionError(
            f"its pickle of {len(data)} bytes is too large to be right (at most {MAX_PICKLE_BYTES})"
        )
    try:
        result = _Machine().run(data)
    except _RefusedError as error:
        raise QsfConversionError(str(error)) from error
    except ValueError as error:  # of pickletools
        fault = " ".join(str(error)[:200].split())
        raise QsfConversionError(f"its pickle is damaged: {fault}") from error
    if not isinstance(result, dict):
        raise QsfConversionError(f"it holds a {_kind(result)}, not a dictionary of tensors")
    tensors = {key: value for key, value in result.items() if isinstance(value, TorchTensor)}
    if not tensors:
        keys = ", ".join(repr(key[:40]) for key in list(result)[:4])
        raise QsfConversionError(
            f"no tensors among what it holds ({keys or 'nothing'}); save the state dict itself"
        )
    return tensors


class _Machine:
    """Runs one pickle, of plain values, dictionaries by texts and the classes above."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Return the value left on the stack. Raises ValueError for damaged instructions."""
        import pickletools  # only such checkpoints need it

        for n, (code, argument, at) in enumerate(pickletools.genops(data)):
            if n == _MAX_INSTRUCTIONS:
                raise _RefusedError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")
            instruction = _INSTRUCTIONS.get(code.name)
            if instruction is None:
                raise _RefusedError(
                    f"its pickle has instruction {code.name} at byte {at}, "
                    "which torch.save does not use"
                )
            instruction(self, argument)
        return self.pop()

    def pop(self) -> Any:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise _RefusedError("its pickle takes from an empty stack")
        return self.stack.pop()

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise _RefusedError("its pickle takes from an empty stack")
        start = self._marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop_items(self, n: int) -> list[Any]:
        return [self.pop() for _ in range(n)][::-1]

    def put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.top()

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise _RefusedError(f"its pickle recalls value {index}, which it never kept")
        self.stack.append(self._memo[index])

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise _RefusedError(f"its pickle appends to a {_kind(target)}")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError(f"its pickle sets items of a {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise _RefusedError(f"its pickle has a {_kind(key)} as a key, not a text")
            target[key] = value

    # ---- imports and calls of an unpickler ----

    def import_name(self, module: Any, name: Any) -> None:
        if not isinstance(name, str) or not isinstance(module, str):
            raise _RefusedError("its pickle imports something that is not named by texts")
        full = f"{module}.{name}"
        if full in _CALLABLE:
            self.stack.append(Function(full))
        elif module == "torch" and name in STORAGE_DTYPES:
            self.stack.append(StorageType(name))
        else:
            raise _RefusedError(
                f"its pickle asks for {full[:200]!r}, which is not part of a tensor and is "
                "not executed; save only the state dict"
            )

    def call(self) -> None:
        function, arguments = self.pop_items(2)
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise _RefusedError(f"its pickle calls a {_kind(function)}")
        if function.name == "collections.OrderedDict":
            if arguments not in ((), ([],)):
                raise _RefusedError("its pickle makes a dictionary in a way torch.save does not")
            self.stack.append({})
        elif function.name == "torch._utils._rebuild_parameter":
            if not arguments or not isinstance(arguments[0], TorchTensor):
                raise _RefusedError("its pickle makes a parameter of something else than a tensor")
            self.stack.append(arguments[0])
        else:
            self.stack.append(_tensor(arguments))

    def build(self) -> None:
        """Drop a dictionary's attributes, in which torch keeps versions of modules."""
        self.pop()
        if not isinstance(self.top(), dict):
            raise _RefusedError(f"its pickle sets attributes of a {_kind(self.top())}")

    def storage(self) -> None:
        """Read the persistent id of a storage: ("storage", type, key, device, n_items)."""
        reference = self.pop()
        if (
            not isinstance(reference, tuple)
            or len(reference) != 5
            or reference[0] != "storage"
            or not isinstance(reference[1], StorageType)
            or not isinstance(reference[2], str)
            or not is_count(reference[4])
        ):
            raise _RefusedError("its pickle describes a storage in an unknown way")
        dtype, item_bytes = STORAGE_DTYPES[reference[1].name]
        self.stack.append(Storage(reference[2], dtype, item_bytes, reference[4]))


def _tensor(arguments: tuple[Any, ...]) -> TorchTensor:
    # storage, offset, shape, strides, requires_grad, backward_hooks[, metadata]
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        raise _RefusedError("its pickle describes a tensor in an unknown way")
    storage, offset, shape, strides = arguments[:4]
    if (
        not is_count(offset)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or len(shape) != len(strides)
        or len(shape) > 16
        or not all(map(is_count, shape))
        or not all(map(is_count, strides))
    ):
        raise _RefusedError(
            f"its pickle has a tensor of storage {storage.key[:40]!r} with a shape, strides or an "
            "offset that are no sizes"
        )
    if len(arguments) == 7 and arguments[6]:
        raise _RefusedError(
            "its pickle has a tensor that is a conjugated or negated view, which is not supported"
        )
    last = (
        0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    )
    if offset + last > storage.n_items:
        raise _RefusedError(
            f"its pickle has a tensor that reaches item {offset + last} of storage "
            f"{storage.key[:40]!r}, which has {storage.n_items}"
        )
    return TorchTensor(storage, offset, shape, strides)


def _kind(value: Any) -> str:
    if isinstance(value, (Function, StorageType)):
        return value.name
    return type(value).__name__


def _check_protocol(_machine: _Machine, protocol: int) -> None:
    if not 2 <= protocol <= 5:
        raise _RefusedError(f"its pickle has protocol {protocol}, not 2 to 5")


# By the names of pickletools.
_INSTRUCTIONS: Mapping[str, Callable[[_Machine, Any], object]] = {
    "PROTO": _check_protocol,
    **dict.fromkeys(("FRAME", "STOP"), lambda _m, _value: None),
    "MARK": lambda m, _: m.mark(),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    **dict.fromkeys(
        ("BININT1", "BININT2", "BININT", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        lambda m, value: m.stack.append(value),
    ),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop_items(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop_items(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop_items(3))),
    "APPEND": lambda m, _: m.extend(m.pop_items(1)),
    "APPENDS": lambda m, _: m.extend(m.pop_to_mark()),
    "SETITEM": lambda m, _: m.update(m.pop_items(2)),
    "SETITEMS": lambda m, _: m.update(m.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda m, names: m.import_name(*names.rsplit(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.import_name(*m.pop_items(2)),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.storage(),
}
