"""A second reader of .qsf files, in Python, that the tests hold the engine's against.

The rules are those of csrc/format/, in the same order and with the same kind of error.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oracle.file.blocks import unpack_block
from oracle.file.header import parse_model
from oracle.file.index import check_experts, parse_units
from oracle.file.tables import parse_arch, parse_kinds, parse_rope
from oracle.file.tensors import check_contents, parse_tensor
from qsf.errors import QsfArgumentError, QsfFormatError, QsfIOError, QsfUnsupportedError
from qsf.file import layout as lay
from qsf.file.kinds import LayerKind, RopeSet, plain_kind
from qsf.file.layout import (
    Arch,
    Compression,
    Header,
    Positions,
    Role,
    Section,
    Tensor,
    TensorType,
    Unit,
)
from qsf.file.open_file import OpenedFile
from qsf.system import files

READ_BYTES: Final = 1 << 20
_MAX_TABLE_BYTES: Final = 64 << 20
_NEEDED: Final = ("UNIT", "ARCH", "TENS", "EBND")
_TABLES: Final = (*_NEEDED, "TEXT", "KIND", "ROPE")
_KNOWN_OPTIONAL: Final = ("WPOS", "KIND", "ROPE", "META", "TOKN", "CHAT", "TEXT")
_KNOWN: Final = frozenset((*_NEEDED, *_KNOWN_OPTIONAL))
_LINKS: Final = struct.Struct("<QQQ")  # bytes 56 .. 79
_TAIL: Final = struct.Struct("<QIIHBBII")  # bytes 100 .. 127


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the file that has a name and, apart from the header, a checksum."""

    off: int
    n_bytes: int
    name: str
    crc32: int | None
    unit_idx: int | None


def _printable(tag: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in tag)


class Reader(OpenedFile):
    """A checked .qsf file; weights are read only when asked for.

    Attributes:
        header: the model's numbers.
        arch: the ``ARCH`` section, defaults filled in.
        layer_kinds: what each layer computes.
        rope_sets: of the section ``ROPE``; empty: one set, from header and ``arch``.
        sections: by tag, in the order of the directory.
        units: all of them, in ascending order of their ids: embedding, layers, final, experts.
        layers, experts: the units of that role.
        embedding, final: the unit of that role.
        tensors: sorted by unit and offset.
    """

    header: Header
    arch: Arch
    layer_kinds: tuple[LayerKind, ...]
    rope_sets: tuple[RopeSet, ...]
    sections: dict[str, Section]
    units: tuple[Unit, ...]
    tensors: tuple[Tensor, ...]

    # ---- opening ----

    def _check(self) -> None:
        self._verified_units: set[int] = set()
        data = self._read_start()
        self.header = parse_model(data)
        self._read_directory(data)
        units, self._tensor_counts = parse_units(
            self.read_section("UNIT"), self.header.n_layers, self.file_bytes
        )
        self._set_units(units)
        self._check_ends(_LINKS.unpack_from(data, 56))
        self.extents = self._check_apart()
        self.arch = parse_arch(self.read_section("ARCH"), self.header)
        self.rope_sets = parse_rope(self.read_section("ROPE")) if "ROPE" in self.sections else ()
        if "KIND" in self.sections:
            data = self.read_section("KIND")
            self.layer_kinds = parse_kinds(data, self.header, self.arch, self.rope_sets)
        kinds = self.layer_kinds if "KIND" in self.sections else ()
        check_experts(self.units, kinds)
        self.tensors = self._parse_tensors(self.read_section("TENS"))
        self._place_tensors()
        check_contents(
            self.units,
            self.header,
            self.arch.own_width,
            is_tied=self.arch.tied_head or self.arch.is_encoder,
        )
        if "KIND" not in self.sections:
            is_gated = self.tensor(self.layers[0].idx, TensorType.FFN_GATE) is not None
            kind = plain_kind(self.header, self.arch, is_gated=is_gated)
            self.layer_kinds = (kind,) * self.header.n_layers
        bands = self.read_section("EBND")
        n_tables = 2 if self.arch.own_width else 1
        if len(bands) != -(-self.header.n_vocab // lay.TILE_ROWS) * 4 * n_tables:
            raise QsfFormatError(
                f"section EBND has {len(bands)} bytes, the header makes it"
                f" {-(-self.header.n_vocab // lay.TILE_ROWS) * 4 * n_tables}"
            )
        self.band_crc32 = struct.unpack(f"<{len(bands) // 4}I", bands)

    def _read_start(self) -> bytes:
        """Return the 128 header bytes, whose identity and checksums are right."""
        if self.file_bytes < lay.HEADER_BYTES:
            raise QsfFormatError(
                f"not a QSF file: {self.file_bytes} bytes, its header alone has {lay.HEADER_BYTES}"
            )
        data = self.read_at(0, lay.HEADER_BYTES)
        if data[:4] != lay.MAGIC:
            raise QsfFormatError(
                f'not a QSF file: it begins with {data[:4].hex(" ")}, not with "QSF1"'
            )
        version, header_bytes = struct.unpack_from("<II", data, 4)
        if version != lay.VERSION:
            remedy = "`pip install --upgrade qsf` gets a newer one"
            if version < lay.VERSION:
                remedy = "`qsf convert MODEL FILE` makes it again from the original model"
            raise QsfUnsupportedError(
                f"file version {version}, this release reads version {lay.VERSION}: {remedy}"
            )
        if header_bytes != lay.HEADER_BYTES:
            raise QsfFormatError(f"header: size is {header_bytes}, allowed: {lay.HEADER_BYTES}")
        for first, end, at in ((0, 96, 96), (100, 124, 124)):
            (stored,) = struct.unpack_from("<I", data, at)
            real = zlib.crc32(data[first:end])
            if stored != real:
                raise QsfFormatError(
                    f"header: checksum of bytes {first}..{end - 1} is {real:08x}, stored is"
                    f" {stored:08x}",
                    is_damage=True,
                )
        (low_bytes,) = struct.unpack_from("<I", data, 92)
        if low_bytes != self.file_bytes & 0xFFFFFFFF:
            raise QsfFormatError(
                f"the file has {self.file_bytes} bytes, but its header was written for one of"
                f" {low_bytes} (mod 2^32): truncated or extended",
                is_damage=True,
            )
        return data

    def _is_inside(self, off: int, n_bytes: int) -> bool:
        return off <= self.file_bytes and n_bytes <= self.file_bytes - off

    def _read_directory(self, data: bytes) -> None:
        off, n_sections, crc32, block, rows, flags, unit_crc32, _ = _TAIL.unpack_from(data, 100)
        if off % 8 != 0:
            raise QsfFormatError(f"header: directory offset is {off}, allowed: multiples of 8")
        for name, value, least, most in (
            ("number of directory entries", n_sections, 1, lay.MAX_SECTIONS),
            ("block size", block, lay.BLOCK, lay.BLOCK),
            ("rows per tile", rows, lay.TILE_ROWS, lay.TILE_ROWS),
            ("flags (reserved)", flags, 0, 0),
        ):
            if not least <= value <= most:
                raise QsfFormatError(f"header: {name} is {value}, allowed: {least} .. {most}")
        n_bytes = n_sections * lay.ENTRY_BYTES
        self._directory = Extent(off, n_bytes, "directory", crc32, None)
        if not self._is_inside(off, n_bytes):
            raise QsfFormatError(
                f"directory: {n_bytes} bytes at {off} are not inside the file of"
                f" {self.file_bytes} bytes"
            )
        entries = self.read_at(off, n_bytes)
        if zlib.crc32(entries) != crc32:
            raise QsfFormatError(
                f"directory: checksum is {zlib.crc32(entries):08x}, the header says {crc32:08x}",
                is_damage=True,
            )
        self.sections = {}
        for raw_tag, flags, *rest in lay.DIRECTORY_ENTRY.iter_unpack(entries):
            self._add_section(raw_tag.decode("latin-1"), flags, *rest)
        self._check_sections(_LINKS.unpack_from(data, 56)[0], unit_crc32)

    def _add_section(
        self, tag: str, flags: int, off: int, n_bytes: int, crc32: int, reserved: int
    ) -> None:
        name = f"section {_printable(tag)}"
        if flags & ~lay.SECTION_REQUIRED or reserved:
            raise QsfFormatError(
                f"{name}: flags {flags:08x} and reserved {reserved:08x}, allowed: flags 0 or 1,"
                " reserved 0"
            )
        if tag not in _KNOWN and flags:
            raise QsfUnsupportedError(
                f"{name} is required to read the file, and this release does not know it"
            )
        if n_bytes == 0:
            raise QsfFormatError(f"{name} is empty, allowed: 1 byte or more")
        if not self._is_inside(off, n_bytes):
            raise QsfFormatError(
                f"{name}: {n_bytes} bytes at {off} are not inside the file of"
                f" {self.file_bytes} bytes"
            )
        if tag in _TABLES and n_bytes > _MAX_TABLE_BYTES:
            raise QsfFormatError(f"{name} has {n_bytes} bytes, allowed: up to {_MAX_TABLE_BYTES}")
        if tag in self.sections:
            raise QsfFormatError(f"{name} occurs twice in the directory")
        self.sections[tag] = Section(tag, off, n_bytes, crc32, bool(flags))

    def _check_sections(self, unit_off: int, unit_crc32: int) -> None:
        """Are the sections that a file must have there, with the sizes the header makes them?"""
        h = self.header
        for tag in _NEEDED:
            if tag not in self.sections:
                raise QsfFormatError(f"the file has no section {tag}")
        bands_bytes = -(-h.n_vocab // lay.TILE_ROWS) * 4  # of each of one table or two
        is_two = self.sections["EBND"].n_bytes == 2 * bands_bytes
        sizes = {"EBND": 2 * bands_bytes if is_two else bands_bytes}
        if h.positions == Positions.LEARNED:
            if "WPOS" not in self.sections:
                raise QsfFormatError("the positions are learned, but there is no section WPOS")
            n_numbers = h.max_tokens * h.dim
            is_f32 = self.sections["WPOS"].n_bytes == n_numbers * 4
            sizes["WPOS"] = n_numbers * (4 if is_f32 else 2)
        for tag, n_bytes in sizes.items():
            if self.sections[tag].n_bytes != n_bytes:
                raise QsfFormatError(
                    f"section {tag} has {self.sections[tag].n_bytes} bytes, the header makes it"
                    f" {n_bytes}"
                )
        index = self.sections["UNIT"]
        if index.off != unit_off:
            raise QsfFormatError(f"section UNIT is at {index.off}, the header says {unit_off}")
        if index.crc32 != unit_crc32:
            raise QsfFormatError(
                f"section UNIT: checksum is {index.crc32:08x} in the directory, {unit_crc32:08x}"
                " in the header",
                is_damage=True,
            )

    def _set_units(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        of_role: dict[Role, list[Unit]] = {role: [] for role in Role}
        for u in units:
            of_role[u.id.role].append(u)
        self.layers, self.experts = tuple(of_role[Role.LAYER]), tuple(of_role[Role.EXPERT])
        (self.embedding,), (self.final,) = of_role[Role.EMBEDDING], of_role[Role.FINAL]
        self._by_id = {u.id: u for u in units}

    def _check_ends(self, links: tuple[int, ...]) -> None:
        for unit, off in zip((self.embedding, self.final), links[1:], strict=True):
            if unit.off != off:
                raise QsfFormatError(f"the {unit.id.name} is at {unit.off}, the header says {off}")

    def _check_apart(self) -> tuple[Extent, ...]:
        """Return every extent of the file in order of offset; none overlaps another."""
        extents = [Extent(0, lay.HEADER_BYTES, "header", None, None), self._directory]
        for s in self.sections.values():
            name = f"section {_printable(s.tag)}"
            extents.append(Extent(s.off, s.n_bytes, name, s.crc32, None))
        for u in self.units:
            extents.append(Extent(u.off, u.stored_bytes, u.id.name, u.crc32, u.idx))
        extents.sort(key=lambda e: e.off)
        for a, b in itertools.pairwise(extents):
            if b.off - a.off < a.n_bytes:
                raise QsfFormatError(
                    f"{a.name} ({a.n_bytes} bytes at {a.off}) overlaps {b.name} ({b.n_bytes}"
                    f" bytes at {b.off})"
                )
        end = extents[-1].off + extents[-1].n_bytes
        if self.file_bytes - end >= 1 << 32:  # all other sizes the header's low 32 bits tell
            raise QsfFormatError(
                f"the file has {self.file_bytes >> 20} MB, but its last part ends at"
                f" {end >> 20} MB: truncated or extended",
                is_damage=True,
            )
        return tuple(extents)

    def _parse_tensors(self, data: bytes) -> tuple[Tensor, ...]:
        """Return the table's entries, each checked by itself."""
        if len(data) % lay.ENTRY_BYTES != 0:
            raise QsfFormatError(
                f"section TENS has {len(data)} bytes, allowed: multiples of {lay.ENTRY_BYTES}"
            )
        entries = enumerate(lay.TENSOR_ENTRY.iter_unpack(data))
        n_units = len(self.units)
        return tuple(parse_tensor(i, entry, n_units) for i, entry in entries)

    def _place_tensors(self) -> None:
        """Give every unit its tensors, which must fill it exactly."""
        at = 0
        units: list[Unit] = []
        for u in self.units:
            if u.template_idx != u.idx:
                units.append(replace(u, tensors=units[u.template_idx].tensors))
                continue
            first = at
            off = 0
            seen: set[tuple[int, int]] = set()
            while at < len(self.tensors) and self.tensors[at].unit_idx == u.idx:
                t = self.tensors[at]
                if (t.type, t.index) in seen:
                    raise QsfFormatError(
                        f"tensor table: unit {u.idx} has type {t.type}, index {t.index} twice"
                    )
                seen.add((t.type, t.index))
                data_off = off + lay.TENSOR_HEADER_BYTES
                end = data_off + t.data_bytes
                if t.data_off != data_off or end > u.raw_bytes:
                    raise QsfFormatError(
                        f"tensor table: entry {at} has {t.data_bytes} bytes at {t.data_off},"
                        f" allowed: at {data_off}, inside unit {u.idx} of {u.raw_bytes} bytes"
                    )
                off = lay.padded(end, lay.DATA_ALIGN)
                at += 1
            self._check_filled(u, at - first, off)
            units.append(replace(u, tensors=self.tensors[first:at]))
        if at != len(self.tensors):
            raise QsfFormatError(
                f"tensor table: entry {at} is of unit {self.tensors[at].unit_idx}, allowed:"
                " sorted by unit"
            )
        self._set_units(units)

    def _check_filled(self, u: Unit, n_tensors: int, off: int) -> None:
        if off != u.raw_bytes:
            raise QsfFormatError(
                f"tensor table: the {n_tensors} tensors of unit {u.idx} take {off} bytes, the"
                f" unit has {u.raw_bytes}"
            )
        if self._tensor_counts[u.idx] != n_tensors:
            raise QsfFormatError(
                f"tensor table: unit {u.idx} has {n_tensors} tensors, its index says"
                f" {self._tensor_counts[u.idx]}"
            )

    # ---- reading ----

    def read_at(self, off: int, n_bytes: int) -> bytes:
        """Return bytes of the file; the caller has checked that they lie inside it."""
        if self._fd < 0:
            raise QsfArgumentError(f"{self.path}: the file is closed")
        parts: list[bytes] = []
        while n_bytes > 0:
            try:
                part = files.read_at(self._fd, min(n_bytes, 1 << 30), off)
            except OSError as e:
                raise QsfIOError(f"{self.path}: read at {off}: {e.strerror}") from e
            if not part:
                raise QsfFormatError(f"the file became shorter: it ends at {off}")
            parts.append(part)
            off += len(part)
            n_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_section(self, tag: str) -> bytes:
        """Return a section whose checksum is right.

        Raises:
            QsfArgumentError: the file has no such section.
            QsfFormatError: the checksum is wrong, or it is longer than one of its kind may be.
        """
        section = self.sections.get(tag)
        if section is None:
            raise QsfArgumentError(f"{self.path}: the file has no section {tag}")
        most = lay.MAX_TEXT_BYTES.get(tag, section.n_bytes)
        if section.n_bytes > most:
            raise QsfFormatError(
                f"section {tag} has {section.n_bytes} bytes, allowed: up to {most}"
            )
        data = self.read_at(section.off, section.n_bytes)
        _check_crc(f"section {_printable(tag)}", section, zlib.crc32(data))
        return data

    def _stored_chunks(self, off: int, n_bytes: int) -> Iterator[bytes]:
        for at in range(off, off + n_bytes, READ_BYTES):
            yield self.read_at(at, min(READ_BYTES, off + n_bytes - at))

    def raw_chunks(self, unit_idx: int) -> Iterator[bytes]:
        """Yield a unit's raw bytes in pieces of at most 1 MiB.

        What was yielded can be trusted only when the iteration has ended, because the
        checksum stands for the whole unit.

        Raises:
            QsfFormatError: a block is damaged, or the checksum is wrong.
            QsfUnsupportedError: the package for the unit's compression is not installed.
        """
        unit = self.unit(unit_idx)
        crc32 = 0
        if unit.compression == Compression.NONE:
            for chunk in self._stored_chunks(unit.off, unit.stored_bytes):
                crc32 = zlib.crc32(chunk, crc32)
                yield chunk
        else:
            n_stored, n_raw = unit.stored_bytes, unit.raw_bytes
            while n_raw > 0:
                head = self.read_at(unit.off + unit.stored_bytes - n_stored, min(8, n_stored))
                block, raw = _check_block(unit, head, n_stored, n_raw)
                stored = self.read_at(unit.off + unit.stored_bytes - n_stored + 8, block)
                crc32 = zlib.crc32(stored, zlib.crc32(head, crc32))
                n_stored -= 8 + block
                n_raw -= raw
                yield unpack_block(unit.compression, stored, raw)
            if n_stored:
                raise QsfFormatError(f"{_unit_name(unit)}: {n_stored} bytes after its last block")
        _check_crc(_unit_name(unit), unit, crc32)
        self._verified_units.add(unit_idx)

    def unit(self, unit_idx: int) -> Unit:
        """Return a unit; QsfArgumentError when the file has no such one."""
        if not 0 <= unit_idx < len(self.units):
            raise QsfArgumentError(f"unit {unit_idx}, the file has 0 .. {len(self.units) - 1}")
        return self.units[unit_idx]

    def experts_of(self, layer_idx: int) -> tuple[Unit, ...]:
        """Return the experts of a layer, none if it has no routed part."""
        n_experts = self.layer_kinds[layer_idx].n_experts
        layer = lay.layer_unit(layer_idx)
        return tuple(self._by_id[layer.of_expert(expert)] for expert in range(n_experts))

    def read_unit(self, unit_idx: int) -> bytes:
        """Return the raw bytes of a unit whose checksum is right; errors as raw_chunks."""
        return b"".join(self.raw_chunks(unit_idx))

    def read_tensor(self, tensor: Tensor, unit_idx: int | None = None) -> bytes:
        """Return a tensor's data without padding, from a unit whose checksum is right.

        The first tensor of a unit reads the whole unit to verify it; later ones of an
        uncompressed unit read only their own bytes. ``unit_idx``: an expert of this template.
        """
        unit = self.unit(tensor.unit_idx if unit_idx is None else unit_idx)
        first, end = tensor.data_off, tensor.data_off + tensor.data_bytes
        if unit.compression == Compression.NONE and unit.idx in self._verified_units:
            return self.read_at(unit.off + first, tensor.data_bytes)
        out = bytearray()
        at = 0
        for chunk in self.raw_chunks(unit.idx):
            if at < end and at + len(chunk) > first:
                out += chunk[max(first - at, 0) : end - at]
            at += len(chunk)
        return bytes(out)

    def tensor(self, unit_idx: int, type: int, index: int = 0) -> Tensor | None:
        """Return the tensor of this type in a unit; None when absent."""
        for t in self.unit(unit_idx).tensors:
            if t.type == type and t.index == index:
                return t
        return None

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of the file; ``progress(done_bytes, total_bytes)`` as it goes.

        Raises:
            QsfFormatError: the first fault, with its place.
            QsfIOError: the system refused a read.
            QsfUnsupportedError: the package for a layer's compression is not installed.
        """
        from oracle.file.verify import verify_file

        try:
            verify_file(self, progress)
        except QsfFormatError as e:
            raise e.located(self.path) from e


def _unit_name(unit: Unit) -> str:
    return f"unit {unit.idx}"


def _check_crc(name: str, extent: Section | Unit | Extent, crc32: int) -> None:
    n_bytes = extent.stored_bytes if isinstance(extent, Unit) else extent.n_bytes
    if extent.crc32 is not None and crc32 != extent.crc32:
        raise QsfFormatError(
            f"{name} ({n_bytes} bytes at {extent.off}): checksum is {crc32:08x}, stored is"
            f" {extent.crc32:08x}",
            is_damage=True,
        )


def _check_block(unit: Unit, head: bytes, n_stored: int, n_raw: int) -> tuple[int, int]:
    """Return a block's stored and raw bytes, of which ``n_stored`` and ``n_raw`` are left."""
    name = f"{_unit_name(unit)}: block at {unit.stored_bytes - n_stored}"
    if len(head) < 8:
        raise QsfFormatError(f"{name}: {n_stored} bytes left, a block begins with 8")
    stored, raw = lay.BLOCK_HEADER.unpack(head)
    most = min(n_raw, lay.COMPRESSED_BLOCK_BYTES)
    if not 1 <= raw <= most:
        raise QsfFormatError(f"{name}: {raw} bytes raw, allowed: 1 .. {most}")
    if not 1 <= stored <= min(raw, n_stored - 8):
        raise QsfFormatError(
            f"{name}: {stored} bytes stored, allowed: 1 .. {min(raw, n_stored - 8)}"
        )
    return stored, raw
