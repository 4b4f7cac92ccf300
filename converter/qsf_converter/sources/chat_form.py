"""A chat template as fixed texts around the messages, for programs without Jinja.

Most templates put the same texts around each message. Rendering conversations of marks reveals
these texts; they are kept if they give the template's own prompts for other conversations.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsf.errors import QsfError
from qsf.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MARKS = ("qZ0Xk", "qZ1Xk", "qZ2Xk")
_TRIALS = ("Hi", "  two words\n", "A \n\n B ", "tail ", "end.")
_SYSTEM = " be brief\n"


def chat_form(template: object, special_tokens: Mapping[str, object]) -> dict[str, Any] | None:
    """Return the form of a template (docs/format.md, section CHAT), or None if it has none."""
    chat = ChatTemplate(template, special_tokens)
    if chat.is_plain or "strftime_now" in chat.source:
        return None
    try:
        form = _form_of(chat)
        is_exact = form is not None and all(
            _render(chat, _TRIALS[:n], system) == joined(form, _TRIALS[:n], system)
            for system in (None, _SYSTEM)[: 1 + ("system" in form)]
            for n in (1, 3, 5)
        )
    except QsfError:
        return None
    return form if is_exact else None


def _form_of(chat: ChatTemplate) -> dict[str, Any] | None:
    texts = _around(_render(chat, _MARKS, None), _MARKS)
    if texts is None:
        return None
    form: dict[str, Any] = dict(zip(("begin", "answer", "next", "ask"), texts, strict=True))
    form["trimmed"] = _TRIALS[1] not in _render(chat, _TRIALS[1:2], None)
    try:
        before = _around(_render(chat, _MARKS[1:2], _MARKS[0]), _MARKS[:2])
    except QsfError:  # the template refuses a system message
        before = None
    if before is not None:
        form["system"] = before[:2]
    return form


def _around(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marks, if each occurs once and in order."""
    parts = []
    for mark in marks:
        part, separator, text = text.partition(mark)
        if not separator or mark in text:
            return None
        parts.append(part)
    return [*parts, text]


def _render(chat: ChatTemplate, turns: Sequence[str], system: str | None) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return chat.render(messages)


def joined(form: Mapping[str, Any], turns: Sequence[str], system: str | None) -> str:
    """Return the form's prompt for turns that alternate between user and model."""
    trim = str.strip if form["trimmed"] else str
    text = form["begin"] if system is None else trim(system).join(form["system"])
    for i, turn in enumerate(turns):
        is_last = i + 1 == len(turns)
        text += trim(turn) + form["ask" if is_last else ("answer", "next")[i % 2]]
    return str(text)
