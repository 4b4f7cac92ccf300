"""Calls that small models write without the mark that calls of their family begin with."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest

from qsf.serve.tools.call_formats import FORMATS, Format
from qsf.serve.tools.call_reader import CallPart, CallReader


@pytest.mark.parametrize("form", [f for f in FORMATS if f.begin], ids=lambda f: f.name)
def test_an_object_that_is_the_whole_answer_is_a_call(form: Format) -> None:
    """As Qwen2.5-Coder writes it. Of another function, or later, it is text."""

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        reader = CallReader(form, {"add": schema}, is_parallel=True)
        said, parts = "", list[CallPart]()
        for letter in text:
            more, some = reader.push(letter)
            said, parts = said + more, [*parts, *some]
        more, some = reader.finish()
        names = [part.name for part in (*parts, *some) if part.name]
        arguments = "".join(part.arguments for part in (*parts, *some))
        return said + more, [(name, arguments) for name in names]

    call = '{"name": "add", "arguments": {"a": 3}}'
    called = ("", [("add", '{"a": 3}')])
    for fence in ("```json\n", "```\n", "```"):
        assert read(f"{fence}{call}\n```") == read(f"\n{fence}{call}\n```\n") == called
        assert read(f"{fence}{call}") == called
    assert read(call) == read(f"\n{call}\n") == called
    for text in (
        f"So: {call}", call.replace("add", "sub"), '{"name": "Bob"}', '{"name', "{", "",
        '{"name": "' + "x" * 300, f"{call} is a call", f"{call}{call}", call[:-1],
        call.replace("3", '"x"'),
        f"```json\n{call}\n```\nadds 3", f"```python\n{call}```",
        "```json\n{}\n```", "``", "```json",
    ):  # fmt: skip
        assert read(text) == (text, [])


def test_a_fence_around_a_call_of_a_family_without_marks_is_left_out() -> None:
    llama = next(form for form in FORMATS if form.name == "Llama 3 and 4")
    reader = CallReader(llama, {"add": {}}, is_parallel=True)
    assert reader.push('```json\n{"name": "add", "parameters": {}}\n```') == ("", ())
    said, (part,) = reader.finish()
    assert (said, part.name, part.arguments) == ("", "add", "{}")
