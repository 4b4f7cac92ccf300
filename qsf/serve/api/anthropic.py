"""Anthropic's Messages: the reader of requests, and the form of answers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from qsf.errors import QsfArgumentError, shown
from qsf.options import Whole
from qsf.serve.api.answering import Choice, Form, Sent
from qsf.serve.api.completion_request import (
    CompletionRequest,
    fit,
    ignored_fields,
    read_choosing,
    read_messages,
    read_stops,
    too_long,
)
from qsf.serve.api.openai import encode_messages
from qsf.serve.api.timings import usage
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.call_reader import CallPart
from qsf.serve.tools.request import (
    MAX_TOOLS,
    Tools,
    call_turn,
    checked_choice,
    read_function,
    read_tools,
    tools_constraint,
)
from qsf.text.arguments import as_messages

_REASONS = {"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "calls": "tool_use"}
_THINKING = ("enabled", "adaptive", "disabled")
_REFUSED = {
    "mcp_servers": "clients call the tools",
    "container": "there are no containers",
    "output_config": "answers are not constrained",
    "output_format": "answers are not constrained",
    "context_management": "the whole context is kept",
}


def problem_body(problem: Problem) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    return {"type": "error", "error": {"type": problem.kind, "message": str(problem)}}


def _read_turns(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages, with the system message first."""
    messages = read_messages(fields)
    system = fields.raw("system")
    turns = [] if system is None else [{"role": "system", "content": system}]
    try:
        as_messages(turns)
    except QsfArgumentError as error:
        raise too_long(error, "system") from None
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        turns += _blocks(message, content) if isinstance(content, list) else [message]
    return turns


def _blocks(message: dict[str, Any], content: list[Any]) -> list[dict[str, Any]]:
    """Return the turns of a message in blocks; each result of a call becomes its own turn."""
    calls, results, texts = [], [], []
    thoughts = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and isinstance(block.get("name"), str):
            calls.append(call_turn(block.get("id"), block["name"], block.get("input")))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts += block["thinking"]
        elif kind == "redacted_thinking":
            continue  # only Anthropic could decrypt it
        elif kind == "tool_result":
            inner = block.get("content")
            inner = "" if inner is None else inner
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": inner}
            )
        else:
            texts.append(block)
    if thoughts:
        message = {**message, "reasoning_content": thoughts}
    if calls:
        return [{**message, "content": texts or "", "tool_calls": calls}]
    if thoughts:
        return [{**message, "content": texts or ""}]
    return [*results, {**message, "content": texts}] if texts or not results else results


def _read_tools(fields: Fields, serving: Serving) -> Tools | None:
    tools = []
    for value in fields.list("tools", MAX_TOOLS):
        kind = value.get("type", "custom") if isinstance(value, dict) else value
        if kind not in ("custom", None):
            text = f"tools must be custom, not {shown(kind)}"
            raise invalid("tools", text, "unsupported_parameter")
        tools.append(read_function(value, "tools", "input_schema"))
    choice = fields.object("tool_choice")
    kind = choice.text("type")
    names = {"any": "required", "tool": choice.text("name")}
    return read_tools(
        tools,
        checked_choice(names.get(kind, kind) if kind is not None else None, tools),
        is_parallel=not choice.flag("disable_parallel_tool_use"),
        place="tools",
        serving=serving,
    )


def _read_thinking(fields: Fields) -> tuple[bool, dict[str, Any], int | None]:
    """Return whether thoughts are shown, arguments of the chat template, and the most tokens of
    thoughts.

    Many templates take ``enable_thinking``; models that always think then think unseen.
    """
    thinking = fields.object("thinking")
    kind = thinking.text("type", "disabled")
    if kind not in _THINKING:
        kinds = ", ".join(_THINKING)
        raise invalid("thinking.type", f"thinking.type must be one of {kinds}, not {shown(kind)}")
    thinking.ignore("display")
    budget = thinking.take("budget_tokens", Whole(0))
    arguments = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    return kind != "disabled", arguments, budget


def _read_prompt(
    fields: Fields, serving: Serving, tools: Tools | None, arguments: dict[str, Any]
) -> tuple[list[int], bool]:
    fields.refuse(_REFUSED)
    fields.ignore("metadata", "service_tier", "inference_geo", "cache_control", "speed")
    return encode_messages(_read_turns(fields), arguments, serving, tools)


def read(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /v1/messages. Raises Problem."""
    fields = Fields(body)
    fields.text("model")
    most = fields.take("max_tokens", Whole(1))
    if most is None:
        raise invalid("max_tokens", "max_tokens is missing")
    is_stream = fields.flag("stream")
    choosing = read_choosing(fields, serving, n_top=0, has_logprob=False)
    stops = read_stops(fields, "stop_sequences")
    tools = _read_tools(fields, serving)
    has_thoughts, arguments, max_thoughts = _read_thinking(fields)
    prompt, begins_text = _read_prompt(fields, serving, tools, arguments)
    return CompletionRequest(
        prompts=[prompt],
        choosing=choosing,
        **fit([prompt], most, serving, "messages"),
        max_thoughts=max_thoughts,
        stops=stops,
        begins_text=begins_text,
        is_stream=is_stream,
        tools=tools,
        constraint=tools_constraint(tools, None, serving),
        ignored=ignored_fields([fields], serving),
        extra={"has_thoughts": has_thoughts},
    )


def count_tokens(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /v1/messages/count_tokens."""
    fields = Fields(body)
    fields.text("model")
    tools = _read_tools(fields, serving)
    _, arguments, _ = _read_thinking(fields)
    return {"input_tokens": len(_read_prompt(fields, serving, tools, arguments)[0])}


class MessagesForm(Form):
    """Answers of /v1/messages."""

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        self.name = f"msg_{os.urandom(12).hex()}"
        self._serving = serving
        self._has_thoughts = bool(request.extra["has_thoughts"])
        self._n_blocks = 0  # begun
        self._open = ""  # kind of the open block; "": none

    def _message(self, choices: Sequence[Choice], content: list[Any]) -> dict[str, Any]:
        choice = choices[0]
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self._serving.name,
            "content": content,
            "stop_reason": _REASONS.get(choice.reason),
            "stop_sequence": choice.job.matcher.stopped_by,
            "usage": self._usage(choices),
        }

    @staticmethod
    def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
        counts = usage(choices, 1)
        n_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - n_cached,
            "cache_read_input_tokens": n_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
            },
        }

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the message without its text."""
        return [_event("message_start", message=self._message(choices, []))]

    def _begin_block(self, block: dict[str, Any]) -> list[Sent]:
        sent = self._end_block()
        sent.append(_event("content_block_start", index=self._n_blocks, content_block=block))
        self._n_blocks += 1
        self._open = block["type"]
        return sent

    def _end_block(self) -> list[Sent]:
        is_open, self._open = bool(self._open), ""
        return [_event("content_block_stop", index=self._n_blocks - 1)] if is_open else []

    def _delta(self, kind: str, **delta: str) -> Sent:
        delta = {"type": kind, **delta}
        return _event("content_block_delta", index=self._n_blocks - 1, delta=delta)

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of thoughts, of text, or of calls."""
        sent: list[Sent] = []
        if event.reasoning and self._has_thoughts:
            if self._open != "thinking":
                sent += self._begin_block(_thoughts(""))
            sent.append(self._delta("thinking_delta", thinking=event.reasoning))
        if event.text:
            if self._open != "text":
                sent += self._begin_block({"type": "text", "text": ""})
            sent.append(self._delta("text_delta", text=event.text))
        for part in event.calls:
            if part.name:
                sent += self._begin_block(_tool_use(part, {}))
            if part.arguments:
                sent.append(self._delta("input_json_delta", partial_json=part.arguments))
        return sent

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the end of the last block."""
        sent = [] if self._n_blocks else self._begin_block({"type": "text", "text": ""})
        return sent + self._end_block()

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the stop reason and the numbers of tokens."""
        message = self._message(choices, [])
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        last = _event("message_delta", delta=delta, usage=message["usage"])
        return [last, _event("message_stop")]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error event, which Anthropic's clients raise."""
        return [("error", problem_body(problem))]

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the answer in one piece."""
        choice = choices[0]
        thoughts = choice.reasoning if self._has_thoughts else ""
        blocks = [_thoughts(thoughts)] if thoughts else []
        if choice.text or not (thoughts or choice.calls):
            blocks.append({"type": "text", "text": choice.text})
        blocks += [_tool_use(call, call.values()) for call in choice.calls]
        return self._message(choices, blocks)


def _thoughts(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call: CallPart, value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def _event(kind: str, **more: Any) -> Sent:
    return kind, {"type": kind, **more}
