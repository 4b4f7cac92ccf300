"""Calls whose texts stand between marks, as Gemma 4 writes them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsf.serve.tools.call_formats import FORMATS, calls_grammar
from qsf.serve.tools.call_reader import CallReader
from qsf.text.constraints import Constraints

FORM = next(form for form in FORMATS if form.name == "Gemma 4")
FIELDS: Any = {
    "properties": {
        "say": {"type": "string"}, "kind": {"enum": ["a", "b"]},
        "id": {"type": "string", "pattern": "x+"},
        "to": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
    },
    "required": ["say", "kind", "id", "to", "at"],
}  # fmt: skip
GIVEN = '{say:<|"|>a "b"<|"|>,kind:<|"|>b<|"|>,id:"xx",to:[<|"|>y<|"|>,<|"|><|"|>],at:{n:-1.5}}'
MEANT = {"say": 'a "b"', "kind": "b", "id": "xx", "to": ["y", ""], "at": {"n": -1.5}}


def text_of(body: str) -> str:
    return f"<|tool_call>call:f{body}<tool_call|>"


def read(text: str) -> tuple[str, list[Any]]:
    """The text beside the calls, and their arguments, from pieces of one letter."""
    reader = CallReader(FORM, {"f": FIELDS}, is_parallel=True)
    said, parts = zip(*[*map(reader.push, text), reader.finish()], strict=True)
    return "".join(said), [json.loads(part.arguments) for some in parts for part in some]


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ('{city:<|"|>a "b": {c}, \\n<|"|>,days:3}', {"city": 'a "b": {c}, \\n', "days": 3}),
        ('{ n : -1.5e3 , to: [ <|"|>x<|"|>, {a:true, b:null} ] }',
         {"n": -1500.0, "to": ["x", {"a": True, "b": None}]}),
        ('{"city": "Ulm", <|"|>days<|"|>: [], to: {}}', {"city": "Ulm", "days": [], "to": {}}),
        ("{}", {}),
        (GIVEN, MEANT),
    ],
)  # fmt: skip
def test_values_are_read(body: str, values: Any) -> None:
    assert read(text_of(body)) == ("", [values])


@pytest.mark.parametrize(
    "body", ['{city:<|"|>a}', "{city:Ulm}", "{days:3", "days:3}", "{days}", '{a:"b}', "{a:3}}"]
)
def test_what_has_no_values_is_text(body: str) -> None:
    assert read(text_of(body)) == (text_of(body), [])


def test_values_follow_their_schemas(tiny_chat_8bit: Path) -> None:
    """A text has marks; one with limits is JSON. Objects and lists hold both."""
    pytest.importorskip("llguidance")
    grammar = calls_grammar(FORM, {"f": FIELDS}, {}, is_parallel=True)
    constraints = Constraints(tiny_chat_8bit)
    for body, is_right in (
        (GIVEN, True),
        (GIVEN.replace("xx", "y"), False),
        (GIVEN.replace("-1.5", "true"), False),
        (GIVEN.replace(">b<", ">c<"), False),
    ):
        constraint = constraints.make("lark", grammar, "x")
        assert constraint.take_text(text_of(body)) == is_right, body
