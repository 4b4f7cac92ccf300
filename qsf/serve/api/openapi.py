"""The description of the API at ``/openapi.json``: OpenAPI 3.1.

The fields of a request are recorded by running its reader on a `Probe`. Values that a reader
checks itself, such as messages, and the answers are described here. Rules that depend on the model
(valid token ids, how many fit) are not in the schema: such requests get a 400.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from qsf.options import Keywords, Kind, Number, Texts, Whole
from qsf.serve.api import anthropic, llama_server, ollama, openai, responses, text_api, vectors
from qsf.serve.api.completion_request import (
    BIAS,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    NO_LIMIT,
    MostTokens,
)
from qsf.serve.api.openai import MAX_PROMPTS
from qsf.serve.http.fields import DURATION, Probe
from qsf.serve.serving import Serving
from qsf.serve.tools.request import MAX_TOOLS
from qsf.text.embedding import ALL_POOLINGS, TextVectors

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_TYPES: Mapping[type, Schema] = {bool: _FLAG, str: _TEXT, dict: _OBJECT, list: {"type": "array"}}


def _schema(kind: Kind | type | Probe | None) -> Schema:
    """Return the schema of the values of a reader; None accepts any value."""
    if kind is None:
        return {}
    if isinstance(kind, Probe):
        return _object(**{name: _schema(inner) for name, inner in kind.taken.items()})
    if isinstance(kind, type):
        return _TYPES[kind]
    if isinstance(kind, Keywords):
        return _OBJECT
    if isinstance(kind, MostTokens):
        return {"anyOf": [_schema(Whole(kind.least, kind.most)), {"const": NO_LIMIT}]}
    if isinstance(kind, Whole):
        return {"type": "integer", "minimum": kind.least, "maximum": kind.most}
    if isinstance(kind, Number):
        least = "exclusiveMinimum" if kind.is_open else "minimum"
        return {"type": "number", least: kind.least, "maximum": kind.most}
    assert isinstance(kind, Texts)
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}


def _list(items: Schema, most: int | None = None, least: int = 0) -> Schema:
    limits = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    return {"type": "array", "items": items, **limits}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; fields that are not required may be null."""
    needed = required.split()
    properties = {
        name: schema if name in needed else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": properties, "required": needed}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


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
_OBJECTS = _list(_OBJECT, MAX_MESSAGES, 1)
_ANSWER_FORM = _object(type=_words("text", "json_object", "json_schema"))

# By path: the reader, the required fields, and schemas of fields that the reader checks without
# `Fields`.
_SHAPES: Mapping[str, Schema] = {
    "logit_bias": {
        "type": ["object", "array"],
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _schema(BIAS),
        "maxItems": MAX_BIASES,
        "items": {"type": "array", "minItems": 2, "maxItems": 2},
    },
    "grammar": _TEXT,
    "messages": _MESSAGES,
    "modalities": _list(_words("text")),
    "response_format": _ANSWER_FORM,
    "text": _object(format=_ANSWER_FORM),
    "tools": _list(_ref("Tool"), MAX_TOOLS),
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "tokens": _IDS,
    "truncation": _words("disabled"),
}
_OTHER_TOOLS = {"tools": _list(_OBJECT, MAX_TOOLS)}
_ANTHROPIC: Mapping[str, Schema] = {
    "messages": _OBJECTS,
    "system": {"anyOf": [_TEXT, _list(_PART)]},
    "stop_sequences": _list({"type": "string", "minLength": 1}, MAX_STOPS),
    "thinking": _object(type=_words("enabled", "adaptive", "disabled")),
    "tool_choice": _object(type=_TEXT, name=_TEXT, disable_parallel_tool_use=_FLAG),
    **_OTHER_TOOLS,
}
_PROMPT = {"anyOf": [_TEXT, _IDS, _list(_TEXT, MAX_PROMPTS), _list(_IDS, MAX_PROMPTS)]}
_COMPLETION: Mapping[str, Schema] = {
    "prompt": _PROMPT,
    "suffix": {"type": "string", "maxLength": 0},
    "tools": _list(_OBJECT, 0),
}
_EMBEDDED = {
    "anyOf": [_TEXT, _IDS, _list(_TEXT, vectors.MAX_TEXTS), _list(_IDS, vectors.MAX_TEXTS)]
}
_FORMS = {
    "encoding_format": _words(*vectors.FORMATS),
    "pooling": _words(*ALL_POOLINGS),
    "normalize": {"const": True},
}
_FILES = _list(_object("filename text", filename=_TEXT, text=_TEXT), llama_server.MAX_FILES)
_OLLAMA: Mapping[str, Schema] = {
    "messages": _list(_OBJECT, MAX_MESSAGES),
    "tools": _list(_OBJECT, MAX_TOOLS),
    "format": {"anyOf": [_words("", "json"), _OBJECT]},
    "keep_alive": {"anyOf": [{"type": "number"}, {**_TEXT, "pattern": DURATION}]},
    "think": {"anyOf": [_FLAG, _TEXT]},
    "template": {"type": "string", "maxLength": 0},
    "images": _list(_TEXT, 0),
    "suffix": _TEXT,
}
_DOCUMENTS = _list({"anyOf": [_TEXT, _object("text", text=_TEXT)]}, vectors.MAX_DOCUMENTS, 1)
_INPUT = {"anyOf": [_TEXT, _OBJECTS]}
_Reader = Callable[[dict[str, Any], Serving], object]
_REQUESTS: Mapping[str, tuple[_Reader, str, Mapping[str, Schema]]] = {
    "/v1/chat/completions": (openai.read_chat, "messages", {}),
    "/chat/completions": (openai.read_chat, "messages", {}),
    "/v1/completions": (openai.read_completion, "prompt", _COMPLETION),
    "/completions": (openai.read_completion, "prompt", _COMPLETION),
    "/v1/responses": (responses.read, "input", {"input": _INPUT, **_OTHER_TOOLS}),
    "/v1/messages": (anthropic.read, "messages max_tokens", _ANTHROPIC),
    "/v1/messages/count_tokens": (anthropic.count_tokens, "messages", _ANTHROPIC),
    "/v1/embeddings": (vectors.read_embeddings, "input", {"input": _EMBEDDED, **_FORMS}),
    "/v1/rerank": (vectors.read_rerank, "query documents", {"documents": _DOCUMENTS}),
    "/rerank": (vectors.read_rerank, "query documents", {"documents": _DOCUMENTS}),
    "/completion": (llama_server.read_completion, "prompt", _COMPLETION),
    "/infill": (llama_server.read_infill_request, "", {"input_extra": _FILES}),
    "/api/chat": (ollama.read_chat, "", _OLLAMA),
    "/api/generate": (ollama.read_generate, "", _OLLAMA),
    "/api/embed": (ollama.read_embed, "", {**_OLLAMA, "input": _EMBEDDED}),
    "/api/embeddings": (ollama.read_embedding, "", {**_OLLAMA, "prompt": _TEXT}),
    "/api/show": (ollama.show, "", {}),
    "/api/pull": (ollama.read_pull, "", {}),
    "/tokenize": (text_api.tokenize, "", {"prompt": _TEXT}),
    "/detokenize": (text_api.detokenize, "tokens", {}),
    "/apply-template": (text_api.apply_template, "messages", {}),
}
# Values for required fields, and a substitute for the model, with which readers are run.
_EXAMPLES: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "max_tokens": 1,
    "tokens": [0],
    "content": "a",
    "query": "a",
    "model": "a",
    "documents": ["a"],
}
_MOST = 1 << 31
_MODEL: Any = SimpleNamespace(
    info=SimpleNamespace(
        n_vocab=_MOST,
        dim=_MOST,
        plan=SimpleNamespace(ctx_tokens=_MOST),
        architecture="",
        n_parameters=0,
        quant_type="",
        max_tokens=0,
    ),
    text_vectors=TextVectors(),
    chat_template=SimpleNamespace(
        is_plain=True, source="", tool_source="", render=lambda *_, **__: ""
    ),
    tokenizer=SimpleNamespace(
        bos_id=None,
        special_names=(),
        encode=lambda *_, **__: [0],
        encode_beginning=lambda *_, **__: [0],
        decode=lambda *_: "",
        token_id=lambda *_: 0,
    ),
    chat_tokens=lambda *_: [0],
    sampling_params=lambda **_: None,
)


def _request(path: str) -> Schema:
    """Return the schema of the body of a path's requests."""
    read, required, shapes = _REQUESTS[path]
    schemas = {**_SHAPES, **shapes}
    properties: dict[str, Schema] = {}
    for names in [required.split()] if required else (["content"], ["messages"]):
        body = Probe({name: _EXAMPLES[name] for name in names})
        read(body, Serving(_MODEL, "", "", 1))
        properties |= {
            name: schemas.get(name) or _schema(kind) for name, kind in body.taken.items()
        }
    return _object(required, **properties)


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
_ENTRY = _object(
    "id object created owned_by status meta",
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    owned_by=_TEXT,
    status=_object("value", value=_words("loaded", "unloaded")),
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
    "Model": _ENTRY,
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

# By path and method: a summary, and the schema of the answer. A text is the media type of an answer
# that is not JSON.
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
    ("POST", "/completion"): ("continue a text, as llama-server", {}),
    ("POST", "/infill"): ("write between two texts, as llama-server", {}),
    ("GET", "/api/tags"): ("the model, as ollama", _object("models", models=_list(_OBJECT))),
    ("GET", "/api/ps"): ("the model, as ollama", _object("models", models=_list(_OBJECT))),
    ("GET", "/api/version"): ("the version", _object("version", version=_TEXT)),
    ("POST", "/api/show"): ("what the model is, as ollama", _OBJECT),
    ("POST", "/api/pull"): ("that a model is here, as ollama", _OBJECT),
    ("POST", "/api/chat"): ("answer messages, as ollama", _OBJECT),
    ("POST", "/api/generate"): ("answer or continue a text, as ollama", _OBJECT),
    ("POST", "/api/embed"): ("a vector for each text, as ollama", _OBJECT),
    ("POST", "/api/embeddings"): ("the vector of a text, as ollama", _OBJECT),
    ("POST", "/v1/embeddings"): ("a vector for each text", _object("data", data=_list(_OBJECT))),
    ("POST", "/v1/rerank"): ("documents by a query", _object("results", results=_list(_OBJECT))),
    ("POST", "/rerank"): ("documents by a query", _object("results", results=_list(_OBJECT))),
    ("POST", "/v1/messages/count_tokens"): (
        "how many tokens messages have",
        _object("input_tokens", input_tokens=_COUNT),
    ),
}
_OPEN = ("/", "/health", "/v1/health", "/openapi.json")


def describe(version: str, *models: str) -> Schema:
    """Return the description of a server with these models."""
    paths: dict[str, Schema] = {}
    for (method, path), (summary, answer) in _ANSWERS.items():
        content = {answer: {"schema": _TEXT}} if isinstance(answer, str) else _json(answer)
        request = _request(path) if path in _REQUESTS else None
        is_ollama = path.startswith("/api/")
        if request is not None and "stream" in request["properties"]:
            kind = "application/x-ndjson" if is_ollama else "text/event-stream"
            content[kind] = {"schema": {}}
        wrong = _object("error", error=_TEXT) if is_ollama else _ref("Error")
        error = {"description": "what is wrong", "content": _json(wrong)}
        operation: Schema = {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": content}, "default": error},
        }
        if request is not None:
            operation["requestBody"] = {"required": True, "content": _json(request)}
        if "{model}" in path:
            name = {"type": "string", "enum": list(models)}
            operation["parameters"] = [_parameter("model", "path", name)]
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


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": True, "schema": schema}


def _json(schema: Schema) -> dict[str, Schema]:
    return {"application/json": {"schema": schema}}
