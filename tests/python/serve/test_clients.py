"""The official clients of OpenAI, Anthropic, Ollama, and what they rely on."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from make.harmony import ANSWER, CALL, TEXT, THOUGHTS, make_harmony, make_with_tokens
from make.refusals import refusals
from make.served import Client, break_after, scripted, serving
from qsf_converter import convert

CHAT: Any = [{"role": "user", "content": "Tell me a story"}]
FIELDS: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def text(client: Client) -> str:
    """What the model says to CHAT in 20 tokens."""
    answer = client.post("/v1/chat/completions", messages=CHAT, max_tokens=20, **FIELDS).json
    return str(answer["choices"][0]["message"]["content"])


# ---- without clients: the quick tests ----
def names(body: bytes) -> list[str]:
    return [line[7:] for line in body.decode().splitlines() if line.startswith("event: ")]


def test_messages(client: Client, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"messages": CHAT, "max_tokens": 20, **FIELDS}
    whole = client.post("/v1/messages", fields).json
    assert whole["content"] == [{"type": "text", "text": text}]
    assert (whole["type"], whole["stop_reason"]) == ("message", "max_tokens")
    counts = client.post("/v1/messages/count_tokens", messages=CHAT).json
    n_read = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert counts["input_tokens"] == n_read
    stopped = client.post("/v1/messages", {**fields, "stop_sequences": ["zzz", text[5:9]]}).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:9])
    assert stopped["content"][0]["text"] == text[:5]
    stream = client.post("/v1/messages", {**fields, "stream": True})
    kinds = names(stream.body)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    told = client.post("/v1/messages", {**fields, "system": [{"type": "text", "text": "Hm."}]})
    assert told.json["usage"]["input_tokens"] > 0
    wrong = client.post("/v1/messages", messages=CHAT)
    assert (wrong.status, wrong.json["type"]) == (400, "error")
    assert "max_tokens is missing" in wrong.json["error"]["message"]
    break_after(client, monkeypatch, 3)
    broken = client.post("/v1/messages", {**fields, "stream": True})
    assert names(broken.body)[-1] == "error"


def test_responses(client: Client, text: str) -> None:
    fields = {"input": "Tell me a story", "max_output_tokens": 20, **FIELDS}
    whole = client.post("/v1/responses", fields).json
    assert whole["output"][0]["content"][0]["text"] == text
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    stream = client.post("/v1/responses", {**fields, "stream": True})
    kinds = names(stream.body)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    assert [event["sequence_number"] for event in stream.events] == list(range(len(kinds)))
    for name, value in refusals("responses"):
        wrong = client.post("/v1/responses", {**fields, name: value})
        assert (wrong.status, wrong.error["param"]) == (400, name)


# ---- the clients ----
ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(path for path in (ROOT / "tests" / "clients").glob("*_*.*"))
INSTALLED = ROOT / "build" / "clients"


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic")


@pytest.mark.slow
def test_openai(openai: Any, client: Client, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as ai:
        model = ai.models.list().data[0].id
        asked = {"model": model, "messages": CHAT, "max_completion_tokens": 20, **FIELDS}
        whole = ai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == text
        assert len(whole.choices[0].logprobs.content) == 20
        chunks = list(
            ai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage.completion_tokens == 20
        plain = ai.completions.create(model=model, prompt="Once", max_tokens=4, logprobs=1)
        assert len(plain.choices[0].logprobs.tokens) == 4
        said = ai.responses.create(
            model=model, input="Tell me a story", max_output_tokens=20, **FIELDS
        )
        assert said.output_text == text
        with ai.responses.stream(
            model=model, input="Tell me a story", max_output_tokens=20, **FIELDS
        ) as stream:
            pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(pieces) == text
        with pytest.raises(openai.BadRequestError, match="n is 9"):
            ai.chat.completions.create(**asked, n=9)
        break_after(client, monkeypatch, 4)
        with pytest.raises(openai.APIError, match="Input/output error"):
            list(ai.chat.completions.create(**asked, stream=True))
        with pytest.raises(openai.InternalServerError):
            ai.chat.completions.create(**asked)


@pytest.mark.slow
def test_official_clients_get_calls(openai: Any, anthropic: Any, client: Client) -> None:
    pytest.importorskip("llguidance")
    schema: Any = {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Rom"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "weather", "parameters": schema}
    asked: Any = {
        "model": "x",
        "messages": CHAT,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 3,
    }
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as ai:
        (call,) = ai.chat.completions.create(**asked).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Ulm", "Rom")
        with ai.chat.completions.stream(**asked) as stream:
            (same,) = stream.get_final_completion().choices[0].message.tool_calls
        assert same.function.arguments == call.function.arguments
    with anthropic.Anthropic(base_url=client.url, api_key="none", max_retries=0) as ai:
        choice = {"type": "tool", "name": "weather"}
        tools = [{"name": "weather", "input_schema": schema}]
        whole = ai.messages.create(
            model="x", messages=CHAT, max_tokens=250, tools=tools, tool_choice=choice
        )
        assert (whole.stop_reason, whole.content[0].input["city"] in ("Ulm", "Rom")) == (
            "tool_use",
            True,
        )


@pytest.mark.slow
def test_anthropic(
    anthropic: Any, client: Client, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anthropic.Anthropic(base_url=client.url, api_key="none", max_retries=0) as ai:
        asked: Any = {"model": "x", "messages": CHAT, "max_tokens": 20, "extra_body": FIELDS}
        whole = ai.messages.create(**asked)
        assert whole.content[0].text == text
        with ai.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text
            assert stream.get_final_message().stop_reason == "max_tokens"
        assert ai.messages.count_tokens(model="x", messages=CHAT).input_tokens > 3
        thinking = {"type": "enabled", "budget_tokens": 1024}
        assert ai.messages.create(**asked, thinking=thinking).content[0].text == text
        break_after(client, monkeypatch, 4)
        with pytest.raises(anthropic.APIStatusError, match="Input/output error"):
            list(ai.messages.create(**asked, stream=True))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.stem))
def test_a_client_gets_the_text(program: Path, client: Client, text: str, tmp_path: Path) -> None:
    """Of clients that are too large for every environment: make build/clients.stamp."""
    interpreter = INSTALLED / "bin" / "python"
    modules = tmp_path / "node_modules"
    if program.suffix == ".mjs":
        interpreter = Path(shutil.which("node") or "node")
        modules.symlink_to(INSTALLED / "node_modules")
    is_complete = INSTALLED.with_suffix(".stamp").exists() and interpreter.exists()
    if not is_complete or (modules.is_symlink() and not modules.is_dir()):
        pytest.skip("needs make build/clients.stamp, and for some Node 18 with npm")
    shutil.copy(program, tmp_path)
    done = subprocess.run(
        [str(interpreter), program.name, client.url],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) <= {text}


# ---- ollama's API and llama-server's own requests, by themselves and by ollama's client ----
OPTIONS: Any = {"temperature": 0, "num_predict": 20}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(make_harmony(tmp_path_factory.mktemp("harmony")), any_model=True) as found:
        yield found


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A model with the tokens of Qwen-Coder for text between two others."""
    folder = tmp_path_factory.mktemp("coder")
    checkpoint = make_with_tokens(folder, MARKS, is_special=True, max_tokens=512)
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    with serving(folder / "m.qsf") as found:
        yield found


def lines(body: bytes) -> list[Any]:
    return [json.loads(line) for line in body.splitlines()]


def test_a_chat_is_that_of_the_other_apis(client: Client) -> None:
    want = client.post("/v1/chat/completions", messages=CHAT, max_tokens=20, temperature=0).json
    fields = {"model": "any", "messages": CHAT, "options": OPTIONS, "keep_alive": "5m"}
    named = {"options": {**OPTIONS, "num_ctx": 9, "frob": 1}, "stream": False, "messages": CHAT}
    assert client.post("/api/chat", named).headers["x-qsf-ignored"] == "options.frob"
    whole = client.post("/api/chat", **fields, stream=False).json
    assert whole["message"] == {
        "role": "assistant",
        "content": want["choices"][0]["message"]["content"],
    }
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 20)
    assert whole["prompt_eval_count"] == want["usage"]["prompt_tokens"]
    stream = client.post("/api/chat", **fields)  # a stream unless told otherwise
    assert stream.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(stream.body)
    assert "".join(p["message"]["content"] for p in pieces) == whole["message"]["content"]
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")


def test_generate_has_the_template_or_none(client: Client) -> None:
    chat = client.post("/api/chat", messages=CHAT, options=OPTIONS, stream=False).json
    fields = {"options": OPTIONS, "stream": False}
    answer = client.post("/api/generate", prompt="Tell me a story", **fields).json
    assert answer["response"] == chat["message"]["content"]
    turns = [{"role": "system", "content": "Be brief."}, *CHAT]
    chat = client.post("/api/chat", messages=turns, **fields).json
    answer = client.post(
        "/api/generate", prompt="Tell me a story", system="Be brief.", **fields
    ).json
    assert answer["response"] == chat["message"]["content"]
    raw = client.post("/api/generate", prompt="Once upon", raw=True, **fields).json
    plain = client.post("/v1/completions", prompt="Once upon", max_tokens=20, temperature=0).json
    assert raw["response"] == plain["choices"][0]["text"]
    for path in ("/api/generate", "/api/chat"):
        assert client.post(path, model="m", stream=False).json["done_reason"] == "load"
        assert [line["done_reason"] for line in lines(client.post(path, model="m").body)] == [
            "load"
        ]
        wrong = client.post(path, model="m", options={"top_p": 7})  # it is read all the same
        assert (wrong.status, "top_p" in wrong.json["error"]) == (400, True)


def test_what_cannot_be_is_refused_in_its_form(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, fields, text in (
        ("chat", {"messages": CHAT, "options": {"mirostat": 2}}, "temperature with min_p"),
        ("chat", {"messages": CHAT, "options": {"temperature": "hot"}}, "temperature must be"),
        ("chat", {"messages": CHAT, "format": "xml"}, "format must be json"),
        ("chat", {"messages": CHAT, "think": 3}, "think must be"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "images"),
        ("generate", {"prompt": "a", "template": "b"}, "raw"),
        ("generate", {"prompt": "a", "suffix": "b"}, "fill in the middle"),
        ("embed", {"input": 3}, "input must be a text"),
    ):
        answer = client.post(f"/api/{path}", fields)
        assert answer.status == 400
        assert list(answer.json) == ["error"]
        assert text in answer.json["error"]
    assert client.post("/api/pull", model="m").status == 404
    off = {"typical_p": 1, "mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0}
    answer = client.post("/v1/completions", prompt="a", max_tokens=1, **off, dry_base=2)
    assert (answer.status, "x-qsf-ignored" in answer.headers) == (200, False)
    for name in ("typical_p", "dry_multiplier", "xtc_probability"):
        answer = client.post("/v1/completions", {"prompt": "a", name: 0.5})
        assert (answer.error["param"], "not supported: use" in answer.error["message"]) == (
            name,
            True,
        )
    break_after(client, monkeypatch, 3)
    assert "error" in lines(client.post("/api/chat", messages=CHAT, options=OPTIONS).body)[-1]


def test_vectors(client: Client) -> None:
    want = client.post("/v1/embeddings", input=["a", "b"], dimensions=8).json["data"]
    answer = client.post("/api/embed", input=["a", "b"], dimensions=8).json
    assert answer["embeddings"] == [entry["embedding"] for entry in want]
    (entry,) = client.post("/v1/embeddings", input="a").json["data"]
    assert client.post("/api/embeddings", prompt="a").json == {"embedding": entry["embedding"]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_and_calls(
    thinker: Client, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    scripted(thinker, monkeypatch, TEXT)

    def message(**fields: Any) -> Any:
        found = lines(thinker.post("/api/chat", messages=CHAT, stream=is_stream, **fields).body)
        parts = [line["message"] for line in found]
        return {
            name: "".join(part.get(name, "") for part in parts) for name in ("content", "thinking")
        }, [call for part in parts for call in part.get("tool_calls", ())]

    assert message() == ({"content": ANSWER, "thinking": THOUGHTS + "{}"}, [])
    assert message(think=False)[0]["thinking"] == ""
    scripted(thinker, monkeypatch, CALL)
    calls = [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]
    assert message(tools=TOOLS) == ({"content": "", "thinking": THOUGHTS}, calls)
    turns = [
        *CHAT,
        {"role": "assistant", "content": "", "thinking": THOUGHTS, "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "3 C"},
    ]
    sent = thinker.post("/api/chat", messages=turns, stream=False, tools=TOOLS).json
    assert sent["prompt_eval_count"] > 30


def test_text_between_two_others(coder: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = coder.model.tokenizer
    marks = [tokenizer.token_id(name) for name in MARKS]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_prefix=False, parse_special=False)

    begin = [] if tokenizer.bos_id is None else tokenizer.encode("")
    prompt = [*begin, marks[0], *ids("A <|fim_suffix|> cat"), marks[1], *ids("."), marks[2]]
    fields = {"temperature": 0, "n_predict": 12}
    own = {"input_prefix": "A <|fim_suffix|> cat", "input_suffix": "."}
    answer = coder.post("/infill", **own, **fields).json
    want = coder.post("/v1/completions", prompt=prompt, max_tokens=12, temperature=0).json
    assert answer["content"] == want["choices"][0]["text"]
    assert answer["tokens_evaluated"] == len(prompt)
    assert (answer["stop_type"], answer["stop"]) == ("limit", True)
    generated = coder.post(
        "/api/generate", prompt=own["input_prefix"], suffix=".", stream=False,
        options={"temperature": 0, "num_predict": 12},
    ).json  # fmt: skip
    assert generated["response"] == answer["content"]
    assert "insert" in coder.post("/api/show", model="m").json["capabilities"]
    extra = [{"filename": "a.py", "text": "x"}]
    more = coder.post("/infill", **own, **fields, input_extra=extra, prompt="a").json
    others = [marks[3], *ids("a.py\nx\n"), marks[3], *ids("file\n")]
    assert more["tokens_evaluated"] == len(prompt) + len(others) + len(ids("a"))
    assert "input_extra" in coder.post("/infill", **own, input_extra=[3]).error["message"]
    scripted(coder, monkeypatch, "a cat<|file_sep|>")
    answer = coder.post("/infill", input_prefix="A", input_suffix="B").json
    assert (answer["content"], answer["stop_type"]) == ("a cat", "eos")


def test_completion(client: Client) -> None:
    want = client.post("/v1/completions", prompt="Once", max_tokens=9, temperature=0).json
    fields = {"prompt": "Once", "n_predict": 9, "temperature": 0, "cache_prompt": True}
    answer = client.post("/completion", **fields)
    assert "x-qsf-ignored" not in answer.headers
    assert answer.json["content"] == want["choices"][0]["text"]
    *pieces, last = client.post("/completion", **fields, stream=True).events
    assert "".join(piece["content"] for piece in pieces) == answer.json["content"]
    assert not any(piece["stop"] for piece in pieces)
    assert (last["stop"], last["stop_type"], last["tokens_predicted"]) == (True, "limit", 9)
    ids = client.post("/tokenize", content=" upon a").json["tokens"]
    for mixed in (["Once", *ids], ["Once", *ids[:-1], " a"]):
        found = client.post("/completion", **{**fields, "prompt": mixed}).json
        text = client.post("/completion", **{**fields, "prompt": "Once upon a"}).json
        assert (found["content"], found["tokens_evaluated"]) == (
            text["content"], text["tokens_evaluated"]
        )  # fmt: skip
    wrong = client.post("/completion", **{**fields, "prompt": ["Once", 1 << 40]})
    assert wrong.error["param"] == "prompt"
    several = client.post("/completion", **{**fields, "prompt": ["Once", "A"]}).json
    assert several[0]["content"] == answer.json["content"]
    assert client.post("/completion", **fields, n_probs=21).error["param"] == "n_probs"


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


def test_the_requests_of_open_webui(tiny_chat_8bit: Path) -> None:
    """It looks models up by the names of /api/tags, and adds ":latest" where there is no tag."""
    headers = {"X_OpenWebUI_User_Name": "a%20b", "X_OpenWebUI_Chat_Id": "7"}
    named = {"content_type": "application/json", **headers}
    with serving(tiny_chat_8bit) as client:
        assert client.get("/api/version", **named).json["version"]
        (model,) = client.get("/api/tags", **named).json["models"]
        name = model["model"]
        assert (name, model["name"]) == (f"{client.server.serving.name}:latest", name)
        (loaded,) = client.get("/api/ps", **named).json["models"]
        assert loaded["name"] == name
        assert datetime.fromisoformat(loaded["expires_at"].replace("Z", "+00:00")).year > 2300
        assert client.ask("POST", "/api/show", {"name": name, "model": name}, **named).status == 200
        options = {**OPTIONS, "num_ctx": 2048, "num_keep": 4, "repeat_last_n": 64, "stop": ["zzz"]}
        options |= {"mirostat": 0, "num_thread": 2, "use_mmap": True, "num_gpu": 0, "tfs_z": 1}
        asked = {"model": name, "messages": CHAT, "options": options, "keep_alive": "5m"}
        chat = client.ask("POST", "/api/chat", {**asked, "stream": True}, **named)
        *pieces, last = lines(chat.body)
        text = "".join(piece["message"]["content"] for piece in pieces)
        assert (bool(text), last["done"], last["eval_count"] > 0) == (True, True, True)
        task = {"messages": [{"role": "user", "content": "### Task:\nName the chat: " + text}]}
        title = {"model": name, **task, "stream": False, "options": {"num_predict": 5}}
        assert client.ask("POST", "/api/chat", title, **named).json["done"]
        (entry,) = client.get("/v1/models", **named).json["data"]
        asked = {"model": entry["id"], "messages": CHAT, "temperature": 0, "max_tokens": 20}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        *events, usage, end = client.ask("POST", "/v1/chat/completions", asked, **named).events
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
        assert (usage["usage"]["completion_tokens"] > 0, end) == (True, "[DONE]")
        title = {"model": entry["id"], **task, "stream": False, "max_completion_tokens": 5}
        answer = client.ask("POST", "/v1/chat/completions", title, **named)
        assert answer.json["choices"][0]["finish_reason"] in ("stop", "length")
        assert client.post("/api/chat", model="other", messages=CHAT).status == 404


@pytest.mark.slow
def test_the_client_of_ollama(client: Client) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=client.url) as ai:
        (model,) = ai.list().models
        name = model.model
        assert model.details.quantization_level
        assert [each.model for each in ai.ps().models] == [name]
        shown = ai.show(name)
        assert "completion" in shown.capabilities
        assert shown.modelinfo["general.architecture"] == "llama"
        whole = ai.chat(model=name, messages=CHAT, options=OPTIONS)
        stream = list(ai.chat(model=name, messages=CHAT, options=OPTIONS, stream=True))
        assert "".join(part.message.content for part in stream) == whole.message.content
        assert stream[-1].done_reason == "length"
        assert ai.generate(model=name, prompt="Tell me a story", options=OPTIONS).response == (
            whole.message.content
        )
        assert len(ai.embed(model=name, input=["a", "b"]).embeddings) == 2
        with pytest.raises(ollama.ResponseError, match="mirostat"):
            ai.chat(model=name, messages=CHAT, options={"mirostat": 1})
