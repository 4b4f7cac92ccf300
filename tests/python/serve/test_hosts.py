"""Several models in one server: loaded when they are asked for, inside one budget."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from make.served import Client, serving, started
from qsf import Model
from qsf.cli import serve
from qsf.cli.serve_options import ServeOptions, parse
from qsf.errors import QsfMemoryError
from qsf.shell.arguments import UsageError

ASKED: Any = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def paths(tiny_chat_8bit: Path, tiny_llama_4bit: Path, tiny_llama_8bit: Path) -> dict[str, Path]:
    return {"chat": tiny_chat_8bit, "four": tiny_llama_4bit, "eight": tiny_llama_8bit}


@pytest.fixture
def client(paths: dict[str, Path]) -> Iterator[Client]:
    """A server whose memory holds two of three models."""

    def load(name: str, *_: object) -> tuple[Model, str]:
        if len(found.server.hosts.loaded) == 2:
            raise QsfMemoryError("no room")
        sessions = ServeOptions(parallel=1).sessions()[0]
        return Model(paths[name], ram_budget=None, threads=1, **sessions), ""

    with serving(paths["chat"], paths=paths, load=load, parallel=1, queue_seconds=1.0) as found:
        yield found


def said(client: Client, name: str | None, **fields: Any) -> str:
    answer = client.post("/v1/completions", {**ASKED, "model": name, **fields})
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def loaded(client: Client) -> set[str]:
    entries = client.get("/v1/models").json["data"]
    return {entry["id"] for entry in entries if entry["status"]["value"] == "loaded"}


def test_models_are_loaded_when_asked_for_and_the_least_used_leaves(
    client: Client, paths: dict[str, Path]
) -> None:
    assert loaded(client) == {"chat"}
    texts: dict[str, str] = {}
    for name, there in (
        ("four", {"chat", "four"}),
        ("chat", {"chat", "four"}),
        ("eight", {"chat", "eight"}),
        ("four", {"eight", "four"}),
        (None, {"eight", "four"}),
    ):
        text = said(client, name)
        assert texts.setdefault(name or "four", text) == text
        assert loaded(client) == there, name
    for name, path in paths.items():
        with Model(path, ram_budget=None) as model:
            pieces = model.generate(ASKED["prompt"], max_tokens=8, temperature=0)
            assert "".join(pieces) == texts[name]
    names = [entry["name"] for entry in client.get("/api/tags").json["models"]]
    assert names == [f"{name}:latest" for name in paths]
    there = {entry["name"] for entry in client.get("/api/ps").json["models"]}
    assert there == {"eight:latest", "four:latest"}
    assert client.get("/v1/models/chat").json["meta"]["n_vocab"] > 0
    shown = client.post("/api/show", model="four:latest").json
    assert shown["details"]["quantization_level"] == "4bit"


def test_an_unknown_name_is_404_in_the_form_of_each_client(client: Client) -> None:
    wrong = client.post("/v1/completions", {**ASKED, "model": "five"})
    assert (wrong.status, wrong.error["code"]) == (404, "model_not_found")
    assert "'five' is not here: chat, four, eight are" in wrong.error["message"]
    wrong = client.post("/v1/messages", messages=[], model="five", max_tokens=1)
    assert (wrong.status, wrong.json["type"]) == (404, "error")
    wrong = client.post("/api/chat", messages=[], model="five")
    assert wrong.status == 404
    assert isinstance(wrong.json["error"], str)
    assert client.get("/v1/models/five").status == 404
    assert loaded(client) == {"chat"}
    lines = client.post("/api/pull", model="four:latest").body.splitlines()
    assert json.loads(lines[-1]) == {"status": "success"}
    assert client.post("/api/pull", name="chat", stream=False).json == {"status": "success"}
    wrong = client.post("/api/pull", model="five")
    assert wrong.status == 404
    assert "--allow-pull lets clients get one" in wrong.json["error"]


def test_one_that_answers_stays_and_who_waits_is_not_passed_by(client: Client) -> None:
    said(client, "four")
    streams = []
    for name in ("chat", "four"):
        stream = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        body = {**ASKED, "model": name, "max_tokens": 400, "ignore_eos": True, "stream": True}
        head = {"content-type": "application/json"}
        stream.request("POST", "/v1/completions", json.dumps(body), head)
        streams.append(stream)
        answer = stream.getresponse()
        assert answer.readline().startswith(b"data: ")
        if name == "chat":
            first = answer
    results: list[str] = []
    waiting = threading.Thread(target=lambda: results.append(said(client, "eight")))
    waiting.start()
    streams[0].close()  # its client goes: the model is idle
    first.close()
    waiting.join(30)
    assert results
    assert loaded(client) == {"four", "eight"}
    streams[1].close()
    answer.close()


def wait_for(client: Client, names: set[str]) -> None:
    for _ in range(600):
        if loaded(client) == names:
            return
        time.sleep(0.05)
    pytest.fail(f"{loaded(client)} are in memory, not {names}")


def expires_in(client: Client, name: str) -> float:
    """How many seconds a model says it stays."""
    entries = {entry["name"]: entry for entry in client.get("/api/ps").json["models"]}
    stamp = datetime.fromisoformat(entries[f"{name}:latest"]["expires_at"].replace("Z", "+00:00"))
    return stamp.timestamp() - time.time()


def test_a_request_says_how_long_its_model_stays(client: Client) -> None:
    """And what it answers when it is back is the same."""
    chat: Any = {"model": "chat", "prompt": "Tell me a story", "stream": False}
    chat["options"] = {"temperature": 0, "num_predict": 8}
    assert expires_in(client, "chat") > 1e9
    for keep, least, most in (
        ("5m", 290, 301), ("1h30m", 5390, 5401), (20, 15, 21), ("7", 2, 8), (-1, 1e9, 1e10),
        ("-1m", 1e9, 1e10), (1.5e300, 1e9, 1e10),
    ):  # fmt: skip
        want = client.post("/api/generate", {**chat, "keep_alive": keep}).json
        assert least < expires_in(client, "chat") < most, keep
    wrongs: Any = ("5 minutes", "", "m", [], True, {}, "1e3")
    for keep in wrongs:
        wrong = client.post("/api/generate", {**chat, "keep_alive": keep})
        assert (wrong.status, "keep_alive must be seconds" in wrong.json["error"]) == (400, True)
    said(client, "chat")  # says nothing of it: as the server was told
    said(client, "four")
    done = client.post("/api/chat", model="chat", keep_alive=0, stream=False).json
    assert (done["done"], done["done_reason"]) == (True, "unload")
    wait_for(client, {"four"})
    wrong = client.post("/api/generate", model="eight:latest", keep_alive=0)  # not to be loaded
    assert (wrong.status, wrong.json["error"]) == (404, "eight is not in memory")
    assert loaded(client) == {"four"}
    client.post("/api/embed", model="four", input="a", keep_alive="200ms")
    wait_for(client, set())
    assert client.get("/health").status == client.get("/metrics").status == 200
    missing = client.get("/props")
    assert (missing.status, missing.error["code"]) == (503, "not_loaded")
    again = client.post("/api/generate", {**chat, "keep_alive": 0}).json
    assert again["response"] == want["response"]
    wait_for(client, set())


def test_a_server_says_how_long_its_models_stay(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    """One model leaves too, and its conversations are kept."""
    fields: Any = {"prompt": "Once upon a time " * 12, "max_tokens": 40, "temperature": 0}
    kept = str(tmp_path / "kept")
    with serving(tiny_chat_8bit, keep_alive=0.3, session_dir=kept) as client:
        wait_for(client, set())
        texts = set()
        for n_cached in (0, 1):
            answer = client.post("/v1/completions", fields).json
            texts.add(answer["choices"][0]["text"])
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == n_cached
            wait_for(client, set())
        assert len(texts) == 1
        stream = client.post("/v1/completions", {**fields, "max_tokens": 200, "stream": True})
        assert stream.events[-1] == "[DONE]"
        client.post("/api/generate", prompt="a", keep_alive=-1, options={"num_predict": 1})
        assert loaded(client)
    for words in (["--keep-alive", "soon"], ["--keep-alive", ""]):
        with pytest.raises(UsageError, match='seconds, or a text such as "5m"'):
            parse(["m.qsf", *words])
    assert parse(["m.qsf", "--keep-alive", "1m30s"]).serving.keep_alive == 90


def test_they_share_one_budget_and_their_conversations_last(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """In a process of its own, whose peak the budget is."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name, path in paths.items():
        (folder / f"{name}.qsf").symlink_to(path)
    words = [
        *(sys.executable, "-m", "qsf", "serve", str(folder), "--port", "0", "-q"),
        *("--session-dir", str(tmp_path / "kept"), "--parallel", "2", "--kv-type", "f32"),
        *("--constraints", "off", "--ram-budget"),
    ]
    plan = subprocess.run([*words, "200", "--plan"], capture_output=True, text=True, check=True)
    totals = [float(line.split()[1]) for line in plan.stdout.splitlines() if " total " in line]
    assert len(totals) == 3
    budget_mb = int(max(totals)) + 3  # for one of them
    words.append(str(budget_mb))
    with started(words) as process:
        assert process.stderr is not None
        while " at http" not in (line := process.stderr.readline()):
            assert line
        assert line.startswith("qsf serve: chat, eight, four at ")
        client = Client(int(line.rpartition(":")[2]), None, None)  # type: ignore[arg-type]
        texts = {name: said(client, name, max_tokens=40) for name in paths}
        assert len(loaded(client)) < 3
        for name, text in texts.items():
            answer = client.post(
                "/v1/completions", {**ASKED, "model": name, "prompt": ASKED["prompt"] + text}
            ).json
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
        status = Path(f"/proc/{process.pid}/status").read_text("ascii")
        assert int(status.split("VmHWM:")[1].split()[0]) <= budget_mb << 10
        process.terminate()
        assert process.wait(30) == 0
    assert {entry.name for entry in (tmp_path / "kept").iterdir()} == set(paths)


def test_models_are_called_what_users_call_them(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what the files of converted models are called."""
    kept = tmp_path / "some-4bit-0123abcd.qsf"
    monkeypatch.setattr("qsf.cli.serve.find_model", lambda _word, **_options: kept)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.q4.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    own = tmp_path / "own"
    own.mkdir()
    for name in ("a", "b"):
        (own / f"{name}.qsf").symlink_to(paths["chat"])

    def names(*words: object) -> list[str]:
        asked: Any = SimpleNamespace(
            models=[*map(str, words)],
            is_quiet=True,
            is_yes=True,
            serving=ServeOptions(),
            opening=SimpleNamespace(draft="auto", adapters=()),
        )
        found = serve.find_models(asked)
        assert not isinstance(found, int)
        return [*found]

    gguf, folder = tmp_path / "models" / "small.q4.gguf", tmp_path / "folder"
    assert names("org/name") == ["org/name"]
    assert names(gguf) == ["small.q4"]
    assert names(folder) == ["folder"]
    assert names(own) == ["a", "b"]
    assert names(own / "b.qsf", gguf, "qwen3:4b") == ["b", "small.q4", "qwen3:4b"]


def test_a_name_without_its_suffixes_is_the_model(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf.qsf").symlink_to(tiny_chat_8bit)
    with serving(tmp_path / "m.gguf.qsf") as one:
        names = {"m": 200, "m.gguf": 200, "m.gguf:latest": 200, "": 200, "gpt-99": 404}
        asked = {name: one.post("/v1/completions", {**ASKED, "model": name}) for name in names}
        assert {name: answer.status for name, answer in asked.items()} == names
        assert "m.gguf is" in asked["gpt-99"].error["message"]


def test_each_model_has_a_folder_of_its_own() -> None:
    names = ["a b", "a-b", "a/b", "..", ".", "a.b", "qwen3:4b"]
    folders = [serve._folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[1] == "a-b"
    assert folders[5] == "a.b"
    assert not {".", ".."} & set(folders)
