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
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qsf_files import repair, tiny_header, write_tiny

from qsf.errors import QsfError, QsfFormatError, QsfUnsupportedError
from qsf.format import Arch, Compression, Positions, Reader

NONE, LZ4, ZSTD = Compression.NONE, Compression.LZ4, Compression.ZSTD


def build(
    *,
    n_layers: int = 2,
    positions: Positions = Positions.ROPE,
    arch: Arch | None = None,
    compression: Compression = NONE,
    is_dull: bool = False,
) -> bytes:
    """Return a valid file with an unknown optional section."""
    header = tiny_header(
        n_layers=n_layers,
        positions=positions,
        rope_theta=1e4 if positions == Positions.ROPE else 0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        write_tiny(
            path, 5, header=header, arch=arch, compression=compression, is_dull=is_dull,
            sections={"META": b"{}", "NEWS": b"?"},
        )  # fmt: skip
        return path.read_bytes()


PLAIN = build()
LEARNED = build(positions=Positions.LEARNED)
TIED = build(arch=Arch(tied_head=True))
PACKED = {c: build(compression=c, is_dull=True) for c in (LZ4, ZSTD)}
SMALL = {
    NONE: build(n_layers=1, arch=Arch(tied_head=True)),
    LZ4: build(n_layers=1, arch=Arch(tied_head=True), compression=LZ4, is_dull=True),
}


def check(path: Path) -> None:
    """Open, verify and read everything that the file has."""
    with Reader(path) as r:
        r.verify()
        for tag in r.sections:
            r.read_section(tag)
        for t in r.tensors:
            assert len(r.read_tensor(t)) == t.data_bytes


def entry_at(data: bytes | bytearray, tag: bytes) -> int:
    """Return where the directory entry of a tag is."""
    first, n_sections = struct.unpack_from("<QI", data, 100)
    for at in range(first, first + 32 * n_sections, 32):
        if data[at : at + 4] == tag:
            return int(at)
    raise AssertionError(tag)


def section_at(data: bytes | bytearray, tag: bytes) -> int:
    """Return where a section's bytes are."""
    return int(struct.unpack_from("<Q", data, entry_at(data, tag) + 8)[0])


# ---- damage ----


@pytest.mark.parametrize("compression", [NONE, pytest.param(LZ4, marks=pytest.mark.slow)])
def test_every_changed_byte_is_refused(tmp_path: Path, compression: Compression) -> None:
    """By opening, or by verify: padding too is under the rule that it is zero."""
    path = tmp_path / "m.qsf"
    data = SMALL[compression]
    path.write_bytes(data)
    check(path)
    rng = random.Random(1)
    accepted = []
    with path.open("r+b", buffering=0) as f:
        for at, byte in enumerate(data):
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

Change = Callable[[bytearray], object]


def put(fmt: str, at: int, *values: object) -> Change:
    """Return a change of the file's header."""
    return lambda d: struct.pack_into("<" + fmt, d, at, *values)


def entry(tag: bytes, fmt: str, at: int, value: object) -> Change:
    """Return a change of a directory entry."""
    return lambda d: struct.pack_into("<" + fmt, d, entry_at(d, tag) + at, value)


def inside(tag: bytes, fmt: str, at: int, value: object) -> Change:
    """Return a change of a section's bytes."""
    return lambda d: struct.pack_into("<" + fmt, d, section_at(d, tag) + at, value)


def grow(d: bytearray, tag: bytes, data: bytes) -> None:
    """Replace a section by one at the end of the file; its old bytes become padding."""
    at = entry_at(d, tag)
    old, n_bytes = struct.unpack_from("<QQ", d, at + 8)
    d[old : old + n_bytes] = bytes(n_bytes)
    struct.pack_into("<QQ", d, at + 8, len(d), len(data))
    if tag == b"LAYR":
        struct.pack_into("<Q", d, 56, len(d))
    d += data


def arch(data: bytes) -> Change:
    """Return a change of the whole ARCH section."""
    return lambda d: grow(d, b"ARCH", data)


def u32(key: int, value: int) -> bytes:
    return struct.pack("<HBBI", key, 1, 0, value)


def f32(key: int, value: float) -> bytes:
    return struct.pack("<HBBf", key, 2, 0, value)


def f32s(key: int, count: int, *values: float) -> bytes:
    return struct.pack(f"<HBBI{len(values)}f", key, 3, 0, count, *values)


def tensor(i: int, fmt: str, at: int, value: object) -> Change:
    """Return a change of the i-th entry of the tensor table."""
    return inside(b"TENS", fmt, 32 * i + at, value)


def layer(i: int, fmt: str, at: int, value: object) -> Change:
    """Return a change of the i-th entry of the layer index."""
    return inside(b"LAYR", fmt, 32 * i + at, value)


def block(fmt: str, at: int, *values: object) -> Change:
    """Return a change of the first layer's first block."""

    def change(d: bytearray) -> None:
        off = struct.unpack_from("<Q", d, section_at(d, b"LAYR"))[0]
        struct.pack_into("<" + fmt, d, off + at, *values)

    return change


def unit(tag: bytes, at: int, byte: int) -> Change:
    """Return a change of one byte of the embedding or the final unit."""
    return inside(tag, "B", at, byte)


def drop(tag: bytes) -> Change:
    """Return a change that renames a section to an optional one nobody knows."""
    return lambda d: struct.pack_into("<4sI", d, entry_at(d, tag), b"gone", 0)


def first_layer(at: int, byte: int) -> Change:
    return block("B", at, byte)


F, U = QsfFormatError, QsfUnsupportedError
INF, NAN = float("inf"), float("nan")

HEADER_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("magic", F, put("4s", 0, b"QSF2")),
    ("version 2", U, put("I", 4, 2)),
    ("version 0", U, put("I", 4, 0)),
    ("header size", F, put("I", 8, 64)),
    ("architecture", U, put("I", 12, 5)),
    ("no layers", F, put("I", 16, 0)),
    ("layers", F, put("I", 16, 4097)),
    ("layers and index disagree", F, put("I", 16, 3)),
    ("dim 0", F, put("I", 20, 0)),
    ("dim", F, put("I", 20, 0xFFFFFFFF)),
    ("heads", F, put("I", 24, 0)),
    ("heads huge", F, put("I", 24, 4097)),
    ("kv heads", F, put("I", 28, 3)),
    ("vocab 0", F, put("I", 32, 0)),
    ("vocab huge", F, put("I", 32, 0xFFFFFFFF)),
    ("vocab disagrees", F, put("I", 32, 36)),
    ("vocab disagrees, same bands", F, put("I", 32, 21)),
    ("max tokens", F, put("I", 36, 0)),
    ("ffn", F, put("I", 40, 0)),
    ("head dim 0", F, put("I", 44, 0)),
    ("head dim", F, put("I", 44, 4097)),
    ("dtype", F, put("B", 48, 11)),
    ("activation", F, put("B", 49, 5)),
    ("norm", F, put("B", 50, 2)),
    ("positions", F, put("B", 51, 3)),
    ("theta 0", F, put("f", 52, 0.0)),
    ("theta negative", F, put("f", 52, -1.0)),
    ("theta nan", F, put("f", 52, NAN)),
    ("theta inf", F, put("f", 52, INF)),
    ("theta without rope", F, put("Bf", 51, 2, 1.0)),
    ("learned without WPOS", F, put("Bf", 51, 0, 0.0)),
    ("index offset", F, put("Q", 56, 128)),
    ("embedding offset", F, put("Q", 64, 0)),
    ("final offset", F, put("Q", 72, 1 << 63)),
    ("bos", F, put("I", 80, 20)),
    ("eos", F, put("I", 84, 0xFFFFFFFE)),
    ("pad", F, put("I", 88, 20)),
    ("directory unaligned", F, put("Q", 100, 129)),
    ("directory outside", F, put("Q", 100, 1 << 40)),
    ("directory wraps", F, put("Q", 100, (1 << 64) - 8)),
    ("directory in header", F, put("Q", 100, 0)),
    ("no entries", F, put("I", 108, 0)),
    ("257 entries", F, put("I", 108, 257)),
    ("more entries than bytes", F, put("I", 108, 256)),
    ("fewer entries", F, put("I", 108, 1)),
    ("block size", F, put("H", 116, 32)),
    ("rows per tile", F, put("B", 118, 8)),
    ("flags", F, put("B", 119, 1)),
]
DIRECTORY_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    *((f"no {t.decode()}", F, drop(t))
      for t in (b"LAYR", b"EMBD", b"FINL", b"ARCH", b"TENS", b"EBND")),
    ("unknown required", U, entry(b"NEWS", "I", 4, 1)),
    ("unknown tag of any bytes, required", U, lambda d: struct.pack_into(
        "<4sI", d, entry_at(d, b"NEWS"), b"\xff\0\x1b\n", 1)),
    ("unknown flag", F, entry(b"META", "I", 4, 2)),
    ("reserved", F, entry(b"META", "I", 28, 1)),
    ("twice", F, entry(b"NEWS", "4s", 0, b"META")),
    ("empty", F, entry(b"META", "Q", 16, 0)),
    ("outside", F, entry(b"META", "Q", 16, 1 << 40)),
    ("wraps", F, entry(b"META", "Q", 8, (1 << 64) - 1)),
    ("wraps in size", F, entry(b"META", "Q", 16, (1 << 64) - 1)),
    ("overlap with header", F, entry(b"META", "Q", 8, 64)),
    ("overlap with directory", F, lambda d: struct.pack_into(
        "<Q", d, entry_at(d, b"META") + 8, struct.unpack_from("<Q", d, 100)[0])),
    ("overlap with layer", F, lambda d: struct.pack_into("<Q", d, entry_at(d, b"META") + 8,
        struct.unpack_from("<Q", d, section_at(d, b"LAYR"))[0] + 64)),
    ("overlap with section", F, lambda d: struct.pack_into(
        "<Q", d, entry_at(d, b"META") + 8, section_at(d, b"TENS"))),
    ("embedding unaligned", F, lambda d: (entry(b"EMBD", "Q", 8, 4160)(d), put("Q", 64, 4160)(d))),
    ("embedding too short", F, entry(b"EMBD", "Q", 16, 2112)),
    ("embedding too long", F, entry(b"EMBD", "Q", 16, 2240)),
    ("index size", F, entry(b"LAYR", "Q", 16, 32)),
    ("EBND size", F, entry(b"EBND", "Q", 16, 4)),
    ("TENS size", F, entry(b"TENS", "Q", 16, 33)),
    ("TENS shorter", F, entry(b"TENS", "Q", 16, 32)),
]  # fmt: skip
LAYER_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("unaligned", F, layer(0, "Q", 0, 8256)),
    ("outside", F, layer(0, "Q", 0, 1 << 40)),
    ("wraps", F, layer(0, "Q", 0, (1 << 64) - 4096)),
    ("same place", F, lambda d: layer(1, "Q", 0, struct.unpack_from(
        "<Q", d, section_at(d, b"LAYR"))[0])(d)),
    ("stored 0", F, layer(0, "I", 8, 0)),
    ("raw 0", F, layer(0, "I", 12, 0)),
    ("stored is not raw", F, layer(0, "I", 12, 4800)),
    ("stored huge", F, layer(0, "I", 8, 0xFFFFFFFF)),
    ("dtype", F, layer(0, "B", 16, 11)),
    ("compression", F, layer(0, "B", 17, 4)),
    ("compressed bytes are not blocks", F, layer(0, "B", 17, 1)),
    ("count", F, layer(0, "H", 18, 8)),
    ("count 0", F, layer(0, "H", 18, 0)),
    ("importance nan", F, layer(0, "f", 24, NAN)),
    ("importance inf", F, layer(0, "f", 24, INF)),
    ("importance negative", F, layer(0, "f", 24, -1.0)),
    ("reserved", F, layer(0, "I", 28, 1)),
]  # fmt: skip
TENSOR_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("unit", F, tensor(0, "I", 0, 4)),
    ("unit order", F, tensor(1, "I", 0, 2)),
    ("unit 0 empty", F, tensor(0, "I", 0, 1)),
    ("type", U, tensor(1, "I", 4, 36)),
    ("a side table in tiles", F, tensor(2, "I", 4, 29)),
    ("type huge", U, tensor(1, "I", 4, 0xFFFFFFFF)),
    ("embedding type", F, tensor(0, "I", 4, 26)),
    ("layer has a final norm", F, tensor(1, "I", 4, 27)),
    ("final norm type", F, tensor(19, "I", 4, 7)),
    ("head type", F, tensor(20, "I", 4, 5)),
    ("head index", F, tensor(20, "H", 18, 1)),
    ("twice", F, tensor(3, "I", 4, 0)),
    ("rows 0", F, tensor(2, "I", 8, 0)),
    ("rows huge", F, tensor(2, "I", 8, 0xFFFFFFFF)),
    ("rows beyond the unit", F, tensor(2, "I", 8, 1 << 24)),
    ("cols 0", F, tensor(2, "I", 12, 0)),
    ("cols huge", F, tensor(2, "I", 12, (1 << 24) + 1)),
    ("embedding rows", F, tensor(0, "I", 8, 21)),
    ("embedding cols", F, tensor(0, "I", 12, 9)),
    ("final norm cols", F, tensor(19, "I", 12, 9)),
    ("dtype 5", F, tensor(2, "B", 16, 5)),
    ("dtype 11", F, tensor(2, "B", 16, 11)),
    ("dtype 255", F, tensor(2, "B", 16, 255)),
    ("layout 2", F, tensor(2, "B", 17, 2)),
    ("vector with rows", F, tensor(2, "B", 17, 0)),
    ("vector of 4 bits", F, tensor(1, "B", 16, 3)),
    ("reserved", F, tensor(2, "I", 20, 1)),
    ("offset 0", F, tensor(0, "Q", 24, 0)),
    ("offset", F, tensor(2, "Q", 24, 1 << 63)),
    ("offset wraps", F, tensor(2, "Q", 24, (1 << 64) - 64)),
]
ARCH_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("1 byte", F, arch(b"\0")),
    ("no value", F, arch(struct.pack("<HBB", 1, 2, 0))),
    ("half a value", F, arch(f32(1, 1.0)[:-1])),
    ("key 0", U, arch(u32(0, 0))),
    ("key 11", U, arch(u32(11, 0))),
    ("new key of a new type", U, arch(struct.pack("<HBB", 11, 9, 0))),
    ("key 0x7fff", U, arch(u32(0x7FFF, 0))),
    ("descending", F, arch(u32(9, 0) + u32(8, 0))),
    ("twice", F, arch(u32(9, 0) + u32(9, 0))),
    ("reserved", F, arch(struct.pack("<HBBI", 9, 1, 1, 0))),
    ("type 0", F, arch(struct.pack("<HBBI", 9, 0, 0, 0))),
    ("type 4", F, arch(struct.pack("<HBBI", 0x8000, 4, 0, 0))),
    ("wrong type", F, arch(f32(9, 0.0))),
    ("wrong type for a float", F, arch(u32(1, 1))),
    ("epsilon 0", F, arch(f32(1, 0.0))),
    ("epsilon nan", F, arch(f32(1, NAN))),
    ("scaling", F, arch(u32(2, 3))),
    ("factor negative", F, arch(f32(3, -1.0))),
    ("low above high", F, arch(f32(4, 5.0))),
    ("high equals low", F, arch(f32(4, 2.0) + f32(5, 2.0))),
    ("original 0", F, arch(u32(6, 0))),
    ("dims odd", F, arch(u32(7, 3))),
    ("dims above the head", F, arch(u32(7, 6))),
    ("pairing", F, arch(u32(8, 2))),
    ("tied 2", F, arch(u32(9, 2))),
    ("tied with a head", F, arch(u32(9, 1))),
    ("array of an unknown key, nan", F, arch(f32s(0x8000, 1, NAN))),
    ("array too long", F, arch(f32s(0x8000, 65537, *([0.0] * 65537)))),
    ("array outside", F, arch(f32s(0x8000, 3, 0.0))),
    ("array without count", F, arch(struct.pack("<HBBH", 0x8000, 3, 0, 1))),
]
UNIT_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("header type", F, unit(b"EMBD", 0, 26)),
    ("header rows", F, unit(b"EMBD", 4, 21)),
    ("header dtype", F, unit(b"EMBD", 12, 3)),
    ("header dtype of the file, which is another", F, unit(b"EMBD", 12, 0xFF)),
    ("header layout", F, unit(b"EMBD", 13, 0)),
    ("header index", F, unit(b"FINL", 14, 1)),
    ("header reserved", F, unit(b"EMBD", 63, 1)),
    ("layer header", F, first_layer(8, 9)),
    ("vector padding", F, first_layer(96, 1)),
    ("band", F, unit(b"EMBD", 64 + 1500, 7)),
    ("band checksum", F, inside(b"EBND", "I", 4, 1)),
    ("padding between extents", F, lambda d: struct.pack_into("<B", d, 4000, 1)),
]
ATTACKS = [
    *HEADER_ATTACKS,
    *DIRECTORY_ATTACKS,
    *LAYER_ATTACKS,
    *TENSOR_ATTACKS,
    *ARCH_ATTACKS,
    *UNIT_ATTACKS,
]


def refuse(tmp_path: Path, data: bytes, error: type[QsfError]) -> None:
    path = tmp_path / "m.qsf"
    path.write_bytes(data)
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


@pytest.mark.parametrize("tag", [b"LAYR", b"ARCH", b"TENS", b"EBND"])
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
    path.write_bytes(data)
    os.truncate(path, size)
    with pytest.raises(QsfFormatError, match="allowed: up to 67108864"):
        Reader(path)


def test_untied_without_a_head(tmp_path: Path) -> None:
    data = bytearray(TIED)
    arch(u32(9, 0))(data)
    refuse(tmp_path, repair(data), QsfFormatError)


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize(
    "change",
    [
        block("I", 0, 0), block("I", 0, 0xFFFFFFFF), block("I", 4, 0), block("I", 4, 0xFFFFFFFF),
        block("I", 4, 4735), block("I", 4, 4737), block("II", 0, 10, 10), block("12s", 8, b"\xff"),
        layer(0, "I", 8, 7), layer(0, "I", 8, 60), layer(0, "I", 8, 200), layer(0, "I", 12, 4800),
        layer(0, "I", 12, 4672), layer(0, "I", 12, 0xFFFFFFFF), layer(0, "B", 17, 0),
    ],
)  # fmt: skip
def test_attacks_on_compressed_layers(
    tmp_path: Path, compression: Compression, change: Change
) -> None:
    data = bytearray(PACKED[compression])
    change(data)
    refuse(tmp_path, repair(data), QsfFormatError)


def with_layer(data: bytes, stored: bytes, raw_bytes: int) -> bytes:
    """Return the file with its first layer replaced by one block at the end of the file."""
    d = bytearray(data)
    layr = section_at(d, b"LAYR")
    old, n_bytes = struct.unpack_from("<QI", d, layr)
    d[old : old + n_bytes] = bytes(n_bytes)
    d += bytes(-len(d) % 4096)
    struct.pack_into("<QI", d, layr, len(d), 8 + len(stored))
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
    ("optional key", arch(u32(9, 0) + f32s(0x8000, 2, 1.0, 2.0) + u32(0xFFFF, 7))),
    ("empty array", arch(u32(9, 0) + f32s(0x8000, 0))),
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


@settings(deadline=None, max_examples=400)
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


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused(noise: bytes, is_long: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        path.write_bytes(repair(b"QSF1\1\0\0\0\x80\0\0\0" + noise + bytes(400 * is_long)))
        with pytest.raises(QsfFormatError):
            Reader(path)
