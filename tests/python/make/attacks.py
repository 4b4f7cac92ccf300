"""Small files, and changes of their bytes with the error that each must raise."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from make.qsf_files import tiny_header, write_tiny
from qsf.errors import QsfError, QsfFormatError, QsfUnsupportedError
from qsf.file.kinds import LayerKind, RopeSet
from qsf.file.layout import Arch, Compression, Positions

NONE, LZ4, ZSTD = Compression.NONE, Compression.LZ4, Compression.ZSTD


UNIT_BYTES = 48  # of an entry of UNIT


def build(
    *,
    n_layers: int = 2,
    positions: Positions = Positions.ROPE,
    arch: Arch | None = None,
    compression: Compression = NONE,
    is_dull: bool = False,
    head_rows: int = 0,
    layer_kinds: Sequence[LayerKind] = (),
    rope_sets: Sequence[RopeSet] = (),
    head_dim: int = 4,
) -> bytes:
    """Return a valid file with an unknown optional section."""
    header = tiny_header(
        n_layers=n_layers,
        head_dim=head_dim,
        positions=positions,
        rope_theta=1e4 if positions == Positions.ROPE else 0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        write_tiny(
            path, 5, header=header, arch=arch, compression=compression, is_dull=is_dull,
            head_rows=head_rows, sections={"META": b"{}", "NEWS": b"?"}, layer_kinds=layer_kinds,
            rope_sets=rope_sets,
        )  # fmt: skip
        return path.read_bytes()


PLAIN = build()


SPLIT = build(head_rows=16)  # of 20


LEARNED = build(positions=Positions.LEARNED)


TIED = build(arch=Arch(tied_head=True))


OWN = build(arch=Arch(own_width=3))


PACKED = {c: build(compression=c, is_dull=True) for c in (LZ4, ZSTD)}


SMALL = {
    NONE: build(n_layers=1, arch=Arch(tied_head=True)),
    LZ4: build(n_layers=1, arch=Arch(tied_head=True), compression=LZ4, is_dull=True),
}


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
    if tag == b"UNIT":
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
    """Return a change of the entry of the i-th layer in the index of units."""
    return inside(b"UNIT", fmt, UNIT_BYTES * (i + 1) + at, value)


def unit_at(data: bytes | bytearray, i: int) -> int:
    """Return where the bytes of a unit are."""
    return int(struct.unpack_from("<Q", data, section_at(data, b"UNIT") + UNIT_BYTES * i)[0])


def units_with_an_expert(d: bytearray) -> bytes:
    """Return the index of a file with two layers, and an expert that is the final unit again."""
    at = section_at(d, b"UNIT")
    index = bytes(d[at : at + 4 * UNIT_BYTES])
    expert = bytearray(index[-UNIT_BYTES:])
    struct.pack_into("<QQQ", expert, 0, unit_at(d, 3) + 4096, 64, 64)
    struct.pack_into("<B", expert, 32, 3)
    struct.pack_into("<II", expert, 40, 1, 4)
    d += bytes(8192)
    return index + expert


def block(fmt: str, at: int, *values: object) -> Change:
    """Return a change of the first layer's first block."""

    def change(d: bytearray) -> None:
        struct.pack_into("<" + fmt, d, unit_at(d, 1) + at, *values)

    return change


def unit(i: int, at: int, byte: int) -> Change:
    """Return a change of one byte of a unit."""
    return lambda d: struct.pack_into("<B", d, unit_at(d, i) + at, byte)


def drop(tag: bytes) -> Change:
    """Return a change that renames a section to an optional one nobody knows."""
    return lambda d: struct.pack_into("<4sI", d, entry_at(d, tag), b"gone", 0)


def first_layer(at: int, byte: int) -> Change:
    return block("B", at, byte)


F, U = QsfFormatError, QsfUnsupportedError


INF, NAN = float("inf"), float("nan")


HEADER_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("magic", F, put("4s", 0, b"QSF2")),
    ("version 1", U, put("I", 4, 1)),
    ("version 3", U, put("I", 4, 3)),
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
    ("dtype", F, put("B", 48, 21)),
    ("activation", F, put("B", 49, 6)),
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
      for t in (b"UNIT", b"ARCH", b"TENS", b"EBND")),
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
        unit_at(d, 1) + 64)),
    ("overlap with section", F, lambda d: struct.pack_into(
        "<Q", d, entry_at(d, b"META") + 8, section_at(d, b"TENS"))),
    ("embedding unaligned", F, lambda d: (layer(-1, "Q", 0, 4160)(d), put("Q", 64, 4160)(d))),
    ("embedding too short", F, lambda d: [layer(-1, "Q", at, 2112)(d) for at in (8, 16)]),
    ("embedding too long", F, lambda d: [layer(-1, "Q", at, 2240)(d) for at in (8, 16)]),
    ("embedding compressed", F, layer(-1, "B", 34, 1)),
    ("index size", F, entry(b"UNIT", "Q", 16, 32)),
    ("index of two units", F, entry(b"UNIT", "Q", 16, 2 * UNIT_BYTES)),
    ("EBND size", F, entry(b"EBND", "Q", 16, 4)),
    ("TENS size", F, entry(b"TENS", "Q", 16, 33)),
    ("TENS shorter", F, entry(b"TENS", "Q", 16, 32)),
]  # fmt: skip


LAYER_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("unaligned", F, layer(0, "Q", 0, 8256)),
    ("outside", F, layer(0, "Q", 0, 1 << 40)),
    ("wraps", F, layer(0, "Q", 0, (1 << 64) - 4096)),
    ("same place", F, lambda d: layer(1, "Q", 0, unit_at(d, 1))(d)),
    ("stored 0", F, layer(0, "Q", 8, 0)),
    ("raw 0", F, layer(0, "Q", 16, 0)),
    ("stored is not raw", F, layer(0, "Q", 16, 4800)),
    ("stored huge", F, layer(0, "Q", 8, 0xFFFFFFFF)),
    ("dtype", F, layer(0, "B", 33, 21)),
    ("compression", F, layer(0, "B", 34, 4)),
    ("compressed bytes are not blocks", F, layer(0, "B", 34, 1)),
    ("count", F, layer(0, "I", 40, 8)),
    ("count 0", F, layer(0, "I", 40, 0)),
    ("importance nan", F, layer(0, "f", 28, NAN)),
    ("importance inf", F, layer(0, "f", 28, INF)),
    ("importance negative", F, layer(0, "f", 28, -1.0)),
    ("reserved", F, layer(0, "B", 35, 1)),
    ("a template of a layer", F, layer(1, "I", 44, 1)),
    ("a role that nobody knows", U, layer(0, "B", 32, 5)),
    ("an own table among the layers", F, layer(0, "B", 32, 4)),
    ("two embeddings", F, layer(0, "B", 32, 0)),
    ("no final unit", F, layer(2, "B", 32, 3)),
    ("layer of the file's number", F, layer(0, "H", 36, 2)),
    ("layers descend", F, layer(1, "H", 36, 0)),
    ("an expert number of a layer", F, layer(1, "H", 38, 1)),
]  # fmt: skip


TENSOR_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("unit", F, tensor(0, "I", 0, 4)),
    ("unit order", F, tensor(1, "I", 0, 2)),
    ("unit 0 empty", F, tensor(0, "I", 0, 1)),
    ("free type before the router bias", U, tensor(1, "I", 4, 43)),
    ("free type behind the scales of experts", U, tensor(1, "I", 4, 49)),
    ("experts that no layer has", F, lambda d: grow(d, b"UNIT", units_with_an_expert(d))),
    ("type behind the last", U, tensor(1, "I", 4, 89)),
    ("own table in a layer", F, tensor(1, "I", 4, 70)),
    ("head bias in a layer", F, tensor(1, "I", 4, 66)),
    ("an outlier table in tiles", F, tensor(2, "I", 4, 29)),
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
    ("dtype 21", F, tensor(2, "B", 16, 21)),
    ("q4_k without 256 columns", F, tensor(2, "B", 16, 17)),
    ("tiles of another type than they have bytes", F, tensor(2, "B", 16, 11)),
    ("a vector of tiles' type", F, tensor(1, "B", 16, 11)),
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
    ("own embeddings without a table", F, arch(u32(13, 8))),
    ("own embeddings too wide", F, arch(u32(13, 4097))),
    ("key 15", U, arch(u32(15, 0))),
    ("new key of a new type", U, arch(struct.pack("<HBB", 15, 9, 0))),
    ("embedding factor 0", F, arch(f32(11, 0.0))),
    ("logit cap negative", F, arch(f32(12, -1.0))),
    ("key 0x7fff", U, arch(u32(0x7FFF, 0))),
    ("descending", F, arch(u32(9, 0) + u32(8, 0))),
    ("twice", F, arch(u32(9, 0) + u32(9, 0))),
    ("reserved", F, arch(struct.pack("<HBBI", 9, 1, 1, 0))),
    ("type 0", F, arch(struct.pack("<HBBI", 9, 0, 0, 0))),
    ("type 4", F, arch(struct.pack("<HBBI", 0x9000, 4, 0, 0))),
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
    ("array of an unknown key, nan", F, arch(f32s(0x9000, 1, NAN))),
    ("array too long", F, arch(f32s(0x9000, 65537, *([0.0] * 65537)))),
    ("array outside", F, arch(f32s(0x9000, 3, 0.0))),
    ("array without count", F, arch(struct.pack("<HBBH", 0x9000, 3, 0, 1))),
]


UNIT_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("header type", F, unit(0, 0, 26)),
    ("header rows", F, unit(0, 4, 21)),
    ("header dtype", F, unit(0, 12, 3)),
    ("header dtype of the file, which is another", F, unit(0, 12, 0xFF)),
    ("header layout", F, unit(0, 13, 0)),
    ("header index", F, unit(3, 14, 1)),
    ("header reserved", F, unit(0, 63, 1)),
    ("layer header", F, first_layer(8, 9)),
    ("vector padding", F, first_layer(96, 1)),
    ("band", F, unit(0, 64 + 1500, 7)),
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

# On the layers of a compressed file.
PACKED_ATTACKS: list[Change] = [
    block("I", 0, 0), block("I", 0, 0xFFFFFFFF), block("I", 4, 0), block("I", 4, 0xFFFFFFFF),
    block("I", 4, 4735), block("I", 4, 4737), block("II", 0, 10, 10), block("12s", 8, b"\xff"),
    layer(0, "Q", 8, 7), layer(0, "Q", 8, 60), layer(0, "Q", 8, 200), layer(0, "Q", 16, 4800),
    layer(0, "Q", 16, 4672), layer(0, "Q", 16, 0xFFFFFFFF), layer(0, "B", 34, 0),
]  # fmt: skip
