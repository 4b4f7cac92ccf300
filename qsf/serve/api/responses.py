"""OpenAI's Responses; requests that need stored state are refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from qsf.errors import shown
from qsf.serve.api.answering import Choice, Encoder, Route, Sent, usage
from qsf.serve.api.ask import (
    AnyTokens,
    Ask,
    MostTokens,
    Objects,
    Offering,
    most_tokens,
    read_choosing,
    read_thoughts,
)
from qsf.serve.api.openai import chat_ask
from qsf.serve.http.body import Part
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.call_reader import CallPart
from qsf.serve.tools.request import ResponseFormat, Tool, Tools, call_turn, read_form

_STATELESS = "the server keeps no answers"
_TEXTS = {"rs": "reasoning_text", "msg": "output_text"}  # by the prefixes of the items' ids
_TEXT_PARTS = ("input_text", "output_text", "text")


class Text(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("verbosity",)

    format: ResponseFormat | None = None


class Reasoning(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("summary", "generate_summary")

    effort: str | None = None
    max_tokens: AnyTokens | None = None


class Request(Offering, kw_only=True):
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Offering.IGNORED,
        *("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("service_tier", "stream_options"),
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        **Offering.REFUSED,
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": _STATELESS,
        "store": _STATELESS,
        "prompt": "there are no stored prompts",
        "top_logprobs": "log-probabilities are told by /v1/chat/completions",
        "max_tool_calls": "clients call the tools",
        "context_management": "the whole context is kept",
    }

    input: str | Objects
    instructions: str | None = None
    # This value asks for encrypted reasoning. It changes nothing: reasoning is sent as text.
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: (
        Annotated[Literal["disabled"], Meta(description="disabled: nothing is cut")] | None
    ) = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: MostTokens | None = None


def read(fields: Request, serving: Serving) -> Ask:
    wanted = None if fields.text is None else fields.text.format
    reasoning = fields.reasoning or Reasoning()
    return chat_ask(
        serving,
        _read_turns(fields),
        name="input",
        most=most_tokens(fields.max_output_tokens, "max_output_tokens"),
        thoughts=read_thoughts(reasoning.effort, serving, reasoning.max_tokens),
        tools=fields.read_tools(serving, is_nested=False),
        form=read_form(wanted, "text.format", fields.structured_outputs, fields.grammar),
        choosing=read_choosing(fields, serving, fields.repetition_penalty),
        is_stream=bool(fields.stream),
        instructions=fields.instructions,
    )


def _read_turns(fields: Request) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if fields.instructions is not None:
        turns.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*turns, {"role": "user", "content": fields.input}]
    thoughts = ""
    for item in fields.input:
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thoughts += _read_thoughts(item)
            continue
        turn = _read_item(item)
        if thoughts and turn["role"] == "assistant":
            turn["reasoning_content"] = thoughts
        thoughts = ""
        calls = turn.get("tool_calls")
        if calls and turns and turns[-1]["role"] == "assistant":  # items of one turn of the model
            turns[-1] = {**turns[-1], "tool_calls": [*turns[-1].get("tool_calls", ()), *calls]}
        else:
            turns.append(turn)
    if not turns:
        raise invalid("input", "input must have a message beside its reasoning")
    return turns


def _read_thoughts(item: dict[str, Any]) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise invalid("input", f"content of reasoning must be a list, not {shown(parts)}")
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _read_item(item: Any) -> dict[str, Any]:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call" and isinstance(item.get("name"), str):
        call = call_turn(item.get("call_id"), item["name"], item.get("arguments"), "input")
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and isinstance(item.get("output"), str | list):
        output = item["output"]
        text = _texts(output) if isinstance(output, list) else output
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise invalid("input", f"input must be messages, not {shown(item)}")
    content = item.get("content")
    content = _texts(content) if isinstance(content, list) else content
    return {"role": item.get("role"), "content": content}


def _texts(parts: list[Any]) -> list[Any]:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise invalid("input", f"input has a part that is no text: {shown(part)}")
    return parts


class ResponsesEncoder(Encoder):
    """Answers of /v1/responses: reasoning, a message, calls of functions."""

    prefix = "resp_"

    def __init__(self, ask: Ask, serving: Serving) -> None:
        super().__init__(ask, serving)
        self._ids = {kind: f"{kind}_{os.urandom(12).hex()}" for kind in ("rs", "msg")}
        self._created = int(time.time())
        self._n_events = 0
        self._places: list[str | int] = []  # items of the output: "rs", "msg", or numbers of calls

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        params = self.ask.choosing.params
        tools = self.ask.tools
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.serving.name,
            "instructions": self.ask.instructions,
            "max_output_tokens": self.ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}},
            "tools": [] if tools is None else [_tool(tool) for tool in tools.tools],
            "tool_choice": _choice(tools),
            "parallel_tool_calls": tools is not None and tools.is_parallel,
            "store": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            **more,
        }

    def _item(self, kind: str, status: str, *content: Any) -> dict[str, Any]:
        more = (
            {"type": "reasoning", "summary": []}
            if kind == "rs"
            else {"type": "message", "role": "assistant"}
        )
        return {"id": self._ids[kind], **more, "status": status, "content": list(content)}

    def _items(self, choice: Choice) -> dict[str | int, dict[str, Any]]:
        """Return the items of the output in their order."""
        status = _status(choice)
        items: dict[str | int, dict[str, Any]] = {}
        if choice.reasoning:
            items["rs"] = self._item("rs", status, _part("rs", choice.reasoning))
        if choice.text or not (choice.calls or choice.reasoning):
            items["msg"] = self._item("msg", status, _part("msg", choice.text))
        return {**items, **{i: _call_item(call, status) for i, call in enumerate(choice.calls)}}

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        counts = usage(self.choices)
        items = self._items(choice)
        for place in items:
            self._place(place)
        is_cut = choice.reason == "length"
        return self._response(
            _status(choice),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=[items[place] for place in self._places],
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    **counts["prompt_tokens_details"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        )

    def _event(self, kind: str, **more: Any) -> Sent:
        kind = f"response.{kind}"
        self._n_events += 1
        return kind, {"type": kind, "sequence_number": self._n_events - 1, **more}

    def _place(self, of: str | int) -> int:
        """Return the output index of an item, which begins if it is new."""
        if of not in self._places:
            self._places.append(of)
        return self._places.index(of)

    def _added(self, of: str | int, item: dict[str, Any]) -> Sent:
        return self._event("output_item.added", output_index=self._place(of), item=item)

    def _text_event(self, of: str, kind: str, **more: Any) -> Sent:
        place = {"item_id": self._ids[of], "output_index": self._place(of), "content_index": 0}
        return self._event(kind, **place, **more)

    def begin(self) -> list[Sent]:
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def _begin(self, of: str) -> list[Sent]:
        if of in self._places:
            return []
        added = self._added(of, self._item(of, "in_progress"))
        return [added, self._text_event(of, "content_part.added", part=_part(of, ""))]

    def more(self, choice: Choice, event: Event) -> list[Sent]:
        sent: list[Sent] = []
        for of, text in (("rs", event.reasoning), ("msg", event.text)):
            if text:
                kind = f"{_TEXTS[of]}.delta"
                sent += [*self._begin(of), self._text_event(of, kind, delta=text, **_LOGPROBS[of])]
        for part in event.calls:
            item = _call_item(choice.calls[part.index], "in_progress")
            if part.name:
                sent.append(self._added(part.index, {**item, "arguments": ""}))
            if part.arguments:
                place = {"item_id": item["id"], "output_index": self._place(part.index)}
                kind = "function_call_arguments.delta"
                sent.append(self._event(kind, **place, delta=part.arguments))
        return sent

    def end(self, choice: Choice) -> list[Sent]:
        """Return the events with whole texts and whole calls, which end the items."""
        sent: list[Sent] = []
        for of, item in self._items(choice).items():
            if isinstance(of, str):
                sent += self._begin(of)
                (part,) = item["content"]
                done = f"{_TEXTS[of]}.done"
                sent.append(self._text_event(of, done, text=part["text"], **_LOGPROBS[of]))
                sent.append(self._text_event(of, "content_part.done", part=part))
            else:
                place = {"item_id": item["id"], "output_index": self._place(of)}
                facts = {name: item[name] for name in ("arguments", "name")}
                sent.append(self._event("function_call_arguments.done", **place, **facts))
            sent.append(self._event("output_item.done", output_index=self._place(of), item=item))
        return sent

    def finish(self) -> list[Sent]:
        response = self.whole()
        return [self._event(response["status"], response=response)]

    def fail(self, problem: Problem) -> list[Sent]:
        facts = {"code": problem.code, "message": str(problem), "param": problem.param}
        return [("error", {"type": "error", "sequence_number": self._n_events, **facts})]


_LOGPROBS: dict[str, dict[str, Any]] = {"rs": {}, "msg": {"logprobs": []}}


def _status(choice: Choice) -> str:
    return "incomplete" if choice.reason == "length" else "completed"


def _part(of: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if of == "rs" else {"annotations": []}
    return {"type": _TEXTS[of], "text": text, **more, **_LOGPROBS[of]}


def _call_item(call: CallPart, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.schema,
        "strict": tool.is_strict,
    }


def _choice(tools: Tools | None) -> Any:
    if tools is None:
        return "none"
    is_named = tools.choice not in ("auto", "required")
    return {"type": "function", "name": tools.choice} if is_named else tools.choice


ROUTES = (
    Route("/v1/responses", "answer, in the form of Responses", Request, read, ResponsesEncoder),
)
