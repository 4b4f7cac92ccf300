"""Reads descriptions of tensors from the pickle of torch.save without executing anything.

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
