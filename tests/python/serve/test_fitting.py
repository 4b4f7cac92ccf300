"""Tools and calls for chat templates of the model families, and for those that know none."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from make.served import Client, scripted
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.request import completed
from qsf.text.chat import ChatTemplate

pytest.importorskip("llguidance")

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "", "parameters": SCHEMA},
    }
]
CALL = {"id": "x1", "function": {"name": "weather", "arguments": '{"city": "Ulm<s>"}'}}
ASKED: Any = [{"role": "user", "content": "Weather?"}]
TURNS: Any = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x1", "content": "3 C<s>"},
]
# Templates as short as they can be. What they know of calls is as in those of the families.
TURN = "<{{ m['role'] }}>{% if m['content'] is none %}{% else %}{{ m['content'] }}{% endif %}"
LOOP = "{% for m in messages %}BODY{% endfor %}<assistant>"
SYSTEM = "{% if messages[0]['role'] == 'system' %}{% endif %}"
UNKNOWN = SYSTEM + LOOP.replace("BODY", TURN)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + LOOP.replace("BODY", TURN)
)
DEEPSEEK = SYSTEM + LOOP.replace(
    "BODY",
    TURN + "{% for tool in m['tool_calls'] or [] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'"
    " + tool['function']['arguments'] + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}{% endfor %}"
    "{% if m['role'] == 'tool' %}{% endif %}",
)
KIMI = "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}{% endif %}" + (
    LOOP.replace(
        "BODY",
        TURN + "{% for call in m['tool_calls'] or [] %}[{{ call['id'] }}]"
        "{{ call['function']['arguments'] | tojson }}{% endfor %}"
        "{% if m['role'] == 'tool' %}## Return of {{ m.tool_call_id }}{% endif %}",
    )
)
LFM2 = "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}" + LOOP.replace(
    "BODY", "<|im_start|>" + TURN + "{% if m['role'] == 'tool' %}!{% endif %}"
)
PHI = LOOP.replace(
    "BODY",
    TURN + "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    "{% endif %}",
).replace("m in", "message in").replace("m[", "message[")  # fmt: skip


def set_template(client: Client, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_source", "_tool_source"):
        monkeypatch.setattr(client.model.chat_template, name, template)


def prompt_of(client: Client, turns: Any = TURNS, tools: Any = TOOLS) -> str:
    answer = client.post("/apply-template", messages=turns, tools=tools)
    assert answer.status == 200, answer.body
    return str(answer.json["prompt"])


def test_an_unknown_template_is_told_of_tools(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(client, UNKNOWN, monkeypatch)
    prompt = prompt_of(client)
    assert prompt.startswith("<system># Tools\n")
    assert json.dumps(TOOLS[0]) in prompt
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm<s>"}}\n</tool_call>'
    assert f"<assistant>{written}<user><tool_response>\n3 C<s>\n</tool_response>" in prompt
    said = prompt_of(client, [{"role": "system", "content": "Be kind."}, *TURNS])
    assert said.startswith("<system>Be kind.\n\n# Tools\n")
    assert prompt_of(client, tools=None).startswith("<user>Weather?<assistant><tool_call>")
    set_template(client, NO_SYSTEM, monkeypatch)
    prompt = prompt_of(client)
    assert prompt.startswith("<user># Tools\n")
    assert "If none helps, answer in words.\n\nWeather?<assistant>" in prompt
    tokens = client.post("/tokenize", messages=TURNS, tools=TOOLS).json["tokens"]
    assert client.model.tokenizer.bos_id not in tokens  # that the texts spell


def test_its_calls_follow_their_schemas(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    set_template(client, UNKNOWN, monkeypatch)
    fields = {"messages": ASKED, "tools": TOOLS, "max_tokens": 120, "temperature": 1.3}
    made = client.post("/v1/chat/completions", {**fields, "tool_choice": "required"}).json
    (call, *_) = made["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Rom")
    begun = 'Hm. <tool_call>\n{"name": "weather", "arguments": {'
    scripted(client, monkeypatch, begun, goes_on=True)
    fields["parallel_tool_calls"] = False
    choice = client.post("/v1/chat/completions", fields).json["choices"][0]
    assert choice["message"]["content"] == "Hm."
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Rom")
    events = client.post("/v1/chat/completions", {**fields, "stream": True}).events
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]"]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0]["name"] == "weather"
    assert json.loads("".join(part["arguments"] for part in parts))["city"] in ("Ulm", "Rom")


def test_families_are_told_in_their_own_form(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = '{"city": "Ulm<s>"}'
    begin = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    end = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    set_template(client, DEEPSEEK, monkeypatch)
    prompt = prompt_of(client)
    assert f'{begin}FUNCTION<｜tool▁sep｜>{{"PARAMETER": "VALUE"}}{end}' in prompt
    assert f"<assistant>{begin}weather<｜tool▁sep｜>{arguments}{end}<tool>3 C<s>" in prompt
    set_template(client, KIMI, monkeypatch)
    prompt = prompt_of(client, [*TURNS, *TURNS])
    for n in range(2):
        assert f"[functions.weather:{n}]{arguments}" in prompt
        assert f"## Return of functions.weather:{n}" in prompt  # though the client repeats its ids
    set_template(client, LFM2, monkeypatch)
    prompt = prompt_of(client)
    assert prompt.startswith("List of tools: [{")
    assert '<|tool_call_start|>[weather(city="Ulm<s>")]<|tool_call_end|>' in prompt
    assert "<tool>3 C<s>!" in prompt
    set_template(client, PHI, monkeypatch)
    prompt = prompt_of(client)
    functions = prompt.partition("<|tool|>")[2].partition("<|/tool|>")[0]
    assert json.loads(functions) == [TOOLS[0]["function"]]
    assert '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ulm<s>"}}]' in prompt
    assert "<tool_response>3 C<s>" in prompt


def test_templates_and_schemas_of_other_forms(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As GLM's and Ling's do.
    asked = "{{ tools[0]['function']['name'] | tojson(ensure_ascii=False, separators=(',', ':')) }}"
    set_template(client, f"<tool_call>{asked}{LOOP}", monkeypatch)
    assert '"weather"' in prompt_of(client)
    set_template(client, UNKNOWN, monkeypatch)
    tools = [{"type": "function", "function": {"name": "a", "parameters": False}}]
    answer = client.post("/apply-template", messages=ASKED, tools=tools)
    assert answer.status == 400
    assert "must be the schema of an object" in answer.error["message"]


def test_a_call_that_was_cut_can_be_sent_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(client, UNKNOWN, monkeypatch)

    def sent(arguments: str) -> Any:
        call = {"id": "x", "function": {"name": "weather", "arguments": arguments}}
        turns = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return client.post("/apply-template", messages=turns)

    whole = {"city": 'U"l\\m', "in": {"days": [1, True, "a"]}, "x": None, "é": 1.5}
    text = json.dumps(whole)
    for n in range(1, len(text) + 1):
        answer = sent(text[:n])
        assert answer.status == 200, text[:n]
        said = answer.json["prompt"].partition('"arguments": ')[2].partition("}\n</tool_call>")[0]
        values = json.loads(said)
        assert set(values) <= set(whole)
        if "in" in values:
            assert values["city"] == whole["city"]
    assert completed('{"a": "b') == ['{"a": "b"}', '{"a": "b}', "{}"]
    for wrong in ('{"a" 1', "a", '{"a": b c', "}", "[1", '{"a": 1]', '{"a": {"b": 2}} x'):
        assert sent(wrong).status == 400, wrong


def test_messages_of_the_request_stay_as_they_are() -> None:
    turns = [*ASKED, {"role": "tool", "tool_call_id": "x1", "content": "3 C"}]
    before = copy.deepcopy(turns)
    fitted, _ = fit_messages(turns, None, ChatTemplate(UNKNOWN, {}), ())
    assert turns == before
    assert fitted[-1]["content"] == "Weather?\n<tool_response>\n3 C\n</tool_response>"
