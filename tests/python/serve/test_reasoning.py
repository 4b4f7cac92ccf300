"""What gpt-oss says before its answer is ``reasoning_content``; its calls are ``tool_calls``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.harmony import ANSWER, TEXT, THOUGHTS, make_harmony, said
from make.served import Client, scripted, serving
from qsf.serve.api.openai import encode_messages

CHAT: Any = [{"role": "user", "content": "Who are you?"}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path: Path = make_harmony(tmp_path_factory.mktemp("harmony"))
    with serving(path) as found:
        yield found


@pytest.fixture(autouse=True)
def script(client: Client, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Let the model say what it is to say."""
    scripted(client, monkeypatch, getattr(request, "param", TEXT))


def test_thoughts_are_no_content(client: Client) -> None:
    answer = client.post("/v1/chat/completions", messages=CHAT)
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == ANSWER
    assert choice["message"]["reasoning_content"] == THOUGHTS + "{}"
    assert choice["finish_reason"] == "stop"
    answer = client.post("/v1/chat/completions", messages=CHAT, stream=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHTS + "{}"
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    kinds = [name for delta in deltas for name in delta if name != "role"]
    assert kinds[1:] == sorted(kinds[1:], reverse=True)  # reasoning first; never an empty text
    answer = client.post("/v1/chat/completions", messages=CHAT, stop=["cat", ", and"])
    assert answer.json["choices"][0]["message"]["content"] == "I am a dog"


def test_responses_begin_with_a_reasoning_item(client: Client) -> None:
    response = client.post("/v1/responses", input="Who are you?").json
    parts = [(item["type"], item["content"][0]["text"]) for item in response["output"]]
    assert parts == [("reasoning", THOUGHTS + "{}"), ("message", ANSWER)]
    events = client.post("/v1/responses", input="Who are you?", stream=True).events
    texts = {"reasoning_text": THOUGHTS + "{}", "output_text": ANSWER}
    for place, (kind, text) in enumerate(texts.items()):
        of_kind = [event for event in events if event["type"].startswith(f"response.{kind}.")]
        assert {event["output_index"] for event in of_kind} == {place}
        assert "".join(event.get("delta", "") for event in of_kind) == text
        assert of_kind[-1]["text"] == text
    last = events[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["reasoning", "message"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last


def test_messages_have_thinking_blocks_where_they_are_wanted(client: Client) -> None:
    message = client.post("/v1/messages", messages=CHAT, max_tokens=100).json
    assert [block["type"] for block in message["content"]] == ["text"]
    for kind in ("enabled", "adaptive"):
        fields = {"messages": CHAT, "max_tokens": 100, "thinking": {"type": kind}}
        message = client.post("/v1/messages", **fields).json
        first, second = message["content"]
        assert (first["thinking"], second["text"]) == (THOUGHTS + "{}", ANSWER)
        events = client.post("/v1/messages", **fields, stream=True).events
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHTS + "{}"
        assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
        begun = [event for event in events if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in begun] == ["thinking", "text"]
    answer = client.post("/v1/messages", messages=CHAT, max_tokens=9, thinking={"type": "deep"})
    assert "thinking.type" in answer.json["error"]["message"]


def test_thoughts_come_back_in_the_forms_of_all_apis(client: Client) -> None:
    """A call stands behind its thoughts in the template: all three forms make one prompt."""
    call = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    calls = [{"id": "a", "type": "function", "function": call}]
    counts = []
    for thoughts in (THOUGHTS, ""):
        turn: Any = {"role": "assistant", "reasoning_content": thoughts, "tool_calls": calls}
        counts.append(len(client.post("/tokenize", messages=[*CHAT, turn]).json["tokens"]))
        used = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ulm"}}
        blocks = [{"type": "thinking", "thinking": thoughts, "signature": ""}, used]
        turn = {"role": "assistant", "content": blocks}
        answer = client.post("/v1/messages/count_tokens", messages=[*CHAT, turn]).json
        assert answer["input_tokens"] == counts[-1]
        part = {"type": "reasoning_text", "text": thoughts}
        items = [
            *({"role": "user", "content": "Who are you?"},),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]},
            {"type": "function_call", "call_id": "a", **call},
            {"type": "function_call_output", "call_id": "a", "output": "3 C"},
        ]
        response = client.post("/v1/responses", input=items, max_output_tokens=1).json
        counts[-1] = response["usage"]["input_tokens"]
    assert counts[0] > counts[1]


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "reasoning"}],
        *([{"type": "reasoning", "content": value}] for value in (5, {}, {"a": 1}, "x", True)),
    ],
)
def test_thoughts_that_are_none_or_alone_are_refused(client: Client, items: Any) -> None:
    answer = client.post("/v1/responses", input=items)
    assert (answer.status, answer.error["param"]) == (400, "input")


# ---- calls of functions ----
@pytest.mark.parametrize("script", ["Ulm"], indirect=True)
def test_calls_results_and_thoughts_reach_the_template(client: Client) -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    turns = [
        *CHAT,
        {
            "role": "assistant",
            "reasoning_content": THOUGHTS,
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "3 C"},
        {"role": "assistant", "content": "Three.", "tool_calls": None},
    ]
    prompt = client.post("/apply-template", messages=turns, tools=TOOLS).json["prompt"]
    assert prompt == (
        "<|start|>developer<|message|>weather<|end|><|start|>user<|message|>Who are you?<|end|>"
        f"<|start|>assistant<|channel|>analysis<|message|>{THOUGHTS}<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Ulm"}<|call|>'
        '<|start|>functions to=assistant<|channel|>commentary<|message|>"3 C"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Three.<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("script", [" dog.<|return|>"], indirect=True)
def test_an_answer_that_is_begun_goes_on_in_the_final_channel(client: Client) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "I am a"}]
    answer = client.post("/v1/chat/completions", messages=begun).json
    assert answer["choices"][0]["message"]["content"] == " dog."
    tokens, _ = encode_messages(begun, {}, client.server.serving)
    header = said(client.model.tokenizer, "<|start|>assistant<|channel|>final<|message|>I am a")
    assert tokens[-len(header) :] == header
