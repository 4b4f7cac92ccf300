"""The Python and the C reader accept the same files, and refuse the others for the same reason.

The same reason: the same kind of error. Both open the file and check every byte.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.attacks import (
    ATTACKS,
    LEARNED,
    OWN,
    PACKED,
    PACKED_ATTACKS,
    PLAIN,
    SMALL,
    SPLIT,
    TIED,
    UNIT_BYTES,
    Change,
    entry,
    entry_at,
    layer,
    section_at,
)
from make.expert_attacks import EXPERT_ATTACKS, EXPERTS
from make.kind_attacks import KIND_ATTACKS, KINDS, LATENT_ATTACKS, LATENTS
from make.qsf_files import repair, tiny_header, write_tiny
from oracle.readers import agree, c_verdict, python_verdict, verdict
from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.file.layout import HEAD_COLS, Compression, Dtype

BASES = [PLAIN, SPLIT, LEARNED, TIED, OWN, KINDS, LATENTS, EXPERTS]
BASES += [*PACKED.values(), *SMALL.values()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.qsf"


# ---- files that were made to be good or bad ----


def test_good_files(path: Path) -> None:
    for data in BASES:
        assert verdict(path, data) is None
        assert verdict(path, repair(data)) is None


@pytest.mark.parametrize("n_times", [1, 3])
def test_appended_multiples_of_4_gib_are_refused(path: Path, n_times: int) -> None:
    """The header has only the low 32 bits of the size."""
    path.write_bytes(PLAIN)
    os.truncate(path, len(PLAIN) + (n_times << 32))  # sparse
    assert agree(path) is QsfFormatError
    for error in (python_verdict(path), c_verdict(path)):
        assert "truncated or extended" in str(error)


@pytest.mark.parametrize("dtype", [d for d in Dtype if d not in (Dtype.MIXED, *HEAD_COLS)])
@pytest.mark.parametrize("compression", [Compression.NONE, Compression.LZ4])
def test_every_type(path: Path, dtype: Dtype, compression: Compression) -> None:
    """Both know the size of its tiles: a byte more or less is refused."""
    header = tiny_header(dtype=dtype)
    write_tiny(path, 2, header=header, dtype=dtype, compression=compression, is_dull=True)
    data = path.read_bytes()
    assert verdict(path, data) is None
    for other in Dtype:
        changed = bytearray(data)
        at = section_at(changed, b"TENS") + 32  # entry 1, of layer 0: a vector; 2: attention Q
        changed[at + 32 + 16] = other
        if other != dtype:
            assert verdict(path, repair(changed)) is QsfFormatError


@pytest.mark.parametrize(("error", "change"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_attacks(path: Path, error: type[QsfError], change: Change) -> None:
    data = bytearray(PLAIN)
    change(data)
    assert verdict(path, repair(data)) is error
    assert verdict(path, data) in (error, QsfFormatError)  # with the checksums as they were


@pytest.mark.parametrize(
    ("base", "error", "change"),
    [(KINDS, *a[1:]) for a in KIND_ATTACKS] + [(LATENTS, *a[1:]) for a in LATENT_ATTACKS],
    ids=[a[0] for a in (*KIND_ATTACKS, *LATENT_ATTACKS)],
)
def test_attacks_on_kinds(path: Path, base: bytes, error: type[QsfError], change: Change) -> None:
    data = bytearray(base)
    change(data)
    assert verdict(path, repair(data)) is error


@pytest.mark.parametrize(
    ("error", "change"), [a[1:] for a in EXPERT_ATTACKS], ids=[a[0] for a in EXPERT_ATTACKS]
)
def test_attacks_on_experts(path: Path, error: type[QsfError], change: Change) -> None:
    data = bytearray(EXPERTS)
    change(data)
    assert verdict(path, repair(data)) is error


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


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize(
    "change",
    [*PACKED_ATTACKS, layer(0, "B", 17, 1), layer(0, "B", 17, 2), layer(0, "B", 17, 3)],
)
def test_compressed_layers(path: Path, compression: int, change: Change) -> None:
    data = bytearray(PACKED[compression])  # type: ignore[index]
    change(data)
    verdict(path, repair(data))


def test_two_faults_are_found_in_the_same_order(path: Path) -> None:
    """Pairs of attacks: where the kinds differ, the order of the rules decides."""
    rng = random.Random(11)
    kinds = set()
    for _ in range(300):
        data = bytearray(PLAIN)
        for _, _, change in rng.sample(ATTACKS, 2):
            try:
                change(data)
            except (AssertionError, struct.error, IndexError):
                continue  # the first attack hid what the second would change
        kinds.add(verdict(path, repair(data)))
    assert len(kinds) == 2


def test_the_corpus_of_the_fuzzer(path: Path, project_root: Path) -> None:
    verdicts = set()
    for seed in sorted((project_root / "tests" / "fuzz" / "corpus" / "reader").iterdir()):
        data = seed.read_bytes()
        verdicts.add(verdict(path, data))
        verdicts.add(verdict(path, repair(data)))
        if data[:4] == b"qsf1":
            verdicts.add(verdict(path, b"QSF1" + data[4:]))
    assert verdicts == {None, QsfFormatError}


def test_truncations(path: Path) -> None:
    for data in SMALL.values():
        for n_bytes in (*range(700), *range(700, len(data), 97)):
            assert verdict(path, data[:n_bytes]) is QsfFormatError
            verdict(path, repair(data[:n_bytes]))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert agree(tmp_path) is QsfIOError
    assert agree(tmp_path / "absent.qsf") is QsfIOError


def test_tags_of_any_bytes_are_shown_printable(path: Path) -> None:
    """Whatever rule the section breaks: text with an escape could repaint a terminal."""
    for change in (
        entry(b"NEWS", "I", 4, 2),
        entry(b"NEWS", "Q", 16, 0),
        entry(b"NEWS", "Q", 16, 1 << 40),
        entry(b"NEWS", "Q", 8, 64),
        lambda d: entry(b"NEWS", "Q", 8, section_at(d, b"TENS"))(d),
    ):
        data = bytearray(PLAIN)
        at = entry_at(data, b"NEWS")
        change(data)
        data[at : at + 4] = b"\xff\x1b\n\0"
        assert verdict(path, repair(data)) is QsfFormatError
        assert "????" in str(c_verdict(path))
        assert "????" in str(python_verdict(path))


def test_the_tag_of_a_damaged_section_is_shown_printable(path: Path) -> None:
    data = bytearray(PLAIN)
    data[entry_at(data, b"NEWS") : entry_at(data, b"NEWS") + 4] = b"\xff\x1b\n\0"
    data = bytearray(repair(data))
    data[section_at(data, b"\xff\x1b\n\0")] ^= 1
    assert verdict(path, data) is QsfFormatError
    assert "????" in str(c_verdict(path))
    assert "????" in str(python_verdict(path))


# ---- files that nobody thought of ----

INTERESTING = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 4096, 0xFFFF, 1 << 20,
               (1 << 24) + 1, 0x7F800000, 0x7FC00000, 0x80000000, 0xFFFFFFFF]  # fmt: skip


def places(data: bytes) -> list[range]:
    """Return where rules look: header, directory, the tables, the beginnings of the units."""
    first, n_sections = struct.unpack_from("<QI", data, 100)
    out = [range(128), range(first, first + 32 * n_sections)]
    tables = (b"UNIT", b"ARCH", b"TENS", b"EBND")
    kinds = {KINDS: (b"KIND", b"ROPE"), LATENTS: (b"KIND",), EXPERTS: (b"KIND", b"UNIT")}.get(
        data, ()
    )
    for tag in (*tables, *kinds, *kinds):
        off, n_bytes = struct.unpack_from("<QQ", data, entry_at(data, tag) + 8)
        out.append(range(off, off + n_bytes))
    units = section_at(data, b"UNIT")
    first, last = 0, struct.unpack_from("<I", data, 16)[0] + 1  # embedding and final unit
    for i in (first, last):
        (off,) = struct.unpack_from("<Q", data, units + UNIT_BYTES * i)
        out.append(range(off, off + 80))
    off, n_bytes = struct.unpack_from("<QQ", data, units + UNIT_BYTES)
    out.append(range(off, off + n_bytes))
    return out


PLACES = [places(data) for data in BASES]


def mutate(draw: st.DrawFn, data: bytearray, ranges: list[range]) -> None:
    where = draw(st.sampled_from(ranges))
    at = where[draw(st.integers(0, len(where) - 1))]
    kind = draw(st.integers(0, 3))
    if kind == 0:
        data[at] = draw(st.integers(0, 255))
    elif kind == 1:
        data[at] ^= 1 << draw(st.integers(0, 7))
    else:
        at -= at % 4
        (old,) = struct.unpack_from("<I", data, at)
        new = draw(st.sampled_from(INTERESTING)) if kind == 2 else old + draw(st.integers(-65, 65))
        struct.pack_into("<I", data, at, new & 0xFFFFFFFF)


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """Return a file with one to four changes; mostly, its checksums are repaired."""
    i = draw(st.integers(0, len(BASES) - 1))
    data = bytearray(BASES[i])
    for _ in range(draw(st.integers(1, 4))):
        mutate(draw, data, PLACES[i])
    return bytes(data) if draw(st.integers(0, 9)) == 0 else repair(data)


def check_mutant(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "mutant.qsf"
    verdict(path, data)


@given(data=mutants())
def test_mutants(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_mutant(tmp_path_factory, data)


@pytest.mark.slow
@given(data=mutants())
def test_many_mutants(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_mutant(tmp_path_factory, data)
