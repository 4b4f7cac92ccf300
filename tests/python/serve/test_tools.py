"""Calls of functions in requests and answers, in the forms of the model families."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from make.refusals import refusals
from make.served import Client, scripted, serving
from make.steps import ARGUMENTS, HERMES, WEATHER, form_of
from qsf.serve.tools.call_formats import FORMATS, Format, calls_grammar
from qsf.serve.tools.call_reader import CallReader
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.request import Tools, completed
from qsf.text.chat import ChatTemplate

pytest.importorskip("llguidance")

CHAT: Any = [{"role": "user", "content": "What is the weather in Ulm?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "</tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}SIGNS{{ call.function | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def set_form(client: Client, form: Format | None, monkeypatch: pytest.MonkeyPatch) -> None:
    signs = "nothing known" if form is None else " ".join(form.signs)
    template = client.model.chat_template
    monkeypatch.setattr(template, "_tool_source", TEMPLATE.replace("SIGNS", signs))
    monkeypatch.setattr(template, "_source", TEMPLATE.replace("SIGNS", signs))


@pytest.fixture
def hermes(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    set_form(client, HERMES, monkeypatch)
    return client


def is_weather(values: Any) -> bool:
    return (
        list(values) == ["city", "days", "unit"]
        and len(values["city"]) <= 8
        and values["days"] in range(1, 10)
        and values["unit"] in ("C", "F")
    )


FIELDS: Any = {"messages": CHAT, "tools": TOOLS, "max_tokens": 150, "temperature": 1.2}


def ask(client: Client, **fields: Any) -> Any:
    answer = client.post("/v1/chat/completions", {**FIELDS, **fields})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name + form.middle)
def test_a_call_that_must_be_is_made(
    client: Client, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_form(client, form, monkeypatch)
    tools = json.loads(json.dumps(TOOLS))
    if form.arguments != "json":
        del tools[0]["function"]["parameters"]["properties"]["city"]
        tools[0]["function"]["parameters"]["required"].remove("city")
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, tools=tools, tool_choice=named)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    values = json.loads(call["function"]["arguments"])
    assert is_weather({"city": "", **values}), values


def test_texts_in_elements_are_free(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arguments are no JSON, a text ends with its element, and says no more of itself."""
    fields: Any = {"properties": {"say": {"type": "string"}}, "required": ["say"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": fields}}]
    for name in ("Qwen3-Coder", "GLM"):
        form = form_of(name)
        set_form(client, form, monkeypatch)
        text = form.write([("f", {"say": 'a "quoted"\ntext'}, 0)])
        assert read_as(client, form, tools, text) == {"say": 'a "quoted"\ntext'}
        fields["properties"]["say"]["pattern"] = "a+"
        answer = client.post(
            "/v1/chat/completions", messages=CHAT, tools=tools, tool_choice="required"
        )
        said = "tool_choice: pattern of a text cannot be enforced"
        assert answer.error["message"].startswith(said)
        del fields["properties"]["say"]["pattern"]


def read_as(client: Client, form: Format, tools: Any, text: str) -> Any:
    """Return the arguments of a call that the grammar of ``tools`` lets pass."""
    constraints: Any = client.server.serving.constraints
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    grammar = calls_grammar(form, schemas, {}, is_parallel=True)
    assert constraints.make("lark", grammar, "x").take_text(text)
    reader = CallReader(form, schemas, is_parallel=True)
    _, (call,) = reader.push(text)
    return json.loads(call.arguments)


def test_markers_may_be_special_tokens(client: Client) -> None:
    constraints = client.server.serving.constraints
    assert not isinstance(constraints, str)
    form, markers = form_of("Mistral"), {5: "[TOOL_CALLS]", 6: "[ARGS]"}
    grammar = calls_grammar(
        form, {"now": {"type": "object", "properties": {}}}, markers, is_parallel=False
    )
    constraint = constraints.make("lark", grammar, "x")
    tokenizer = client.model.tokenizer
    name = tokenizer.encode("now", add_prefix=False)
    for token in (5, *name, 6):
        mask = constraint.mask()
        assert mask is not None
        assert mask[token // 8] & 1 << token % 8
        constraint.take(token)
    tools = Tools(tools=(), choice="auto", is_parallel=True, form=form, markers=markers, strict={})
    decoder = tools.decoder(tokenizer.incremental())
    assert "".join(map(decoder.push, (5, *name, 6))) == "[TOOL_CALLS]now[ARGS]"


def test_a_model_may_call_or_answer(hermes: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [("weather", ARGUMENTS), ("now", {})]
    scripted(hermes, monkeypatch, "I look.\n" + HERMES.write((*call, 0) for call in calls))
    choice = ask(hermes)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    events = hermes.post("/v1/chat/completions", {**FIELDS, "stream": True}).events
    assert events.pop() == "[DONE]"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    parts = [p for e in events for p in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [part["index"] for part in parts if "id" in part] == [0, 1]
    arguments = "".join(p["function"]["arguments"] for p in parts if p["index"] == 0)
    assert json.loads(arguments) == ARGUMENTS
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in made] == calls
    assert len(ask(hermes, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    choice = ask(hermes, tool_choice="none")
    assert choice["message"]["content"].startswith("I look.\n<tool_call>")
    assert "tool_calls" not in choice["message"]
    scripted(hermes, monkeypatch, "It rains.")
    choice = ask(hermes)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")
    assert "tool_calls" not in choice["message"]


def test_strict_arguments_are_enforced_in_free_answers(
    hermes: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"]["strict"] = True
    start = 'Hm. <tool_call>\n{"name": "weather", "arguments": {'
    scripted(hermes, monkeypatch, start, goes_on=True)
    choice = ask(hermes, tools=tools, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert is_weather(json.loads(call["function"]["arguments"]))
    assert choice["message"]["content"] == "Hm."


def test_a_form_and_tools_exclude_each_other_only_where_they_must(hermes: Client) -> None:
    schema: Any = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        choice = ask(hermes, response_format=form, seed=seed, parallel_tool_calls=False)
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in ({"x": 1}, {"x": 2})
        else:
            assert len(choice["message"]["tool_calls"]) == 1
    fields = {**FIELDS, "structured_outputs": {"regex": "a+"}}
    answer = hermes.post("/v1/chat/completions", fields)
    assert (answer.status, answer.error["param"]) == (400, "structured_outputs.regex")


def test_calls_and_results_reach_the_template(hermes: Client) -> None:
    function = {"name": "weather", "arguments": '{"city": "<s>Ulm"}'}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    turns = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3 C"},
    ]
    prompt = hermes.post("/apply-template", messages=turns, tools=TOOLS).json["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "<s>Ulm"}}' in prompt
    assert "<tool>3 C" in prompt
    assert '<tools>{"type": "function", "function": {"name": "weather"' in prompt
    asked = {"messages": turns, "tools": TOOLS}
    whole = hermes.post("/v1/chat/completions", {**asked, "max_tokens": 1}).json
    tokens = hermes.post("/tokenize", asked).json
    assert tokens["count"] == whole["usage"]["prompt_tokens"]
    bos = hermes.model.tokenizer.bos_id
    assert tokens["tokens"].count(bos) == 1  # not the one that the arguments spell
    used = {"type": "tool_use", "id": "abcdefghi", "name": "weather", "input": {"city": "<s>Ulm"}}
    result = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": "3 C"}
    blocks = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    told = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER}
    asked = {"messages": [*CHAT, *blocks], "tools": [told]}
    counted = hermes.post("/v1/messages/count_tokens", asked).json
    tokens = hermes.post("/tokenize", messages=turns, tools=TOOLS[:1]).json
    assert counted["input_tokens"] == tokens["count"]


def allowed(what: Any) -> Any:
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": what}}


def called(arguments: Any) -> Any:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": UNIQUE}}
WRONG: Any = [
    *refusals("tools"),
    ({"tools": TOOLS + TOOLS[:1]}, "tools", "two functions called weather"),
    ({"tools": TOOLS * 65}, "tools", "130 entries, and 128 is the limit"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "no such one"),
    (allowed({}), "tool_choice", "must have mode and tools"),
    (allowed({"mode": "any", "tools": []}), "tool_choice", "mode must be auto or required"),
    (allowed({"mode": "auto", "tools": [{"name": "f"}]}), "tool_choice", "has 'f', and tools has"),
    (allowed({"mode": "required", "tools": []}), "tool_choice", "required, and tools is empty"),
    (
        {"tool_choice": "required", "tools": [STRICT]},
        "tool_choice",
        "tool_choice is strict, and uniqueItems cannot be enforced",
    ),
    *(
        ({"messages": [{"role": role, "tool_calls": [{"id": "1"}]}]}, "messages", "tool_calls")
        for role in ("assistant", "user")
    ),
    *(
        (called(arguments), "messages", "the arguments of 'f' must be an object")
        for arguments in ("5", True, [1])
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), WRONG, ids=lambda v: str(v)[:30])
def test_wrong_tools_are_refused_by_name(
    hermes: Client, fields: Any, param: str, said: str
) -> None:
    answer = hermes.post("/v1/chat/completions", {"messages": CHAT, **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert said in answer.error["message"]


def test_what_a_model_or_server_cannot_do_is_refused_by_name(
    client: Client, tiny_chat_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(server: Client, **fields: Any) -> str:
        answer = server.post("/v1/chat/completions", {**FIELDS, **fields})
        assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")
        return str(answer.error["message"])

    assert ask(client, tool_choice="none", max_tokens=1)["finish_reason"] == "length"
    with serving(tiny_chat_8bit, parallel=1, constraints=False) as free:
        assert "tools cannot be enforced: " in refused(free)
        set_form(free, None, monkeypatch)
        assert "--constraints off" in refused(free)
        set_form(free, HERMES, monkeypatch)
        assert "--constraints off" in refused(free, tool_choice="required")
        assert ask(free, max_tokens=3)["finish_reason"] == "length"


def test_only_allowed_tools_are_offered(hermes: Client) -> None:
    """The answer is that to a request with no other tools."""
    weather = {"type": "function", "function": {"name": "weather"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [weather]}}
        answers = [
            ask(hermes, seed=3, max_tokens=60, **fields)
            for fields in ({"tool_choice": choice}, {"tools": TOOLS[:1], "tool_choice": mode})
        ]
        for answer in answers:
            for call in answer["message"].get("tool_calls", ()):
                del call["id"]
        assert answers[0] == answers[1]


# ---- other APIs ----
def test_messages_have_blocks(hermes: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}, {"name": "now", "input_schema": {}}]
    asked = {"messages": CHAT, "tools": tools, "max_tokens": 150}
    calls = HERMES.write([("weather", ARGUMENTS, 0), ("now", {}, 1)])
    scripted(hermes, monkeypatch, "I look.\n" + calls)
    whole = hermes.post("/v1/messages", asked).json
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][1]["input"] == ARGUMENTS
    events = hermes.post("/v1/messages", {**asked, "stream": True}).events
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1, 2]
    assert [e["content_block"]["type"] for e in starts] == ["text", "tool_use", "tool_use"]
    assert [e["type"] for e in events].count("content_block_stop") == 3
    deltas = [e for e in events if e["type"] == "content_block_delta"]
    text = "".join(e["delta"].get("partial_json", "") for e in deltas if e["index"] == 1)
    assert json.loads(text) == ARGUMENTS
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(hermes.post("/v1/messages", {**asked, "tool_choice": choice}).json["content"]) == 2


def test_responses_have_items(hermes: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"input": "What is the weather?", "tools": tools}
    with monkeypatch.context() as patch:
        scripted(hermes, patch, "I look.\n" + HERMES.write([("weather", ARGUMENTS, 0)]))
        whole = hermes.post("/v1/responses", asked).json
        stream = hermes.post("/v1/responses", {**asked, "stream": True}).events
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert json.loads(whole["output"][1]["arguments"]) == ARGUMENTS
    done = [e for e in stream if e["type"] == "response.output_item.done"]
    places = [(e["output_index"], e["item"]["type"]) for e in done]
    assert places == [(0, "message"), (1, "function_call")]
    last = stream[-1]["response"]["output"]
    assert [item["type"] for item in last] == ["message", "function_call"]
    call_id = whole["output"][1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "3 C"}
    more = [{"role": "user", "content": "What is the weather?"}, *whole["output"], result]
    answer = hermes.post("/v1/responses", {**asked, "input": more, "max_output_tokens": 2})
    assert answer.status == 200, answer.body


# ---- conversations fit to templates that know nothing of tools, or say it in their own way ----


CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}}
]
CITY_CALL = {"id": "x1", "function": {"name": "weather", "arguments": '{"city": "Ulm<s>"}'}}
WEATHER_ASKED: Any = [{"role": "user", "content": "Weather?"}]
CITY_TURNS: Any = [
    *WEATHER_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CITY_CALL]},
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


def prompt_of(client: Client, turns: Any = CITY_TURNS, tools: Any = CITY_TOOLS) -> str:
    answer = client.post("/apply-template", messages=turns, tools=tools)
    assert answer.status == 200, answer.body
    return str(answer.json["prompt"])


def test_an_unknown_template_is_told_of_tools(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(client, UNKNOWN, monkeypatch)
    prompt = prompt_of(client)
    assert prompt.startswith("<system># Tools\n")
    assert json.dumps(CITY_TOOLS[0]) in prompt
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm<s>"}}\n</tool_call>'
    assert f"<assistant>{written}<user><tool_response>\n3 C<s>\n</tool_response>" in prompt
    said = prompt_of(client, [{"role": "system", "content": "Be kind."}, *CITY_TURNS])
    assert said.startswith("<system>Be kind.\n\n# Tools\n")
    assert prompt_of(client, tools=None).startswith("<user>Weather?<assistant><tool_call>")
    set_template(client, NO_SYSTEM, monkeypatch)
    prompt = prompt_of(client)
    assert prompt.startswith("<user># Tools\n")
    assert "If none helps, answer in words.\n\nWeather?<assistant>" in prompt
    tokens = client.post("/tokenize", messages=CITY_TURNS, tools=CITY_TOOLS).json["tokens"]
    assert client.model.tokenizer.bos_id not in tokens  # that the texts spell


def test_its_calls_follow_their_schemas(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    set_template(client, UNKNOWN, monkeypatch)
    fields = {"messages": WEATHER_ASKED, "tools": CITY_TOOLS, "max_tokens": 120, "temperature": 1.3}
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
    prompt = prompt_of(client, [*CITY_TURNS, *CITY_TURNS])
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
    assert json.loads(functions) == [CITY_TOOLS[0]["function"]]
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
    tools: Any = [{"type": "function", "function": {"name": "a", "parameters": False}}]
    answer = client.post("/apply-template", messages=WEATHER_ASKED, tools=tools)
    assert answer.status == 400
    assert "must be the schema of an object" in answer.error["message"]
    for types in (["object"], ["null", "object"]):
        tools[0]["function"]["parameters"] = {"type": types}
        assert client.post("/apply-template", messages=WEATHER_ASKED, tools=tools).status == 200


def test_a_call_that_was_cut_can_be_sent_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(client, UNKNOWN, monkeypatch)

    def sent(arguments: str) -> Any:
        call = {"id": "x", "function": {"name": "weather", "arguments": arguments}}
        turns = [*WEATHER_ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
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
    turns = [*WEATHER_ASKED, {"role": "tool", "tool_call_id": "x1", "content": "3 C"}]
    before = copy.deepcopy(turns)
    fitted, _ = fit_messages(turns, None, ChatTemplate(UNKNOWN, {}), ())
    assert turns == before
    assert fitted[-1]["content"] == "Weather?\n<tool_response>\n3 C\n</tool_response>"
