"""Any JSON value in any field of any API is answered, or refused by a text that names the field."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from make.served import Client

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "string", "enum": ["a"]}},
    "required": ["x"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
SAMPLING = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1, "stop": ["a"]}
SHARED = {"model": "m", "max_tokens": 1, **SAMPLING}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SHARED, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 1,
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "a",
                      "content": [{"type": "text", "text": "x"}]}],
        "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "n": 1, "logit_bias": {"5": 1},
        "stream_options": {"include_usage": True}, "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"], "user": "u",
    },
    "/v1/completions": {
        **SHARED, "prompt": ["a", [1, 2]], "echo": True, "logprobs": 1, "suffix": "", "best_of": 1,
        "response_format": FORM, "presence_penalty": 0, "frequency_penalty": 0,
    },
    "/v1/responses": {
        "model": "m", "instructions": "Be kind.", "max_output_tokens": 1,
        "tools": [{"type": "function", **FUNCTION}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "include": [],
        "reasoning": {"effort": "low"}, "truncation": "disabled", "tool_choice": "none",
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "s"}], "temperature": 1,
        "messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "x"}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1},
        "stop_sequences": ["a"], "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": [USER], "system": "s"},
    "/v1/embeddings": {
        "model": "m", "input": ["a", [1]], "dimensions": 4, "encoding_format": "float"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/completion": {"prompt": "a", "n_predict": 1, "logit_bias": [[5, 1.0]], "n_probs": 1,
                    "json_schema": SCHEMA, **SAMPLING},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 1,
                "input_extra": [{"filename": "f", "text": "t"}]},
    "/tokenize": {"content": "a", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {}},
    "/api/chat": {
        "model": "m", "stream": False,
        "options": {"num_predict": 1, "temperature": 1, "stop": ["a"]},
        "messages": [USER, {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "x"}],
        "tools": [TOOL], "format": SCHEMA, "think": False, "keep_alive": "5m", "logprobs": False,
    },
    "/api/generate": {
        "model": "m", "stream": False, "prompt": "a", "suffix": "", "system": "s", "raw": False,
        "options": {"num_predict": 1}, "format": "json", "keep_alive": 1,
    },
    "/api/embed": {"model": "m", "input": "a", "truncate": True, "dimensions": 4},
    "/api/embeddings": {"model": "m", "prompt": "a"},
    "/api/show": {"model": "m", "verbose": False},
}  # fmt: skip
# Fields that errors call by another name
NAMES = {"model": ""}
OF_OTHER_MODELS = {"/v1/rerank", "/infill"}  # the tiny model lacks their tokens
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, -1, 1, 2**70, 0.5, 1e308, "", "a", "\x00", "\ud800", "user",
                     "function", "{", "1e5", "#", [], {}, "x" * 300, "none", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "name", "function", "arguments", "id",
                         "$ref", "anyOf", "properties", "items", "pattern", "const", "", "x"]),
        inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield (key,)
        yield from ((key, *path) for path in places(each))


PLACES = [(path, place) for path, body in BODIES.items() for place in places(body)]


@given(st.sampled_from(PLACES), VALUES)
def test_any_value_is_answered_or_refused_by_name(
    client: Client, where: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    path, place = where
    body = json.loads(json.dumps(BODIES[path]))
    node: Any = body
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    answer = client.post(path, body)
    assert 200 <= answer.status < 500, (path, place, value, answer.body[:300])
    if answer.status == 200 or path in OF_OTHER_MODELS:
        return
    error = answer.json["error"]
    text = error if path.startswith("/api/") else error["message"]
    assert isinstance(text, str)
    named = f"{text} {error.get('param') if isinstance(error, dict) else ''}"
    is_general = "the body" in text or "the context holds" in text
    assert is_general or NAMES.get(place[0], place[0]) in named, (path, place, value, text)


def test_the_bodies_are_good(client: Client) -> None:
    for path in BODIES.keys() - OF_OTHER_MODELS:
        answer = client.post(path, BODIES[path])
        assert answer.status == 200, answer.body[:300]
