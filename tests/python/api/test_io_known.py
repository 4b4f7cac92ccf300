"""What a probe found is remembered, and nothing that can happen to that memory is an error."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from qsf.native import io_known
from qsf.native._qsf import lib


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of io.json in a cache folder of the test's own; neither is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qsf" / "io.json"


def entry_of(file: Path) -> dict[str, Any]:
    """Return the only entry."""
    (entry,) = json.loads(file.read_text("utf-8"))["disks"].values()
    assert isinstance(entry, dict)
    return entry


def write_entry(file: Path, **changes: object) -> None:
    """Change fields of the only entry."""
    text = json.loads(file.read_text("utf-8"))
    for entry in text["disks"].values():
        entry.update(changes)
    file.write_text(json.dumps(text), "utf-8")


def test_the_names_are_those_of_the_engine() -> None:
    for name, number in io_known.METHODS.items():
        assert getattr(lib, f"QSF_IO_{name.upper()}") == number
    assert len(io_known.METHODS) == sum(name.startswith("QSF_IO_") for name in dir(lib))


def test_what_is_remembered_is_known_for_that_disk_only(file: Path, tmp_path: Path) -> None:
    assert io_known.recall(tmp_path) is None
    io_known.remember(tmp_path, 2, 4)
    assert io_known.recall(tmp_path) == (2, 4)
    assert entry_of(file)["method"] == "direct"
    io_known.remember(tmp_path, 3, 16)
    assert io_known.recall(tmp_path) == (3, 16)
    assert len(json.loads(file.read_text("utf-8"))["disks"]) == 1
    if Path("/proc/self").exists():
        assert io_known.recall("/proc/self/status") is None
    assert io_known.recall(tmp_path / "absent") is None
    assert [path.name for path in file.parent.iterdir()] == ["io.json"]


def test_another_kernel_is_not_known(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io_known.remember(tmp_path, 2, 4)
    now = os.uname()
    other = os.uname_result((now.sysname, now.nodename, "9.9.9", now.version, now.machine))
    monkeypatch.setattr(os, "uname", lambda: other)
    assert io_known.recall(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "warp"},
        {"method": "auto"},
        {"method": 2},
        {"method": None},
        {"method": ["direct"]},
        {"depth": 0},
        {"depth": 33},
        {"depth": -1},
        {"depth": 2**70},
        {"depth": True},
        {"depth": "4"},
        {"depth": 4.0},
        {"seconds": None},
        {"seconds": True},
        {"seconds": float("nan")},
        {"seconds": 0},
        {"seconds": int(time.time()) - 31 * 24 * 3600},
        {"seconds": int(time.time()) + 2 * 24 * 3600},
    ],
    ids=lambda changes: next(iter(changes)),  # the same names whenever tests are collected
)
def test_hostile_and_old_entries_are_not_known(
    file: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    io_known.remember(tmp_path, 2, 4)
    write_entry(file, seconds=int(time.time()) - 29 * 24 * 3600)
    assert io_known.recall(tmp_path) == (2, 4)
    write_entry(file, **changes)
    assert io_known.recall(tmp_path) is None
    io_known.remember(tmp_path, 3, 8)
    assert io_known.recall(tmp_path) == (3, 8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"version": 1}',
        b'{"version": 1, "disks": []}',
        b'{"version": 1, "disks": {"x": 5}}',
        b'{"version": 2, "disks": {}}',
        b"[" * 60000,
        b'{"version": 1, "disks": {"x": {"depth": ' + b"9" * 50000 + b"}}}",
        b" " * 200000 + b"{}",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_a_file_that_is_not_ours_is_not_known_and_replaced(
    file: Path, tmp_path: Path, data: bytes
) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    assert io_known.recall(tmp_path) is None
    io_known.remember(tmp_path, 2, 4)
    assert io_known.recall(tmp_path) == (2, 4)


def test_places_that_cannot_be_written_or_read_are_no_error(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.mkdir(parents=True)
    file.mkdir()  # a folder in the file's place
    io_known.remember(tmp_path, 2, 4)
    assert io_known.recall(tmp_path) is None
    assert [path.name for path in file.parent.iterdir()] == ["io.json"]
    file.rmdir()
    os.mkfifo(file)  # opening it must not wait for a writer
    assert io_known.recall(tmp_path) is None
    (tmp_path / "no-folder").write_text("x", "utf-8")
    for folder in (tmp_path / "no-folder", Path("/proc/absent"), Path("/dev/null")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        io_known.remember(tmp_path, 2, 4)
        assert io_known.recall(tmp_path) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_old_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io_known.remember(tmp_path, 2, 4)
    before = file.read_bytes()
    real_open = os.open

    def open_full(path: Any, flags: int, *rest: int) -> int:
        is_written = flags & os.O_CREAT
        return real_open("/dev/full", os.O_WRONLY) if is_written else real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_full)
    io_known.remember(tmp_path, 3, 8)
    monkeypatch.undo()
    assert file.read_bytes() == before


def test_a_relative_cache_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    io_known.remember(tmp_path, 2, 4)
    assert io_known.recall(tmp_path) == (2, 4)
    assert (tmp_path / "home" / ".cache" / "qsf" / "io.json").exists()
    monkeypatch.setenv("HOME", "relative")
    io_known.remember(tmp_path, 2, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_the_latest_32_disks_are_kept(file: Path, tmp_path: Path) -> None:
    io_known.remember(tmp_path, 2, 4)
    text = json.loads(file.read_text("utf-8"))
    now = int(time.time())
    for i in range(100):
        entry = {"method": "uring", "depth": 8, "seconds": now - 1000 - i}
        text["disks"][f"other {i}"] = entry
    file.write_text(json.dumps(text), "utf-8")
    io_known.remember(tmp_path, 2, 5)
    kept = json.loads(file.read_text("utf-8"))["disks"]
    assert len(kept) == 32
    assert "other 30" in kept
    assert "other 31" not in kept
    assert io_known.recall(tmp_path) == (2, 5)
