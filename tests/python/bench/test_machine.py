# SPDX-License-Identifier: Apache-2.0
"""What qsf.bench says of the machine, and how it measures what that can do."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from qsf.errors import QsfIOError
from qsf.native import binding, roofline
from qsf_bench.judge import machine

MB = 1 << 20
DIRECT = ["direct x1", "direct x2", "direct x4", "direct x8"]
BUFFERED = ["buffered x1", "buffered x4"]


# ---- what it is ----


def test_a_machine_is_described_in_json_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/x/__main__.py", "/home/me/models/a.qsf", "--gen"])
    known = machine.describe(["llama.cpp 1", "ik"])
    assert json.loads(json.dumps(known)) == known
    assert known["command"] == "python -m qsf.bench a.qsf --gen"
    assert known["baseline"] == "llama.cpp 1; ik"
    assert known["isa"] in known["isa_available"]
    assert known["n_cores"] >= 1
    assert {"cpu", "system", "python", "qsf", "date", "load"} <= set(known)
    text = json.dumps(known)
    assert "/home" not in text
    assert str(Path(__file__).parents[3]) not in text
    assert "baseline" not in machine.describe()


# ---- memory ----


@dataclass(frozen=True)
class Roofline:
    read_gb_per_s: float
    gmadds_per_s: float


def test_memory_is_measured_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(n_threads: int, n_bytes: int, n_ms: int) -> Roofline:
        asked.append((n_threads, n_bytes, n_ms))
        return Roofline(10.0 * n_threads, 0.0 if n_threads == 4 else 500.0 * n_threads)

    monkeypatch.setattr(binding, "measure_roofline", measure, raising=False)
    said: list[str] = []
    memory, gmadds = roofline.measure_memory([4, 1, 4], said.append)
    assert memory == {"1": 10.0, "4": 40.0}
    assert gmadds == {"1": 500.0}  # what is 0 is not known
    assert [one[0] for one in asked] == [1, 4]
    assert all(64 * MB <= n_bytes <= 1024 * MB and n_bytes % MB == 0 for _, n_bytes, _ in asked)
    assert said == ["memory and arithmetic, 1 thread", "memory and arithmetic, 4 threads"]


# ---- the disk ----


class Reads:
    """Stands between the bench and os.preadv, and remembers where was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[int] = []
        self.buffers: list[int] = []
        self.failure: Callable[[int, int], int | None] = lambda _fd, _at: None
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fd: int, buffers: list[memoryview], at: int) -> int:
        self.places.append(at)
        self.buffers.append(len(buffers[0]))
        n_bytes = self.failure(fd, at)
        return self._preadv(fd, buffers, at) if n_bytes is None else n_bytes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.qsf"
    path.write_bytes(os.urandom(MB) * 6 + b"rest")
    return path


def silent(_text: str) -> None:
    pass


def can_read_past_the_cache(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_each_way_reads_every_megabyte_once(file: Path, reads: Reads) -> None:
    rates = roofline.measure_disk(file, silent)
    names = (DIRECT if can_read_past_the_cache(file) else []) + BUFFERED
    assert list(rates) == names
    assert all(rate > 0 for rate in rates.values())
    assert set(reads.buffers) == {MB}
    for i in range(len(names)):
        of_way = reads.places[6 * i : 6 * i + 6]
        assert sorted(of_way) == [place * MB for place in range(6)]


def test_a_filesystem_without_direct_reads_has_buffered_ones(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    said: list[str] = []
    assert list(roofline.measure_disk(file, said.append)) == BUFFERED
    assert "disk: the filesystem of model.qsf has no O_DIRECT" in said
    assert said.count("disk, direct x1") == 1
    assert "disk, direct x2" not in said


def test_failing_reads_are_errors_with_the_file(file: Path, reads: Reads) -> None:
    reads.failure = lambda _fd, at: 100 if at == 2 * MB else None
    with pytest.raises(QsfIOError, match=r"model\.qsf: 100 bytes came of 1048576"):
        roofline.measure_disk(file, silent)

    def fail(_fd: int, _at: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    reads.failure = fail
    with pytest.raises(QsfIOError, match=r"model\.qsf: Input/output error"):
        roofline.measure_disk(file, silent)


def test_small_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(MB - 1))
    assert roofline.measure_disk(tmp_path / "small", silent) == {}
    with pytest.raises(QsfIOError, match="absent: No such file"):
        roofline.measure_disk(tmp_path / "absent", silent)
