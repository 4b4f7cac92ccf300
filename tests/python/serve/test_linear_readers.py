"""What clients and models write is read in linear time: steps are counted at n and 2 n."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import pytest

from make.steps import count_lines, is_linear
from qsf.foreign_json import read_json_at
from qsf.serve.tools.call_formats import FORMATS
from qsf.serve.tools.call_reader import CallReader
from qsf.serve.tools.request import completed

# What a model may write in a loop, by the family: the first part, then many of the second
LOOPS = [
    ("Hermes and Qwen", "", "\n"),
    ("Hermes and Qwen", "", "a "),
    ("Hermes and Qwen", "<tool_call>", "\n"),
    ("Hermes and Qwen", "<tool_call>[", " "),
    ("Hermes and Qwen", "<tool_call>", "{ "),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    ("Qwen3-Coder", "<tool_call>\n<function=f>\n", "<parameter=a>\n"),
    ("GLM", "<tool_call>f\n", "<arg_key></arg_key><arg_value>"),
    ("GLM", "<tool_call>f\n<arg_key>", "</arg_key> "),
    ("Gemma 4", "<|tool_call>call:f{a:", '<|"|>x'),
    ("LFM2", "<|tool_call_start|>", "[ "),
    ("LFM2", "<|tool_call_start|>[f(a='", "()"),
    ("LFM2", "<|tool_call_start|>[f(a=1", ", b=[]"),
    ("Llama 4, pythonic", "", "[ "),
    ("Llama 3 and 4", "", "\n"),
    ("Llama 3 and 4", '{"name": ', " "),
    ("Phi-4-mini", "<|tool_call|>", " "),
    ("Granite", "<|tool_call|>", "{"),
    ("Mistral", "[TOOL_CALLS]", "f"),
    ("DeepSeek V3.1", "<｜tool▁calls▁begin｜>", "f "),
]


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
    form = next(form for form in FORMATS if form.name == family)
    schemas: dict[str, Any] = {"f": {"properties": {"a": {"type": "string"}}}}

    def count(n: int) -> int:
        reader = Counted(form, schemas, is_parallel=True)
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
