"""``/api/pull``: clients get models of the hub by name, while the server answers others."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from make.fake_hub import REPO, FakeHub
from make.fake_hub import hub as hub
from make.served import Client, started
from qsf.cli import serve
from qsf.cli.serve_options import parse
from qsf.cli.serve_pull import Pulls, served_name
from qsf.errors import QsfArgumentError, QsfMemoryError
from qsf.find.names import hub_address, hub_name
from qsf.native.binding import describe_machine

ollama = pytest.importorskip("ollama")
ASKED: Any = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
BUDGET_MB = 130


@contextmanager
def pulling(path: Path, *options: str) -> Iterator[Client]:
    """A server in a process of its own."""
    words = [sys.executable, "-m", "qsf", "serve", str(path), "--port", "0", "-q", *options]
    with started([*words, "--allow-pull", "--ram-budget", str(BUDGET_MB)]) as process:
        assert process.stderr is not None
        while " at http" not in (line := process.stderr.readline()):
            assert line
        client = Client(int(line.rpartition(":")[2]), None, None)  # type: ignore[arg-type]
        yield client
        status = Path(f"/proc/{process.pid}/status").read_text("ascii")
        assert int(status.split("VmHWM:")[1].split()[0]) <= BUDGET_MB << 10
        process.terminate()
        assert process.wait(30) == 0


def lines_of(client: Client, name: str) -> list[Any]:
    answer = client.post("/api/pull", model=name)
    assert answer.status == 200
    return [json.loads(line) for line in answer.body.splitlines()]


def test_a_model_is_pulled_and_answers(hub: FakeHub, tiny_chat_8bit: Path, tmp_path: Path) -> None:
    hub.pause_seconds = 0.05
    with pulling(tiny_chat_8bit, "--session-dir", str(tmp_path / "kept")) as client:
        wrong = client.post("/v1/completions", {**ASKED, "model": REPO})
        assert (wrong.status, wrong.error["code"]) == (404, "model_not_found")
        lines: list[Any] = []
        ai = ollama.Client(host=client.url)

        def pull() -> None:
            parts = ai.pull(f"{REPO}:latest", stream=True)
            lines.extend(part.model_dump(exclude_none=True) for part in parts)

        worker = threading.Thread(target=pull)
        worker.start()
        n_answers = 0
        while worker.is_alive():
            assert client.post("/v1/completions", {**ASKED, "model": None}).status == 200
            n_answers += 1
        assert n_answers > 3
        assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
        sizes = [line for line in lines if "total" in line]
        for status in (f"pulling {REPO}", f"converting {REPO}"):
            done = [line["completed"] for line in sizes if line["status"] == status]
            assert len(done) > 1
            assert done == sorted(done)
        assert all(0 <= line["completed"] <= line["total"] for line in sizes)
        answer = client.post("/v1/completions", {**ASKED, "model": REPO}).json
        assert answer["choices"][0]["text"].startswith(", there was a")
        assert client.get(f"/v1/models/{REPO}").json["status"]["value"] == "loaded"
        names = [entry["name"] for entry in client.get("/api/tags").json["models"]]
        assert names == [f"{tiny_chat_8bit.stem}:latest", f"{REPO}:latest"]
        hub.fetched.clear()
        for same in (REPO, f"hf.co/{REPO}?{'A' * 300}", f"https://huggingface.co/{REPO}/tree/main"):
            assert lines_of(client, same)[-1] == {"status": "success"}
            assert client.post("/v1/completions", {**ASKED, "model": same}).status == 200
        assert hub.fetched == []
        assert len(client.get("/v1/models").json["data"]) == 2  # strangers' spellings take no room
        long = client.post("/api/pull", model=f"hf.co/{REPO}?{'A' * 100_000}", stream=False)
        assert long.status == 400
        assert "at most 400 characters" in long.json["error"]
        assert ai.generate(f"{REPO}:latest", "Once", options={"num_predict": 2}).done
        ai._client.close()
        assert client.post("/v1/completions", {**ASKED, "model": tiny_chat_8bit.stem}).status == 200
    folders = {path.name for path in (tmp_path / "kept").iterdir()}
    assert folders == {tiny_chat_8bit.stem, serve._folder_name(REPO)}


def test_what_cannot_be_pulled_says_why(
    hub: FakeHub, tiny_chat_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pulling(tiny_chat_8bit) as client:
        for name, reason in (
            ("some-org/absent", "some-org/absent is not on the hub"),
            ("here", "'here' is no name on the hub: org/name is, or qwen3:4b"),
            (f"{tmp_path}", "is no name on the hub"),
            ("../here", "is no name on the hub"),
            ("llama3.2", "or llama3.2:1b"),
            (f"{REPO}:9bit", "9bit"),
            ("", "is no name on the hub"),
        ):
            wrong = client.post("/api/pull", model=name, stream=False)
            assert wrong.status == (500 if "absent" in name else 400)
            assert reason in wrong.json["error"]
            stream = client.post("/api/pull", model=name).body.splitlines()
            assert reason in json.loads(stream[-1])["error"]
        hub.close()
        answer = lines_of(client, REPO)[-1]
        assert "could not be downloaded" in answer["error"]
        assert "\n" not in answer["error"]


def test_a_client_that_goes_ends_the_work(hub: FakeHub, tiny_chat_8bit: Path) -> None:
    hub.pause_seconds = 0.5
    with pulling(tiny_chat_8bit) as client, client.connect() as sock:
        body = json.dumps({"model": REPO})
        head = f"POST /api/pull HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(f"{head}{body}".encode())
        while not hub.n_bytes_sent:
            time.sleep(0.1)
        sock.close()
        n_fetched = -1
        while n_fetched != hub.n_bytes_sent:
            n_fetched = hub.n_bytes_sent
            time.sleep(1.5)
        assert n_fetched < len(hub.files["model.safetensors"])
        hub.pause_seconds = 0
        assert lines_of(client, REPO)[-1] == {"status": "success"}


def test_a_model_that_does_not_fit_is_not_served(
    tiny_chat_8bit: Path, tiny_llama_8bit: Path
) -> None:
    """Judged as if it were alone: what loaded models take does not count."""
    hosts: Any = SimpleNamespace(taken_bytes=0, budget_bytes=30 << 20)
    plans: dict[str, Any] = {}
    request = parse([str(tiny_chat_8bit), "--allow-pull"])
    with pytest.raises(
        QsfMemoryError, match=r"m is on the disk now, but needs \d+ MB, and .* 30: "
    ):
        serve._check(plans, request, False, hosts, "m", tiny_llama_8bit)
    assert plans == {}
    hosts.taken_bytes = describe_machine().resident_bytes + (100 << 20)
    serve._check(plans, request, False, hosts, "m", tiny_llama_8bit)
    assert plans["m"].is_enough


def test_names_are_read_without_looking_at_files(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, want in (
        ("org/name", "org/name"), ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("https://huggingface.co/org/name", "org/name"), ("qwen3:4b", "unsloth/Qwen3-4B-GGUF"),
    ):  # fmt: skip
        assert hub_address(name) == f"https://huggingface.co/{want}"
    for name, want in (
        ("hf.co/org/name?x:q4_k_m", "org/name"), ("org/name:q4_k_m", "org/name:Q4_K_M"),
        ("Qwen3:4B", "qwen3:4b"), ("org/name:8BIT", "org/name:8bit"),
    ):  # fmt: skip
        assert hub_name(name) == served_name(name) == want
    assert served_name("a model of mine") == "a model of mine"
    with pytest.raises(QsfArgumentError, match="is not a type of weights"):
        hub_name(f"org/name:Q4_{'A' * 99}")
    for wrong in ("name", "org/name/more", "a b/c", "/etc/passwd", "file://x/y", "org/../x"):
        with pytest.raises(QsfArgumentError, match="is no name on the hub"):
            hub_address(wrong)


def test_a_server_takes_only_so_many_models() -> None:
    pulls = Pulls({f"org/{i}": Path() for i in range(200)}, lambda *_: None)
    with pytest.raises(QsfArgumentError, match="has 200 models, which is its most"):
        asyncio.run(anext(pulls.lines("org/other")))
