"""Writes a .qsf file under a temporary name and puts it in place when it is complete.

    header (zeros at first) | units, each at a multiple of 4096 | sections |
    UNIT, KIND, ROPE, ARCH, TENS, EBND | directory

The last step writes the real header. Memory holds only the tables.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file import layout as lay
from qsf.file.blocks import load_codec, pack_blocks
from qsf.file.kinds import LayerKind, RopeSet, pack_tables, plain_kind
from qsf.file.layout import (
    Arch,
    Compression,
    Header,
    Role,
    Stored,
    Tensor,
    UnitId,
)
from qsf.file.output import Data, Output
from qsf.file.reader import Reader


def pack_tensor(t: Tensor, unit_idx: int) -> bytes:
    return lay.TENSOR_ENTRY.pack(
        unit_idx, t.type, t.n_rows, t.n_cols, t.dtype, t.layout, t.index, t.n_entries, t.data_off
    )


_POLYNOMIAL: Final = 0xEDB88320  # bit 31 is x^0, as in the checksum itself


def _times(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC32 polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def crc32_of_zeros(n_bytes: int, crc32: int = 0) -> int:
    """Return ``zlib.crc32(bytes(n_bytes), crc32)`` in time proportional to log2(n_bytes)."""
    power = 1 << 31  # x^(8 n_bytes): n_bytes zeros multiply the register by it
    square = 1 << 23  # x^8
    left = n_bytes
    while left:
        if left & 1:
            power = _times(power, square)
        square = _times(square, square)
        left >>= 1
    return _times(crc32 ^ 0xFFFFFFFF, power) ^ 0xFFFFFFFF


LEAST_SAVING: Final = 0.03  # least saving of a compression that is worth its decoding
_COPY_BYTES: Final = 1 << 20
_NO_INDEX: Final = -1  # of a unit whose place in the file is not known yet
_MAX_THREADS: Final = 4
_RESERVED_TAGS: Final = ["UNIT", "ARCH", "TENS", "EBND", "KIND", "ROPE"]
_IS_REQUIRED: Final = {"WPOS": True} | dict.fromkeys(("META", "TOKN", "CHAT", "TEXT"), False)


@dataclass(slots=True)
class _OpenUnit:
    id: UnitId
    off: int
    dtype: int
    compression: int
    importance: float
    crc32: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    template: UnitId | None = None  # an earlier expert with the same tensors
    tensors: list[Tensor] = field(default_factory=list)


class Writer(Output):
    """Writes one .qsf file, front to back; a context manager.

    Units are written in ascending order: embedding, layers, final unit; experts, in ascending order
    too, and sections before, between or after them. Leaving the context completes the file and
    renames it to its path; leaving it with an exception removes the temporary and keeps what was
    there.

    Every method raises QsfArgumentError for a call out of turn or a wrong number of bytes, the end
    if the engine's reader does not accept the file, and QsfIOError with the path and the bytes
    written if the system refuses. Shapes of a layer's tensors are checked when it is opened to run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        arch: Arch,
        *,
        layer_kinds: Sequence[LayerKind] = (),
        rope_sets: Sequence[RopeSet] = (),
        progress: Callable[[int], None] | None = None,
        needed_bytes: int | None = None,
        n_threads: int | None = None,
    ) -> None:
        """Check the arguments and create the temporary.

        Args:
            path: the file; an older one is replaced at the end.
            header: the model's numbers.
            arch: the ``ARCH`` section.
            layer_kinds: what each layer computes; default: as header and ``arch`` say.
            rope_sets: default: one, of header and ``arch``.
            progress: called with the bytes written so far.
            needed_bytes: approximate size, for the error when the disk is full.
            n_threads: threads that compress; default: one per core, at most 4.
        """
        super().__init__(path, progress, needed_bytes)
        self.header = header
        self._arch = arch
        self._parts = (layer_kinds, rope_sets)
        self._tables = pack_tables(header, arch, *self._parts, QsfArgumentError)
        self._kinds = layer_kinds or (plain_kind(header, arch),) * header.n_layers
        self._n_threads = n_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._entries: list[lay.Section] = []
        self._units: list[_OpenUnit] = []  # complete units
        ids = self._list_ids()
        self._next_experts = deque(i for i in ids if i.role == Role.EXPERT)
        # Units that are no experts
        self._next_units = deque(i for i in ids if i.role != Role.EXPERT)
        # Template by the tensors of an expert
        self._templates: dict[tuple[object, ...], UnitId] = {}
        self._bands: list[int] = []
        self._unit: _OpenUnit | None = None
        self._tensor: Tensor | None = None
        self._tensor_done_bytes = 0
        self._band_crc32 = 0
        self._is_finished = False
        self._create()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the file, or remove the temporary after an exception."""
        if error is not None:
            self.abort()
        elif not self._is_finished:
            self.finish()

    # ---- units ----

    def _list_ids(self) -> list[UnitId]:
        experts = [
            lay.layer_unit(layer).of_expert(expert)
            for layer, kind in enumerate(self._kinds)
            for expert in range(kind.n_experts)
        ]
        has_table = self._arch.own_width and not self._arch.is_encoder
        tables = [lay.OWN_TABLE_UNIT] if has_table else []
        return [*lay.pass_units(self.header.n_layers), *experts, *tables]

    def begin_unit(
        self,
        unit: UnitId,
        *,
        dtype: int,
        compression: int = Compression.NONE,
        importance: float = 1.0,
    ) -> None:
        """Begin the next unit.

        Args:
            unit: which one: its role, and the layer and expert of that role.
            dtype: the unit's quantisation type, ``Dtype.MIXED`` when its tensors differ.
            compression: of a layer; the layer is stored uncompressed if that saves less than 3 %.
            importance: how much the layer matters, or the share of the calibration's tokens that
                chose the expert; finite and >= 0.
        """
        self._require_open()
        if self._unit is not None:
            raise QsfArgumentError(f"{self._unit.id.name} has not ended")
        left = self._left(unit.role)
        if not left or unit != left[0]:
            expected = f"{left[0].name} does" if left else "none is left"
            raise QsfArgumentError(f"{unit.name} does not come next: {expected}")
        load_codec(compression)
        self._align(lay.UNIT_ALIGN)
        self._unit = _OpenUnit(unit, self._at, dtype, compression, importance)

    def _left(self, role: Role) -> deque[UnitId]:
        return self._next_experts if role == Role.EXPERT else self._next_units

    def _put_raw(self, unit: _OpenUnit, data: Data) -> None:
        self._append(data)
        unit.crc32 = zlib.crc32(data, unit.crc32)
        unit.raw_bytes += memoryview(data).nbytes

    def begin_tensor(
        self,
        type: int,
        n_rows: int,
        n_cols: int,
        dtype: int,
        layout: int,
        index: int = 0,
        n_entries: int = 0,
    ) -> None:
        """Begin the unit's next tensor, in the order of docs/format.md, section 4.

        Args:
            type: what it is, a TensorType.
            n_rows: 1 for a vector.
            n_cols: values in a row.
            dtype: its quantisation type; f16 or f32 for a vector.
            layout: vector, tiles, or outliers, which have the shape of their matrix.
            index: expert number, else 0.
            n_entries: of an outlier table, else 0.
        """
        unit = self._open_unit()
        if self._tensor is not None:
            raise QsfArgumentError(f"tensor type {self._tensor.type} has not ended")
        n_bytes = lay.tensor_bytes(n_rows, n_cols, dtype, layout, n_entries)
        fields = (type, n_rows, n_cols, dtype, layout, index)
        self._put_raw(unit, lay.TENSOR_HEADER.pack(*fields, n_entries, b""))
        self._tensor = Tensor(_NO_INDEX, *fields, unit.raw_bytes, n_bytes, n_entries)
        self._tensor_done_bytes = 0
        self._band_crc32 = 0

    def _open_unit(self) -> _OpenUnit:
        self._require_open()
        if self._unit is None:
            raise QsfArgumentError("no unit has begun")
        return self._unit

    def write(self, data: Data) -> None:
        unit = self._open_unit()
        tensor = self._open_tensor()
        view = memoryview(data).cast("B")
        left = tensor.data_bytes - self._tensor_done_bytes
        if len(view) > left:
            raise QsfArgumentError(
                f"{unit.id.name}, tensor type {tensor.type}: {len(view)} bytes, only {left} of"
                f" its {tensor.data_bytes} are left"
            )
        self._put_raw(unit, view)
        if tensor.type in lay.TABLES:
            self._add_bands(tensor, view)
        self._tensor_done_bytes += len(view)

    def write_zeros(self, n_bytes: int) -> None:
        """Write zeros, as a hole if the file system has holes; not in tables."""
        unit = self._open_unit()
        tensor = self._open_tensor()
        if tensor.type in lay.TABLES:
            raise QsfArgumentError("a table has no holes")
        left = tensor.data_bytes - self._tensor_done_bytes
        if not 0 <= n_bytes <= left:
            raise QsfArgumentError(
                f"{unit.id.name}, tensor type {tensor.type}: {n_bytes} zeros, allowed: 0 .. {left}"
            )
        self._truncate(self._at + n_bytes)
        unit.crc32 = crc32_of_zeros(n_bytes, unit.crc32)
        unit.raw_bytes += n_bytes
        self._tensor_done_bytes += n_bytes

    def _open_tensor(self) -> Tensor:
        if self._tensor is None:
            raise QsfArgumentError("no tensor has begun")
        return self._tensor

    def _add_bands(self, tensor: Tensor, view: memoryview) -> None:
        """Carry the running checksum of the band of 16 rows of a table over ``view``."""
        n_bytes = lay.band_bytes(tensor.n_cols, tensor.dtype)
        done = self._tensor_done_bytes
        while view:
            part = view[: n_bytes - done % n_bytes]
            self._band_crc32 = zlib.crc32(part, self._band_crc32)
            done += len(part)
            view = view[len(part) :]
            if done % n_bytes == 0:
                self._bands.append(self._band_crc32)
                self._band_crc32 = 0

    def end_tensor(self) -> None:
        """End the tensor, all of whose bytes must have been written."""
        unit = self._open_unit()
        tensor = self._open_tensor()
        if self._tensor_done_bytes != tensor.data_bytes:
            raise QsfArgumentError(
                f"{unit.id.name}, tensor type {tensor.type}: {self._tensor_done_bytes} bytes"
                f" written, it has {tensor.data_bytes}"
            )
        self._put_raw(unit, bytes(-tensor.data_bytes % lay.DATA_ALIGN))
        unit.tensors.append(tensor)
        self._tensor = None

    def _get_block(self, unit: _OpenUnit, idx: int) -> bytes:
        done = idx * lay.COMPRESSED_BLOCK_BYTES
        n_bytes = min(lay.COMPRESSED_BLOCK_BYTES, unit.raw_bytes - done)
        return self._get_at(unit.off + done, n_bytes)

    def end_unit(self) -> Stored:
        unit = self._open_unit()
        if self._tensor is not None:
            raise QsfArgumentError(f"tensor type {self._tensor.type} has not ended")
        unit.stored_bytes = unit.raw_bytes
        if unit.compression != Compression.NONE:
            unit.compression, unit.stored_bytes = self._compress(unit)
        if unit.id.role == Role.EXPERT:
            key = (unit.dtype, *unit.tensors)
            template = self._templates.setdefault(key, unit.id)
            unit.template = template if template != unit.id else None
        self._units.append(unit)
        self._left(unit.id.role).popleft()
        self._unit = None
        return Stored(Compression(unit.compression), unit.stored_bytes, unit.raw_bytes)

    def _compress(self, unit: _OpenUnit) -> tuple[Compression, int]:
        """Compress the layer after its raw bytes, then move it over them if that saves enough.

        Returns the compression and the stored bytes that the index shall say.
        """
        compression = Compression(unit.compression)
        raw_end = self._at
        most = math.floor(unit.raw_bytes * (1.0 - LEAST_SAVING))
        crc32 = 0
        n_stored = 0
        n_blocks = math.ceil(unit.raw_bytes / lay.COMPRESSED_BLOCK_BYTES)
        raw_blocks = (self._get_block(unit, idx) for idx in range(n_blocks))
        with contextlib.closing(pack_blocks(compression, raw_blocks, self._n_threads)) as blocks:
            for n_raw, packed in blocks:
                block = lay.BLOCK_HEADER.pack(len(packed), n_raw) + packed
                n_stored += len(block)
                if n_stored > most:
                    self._truncate(raw_end)
                    return Compression.NONE, unit.raw_bytes
                self._append(block)
                crc32 = zlib.crc32(block, crc32)
        for done in range(0, n_stored, _COPY_BYTES):
            piece = self._get_at(raw_end + done, min(_COPY_BYTES, n_stored - done))
            self._put_at(unit.off + done, piece)
        self._truncate(unit.off + n_stored)
        unit.crc32 = crc32
        return compression, n_stored

    # ---- sections and the end ----

    def add_section(self, tag: str, data: bytes, *, required: bool = False) -> None:
        """Write a section, such as ``META``; not while a unit is open.

        Args:
            tag: four printable ASCII characters.
            data: at least one byte.
            required: a reader that does not know the tag shall refuse the file.
        """
        self._require_open()
        if self._unit is not None:
            raise QsfArgumentError(f"section {tag}: {self._unit.id.name} has not ended")
        if len(tag) != 4 or not all(" " <= c <= "~" for c in tag):
            raise QsfArgumentError(f"section {tag!r}: allowed: four printable ASCII characters")
        if tag in _RESERVED_TAGS:
            raise QsfArgumentError(f"section {tag}: the writer writes it itself")
        most = lay.MAX_TEXT_BYTES.get(tag, len(data))
        if len(data) > most:
            raise QsfArgumentError(f"section {tag}: {len(data)} bytes, allowed: up to {most}")
        self._put_section(tag, data, is_required=_IS_REQUIRED.get(tag, required))

    def _put_section(self, tag: str, data: Data, *, is_required: bool = True) -> lay.Section:
        n_bytes = memoryview(data).nbytes
        self._align(lay.DATA_ALIGN)
        entry = lay.Section(tag, self._at, n_bytes, zlib.crc32(data), is_required)
        self._append(data)
        self._entries.append(entry)
        return entry

    @contextlib.contextmanager
    def completed(self) -> Iterator[Path]:
        """Yield the path of the temporary, complete but for the tables and the header.

        So the model can be measured before the result is written: later writes replace the tables.
        """
        self._require_open()
        entries, at = list(self._entries), self._at
        self._put_tables()
        try:
            yield self._temporary
        finally:
            self._entries = entries
            self._truncate(at)

    def change_arch(self, **changes: int) -> None:
        """Change fields of ``ARCH`` that depend on measurements of the complete file."""
        values: dict[str, Any] = {**changes}
        self._arch = replace(self._arch, **values)
        self._tables = pack_tables(self.header, self._arch, *self._parts, QsfArgumentError)

    def sync(self) -> None:
        """Put on the disk what was written so far, so that the end has less to wait for."""
        with self._system_calls():
            os.fsync(self._fd)

    def finish(self) -> None:
        """Write the tables and the header, sync, and rename to the path.

        The context manager calls this. On failure the temporary is removed.
        """
        self._require_open()
        try:
            self._put_tables()
            self._check()
            self._take_name()
            self._is_finished = True
        finally:
            self.abort()
            if not self._is_finished:
                self._unlink()

    def _check(self) -> None:
        """Let the engine's reader check all tables. Raises QsfArgumentError with its text."""
        try:
            Reader(self._temporary).close()
        except QsfFormatError as error:
            text = str(error).replace(str(self._temporary), str(self.path))
            raise QsfArgumentError(text) from None

    def _put_tables(self) -> None:
        h = self.header
        if self._unit is not None:
            raise QsfArgumentError(f"{self._unit.id.name} has not ended")
        missing = (*self._next_units, *self._next_experts)
        if missing:
            raise QsfArgumentError(
                f"{missing[0].name} is missing: {len(self._units)} of"
                f" {len(self._units) + len(missing)} units are written"
            )
        units = sorted(self._units, key=lambda unit: unit.id)
        index = self._put_section("UNIT", _pack_units(units))
        tensors = b"".join(
            pack_tensor(t, i)
            for i, unit in enumerate(units)
            if unit.template is None
            for t in unit.tensors
        )
        for tag, data in self._tables.items():
            self._put_section(tag, data)
        self._put_section("TENS", tensors)
        bands = struct.pack(f"<{len(self._bands)}I", *self._bands)
        self._put_section("EBND", bands)
        self._align(lay.DATA_ALIGN)
        directory_off = self._at
        directory = b"".join(
            lay.DIRECTORY_ENTRY.pack(e.tag.encode(), e.is_required, e.off, e.n_bytes, e.crc32, 0)
            for e in self._entries
        )
        self._append(directory)
        offs = {unit.id: unit.off for unit in units}
        links = (index.off, offs[lay.EMBEDDING_UNIT], offs[lay.FINAL_UNIT])
        self._put_at(0, lay.pack_header(h, links, directory_off, directory, index.crc32))


def _pack_units(units: Sequence[_OpenUnit]) -> bytes:
    places = {unit.id: i for i, unit in enumerate(units)}
    return b"".join(
        lay.UNIT_ENTRY.pack(
            unit.off, unit.stored_bytes, unit.raw_bytes, unit.crc32, unit.importance,
            unit.id.role, unit.dtype, unit.compression, 0, unit.id.layer, unit.id.expert,
            len(unit.tensors), places[unit.template or unit.id],
        )
        for unit in units
    )  # fmt: skip
