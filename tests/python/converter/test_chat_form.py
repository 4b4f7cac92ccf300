"""The fixed form that a conversion finds for a chat template, and templates that have none."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json

import pytest

from qsf.text.chat import ChatTemplate
from qsf_converter.sources.usable import chat_form, joined, usable_chat

_ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _ANSWER
_TRIMMED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|system|>You help.<|end|>{% endif %}" + _CHATML
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + _CHATML
_MERGED = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = '<<' + m.content + '>>' %}{% elif m.role == 'user' %}[I]{{ ns.s }}"
    "{{ m.content }}[/I]{% set ns.s = '' %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_TURNS = (" one", "two ", "three\n", "4", "five")


@pytest.mark.parametrize("source", [_CHATML, _TRIMMED, _DEFAULT_SYSTEM, _NO_SYSTEM, _MERGED])
def test_a_form_makes_what_the_template_makes(source: str) -> None:
    """The texts around messages are found: for systems, defaults, and messages without spaces."""
    special = {"bos_token": "<s>"}
    form = chat_form(source, special)
    assert form is not None
    assert ("system" in form) == (source != _NO_SYSTEM)
    roles = ("user", "assistant")
    for system in (None, " Be brief. ")[: 1 + ("system" in form)]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": roles[i % 2], "content": t} for i, t in enumerate(_TURNS)]
        expected = ChatTemplate(source, special).render(messages)
        assert joined(form, _TURNS, system) == expected


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # counts
        "{{ strftime_now('%Y') }}" + _CHATML,  # the day of the conversion must not stay
        "{{ messages[-1].content }}",  # the past is not there
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% if messages | length > 3 %}long {% endif %}" + _CHATML,
    ],
)
def test_a_template_without_a_form_gets_none(source: str | None) -> None:
    """A form that would make other prompts is worse than none."""
    assert chat_form(source, {}) is None


def test_the_section_has_the_form() -> None:
    """CHAT keeps the template and has its form beside it."""
    chat = {"chat_template": _CHATML, "special_tokens": {}, "generation": {}}
    data, _, _ = usable_chat(json.dumps(chat).encode(), {})
    assert json.loads(data)["form"]["ask"] == "<|end|><|assistant|>"
