"""Calls of functions in the text of a model: how each family writes them, and how they are read."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from make.refusals import table
from make.steps import ARGUMENTS, HERMES, WEATHER, count_lines, form_of, is_linear
from qsf.foreign_json import read_json_at
from qsf.serve.tools.call_formats import FORMATS, Format, calls_grammar
from qsf.serve.tools.call_reader import CallReader
from qsf.serve.tools.request import completed
from qsf.text.constraints import Constraints

SCHEMAS: Any = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
BY_NAME = {f"{form.name} {form.begin}{form.middle}": form for form in FORMATS}
GEMMA = form_of("Gemma 4")


def read(
    form: Format, pieces: Sequence[str], schemas: Any = SCHEMAS, *, is_parallel: bool = True
) -> tuple[str, list[tuple[str, Any]]]:
    """The text beside the calls, and the calls, whose arguments are JSON."""
    reader = CallReader(form, schemas, is_parallel=is_parallel)
    text = ""
    calls: list[list[str]] = []
    for more, parts in [*map(reader.push, pieces), reader.finish()]:
        text += more
        for part in parts:
            if part.name:
                assert len(part.id) == 9
                calls.append([part.name, part.arguments])
            else:
                assert part.index == len(calls) - 1
                calls[part.index][1] += part.arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def cut(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(0, len(text), n)]


@pytest.mark.parametrize(
    ("name", "text"),
    table("tables")["calls"],
)  # fmt: skip
def test_each_notation_is_written_and_read(name: str, text: str) -> None:
    form, values = form_of(name), {"city": "Ulm", "days": 3}
    assert form.write([("weather", values, 7)]) == text
    assert read(form, [text]) == ("", [("weather", values)])


@pytest.mark.parametrize("form", BY_NAME.values(), ids=BY_NAME)
def test_calls_are_read_however_the_text_is_cut(form: Format) -> None:
    calls = [("weather", ARGUMENTS), ("now", {})]
    said = "I look it up." if form.begin else ""
    numbered = [(*call, i) for i, call in enumerate(calls)]
    text = f"{said}\n{form.write(numbered)}"
    if not form.begin:
        text = "; ".join(form.write([call]) for call in numbered)
    for n in (1, 2, 3, 7, len(text)):
        assert read(form, cut(text, n)) == (said, calls), n
    assert read(form, list(text), is_parallel=False) == (said, calls[:1])


@pytest.mark.parametrize("form", BY_NAME.values(), ids=BY_NAME)
def test_what_is_no_call_is_text(form: Format) -> None:
    begin, end = form.begin, form.end
    for text in (
        "", " Hello  ", "a <tool b [TOOL c", "1 < 2 and [3]", '{"answer": 42}', "{",
        form.write([("unknown", ARGUMENTS, 0)]), f"{begin}x", f"{begin} {end} y",
    ):  # fmt: skip
        for n in (1, 5, 100):
            assert read(form, cut(text, n)) == (text, []), n


def test_unusual_json_is_read() -> None:
    for body in (
        '{"arguments": {"days": 1}, "name": "weather"}',
        '\n{ "name" : "weather" , "parameters" : {"days": 1} }\n',
        '{"name": "weather", "arguments": "{\\"days\\": 1}"}',
        '[{"name": "weather", "arguments": {"days": 1}, "id": "a}"}]',
    ):
        text = f"<tool_call>{body}</tool_call> Done."
        assert read(HERMES, text) == ("Done.", [("weather", {"days": 1})]), body
    listed = BY_NAME['Mistral [TOOL_CALLS]", "arguments": ']
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "123456789"}, '
    text += '{"name": "weather", "arguments": {"days": 1}}]'
    assert read(listed, text) == ("", [("now", {}), ("weather", {"days": 1})])


def test_arguments_are_told_while_they_are_written() -> None:
    reader = CallReader(HERMES, SCHEMAS, is_parallel=True)
    start = '<tool_call>\n{"name": "weather", "arguments": {"city": "U'
    _, (begun,) = reader.push(start)
    assert (begun.name, begun.arguments) == ("weather", '{"city": "U')
    _, (more,) = reader.push("lm")
    assert (more.name, more.arguments) == ("", "lm")


# ---- calls without the mark of their family ----
@pytest.mark.parametrize("form", [f for f in FORMATS if f.begin], ids=lambda f: f.name)
def test_an_object_that_is_the_whole_answer_is_a_call(form: Format) -> None:
    """As Qwen2.5-Coder writes it. Of another function, or later, it is text."""
    schemas = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    call = '{"name": "add", "arguments": {"a": 3}}'
    called = ("", [("add", {"a": 3})])
    for fence in ("```json\n", "```\n", "```"):
        assert read(form, f"\n{fence}{call}\n```\n", schemas) == called
        assert read(form, f"{fence}{call}", schemas) == called
    assert read(form, call, schemas) == read(form, f"\n{call}\n", schemas) == called
    for text in (
        f"So: {call}", call.replace("add", "sub"), '{"name": "Bob"}', '{"name', "{", "",
        '{"name": "' + "x" * 300, f"{call} is a call", f"{call}{call}", call[:-1],
        call.replace("3", '"x"'),
        f"```json\n{call}\n```\nadds 3", f"```python\n{call}```",
        "```json\n{}\n```", "``", "```json",
    ):  # fmt: skip
        assert read(form, text, schemas) == (text, [])


def test_a_fence_around_a_call_of_a_family_without_marks_is_left_out() -> None:
    text = '```json\n{"name": "add", "parameters": {}}\n```'
    assert read(form_of("Llama 3 and 4"), [text], {"add": {}}) == ("", [("add", {})])


# ---- Gemma 4's texts between marks ----
FIELDS: Any = table("tables")["fields of calls"]  # fmt: skip
GIVEN = '{say:<|"|>a "b"<|"|>,kind:<|"|>b<|"|>,id:"xx",to:[<|"|>y<|"|>,<|"|><|"|>],at:{n:-1.5}}'
MEANT = {"say": 'a "b"', "kind": "b", "id": "xx", "to": ["y", ""], "at": {"n": -1.5}}


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ('{city:<|"|>a "b": {c}, \\n<|"|>,days:3}', {"city": 'a "b": {c}, \\n', "days": 3}),
        ('{ n : -1.5e3 , to: [ <|"|>x<|"|>, {a:true, b:null} ] }',
         {"n": -1500.0, "to": ["x", {"a": True, "b": None}]}),
        ('{"city": "Ulm", <|"|>days<|"|>: [], to: {}}', {"city": "Ulm", "days": [], "to": {}}),
        ("{}", {}),
        (GIVEN, MEANT),
        *((wrong, None) for wrong in ('{city:<|"|>a}', "{city:Ulm}", "{days:3", "days:3}",
                                      "{days}", '{a:"b}', "{a:3}}")),
    ],
)  # fmt: skip
def test_marked_values_are_read(body: str, values: Any) -> None:
    text = f"<|tool_call>call:f{body}<tool_call|>"
    want = (text, []) if values is None else ("", [("f", values)])
    assert read(GEMMA, text, {"f": FIELDS}) == want


def test_marked_values_follow_their_schemas(tiny_chat_8bit: Path) -> None:
    """A text has marks; one with limits is JSON. Objects and lists hold both."""
    pytest.importorskip("llguidance")
    grammar = calls_grammar(GEMMA, {"f": FIELDS}, {}, is_parallel=True)
    constraints = Constraints(tiny_chat_8bit)
    for body, is_right in (
        (GIVEN, True),
        (GIVEN.replace("xx", "y"), False),
        (GIVEN.replace("-1.5", "true"), False),
        (GIVEN.replace(">b<", ">c<"), False),
    ):
        constraint = constraints.make("lark", grammar, "x")
        text = f"<|tool_call>call:f{body}<tool_call|>"
        assert constraint.take_text(text) == is_right, body


# ---- linear time ----

# What a model may write in a loop, by the family: the first part, then many of the second
LOOPS: list[list[str]] = table("tables")["loops"]


class Counted(CallReader):
    """A reader that counts the characters it looks at."""

    n_read = 0

    @property
    def _rest(self) -> str:
        self.n_read += len(self._text_left)
        return self._text_left

    @_rest.setter
    def _rest(self, text: str) -> None:
        self._text_left = text


@pytest.mark.parametrize(("family", "start", "loop"), LOOPS)
def test_calls_are_read_in_linear_time(family: str, start: str, loop: str) -> None:
    schemas: dict[str, Any] = {"f": {"properties": {"a": {"type": "string"}}}}

    def count(n: int) -> int:
        reader = Counted(form_of(family), schemas, is_parallel=True)
        text = start + loop * n
        n_lines = count_lines(lambda: [*map(reader.push, text), reader.finish()])
        return reader.n_read + n_lines

    count(1)
    assert is_linear(count, 1000)


@pytest.mark.parametrize(
    ("start", "loop"),
    [("{", " "), ("{", '"\\"'), ('{"a":', '{"a":'), ("{", "a "), ('{"a": "', ",")],
)
def test_cut_arguments_are_read_in_linear_time(start: str, loop: str) -> None:
    assert is_linear(lambda n: count_lines(lambda: completed(start + loop * n + "@")), 500)


def test_a_value_is_measured_alone() -> None:
    """Not with the rest of the text, which may have many more values."""
    text = '{"a": "}"} ' + "[" * 100  # too deep, but another value
    assert read_json_at(text, 0) == ({"a": "}"}, 10)
