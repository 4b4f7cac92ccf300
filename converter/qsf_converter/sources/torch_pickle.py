"""Reads descriptions of tensors from the pickle of torch.save without executing anything.

A pickle is a program for a small stack machine that may import and call whatever it likes.
This machine knows only the instructions that torch.save uses, and handles imports and calls that
describe tensors as plain data. It refuses all others by name.

Python's own ``pickle.Unpickler`` with a strict ``find_class`` is not safe enough: one instruction
makes it allocate 32 GB for its memo (LONG_BINPUT), and a deeply nested tuple used as a key
overflows the C stack when it is hashed. Here keys are texts, the memo is a dictionary, and the
number of instructions is bounded.

Sources: PEP 307, PEP 3154 and ``pickletools`` for the instructions; torch/_utils.py and
torch/serialization.py for what torch writes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint_files import is_count

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
        result = _Machine(data).run()
    except _RefusedError as error:
        raise QsfConversionError(str(error)) from error
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
    """Runs one pickle. Values are None, bools, ints, floats, texts, bytes, lists, tuples,
    dictionaries with texts as keys, and the classes above.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_INSTRUCTIONS):
            code = self._take(1)[0]
            if code == _STOP:
                return self._pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise _RefusedError(
                    f"its pickle has instruction {code:#04x} at byte {self._at - 1}, "
                    "which torch.save does not use"
                )
            instruction(self)
        raise _RefusedError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")

    # ---- reading ----

    def _take(self, n: int) -> bytes:
        stop = self._at + n
        if stop > len(self._data):
            raise _RefusedError(f"its pickle is cut off: {n} bytes at {self._at} are not there")
        taken = self._data[self._at : stop]
        self._at = stop
        return taken

    def number(self, n_bytes: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(n_bytes), "little", signed=signed)

    def double(self) -> float:
        return float(struct.unpack(">d", self._take(8))[0])

    def text(self, n_bytes: int) -> str:
        try:
            return self._take(n_bytes).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise _RefusedError(f"its pickle has a text that is not UTF-8: {error}") from error

    def line(self) -> str:
        stop = self._data.find(b"\n", self._at, self._at + 1024)
        if stop < 0:
            raise _RefusedError("its pickle has a name without an end")
        name = self.text(stop - self._at)
        self._at = stop + 1
        return name

    # ---- the stack ----

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise _RefusedError("its pickle takes from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise _RefusedError("its pickle takes from an empty stack")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def put(self, index: int) -> None:
        self._memo[index] = self._top()

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise _RefusedError(f"its pickle recalls value {index}, which it never kept")
        self.push(self._memo[index])

    # ---- containers ----

    def tuple_of(self, n_items: int) -> None:
        items = [self._pop() for _ in range(n_items)]
        self.push(tuple(reversed(items)))

    def tuple_from_mark(self) -> None:
        self.push(tuple(self._pop_to_mark()))

    def extend(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise _RefusedError(f"its pickle appends to a {_kind(target)}")
        target.extend(items)

    def append(self) -> None:
        self.extend([self._pop()])

    def extend_from_mark(self) -> None:
        self.extend(self._pop_to_mark())

    def update(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError(f"its pickle sets items of a {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise _RefusedError(f"its pickle has a {_kind(key)} as a key, not a text")
            target[key] = value

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self.update([key, value])

    def update_from_mark(self) -> None:
        self.update(self._pop_to_mark())

    # ---- imports and calls of an unpickler ----

    def import_name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full in _CALLABLE:
            self.push(Function(full))
        elif module == "torch" and name in STORAGE_DTYPES:
            self.push(StorageType(name))
        else:
            raise _RefusedError(
                f"its pickle asks for {full[:200]!r}, which is not part of a tensor and is "
                "not executed; save only the state dict"
            )

    def import_from_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _RefusedError("its pickle imports something that is not named by texts")
        self.import_name(module, name)

    def call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise _RefusedError(f"its pickle calls a {_kind(function)}")
        if function.name == "collections.OrderedDict":
            if arguments not in ((), ([],)):
                raise _RefusedError("its pickle makes a dictionary in a way torch.save does not")
            self.push({})
        elif function.name == "torch._utils._rebuild_parameter":
            if not arguments or not isinstance(arguments[0], TorchTensor):
                raise _RefusedError("its pickle makes a parameter of something else than a tensor")
            self.push(arguments[0])
        else:
            self.push(_tensor(arguments))

    def build(self) -> None:
        """Drops a dictionary's attributes, in which torch keeps versions of modules."""
        self._pop()
        if not isinstance(self._top(), dict):
            raise _RefusedError(f"its pickle sets attributes of a {_kind(self._top())}")

    def storage(self) -> None:
        """Read the persistent id of a storage: ("storage", type, key, device, n_items)."""
        reference = self._pop()
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
        self.push(Storage(reference[2], dtype, item_bytes, reference[4]))

    def skip_frame(self) -> None:
        self._take(8)

    def check_protocol(self) -> None:
        protocol = self.number(1)
        if not 2 <= protocol <= 5:
            raise _RefusedError(f"its pickle has protocol {protocol}, not 2 to 5")


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


_STOP = ord(".")
# Handlers by the name of the opcode in pickletools.
_INSTRUCTIONS: Mapping[int, Callable[[_Machine], None]] = {
    0x80: _Machine.check_protocol,
    0x95: _Machine.skip_frame,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    0x8A: lambda m: m.push(m.number(m.number(1), signed=True)),
    ord("G"): lambda m: m.push(m.double()),
    ord("X"): lambda m: m.push(m.text(m.number(4))),
    0x8C: lambda m: m.push(m.text(m.number(1))),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    ord("t"): _Machine.tuple_from_mark,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("a"): _Machine.append,
    ord("e"): _Machine.extend_from_mark,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.update_from_mark,
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
    ord("c"): lambda m: m.import_name(m.line(), m.line()),
    0x93: _Machine.import_from_stack,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.storage,
}
