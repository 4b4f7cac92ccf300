"""Tools and calls for chat templates that lack them: written into the texts of messages."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qsf.serve.tools.call_formats import GENERIC, Format, find_format
from qsf.text.chat import Trusted, protected

if TYPE_CHECKING:
    from qsf.text.chat import ChatTemplate

# A template that concatenates arguments with texts, as DeepSeek's does: they must be a text.
_JOINS_ARGUMENTS = re.compile(r"\+\s*[\w.'\"\[\]]*arguments['\"\]]*\s*\+")
_NO_SYSTEM = re.compile(r"system role not supported", re.IGNORECASE)
_TOOL_ROLE = re.compile(r"['\"]tool['\"]")
# Phi-4-mini's template reads tools from the system message, as a text.
_OWN_TOOLS = "message['tools']"


def fit_messages(
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: ChatTemplate,
    special_names: Sequence[str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools in the form of a chat template.

    Parts that the template lacks are written into texts, in the form of the model's family, or else
    in the most common form. Other texts cannot form tokens of ``special_names``.
    """
    source = template.source if tools is None else template.tool_source
    form = find_format(source)
    if form is not None and form.is_numbered:
        turns = _numbered(turns)
    if form is None or "tool_calls" not in source:
        turns = _without_calls(turns, form or GENERIC, source, special_names)
    elif _JOINS_ARGUMENTS.search(source):
        nothing = None if "is none" in source else ""
        turns = [_with_texts(turn, nothing) for turn in turns]
    if tools is None:
        return turns, None
    if form is None or not re.search(r"\btools\b", source):
        text = _description(form or GENERIC, tools, special_names)
        return _with_system(turns, text, source, special_names), None
    if _OWN_TOOLS in source:
        system = turns[0] if turns[0]["role"] == "system" else {"role": "system", "content": ""}
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**system, "tools": functions}, *turns[turns[0]["role"] == "system" :]], None
    return turns, tools


def _with_system(
    turns: list[dict[str, Any]], text: Trusted, source: str, special_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return messages with an addition to the system message, or to the first user message."""
    knows_system = not source or ("system" in source and _NO_SYSTEM.search(source) is None)
    is_there = turns[0]["role"] == "system"
    if knows_system and not is_there:
        return [{"role": "system", "content": text}, *turns]
    users = (i for i, turn in enumerate(turns) if turn["role"] == "user")
    index = 0 if is_there else next(users, 0)
    own_text = protected(turns[index]["content"] or "", special_names)
    parts = [own_text, text] if is_there else [text, own_text]
    turn = {**turns[index], "content": Trusted("\n\n".join(filter(None, parts)))}
    return [*turns[:index], turn, *turns[index + 1 :]]


def _description(
    form: Format, tools: Sequence[Mapping[str, Any]], special_names: Sequence[str]
) -> Trusted:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.write([("FUNCTION", {"PARAMETER": "VALUE"}, 0)])
    return Trusted(
        "# Tools\n\nYou can call these functions:\n<tools>\n"
        f"{protected(schemas, special_names)}\n</tools>\n\n"
        f"To call one, end with exactly this, capitals filled in:\n{example}\n\n"
        "If none helps, answer in words."
    )


def _numbered(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have counted ids, as such a model writes them."""
    new_ids: dict[Any, str] = {}
    numbers = itertools.count()
    messages = []
    for turn in turns:
        calls = []
        for call in turn.get("tool_calls", ()):
            new_ids[call["id"]] = f"functions.{call['function']['name']}:{next(numbers)}"
            calls.append({**call, "id": new_ids[call["id"]]})
        old_id = turn.get("tool_call_id")
        messages.append({**turn, **({"tool_calls": calls} if calls else {})})
        if old_id in new_ids:
            messages[-1]["tool_call_id"] = new_ids[old_id]
    return messages


def _with_texts(turn: dict[str, Any], nothing: str | None) -> dict[str, Any]:
    """Return a message whose calls have their arguments as texts, with content ``nothing`` or a
    text.
    """
    if "tool_calls" not in turn:
        return turn
    calls = []
    for call in turn["tool_calls"]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**turn, "content": turn["content"] or nothing, "tool_calls": calls}


def _without_calls(
    turns: list[dict[str, Any]], form: Format, source: str, special_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return messages whose calls and results are texts."""
    role = "tool" if form is not GENERIC and _TOOL_ROLE.search(source) else form.result_role
    messages: list[dict[str, Any]] = []
    for turn in turns:
        calls = turn.get("tool_calls")
        if calls:
            written = form.write(_protected_call(call, special_names) for call in calls)
            own_text = protected(turn["content"] or "", special_names)
            text = Trusted(f"{own_text}\n{written}" if own_text else written)
            turn = {"role": turn["role"], "content": text}
        elif turn["role"] == "tool" and role == "user":
            result = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if messages and messages[-1]["role"] == "user":  # templates require alternating turns
                content = f"{messages[-1]['content']}\n{result}"
                messages[-1] = {**messages[-1], "content": content}
                continue
            turn = {"role": "user", "content": result}
        elif turn["role"] == "tool":
            turn = {**turn, "role": role}
        messages.append(turn)
    return messages


def _protected_call(
    call: Mapping[str, Any], special_names: Sequence[str]
) -> tuple[str, Mapping[str, Any], int]:
    function = call["function"]
    number = str(call.get("id")).rpartition(":")[2]
    values = protected(function["arguments"], special_names)
    return function["name"], values, int(number) if number.isdigit() else 0
