"""Writes a .qsf file under a temporary name and puts it in place when it is complete.

    header (zeros at first) | units and experts, ascending, each at a multiple of 4096 | sections |
    layer index, EXPT, ARCH, TENS, EBND | directory

The last step writes the real header. Nothing is kept in memory but the tables.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import bisect
import contextlib
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final

from qsf.errors import QsfArgumentError
from qsf.file import layout as lay
from qsf.file.blocks import load_codec, pack_blocks
from qsf.file.crc32 import crc32_of_zeros
from qsf.file.index import first_experts
from qsf.file.kinds import LayerKind, RopeSet, pack_tables, plain_kind
from qsf.file.layout import (
    Arch,
    Compression,
    Dtype,
    Header,
    Layout,
    Positions,
    Stored,
    Tensor,
    TensorType,
)
from qsf.file.output import Data, Output
from qsf.file.units import (
    EXPERT_TYPES,
    check_order,
    expert_shapes,
    pack_tensor,
    unit_order,
    unit_shapes,
)

LEAST_SAVING: Final = 0.03  # what compression must save to be worth its decoding
_COPY_BYTES: Final = 1 << 20
_MAX_THREADS: Final = 4
_RESERVED_TAGS: Final = [
    "LAYR", "EMBD", "FINL", "ARCH", "TENS", "EBND", "KIND", "ROPE", "EXPT",
]  # fmt: skip
_KNOWN_FLAGS: Final = {"WPOS": lay.SECTION_REQUIRED} | dict.fromkeys(
    ("META", "TOKN", "CHAT", "TEXT"), 0
)


@dataclass(slots=True)
class _OpenUnit:
    idx: int
    off: int
    dtype: int
    compression: int
    importance: float
    crc32: int = 0
    raw_bytes: int = 0
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    """What the directory will say."""

    tag: str
    flags: int
    off: int
    n_bytes: int
    crc32: int


class Writer(Output):
    """Writes one .qsf file, front to back; a context manager.

    Units are written in ascending order, 0 (embedding) to ``n_layers + 1`` (final); experts, in
    ascending order too, and sections before, between or after them. Leaving the context completes
    the file and renames it to its path; leaving it with an exception removes the temporary and
    keeps what was there.

    Every method raises QsfArgumentError for what no reader would accept and QsfIOError, with
    the path and the bytes written, for what the system refused.
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
            path: where the file shall be; an older file is replaced at the end.
            header: the model's numbers.
            arch: the ``ARCH`` section.
            layer_kinds: what each layer computes; default: as header and ``arch`` say.
            rope_sets: default: one, of header and ``arch``.
            progress: called with the bytes written so far.
            needed_bytes: about what the disk must hold, for the error when it is full.
            n_threads: that compress; default: one per core, at most 4.
        """
        super().__init__(path, progress, needed_bytes)
        self.header = header
        if header.architecture not in tuple(lay.Architecture):
            raise QsfArgumentError(
                f"architecture {header.architecture}, allowed: 0 .. {max(lay.Architecture)}"
            )
        lay.check_header(header, QsfArgumentError)
        self._tables = pack_tables(header, arch, layer_kinds, rope_sets, QsfArgumentError)
        self._kinds = layer_kinds or (plain_kind(header, arch),) * header.n_layers
        self._is_tied = arch.tied_head
        self._n_threads = n_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._entries: list[_Entry] = []
        self._layers: list[bytes] = []
        self._experts: list[bytes] = []
        self._first_experts = first_experts(self._kinds)
        self._templates: dict[tuple[object, ...], int] = {}  # what an expert has: its number
        self._tensors: list[Tensor] = []
        self._expert_tensors: list[Tensor] = []  # of the templates
        self._bands: list[int] = []
        self._n_units = 0
        self._unit: _OpenUnit | None = None
        self._tensor: Tensor | None = None
        self._tensor_done_bytes = 0
        self._band_crc32 = 0
        self._is_finished = False
        self._create()

    def __enter__(self) -> Writer:
        """Return self."""
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

    def begin_unit(
        self,
        unit_idx: int,
        *,
        dtype: int,
        compression: int = Compression.NONE,
        importance: float = 1.0,
    ) -> None:
        """Begin the next unit.

        Args:
            unit_idx: 0 embedding, 1 .. n_layers the layers, n_layers + 1 the final unit.
            dtype: the layer's quantisation type, ``Dtype.MIXED`` when its tensors differ.
            compression: of a layer; stored plainly all the same when it saves less than 3 %.
            importance: how much the layer matters, finite and >= 0.
        """
        if unit_idx != self._n_units or unit_idx > self.header.n_layers + 1:
            raise QsfArgumentError(
                f"unit {unit_idx} after {self._n_units} units, allowed: ascending, 0 .. "
                f"{self.header.n_layers + 1}"
            )
        self._begin(unit_idx, dtype, compression, importance)

    def begin_expert(
        self, layer_idx: int, expert_idx: int, *, dtype: int, importance: float = 1.0
    ) -> None:
        """Begin the next expert: one unit, layers ascending, experts of a layer ascending.

        Args:
            layer_idx: 0 .. n_layers - 1, of a kind that has experts.
            expert_idx: 0 .. experts of the layer - 1.
            dtype: its quantisation type, ``Dtype.MIXED`` when its tensors differ.
            importance: share of the calibration's tokens that chose it, finite and >= 0.
        """
        if not (0 <= layer_idx < self.header.n_layers) or not (
            0 <= expert_idx < self._kinds[layer_idx].n_experts
        ):
            raise QsfArgumentError(f"layer {layer_idx} has no expert {expert_idx}")
        number = self._first_experts[layer_idx] + expert_idx
        if number != len(self._experts):
            raise QsfArgumentError(
                f"layer {layer_idx}, expert {expert_idx} after {len(self._experts)} experts,"
                " allowed: ascending"
            )
        self._begin(self.header.n_layers + 2 + number, dtype, Compression.NONE, importance)

    def _begin(self, unit_idx: int, dtype: int, compression: int, importance: float) -> None:
        self._require_open()
        if self._unit is not None:
            raise QsfArgumentError(f"unit {self._unit.idx} has not ended")
        if dtype not in tuple(Dtype):
            raise QsfArgumentError(f"quantisation type {dtype}, allowed: 0 .. {max(Dtype)}")
        self._check_compression(unit_idx, compression)
        if not 0.0 <= importance <= lay.F32_MAX:
            raise QsfArgumentError(f"importance {importance:g}, allowed: finite, 0 or more")
        self._align(lay.UNIT_ALIGN)
        self._unit = _OpenUnit(unit_idx, self._at, dtype, compression, importance)

    def _check_compression(self, unit_idx: int, compression: int) -> None:
        if compression not in tuple(Compression):
            raise QsfArgumentError(f"compression {compression}, allowed: 0 .. {max(Compression)}")
        if compression != Compression.NONE:
            if not self._is_layer(unit_idx):
                raise QsfArgumentError("only layers can be compressed")
            load_codec(compression)

    def _is_layer(self, unit_idx: int) -> bool:
        return 1 <= unit_idx <= self.header.n_layers

    def _shapes(self, unit_idx: int) -> dict[int, tuple[int, int]]:
        number = unit_idx - self.header.n_layers - 2
        if number < 0:
            return unit_shapes(self.header, self._kinds, unit_idx)
        layer_idx = bisect.bisect_right(self._first_experts, number) - 1
        return expert_shapes(self.header, self._kinds[layer_idx])

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
        name = f"unit {unit.idx}, tensor type {type} [{n_rows}, {n_cols}]"
        fault = lay.tensor_fault(type, n_rows, n_cols, dtype, layout, n_entries)
        if fault is not None:
            raise QsfArgumentError(f"{name}: {fault}")
        shape = self._shapes(unit.idx).get(type)
        if shape is not None and index == 0 and shape != (n_rows, n_cols):
            raise QsfArgumentError(f"{name}: the header makes it [{shape[0]}, {shape[1]}]")
        if not 0 <= index <= 0xFFFF or (index and type not in EXPERT_TYPES):
            raise QsfArgumentError(f"{name}: index {index}, allowed: 0, or an expert's number")
        if type in (TensorType.EMBEDDING, TensorType.HEAD) and layout != Layout.TILES:
            raise QsfArgumentError(f"{name}: allowed: layout tiles")
        kinds = unit_order(unit.idx, self.header.n_layers, is_tied=self._is_tied)
        check_order(kinds, [(t.type, t.index) for t in unit.tensors], type, index, name)
        n_bytes = lay.tensor_bytes(n_rows, n_cols, dtype, layout, n_entries)
        if (
            0 < unit.idx != self.header.n_layers + 1
            and unit.raw_bytes + n_bytes > 0xFFFFFFFF - 2 * lay.DATA_ALIGN
        ):
            raise QsfArgumentError(f"{name}: the unit would reach 4 GiB")
        fields = (type, n_rows, n_cols, dtype, layout, index)
        self._put_raw(unit, lay.TENSOR_HEADER.pack(*fields, n_entries, b""))
        self._tensor = Tensor(unit.idx, *fields, unit.raw_bytes, n_bytes, n_entries)
        self._tensor_done_bytes = 0
        self._band_crc32 = 0

    def _open_unit(self) -> _OpenUnit:
        self._require_open()
        if self._unit is None:
            raise QsfArgumentError("no unit has begun")
        return self._unit

    def write(self, data: Data) -> None:
        """Write the next bytes of the tensor that has begun."""
        unit = self._open_unit()
        tensor = self._open_tensor()
        view = memoryview(data).cast("B")
        left = tensor.data_bytes - self._tensor_done_bytes
        if len(view) > left:
            raise QsfArgumentError(
                f"unit {unit.idx}, tensor type {tensor.type}: {len(view)} bytes, only {left} of"
                f" its {tensor.data_bytes} are left"
            )
        self._put_raw(unit, view)
        if tensor.type == TensorType.EMBEDDING:
            self._add_bands(tensor, view)
        self._tensor_done_bytes += len(view)

    def write_zeros(self, n_bytes: int) -> None:
        """Write zeros, as a hole where the file system has holes; not in the embedding."""
        unit = self._open_unit()
        tensor = self._open_tensor()
        if tensor.type == TensorType.EMBEDDING:
            raise QsfArgumentError("the embedding has no holes")
        left = tensor.data_bytes - self._tensor_done_bytes
        if not 0 <= n_bytes <= left:
            raise QsfArgumentError(
                f"unit {unit.idx}, tensor type {tensor.type}: {n_bytes} zeros, allowed: 0 .. {left}"
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
        """Carry the running checksum of the band of 16 embedding rows over ``view``."""
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
                f"unit {unit.idx}, tensor type {tensor.type}: {self._tensor_done_bytes} bytes"
                f" written, it has {tensor.data_bytes}"
            )
        self._put_raw(unit, bytes(-tensor.data_bytes % lay.DATA_ALIGN))
        unit.tensors.append(tensor)
        self._tensor = None

    def sample(self, n_blocks: int) -> list[bytes]:
        """Return up to ``n_blocks`` blocks of the complete unit, evenly spread, read back."""
        unit = self._complete_unit()
        n_all = math.ceil(unit.raw_bytes / lay.COMPRESSED_BLOCK_BYTES)
        n = min(n_all, n_blocks)
        return [self._get_block(unit, (2 * i + 1) * n_all // (2 * n)) for i in range(n)]

    def _get_block(self, unit: _OpenUnit, idx: int) -> bytes:
        done = idx * lay.COMPRESSED_BLOCK_BYTES
        n_bytes = min(lay.COMPRESSED_BLOCK_BYTES, unit.raw_bytes - done)
        return self._get_at(unit.off + done, n_bytes)

    def _complete_unit(self) -> _OpenUnit:
        unit = self._open_unit()
        if self._tensor is not None:
            raise QsfArgumentError(f"tensor type {self._tensor.type} has not ended")
        if not unit.tensors:
            raise QsfArgumentError(f"unit {unit.idx} has no tensor")
        return unit

    def end_unit(self, *, compression: int | None = None) -> Stored:
        """End the unit; a compressed layer is packed now. Return how it is stored.

        Args:
            compression: instead of what ``begin_unit`` was told, as after ``sample``.
        """
        unit = self._complete_unit()
        if compression is not None:
            self._check_compression(unit.idx, compression)
            unit.compression = compression
        compression = Compression.NONE
        stored_bytes = unit.raw_bytes
        if self._is_layer(unit.idx):
            if unit.compression != Compression.NONE:
                compression, stored_bytes = self._compress(unit)
            entry = lay.LAYER_ENTRY.pack(
                unit.off, stored_bytes, unit.raw_bytes, unit.dtype, compression,
                len(unit.tensors), unit.crc32, unit.importance, 0,
            )  # fmt: skip
            self._layers.append(entry)
        elif unit.idx > self.header.n_layers + 1:
            self._end_expert(unit)
            return Stored(compression, stored_bytes, unit.raw_bytes)
        else:
            self._check_fixed(unit)
            tag = "EMBD" if unit.idx == 0 else "FINL"
            self._entries.append(
                _Entry(tag, lay.SECTION_REQUIRED, unit.off, stored_bytes, unit.crc32)
            )
        self._tensors += unit.tensors
        self._n_units += 1
        self._unit = None
        return Stored(Compression(compression), stored_bytes, unit.raw_bytes)

    def _end_expert(self, unit: _OpenUnit) -> None:
        """Note the expert, and its tensors if no earlier one has the same."""
        number = len(self._experts)
        key = (unit.dtype, *(replace(t, unit_idx=0) for t in unit.tensors))
        template = self._templates.setdefault(key, number)
        entry = lay.LAYER_ENTRY.pack(
            unit.off, unit.raw_bytes, unit.raw_bytes, unit.dtype, Compression.NONE,
            len(unit.tensors), unit.crc32, unit.importance, template,
        )  # fmt: skip
        self._experts.append(entry)
        if template == number:
            self._expert_tensors += unit.tensors
        self._unit = None

    def _check_fixed(self, unit: _OpenUnit) -> None:
        """Has the final unit its norm, and its head unless that is tied?"""
        types = [t.type for t in unit.tensors]
        if unit.idx > 0 and types[0] != TensorType.FINAL_NORM:
            raise QsfArgumentError("the final unit has no final norm")
        if unit.idx > 0 and not self._is_tied and types[-1] != TensorType.HEAD:
            raise QsfArgumentError("the final unit has no output head, and it is not tied")

    def _compress(self, unit: _OpenUnit) -> tuple[Compression, int]:
        """Pack the layer behind itself, then move it over its raw bytes if that saves enough.

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
            raise QsfArgumentError(f"section {tag}: unit {self._unit.idx} has not ended")
        if len(tag) != 4 or not all(" " <= c <= "~" for c in tag):
            raise QsfArgumentError(f"section {tag!r}: allowed: four printable ASCII characters")
        if tag in _RESERVED_TAGS:
            raise QsfArgumentError(f"section {tag}: the writer writes it itself")
        most = lay.MAX_TEXT_BYTES.get(tag, len(data))
        if len(data) > most:
            raise QsfArgumentError(f"section {tag}: {len(data)} bytes, allowed: up to {most}")
        flags = _KNOWN_FLAGS.get(tag, lay.SECTION_REQUIRED if required else 0)
        h = self.header
        if tag == "WPOS" and h.positions == Positions.LEARNED:
            n_bytes = h.max_tokens * h.dim * 2
            if len(data) != n_bytes:
                raise QsfArgumentError(
                    f"section WPOS: {len(data)} bytes, the header makes it {n_bytes}"
                )
        self._put_section(tag, flags, data)

    def _put_section(self, tag: str, flags: int, data: Data) -> _Entry:
        n_bytes = memoryview(data).nbytes
        if n_bytes == 0:
            raise QsfArgumentError(f"section {tag} is empty, allowed: 1 byte or more")
        if any(e.tag == tag for e in self._entries):
            raise QsfArgumentError(f"section {tag} is written twice")
        n_kept_free = 0 if tag in _RESERVED_TAGS else len(_RESERVED_TAGS)
        if len(self._entries) == lay.MAX_SECTIONS - n_kept_free:
            raise QsfArgumentError(f"section {tag}: the directory is full")
        self._align(lay.DATA_ALIGN)
        entry = _Entry(tag, flags, self._at, n_bytes, zlib.crc32(data))
        self._append(data)
        self._entries.append(entry)
        return entry

    def finish(self) -> None:
        """Write the tables and the header, sync, and rename to the path.

        The context manager calls this. On failure the temporary is removed.
        """
        self._require_open()
        try:
            self._put_tables()
            self._take_name()
            self._is_finished = True
        finally:
            self.abort()
            if not self._is_finished:
                self._unlink()

    def _put_tables(self) -> None:
        h = self.header
        if self._unit is not None:
            raise QsfArgumentError(f"unit {self._unit.idx} has not ended")
        if self._n_units != h.n_layers + 2:
            raise QsfArgumentError(f"{self._n_units} units written, the model has {h.n_layers + 2}")
        if len(self._experts) != self._first_experts[-1]:
            raise QsfArgumentError(
                f"{len(self._experts)} experts written, the layers have {self._first_experts[-1]}"
            )
        if h.positions == Positions.LEARNED and all(e.tag != "WPOS" for e in self._entries):
            raise QsfArgumentError("the positions are learned, but there is no section WPOS")
        tensors = b"".join(pack_tensor(t) for t in (*self._tensors, *self._expert_tensors))
        layr = self._put_section("LAYR", lay.SECTION_REQUIRED, b"".join(self._layers))
        if self._experts:
            self._put_section("EXPT", lay.SECTION_REQUIRED, b"".join(self._experts))
        for tag, data in self._tables.items():
            self._put_section(tag, lay.SECTION_REQUIRED, data)
        self._put_section("TENS", lay.SECTION_REQUIRED, tensors)
        bands = struct.pack(f"<{len(self._bands)}I", *self._bands)
        self._put_section("EBND", lay.SECTION_REQUIRED, bands)
        self._align(lay.DATA_ALIGN)
        directory_off = self._at
        directory = b"".join(
            lay.DIRECTORY_ENTRY.pack(e.tag.encode(), e.flags, e.off, e.n_bytes, e.crc32, 0)
            for e in self._entries
        )
        self._append(directory)
        links = {e.tag: e.off for e in self._entries}
        self._put_at(0, lay.pack_header(h, links, directory_off, directory, layr.crc32))
