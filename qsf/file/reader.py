"""Opens a .qsf file by the engine's reader, which checks it before anything trusts it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qsf.closable import Closing
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.kinds import LayerKind, RopeSet
from qsf.file.layout import (
    MAX_TEXT_BYTES,
    SECTION_REQUIRED,
    Arch,
    Header,
    Role,
    Section,
    Tensor,
    TensorType,
    Unit,
    UnitId,
    to_f32,
)
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status, path_bytes, record


class Reader(Closing):
    """A checked .qsf file; records are made on first use, weights are not read.

    Attributes:
        path: the file.
        file_bytes: its size.
        header: the model's numbers.
        arch: the ``ARCH`` section, defaults filled in.
        sections: by tag, in the order of the directory.
        n_extents: number of header, directory, sections and units.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check the file.

        Raises:
            QsfIOError: it cannot be read.
            QsfFormatError: it breaks a rule of docs/format.md.
            QsfUnsupportedError: it needs another release.
        """
        self.path = Path(path)
        out = ffi.new("qsf_contents **")
        self._check(lib.qsf_contents_open(path_bytes(path), out))
        self._handle: Any = ffi.gc(out[0], lib.qsf_contents_close)
        self.file_bytes: int = self._handle.file_bytes
        self.n_extents: int = self._handle.n_extents
        self.header = record(Header, self._handle.header)
        self.arch = record(Arch, self._handle.arch)
        self.sections = {s.tag: s for s in map(_section, self._rows("sections"))}

    def _check(self, status: int) -> None:
        try:
            check_status(status)
        except QsfFormatError as error:
            raise error.located(self.path) from None

    def _rows(self, name: str) -> Any:
        if self._handle is None:
            raise QsfArgumentError(f"{self.path}: the file is closed")
        n_rows = getattr(self._handle, f"n_{name}")
        return ffi.unpack(getattr(self._handle, name), n_rows) if n_rows else []

    def close(self) -> None:
        """Close the file; a second call does nothing. Records that were read stay valid."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ffi.release(handle)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, sorted by unit and offset; experts share the tensors of their template."""
        return tuple(record(Tensor, row) for row in self._rows("tensors"))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return tuple(_unit(i, row, self.tensors) for i, row in enumerate(self._rows("units")))

    @cached_property
    def layers(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.id.role == Role.LAYER)

    @cached_property
    def experts(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.id.role == Role.EXPERT)

    @property
    def embedding(self) -> Unit:
        return next(u for u in self.units if u.id.role == Role.EMBEDDING)

    @property
    def final(self) -> Unit:
        return next(u for u in self.units if u.id.role == Role.FINAL)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        kinds = [_usual_scale(record(LayerKind, row)) for row in self._rows("kinds")]
        return tuple(kinds[row.kind] for row in self._rows("units") if row.role == Role.LAYER)

    @cached_property
    def rope_sets(self) -> tuple[RopeSet, ...]:
        """The sets of the section ``ROPE``; empty: one set, from header and ``arch``."""
        return tuple(record(RopeSet, row) for row in self._rows("rope_sets"))

    def unit(self, unit_idx: int) -> Unit:
        """Return a unit; QsfArgumentError if the file has no such unit."""
        if not 0 <= unit_idx < len(self.units):
            raise QsfArgumentError(f"unit {unit_idx}, the file has 0 .. {len(self.units) - 1}")
        return self.units[unit_idx]

    def experts_of(self, layer_idx: int) -> tuple[Unit, ...]:
        return tuple(self._experts_of.get(layer_idx, ()))

    @cached_property
    def _experts_of(self) -> dict[int, list[Unit]]:
        of_layer: dict[int, list[Unit]] = {}
        for unit in self.experts:
            of_layer.setdefault(unit.id.layer, []).append(unit)
        return of_layer

    def tensor(self, unit_idx: int, type: TensorType) -> Tensor | None:
        return next((t for t in self.unit(unit_idx).tensors if t.type == type), None)

    def read_section(self, tag: str) -> bytes:
        """Return a section after checking its checksum.

        Raises:
            QsfArgumentError: the file has no such section.
            QsfFormatError: the checksum is wrong, or the section is longer than its kind allows.
        """
        section = self.sections.get(tag)
        if section is None:
            raise QsfArgumentError(f"{self.path}: the file has no section {tag}")
        most = MAX_TEXT_BYTES.get(tag, section.n_bytes)
        if section.n_bytes > most:
            raise QsfFormatError(
                f"section {tag} has {section.n_bytes} bytes, allowed: up to {most}"
            ).located(self.path)
        self._rows("sections")  # refuses a closed file
        data = bytearray(section.n_bytes)
        i = list(self.sections).index(tag)
        self._check(lib.qsf_contents_read(self._handle, i, ffi.from_buffer(data)))
        return bytes(data)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of the file; calls ``progress(done_bytes, total_bytes)`` meanwhile.

        Raises:
            QsfFormatError: the first fault, with its place.
            QsfIOError: the system refused a read.
        """
        self._rows("sections")  # refuses a closed file
        end = ffi.new("uint64_t *")
        for i in range(self.n_extents):
            self._check(lib.qsf_contents_verify(self._handle, i, end))
            if progress is not None:
                progress(end[0], self.file_bytes)


def _usual_scale(kind: LayerKind) -> LayerKind:
    """Return the kind with ``score_scale`` 0 instead of the default that the engine filled in."""
    usual = to_f32(1.0 / to_f32(math.sqrt(kind.head_dim)))
    return replace(kind, score_scale=0.0) if kind.score_scale == usual else kind


def _section(row: Any) -> Section:
    tag = ffi.unpack(row.tag, 4).decode("latin-1")
    return Section(tag, row.off, row.n_bytes, row.crc32, bool(row.flags & SECTION_REQUIRED))


def _unit(idx: int, row: Any, tensors: tuple[Tensor, ...]) -> Unit:
    unit_id = UnitId(Role(row.role), row.layer, row.expert)
    return Unit(
        idx, unit_id, row.off, row.stored_bytes, row.raw_bytes, row.crc32, row.dtype,
        row.compression, row.importance,
        tensors[row.first_tensor : row.first_tensor + row.n_tensors], row.template_idx,
    )  # fmt: skip
