"""Small files, and changes of their bytes with the error that each must raise."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from make.qsf_files import tiny_header, write_tiny
from make.refusals import table
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
Attack = tuple[str, type[QsfError], Change]
INF, NAN = float("inf"), float("nan")
# tests/data/attacks.json has the tables: name, kind of error (F or U), what is changed, and how.
# Keys and values of ARCH and KIND are those of one of its "like", and others.
DATA: dict[str, Any] = table("attacks")


def number(value: Any) -> Any:
    """Return the value; JSON has no word for NaN and infinity."""
    return float(value) if value in ("nan", "inf") else value


def values_of(said: dict[str, Any]) -> bytes:
    """Pack keys and values: whole numbers, floats and lists of floats."""
    whole = {**DATA["like"].get(said.get("like"), {}), **said}
    whole.pop("like", None)
    out = b""
    for key, value in sorted((int(key), number(value)) for key, value in whole.items()):
        if isinstance(value, list):
            out += f32s(key, len(value), *map(number, value))
        else:
            out += f32(key, value) if isinstance(value, float) else u32(key, value)
    return out


def attack_of(name: str, error: str, what: str, *how: Any) -> Attack:
    """Return the attack of a row of the tables."""
    changes: dict[str, Callable[..., Change]] = {
        "header": put, "block": block, "layer": layer, "tensor": tensor, "unit": unit,
        "entry": lambda tag, *where: entry(tag.encode(), *where),
        "inside": lambda tag, *where: inside(tag.encode(), *where),
        "arch": lambda said: arch(values_of(said)),
    }  # fmt: skip
    values = [number(value) for value in how]
    if "4s" in values:  # of text
        values[-1] = values[-1].encode()
    return name, {"F": F, "U": U}[error], changes[what](*values)


ATTACKS: list[Attack] = [
    *(attack for name in ("header", "directory", "layer", "tensor", "arch", "unit")
      for attack in (attack_of(*row) for row in DATA[name])),
    *((f"no {t.decode()}", F, drop(t))
      for t in (b"UNIT", b"ARCH", b"TENS", b"EBND")),
    ("unknown tag of any bytes, required", U, lambda d: struct.pack_into(
        "<4sI", d, entry_at(d, b"NEWS"), b"\xff\0\x1b\n", 1)),
    ("overlap with directory", F, lambda d: struct.pack_into(
        "<Q", d, entry_at(d, b"META") + 8, struct.unpack_from("<Q", d, 100)[0])),
    ("overlap with layer", F, lambda d: struct.pack_into("<Q", d, entry_at(d, b"META") + 8,
        unit_at(d, 1) + 64)),
    ("overlap with section", F, lambda d: struct.pack_into(
        "<Q", d, entry_at(d, b"META") + 8, section_at(d, b"TENS"))),
    ("embedding unaligned", F, lambda d: (layer(-1, "Q", 0, 4160)(d), put("Q", 64, 4160)(d))),
    ("embedding too short", F, lambda d: [layer(-1, "Q", at, 2112)(d) for at in (8, 16)]),
    ("embedding too long", F, lambda d: [layer(-1, "Q", at, 2240)(d) for at in (8, 16)]),
    ("same place", F, lambda d: layer(1, "Q", 0, unit_at(d, 1))(d)),
    ("experts that no layer has", F, lambda d: grow(d, b"UNIT", units_with_an_expert(d))),
    ("1 byte", F, arch(b"\0")),
    ("no value", F, arch(struct.pack("<HBB", 1, 2, 0))),
    ("half a value", F, arch(f32(1, 1.0)[:-1])),
    ("new key of a new type", U, arch(struct.pack("<HBB", 20, 9, 0))),
    ("descending", F, arch(u32(9, 0) + u32(8, 0))),
    ("twice", F, arch(u32(9, 0) + u32(9, 0))),
    ("reserved", F, arch(struct.pack("<HBBI", 9, 1, 1, 0))),
    ("type 0", F, arch(struct.pack("<HBBI", 9, 0, 0, 0))),
    ("type 4", F, arch(struct.pack("<HBBI", 0x9000, 4, 0, 0))),
    ("array too long", F, arch(f32s(0x9000, 65537, *([0.0] * 65537)))),
    ("array outside", F, arch(f32s(0x9000, 3, 0.0))),
    ("array without count", F, arch(struct.pack("<HBBH", 0x9000, 3, 0, 1))),
    ("padding between extents", F, lambda d: struct.pack_into("<B", d, 4000, 1)),
]  # fmt: skip

# On the layers of a compressed file.
PACKED_ATTACKS: list[Change] = [
    block("I", 0, 0), block("I", 0, 0xFFFFFFFF), block("I", 4, 0), block("I", 4, 0xFFFFFFFF),
    block("I", 4, 4735), block("I", 4, 4737), block("II", 0, 10, 10), block("12s", 8, b"\xff"),
    layer(0, "Q", 8, 7), layer(0, "Q", 8, 60), layer(0, "Q", 8, 200), layer(0, "Q", 16, 4800),
    layer(0, "Q", 16, 4672), layer(0, "Q", 16, 0xFFFFFFFF), layer(0, "B", 34, 0),
]  # fmt: skip
