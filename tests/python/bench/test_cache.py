# SPDX-License-Identifier: Apache-2.0
"""The cache of random models of qsf.bench: made once, made anew, never half."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from qsf.errors import QsfIOError
from qsf_bench.models import cache, random_qsf
from qsf_bench.models.shapes import Shape

LLAMA = Shape(2, 256, 512, 4, 2, 320, 64)


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_qsf, "POOL_TILES", 64)


MAKE: dict[str, Callable[..., Path]] = {
    "qsf": lambda folder, **more: cache.find_or_make("qsf", LLAMA, "4bit", folder=folder, **more),
    "gguf": lambda folder, **more: cache.find_or_make(
        "llama.cpp", LLAMA, "Q4_0", folder=folder, **more
    ),
}


def refuse(*_: object) -> NoReturn:
    raise AssertionError("nothing should be made")


@pytest.mark.parametrize("kind", MAKE)
def test_a_file_is_made_once(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "a" / "b"
    told: list[tuple[int, int]] = []
    path = MAKE[kind](folder, progress=lambda *numbers: told.append(numbers))
    assert told
    assert path.suffix == f".{kind}"
    before = path.stat()
    assert MAKE[kind](folder, progress=refuse) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [p.name for p in folder.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("damage", ["truncated", "head", "other shape"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, kind: str, damage: str) -> None:
    path = MAKE[kind](tmp_path)
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[:-1])
    elif damage == "head":
        path.write_bytes(b"????" + whole[4:])
    else:
        at = whole.find(b"block_count") + len(b"block_count") + 4 if kind == "gguf" else 16
        path.write_bytes(whole[:at] + bytes([9]) + whole[at + 1 :])
    assert MAKE[kind](tmp_path) == path
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", MAKE)
def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=64_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(QsfIOError, match=r"0 MB|1 MB") as caught:
        MAKE[kind](tmp_path, progress=refuse)
    for part in ("67 MB to spare", "64 MB are free there", "--cache FOLDER"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", MAKE)
def test_nothing_is_left_of_an_interrupted_one(tmp_path: Path, kind: str) -> None:
    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            assert len(list(tmp_path.iterdir())) == 1  # the temporary
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MAKE[kind](tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
