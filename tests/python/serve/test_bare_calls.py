"""Calls that small models write without the mark that calls of their family begin with."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.serve.tools.call_formats import FORMATS
from qsf.serve.tools.call_reader import CallPart, CallReader


def test_a_call_without_its_mark_is_one_where_it_begins_the_answer() -> None:
    """As Qwen2.5-Coder 0.5B writes it. Of another function, or later, it is text."""
    hermes = next(form for form in FORMATS if form.name.startswith("Hermes"))

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        reader = CallReader(hermes, {"add": {}}, is_parallel=True)
        said, parts = "", list[CallPart]()
        for letter in text:
            more, some = reader.push(letter)
            said, parts = said + more, [*parts, *some]
        more, some = reader.finish()
        names = [part.name for part in (*parts, *some) if part.name]
        arguments = "".join(part.arguments for part in (*parts, *some))
        return said + more, [(name, arguments) for name in names]

    call = '{"name": "add", "arguments": {"a": 3}}'
    assert read(call) == ("", [("add", '{"a": 3}')])
    assert read(f"\n{call}\n")[1] == [("add", '{"a": 3}')]
    for text in (
        f"So: {call}", call.replace("add", "sub"), '{"name": "Bob"}', '{"name', "{", "",
        '{"name": "' + "x" * 300,
    ):  # fmt: skip
        assert read(text) == (text, [])
