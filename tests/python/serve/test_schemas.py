"""A sample of JSON schemas: every answer validates, or the schema is refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.served import Client, serving

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

CLOSED = {"additionalProperties": False}
SMALL = {"type": "integer", "minimum": -9, "maximum": 99}
POINT: Any = {
    "type": "object",
    "properties": {"x": SMALL, "y": SMALL},
    "required": ["x", "y"],
    **CLOSED,
}
SCHEMAS: dict[str, Any] = {
    "null and boolean": {"type": ["null", "boolean"]},
    "integer limits": {"type": "integer", "minimum": -3, "exclusiveMaximum": 100},
    "number limits": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
    "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "enum": {"enum": ["a", 1, None, {"b": [True]}]},
    "const": {"const": {"a": "\u00e9\n\"\\"}},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, POINT], "items": False,
              "minItems": 2},
    "object": POINT,
    "optional": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, **CLOSED},
    "other keys": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9},
                   "maxProperties": 2},
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 0},
                                              "maxItems": 3}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 7}]},
    "references": {"$defs": {"p": POINT}, "type": "array", "items": {"$ref": "#/$defs/p"},
                   "maxItems": 2, "minItems": 1},
    "recursion": {"$defs": {"t": {"type": "object", "properties": {
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}}, "required": ["next"],
        **CLOSED}}, "$ref": "#/$defs/t"},
    "false": {"type": "object", "properties": {"a": False}, **CLOSED},
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    with serving(tiny_chat_8bit, parallel=4, constraints=True) as found:
        yield found


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_answer_validates(client: Client, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = {
        "messages": [{"role": "user", "content": "Tell me"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "max_tokens": 250,
        "temperature": 1.5,
        "n": 4,
    }
    n_whole = 0
    for seed in (1, 5):
        answer = client.post("/v1/chat/completions", {**fields, "seed": seed})
        if answer.status == 400:  # refused, never dropped
            assert answer.error["code"] == "invalid_grammar"
            assert "multipleOf" in schema or "maxProperties" in schema, answer.error
            return
        for choice in answer.json["choices"]:
            if choice["finish_reason"] == "length":
                continue  # the beginning of one
            n_whole += 1
            value = json.loads(choice["message"]["content"])
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    assert n_whole > 0
