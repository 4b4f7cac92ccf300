"""The writer and the reader against each other, and the writer under faults."""
# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="func-returns-value, no-untyped-call"

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.qsf_files import tiny_header, write_tiny
from make.refusals import refusals
from make.stored import Reader
from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.file.blocks import pack_block
from qsf.file.kinds import RopeSet, plain_kind
from qsf.file.layout import (
    EMBEDDING_UNIT,
    FINAL_UNIT,
    HEAD_COLS,
    Arch,
    Compression,
    Dtype,
    Header,
    Layout,
    Mixer,
    Positions,
    TensorType,
    layer_unit,
    tensor_bytes,
)
from qsf.file.writer import Writer
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status

T = TensorType
TILE_DTYPES = [d for d in Dtype if d != Dtype.MIXED and d not in HEAD_COLS]
MULTIPLE = st.sampled_from([1, 2, 3])
F32 = st.floats(2**-40, 2**40, width=32)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    n_kv_heads = draw(MULTIPLE)
    positions = draw(st.sampled_from(Positions))
    n_vocab = draw(st.integers(1, 70))
    token = st.none() | st.integers(0, n_vocab - 1)
    return tiny_header(
        architecture=draw(st.integers(0, 4)),
        n_layers=draw(MULTIPLE),
        dim=draw(st.integers(1, 70)),
        n_heads=n_kv_heads * draw(MULTIPLE),
        n_kv_heads=n_kv_heads,
        n_vocab=n_vocab,
        max_tokens=draw(st.integers(1, 20)),
        ffn_dim=draw(st.integers(1, 70)),
        head_dim=2 * draw(MULTIPLE),
        dtype=draw(st.sampled_from(Dtype)),
        activation=draw(st.integers(0, 5)),
        norm=draw(st.integers(0, 1)),
        positions=positions,
        rope_theta=draw(F32) if positions == Positions.ROPE else 0.0,
        bos_id=draw(token),
        eos_id=draw(token),
        pad_id=draw(token),
    )


@st.composite
def arches(draw: st.DrawFn) -> Arch:
    low = draw(F32)
    return Arch(
        norm_epsilon=draw(F32),
        rope_scaling=draw(st.integers(0, 2)),
        rope_factor=draw(F32),
        rope_low_freq_factor=low,
        rope_high_freq_factor=low * 2,
        rope_original_tokens=draw(st.integers(1, 2**32 - 1)),
        rope_dims=2,
        rope_interleaved=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        window_tokens=draw(st.integers(0, 2**32 - 1)),
        kv_key_bits=draw(st.sampled_from([0, 2, 4, 8, 16, 32])),
        kv_value_bits=draw(st.sampled_from([0, 2, 4, 8, 16, 32])),
    )


@given(
    headers(),
    arches(),
    st.sampled_from(TILE_DTYPES),
    st.sampled_from(Compression),
    st.booleans(),
    st.integers(0, 2**32),
    st.dictionaries(
        st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=4, max_size=4),
        st.binary(min_size=1, max_size=200),
        max_size=4,
    ),
)
def test_what_is_written_is_read(
    header: Header,
    arch: Arch,
    dtype: Dtype,
    compression: Compression,
    is_dull: bool,
    seed: int,
    sections: dict[str, bytes],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.qsf"
        written = write_tiny(
            path, seed, header=header, arch=arch, dtype=dtype, compression=compression,
            is_dull=is_dull, sections=sections,
        )  # fmt: skip
        with Reader(path) as r:
            assert r.header == header
            assert r.arch == arch
            assert {(r.units[t.unit_idx].id, t.type) for t in r.tensors} == set(written)
            for t in r.tensors:
                data = written[r.units[t.unit_idx].id, t.type]
                assert r.read_tensor(t) == data
                unit = r.read_unit(t.unit_idx)
                assert unit[t.data_off : t.data_off + t.data_bytes] == data
            for u in r.units:
                assert u.off % 4096 == 0
                assert u.tensors[-1].data_off + u.tensors[-1].data_bytes <= u.raw_bytes
            for tag, data in sections.items():
                assert r.read_section(tag) == data
            if compression and is_dull:
                assert all(u.compression == compression for u in r.layers)
            seen: list[tuple[int, int]] = []
            r.verify(lambda done, total: seen.append((done, total)))
        size = path.stat().st_size
        assert seen[-1] == (size, size)
        assert seen == sorted(seen)


def test_what_does_not_shrink_is_stored_plainly(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.qsf", dtype=Dtype.TERNARY_DENSE, compression=Compression.LZ4)
    noise = tmp_path / "noise.qsf"
    header = tiny_header(dim=64, ffn_dim=512)
    write_tiny(noise, header=header, dtype=Dtype.Q8, compression=Compression.ZSTD)
    plain = tmp_path / "plain.qsf"
    write_tiny(plain, header=header, dtype=Dtype.Q8)
    assert noise.read_bytes() == plain.read_bytes()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        assert name == "zstandard"
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    write_tiny(tmp_path / "m.qsf", compression=Compression.LZ4)  # the engine's own
    with pytest.raises(QsfUnsupportedError, match="pip install zstandard"):
        write_tiny(tmp_path / "m.qsf", compression=Compression.ZSTD)


def unpack_lz4(packed: bytes, n_raw: int) -> bytes:
    room = ffi.new("char[]", n_raw)
    check_status(lib.qsf_lz4_unpack(ffi.from_buffer(packed), len(packed), room, n_raw))
    return bytes(ffi.buffer(room))


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.LZ4HC])
def test_lz4_is_unpacked_by_another_library(compression: Compression) -> None:
    block_module = pytest.importorskip("lz4.block")
    words = bytes(range(64)) * 400 + b"end"
    packed = pack_block(compression, words)
    assert len(packed) < 200
    assert block_module.decompress(packed, uncompressed_size=len(words)) == words
    assert unpack_lz4(packed, len(words)) == words
    for raw in (b"", b"a", bytes(range(256))):
        assert pack_block(compression, raw) == raw  # does not shrink
    for damaged, n_raw in ((packed[:-1], len(words)), (packed, len(words) - 1), (packed, 1 << 20)):
        with pytest.raises(QsfFormatError, match="damaged LZ4 block"):
            unpack_lz4(damaged, n_raw)


# ---- what the writer refuses ----
@pytest.mark.parametrize(
    "changes",
    [*refusals("headers"), {"ffn_dim": 1 << 23}, {"rope_theta": float("nan")},
     {"rope_theta": float("inf")}, {"positions": Positions.ALIBI}, {"pad_id": 1 << 32}],
)  # fmt: skip
def test_a_wrong_header_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(QsfArgumentError):
        Writer(tmp_path / "m.qsf", tiny_header(**changes), Arch())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [*refusals("tensors"), {"norm_epsilon": float("nan")}, {"rope_factor": float("inf")},
     {"window_tokens": 1 << 32}],
)  # fmt: skip
def test_a_wrong_architecture_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    arch = Arch(**{**asdict(Arch()), **changes})
    with pytest.raises(QsfArgumentError):
        Writer(tmp_path / "m.qsf", tiny_header(), arch)
    assert list(tmp_path.iterdir()) == []


LAYER = layer_unit(0)


def embedding(w: Writer, compression: Compression = Compression.NONE) -> None:
    w.begin_unit(EMBEDDING_UNIT, dtype=Dtype.Q8, compression=compression)
    w.begin_tensor(T.EMBEDDING, 20, 8, Dtype.Q8, Layout.TILES)
    w.write(bytes(2112))
    w.end_tensor()
    w.end_unit()


def vector(w: Writer, kind: int, n_cols: int = 8) -> None:
    w.begin_tensor(kind, 1, n_cols, Dtype.F32, Layout.VECTOR)
    w.write(bytes(4 * n_cols))
    w.end_tensor()


def layer_1(w: Writer) -> None:
    embedding(w)
    w.begin_unit(LAYER, dtype=Dtype.Q4)


def final(w: Writer, *parts: tuple[int, ...], **unit: Any) -> None:
    """Begin the final unit behind layers of these tensors: type, rows, columns, dtype, layout."""
    embedding(w)
    for i in (0, 1):
        w.begin_unit(layer_unit(i), **{"dtype": Dtype.Q4, **unit})
        for part in parts or [(T.ATTN_NORM, 1, 8, Dtype.F32, Layout.VECTOR)]:
            w.begin_tensor(*part)
            w.write(bytes(tensor_bytes(*part[1:])))
            w.end_tensor()
        w.end_unit()
    w.begin_unit(FINAL_UNIT, dtype=Dtype.Q8)


def head(w: Writer, *parts: tuple[TensorType, int]) -> None:
    """Write the final unit with these matrices of the head, as (type, rows)."""
    final(w)
    vector(w, T.FINAL_NORM)
    ends(w, *parts)


def ends(w: Writer, *parts: tuple[TensorType, int]) -> None:
    for kind, n_rows in parts:
        w.begin_tensor(kind, n_rows, 8, Dtype.Q8, TILES)
        w.write(bytes(1056 * -(-n_rows // 16)))
        w.end_tensor()
    w.end_unit()


def whole(w: Writer, *parts: tuple[int, ...], **unit: Any) -> None:
    """Write a file whose layers have these tensors."""
    final(w, *parts, **unit)
    vector(w, T.FINAL_NORM)
    ends(w, (T.HEAD, 20))


TILES, VECTOR = Layout.TILES, Layout.VECTOR
MISTAKES: list[tuple[str, Callable[[Writer], object]]] = [
    ("no unit", lambda w: w.begin_tensor(T.Q, 8, 8, Dtype.Q4, TILES)),
    ("no unit", lambda w: w.write(b"")),
    ("come next", lambda w: w.begin_unit(LAYER, dtype=Dtype.Q4)),
    ("has not ended", lambda w: [w.begin_unit(EMBEDDING_UNIT, dtype=Dtype.Q8) for _ in range(2)]),
    ("no holes", lambda w: [w.begin_unit(EMBEDDING_UNIT, dtype=6),
        w.begin_tensor(T.EMBEDDING, 20, 8, 6, TILES), w.write_zeros(1)]),
    ("not ended", lambda w: [layer_1(w), w.begin_tensor(T.Q, 8, 8, 3, TILES), w.end_unit()]),
    ("not ended", lambda w: [layer_1(w), *(w.begin_tensor(t, 8, 8, 3, TILES)
        for t in (T.Q, T.ATTN_OUT))]),
    ("0 bytes written", lambda w: [layer_1(w), w.begin_tensor(T.Q, 8, 8, 3, TILES),
        w.end_tensor()]),
    ("only 576", lambda w: [layer_1(w), w.begin_tensor(T.Q, 8, 8, 3, TILES),
        w.write(bytes(577))]),
    ("units are written", lambda w: [embedding(w), w.finish()]),
    ("has not ended", lambda w: [layer_1(w), w.finish()]),
    ("four printable", lambda w: w.add_section("ME\nA", b"{}")),
    ("itself", lambda w: w.add_section("ARCH", b"{}")),
    # The engine's reader refuses the rest
    ("TENS is empty", lambda w: [w.begin_unit(EMBEDDING_UNIT, dtype=6),
        w.end_unit(), *(w.begin_unit(layer_unit(i), dtype=3) or w.end_unit() for i in (0, 1)),
        w.begin_unit(FINAL_UNIT, dtype=6), w.end_unit()]),
    ("quantisation type is 99", lambda w: whole(w, dtype=99)),
    ("importance is -1", lambda w: whole(w, importance=-1.0)),
    ("allowed: layout 0, 1 row", lambda w: whole(w, (T.ATTN_NORM, 8, 1, Dtype.F32, VECTOR))),
    ("f16 or f32", lambda w: whole(w, (T.ATTN_NORM, 1, 8, Dtype.Q4, VECTOR))),
    ("a tile type", lambda w: whole(w, (T.Q, 8, 8, Dtype.MIXED, TILES))),
    ("layout 2", lambda w: whole(w, (T.Q, 8, 8, Dtype.Q4, Layout.OUTLIERS))),
    ("allowed there", lambda w: whole(w, (T.FINAL_NORM, 1, 8, Dtype.F32, VECTOR))),
    ("twice", lambda w: whole(w, *[(T.ATTN_NORM, 1, 8, Dtype.F32, VECTOR)] * 2)),
    ("where type", lambda w: [final(w), ends(w, (T.HEAD, 20))]),
    ("final unit has", lambda w: head(w)),
    ("where type", lambda w: head(w, (T.HEAD, 16))),
    ("where type", lambda w: head(w, (T.HEAD, 16), (T.HEAD_REST, 20))),
    ("where type", lambda w: head(w, (T.HEAD_REST, 20), (T.HEAD, 20))),
    ("META is empty", lambda w: [w.add_section("META", b""), whole(w)]),
    ("META occurs twice", lambda w: [whole(w), *(w.add_section("META", b"{}") for _ in "ab")]),
    ("directory entries is 259", lambda w: [whole(w),
        *(w.add_section(f"{i:04}", b"{}") for i in range(255))]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mistake"), MISTAKES)
def test_a_mistake_is_refused(
    tmp_path: Path, text: str, mistake: Callable[[Writer], object]
) -> None:
    def make() -> None:
        with Writer(tmp_path / "m.qsf", tiny_header(), Arch()) as w:
            mistake(w)

    with pytest.raises(QsfArgumentError, match=text):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_head_may_have_two_parts(tmp_path: Path) -> None:
    with Writer(tmp_path / "m.qsf", tiny_header(), Arch()) as w:
        head(w, (T.HEAD, 16), (T.HEAD_REST, 4))
    with Reader(tmp_path / "m.qsf") as r:
        r.verify()
        rows = [(t.type, t.n_rows) for t in r.tensors][-2:]
        assert rows == [(T.HEAD, 16), (T.HEAD_REST, 4)]


def test_learned_positions_need_their_table(tmp_path: Path) -> None:
    header = tiny_header(positions=Positions.LEARNED, rope_theta=0.0)

    def make(n_bytes: int) -> None:
        with Writer(tmp_path / "m.qsf", header, Arch()) as w:
            if n_bytes:
                w.add_section("WPOS", bytes(n_bytes))
            head(w, (T.HEAD, 20))

    with pytest.raises(QsfArgumentError, match="no section WPOS"):
        make(0)
    with pytest.raises(QsfArgumentError, match="256"):
        make(255)
    make(256)
    with Reader(tmp_path / "m.qsf") as r:
        r.verify()


def test_a_finished_or_aborted_writer_refuses_more(tmp_path: Path) -> None:
    w = Writer(tmp_path / "m.qsf", tiny_header(), Arch())
    w.abort()
    w.abort()
    assert list(tmp_path.iterdir()) == []
    for use in (lambda: embedding(w), w.finish, lambda: w.add_section("META", b"{}")):
        with pytest.raises(QsfArgumentError, match="finished or was aborted"):
            use()


@pytest.mark.parametrize(
    ("kinds", "sets", "text"),
    [
        ({"n_heads": 3}, (), "KIND: kind 0: heads .* is 3, allowed"),
        ({"score_cap": math.nan}, (), "KIND: .*not finite"),
        ({"window_tokens": -1}, (), "KIND: kind 0: window_tokens is -1"),
        ({"mixer": Mixer.DELTA}, (), r"KIND: kind 0: mixer 2 \(key 1\) with attention's keys"),
        ({"n_chosen": 1}, (), r"KIND: kind 0: keys 81 \.\. 91 without experts"),
        ({"kv_source": 1}, (), "KIND: layer 0 reads keys and values of layer 0"),
        ({}, (RopeSet(1, (1.0,)),), "ROPE: set 0 has number 1, allowed: ascending from 0"),
        ({}, (RopeSet(0, (1.0,) * 70_000),), "ROPE: "),
    ],
)
def test_the_engine_refuses_what_a_wrong_writer_packs(
    kinds: dict[str, Any], sets: tuple[RopeSet, ...], text: str, tmp_path: Path
) -> None:
    header = tiny_header()
    layers = (replace(plain_kind(header, Arch()), **kinds),) * header.n_layers
    with pytest.raises(QsfArgumentError, match=text):
        Writer(tmp_path / "m.qsf", header, Arch(), layer_kinds=layers, rope_sets=sets)
    assert list(tmp_path.iterdir()) == []
