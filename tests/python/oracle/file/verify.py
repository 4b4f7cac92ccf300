"""Checks every byte of an opened .qsf file: what ``qsf-inspect --verify`` does.

In constant memory: extents are read in pieces, and a unit's bytes are followed from tensor
header to data to padding as they pass.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from oracle.file.outliers import outliers_fault
from qsf.errors import QsfFormatError
from qsf.file import layout as lay
from qsf.file.layout import Layout, Tensor, TensorType, Unit

if TYPE_CHECKING:
    from oracle.file.reader import Extent, Reader

Progress = Callable[[int, int], None]
_LAYER_DTYPE: Final = 0xFF  # in a tensor's header: the layer's type
_PIECE_BYTES: Final = 1 << 20


def verify_file(reader: Reader, progress: Progress | None = None) -> None:
    """Check checksums, tensor headers, embedding bands and that all padding is zero.

    Raises:
        QsfFormatError: the first fault, with its place.
        QsfIOError: the system refused a read.
        QsfUnsupportedError: the package for a layer's compression is not installed.
    """
    total = reader.file_bytes
    at = 0
    for extent in reader.extents:
        _check_zero(reader, at, extent.off)
        done = extent.off
        for n_bytes in _check_extent(reader, extent):
            done += n_bytes
            if progress is not None:
                progress(min(done, extent.off + extent.n_bytes), total)
        at = extent.off + extent.n_bytes
    _check_zero(reader, at, total)
    if progress is not None:
        progress(total, total)


def _check_zero(reader: Reader, first: int, end: int) -> None:
    for off in range(first, end, _PIECE_BYTES):
        data = reader.read_at(off, min(_PIECE_BYTES, end - off))
        n_zeros = len(data) - len(data.lstrip(b"\0"))
        if n_zeros != len(data):
            raise QsfFormatError(
                f"padding: byte at {off + n_zeros} is {data[n_zeros]:02x}, allowed: 00",
                is_damage=True,
            )


def _check_extent(reader: Reader, extent: Extent) -> Iterator[int]:
    """Check one extent, yielding how many bytes each step took (of a packed unit: raw ones)."""
    if extent.unit_idx is not None:
        unit = reader.unit(extent.unit_idx)
        check = UnitCheck(unit, reader.band_crc32)
        for chunk in reader.raw_chunks(unit.idx):
            check.feed(chunk)
            yield len(chunk) * unit.stored_bytes // unit.raw_bytes
        check.finish()
        return
    real = 0
    end = extent.off + extent.n_bytes
    for off in range(extent.off, end, _PIECE_BYTES):
        data = reader.read_at(off, min(_PIECE_BYTES, end - off))
        real = zlib.crc32(data, real)
        yield len(data)
    if extent.crc32 is not None and real != extent.crc32:
        raise QsfFormatError(
            f"{extent.name} ({extent.n_bytes} bytes at {extent.off}): checksum is {real:08x},"
            f" stored is {extent.crc32:08x}",
            is_damage=True,
        )


class UnitCheck:
    """Checks the raw bytes of a unit in order: headers, data and padding.

    The first fault is kept until ``finish``, so that a wrong checksum of the unit, which
    says more, is reported before it.
    """

    def __init__(self, unit: Unit, band_crc32: tuple[int, ...]) -> None:
        """Begin at the unit's first byte."""
        self._unit = unit
        self._bands = band_crc32
        self._fault: str | None = None
        self._walk = self._regions()
        self._left = 0
        self._take: Callable[[memoryview], None] = self._take_data
        self._head = bytearray()
        self._table = bytearray()
        self._tensor = unit.tensors[0]
        self._band_crc32 = 0
        self._band_done_bytes = 0

    def _regions(self) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        """Yield the bytes of each region and what takes them."""
        for tensor in self._unit.tensors:
            self._tensor = tensor
            self._head.clear()
            yield lay.TENSOR_HEADER_BYTES, self._take_header
            yield tensor.data_bytes, self._take_data
            yield -tensor.data_bytes % lay.DATA_ALIGN, self._take_padding

    def feed(self, chunk: bytes) -> None:
        """Check the next raw bytes. The reader passes exactly as many as the unit has."""
        view = memoryview(chunk)
        while view:
            while self._left == 0:
                self._left, self._take = next(self._walk)
            part = view[: self._left]
            self._take(part)
            self._left -= len(part)
            view = view[len(part) :]

    def finish(self) -> None:
        """Raise the first fault."""
        if self._fault is not None:
            raise QsfFormatError(f"unit {self._unit.idx}: {self._fault}")

    def _note(self, fault: str) -> None:
        self._fault = self._fault or fault

    def _take_header(self, part: memoryview) -> None:
        self._head += part
        if len(self._head) < lay.TENSOR_HEADER_BYTES:
            return
        t = self._tensor
        *fields, reserved = lay.TENSOR_HEADER.unpack(self._head)
        kind, n_rows, n_cols, dtype, layout, index, n_entries = fields
        if dtype == _LAYER_DTYPE:
            dtype = self._unit.dtype
        name = f"header at {t.data_off - lay.TENSOR_HEADER_BYTES}"
        real = (kind, n_rows, n_cols, dtype, layout, index, n_entries)
        table = (t.type, t.n_rows, t.n_cols, t.dtype, t.layout, t.index, t.n_entries)
        if real != table:
            self._note(
                f"{name}: (type, rows, columns, quantisation type, layout, index, outliers) is"
                f" {real}, the tensor table says {table}"
            )
        if any(reserved):
            self._note(f"{name}: reserved bytes are not zero")

    def _take_data(self, part: memoryview) -> None:
        if self._tensor.type in lay.TABLES:
            self._follow_bands(self._tensor, part)
        elif self._tensor.layout == Layout.OUTLIERS:
            self._gather_table(self._tensor, part)

    def _gather_table(self, tensor: Tensor, part: memoryview) -> None:
        """Collect a part of an outlier table; the whole table is checked at its end."""
        self._table += part
        if len(self._table) == tensor.data_bytes:
            fault = outliers_fault(self._table, tensor.n_rows, tensor.n_cols, tensor.n_entries)
            if fault is not None:
                self._note(f"tensor type {tensor.type}: {fault}")
            self._table.clear()

    def _follow_bands(self, tensor: Tensor, part: memoryview) -> None:
        n_bytes = lay.band_bytes(tensor.n_cols, tensor.dtype)
        while part:
            piece = part[: n_bytes - self._band_done_bytes % n_bytes]
            self._band_crc32 = zlib.crc32(piece, self._band_crc32)
            self._band_done_bytes += len(piece)
            part = part[len(piece) :]
            if self._band_done_bytes % n_bytes == 0:
                idx = self._band_done_bytes // n_bytes - 1
                if tensor.type == TensorType.OWN_TABLE:  # behind those of the embedding
                    idx += len(self._bands) // 2
                if self._band_crc32 != self._bands[idx]:
                    self._note(
                        f"band {idx}: checksum is {self._band_crc32:08x}, EBND says"
                        f" {self._bands[idx]:08x}"
                    )
                self._band_crc32 = 0

    def _take_padding(self, part: memoryview) -> None:
        if any(part):
            self._note(f"padding after tensor type {self._tensor.type} is not zero")
