"""The official clients of OpenAI and Anthropic, and what they rely on."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from make.served import Client, break_after

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
    for name, value in (
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("tools", [{}]),
        ("truncation", "auto"),
        ("input", [{"type": "function_call_output"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("max_output_tokens", 0),
    ):
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
