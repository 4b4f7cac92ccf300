"""Damaged and hostile files: the kind of error that the engine's reader has for each.

Its arithmetic at the ends of integers is in tests/c/reader_rules.h.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from make.attacks import (
    ATTACKS,
    LEARNED,
    LZ4,
    OWN,
    PACKED,
    PACKED_ATTACKS,
    PLAIN,
    SMALL,
    SPLIT,
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
from make.kind_attacks import EXPERT_ATTACKS, EXPERTS, KIND_ATTACKS, KINDS, LATENT_ATTACKS, LATENTS
from make.mutants import SECTIONS, mutant
from make.outlier_files import add_outliers
from make.qsf_files import repair, tiny_header, write_tiny
from make.recurrent_models import write_recurrent
from make.stored import Reader, fault_of, verdict, write_fresh
from make.unit_shapes import HEAD_COLS
from make.use_file import outcomes
from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.file.kinds import RopeSet
from qsf.file.layout import Compression, Dtype
from qsf_converter import convert

BASES = [PLAIN, SPLIT, LEARNED, TIED, OWN, KINDS, LATENTS, EXPERTS]
BASES += [*PACKED.values(), *SMALL.values()]
OF_BASE = (
    (PLAIN, ATTACKS), (KINDS, KIND_ATTACKS), (LATENTS, LATENT_ATTACKS), (EXPERTS, EXPERT_ATTACKS),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.qsf"


def test_good_files_need_no_repair(path: Path) -> None:
    for data in BASES:
        assert verdict(path, data) is None
        assert repair(data) == data


@pytest.mark.parametrize(
    ("base", "error", "change"),
    [(base, *attack[1:]) for base, attacks in OF_BASE for attack in attacks],
    ids=[attack[0] for _, attacks in OF_BASE for attack in attacks],
)
def test_attacks(path: Path, base: bytes, error: type[QsfError], change: Change) -> None:
    data = bytearray(base)
    change(data)
    assert verdict(path, repair(data)) is error
    assert verdict(path, data) in (error, QsfFormatError)  # with the checksums as they were


@pytest.mark.parametrize("compression", PACKED)
def test_compressed_layers(path: Path, compression: Compression) -> None:
    for change in PACKED_ATTACKS:
        data = bytearray(PACKED[compression])
        change(data)
        assert verdict(path, repair(data)) is QsfFormatError


@pytest.mark.parametrize("dtype", [d for d in Dtype if d not in (Dtype.MIXED, *HEAD_COLS)])
def test_a_matrix_said_to_be_of_another_type(path: Path, dtype: Dtype) -> None:
    write_tiny(path, 2, header=tiny_header(dtype=dtype), dtype=dtype, is_dull=True)
    data = path.read_bytes()
    assert verdict(path, data) is None
    for other in set(Dtype) - {dtype}:
        changed = bytearray(data)
        at = section_at(changed, b"TENS") + 64  # entry 1, of layer 0: a vector; 2: attention Q
        changed[at + 16] = other
        assert verdict(path, repair(changed)) is QsfFormatError


@pytest.mark.parametrize(
    ("first", "rest"),
    [((26, 16), (87, 3)), ((26, 16), (87, 5)), ((26, 15), (87, 4)), ((26, 20), (87, 4)),
     ((87, 16), (26, 4)), ((26, 16), (26, 4)), ((26, 0), (87, 4)), ((87, 16), (87, 4))],
)  # fmt: skip
def test_attacks_on_a_head_in_two_parts(
    path: Path, first: tuple[int, int], rest: tuple[int, int]
) -> None:
    """Types and rows of both parts, in the table and in the headers inside the unit."""
    data = bytearray(SPLIT)
    n_bytes = struct.unpack_from("<Q", data, entry_at(data, b"TENS") + 16)[0]
    at = section_at(data, b"TENS") + n_bytes - 64  # the last two entries
    for entry_off, (kind, n_rows) in ((at, first), (at + 32, rest)):
        struct.pack_into("<II", data, entry_off + 4, kind, n_rows)
    assert verdict(path, repair(data)) is QsfFormatError


def test_the_corpus_of_the_fuzzer(path: Path, project_root: Path) -> None:
    verdicts = set()
    for seed in sorted((project_root / "tests" / "fuzz" / "corpus" / "reader").iterdir()):
        data = seed.read_bytes()
        verdicts |= {verdict(path, data), verdict(path, repair(data))}
        if data[:4] == b"qsf1":
            verdicts.add(verdict(path, b"QSF1" + data[4:]))
    assert verdicts == {None, QsfFormatError}


def test_4_gb_too_many_are_refused(path: Path) -> None:
    """The header has only the low 32 bits of the size; other lengths: tests/c/check_reader.c."""
    for n_times in (1, 3):
        write_fresh(path, PLAIN)
        os.truncate(path, len(PLAIN) + (n_times << 32))  # sparse
        assert "truncated or extended" in str(fault_of(path))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert type(fault_of(tmp_path)) is QsfIOError
    assert type(fault_of(tmp_path / "absent.qsf")) is QsfIOError


def test_tags_of_any_bytes_are_shown_printable(path: Path) -> None:
    """Whatever rule the section breaks: text with an escape could repaint a terminal."""
    tag = b"\xff\x1b\n\0"

    def renamed(change: Change, at: int) -> bytes:
        data = bytearray(PLAIN)
        change(data)
        data[at : at + 4] = tag
        return repair(data)

    at = entry_at(PLAIN, b"NEWS")
    changes: list[Change] = [
        entry(b"NEWS", "I", 4, 2),
        entry(b"NEWS", "Q", 16, 0),
        entry(b"NEWS", "Q", 16, 1 << 40),
        entry(b"NEWS", "Q", 8, 64),
        lambda d: entry(b"NEWS", "Q", 8, section_at(d, b"TENS"))(d),
    ]
    damaged = bytearray(renamed(lambda _: None, at))
    damaged[section_at(damaged, tag)] ^= 1
    for data in [*(renamed(change, at) for change in changes), bytes(damaged)]:
        assert verdict(path, data) is QsfFormatError
        assert "????" in str(fault_of(path))


def test_learned_positions_and_heads_have_their_size(path: Path) -> None:
    for n_bytes in (255, 257):
        data = bytearray(LEARNED)
        grow(data, b"WPOS", bytes(n_bytes))
        assert verdict(path, repair(data)) is QsfFormatError
    data = bytearray(TIED)
    arch(u32(9, 0))(data)  # untied, without a head
    assert verdict(path, repair(data)) is QsfFormatError


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
    assert "allowed: up to 67108864" in str(fault_of(path))


def with_layer(data: bytes, stored: bytes, raw_bytes: int) -> bytes:
    """Return the file with its first layer replaced by one block at the end of the file."""
    d = bytearray(data)
    entry = section_at(d, b"UNIT") + UNIT_BYTES
    old, n_bytes = struct.unpack_from("<QQ", d, entry)
    d[old : old + n_bytes] = bytes(n_bytes)
    d += bytes(-len(d) % 4096)
    struct.pack_into("<QQ", d, entry, len(d), 8 + len(stored))
    return repair(d + struct.pack("<II", len(stored), raw_bytes) + stored)


def zstd_blocks(raw: bytes) -> list[bytes]:
    """A right block, and others: one frame of the announced size is allowed, known beforehand."""
    zstandard = pytest.importorskip("zstandard")
    pack = zstandard.ZstdCompressor().compress
    good = pack(raw)
    return [
        good,
        pack(bytes(1 << 28))[:4000],
        pack(raw + b"\0"),
        pack(raw[:-1]),
        good + b"\0",
        good + pack(b""),
        pack(raw[:100]) + pack(raw[100:]),
        good[:-1],
        zstandard.ZstdCompressor(write_content_size=False).compress(raw),
        b"\x50\x2a\x4d\x18\0\0\0\0" + good,
    ]


def lz4_blocks(raw: bytes) -> list[bytes]:
    """A right block, and others: one has exactly the announced size."""
    pack = pytest.importorskip("lz4.block").compress
    good = pack(raw, store_size=False)
    more, less = (pack(data, store_size=False) for data in (raw + b"\0", raw[:-1]))
    return [good, pack(raw, store_size=True), more, less, good[:-1], good + b"\0"]


@pytest.mark.parametrize(("packing", "blocks"), [(ZSTD, zstd_blocks), (LZ4, lz4_blocks)])
def test_a_block_has_exactly_the_announced_size(
    path: Path, packing: Compression, blocks: Callable[[bytes], list[bytes]]
) -> None:
    """Anything else is refused before the size that a block announces is allocated."""
    path.write_bytes(PACKED[packing])
    with Reader(path) as r:
        raw = r.read_unit(1)
    good, *wrong = blocks(raw)
    assert verdict(path, with_layer(PACKED[packing], good, len(raw))) is None
    for stored in wrong:
        assert verdict(path, with_layer(PACKED[packing], stored, len(raw))) is QsfFormatError


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
def test_what_the_rules_allow_is_read(path: Path, change: Change) -> None:
    data = bytearray(PLAIN)
    change(data)
    assert data != PLAIN
    assert verdict(path, repair(data)) is None


# ---- files that nobody thought of ----
def of_kinds(source: Path, path: Path) -> Path:
    """Copy a model; every second layer gets a window, ALiBi, a cap and other frequencies."""
    with Reader(source) as r:
        plain = r.layer_kinds[0]
    slopes = tuple(0.5**i for i in range(plain.n_heads))
    other = replace(plain, window_tokens=40, rope_set=1, alibi_slopes=slopes, score_cap=20.0)
    sets = [RopeSet(i, tuple(0.8**j for j in range(plain.head_dim // 2))) for i in range(2)]
    sets.insert(1, replace(sets[0], least_context=4000, factor=1.1))
    n_layers = r.header.n_layers
    kinds = [other if i % 2 else plain for i in range(n_layers)]
    add_outliers(source, path, lambda _: [], layer_kinds=kinds, rope_sets=sets)
    return path


LIMITED = pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA counts mappings in Linux only"
)


MIXERS = ("lfm2", "qwen3_next", "nemotron_h-moe", "falcon_h1")
# What a base file has that others lack; the plain one has the rest.
BASE_OF = {"WPOS": "gpt2", "UNIT": "experts", "KIND": "kinds", "ROPE": "kinds"}


@LIMITED
@pytest.mark.parametrize("n_mutants", [8, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["plain", "gpt2", "experts", "kinds", *MIXERS])
def test_mutants_give_typed_errors(
    name: str,
    n_mutants: int,
    tmp_path: Path,
    tiny_llama_4bit: Path,
    tiny_gpt2_8bit: Path,
    tiny_moe_dir: Path,
) -> None:
    base = tiny_gpt2_8bit if name == "gpt2" else tiny_llama_4bit
    tags = [tag for tag in SECTIONS if BASE_OF.get(tag, "plain") == name]
    if name == "experts":
        convert(tiny_moe_dir, base := tmp_path / "experts.qsf", quant_type="4bit")
    elif name == "kinds":
        base = of_kinds(base, tmp_path / "kinds.qsf")
    elif name in MIXERS:
        base, tags = write_recurrent(tmp_path, case=name), ["KIND", "TENS"]
        n_mutants *= 3
    data = base.read_bytes()
    paths = [base]
    for tag in tags:
        for seed in range(n_mutants):
            paths.append(tmp_path / f"{tag}-{seed}.qsf")
            paths[-1].write_bytes(mutant(data, tag, seed))
    first, *results = outcomes(base, paths)
    assert first == "fine"
    assert [line for line in results if line.startswith(("WRONG", "CRASH"))] == []
    assert len(results) == n_mutants * len(tags)
    for i, tag in enumerate(tags):
        of_tag = results[i * n_mutants :][:n_mutants]
        is_refused = any(line.startswith("Qsf") for line in of_tag)
        assert is_refused or tag == "META", "qsf inspect says that META is broken, and reads on"
