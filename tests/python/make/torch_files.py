# SPDX-License-Identifier: Apache-2.0
"""Writes what torch.save writes, without torch.

The pickle is made by Python's own pickler, which finds stand-ins under torch's names; they are
there only while it writes.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STORAGE_NAMES = {
    "<f4": "FloatStorage", "<f2": "HalfStorage", "<i8": "LongStorage", "|u1": "ByteStorage",
}  # fmt: skip


@dataclass
class StoredTensor:
    """A tensor as torch describes it: a view of a storage, offset and strides in items."""

    storage: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    storage_name: str = ""
    is_parameter: bool = False
    n_items: int | None = None  # what the pickle says of the storage, if not the truth


@dataclass
class _Storage:
    key: str
    name: str
    n_items: int


@dataclass
class _Archive:
    records: dict[str, bytes] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    storages: list[np.ndarray] = field(default_factory=list)  # alive, so that no id comes twice


class _Rebuilt:
    """Pickled as a call of one of torch's functions."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr(sys.modules["torch._utils"], self.name), self.arguments


class _Pickler(pickle._Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            kind = getattr(sys.modules["torch"], value.name)
            return ("storage", kind, value.key, "cpu", value.n_items)
        return None


def dense(values: np.ndarray, *, is_parameter: bool = False) -> StoredTensor:
    """A tensor with a storage of its own."""
    strides = tuple(step // values.itemsize for step in np.ascontiguousarray(values).strides)
    return StoredTensor(values.ravel(), values.shape, strides, is_parameter=is_parameter)


def bf16(values: np.ndarray) -> StoredTensor:
    """f32 values cut to bf16."""
    bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    tensor = dense(bits)
    tensor.storage_name = "BFloat16Storage"
    return tensor


@contextmanager
def fake_torch() -> Iterator[None]:
    """Names of torch that a pickler can refer to."""
    modules = {name: types.ModuleType(name) for name in ("torch", "torch._utils")}
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        function = types.FunctionType((lambda: None).__code__, {}, name)
        function.__module__, function.__qualname__ = "torch._utils", name
        setattr(modules["torch._utils"], name, function)
    for name in (*STORAGE_NAMES.values(), "BFloat16Storage", "DoubleStorage"):
        kind = type(name, (), {"__module__": "torch"})
        setattr(modules["torch"], name, kind)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _described(tensor: StoredTensor, archive: _Archive) -> _Rebuilt:
    key = archive.keys.setdefault(id(tensor.storage), str(len(archive.keys)))
    archive.storages.append(tensor.storage)
    archive.records[f"data/{key}"] = tensor.storage.tobytes()
    name = tensor.storage_name or STORAGE_NAMES[tensor.storage.dtype.newbyteorder("<").str]
    n_items = tensor.storage.size if tensor.n_items is None else tensor.n_items
    place = (_Storage(key, name, n_items), tensor.offset, tensor.shape, tensor.strides)
    rebuilt = _Rebuilt("_rebuild_tensor_v2", (*place, False, collections.OrderedDict()))
    if tensor.is_parameter:
        return _Rebuilt("_rebuild_parameter", (rebuilt, True, collections.OrderedDict()))
    return rebuilt


def state_dict_pickle(tensors: Mapping[str, Any], archive: _Archive, protocol: int = 2) -> bytes:
    """The pickle of a state dict; values that are no arrays or tensors stay as they are."""
    state: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            value = dense(value)
        state[name] = _described(value, archive) if isinstance(value, StoredTensor) else value
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    with fake_torch():
        _Pickler(buffer, protocol=protocol).dump(state)
    return buffer.getvalue()


def save(
    path: Path,
    tensors: Mapping[str, Any],
    *,
    data: bytes | None = None,
    protocol: int = 2,
    byteorder: bytes | None = b"little",
    top: str = "archive",
    compression: int = zipfile.ZIP_STORED,
    zip64: bool = False,
) -> None:
    """Write a file; ``data``, if given, in place of the pickle. Tensors share given storages."""
    archive = _Archive()
    pickled = state_dict_pickle(tensors, archive, protocol)
    records = {"data.pkl": pickled if data is None else data}
    if byteorder is not None:
        records["byteorder"] = byteorder
    records |= {**archive.records, "version": b"3\n"}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in records.items():
            with file.open(f"{top}/{name}", "w", force_zip64=zip64) as out:
                out.write(content)


def save_shards(folder: Path, tensors: Mapping[str, Any], n_shards: int) -> None:
    """pytorch_model-0000N-of-0000M.bin and their index."""
    weight_map: dict[str, str] = {}
    for i in range(n_shards):
        shard = f"pytorch_model-{i + 1:05}-of-{n_shards:05}.bin"
        part = {name: tensors[name] for name in sorted(tensors)[i::n_shards]}
        save(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
