# SPDX-License-Identifier: Apache-2.0
"""qsf-convert --compress: the same model in fewer bytes, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import qsf
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file import blocks, writer
from qsf.file.layout import Compression, Stored
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.rounding.compression import StoredLayers

NONE, LZ4, LZ4HC, ZSTD = Compression
CODECS = {"lz4": LZ4, "lz4hc": LZ4HC, "zstd": ZSTD}
MB = 1e6


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
            assert used == {CODECS.get(compress, NONE)}
            assert {reader.embedding.compression, reader.final.compression} == {NONE}
            reader.verify()
        with qsf.Model(path, ram_budget=None) as loaded:
            values = loaded.logits(tokens)
        assert np.isfinite(values).all()
        return values.tobytes(), path.stat().st_size

    plain, plain_bytes = logits("none")
    for compress in CODECS:
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


def test_wrong_arguments(tmp_path: Path, tiny_llama_dir: Path) -> None:
    out = tmp_path / "m.qsf"
    for options, text in [
        ({"compress": "gzip"}, "compression gzip is unknown; available: none, lz4, lz4hc, zstd"),
        ({"compress": "auto"}, "compression auto is unknown"),
    ]:
        with pytest.raises(QsfArgumentError, match=text):
            convert(tiny_llama_dir, out, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_summary_names_the_share_of_all_layers() -> None:
    layers = StoredLayers("lz4")
    layers.note(Stored(LZ4, 50, 100))
    layers.note(Stored(NONE, 300, 300))
    assert layers.summary() == "layers: 2, 1 of them compressed with lz4, stored at 88 %"


# ---- failures ----


@contextlib.contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fail_at: int, error: BaseException
) -> Iterator[list[int]]:
    """Let the ``fail_at``-th call fail; the list counts them."""
    real = getattr(place, name)
    n_calls = [0]

    def call(*args: Any, **options: Any) -> Any:
        n_calls[0] += 1
        if n_calls[0] == fail_at:
            raise error
        return real(*args, **options)

    with monkeypatch.context() as m:
        m.setattr(place, name, call)
        yield n_calls


CALLS = [(os, "pwrite"), (os, "pread"), (os, "ftruncate"), (blocks, "pack_block")]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), CALLS, ids=[name for _, name in CALLS])
@pytest.mark.parametrize("kind", ["full", "interrupt"])
def test_a_failure_anywhere_leaves_the_old_file_and_no_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pruned: dict[str, Path],
    place: Any,
    name: str,
    kind: str,
) -> None:
    """The N-th call fails, for twenty N, the first and the last, of one that compresses."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    error: BaseException = full if kind == "full" else KeyboardInterrupt()
    out = tmp_path / "m.qsf"

    def run() -> None:
        convert(pruned["tiny-gpt2"], out, compress="lz4", quant_type="2bit", force=True)

    with failing(monkeypatch, place, name, -1, error) as n_calls:
        run()
    assert n_calls[0] >= 6
    out.write_bytes(b"the old file")
    for fail_at in {*range(1, n_calls[0], max(1, n_calls[0] // 20)), n_calls[0]}:
        with (
            failing(monkeypatch, place, name, fail_at, error),
            pytest.raises(QsfIOError if kind == "full" else KeyboardInterrupt) as e,
        ):
            run()
        if kind == "full" and name != "pack_block":
            text = str(e.value)
            assert text.startswith(f"{out}: No space left on device after ")
            assert int(text.split(" after ")[1].split()[0]) >= 0
            needed = int(text.split(", about ")[1].split(" are needed")[0])
            assert needed > 700_000
            assert "\n" not in text
        assert out.read_bytes() == b"the old file"
        assert list(tmp_path.iterdir()) == [out]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("compress", "quantise"))]


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
        if os.geteuid() != 0:
            pytest.skip("only root can mount a small disk")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no small disk: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd"])
def test_a_disk_that_is_really_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path], compress: str
) -> None:
    out = small_disk / "m.qsf"
    out.write_bytes(b"the old file")
    needed = 0
    for is_seen_early in (True, False):
        if not is_seen_early:
            monkeypatch.setattr(
                shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
            )
        with pytest.raises(QsfIOError) as e:
            convert(pruned["tiny-llama"], out, quant_type="8bit", compress=compress, force=True)
        text = str(e.value)
        if "only" in text:
            assert is_seen_early
            assert ": needs about " in text
            assert text.endswith("MB are free there")
        else:
            needed = int(text.split(", about ")[1].split(" are needed")[0])
            assert "No space left on device after" in text
        assert out.read_bytes() == b"the old file"
        assert list(small_disk.iterdir()) == [out]
    assert needed > 2_000_000


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


def test_a_layer_that_saves_too_little_is_stored_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path]
) -> None:
    monkeypatch.setattr(writer, "LEAST_SAVING", 0.999)
    report = convert(pruned["tiny-llama"], tmp_path / "m.qsf", compress="lz4")
    assert "stored as they are" in str(report.compression)
    with Reader(tmp_path / "m.qsf") as reader:
        meta = json.loads(reader.read_section("META"))["compression"]
    assert {layer["chosen"] for layer in meta["layers"]} == {"none"}
