"""The description of the API at ``/openapi.json``: OpenAPI 3.1.

Limits of numbers come from the tables that requests are checked by. What follows from the model
(which token ids there are, how many fit) a schema cannot say: such requests get a 400.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsf.options import Kind, Number, Texts, Whole
from qsf.serve.asked import (
    BIAS,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOP,
    MOST_CHOICES,
    PENALTY,
    SAMPLING,
    SEED,
)
from qsf.serve.openai import MAX_PROMPTS
from qsf.serve.tools import MAX_TOOLS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_POSITIVE = Whole(1)


def _schema(kind: Kind) -> Schema:
    if isinstance(kind, Whole):
        return {"type": "integer", "minimum": kind.least, "maximum": kind.most}
    if isinstance(kind, Number):
        least = "exclusiveMinimum" if kind.is_open else "minimum"
        return {"type": "number", least: kind.least, "maximum": kind.most}
    assert isinstance(kind, Texts)
    text = {"type": "string", "minLength": 1}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}


def _list(items: Schema, most: int | None = None, least: int = 0) -> Schema:
    limits = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    return {"type": "array", "items": items, **limits}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; fields that are not required may be null."""
    needed = required.split()
    found = {
        name: schema if name in needed else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": found, "required": needed}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_BIASES: Schema = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": _schema(BIAS),
}
_SAMPLING: Mapping[str, Schema] = {
    **{name: _schema(SAMPLING[name]) for name in ("temperature", "top_k", "min_p")},
    "repetition_penalty": _schema(SAMPLING["repetition_penalty"]),
    "top_p": _schema(Number(0, 1)),
    "seed": _schema(SEED),
    "presence_penalty": _schema(PENALTY),
    "frequency_penalty": _schema(PENALTY),
    "logit_bias": _BIASES,
    "model": _TEXT,
    "stream": _FLAG,
}
_COMPLETIONS: Mapping[str, Schema] = {
    **_SAMPLING,
    "n": _schema(MOST_CHOICES),
    "stop": _schema(Texts()),
    "stream_options": _object(include_usage=_FLAG),
    "ignore_eos": _FLAG,
    "cache_salt": _TEXT,
    "return_progress": _FLAG,
    "sse_ping": _FLAG,
    "response_format": _object(type=_words("text", "json_object", "json_schema")),
    "structured_outputs": _OBJECT,
    "grammar": _TEXT,
}
_PART: Schema = {"anyOf": [_TEXT, {**_OBJECT, "properties": {"text": _TEXT}, "required": ["text"]}]}
_MESSAGE = _object(
    "role content",
    role=_TEXT,
    content={"anyOf": [_TEXT, _list(_PART), {"type": "null"}]},
    tool_calls=_list(_object("function", id=_TEXT, function=_ref("CalledFunction"))),
    tool_call_id=_TEXT,
)
_IDS = _list({"type": "integer", "minimum": 0})
_MESSAGES = _list(_ref("Message"), MAX_MESSAGES, 1)
_TOOLS: Mapping[str, Schema] = {
    "tools": _list(_ref("Tool"), MAX_TOOLS),
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "parallel_tool_calls": _FLAG,
}
_TEMPLATE: Mapping[str, Schema] = {"chat_template_kwargs": _OBJECT, "tools": _TOOLS["tools"]}
_CALLED = _object("name", name=_TEXT, arguments={"anyOf": [_TEXT, _OBJECT]})
_CHOICE = _object(
    "index finish_reason",
    index=_COUNT,
    finish_reason=_words("stop", "length", "tool_calls"),
    logprobs=_OBJECT,
    message=_OBJECT,
    text=_TEXT,
)
_USAGE = _object(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
_MODEL = _object(
    "id object created owned_by meta",
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    owned_by=_TEXT,
    meta=_OBJECT,
)

SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(
        "error",
        error=_object("message type", message=_TEXT, type=_TEXT, param=_TEXT, code=_TEXT),
    ),
    "Message": _MESSAGE,
    "CalledFunction": _CALLED,
    "Tool": _object(
        "type function",
        type=_words("function"),
        function=_object(
            "name",
            name={"type": "string", "pattern": r"^[\w.-]{1,64}$"},
            description=_TEXT,
            parameters=_OBJECT,
            strict=_FLAG,
        ),
    ),
    "Model": _MODEL,
    "Completion": _object(
        "id object created model choices usage timings",
        id=_TEXT,
        object=_TEXT,
        created=_COUNT,
        model=_TEXT,
        choices=_list(_CHOICE, least=1),
        usage=_USAGE,
        timings=_OBJECT,
    ),
    "Tokens": _object(
        "tokens count max_model_len", tokens=_list({}), count=_COUNT, max_model_len=_COUNT
    ),
}

_REQUESTS: Mapping[str, Schema] = {
    "/v1/chat/completions": _object(
        "messages",
        messages=_MESSAGES,
        max_tokens=_schema(_POSITIVE),
        max_completion_tokens=_schema(_POSITIVE),
        logprobs=_FLAG,
        top_logprobs=_schema(Whole(0, MAX_TOP)),
        reasoning_effort=_TEXT,
        chat_template_kwargs=_OBJECT,
        **_TOOLS,
        **_COMPLETIONS,
    ),
    "/v1/completions": _object(
        "prompt",
        prompt={"anyOf": [_TEXT, _IDS, _list(_TEXT, MAX_PROMPTS), _list(_IDS, MAX_PROMPTS)]},
        max_tokens=_schema(_POSITIVE),
        logprobs=_schema(Whole(0, MAX_TOP)),
        echo=_FLAG,
        best_of=_schema(MOST_CHOICES),
        **_COMPLETIONS,
    ),
    "/v1/responses": _object(
        "input",
        input={"anyOf": [_TEXT, _list(_OBJECT, MAX_MESSAGES, 1)]},
        instructions=_TEXT,
        max_output_tokens=_schema(_POSITIVE),
        text=_object(format=_object(type=_words("text", "json_object", "json_schema"))),
        tools=_list(_OBJECT, MAX_TOOLS),
        tool_choice={"anyOf": [_TEXT, _OBJECT]},
        parallel_tool_calls=_FLAG,
        **_SAMPLING,
    ),
    "/v1/messages": _object(
        "messages max_tokens",
        messages=_list(_OBJECT, MAX_MESSAGES, 1),
        max_tokens=_schema(_POSITIVE),
        system={"anyOf": [_TEXT, _list(_PART)]},
        stop_sequences=_list({"type": "string", "minLength": 1}, MAX_STOPS),
        tools=_list(_OBJECT, MAX_TOOLS),
        tool_choice=_object(type=_TEXT, name=_TEXT, disable_parallel_tool_use=_FLAG),
        **_SAMPLING,
    ),
    "/v1/messages/count_tokens": _object(
        "messages", messages=_list(_OBJECT, MAX_MESSAGES, 1), model=_TEXT
    ),
    "/tokenize": _object(
        content=_TEXT,
        prompt=_TEXT,
        messages=_list(_ref("Message"), MAX_MESSAGES),
        add_special=_FLAG,
        with_pieces=_FLAG,
        parse_special=_FLAG,
        **_TEMPLATE,
    ),
    "/detokenize": _object("tokens", tokens=_IDS),
    "/apply-template": _object(
        "messages", messages=_MESSAGES, add_generation_prompt=_FLAG, **_TEMPLATE
    ),
}
_REQUESTS = {
    **_REQUESTS,
    "/chat/completions": _REQUESTS["/v1/chat/completions"],
    "/completions": _REQUESTS["/v1/completions"],
}

# Of each path and method: what it does, and what it answers. A text is the type of what is no JSON.
_ANSWERS: Mapping[tuple[str, str], tuple[str, Schema | str]] = {
    ("GET", "/"): ("a page to chat with", "text/html"),
    ("GET", "/health"): ("whether it answers", _object("status", status=_TEXT)),
    ("GET", "/v1/health"): ("whether it answers", _object("status", status=_TEXT)),
    ("GET", "/openapi.json"): ("this description", _OBJECT),
    ("GET", "/v1/models"): ("the model", _object("data", data=_list(_ref("Model")))),
    ("GET", "/v1/models/{model}"): ("the model", _ref("Model")),
    ("GET", "/props"): ("defaults and the plan of memory", _OBJECT),
    ("GET", "/slots"): ("what each sequence does", _list(_OBJECT)),
    ("GET", "/metrics"): ("counters for Prometheus", "text/plain"),
    ("GET", "/tokenizer_info"): ("texts of special tokens", _OBJECT),
    ("POST", "/tokenize"): ("text or messages to tokens", _ref("Tokens")),
    ("POST", "/detokenize"): ("tokens to text", _object("content", content=_TEXT)),
    ("POST", "/apply-template"): ("messages to a prompt", _object("prompt", prompt=_TEXT)),
    ("POST", "/v1/chat/completions"): ("answer messages", _ref("Completion")),
    ("POST", "/chat/completions"): ("answer messages", _ref("Completion")),
    ("POST", "/v1/completions"): ("continue a text", _ref("Completion")),
    ("POST", "/completions"): ("continue a text", _ref("Completion")),
    ("POST", "/v1/responses"): ("answer, in the form of Responses", _OBJECT),
    ("POST", "/v1/messages"): ("answer, in the form of Anthropic", _OBJECT),
    ("POST", "/v1/messages/count_tokens"): (
        "how many tokens messages have",
        _object("input_tokens", input_tokens=_COUNT),
    ),
}
_OPEN = ("/", "/health", "/v1/health", "/openapi.json")


def describe(version: str, model: str) -> Schema:
    """Return the description of a server with this model."""
    paths: dict[str, Schema] = {}
    for (method, path), (summary, answer) in _ANSWERS.items():
        content = {answer: {"schema": _TEXT}} if isinstance(answer, str) else _json(answer)
        request = _REQUESTS.get(path)
        if request is not None and "stream" in request["properties"]:
            content["text/event-stream"] = {"schema": {}}
        error = {"description": "what is wrong", "content": _json(_ref("Error"))}
        operation: Schema = {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": content}, "default": error},
        }
        if request is not None:
            operation["requestBody"] = {"required": True, "content": _json(request)}
        if "{model}" in path:
            name = {"type": "string", "enum": [model]}
            operation["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": name}
            ]
        if path in _OPEN:
            operation["security"] = []
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "qsf serve", "version": version},
        "paths": paths,
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "components": {
            "schemas": dict(SCHEMAS),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _json(schema: Schema) -> dict[str, Schema]:
    return {"application/json": {"schema": schema}}
