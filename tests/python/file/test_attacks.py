"""Files at the edges of the rules, read by the engine and by the Python reader of the tests.

Attacks on single fields are in test_readers_agree.py and in tests/c/reader_rules.h.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

from make.attacks import (
    LEARNED,
    LZ4,
    PACKED,
    PLAIN,
    TIED,
    UNIT_BYTES,
    ZSTD,
    Change,
    arch,
    entry,
    entry_at,
    f32,
    f32s,
    first_layer,
    grow,
    layer,
    put,
    section_at,
    u32,
)
from make.fresh import write_fresh
from make.qsf_files import repair
from oracle.file.reader import Reader
from oracle.readers import agree, c_verdict, python_verdict, verdict
from qsf.errors import QsfFormatError


@pytest.mark.parametrize("n_bytes", [1, 7, 64, 4096])
@pytest.mark.parametrize("byte", [b"\0", b"Q"])
def test_appended_bytes_are_refused(tmp_path: Path, n_bytes: int, byte: bytes) -> None:
    assert verdict(tmp_path / "m.qsf", PLAIN + byte * n_bytes) is QsfFormatError


def test_wrong_size_of_learned_positions(tmp_path: Path) -> None:
    for n_bytes in (255, 257):
        data = bytearray(LEARNED)
        grow(data, b"WPOS", bytes(n_bytes))
        assert verdict(tmp_path / "m.qsf", repair(data)) is QsfFormatError


@pytest.mark.parametrize("tag", [b"UNIT", b"ARCH", b"TENS", b"EBND"])
def test_a_table_beyond_its_limit_is_not_read(tmp_path: Path, tag: bytes) -> None:
    """The file has the bytes, so only the limit of 64 MiB stands against reading them."""
    path = tmp_path / "m.qsf"
    data = bytearray(PLAIN)
    n_bytes = (64 << 20) + 32
    struct.pack_into("<QQ", data, entry_at(data, tag) + 8, len(data), n_bytes)
    size = len(data) + n_bytes
    data = bytearray(repair(data))
    struct.pack_into("<I", data, 92, size)
    struct.pack_into("<I", data, 96, zlib.crc32(data[:96]))
    write_fresh(path, data)
    os.truncate(path, size)
    assert agree(path) is QsfFormatError
    for error in (python_verdict(path), c_verdict(path)):
        assert "allowed: up to 67108864" in str(error)


def test_untied_without_a_head(tmp_path: Path) -> None:
    data = bytearray(TIED)
    arch(u32(9, 0))(data)
    assert verdict(tmp_path / "m.qsf", repair(data)) is QsfFormatError


def with_layer(data: bytes, stored: bytes, raw_bytes: int) -> bytes:
    """Return the file with its first layer replaced by one block at the end of the file."""
    d = bytearray(data)
    entry = section_at(d, b"UNIT") + UNIT_BYTES
    old, n_bytes = struct.unpack_from("<QQ", d, entry)
    d[old : old + n_bytes] = bytes(n_bytes)
    d += bytes(-len(d) % 4096)
    struct.pack_into("<QQ", d, entry, len(d), 8 + len(stored))
    return repair(d + struct.pack("<II", len(stored), raw_bytes) + stored)


def test_a_zstd_block_is_one_frame_of_the_announced_size(tmp_path: Path) -> None:
    """Anything else is refused before the size that a frame announces is allocated."""
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "m.qsf"
    path.write_bytes(PACKED[ZSTD])
    with Reader(path) as r:
        raw = r.read_unit(1)
    pack = zstandard.ZstdCompressor().compress
    good = pack(raw)
    assert verdict(path, with_layer(PACKED[ZSTD], good, len(raw))) is None
    for stored in (
        pack(bytes(1 << 28))[:4000],
        pack(raw + b"\0"),
        pack(raw[:-1]),
        good + b"\0",
        good + pack(b""),
        pack(raw[:100]) + pack(raw[100:]),
        good[:-1],
        zstandard.ZstdCompressor(write_content_size=False).compress(raw),
        b"\x50\x2a\x4d\x18\0\0\0\0" + good,
    ):
        assert verdict(path, with_layer(PACKED[ZSTD], stored, len(raw))) is QsfFormatError


def test_an_lz4_block_has_exactly_the_announced_size(tmp_path: Path) -> None:
    block_module = pytest.importorskip("lz4.block")
    path = tmp_path / "m.qsf"
    path.write_bytes(PACKED[LZ4])
    with Reader(path) as r:
        raw = r.read_unit(1)
    good = block_module.compress(raw, store_size=False)
    assert verdict(path, with_layer(PACKED[LZ4], good, len(raw))) is None
    for stored in (
        block_module.compress(raw, store_size=True),
        block_module.compress(raw + b"\0", store_size=False),
        block_module.compress(raw[:-1], store_size=False),
        good[:-1],
        good + b"\0",
    ):
        assert verdict(path, with_layer(PACKED[LZ4], stored, len(raw))) is QsfFormatError


ACCEPTED: list[tuple[str, Change]] = [
    ("kv heads as attention heads", put("I", 28, 0)),
    ("no tokens", put("III", 80, *([0xFFFFFFFF] * 3))),
    ("optional key", arch(u32(9, 0) + f32s(0x9000, 2, 1.0, 2.0) + u32(0xFFFF, 7))),
    ("empty array", arch(u32(9, 0) + f32s(0x9000, 0))),
    ("low factor first", arch(f32(4, 8.0) + f32(5, 9.0))),
    ("tag of any bytes", entry(b"NEWS", "4s", 0, b"\xff\0\x1b\n")),
    ("known section without its flag", entry(b"TENS", "I", 4, 0)),
    ("required META", entry(b"META", "I", 4, 1)),
    ("importance 0", layer(0, "f", 24, 0.0)),
    ("layer's type in a header", first_layer(128 + 12, 0xFF)),
]


@pytest.mark.parametrize("change", [a[1] for a in ACCEPTED], ids=[a[0] for a in ACCEPTED])
def test_what_the_rules_allow_is_read(tmp_path: Path, change: Change) -> None:
    data = bytearray(PLAIN)
    change(data)
    assert data != PLAIN
    assert verdict(tmp_path / "m.qsf", repair(data)) is None


def test_an_unchanged_file_needs_no_repair() -> None:
    for data in (PLAIN, LEARNED, TIED, *PACKED.values()):
        assert repair(data) == data
        assert zlib.crc32(data[:96]) == struct.unpack_from("<I", data, 96)[0]
