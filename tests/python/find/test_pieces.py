"""A model of the hub is converted while it comes, without a copy of its weights."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import qsf as package
from make import golden_families
from make.commands import Run
from make.encoders import with_tokenizer
from make.fake_hub import COMMIT, REPO, FakeHub, hub
from qsf.errors import QsfIOError
from qsf.file import ranged
from qsf.file.open_file import PIECES_FOLDER
from qsf.find.download import Blobs
from qsf.find.names import meaning_of
from qsf.system import files

assert hub  # a fixture


def models(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "qsf" / "models").glob("*.qsf"))


def test_it_makes_the_same_file_and_leaves_nothing(qsf: Run, hub: FakeHub, tmp_path: Path) -> None:
    done = qsf("pull", REPO, "--no-copy", "-q")
    assert done.returncode == 0, done.stderr
    (path,) = models(tmp_path)
    pieces = path.read_bytes()
    assert not list(tmp_path.rglob("*.safetensors"))
    n_bytes = len(hub.files["model.safetensors"])
    fetched = sum(end - first for _, first, end in hub.ranges)
    assert n_bytes <= fetched < 1.3 * n_bytes  # all but some keys and queries once
    path.unlink()
    path.with_suffix(".json").unlink()
    assert qsf("pull", REPO, "-q").returncode == 0
    assert list(tmp_path.rglob("model.safetensors"))
    assert models(tmp_path)[0].read_bytes() == pieces


def test_without_room_it_is_done_without_asking_for_it(
    qsf: Run, hub: FakeHub, tmp_path: Path
) -> None:
    """The hub says that it has more than any disk, which then is found to be wrong."""
    siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
    for entry in siblings:
        entry["size"] = 10**16 if entry["rfilename"] == "model.safetensors" else entry["size"]
    hub.facts = {"siblings": siblings}
    done = qsf("pull", REPO, "-q")
    assert done.returncode == 1
    assert "another file than it said" in done.stderr
    assert hub.ranges
    assert not models(tmp_path)


def test_connections_that_break_go_on_where_they_were(
    qsf: Run, hub: FakeHub, tmp_path: Path
) -> None:
    hub.break_after = 300_000
    done = qsf("pull", REPO, "--no-copy", "-q")
    assert done.returncode == 0, done.stderr
    assert models(tmp_path)
    ends = {first + hub.break_after for _, first, _ in hub.ranges}
    assert any(first in ends for _, first, _ in hub.ranges)


def remains(tmp_path: Path) -> set[str]:
    folder = tmp_path / "cache" / "qsf" / "models"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.endswith(".lock")}


def test_after_a_kill_it_begins_again_and_nothing_is_half_there(
    qsf: Run, hub: FakeHub, tmp_path: Path
) -> None:
    """Killed when it has begun to write, with its children or alone."""
    assert qsf("pull", REPO, "--no-copy", "-q").returncode == 0
    whole = remains(tmp_path)
    (path,) = models(tmp_path)
    want = path.read_bytes()
    words = [sys.executable, "-m", "qsf", "pull", REPO, "--no-copy", "-q"]
    for with_children in (True, False):
        for each in path.parent.glob("*.[qj]s*"):
            each.unlink()
        with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            while remains(tmp_path) <= whole:
                assert process.poll() is None
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL) if with_children else process.kill()
        assert all(path.read_bytes() == want for path in models(tmp_path))
    for pointer in tmp_path.glob("cache/qsf/models/pieces/*/*/*.safetensors"):
        pointer.write_text("{", "utf-8")  # as an older release could leave it
    done = qsf("pull", REPO, "--no-copy", "-q")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == want
    for _ in range(100):  # a child of a process that was killed alone may be at work still
        if remains(tmp_path) == whole:
            break
        time.sleep(0.1)
    assert remains(tmp_path) == whole


def test_a_signal_ends_a_download_at_once(qsf: Run, hub: FakeHub, tmp_path: Path) -> None:
    """And not at the end of the file; the next command goes on from there, and leaves nothing."""
    hub.pause_seconds = 0.3
    words = [sys.executable, "-m", "qsf", "pull", REPO, "-q"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while hub.n_bytes_sent < 2_000_000:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert "; the same command continues from there" in process.stderr.read()
    assert hub.n_bytes_sent < len(hub.files["model.safetensors"])
    (part,) = (tmp_path / "hf").rglob("*.incomplete")
    n_bytes = part.stat().st_size
    other = part.with_name(f"{'0' * 40}.89abcdef.incomplete")  # as huggingface_hub 2 names its own
    other.write_bytes(b"x")
    hub.pause_seconds = 0
    assert qsf("pull", REPO, "-q").returncode == 0
    assert [at for name, at in hub.fetched if name == "model.safetensors"] == [0, n_bytes]
    assert n_bytes > 500_000
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_rm_removes_what_a_download_left(qsf: Run, hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hf" / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / "abc.incomplete"
    part.write_bytes(bytes(3 << 20))
    with Blobs(REPO)._locked("abc", files.try_lock):  # another process is at work
        assert "no converted model" in qsf("rm", REPO).stderr
    assert qsf("rm", REPO).stdout == "removed 3.0 MB of a download that never ended\n"
    assert not list(blobs.iterdir())


def test_an_unfinished_file_that_is_too_long_begins_again(hub: FakeHub, tmp_path: Path) -> None:
    data = hub.files["model.safetensors"]
    blobs = Blobs(REPO)
    blobs._folder.mkdir(parents=True)
    url = f"{hub.url}/{REPO}/resolve/{COMMIT}/model.safetensors"
    etag = hub._entry("model.safetensors", "path")["oid"]
    (blobs._folder / f"{etag}.incomplete").write_bytes(bytes(len(data) + 1))
    done: list[int] = []
    assert blobs.fetch(url, len(data), done.append).read_bytes() == data
    assert sum(done) == len(data)
    hub.headers = {"ETag": ""}
    with pytest.raises(QsfIOError, match="names no etag"):
        blobs.fetch(url, len(data), done.append)


def test_the_makers_pooling_comes_with_the_model(qsf: Run, hub: FakeHub, tmp_path: Path) -> None:
    """And an encoder is converted to 8 bits, whether it says how it pools or not."""
    folder = with_tokenizer(golden_families.cases()["nomic_bert"].write(tmp_path / "encoder"))
    assert meaning_of(str(folder)).quant_type == "8bit"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    hub.files = FakeHub(folder).files | {"onnx/model.onnx": b"", "../1_Pooling/config.json": b""}
    done = qsf("pull", REPO, "--no-copy", "-q")
    assert done.returncode == 0, done.stderr
    with package.Model(*models(tmp_path), ram_budget=None) as model:
        assert (model.text_vectors.pooling, model.info.quant_type) == ("cls", "8bit")
    for name, quant_type in (
        ("BertModel", "8bit"), ("XLMRobertaForMaskedLM", "8bit"), ("GPT2LMHeadModel", "4bit"),
        ("LlamaForCausalLM", "4bit"), ("Gemma3ForConditionalGeneration", "4bit"),
    ):  # fmt: skip
        other = tmp_path / name
        other.mkdir()
        (other / "config.json").write_text(json.dumps({"architectures": [name]}), "utf-8")
        assert meaning_of(str(other)).quant_type == quant_type


def opened(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> ranged.RangedFile:
    path = tmp_path / "model.safetensors"
    url = f"{hub.url}/{REPO}/resolve/{COMMIT}/model.safetensors"
    path.write_text(json.dumps({"url": url, "size": size}), "utf-8")
    monkeypatch.setenv(PIECES_FOLDER, str(tmp_path))
    assert ranged.is_ranged(path)
    monkeypatch.setattr(ranged.RangedFile, "_pause", staticmethod(lambda _: None))
    return ranged.RangedFile.of_pointer(path)


def test_what_a_hub_may_not_do(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hub.files["model.safetensors"]
    with opened(hub, tmp_path, monkeypatch, len(data)) as file:
        assert file.read(8) == data[:8]
        assert file.seek(-5, os.SEEK_END) == len(data) - 5
        assert (file.read(100), file.read(1)) == (data[-5:], b"")
        file.seek(1000)
        assert file.read(2_000_000) == data[1000:2_001_000]
        hub.files["model.safetensors"] = bytes(len(data))  # its etag is another one
        file.seek(0)
        with pytest.raises(QsfIOError, match="another file than it said"):
            file.read(8 + (2 << 20))
    hub.files["model.safetensors"] = data
    for changes, size, said in (
        ({}, len(data) + 1, "another file than it said"),
        ({"n_extra_bytes": 10}, len(data), "more than was asked for"),
        ({"n_extra_bytes": 0, "break_after": 0}, len(data), r"stopped at byte 0 .*begin"),
        ({"files": {}}, len(data), "no longer has it"),
    ):
        vars(hub).update(changes)
        with (
            opened(hub, tmp_path, monkeypatch, size) as file,
            pytest.raises(QsfIOError, match=said),
        ):
            file.read(8)


def test_a_pointer_of_a_stranger_leads_nowhere(
    qsf: Run, hub: FakeHub, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for source in tiny_llama_dir.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    url = f"{hub.url}/{REPO}/resolve/{COMMIT}/model.safetensors"
    (folder / "model.safetensors").write_text(json.dumps({"url": url, "size": 10}), "utf-8")
    done = qsf("convert", folder, tmp_path / "m.qsf")
    assert done.returncode == 1
    assert "not a safetensors file" in done.stderr
    assert hub.ranges == []
