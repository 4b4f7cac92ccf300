"""Models by any name: folders, files, the hub's cache, downloads from a hub on the loopback."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import qsf as package
from make import gguf_files, golden_families, tiny_checkpoints
from make.commands import Run
from make.fake_hub import COMMIT, REPO, FakeHub
from make.fake_hub import hub as hub
from make.golden_families import with_tokenizer
from make.refusals import table
from qsf.cli.plan import plans_of
from qsf.errors import ChildFailedError, QsfArgumentError, QsfConversionError, QsfIOError
from qsf.file import ranged
from qsf.file.family import our_type
from qsf.file.open_file import PIECES_FOLDER, is_qsf_file
from qsf.find import prepare, store
from qsf.find.download import Blobs
from qsf.find.names import Named, gguf_of, meaning_of
from qsf.find.prepare import find_model
from qsf.find.store import SUGGESTED
from qsf.native.opening import plan_native
from qsf.options import ModelOptions
from qsf.system import files
from qsf_bench import cli as bench
from qsf_bench.models.random_qsf import embed_type_of, write_model
from qsf_bench.models.shapes import Shape
from qsf_converter.rounding.plan import parse_quant_type


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of ours and of the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "cache"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


# ---- what names mean ----
def test_what_cannot_be_a_model_says_what_to_do(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    write(tmp_path / "lfs.gguf", pointer)
    write(tmp_path / "cloned" / "config.json", "{}")
    write(tmp_path / "cloned" / "model.safetensors", pointer)
    write(tmp_path / "lora" / "adapter_config.json", '{"base_model_name_or_path": "org/base"}')
    write(tmp_path / "empty" / "notes.txt", "")
    write(tmp_path / "many" / "a.gguf", "GGUF")
    write(tmp_path / "many" / "b.gguf", "GGUF")
    write(tmp_path / "weights.safetensors", "x")
    write(tmp_path / "none.gguf", "")
    write(tmp_path / "page.gguf", "<html>")
    write(tmp_path / "part-00002-of-00003.gguf", "GGUF")
    for name, kind, said in (
        ("lfs.gguf", QsfIOError, "`git lfs pull`"),
        ("cloned", QsfIOError, "`git lfs pull`"),
        ("lora", QsfConversionError, "merge it into its base model org/base"),
        ("empty", QsfConversionError, "a folder without config.json"),
        ("many", QsfArgumentError, "name one of its files, such as"),
        ("weights.safetensors", QsfArgumentError, "name its folder"),
        ("none.gguf", QsfConversionError, "none.gguf is an empty file: download or copy it again"),
        ("page.gguf", QsfConversionError, "begins with b'<html>', not with b'GGUF'"),
        ("part-00002-of-00003.gguf", QsfConversionError, "is one of 3 parts: name the first,"),
        ("weight.safetensors", QsfIOError, "did you mean"),
    ):
        with pytest.raises(kind, match=said.replace("(", r"\(")):
            meaning_of(str(tmp_path / name))
    with pytest.raises(QsfArgumentError, match="download it"):
        meaning_of("https://example.com/model.qsf")
    with pytest.raises(QsfArgumentError, match="not a type of weights"):
        meaning_of("org/name:9bit")
    names = {"Q2_K": "2bit", "Q3_K_M": "3bit", "Q4_0": "4bit", "Q5_K_S": "8bit", "Q6_K": "8bit",
             "q8_0": "8bit", "BF16": "f16", "TQ1_0": "ternary", "4bit-sym": "4bit-sym",
             "IQ4_XS": "4bit-nl"}  # fmt: skip
    assert {name: our_type(name) for name in names} == names
    files = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md"]
    wanted = {"q4_k_m": "m-Q4_K_M.gguf", "": "m-Q8_0.gguf", "Q5_0": None}
    assert {name: gguf_of(files, name) for name in wanted} == wanted


def test_names_of_the_hub_and_what_they_take(
    qsf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, repo, quant_type in table("tables")["names of models"]:
        named = meaning_of(model)
        assert (named.repo, named.quant_type, named.path) == (repo, quant_type, None)
    with pytest.raises(QsfIOError, match=r"qwen3: .*: did you mean qwen3:0\.6b\?"):
        meaning_of("qwen3")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "qwen3:4b", "GGUF")  # a file of that name comes first
    assert meaning_of("qwen3:4b").path == Path("qwen3:4b")
    assert [m.memory_mb for m in SUGGESTED] == sorted(m.memory_mb for m in SUGGESTED)
    for suggested in SUGGESTED:
        assert suggested.least_mb <= 200 < 2 * suggested.memory_mb
        assert suggested.gguf.endswith("-GGUF")
    listed = json.loads(qsf("list", "--available", "--json").stdout)
    assert [row["name"] for row in listed] == [model.name for model in SUGGESTED]
    shown = qsf("list", "--available").stdout
    assert " MB of memory are free: start with " in shown
    slow = 10.0  # GB/s: 8 tokens a second of files up to 1,192 MB
    monkeypatch.setattr("qsf.native.binding.measure_roofline", lambda *_: slow)
    assert "8b" not in qsf("list", "--available").stdout.splitlines()[0]
    small = SimpleNamespace(memory_bytes=2**33, available_bytes=300 << 20)
    monkeypatch.setattr("qsf.native.binding.describe_machine", lambda: small)
    monkeypatch.setattr("qsf.native.binding.measure_roofline", lambda *_: pytest.fail("no room"))
    first = "300 MB of memory are free: start with smollm2:135m"
    assert qsf("list", "--available").stdout.splitlines()[0] == first
    assert "Llama 3.2 Community License" in shown


def test_the_figures_of_a_suggested_model_are_those_of_its_plan(tmp_path: Path) -> None:
    smallest = SUGGESTED[0]
    shape = Shape(30, 576, 1536, 9, 3, n_vocab=49152, max_tokens=8192, is_tied=True)
    path = tmp_path / "smollm2.qsf"
    write_model(path, shape, parse_quant_type("4bit"), embed_type_of("4bit"), n_real_layers=0)
    assert round(path.stat().st_size / 2**20) == smallest.file_mb
    plan = plan_native(path, ModelOptions(ram_budget=None, max_seq_len=4096))
    # Without this process: a run takes 30 to 40 MB, and 20 for the tokenizer of a large vocabulary.
    engine_mb = (plan.engine_bytes + plan.reserve_bytes) / 2**20
    assert smallest.memory_mb - 60 <= engine_mb <= smallest.memory_mb - 50


# ---- conversions are kept ----
def test_a_folder_is_converted_once_and_again_when_it_has_changed(
    qsf: Run,
    cache: Path,
    tiny_llama_dir: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "my model"
    shutil.copytree(tiny_llama_dir, source)
    run_child = Mock(wraps=prepare._run_child)
    monkeypatch.setattr(prepare, "_run_child", run_child)
    with ThreadPoolExecutor(3) as pool:  # as several commands would, at the same time
        (path,) = {*pool.map(find_model, [str(source)] * 3)}
    run_child.assert_called_once()
    assert path.parent == cache / "qsf" / "models"
    assert is_qsf_file(path)
    assert f"converting {source}, once: {path}" in capfd.readouterr().err
    before = path.stat().st_mtime_ns
    assert find_model(str(source)) == path
    assert capfd.readouterr().err == ""
    assert path.stat().st_mtime_ns == before
    os.utime(source / "config.json", (1, 1))
    assert find_model(str(source), is_quiet=True) == path
    assert path.stat().st_mtime_ns != before
    by_name, by_path = (plans_of(model, {"ram_budget": 100})[0] for model in (str(source), path))
    assert by_name.process_bytes > by_path.process_bytes + (1 << 20)  # a plan counts the search
    (kept,) = store.all_kept()
    assert (kept.name, kept.quant_type) == (str(source), "auto")
    listed = json.loads(qsf("list", "--json").stdout)
    assert [(m["name"], m["family"]) for m in listed] == [(str(source), "llama")]
    (source / "config.json").write_text('{"architectures": ["OddForCausalLM"]}', "utf-8")
    failed = qsf("run", source, "-p", "x", "-q")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert failed.stderr.startswith("qsf convert: error: ")
    assert store.all_kept() == [kept]
    removed = qsf("rm", source)
    assert removed.stdout.startswith(f"removed {source}:auto")
    assert list(path.parent.iterdir()) == []
    assert "no models yet" in qsf("list").stdout
    assert "there is no converted model" in qsf("rm", source).stderr


def test_a_gguf_file_keeps_its_bits(cache: Path, tmp_path: Path, tiny_llama_dir: Path) -> None:
    sizes = {"dim": 64, "head_dim": 32, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64}
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", n_layers=1, n_vocab=2048, tokenizer_from=tiny_llama_dir, **sizes
    )
    path = gguf_files.write(
        folder,
        tmp_path / "m-Q4_1.gguf",
        kind=gguf_files.Type.Q4_1,
        tokenizer=True,
        changes={"general.file_type": 15},
    )
    for name in (f"{path}", f"{path}:Q4_1", f"{path}:Q4_K_M"):
        find_model(name)
    assert {kept.full_name for kept in store.all_kept()} == {f"{path}:Q4_K_M", f"{path}:4bit"}
    assert len(store.named("m-Q4_1")) == 2
    assert [kept.quant_type for kept in store.named("m-Q4_1", "q4_k_m")] == ["Q4_K_M"]
    options = bench._parser().parse_args(["m-Q4_1:Q4_K_M", str(path), "--prompt=8", "--gen=0"])
    by_name, by_path = bench.find_files(options, Mock(), with_baseline=True)
    assert by_name == by_path, "both are measured beside the one GGUF"
    assert by_name[0].type == "Q4_K_M"


def test_the_budget_of_a_run_counts_nothing_of_the_conversion(
    process: Run, qsf: Run, cache: Path, tiny_llama_dir: Path
) -> None:
    peaks = []
    for _ in range(2):  # with the conversion, then without
        done = process("run", tiny_llama_dir, "-p", "x", "-n", 1, "--json")
        peaks.append(json.loads(done.stdout)["peak_bytes"] / 2**20)
    assert peaks[0] - peaks[1] < 3  # the converter alone takes some 100


# ---- the hub ----
def test_a_model_is_pulled_shown_and_removed(qsf: Run, hub: FakeHub) -> None:
    absent = qsf("show", REPO)
    assert absent.returncode == 2
    assert f"{REPO} is not converted yet: " in absent.stderr
    assert f"qsf pull {REPO}" in absent.stderr
    pulled = qsf("pull", REPO)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"{REPO} is ready, ")
    assert f"qsf chat {REPO}" in pulled.stdout
    assert "model.safetensors" in {name for name, _ in hub.fetched}
    hub.fetched.clear()
    assert qsf("pull", REPO, "-q").stdout == ""
    assert hub.fetched == []
    (kept,) = store.all_kept()
    short = REPO.split("/")[1]
    assert qsf("list").stdout.splitlines()[1].split()[:2] == [short, "auto"]
    assert meaning_of(short) == meaning_of(f"{short}:auto") == Named(kept.path, is_qsf=True)
    for name in (REPO, short):
        shown = qsf("show", name)
        assert (shown.returncode, shown.stderr) == (0, "")
        for line in ("type      auto\n", "context   up to 512 tokens\n", "sampling  temperature "):
            assert line in shown.stdout
    assert qsf("show", short, "--verbose").stdout == qsf("inspect", kept.path).stdout
    with pytest.raises(QsfIOError, match="there is no such file"):
        meaning_of(f"{short}:8bit")
    with pytest.MonkeyPatch.context() as patch:  # of two that are called so none is meant
        patch.setattr(store, "all_kept", lambda: [kept, replace(kept, name=f"other/{short}")])
        assert store.named(short) == []
    failed = qsf("pull", "some-org/absent")
    assert failed.returncode == 1
    assert "some-org/absent is not on the hub" in failed.stderr


def test_a_model_of_the_hub_is_downloaded_if_the_user_says_so(
    qsf: Run, hub: FakeHub, tmp_path: Path
) -> None:
    refused = qsf("run", REPO, "-p", "x")
    assert refused.returncode == 1
    assert "is not on this machine. Download 5.6 MB with --yes" in refused.stderr
    assert hub.fetched == []
    done = qsf("run", REPO, "--yes", "-p", "Once upon a time", "-n", 4, "--temp", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a")
    assert {name for name, _ in hub.fetched} >= {"model.safetensors", "config.json"}
    hub.close()  # no network: the cache has it
    converted = qsf("convert", REPO, tmp_path / "m.qsf", "-q")
    assert (converted.returncode, converted.stdout, converted.stderr) == (0, "", "")
    shutil.rmtree(tmp_path / "cache")
    again = qsf("run", REPO, "-p", "Once upon a time", "-n", 4, "--temp", 0)
    assert again.stdout == done.stdout
    folder = tmp_path / "hf" / "hub" / f"models--{REPO.replace('/', '--')}"
    assert meaning_of(str(folder)).path == folder / "snapshots" / COMMIT
    shutil.rmtree(tmp_path / "hf")  # the converted file is enough
    assert qsf("run", REPO, "-p", "Once upon a time", "-n", 4, "--temp", 0).stdout == done.stdout


ELSEWHERE = "../" * 9 + "evil"


HOSTILE_HUBS: list[tuple[dict[str, Any], str]] = [
    ({"facts": {"sha": ELSEWHERE}}, "the hub names no commit: '../../"),
    ({"headers": {"ETag": f'"{ELSEWHERE}"'}}, "a strange etag: "),
    ({"headers": {"ETag": '".."'}}, "a strange etag: "),
    ({"headers": {"X-Linked-ETag": f'"{ELSEWHERE}"'}}, "a strange x-linked-etag: "),
    ({"headers": {"X-Repo-Commit": ELSEWHERE}}, "a strange x-repo-commit: "),
    ({"facts": {"siblings": [{"rfilename": "x" * 99, "size": 1}] * 99_999}}, "more than 8,388"),
    ({"facts": {"a": [{}] * 2_000_000}}, "may take "),
    (
        {"facts": {"siblings": [{"rfilename": f"{i or 'config'}.json"} for i in range(2000)]
                   + [{"rfilename": "a.safetensors", "size": 1}]}},
        "has 2001 files to convert, allowed: 2000",
    ),
    (
        {"facts": {"siblings": [{"rfilename": "a-Q4_0.gguf", "size": 10**16}]}},
        "has 10,000,000.0 GB, and ",
    ),
    ({"n_extra_bytes": 32 << 20}, "the hub sends more than was asked for"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [*HOSTILE_HUBS[:2], *(pytest.param(*hub, marks=pytest.mark.slow) for hub in HOSTILE_HUBS[2:])],
)
def test_a_hostile_hub_is_refused(
    qsf: Run,
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    vars(hub).update(changes)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "as" / "deep" / "as" / "any" / "cache"))
    done = qsf("pull", f"{REPO}:Q4_0", "-q")
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert "evil" not in {path.name for path in tmp_path.rglob("*")}


def test_without_the_hub_the_error_says_what_to_do_elsewhere(
    qsf: Run, cache: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = qsf("run", "some-org/absent", "-p", "x")
    assert "some-org/absent is not on the hub" in absent.stderr
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    offline = qsf("run", REPO, "-p", "x")
    assert offline.returncode == 1
    assert offline.stderr.count("\n") == 1
    assert f"`hf download {REPO} --local-dir tiny-model`" in offline.stderr
    with pytest.raises(ChildFailedError):
        find_model("some-org/other", is_quiet=True)


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
def test_keys_typed_while_a_model_is_converted_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    said = f"import termios; print(termios.tcgetattr(open({os.ttyname(theirs)!r}))[3])"
    monkeypatch.setattr(prepare, "child_command", lambda _words: [sys.executable, "-c", said])
    with os.fdopen(ours, "rb"), os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert not int(prepare._run_child(["convert", "model"])) & termios.ECHO
        assert termios.tcgetattr(theirs)[3] & termios.ECHO


# ---- converted while it comes, without a copy of its weights ----
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
        ("BertModel", "8bit"), ("XLMRobertaForMaskedLM", "8bit"), ("GPT2LMHeadModel", ""),
        ("LlamaForCausalLM", ""), ("Gemma3ForConditionalGeneration", ""),
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
