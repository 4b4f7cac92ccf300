# SPDX-License-Identifier: Apache-2.0
"""Compressed layers as the writer and the converter make them; holes; failures."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import qsf
from make import hf_makers
from make.failing_calls import ERRORS, FailingCalls
from make.qsf_files import layer_tensors, tiny_header, write_tensors, write_tiny
from make.stored import Reader, unpack_block, verify_file
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file import layout, writer
from qsf.file.blocks import pack_block, pack_blocks
from qsf.file.layout import (
    EMBEDDING_UNIT,
    FINAL_UNIT,
    Arch,
    Compression,
    Dtype,
    Layout,
    Role,
    Stored,
    TensorType,
    layer_unit,
    pass_units,
    tensor_bytes,
)
from qsf.file.writer import Writer, crc32_of_zeros
from qsf_converter import convert
from qsf_converter.rounding.compression import StoredLayers

MIB = 1 << 20
CODECS = [Compression.LZ4, Compression.LZ4HC, Compression.ZSTD]

T = TensorType


def write_embedding(w: Writer) -> None:
    h = w.header
    w.begin_unit(EMBEDDING_UNIT, dtype=Dtype.Q8)
    write_tensors(w, random.Random(1), [(T.EMBEDDING, h.n_vocab, h.dim, Dtype.Q8, Layout.TILES)])
    w.end_unit()


def write_layer(
    path: Path, data: bytes, compression: Compression, *, n_threads: int | None = None
) -> Stored:
    """Write a model of one layer, a vector that holds ``data``; return how it is stored."""
    header = tiny_header(n_layers=1)
    with Writer(path, header, Arch(tied_head=True), n_threads=n_threads) as w:
        write_embedding(w)
        w.begin_unit(layer_unit(0), dtype=Dtype.F32, compression=compression)
        w.begin_tensor(T.FFN_UP, 1, len(data) // 4, Dtype.F32, Layout.VECTOR, index=1)
        w.write(data)
        w.end_tensor()
        stored = w.end_unit()
        w.begin_unit(FINAL_UNIT, dtype=Dtype.F32)
        final = (T.FINAL_NORM, 1, header.dim, Dtype.F32, Layout.VECTOR)
        write_tensors(w, random.Random(2), [final])
        w.end_unit()
    return stored


def block_sizes(path: Path) -> list[tuple[int, int]]:
    """Return (stored, raw) of the blocks of the first layer, as they lie in the file."""
    with Reader(path) as r:
        unit = r.layers[0]
    stored = path.read_bytes()[unit.off :][: unit.stored_bytes]
    sizes = []
    at = 0
    while at < len(stored):
        sizes.append(layout.BLOCK_HEADER.unpack_from(stored, at))
        at += layout.BLOCK_HEADER.size + sizes[-1][0]
    assert at == len(stored)
    return sizes


def mixed(n_bytes: int, seed: int = 0) -> bytes:
    """Return bytes of which a part compresses, anew in every stretch."""
    rng = random.Random(seed)
    parts = (rng.randbytes(37) + bytes(80) for _ in range(n_bytes // 117 + 1))
    return b"".join(parts)[:n_bytes]


# ---- in files ----
@given(
    st.sampled_from(CODECS),
    st.integers(1, 3000),
    st.integers(1, 4),
    st.lists(st.tuples(st.booleans(), st.integers(1, 900)), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_layers_of_any_content_and_cut_are_read(
    compression: Compression,
    block_bytes: int,
    n_threads: int,
    stretches: list[tuple[bool, int]],
    seed: int,
) -> None:
    rng = random.Random(seed)
    data = b"".join(rng.randbytes(4 * n) if noisy else bytes(4 * n) for noisy, n in stretches)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as m:
        path = Path(folder) / "m.qsf"
        m.setattr(layout, "COMPRESSED_BLOCK_BYTES", block_bytes)
        stored = write_layer(path, data, compression, n_threads=n_threads)
        m.undo()
        assert stored.stored_bytes <= stored.raw_bytes
        with Reader(path) as r:
            assert r.layers[0].compression == stored.compression
            assert r.layers[0].stored_bytes == stored.stored_bytes
            assert r.read_tensor(r.layers[0].tensors[0]) == data
            r.verify()
        verify_file(path)
        if stored.compression:
            raw_sizes = [raw for _, raw in block_sizes(path)]
            assert raw_sizes[:-1] == [block_bytes] * (len(raw_sizes) - 1)
            assert 1 <= raw_sizes[-1] <= block_bytes


# ---- blocks ----
@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("make", [bytes, mixed, lambda n: random.Random(n).randbytes(n)])
def test_a_block_of_any_size(compression: Compression, make: Callable[[int], bytes]) -> None:
    for n_bytes in (1, 13, 4096, MIB):
        raw = make(n_bytes)
        packed = pack_block(compression, raw)
        assert 1 <= len(packed) <= n_bytes
        assert unpack_block(compression, packed, n_bytes) == raw


@pytest.mark.parametrize(("compression", "low"), [(Compression.LZ4HC, 3), (Compression.ZSTD, 1)])
def test_the_level_is_obeyed(compression: Compression, low: int) -> None:
    raw = b"".join(b"%d " % (n * n % 9973) for n in range(30_000))
    packed = {level: pack_block(compression, raw, level=level) for level in (low, 12, None)}
    assert packed[low] != packed[12]
    assert packed[12] != packed[None]
    for stored in packed.values():
        assert unpack_block(compression, stored, len(raw)) == raw


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_blocks", [0, 1, 2, 3, 12])
def test_blocks_keep_their_order_and_few_are_in_memory(n_threads: int, n_blocks: int) -> None:
    blocks = [bytes([i]) * (1000 + i) for i in range(n_blocks)]
    n_taken = n_given = 0

    def taken() -> Iterator[bytes]:
        nonlocal n_taken
        for block in blocks:
            n_taken += 1
            assert n_taken - n_given <= n_threads + 1
            yield block

    for (n_raw, packed), block in zip(
        pack_blocks(Compression.LZ4, taken(), n_threads), blocks, strict=True
    ):
        assert unpack_block(Compression.LZ4, packed, n_raw) == block
        n_given += 1


def test_packing_that_is_left_midway_ends_its_threads() -> None:
    before = threading.active_count()
    packing = pack_blocks(Compression.ZSTD, (bytes(MIB) for _ in range(20)), 3)
    next(packing)
    assert threading.active_count() > before
    packing.close()
    assert threading.active_count() == before


# ---- when it is worth it ----
@pytest.mark.parametrize(
    ("more_bytes", "compression"), [(0, Compression.LZ4), (1, Compression.NONE)]
)
@pytest.mark.parametrize("raw_bytes", [128, 6400, 64 * 1601])
def test_a_layer_is_compressed_from_a_saving_of_three_percent_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raw_bytes: int,
    more_bytes: int,
    compression: Compression,
) -> None:
    most = raw_bytes * 97 // 100

    def planted(
        compression: int, blocks: Iterable[bytes], n_threads: int
    ) -> Generator[tuple[int, bytes], None, None]:
        (raw,) = blocks
        yield len(raw), bytes(most + more_bytes - 8)

    monkeypatch.setattr(writer, "pack_blocks", planted)
    stored = write_layer(tmp_path / "m.qsf", bytes(raw_bytes - 64), Compression.LZ4)
    assert stored.compression == compression
    assert stored.stored_bytes == (most if compression else raw_bytes)


def test_threads_do_not_change_the_file(tmp_path: Path) -> None:
    files = set()
    for n in (1, 2, 4):
        write_layer(tmp_path / f"{n}.qsf", mixed(5 * MIB), Compression.LZ4, n_threads=n)
        files.add((tmp_path / f"{n}.qsf").read_bytes())
        assert [raw for _, raw in block_sizes(tmp_path / f"{n}.qsf")[:-1]] == [MIB] * 5
    assert len(files) == 1


# ---- holes ----
@given(
    st.integers(0, 5000) | st.sampled_from([MIB - 1, MIB, 3 * MIB + 5]), st.integers(0, 2**32 - 1)
)
def test_the_checksum_of_zeros(n_bytes: int, crc32: int) -> None:
    assert crc32_of_zeros(n_bytes, crc32) == zlib.crc32(bytes(n_bytes), crc32)


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_holes_read_as_zeros(tmp_path: Path, compression: Compression) -> None:
    """The file is what it would be with the zeros written."""
    header = tiny_header(dim=256, ffn_dim=4096)
    plain = tmp_path / "plain.qsf"
    write_tiny(plain, header=header, compression=compression, is_dull=True)
    holes = tmp_path / "holes.qsf"
    with Writer(holes, header, Arch()) as w:
        for unit in pass_units(header.n_layers):
            is_layer = unit.role == Role.LAYER
            w.begin_unit(
                unit,
                dtype=Dtype.Q4,
                compression=compression if is_layer else Compression.NONE,
                importance=0.5,
            )
            tensors = layer_tensors(header, Dtype.Q4)
            if not is_layer:
                is_final = unit.role == Role.FINAL
                kind, n_rows = (T.HEAD, 20) if is_final else (T.EMBEDDING, 20)
                tensors = [(kind, n_rows, 256, Dtype.Q8, Layout.TILES)]
                if is_final:
                    tensors.insert(0, (T.FINAL_NORM, 1, 256, Dtype.F32, Layout.VECTOR))
            for tensor in tensors:
                n_bytes = tensor_bytes(*tensor[1:])
                w.begin_tensor(*tensor)
                if is_layer:
                    w.write(bytes(n_bytes // 3))
                    w.write_zeros(n_bytes - n_bytes // 3)
                else:
                    w.write(bytes(n_bytes))
                w.end_tensor()
            w.end_unit()
    assert holes.read_bytes() == plain.read_bytes()
    verify_file(holes)
    if not compression:
        assert holes.stat().st_blocks < plain.stat().st_blocks


def test_more_zeros_than_the_tensor_has_are_refused(tmp_path: Path) -> None:
    w = Writer(tmp_path / "m.qsf", tiny_header(n_layers=1), Arch())
    write_embedding(w)
    w.begin_unit(layer_unit(0), dtype=Dtype.F32)
    w.begin_tensor(T.FFN_UP, 1, 8, Dtype.F32, Layout.VECTOR, index=1)
    w.write_zeros(30)
    for n_bytes in (3, -1):
        with pytest.raises(QsfArgumentError, match=r"allowed: 0 \.\. 2"):
            w.write_zeros(n_bytes)
    w.abort()


# ---- qsf-convert --compress ----
NONE, LZ4, LZ4HC, ZSTD = Compression
BY_NAME = {"lz4": LZ4, "lz4hc": LZ4HC, "zstd": ZSTD}


@pytest.fixture(scope="session")
def pruned(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path, tiny_gpt2_dir: Path
) -> dict[str, Path]:
    """The bundled models with half of every matrix zero, so that every codec saves something."""
    folders = {}
    for name, source in (("tiny-llama", tiny_llama_dir), ("tiny-gpt2", tiny_gpt2_dir)):
        folder = tmp_path_factory.mktemp("pruned") / name
        shutil.copytree(source, folder)
        weights = load_file(folder / "model.safetensors")
        for tensor in weights.values():
            if tensor.ndim == 2 and len(tensor) < 2000:
                tensor[len(tensor) // 2 :] = 0
        save_file(weights, folder / "model.safetensors")
        folders[name] = folder
    return folders


# ---- the same model ----
@pytest.mark.parametrize(("model", "quant_type"), [("tiny-llama", "4bit"), ("tiny-gpt2", "f16")])
def test_logits_are_those_of_the_model_without_compression(
    tmp_path: Path, pruned: dict[str, Path], model: str, quant_type: str
) -> None:
    tokens = [0, 17, 300, 41, 5, 999, 2]

    def logits(compress: str) -> tuple[bytes, int]:
        path = tmp_path / f"{compress}.qsf"
        convert(pruned[model], path, quant_type=quant_type, compress=compress)
        with Reader(path) as reader:
            used = {unit.compression for unit in reader.layers}
            assert used == {BY_NAME.get(compress, NONE)}
            assert {reader.embedding.compression, reader.final.compression} == {NONE}
            reader.verify()
        with qsf.Model(path, ram_budget=None) as loaded:
            values = loaded.logits(tokens)
        assert np.isfinite(values).all()
        return values.tobytes(), path.stat().st_size

    plain, plain_bytes = logits("none")
    for compress in BY_NAME:
        values, n_bytes = logits(compress)
        assert values == plain
        assert n_bytes < 0.97 * plain_bytes


def test_a_trained_model_is_stored_as_it_is_where_nothing_is_saved(
    tmp_path: Path, tiny_llama_dir: Path
) -> None:
    plain = convert(tiny_llama_dir, tmp_path / "plain.qsf")
    report = convert(tiny_llama_dir, tmp_path / "lz4.qsf", compress="lz4")
    assert plain.compression is None
    assert report.compression == "layers: 6, compression saves less than 3 %: stored as they are"
    with Reader(tmp_path / "lz4.qsf") as reader:
        meta = json.loads(reader.read_section("META"))["compression"]
        assert meta == {"asked": "lz4", "layers": [{"chosen": "none", "ratio": 1.0}] * 6}
        assert {unit.compression for unit in reader.units} == {NONE}
    with Reader(tmp_path / "plain.qsf") as reader:
        assert "compression" not in json.loads(reader.read_section("META"))


def test_what_compression_saved_is_said(tmp_path: Path, pruned: dict[str, Path]) -> None:
    report = convert(pruned["tiny-llama"], tmp_path / "m.qsf", compress="zstd", quant_type="8bit")
    with Reader(tmp_path / "m.qsf") as reader:
        layers = reader.layers
        meta = json.loads(reader.read_section("META"))["compression"]
    share = sum(unit.stored_bytes for unit in layers) / sum(unit.raw_bytes for unit in layers)
    assert 0.4 < share < 0.6
    expected = f"layers: 6, compressed with zstd, stored at {100 * share:.0f} %"
    assert report.compression == expected
    assert [layer["chosen"] for layer in meta["layers"]] == ["zstd"] * 6
    assert meta["layers"][0]["ratio"] == pytest.approx(
        layers[0].stored_bytes / layers[0].raw_bytes, rel=1e-3
    )


# ---- what is refused, and what is said ----
def test_a_summary_names_the_share_of_all_layers() -> None:
    layers = StoredLayers("lz4")
    layers.note(Stored(LZ4, 50, 100))
    layers.note(Stored(NONE, 300, 300))
    assert layers.summary() == "layers: 2, 1 of them compressed with lz4, stored at 88 %"


# ---- failures ----
@pytest.mark.parametrize("error", ERRORS, ids=["full", "interrupt"])
@pytest.mark.parametrize(
    ("compress", "name"),
    [("none", "pwrite"), ("lz4", "pwrite"), ("lz4", "pread"), ("lz4", "ftruncate")],
)
def test_a_failure_anywhere_leaves_the_old_file_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str, error: BaseException, name: str
) -> None:
    """The N-th call fails, for a few N, the first and the last."""
    source, _ = hf_makers.gpt2(tmp_path / "m")
    out, calls = tmp_path / "m.qsf", FailingCalls(monkeypatch, name, error)

    def run() -> None:
        convert(source, out, compress=compress, quant_type="2bit", force=True)

    n_calls = calls.during(run)
    assert n_calls >= 1
    out.write_bytes(b"the old file")
    for fail_at in {*range(1, n_calls, max(1, n_calls // 4)), n_calls}:
        is_full = isinstance(error, OSError)
        with pytest.raises(QsfIOError if is_full else KeyboardInterrupt) as caught:
            calls.during(run, fail_at=fail_at)
        if is_full and name == "pwrite":
            said = re.fullmatch(
                rf"{out}: No space left on device after \d+ bytes, about \d+ are needed",
                str(caught.value),
            )
            assert said is not None, caught.value
        assert out.read_bytes() == b"the old file"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.qsf"]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("compress", "quantise"))]


def test_a_disk_that_only_the_compressed_file_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path]
) -> None:
    """It is not refused early, because nobody knows how far the layers will shrink."""
    plain = convert(pruned["tiny-llama"], tmp_path / "plain.qsf", quant_type="8bit")
    packed = convert(
        pruned["tiny-llama"], tmp_path / "zstd.qsf", quant_type="8bit", compress="zstd"
    )
    free = (plain.file_bytes + packed.file_bytes) // 2
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free)
    )
    out = tmp_path / "m.qsf"
    with pytest.raises(QsfIOError, match="needs about"):
        convert(pruned["tiny-llama"], out, quant_type="8bit")
    report = convert(pruned["tiny-llama"], out, quant_type="8bit", compress="zstd")
    assert dataclasses.replace(report, elapsed_s=0.0) == dataclasses.replace(packed, elapsed_s=0.0)
    free = 10_000
    with pytest.raises(QsfIOError, match="needs about"):
        convert(pruned["tiny-llama"], out, compress="zstd", force=True)
