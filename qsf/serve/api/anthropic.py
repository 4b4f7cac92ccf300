"""Anthropic's Messages: the reader of requests, and the form of answers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from qsf.errors import QsfArgumentError, shown
from qsf.options import Whole
from qsf.serve.api.answering import Choice, Encoder, Route, Sent, usage
from qsf.serve.api.ask import (
    Ask,
    Objects,
    Repetition,
    Sampling,
    Stops,
    Thoughts,
    as_list,
    read_choosing,
    too_long,
)
from qsf.serve.api.openai import chat_ask, encode_messages
from qsf.serve.http.body import Part, within
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.call_reader import CallPart
from qsf.serve.tools.request import Offered, Tools, call_turn, read_function, read_tools
from qsf.text.arguments import as_messages

_REASONS = {"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "calls": "tool_use"}


class Thinking(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("display",)

    type: Literal["enabled", "adaptive", "disabled"] | None = None
    budget_tokens: Annotated[int, within(Whole(0))] | None = None


class ToolChoice(Part):
    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Prompt(Sampling, kw_only=True):
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Sampling.IGNORED,
        *("metadata", "service_tier", "inference_geo", "cache_control", "speed"),
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        **Sampling.REFUSED,
        "mcp_servers": "clients call the tools",
        "container": "there are no containers",
        "output_config": "answers are not constrained",
        "output_format": "answers are not constrained",
        "context_management": "the whole context is kept",
    }

    messages: Objects
    system: str | list[Any] | None = None
    tools: Offered | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class Messages(Prompt, kw_only=True):
    max_tokens: Annotated[int, within(Whole(1))]
    stream: bool | None = None
    stop_sequences: Stops | None = None
    repetition_penalty: Repetition | None = None


def problem_body(problem: Problem) -> dict[str, Any]:
    return {"type": "error", "error": {"type": problem.kind, "message": str(problem)}}


def _turns(fields: Prompt) -> list[dict[str, Any]]:
    """Return the messages, with the system message first."""
    turns = [] if fields.system is None else [{"role": "system", "content": fields.system}]
    try:
        as_messages(turns)
    except QsfArgumentError as error:
        raise too_long(error, "system") from None
    for message in fields.messages:
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


def _read_tools(fields: Prompt, serving: Serving) -> Tools | None:
    tools = []
    for value in fields.tools or ():
        kind = value.get("type", "custom") if isinstance(value, dict) else value
        if kind not in ("custom", None):
            text = f"tools must be custom, not {shown(kind)}"
            raise invalid("tools", text, "unsupported_parameter")
        tools.append(read_function(value, "input_schema"))
    choice = fields.tool_choice or ToolChoice()
    names: dict[str | None, str | None] = {"any": "required", "tool": choice.name}
    wanted = names.get(choice.type, choice.type)
    return read_tools(tools, wanted, serving, is_parallel=not choice.disable_parallel_tool_use)


def _thoughts(fields: Prompt) -> Thoughts:
    """Return the thinking options; models that always think then think unseen.

    Many templates take ``enable_thinking``.
    """
    thinking = fields.thinking or Thinking()
    kind = thinking.type or "disabled"
    arguments = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    return Thoughts(arguments, thinking.budget_tokens, 1)


def read(fields: Messages, serving: Serving) -> Ask:
    return chat_ask(
        serving,
        _turns(fields),
        most=fields.max_tokens,
        thoughts=_thoughts(fields),
        tools=_read_tools(fields, serving),
        choosing=read_choosing(fields, serving, fields.repetition_penalty),
        stops=as_list(fields.stop_sequences),
        is_stream=bool(fields.stream),
        shows_thoughts=(fields.thinking or Thinking()).type in ("enabled", "adaptive"),
    )


def count_tokens(fields: Prompt, serving: Serving) -> dict[str, Any]:
    tools, arguments = _read_tools(fields, serving), _thoughts(fields).arguments
    return {"input_tokens": len(encode_messages(_turns(fields), arguments, serving, tools)[0])}


class MessagesEncoder(Encoder):
    prefix = "msg_"

    def __init__(self, ask: Ask, serving: Serving) -> None:
        super().__init__(ask, serving)
        self._n_blocks = 0  # begun
        self._open = ""  # kind of the open block; "": none

    def _message(self, content: list[Any]) -> dict[str, Any]:
        choice = self.choices[0]
        counts = usage(self.choices)
        n_cached = counts["prompt_tokens_details"]["cached_tokens"]
        n_thought = counts["completion_tokens_details"]["reasoning_tokens"]
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.serving.name,
            "content": content,
            "stop_reason": _REASONS.get(choice.reason),
            "stop_sequence": choice.job.matcher.stopped_by,
            "usage": {
                "input_tokens": counts["prompt_tokens"] - n_cached,
                "cache_read_input_tokens": n_cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": n_thought},
            },
        }

    def begin(self) -> list[Sent]:
        return [_event("message_start", message=self._message([]))]

    def _begin_block(self, block: dict[str, Any]) -> list[Sent]:
        sent = self._end_block()
        sent.append(_event("content_block_start", index=self._n_blocks, content_block=block))
        self._n_blocks += 1
        self._open = block["type"]
        return sent

    def _end_block(self) -> list[Sent]:
        is_open, self._open = bool(self._open), ""
        return [_event("content_block_stop", index=self._n_blocks - 1)] if is_open else []

    def _text(self, block: dict[str, Any], kind: str, **delta: str) -> list[Sent]:
        """Return more text of a kind of block, which begins where another kind is open."""
        sent = [] if self._open == block["type"] else self._begin_block(block)
        return [*sent, self._delta(kind, **delta)]

    def _delta(self, kind: str, **delta: str) -> Sent:
        delta = {"type": kind, **delta}
        return _event("content_block_delta", index=self._n_blocks - 1, delta=delta)

    def more(self, choice: Choice, event: Event) -> list[Sent]:
        sent: list[Sent] = []
        if event.reasoning and self.ask.shows_thoughts:
            sent += self._text(_thinking(""), "thinking_delta", thinking=event.reasoning)
        if event.text:
            sent += self._text(_TEXT, "text_delta", text=event.text)
        for part in event.calls:
            if part.name:
                sent += self._begin_block(_tool_use(part, {}))
            if part.arguments:
                sent.append(self._delta("input_json_delta", partial_json=part.arguments))
        return sent

    def end(self, choice: Choice) -> list[Sent]:
        sent = [] if self._n_blocks else self._begin_block(_TEXT)
        return sent + self._end_block()

    def finish(self) -> list[Sent]:
        message = self._message([])
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        last = _event("message_delta", delta=delta, usage=message["usage"])
        return [last, _event("message_stop")]

    def fail(self, problem: Problem) -> list[Sent]:
        return [("error", problem_body(problem))]

    def whole(self) -> object:
        (choice,) = self.choices
        thoughts = choice.reasoning if self.ask.shows_thoughts else ""
        blocks = [_thinking(thoughts)] if thoughts else []
        if choice.text or not (thoughts or choice.calls):
            blocks.append({**_TEXT, "text": choice.text})
        blocks += [_tool_use(call, call.values()) for call in choice.calls]
        return self._message(blocks)


_TEXT = {"type": "text", "text": ""}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call: CallPart, value: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def _event(kind: str, **more: Any) -> Sent:
    return kind, {"type": kind, **more}


ROUTES = (
    Route("/v1/messages", "answer, in the form of Anthropic", Messages, read, MessagesEncoder),
    Route("/v1/messages/count_tokens", "how many tokens messages have", Prompt, count_tokens),
)
