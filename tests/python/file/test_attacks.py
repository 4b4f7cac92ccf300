"""Damaged and hostile files: each is refused with the right kind of error, none crashes.

The attacks repair every checksum, so that they reach the rules behind them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from make.attacks import (
    ATTACKS,
    LEARNED,
    LZ4,
    NONE,
    PACKED,
    PACKED_ATTACKS,
    PLAIN,
    SMALL,
    TIED,
    UNIT_BYTES,
    ZSTD,
    Change,
    arch,
    check,
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
from make.examples import examples
from make.fresh import write_fresh
from make.qsf_files import repair
from oracle.file.reader import Reader
from qsf.errors import QsfError, QsfFormatError
from qsf.file.layout import Compression

# ---- damage ----


def check_changed_bytes(path: Path, compression: Compression, step: int) -> None:
    """By opening, or by verify: padding too is under the rule that it is zero."""
    data = SMALL[compression]
    write_fresh(path, data)
    check(path)
    rng = random.Random(1)
    accepted = []
    with path.open("r+b", buffering=0) as f:
        for at in range(0, len(data), step):
            byte = data[at]
            os.pwrite(f.fileno(), bytes([byte ^ rng.randrange(1, 256)]), at)
            try:
                with Reader(path) as r:
                    r.verify()
                accepted.append(at)
            except QsfFormatError:
                pass
            os.pwrite(f.fileno(), bytes([byte]), at)
    check(path)
    assert accepted == []


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    check_changed_bytes(tmp_path / "m.qsf", NONE, step=7)


@pytest.mark.slow
@pytest.mark.parametrize("compression", SMALL)
def test_every_changed_byte_is_refused(tmp_path: Path, compression: Compression) -> None:
    check_changed_bytes(tmp_path / "m.qsf", compression, step=1)


@pytest.mark.parametrize("compression", SMALL)
def test_every_truncation_is_refused(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "m.qsf"
    path.write_bytes(SMALL[compression])
    for n_bytes in reversed(range(len(SMALL[compression]))):
        os.truncate(path, n_bytes)
        with pytest.raises(QsfFormatError):
            Reader(path)


@pytest.mark.parametrize("n_bytes", [1, 7, 64, 4096])
@pytest.mark.parametrize("byte", [b"\0", b"Q"])
def test_appended_bytes_are_refused(tmp_path: Path, n_bytes: int, byte: bytes) -> None:
    path = tmp_path / "m.qsf"
    path.write_bytes(PLAIN + byte * n_bytes)
    with pytest.raises(QsfFormatError, match="truncated or extended"):
        Reader(path)


# ---- attacks ----


def refuse(tmp_path: Path, data: bytes, error: type[QsfError]) -> None:
    path = tmp_path / "m.qsf"
    write_fresh(path, data)
    with pytest.raises(QsfError) as e:
        check(path)
    assert type(e.value) is error, e.value


@pytest.mark.parametrize(("error", "change"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_an_attack_is_refused(tmp_path: Path, error: type[QsfError], change: Change) -> None:
    data = bytearray(PLAIN)
    change(data)
    assert data != PLAIN
    refuse(tmp_path, repair(data), error)


def test_wrong_size_of_learned_positions(tmp_path: Path) -> None:
    for n_bytes in (255, 257):
        data = bytearray(LEARNED)
        grow(data, b"WPOS", bytes(n_bytes))
        refuse(tmp_path, repair(data), QsfFormatError)


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
    with pytest.raises(QsfFormatError, match="allowed: up to 67108864"):
        Reader(path)


def test_untied_without_a_head(tmp_path: Path) -> None:
    data = bytearray(TIED)
    arch(u32(9, 0))(data)
    refuse(tmp_path, repair(data), QsfFormatError)


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("change", PACKED_ATTACKS)
def test_attacks_on_compressed_layers(
    tmp_path: Path, compression: Compression, change: Change
) -> None:
    data = bytearray(PACKED[compression])
    change(data)
    refuse(tmp_path, repair(data), QsfFormatError)


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
    path.write_bytes(with_layer(PACKED[ZSTD], good, len(raw)))
    check(path)
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
        refuse(tmp_path, with_layer(PACKED[ZSTD], stored, len(raw)), QsfFormatError)


def test_an_lz4_block_has_exactly_the_announced_size(tmp_path: Path) -> None:
    block_module = pytest.importorskip("lz4.block")
    path = tmp_path / "m.qsf"
    path.write_bytes(PACKED[LZ4])
    with Reader(path) as r:
        raw = r.read_unit(1)
    good = block_module.compress(raw, store_size=False)
    path.write_bytes(with_layer(PACKED[LZ4], good, len(raw)))
    check(path)
    for stored in (
        block_module.compress(raw, store_size=True),
        block_module.compress(raw + b"\0", store_size=False),
        block_module.compress(raw[:-1], store_size=False),
        good[:-1],
        good + b"\0",
    ):
        refuse(tmp_path, with_layer(PACKED[LZ4], stored, len(raw)), QsfFormatError)


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
    path = tmp_path / "m.qsf"
    path.write_bytes(repair(data))
    check(path)


def test_an_unchanged_file_needs_no_repair() -> None:
    for data in (PLAIN, LEARNED, TIED, *PACKED.values()):
        assert repair(data) == data
        assert zlib.crc32(data[:96]) == struct.unpack_from("<I", data, 96)[0]


# ---- fuzzing ----

STRUCTURED = [*range(128), *(-i for i in range(1, 1500))]  # header; tables and directory
POSITION = st.sampled_from(STRUCTURED) | st.integers(0, len(PLAIN) - 1)
VALUE = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)


@settings(deadline=None, max_examples=examples(400))
@given(
    st.sampled_from([PLAIN, LEARNED, TIED, *PACKED.values()]),
    st.lists(st.tuples(POSITION, VALUE), max_size=6),
    st.none() | st.integers(0, len(PLAIN)),
)
@example(PLAIN, [(100, 0xFF)], None)
@example(PLAIN, [], 128)
def test_only_qsf_errors_come_out(
    data: bytes, changes: list[tuple[int, int]], n_bytes: int | None
) -> None:
    d = bytearray(data)
    for at, value in changes:
        d[at % len(d)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        path.write_bytes(repair(d[:n_bytes]))
        with contextlib.suppress(QsfError):
            check(path)


@settings(deadline=None, max_examples=examples(200))
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused(noise: bytes, is_long: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        path.write_bytes(repair(b"QSF1\2\0\0\0\x80\0\0\0" + noise + bytes(400 * is_long)))
        with pytest.raises(QsfFormatError):
            Reader(path)
