"""The zip file that torch.save writes: where each of its records lies.

Only PyTorch's own layout is read: uncompressed records, one after another, with zip64 fields for
large numbers. Every number is checked against the file, and no memory is taken before that.
Source: PKWARE APPNOTE 6.3, sections 4.3 to 4.5.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from qsf.errors import QsfConversionError

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_MAX_COMMENT_BYTES = 0xFFFF
# About 100 bytes for each tensor; a record takes a few times that in memory.
_MAX_DIRECTORY_BYTES = 16 << 20
_ZIP64_TAG = 1
_FULL_16 = 0xFFFF
_FULL_32 = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    offset: int
    n_bytes: int
    crc32: int


def read_directory(path: Path, file: io.RawIOBase) -> dict[str, Record]:
    """Return all records of a zip file by name.

    Raises QsfConversionError if the file is no zip file, is damaged, or has compressed records.
    """
    n_file_bytes = file.seek(0, io.SEEK_END)
    count, directory_off, n_directory_bytes = _find_directory(path, file, n_file_bytes)
    if n_directory_bytes > _MAX_DIRECTORY_BYTES:
        raise QsfConversionError(
            f"{path}: a zip directory of {n_directory_bytes} bytes is too large to be right"
        )
    directory = _read_at(path, file, directory_off, n_directory_bytes, n_file_bytes)
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        record, at = _parse_entry(path, directory, at)
        if record.name in records:
            raise _damaged(path, f"two records are called {record.name[:200]!r}")
        records[record.name] = _locate(path, file, record, directory_off)
    return records


def read_record(path: Path, file: io.RawIOBase, record: Record) -> bytes:
    file.seek(record.offset)
    data = file.read(record.n_bytes) or b""
    if len(data) != record.n_bytes or zlib.crc32(data) != record.crc32:
        raise _damaged(path, f"the bytes of {record.name} do not match their CRC-32")
    return data


def _find_directory(path: Path, file: io.RawIOBase, n_file_bytes: int) -> tuple[int, int, int]:
    n_tail_bytes = min(n_file_bytes, _END.size + _MAX_COMMENT_BYTES)
    tail_off = n_file_bytes - n_tail_bytes
    tail = _read_at(path, file, tail_off, n_tail_bytes, n_file_bytes)
    at = tail.rfind(b"PK\x05\x06", 0, max(0, n_tail_bytes - _END.size + 4))
    if at < 0:
        raise _damaged(path, f"truncated: no end of a zip directory in {n_file_bytes} bytes")
    end_off = tail_off + at
    _, disk, first_disk, _, count, n_bytes, offset, _ = _END.unpack_from(tail, at)
    if disk or first_disk:
        raise _damaged(path, "it is one part of several")
    if count == _FULL_16 or _FULL_32 in (n_bytes, offset):
        locator_off = end_off - _LOCATOR.size
        if locator_off < 0:
            raise _damaged(path, "no zip64 locator")
        locator = _read_at(path, file, locator_off, _LOCATOR.size, n_file_bytes)
        signature, _, end64_off, _ = _LOCATOR.unpack(locator)
        if signature != b"PK\x06\x07":
            raise _damaged(path, "no zip64 locator")
        end64 = _read_at(path, file, end64_off, _END64.size, n_file_bytes)
        signature, *_, count, n_bytes, offset = _END64.unpack(end64)
        if signature != b"PK\x06\x06":
            raise _damaged(path, "no zip64 end of the directory")
        end_off = end64_off
    if offset + n_bytes > end_off:
        raise _damaged(
            path, f"its directory of {n_bytes} bytes at {offset} does not end before {end_off}"
        )
    if count * _CENTRAL.size > n_bytes:
        raise _damaged(path, f"{count} records do not fit in a directory of {n_bytes} bytes")
    return count, offset, n_bytes


def _parse_entry(path: Path, directory: bytes, at: int) -> tuple[Record, int]:
    if at + _CENTRAL.size > len(directory):
        raise _damaged(path, "its directory ends within an entry")
    fields = _CENTRAL.unpack_from(directory, at)
    signature, _, _, flags, method, _, _, crc32, n_packed, n_bytes = fields[:10]
    n_name, n_extra, n_comment, *_, offset = fields[10:]
    if signature != b"PK\x01\x02":
        raise _damaged(path, f"no entry at byte {at} of its directory")
    at += _CENTRAL.size
    stop = at + n_name + n_extra + n_comment
    if stop > len(directory):
        raise _damaged(path, "its directory ends within an entry")
    name = directory[at : at + n_name].decode("utf-8", "replace")
    extra = directory[at + n_name : at + n_name + n_extra]
    wide = _zip64_values(extra)
    values = []
    for value in (n_bytes, n_packed, offset):
        if value == _FULL_32:
            if not wide:
                raise _damaged(path, f"no zip64 size for {name[:200]!r}")
            value = wide.pop(0)
        values.append(value)
    n_bytes, n_packed, offset = values
    if flags & 1:
        raise QsfConversionError(f"{path}: its record {name[:200]!r} is encrypted")
    if method != 0 or n_packed != n_bytes:
        raise QsfConversionError(
            f"{path}: its record {name[:200]!r} is compressed, which torch.save never does; "
            "unpack the file and pack it again with zip -0"
        )
    return Record(name, offset, n_bytes, crc32), stop


def _zip64_values(extra: bytes) -> list[int]:
    """Return the numbers that do not fit in 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        tag, n_bytes = struct.unpack_from("<2H", extra, at)
        at += 4
        if tag == _ZIP64_TAG and at + n_bytes <= len(extra):
            n_values = min(n_bytes // 8, 3)
            return list(struct.unpack_from(f"<{n_values}Q", extra, at))
        at += n_bytes
    return []


def _locate(path: Path, file: io.RawIOBase, record: Record, data_end: int) -> Record:
    """Return the record with the offset of its bytes instead of its header."""
    header = _read_at(path, file, record.offset, _LOCAL.size, data_end)
    signature, *_, n_name, n_extra = _LOCAL.unpack(header)
    if signature != b"PK\x03\x04":
        raise _damaged(path, f"no header of {record.name[:200]!r} at byte {record.offset}")
    offset = record.offset + _LOCAL.size + n_name + n_extra
    if offset + record.n_bytes > data_end:
        raise _damaged(
            path,
            f"truncated: {record.name[:200]!r} of {record.n_bytes} bytes at {offset} does not "
            f"end before the directory at {data_end}",
        )
    return Record(record.name, offset, record.n_bytes, record.crc32)


def _read_at(path: Path, file: io.RawIOBase, offset: int, n_bytes: int, end: int) -> bytes:
    if offset + n_bytes > end:
        raise _damaged(path, f"{n_bytes} bytes at {offset} are outside of its {end}")
    file.seek(offset)
    data = file.read(n_bytes) or b""
    if len(data) != n_bytes:
        raise _damaged(path, "truncated while it was read")
    return data


def _damaged(path: Path, fault: str) -> QsfConversionError:
    return QsfConversionError(f"{path}: damaged zip file: {fault}")
