"""Chat templates give what transformers makes of them, byte for byte.

The oracle is Jinja2 within this process, with the settings of transformers (huggingface.co/docs,
"Chat templates"; src/transformers/utils/chat_template_utils.py), which a golden test checks against
transformers itself.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import pytest
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from make.jinja_snippets import EXPRESSIONS, FAILURES, STATEMENTS, TEMPLATES, VALUES
from qsf.errors import QsfError
from qsf.text.chat import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find", "description": "Find \"it\" <now>, é.",
        "parameters": {
            "type": "object", "required": ["q"],
            "properties": {
                "q": {"type": "string", "description": "What"}, "n": {"type": "integer", "top": 3},
                "tags": {"type": "array", "items": {"type": "string"}}, "how": {"enum": ["a", "b"]},
                "where": {"type": ["string", "null"]},
                "o": {"type": "object", "properties": {"x": {"type": "number"}}},
            },
        },
    },
}  # fmt: skip
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Hi <é>\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello "}
THOUGHTS = {"role": "assistant", "content": "Yes", "reasoning_content": "\nwhy\n"}
ARGUMENTS = {"q": "x", "n": 1.0, "big": 2**60, "list": [1, None, True], "o": {"a": 1e-07}}
CALL = {
    "role": "assistant", "content": "", "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}
    ],
}  # fmt: skip
RESULT = {"role": "tool", "content": '{"r": 1.50}', "tool_call_id": "a1"}
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([SYSTEM, USER, ASSISTANT, USER], {"enable_thinking": False, "thinking": True}),
    ([USER, THOUGHTS], {"add_generation_prompt": False}),
    ([SYSTEM, USER, CALL, RESULT, RESULT], {"tools": [TOOL, TOOL], "date_string": "1 Jan 2026"}),
    ([USER], {"documents": [{"title": "T", "text": "a"}, {"title": "U", "text": "b"}]}),
    ([USER, USER], {"controls": {"length": "short"}}),
]


class Generation(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_text")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> Any:
        return caller()


def oracle(source: str, values: dict[str, Any]) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: Any = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: Any = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source).render(**values)


def values_of(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The values that transformers gives a template."""
    thoughts = [
        {"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m
        for m in messages
    ]
    fixed = {"tools": None, "documents": None, "add_generation_prompt": True}
    return {**TOKENS, **fixed, **arguments, "messages": thoughts}


def render(source: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    """The text of the engine's own way."""
    others = dict(arguments)
    return ChatTemplate(source, TOKENS).render(
        messages,
        tools=others.pop("tools", None),
        add_generation_prompt=others.pop("add_generation_prompt", True),
        template_args=others or None,
    )


def snippets() -> list[str]:
    """Statements, and expressions in groups: each is a line, so that a difference is seen."""
    lines = [f"{i}: [{{{{ {text} }}}}]\n" for i, text in enumerate(EXPRESSIONS)]
    return [*STATEMENTS, *("".join(lines[i : i + 20]) for i in range(0, len(lines), 20))]


def arguments_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "messages"}


def test_four_hundred_snippets() -> None:
    assert len(EXPRESSIONS) + len(STATEMENTS) + len(FAILURES) > 400
    for source in snippets():
        expected = oracle(source, values_of(VALUES["messages"], arguments_of(VALUES)))
        assert render(source, VALUES["messages"], arguments_of(VALUES)) == expected, source


@pytest.mark.parametrize("source", FAILURES)
def test_what_fails_there_fails_here(source: str) -> None:
    values = values_of(VALUES["messages"], arguments_of(VALUES))
    with pytest.raises(Exception):  # noqa: B017, PT011 (any error of Python)
        oracle(source, values)
    with pytest.raises(QsfError, match="chat template"):
        render(source, VALUES["messages"], arguments_of(VALUES))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_with_the_features_of_published_ones(name: str) -> None:
    n_rendered = 0
    for messages, arguments in CONVERSATIONS:
        try:
            expected = oracle(TEMPLATES[name], values_of(messages, arguments))
        except Exception:
            with pytest.raises(QsfError, match="chat template"):
                render(TEMPLATES[name], messages, arguments)
            continue
        assert render(TEMPLATES[name], messages, arguments) == expected
        n_rendered += 1
    assert n_rendered >= 3


@pytest.mark.golden
def test_the_oracle_is_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    cases = [(text, VALUES["messages"], arguments_of(VALUES)) for text in snippets()]
    cases += [(text, *case) for text in TEMPLATES.values() for case in CONVERSATIONS]
    for source, messages, arguments in cases:
        values = values_of(messages, arguments)
        try:
            expected = oracle(source, values)
        except Exception:
            continue
        rendered, _ = render_jinja_template(
            [values.pop("messages")], chat_template=source, **values
        )
        assert rendered == [expected], source
