"""The description of the API at ``/openapi.json``: OpenAPI 3.1.

The bodies of requests are described by their structs. Rules that depend on the model (valid token
ids, how many fit) are not in the schema: such requests get a 400.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from qsf.serve.api.ollama import LINES

if TYPE_CHECKING:
    from qsf.serve.api.answering import Route

Schema = dict[str, Any]


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OBJECT: Schema = {"type": "object"}
_NULL: Schema = {"type": "null"}
_REFS = "#/components/schemas/{name}"


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; fields that are not required may be null."""
    needed = required.split()
    properties = {
        name: schema if name in needed else {"anyOf": [schema, _NULL]}
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": properties, "required": needed}


def _ref(name: str) -> Schema:
    return {"$ref": _REFS.format(name=name)}


_PART: Schema = {"anyOf": [_TEXT, {**_OBJECT, "properties": {"text": _TEXT}, "required": ["text"]}]}
# Messages have fields that only the chat template knows, so no struct describes them
_SCHEMAS: Mapping[str, Schema] = {
    "Error": _object(
        "error", error=_object("message type", message=_TEXT, type=_TEXT, param=_TEXT, code=_TEXT)
    ),
    "Message": _object(
        "role content",
        role=_TEXT,
        content={"anyOf": [_TEXT, _list(_PART), _NULL]},
        tool_calls=_list(
            _object(
                "function",
                id=_TEXT,
                function=_object("name", name=_TEXT, arguments={"anyOf": [_TEXT, _OBJECT]}),
            )
        ),
        tool_call_id=_TEXT,
    ),
    "Model": _object(
        "id object created owned_by status meta",
        id=_TEXT,
        object=_TEXT,
        created=_COUNT,
        owned_by=_TEXT,
        status=_object("value", value={"enum": ["loaded", "unloaded"]}),
        meta=_OBJECT,
    ),
    "Answer": _object(
        "id object created model choices usage timings",
        id=_TEXT,
        object=_TEXT,
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                "index finish_reason",
                index=_COUNT,
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
                logprobs=_OBJECT,
                message=_OBJECT,
                text=_TEXT,
            )
        ),
        usage=_object(
            "prompt_tokens completion_tokens total_tokens",
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
        ),
        timings=_OBJECT,
    ),
}
_DATA = _object("data", data=_list(_OBJECT))
_RESULTS = _object("results", results=_list(_OBJECT))
_MODELS = _object("models", models=_list(_OBJECT))
# Answers that are more than an object, by path; a text is the media type of one that is not JSON
_ANSWERS: Mapping[str, Schema | str] = {
    "/": "text/html",
    "/metrics": "text/plain",
    "/slots": _list(_OBJECT),
    "/lora-adapters": _list(_OBJECT),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "text/plain"),
    "/v1/models": _object("data", data=_list(_ref("Model"))),
    "/v1/models/{model}": _ref("Model"),
    "/tokenize": _object(
        "tokens count max_model_len", tokens=_list({}), count=_COUNT, max_model_len=_COUNT
    ),
    "/detokenize": _object("content", content=_TEXT),
    "/apply-template": _object("prompt", prompt=_TEXT),
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions"), _ref("Answer")),
    **dict.fromkeys(("/v1/completions", "/completions"), _ref("Answer")),
    "/completion": {},
    "/infill": {},
    **dict.fromkeys(("/api/tags", "/api/ps"), _MODELS),
    "/api/version": _object("version", version=_TEXT),
    "/v1/embeddings": _DATA,
    **dict.fromkeys(("/v1/rerank", "/rerank"), _RESULTS),
    "/v1/messages/count_tokens": _object("input_tokens", input_tokens=_COUNT),
}


def describe(routes: Iterable[Route], version: str, models: Iterable[str]) -> Schema:
    routes = tuple(routes)
    bodies = list({route.body for route in routes if route.body is not None})
    references, components = msgspec.json.schema_components(bodies, ref_template=_REFS)
    requests = dict(zip(bodies, references, strict=True))
    for reference in references:
        schema = components[reference["$ref"].rpartition("/")[2]]
        schema["properties"]["model"] = {"anyOf": [_TEXT, _NULL]}
    paths: dict[str, Schema] = {}
    for route in routes:
        answer = _ANSWERS.get(route.path, _OBJECT)
        content = {answer: {"schema": _TEXT}} if isinstance(answer, str) else _json(answer)
        is_ollama = route.path.startswith("/api/")
        if route.body is not None and "stream" in route.body.__struct_fields__:
            kind = LINES if is_ollama else "text/event-stream"
            content[kind] = {"schema": {}}
        wrong = _object("error", error=_TEXT) if is_ollama else _ref("Error")
        error = {"description": "what is wrong", "content": _json(wrong)}
        operation: Schema = {
            "summary": route.summary,
            "responses": {
                "200": {"description": route.summary, "content": content},
                "default": error,
            },
        }
        if route.body is not None:
            body = {"required": True, "content": _json(requests[route.body])}
            operation["requestBody"] = body
        if "{model}" in route.path:
            named = {"name": "model", "in": "path", "required": True}
            operation["parameters"] = [{**named, "schema": {**_TEXT, "enum": list(models)}}]
        if route.is_open:
            operation["security"] = []
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "qsf serve", "version": version},
        "paths": paths,
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "components": {
            "schemas": {**components, **_SCHEMAS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _json(schema: Schema) -> dict[str, Schema]:
    return {"application/json": {"schema": schema}}
