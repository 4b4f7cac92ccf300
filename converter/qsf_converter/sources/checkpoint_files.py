"""The common part of checkpoints in files: tensors at offsets, shard indexes, the digest.

Files are read at offsets and never mapped, so that pages of the weights do not count as ours.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from qsf.closable import Closing
from qsf.errors import QsfConversionError, QsfIOError, shown
from qsf.file.ranged import RangedFile, is_ranged
from qsf.foreign_json import read_json
from qsf_converter.sources.checkpoint import RawArray, SourceTensor
from qsf_converter.sources.metadata import INDEX_MEMORY_BYTES, open_regular, read_bytes

# Types that are converted without unpacking; a subclass may add types of packed bytes.
READABLE: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(slots=True)
class Located:
    tensor: SourceTensor
    file: io.RawIOBase
    path: Path
    file_off: int
    n_hashed: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)


LocatedT = TypeVar("LocatedT", bound=Located)


class FileCheckpoint(Closing, Generic[LocatedT]):
    """A ``Checkpoint`` in one file or several; subclasses open a file format.

    Use it as a context manager. Raises QsfConversionError if the files are missing or damaged,
    QsfIOError if the system refuses to read.
    """

    def __init__(self, place: Path) -> None:
        self._files: list[io.RawIOBase] = []
        self._located: dict[str, LocatedT] = {}
        self._paths: tuple[Path, ...] = ()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._hashed: Future[None] | None = None  # the piece that is hashed, at most one
        try:
            self._open(place)
        except QsfIOError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise QsfIOError(f"{error.filename or place}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        self._tensors = {name: located.tensor for name, located in self._located.items()}

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._paths

    def close(self) -> None:
        self._hashing.shutdown()
        for file in self._files:
            file.close()
        self._files.clear()

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        located = self._located[name]
        self._check_readable(located)
        stored = self._hashed_rows(located, start, stop)
        self._wait_for_hash()  # the values may be changed in place
        return self._values(located, stored, stop - start)

    def read_stored(self, name: str, start: int, stop: int) -> RawArray:
        stored = memoryview(self._hashed_rows(self._located[name], start, stop)).toreadonly()
        return np.frombuffer(stored, np.uint8).reshape(stop - start, -1)

    def _hashed_rows(self, located: LocatedT, start: int, stop: int) -> bytearray:
        tensor = located.tensor
        if not 0 <= start <= stop <= tensor.n_rows:
            raise IndexError(f"rows [{start}, {stop}) of {tensor.name}, which has {tensor.n_rows}")
        stored = self._stored_rows(located, start, stop)
        begin = start * tensor.row_bytes
        if begin <= located.n_hashed < begin + len(stored):  # a sample may have been read earlier
            part = memoryview(stored)[located.n_hashed - begin :]
            located.n_hashed = begin + len(stored)
            self._wait_for_hash()
            self._hashed = self._hashing.submit(located.sha256.update, part)
        return stored

    def _wait_for_hash(self) -> None:
        if self._hashed is not None:
            self._hashed.result()

    def digest(self) -> str:
        self._wait_for_hash()
        total = hashlib.sha256()
        for name in sorted(self._located):
            located = self._located[name]
            if located.n_hashed == located.tensor.n_bytes:
                line = [name, located.tensor.dtype, located.tensor.shape]
                total.update(json.dumps([*line, located.sha256.hexdigest()]).encode() + b"\n")
        return total.hexdigest()

    def _open_named(self, model_dir: Path, single_name: str, index_name: str) -> bool:
        """Open the single file of a model or, if it is absent, the shards that the index names, or
        all shards of their names if that is absent, too.

        A subclass opens each with ``_open_file``.
        """
        single, index = model_dir / single_name, model_dir / index_name
        if single.exists():
            self._paths = (single,)
            self._located = self._open_file(single)
        elif index.exists():
            self._open_shards(index, self._open_file)
        else:
            self._paths = shards_of(single)
            for shard in self._paths:
                for name, located in self._open_file(shard).items():
                    if name in self._located:
                        raise QsfConversionError(f"{shard}: tensor {name} is in another shard, too")
                    self._located[name] = located
        return bool(self._paths)

    # ---- implemented by file formats ----

    def _open_file(self, path: Path) -> dict[str, LocatedT]:
        raise NotImplementedError

    def _open(self, place: Path) -> None:
        raise NotImplementedError

    def _check_readable(self, located: LocatedT) -> None:
        tensor = located.tensor
        if tensor.dtype not in READABLE:
            raise QsfConversionError(
                f"tensor {tensor.name} is stored as {tensor.dtype}; "
                f"only {', '.join(READABLE)} weights can be converted"
            )

    def _stored_rows(self, located: LocatedT, start: int, stop: int) -> bytearray:
        row_bytes = located.tensor.row_bytes
        return self._read_at(located, start * row_bytes, (stop - start) * row_bytes)

    def _values(self, located: LocatedT, stored: bytearray, n_rows: int) -> RawArray:
        dtype = READABLE[located.tensor.dtype]
        raw: RawArray = np.frombuffer(stored, dtype)
        return raw.reshape(n_rows, located.tensor.row_bytes // dtype.itemsize)

    # ---- used by file formats ----

    def _open_raw(self, path: Path) -> io.RawIOBase:
        """Open a file that is closed with the checkpoint."""
        file: io.RawIOBase = RangedFile.of_pointer(path) if is_ranged(path) else open_regular(path)
        self._files.append(file)
        return file

    def _read_at(self, located: LocatedT, begin: int, n_bytes: int) -> bytearray:
        buffer = bytearray(n_bytes)
        view = memoryview(buffer)
        try:
            located.file.seek(located.file_off + begin)
            n_done = 0
            while n_done < n_bytes:
                n_read = located.file.readinto(view[n_done:])
                if not n_read:
                    raise QsfIOError(
                        f"{located.path}: the file ends {n_bytes - n_done} bytes early "
                        f"in tensor {located.tensor.name}; it shrank while it was read"
                    )
                n_done += n_read
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{located.path}: {error.strerror}") from error
        return buffer

    def _open_shards(
        self, index: Path, open_file: Callable[[Path], Mapping[str, LocatedT]]
    ) -> None:
        folder = index.parent
        names_of_shard: dict[str, list[str]] = {}
        for name, shard in _read_index(index).items():
            names_of_shard.setdefault(shard, []).append(name)
        missing = [shard for shard in sorted(names_of_shard) if not (folder / shard).exists()]
        if missing:
            raise QsfConversionError(
                f"{folder}: {len(missing)} of {len(names_of_shard)} shards are missing: "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
            )
        paths = []
        for shard, names in sorted(names_of_shard.items()):
            paths.append(folder / shard)
            content = open_file(folder / shard)
            for name in names:
                if name not in content:
                    raise QsfConversionError(
                        f"{folder / shard}: no tensor {name}, which {index.name} says is there"
                    )
                self._located[name] = content[name]
        self._paths = tuple(paths)


def shards_of(single: Path) -> tuple[Path, ...]:
    """Return NAME-00001-of-00003.EXT and so on beside NAME.EXT; (): there is no whole set."""
    found = sorted(single.parent.glob(f"{single.stem}-*-of-*{single.suffix}"))
    wanted = [f"{single.stem}-{i + 1:05}-of-{len(found):05}" for i in range(len(found))]
    return tuple(found) if [path.stem for path in found] == wanted else ()


def is_count(value: Any) -> bool:
    """Return whether the value can be a size or an offset."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _read_index(index: Path) -> dict[str, str]:
    """Return ``weight_map`` of a shard index: tensor name -> file name."""
    try:
        index_json = read_bytes(index) or b""
        weight_map = read_json(index_json, memory_bytes=INDEX_MEMORY_BYTES)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise QsfConversionError(f"{index}: not a shard index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise QsfConversionError(f"{index}: weight_map is not an object with entries")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise QsfConversionError(
                f"{index}: {shown(name)}: {shown(shard)} is not a plain file name"
            )
    return weight_map
