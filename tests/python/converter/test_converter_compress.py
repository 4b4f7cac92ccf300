# SPDX-License-Identifier: Apache-2.0
"""qsf-convert --compress: the same model in fewer bytes, what auto decides, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import qsf
from qsf.errors import QsfArgumentError, QsfIOError, QsfUnsupportedError
from qsf.file import blocks, writer
from qsf.file.layout import Compression, Stored
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.rounding import compression as compression_module
from qsf_converter.rounding import disk
from qsf_converter.rounding.compression import Chooser, Measured, choose, measure

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


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("quant_type", ["4bit", "ternary", "f16"])
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


# ---- what auto decides ----


def planted(compression: Compression, ratio: float, decode_mb_per_s: float) -> Measured:
    raw_bytes = 8 << 20
    return Measured(
        compression, round(ratio * raw_bytes), raw_bytes, raw_bytes / MB / decode_mb_per_s
    )


@pytest.mark.parametrize(
    ("measured", "disk_mb_per_s", "expected"),
    [
        ([], 100, NONE),
        ([(ZSTD, 0.80, 1000)], 100, ZSTD),
        ([(ZSTD, 0.80, 1000)], 900, ZSTD),
        ([(ZSTD, 0.80, 1000)], 969, ZSTD),  # decoding takes 96.9 % of reading
        ([(ZSTD, 0.80, 1000)], 971, NONE),
        ([(ZSTD, 0.80, 1000)], 2000, NONE),
        ([(ZSTD, 0.969, 1000)], 100, ZSTD),
        ([(ZSTD, 0.971, 1000)], 100, NONE),
        ([(LZ4, 1.00001, math.inf), (ZSTD, 0.80, 1000)], 100, ZSTD),
        ([(LZ4, 0.90, 5000), (ZSTD, 0.80, 1000)], 100, ZSTD),
        ([(LZ4, 0.90, 5000), (ZSTD, 0.80, 1000)], 2000, LZ4),
        ([(LZ4, 0.90, 5000), (ZSTD, 0.80, 1000)], 6000, NONE),
        # Equally fast: the one that is decoded in less time, whatever the order.
        ([(LZ4HC, 0.90, 4000), (LZ4, 0.90, 5000)], 100, LZ4),
        ([(LZ4, 0.90, 5000), (LZ4HC, 0.90, 4000)], 100, LZ4),
    ],
)
def test_auto_takes_what_is_there_first(
    measured: list[tuple[Compression, float, float]], disk_mb_per_s: float, expected: Compression
) -> None:
    assert choose([planted(*m) for m in measured], disk_mb_per_s * MB) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from([LZ4, LZ4HC, ZSTD]), st.floats(0.01, 1.1), st.floats(1, 20_000)),
        max_size=3,
        unique_by=lambda m: m[0],
    ),
    st.floats(1, 20_000),
)
def test_auto_is_never_slower_than_another_choice(
    values: list[tuple[Compression, float, float]], disk_mb_per_s: float
) -> None:
    measured = [planted(*value) for value in values]
    disk_bytes_per_s = disk_mb_per_s * MB

    def seconds(m: Measured) -> float:
        return max(m.stored_bytes / disk_bytes_per_s, m.decode_s)

    chosen = choose(measured, disk_bytes_per_s)
    plain_s = (8 << 20) / disk_bytes_per_s
    times = {m.compression: seconds(m) for m in measured}
    if chosen == NONE:
        assert all(time > plain_s * 0.97 for time in times.values())
    else:
        assert times[chosen] <= plain_s * 0.97
        assert times[chosen] == min(times.values())


def test_measuring_counts_what_is_stored_and_times_only_decoding() -> None:
    noise = np.random.default_rng(1).bytes(5000)
    dull = bytes(3000)
    clock: Iterator[float] = iter([0, 0, 10, 11, 20, 22, 30, 33, 40, 44, 50, 55])
    m = measure(ZSTD, [noise, dull], clock=lambda: next(clock))
    assert m.raw_bytes == 8000
    assert m.stored_bytes == 5000 + len(blocks.pack_block(ZSTD, dull)) + 2 * 8
    assert m.decode_s == 3  # the median of 1 .. 5; the first round, 0, does not count
    assert list(clock) == []
    plain = measure(LZ4, [noise])
    assert (plain.ratio, plain.decode_bytes_per_s) == (5008 / 5000, math.inf)


def plant(
    monkeypatch: pytest.MonkeyPatch, figures: Callable[[int], dict[Compression, float]]
) -> None:
    """Let ``figures(layer)`` be the ratios that are measured, at 1000 MB/s."""
    calls = -1

    def measure_planted(compression: Compression, blocks: Sequence[bytes]) -> Measured:
        nonlocal calls
        assert blocks
        calls += 1
        return planted(compression, figures(calls // 3)[compression], 1000)

    monkeypatch.setattr(compression_module, "measure", measure_planted)


def test_auto_decides_for_every_layer_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path]
) -> None:
    files = []
    best = {0: ZSTD, 1: LZ4, 2: NONE, 3: LZ4HC}

    def ratios(layer: int) -> dict[Compression, float]:
        return {c: 0.8 if c == best.get(layer, ZSTD) else 0.99 for c in CODECS.values()}

    for _ in range(2):
        plant(monkeypatch, ratios)
        report = convert(
            pruned["tiny-llama"],
            tmp_path / "m.qsf",
            compress="auto",
            disk_speed=200 * MB / 1e6,
            force=True,
        )
        files.append((tmp_path / "m.qsf").read_bytes())
    assert files[0] == files[1]
    with Reader(tmp_path / "m.qsf") as reader:
        used = [unit.compression for unit in reader.layers]
        meta = json.loads(reader.read_section("META"))["compression"]
        reader.verify()
    assert used == [ZSTD, LZ4, NONE, LZ4HC, ZSTD, ZSTD]
    assert report.compression is not None
    assert report.compression.startswith(
        "layers: 6, 5 of them compressed with lz4 and lz4hc and zstd, stored at "
    )
    assert report.compression.endswith(" % (disk 200 MB/s, given)")
    assert (meta["disk_mb_per_s"], meta["disk_speed_from"]) == (200, "--disk-speed")
    assert [layer["chosen"] for layer in meta["layers"]] == [
        Compression(c).name.lower() for c in used
    ]
    assert meta["layers"][1]["sampled"]["lz4"] == {"ratio": 0.8, "decode_mb_per_s": 1000}
    assert meta["layers"][1]["sampled"]["zstd"]["ratio"] == 0.99


def test_auto_measures_the_disk_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path]
) -> None:
    asked: list[tuple[Path, Sequence[Path]]] = []
    speeds: list[float | None] = []

    def read_bytes_per_s(folder: Path, sources: Sequence[Path]) -> float | None:
        asked.append((folder, sources))
        return speeds[-1]

    monkeypatch.setitem(convert.__globals__, "read_bytes_per_s", read_bytes_per_s)
    plant(monkeypatch, lambda _: {LZ4: 0.9, LZ4HC: 0.9, ZSTD: 0.8})
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    for speed, text, warnings in [
        (500 * MB, "compressed with zstd, stored at", 0),
        (5000 * MB, "no compression reads 3 % faster: stored as they are (disk 5000 MB/s, meas", 0),
        (None, "the disk's speed is unknown: stored as they are", 1),
    ]:
        speeds.append(speed)
        report = convert(pruned["tiny-llama"], "m.qsf", compress="auto", force=True)
        assert text in str(report.compression)
        assert sum("--disk-speed" in warning for warning in report.warnings) == warnings
    assert [folder for folder, _ in asked] == [tmp_path / "folder"] * 3
    assert [path.name for path in asked[0][1]] == ["model.safetensors"]


def test_auto_does_without_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def import_module(name: str) -> object:
        if name == "zstandard":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    chooser = Chooser("auto", 100 * MB, is_given=True)
    assert [w for w in chooser.warnings if "pip install zstandard" in w]
    assert chooser.for_layer(lambda n: [bytes(1000)] * n) in (LZ4, LZ4HC)
    with pytest.raises(QsfUnsupportedError, match="pip install zstandard"):
        Chooser("zstd", None, is_given=False)


def test_wrong_arguments(tmp_path: Path, tiny_llama_dir: Path) -> None:
    out = tmp_path / "m.qsf"
    for options, text in [
        ({"compress": "gzip"}, "compression gzip is unknown; available: none, lz4, lz4hc, zstd, a"),
        ({"compress": "zstd", "disk_speed": 1e6}, "for compression auto"),
        ({"compress": "auto", "disk_speed": 0.0}, "above zero"),
        ({"compress": "auto", "disk_speed": math.nan}, "above zero"),
    ]:
        with pytest.raises(QsfArgumentError, match=text):
            convert(tiny_llama_dir, out, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_summary_names_the_share_of_all_layers() -> None:
    chooser = Chooser("lz4", None, is_given=False)
    chooser.note(Stored(LZ4, 50, 100))
    chooser.note(Stored(NONE, 300, 300))
    assert chooser.summary() == "layers: 2, 1 of them compressed with lz4, stored at 88 %"


# ---- the disk ----


def test_the_speed_of_a_disk_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    speed = disk.read_bytes_per_s(tmp_path, [])
    assert speed is not None
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    assert disk.read_bytes_per_s(tmp_path / "gone", []) is None


def test_a_large_source_on_the_same_disk_is_read_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LEAST_BYTES", 3 << 20)
    read: list[Path] = []

    def measure_planted(path: Path) -> float:
        read.append(path)
        return 1.0

    monkeypatch.setattr(disk, "_measure", measure_planted)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1 << 20))
    large.write_bytes(bytes(3 << 20))
    assert disk.read_bytes_per_s(tmp_path, [small, large]) == 1
    assert read == [large]
    disk.read_bytes_per_s(tmp_path, [small])
    assert str(read[1]).startswith("/proc/self/fd/")


def test_a_disk_that_cannot_be_read_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    assert disk.read_bytes_per_s(tmp_path, []) is None
    assert list(tmp_path.iterdir()) == []


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
    # Which reads the file that was written, with other calls and other errors.
    module = importlib.import_module("qsf_converter.convert")
    monkeypatch.setattr(module, "measure_costs", lambda *_, **__: {})

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


@pytest.mark.parametrize("compress", ["none", "lz4", "zstd", "auto"])
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


def test_the_three_percent_are_the_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: dict[str, Path]
) -> None:
    """What a sample promised and the whole layer does not keep is stored as it is."""
    plant(monkeypatch, lambda _: {LZ4: 0.1, LZ4HC: 0.99, ZSTD: 0.99})
    monkeypatch.setattr(writer, "LEAST_SAVING", 0.999)
    report = convert(pruned["tiny-llama"], tmp_path / "m.qsf", compress="auto", disk_speed=1)
    assert "stored as they are" in str(report.compression)
    with Reader(tmp_path / "m.qsf") as reader:
        meta = json.loads(reader.read_section("META"))["compression"]
    assert {layer["chosen"] for layer in meta["layers"]} == {"none"}
