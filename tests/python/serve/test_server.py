"""The server with the bundled model: chat, completions, streams, limits, cancellation."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make.commands import Run
from make.refusals import refusals
from make.served import Client, break_after, serving, started, wait_for
from qsf import Model, QsfFormatError
from qsf.serve.server import log_json, log_line

START = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    with serving(tiny_chat_8bit, parallel=3, queue=4, constraints=False) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tiny_llama_8bit: Path) -> Iterator[Client]:
    with serving(tiny_llama_8bit, parallel=2) as found:
        yield found


# ---- text ----
def test_a_completion_is_what_generate_says(plain: Client, tiny_llama_8bit: Path) -> None:
    with Model(tiny_llama_8bit, ram_budget=None) as model:
        for seed in (1, 2):
            text = "".join(model.generate(START, max_tokens=30, seed=seed))
            fields = {"prompt": START, "max_tokens": 30, "seed": seed}
            whole = plain.post("/v1/completions", fields)
            assert whole.status == 200, whole.body
            choice = whole.json["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "length")
            assert whole.json["usage"]["completion_tokens"] == 30
            events = plain.post("/v1/completions", {**fields, "stream": True}).events
            assert events[-1] == "[DONE]"
            assert "".join(e["choices"][0]["text"] for e in events[:-1]) == text


def test_a_chat_is_what_chat_says(client: Client, tiny_chat_8bit: Path) -> None:
    with Model(tiny_chat_8bit, ram_budget=None) as model:
        text = "".join(model.chat(CHAT, max_tokens=25, seed=3))
    fields = {"messages": CHAT, "max_tokens": 25, "seed": 3}
    whole = client.post("/v1/chat/completions", fields).json
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["timings"]["seed"] == 3
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.post("/v1/chat/completions", {**fields, **options})
    assert stream.headers["content-type"] == "text/event-stream"
    *events, usage, done = stream.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_several_choices_have_seeds_of_their_own(client: Client) -> None:
    fields = {"prompt": START, "max_tokens": 12, "temperature": 1.5}
    whole = client.post("/v1/completions", {**fields, "seed": 7, "n": 3}).json
    texts = [choice["text"] for choice in whole["choices"]]
    for i, text in enumerate(texts):
        one = client.post("/v1/completions", {**fields, "seed": 7 + i}).json
        assert one["choices"][0]["text"] == text
    assert len(set(texts)) > 1
    assert whole["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    two = client.post("/v1/completions", {**fields, "prompt": [START, [1, 2, 3]], "seed": 7}).json
    assert two["choices"][0]["text"] == texts[0]
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_log_probabilities(client: Client) -> None:
    fields = {"messages": CHAT, "max_tokens": 5, "temperature": 0}
    content = client.post(
        "/v1/chat/completions", {**fields, "logprobs": True, "top_logprobs": 3}
    ).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for entry in content:
        first, *others = entry["top_logprobs"]
        assert first["token"] == entry["token"]
        assert first["logprob"] == entry["logprob"] <= 0
        assert [o["logprob"] for o in others] == sorted(o["logprob"] for o in others)[::-1]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    text = client.post("/v1/completions", prompt=START, max_tokens=5, logprobs=2, temperature=0)
    logprobs = text.json["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text.json["choices"][0]["text"]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]


def test_echo_with_logprobs_is_what_the_evaluation_says(
    plain: Client, tiny_llama_8bit: Path
) -> None:
    """As lm-eval's local-completions asks: token ids, max_tokens 1, several prompts at a time."""
    with Model(tiny_llama_8bit, ram_budget=None) as model:
        prompts = [model.tokenize(f"{START} there was a little girl named Lily. " * 6), [1]]
        rows = model.logits(prompts[0]).astype(np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    wanted = logprobs[np.arange(len(prompts[0]) - 1), prompts[0][1:]]
    fields = {"prompt": prompts, "max_tokens": 1, "echo": True, "temperature": 0, "logprobs": 3}
    for _ in range(2):  # nothing comes from a cache
        choices = plain.post("/v1/completions", fields).json["choices"]
        told = choices[0]["logprobs"]
        assert {len(values) for values in told.values()} == {len(prompts[0]) + 1}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        np.testing.assert_allclose(told["token_logprobs"][1:-1], wanted, atol=2e-5)
    tops = [max(top.values()) for top in told["top_logprobs"][1:]]
    np.testing.assert_allclose(tops[:-1], logprobs.max(axis=1)[:-1], atol=2e-5)
    assert told["token_logprobs"][-1] == tops[-1]
    events = plain.post("/v1/completions", {**fields, "stream": True}).events[:-1]
    streamed: list[list[Any]] = [[], []]
    for event in events:
        for choice in event["choices"]:
            if choice["logprobs"]:
                streamed[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert streamed == [choice["logprobs"]["token_logprobs"] for choice in choices]


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


def test_the_tokenizer_of_a_client_may_be_the_servers(plain: Client, tiny_llama_8bit: Path) -> None:
    """As lm-eval asks: the texts of special tokens are these tokens again."""
    with Model(tiny_llama_8bit, ram_budget=None) as model:
        wanted = {"bos_token": model.info.bos_id, "eos_token": model.info.eos_id}
    told = plain.get("/tokenizer_info").json
    assert set(told) == set(wanted)
    for name, token in wanted.items():
        fields = {"prompt": told[name], "add_special_tokens": False}
        assert plain.post("/tokenize", fields).json["tokens"] == [token]


def test_biases_and_penalties(client: Client) -> None:
    fields = {"prompt": START, "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def ask(**more: Any) -> list[int]:
        answer = client.post("/v1/completions", {**fields, **more, "logprobs": 0})
        text = answer.json["choices"][0]["text"]
        tokens: list[int] = client.post("/tokenize", content=text).json["tokens"]
        return tokens

    free = ask()
    assert ask(logit_bias={str(free[0]): -100})[0] != free[0]
    assert set(ask(logit_bias={"300": 100})) == {300}
    assert set(ask(logit_bias={"300": 100}, frequency_penalty=2)) == {300}  # 2 each time
    only_once = ask(logit_bias={"300": 15}, frequency_penalty=2)
    assert 0 < only_once.count(300) < 12


def test_tokens_and_texts_go_on_where_they_are_told(client: Client) -> None:
    fields = {"prompt": START, "max_tokens": 20, "temperature": 0}
    text = client.post("/v1/completions", fields).json["choices"][0]["text"]
    stop = text[10:14]
    choice = client.post("/v1/completions", {**fields, "stop": stop, "echo": True}).json["choices"]
    assert choice[0]["text"] == START + text[: text.index(stop)]
    assert choice[0]["finish_reason"] == "stop"
    prompts = [START, "The cat"]
    both = client.post("/v1/completions", prompt=prompts, max_tokens=1, echo=True).json["choices"]
    assert [each["text"].startswith(p) for each, p in zip(both, prompts, strict=True)] == [True] * 2
    fields = {"max_tokens": 8, "temperature": 0}
    first = client.post("/v1/chat/completions", {**fields, "messages": CHAT}).json
    text = first["choices"][0]["message"]["content"]
    begun = [*CHAT, {"role": "assistant", "content": text}]
    more = client.post("/v1/chat/completions", {**fields, "messages": begun}).json
    whole = client.post(
        "/v1/chat/completions", {**fields, "max_tokens": 16, "messages": CHAT}
    ).json["choices"][0]["message"]["content"]
    assert text + more["choices"][0]["message"]["content"] == whole


# ---- errors ----
MESSAGE = {"role": "user", "content": "x"}
WRONG: Any = [
    *refusals("chat"),
    ({"stop": ["x" * 1001]}, "stop", "1001 characters, and 1000 is the limit"),
    ({"messages": [MESSAGE] * 257}, "messages", "257 entries, and 256 is the limit"),
    ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages", "512"),
]


@pytest.mark.parametrize(("fields", "param", "said"), WRONG, ids=lambda v: str(v)[:40])
def test_an_error_names_the_field_and_the_numbers(
    client: Client, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = client.post("/v1/chat/completions", {"messages": [MESSAGE], **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert said in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        *refusals("prompts"),
        ([START] * 65, "65 entries, and 64 is the limit"),
        (list(range(512)), "512 tokens and max_tokens is 16, but the context holds 512"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_prompts_are_checked(plain: Client, prompt: object, said: str) -> None:
    answer = plain.post("/v1/completions", {"prompt": prompt})
    assert answer.status == 400
    assert answer.error["param"] == "prompt"
    assert said in answer.error["message"]


def test_what_is_unknown_is_named_and_refused_by_a_strict_server(
    client: Client, tiny_llama_8bit: Path
) -> None:
    fields = {"prompt": START, "max_tokens": 1, "frobnicate": 1, "user": "me", "stream_options": {}}
    answer = client.post("/v1/completions", {**fields, " \x1d\r\n\u00e9": 1})
    assert (answer.status, answer.headers["x-qsf-ignored"]) == (200, "?????, frobnicate")
    answer = client.post("/v1/completions", {**fields, "a" * 998: 1})  # cut at a space
    assert (answer.status, len(answer.headers["x-qsf-ignored"])) == (200, 999)
    answer = client.post("/v1/completions", fields)
    assert (answer.status, answer.headers["x-qsf-ignored"]) == (200, "frobnicate")
    with serving(tiny_llama_8bit, parallel=1, strict=True) as strict:
        answer = strict.post("/v1/completions", fields)
        assert (answer.status, answer.error["param"]) == (400, "frobnicate")


def test_a_model_has_several_names_and_others_are_404(tiny_llama_8bit: Path) -> None:
    body = {"prompt": START, "max_tokens": 1}
    words = ["org/tiny:q8"]
    with serving(tiny_llama_8bit, parallel=1, alias="mine", words=words) as client:
        for name in ("mine", "mine:latest", "tiny-llama-8bit", "org/tiny:q8", "", None):
            answer = client.post("/v1/completions", {**body, "model": name})
            assert (answer.status, answer.json["model"]) == (200, "mine")
        answer = client.post("/v1/completions", {**body, "model": "gpt-99"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "'gpt-99' is not here: mine is (--any-model" in answer.error["message"]
        assert client.post("/tokenize", content="a", model="gpt-99").status == 404
        assert client.post("/api/show", name="gpt-99").status == 404
    with serving(tiny_llama_8bit, parallel=1, any_model=True) as client:
        answer = client.post("/v1/completions", {**body, "model": "gpt-99"})
        assert (answer.status, answer.json["model"]) == (200, "tiny-llama-8bit")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be an object"),
        (b'{"temperature": NaN}', "NaN is not a number"),
        (b'{"user": "\\ud800"}', "lone surrogate"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested 71 deep, allowed: up to 64"),
        (b'{"a": ' + b"[" * 100_000, "up to 64"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "more than 4300 digits"),
        (b"\xff\xfe", "not JSON"),
    ],
    ids=range(9),
)
def test_a_body_must_be_json(client: Client, body: bytes, said: str) -> None:
    answer = client.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert any(one in answer.error["message"] for one in said.split("|"))


def test_paths_and_methods(client: Client) -> None:
    assert client.get("/v1/audio/speech").status == 404
    assert client.get("/v1/chat/completions").status == 405
    assert client.ask("POST", "/health", b"{}").status == 405
    assert client.ask("POST", "/tokenize", b"{}", content_type="text/plain").status == 415
    assert client.ask("POST", "/tokenize", b"{}", content_encoding="gzip").status == 415
    for kind in ("", "application/x-www-form-urlencoded"):
        assert client.ask("POST", "/tokenize", b'{"content": "a"}', content_type=kind).status == 200
    assert client.ask("HEAD", "/health").body == b""
    name = client.get("/v1/models").json["data"][0]["id"]
    assert client.get(f"/v1/models/{name}").json["id"] == name
    assert client.get("/v1/models/other").status == 404


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
        raise QsfFormatError("the file's chat template cannot be rendered: line 1: no")

    monkeypatch.setattr(type(client.model), "chat_tokens", fail)
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        answer = client.post(path, {name: CHAT, "max_tokens": 1})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert f"{name}: the file's chat template cannot" in answer.error["message"]


# ---- what else there is ----
def test_tokens_and_templates(client: Client) -> None:
    tokens = client.post("/tokenize", content="Once upon").json
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 512
    assert client.post("/detokenize", tokens=tokens["tokens"]).json["content"] == "Once upon"
    pieces = client.post("/tokenize", content="Once upon", with_pieces=True).json["tokens"]
    assert [p["id"] for p in pieces] == tokens["tokens"]
    prompt = client.post("/apply-template", messages=CHAT).json["prompt"]
    assert prompt.endswith("<assistant>")
    n_chat = client.post("/tokenize", messages=CHAT).json["count"]
    whole = client.post("/v1/chat/completions", messages=CHAT, max_tokens=1).json
    assert whole["usage"]["prompt_tokens"] == n_chat
    assert client.post("/detokenize", tokens=[2048]).error["param"] == "tokens"
    long = client.post("/tokenize", content="x " * 40_000)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


def test_what_tokenises_or_renders_a_chat_refuses_what_a_chat_does(client: Client) -> None:
    asked: Any = (
        {"messages": [{"role": "user", "content": "x " * 40_000}]},
        {"messages": [{"role": "developer", "content": "short"}, *CHAT]},
        {"messages": CHAT, "chat_template_kwargs": 1},
        {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user"}]},
    )
    for fields in asked:
        chat = client.post("/v1/chat/completions", max_tokens=1, **fields)
        for path in ("/apply-template", "/tokenize"):
            answer = client.post(path, **fields)
            assert answer.status == chat.status
            assert chat.status == 200 or answer.error == chat.error


def test_status_pages_have_no_text(client: Client) -> None:
    client.post("/v1/completions", prompt="zebra zebra", max_tokens=3)
    for path in ("/props", "/slots", "/metrics"):
        answer = client.get(path)
        assert answer.status == 200
        assert b"zebra" not in answer.body
    props = client.get("/props").json
    assert props["total_slots"] == 3
    assert re.match(r"in memory \d+ MB of at most .*, context 512", props["memory"])
    metrics = client.get("/metrics").body.decode()
    assert 'qsf:request_success_total{finished_reason="length"}' in metrics
    assert "qsf:time_to_first_token_seconds_count" in metrics
    for line in metrics.splitlines():
        assert line.startswith("# TYPE ") or float(line.rpartition(" ")[2]) >= 0


# ---- load and cancellation ----
def slow_request(path: str = "/v1/completions", **fields: Any) -> bytes:
    """A request for a text that ends only with the context."""
    body = {"prompt": START, "max_tokens": 500, "ignore_eos": True, "stream": True, **fields}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class Paused:
    """Holds the engine before each pass until it is released."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.n_passes = 0
        engine = client.server.scheduler._engine
        evaluate = engine.evaluate

        def held(items: Any) -> Any:
            self.n_passes += 1
            assert self.gate.wait(20)
            return evaluate(items)

        monkeypatch.setattr(engine, "evaluate", held)


def test_a_full_queue_is_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = Paused(client, monkeypatch)
    fields = {"prompt": START, "max_tokens": 2}
    with ThreadPoolExecutor(7) as pool:
        futures = [pool.submit(client.post, "/v1/completions", fields) for _ in range(7)]
        scheduler = client.server.scheduler
        wait_for(lambda: len(scheduler.running) + scheduler.n_waiting == 7)
        answer = client.post("/v1/completions", fields)
        paused.gate.set()
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert "4 requests wait, and 4 is the limit" in answer.error["message"]
        assert {future.result().status for future in futures} == {200}


@pytest.mark.parametrize(
    ("where", "how"), [("waiting", "close"), ("prompt", "reset"), ("decoding", "close")]
)
def test_who_goes_is_not_served_on(
    client: Client, monkeypatch: pytest.MonkeyPatch, where: str, how: str
) -> None:
    scheduler = client.server.scheduler
    n_before = client.server._metrics.ends.get("cancelled", 0)
    paused = Paused(client, monkeypatch)
    others = [client.connect() for _ in range(3 if where == "waiting" else 0)]
    for other in others:
        other.sendall(slow_request(max_tokens=3))
    wait_for(lambda: len(scheduler.running) + scheduler.n_waiting == len(others))
    sock = client.connect()
    sock.sendall(slow_request())
    wait_for(lambda: len(scheduler.running) + scheduler.n_waiting == len(others) + 1)
    wait_for(lambda: paused.n_passes > 0)
    if where == "decoding":
        paused.gate.set()
        assert sock.recv(65536)
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    if where != "decoding":
        wait_for(
            lambda: (
                any(job.is_cancelled for job in scheduler.running)
                or len(scheduler.running) + scheduler.n_waiting == len(others)
            )
        )
    paused.gate.set()
    wait_for(lambda: not scheduler.running and not scheduler.n_waiting)
    wait_for(lambda: client.server._metrics.ends.get("cancelled", 0) == n_before + 1)
    for other in others:
        other.close()
    assert client.post("/v1/completions", prompt=START, max_tokens=2).status == 200


def test_a_failure_in_the_middle_of_a_stream_is_an_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(client, monkeypatch, 3)
    events = client.post("/v1/completions", prompt=START, max_tokens=9, stream=True).events
    assert events[-1]["error"]["code"] == "engine_error"
    assert "Input/output error" in events[-1]["error"]["message"]
    whole = client.post("/v1/completions", prompt=START, max_tokens=9)
    assert whole.status == 500
    assert whole.headers["x-should-retry"] == "false"
    monkeypatch.undo()
    assert client.post("/v1/completions", prompt=START, max_tokens=9).status == 200


# ---- the command ----
def test_the_command_serves_and_ends(tiny_llama_4bit: Path) -> None:
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_4bit), "--port", "0"]
    with started(words) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("qsf serve: tiny-llama-4bit at http://127.0.0.1:")
        url = line.split()[-1]
        memory = r"qsf serve: in memory \d+ MB of at most [\d.]+ [MG]B, context 512, 4 requests "
        assert re.match(memory, process.stderr.readline())
        body = json.dumps({"prompt": START, "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
    line, *_ = rest.splitlines()
    assert re.fullmatch(
        r"[\d:]{8} POST /v1/completions 200 [\d.]+ s prompt .* answer 4 length", line
    )
    assert START not in rest


def test_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "time": "2026-11-28T10:11:12", "key": "", "request_id": "0" * 32, "client_id": "",
        "method": "GET", "path": "/a\x1b[1m", "status": 200, "seconds": 0.5, "note": "",
    }  # fmt: skip
    log_line(record)
    log_line({**record, "key": "abcd", "client_id": "mine", "note": "prompt 3"})
    log_json(record)
    assert capsys.readouterr().err.splitlines() == [
        "10:11:12 GET /a\\u001b[1m 200 0.500 s",
        "10:11:12 key abcd id mine GET /a\\u001b[1m 200 0.500 s prompt 3",
        '{"time": "2026-11-28T10:11:12", "request_id": "00000000000000000000000000000000", '
        '"method": "GET", "path": "/a\\u001b[1m", "status": 200, "seconds": 0.5}',
    ]


def test_the_end_of_the_terminal_keeps_sessions(tiny_llama_4bit: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_4bit), "--port", "0"]
    with started([*words, "--session-dir", str(tmp_path)]) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        body = json.dumps({"prompt": f"{START} " * 9, "max_tokens": 4}).encode()
        headers = {"content-type": "application/json", "x-request-id": "mine"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        urllib.request.urlopen(request, timeout=60).close()
        assert "in memory" in process.stderr.readline()
        assert " id mine POST /v1/completions 200" in process.stderr.readline()
        process.stderr.close()  # as the terminal
        for _ in range(2):  # one of the system, one of the shell
            process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
    assert len(list(tmp_path.glob("*.qsfs"))) == 1


def test_a_port_in_use_and_a_plan(tiny_llama_4bit: Path, plain: Client, qsf: Run) -> None:
    done = qsf("serve", tiny_llama_4bit, "--port", plain.port, "--ram-budget", "0")
    assert done.returncode == 1
    said = f"qsf serve: error: --host 127.0.0.1 --port {plain.port}: Address already in use"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    for switch, n_mb in ("off", 36), ("on", 44):
        asked = ("--plan", "--constraints", switch, "--ram-budget", "0")
        done = qsf("serve", tiny_llama_4bit, *asked)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split("reserved for Python")[1].split()[0]) == n_mb


# ---- limits of answers ----
def test_more_tokens_than_the_context_has_are_cut_and_said(
    plain: Client, tiny_llama_8bit: Path
) -> None:
    fields = {"prompt": list(range(500)), "ignore_eos": True}
    for most, n_tokens in ((5000, 12), (-1, 12), (12, 12), (3, 3)):
        answer = plain.post("/v1/completions", {**fields, "max_tokens": most})
        assert answer.json["usage"]["completion_tokens"] == n_tokens
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.headers.get("x-qsf-max-tokens") == ("12" if most == 5000 else None)
    with serving(tiny_llama_8bit, parallel=1, strict=True) as strict:
        answer = strict.post("/v1/completions", {**fields, "max_tokens": 13})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (
            "500 tokens and max_tokens is 13, but the context holds 512"
            in (answer.error["message"])
        )


def test_a_top_k_of_minus_one_is_off(plain: Client) -> None:
    texts = {
        plain.post(
            "/v1/completions", prompt=START, max_tokens=20, seed=3, temperature=2.0, top_k=top_k
        ).json["choices"][0]["text"]
        for top_k in (-1, 0)
    }
    assert len(texts) == 1


def test_whole_numbers_may_be_written_as_floats(plain: Client) -> None:
    fields = {"prompt": START, "temperature": 0, "stream_options": None}
    texts = {
        plain.post("/v1/completions", {**fields, "max_tokens": n, "n": one, "seed": one}).json[
            "choices"
        ][0]["text"]
        for n, one in ((4, 1), (4.0, 1.0))
    }
    assert len(texts) == 1
    options = {"num_predict": 2.0, "top_k": 3.0}
    answer = plain.post("/api/generate", {"prompt": START, "stream": False, "options": options})
    assert answer.json["eval_count"] == 2
    wrong = plain.post("/v1/completions", {**fields, "max_tokens": 4.5})
    assert wrong.error["param"] == "max_tokens"
    assert "not 4.5" in wrong.error["message"]
