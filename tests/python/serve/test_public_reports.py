"""What clients of other servers send and expect, by public reports of what failed there."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.served import Client, serving
from qsf.cli.serve import _folder_name

CHAT: Any = [{"role": "user", "content": "Hi"}]
UNIQUE: Any = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
UNIQUE |= {"uniqueItems": True}  # which no answer can have
NOT_ENFORCED = "x-qsf-unenforced"


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    with serving(tiny_chat_8bit) as found:
        yield found


def form(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


# ---- a schema's keywords that tokens cannot follow ----


def test_what_cannot_be_enforced_is_checked_and_said(client: Client) -> None:
    pytest.importorskip("llguidance")
    fields: Any = {"messages": CHAT, "max_tokens": 60, "response_format": form(UNIQUE)}
    answer = client.post("/v1/chat/completions", fields)
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=no"
    fields["response_format"] = form({**UNIQUE, "minItems": 0, "maxItems": 1})
    answer = client.post("/v1/chat/completions", fields)
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=yes"
    fields["response_format"] = form(UNIQUE)
    answer = client.post("/v1/chat/completions", {**fields, "max_tokens": 1})
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=unknown"
    answer = client.post("/v1/chat/completions", {**fields, "stream": True})
    assert answer.headers[NOT_ENFORCED] == "uniqueItems"
    assert b"\n: x-qsf-unenforced: uniqueItems; holds=no\n\n" in answer.body


# ---- a request's fault ----


def test_content_that_is_null(client: Client) -> None:
    """OpenAI's own answers have it; of others it is the request's fault."""
    turns = [*CHAT, {"role": "assistant", "content": None}, *CHAT]
    assert client.post("/v1/chat/completions", messages=turns, max_tokens=1).status == 200
    for role in ("user", "system"):
        turns = [{"role": role, "content": None}, *CHAT]
        answer = client.post("/v1/chat/completions", messages=turns, max_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert f"the content of a message of '{role}' is null" in answer.error["message"]


def test_what_a_template_raises_is_the_requests_fault(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[int]:
        raise qsf.QsfFormatError("the file's chat template cannot be rendered: line 1: no")

    monkeypatch.setattr(type(client.model), "chat_tokens", fail)
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = client.post(path, {name: CHAT, "max_tokens": 1})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert f"{name}: the file's chat template cannot" in answer.error["message"]


# ---- forms of other servers ----


def test_log_probabilities_of_completions(client: Client) -> None:
    fields: Any = {"prompt": "a \u65e5", "max_tokens": 12, "logprobs": 20, "ignore_eos": True}
    logprobs = client.post("/v1/completions", fields).json["choices"][0]["logprobs"]
    assert {len(top) for top in logprobs["top_logprobs"]} == {20}
    fields |= {"echo": True, "max_tokens": 0}
    names = client.post("/v1/completions", fields).json["choices"][0]["logprobs"]["tokens"]
    assert names[-3:] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    fields = {"prompt": "hello world", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.post("/v1/completions", fields).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    longer = client.post("/v1/completions", {**fields, "max_tokens": 1}).json["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:-1] == choice["logprobs"]["token_logprobs"]
    events = client.post("/v1/completions", {**fields, "stream": True}).events
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hello world"
    assert client.post("/v1/chat/completions", messages=CHAT, max_tokens=0).status == 400


def test_llama_servers_forms(client: Client) -> None:
    fields: Any = {"prompt": "hello", "n_predict": 1, "temperature": 0}
    first = client.post("/completion", {**fields, "n_probs": 3}).json
    (entry,) = first["completion_probabilities"]
    assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert entry["top_logprobs"][0]["id"] == entry["id"]
    assert len(entry["top_logprobs"]) == 3
    for bias in ([entry["id"], False], [entry["id"], -100], [entry["token"], False]):
        other = client.post("/completion", {**fields, "logit_bias": [bias]}).json
        assert other["content"] != first["content"]
    assert (
        "completion_probabilities" not in client.post("/completion", {**fields, "n_probs": 0}).json
    )
    empty = client.post("/completion", {**fields, "n_predict": 0}).json
    assert (empty["content"], empty["tokens_predicted"]) == ("", 0)
    for wrong in ([[1]], [1], [["a", "b"]], [[True, 1]], [[-1, 1]]):
        answer = client.post("/completion", {**fields, "logit_bias": wrong})
        assert (answer.status, answer.error["param"]) == (400, "logit_bias")


def test_http_1_0_has_no_host(client: Client) -> None:
    assert client.send(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    head = b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert client.send(head).startswith(b"HTTP/1.1 403 ")


def test_each_model_has_a_folder_of_its_own() -> None:
    names = ["a b", "a-b", "a/b", "..", ".", "a.b", "qwen3:4b"]
    folders = [_folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[1] == "a-b"
    assert folders[5] == "a.b"
    assert not {".", ".."} & set(folders)


# ---- names of fields, in the words of each API ----


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/api/chat", {"options": {"num_predict": "x"}}, "options.num_predict"),
        ("/completion", {"prompt": "a", "n_predict": "x"}, "n_predict"),
        ("/v1/messages", {"system": 5, "max_tokens": 1, "messages": CHAT}, "system"),
        ("/api/embeddings", {"prompt": 5}, "prompt"),
    ],
)
def test_errors_name_the_clients_field(client: Client, path: str, fields: Any, name: str) -> None:
    answer = client.post(path, fields)
    assert answer.status == 400
    assert name in json.dumps(answer.json)
