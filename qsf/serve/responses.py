"""OpenAI's Responses, as far as they need no memory of the server: text in, text out."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from qsf.options import Whole
from qsf.serve.asked import (
    MAX_MESSAGES,
    Asked,
    Serving,
    finish,
    fit,
    read_choosing,
    read_model,
)
from qsf.serve.calls import Choice, Sent
from qsf.serve.constraints import read_constraint
from qsf.serve.fields import Fields, shown
from qsf.serve.job import Event
from qsf.serve.openai import encode_messages
from qsf.serve.problems import Problem, invalid
from qsf.serve.timings import usage

_STATELESS = "the server keeps no answers"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": _STATELESS,
    "store": _STATELESS,
    "prompt": "there are no stored prompts",
    "tools": "answers are free text: nothing can make them calls of functions",
    "include": "there is nothing more to include",
    "top_logprobs": "log-probabilities are told by /v1/chat/completions",
    "max_tool_calls": "no tools are called",
    "context_management": "the whole context is kept",
}
_NO_EFFECT = (
    *("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("service_tier", "parallel_tool_calls", "stream_options"),
)
_TEXT_PARTS = ("input_text", "output_text", "text")


def read(body: dict[str, Any], serving: Serving) -> Asked:
    """Return what a request to /v1/responses asks for. Raises Problem."""
    fields = Fields(body)
    read_model(fields, serving)
    fields.refuse(_REFUSED)
    fields.ignore(*_NO_EFFECT)
    if fields.text("truncation", "disabled") != "disabled":
        raise invalid("truncation", "truncation must be disabled: nothing is cut")
    if fields.raw("tool_choice") not in (None, "none", "auto"):
        raise invalid("tool_choice", "tool_choice is not supported: no tools are called")
    text = fields.object("text")
    constraint = read_constraint(fields, serving.constraints, text.object("format"), "text.format")
    text.ignore("verbosity")
    effort = fields.object("reasoning").text("effort")
    is_stream = fields.flag("stream")
    most = fields.take("max_output_tokens", Whole(1))
    choosing = read_choosing(fields, serving, n_top=0, has_logprob=False)
    arguments = {} if effort is None else {"reasoning_effort": effort}
    prompt, begins_text = encode_messages(_read_turns(fields), arguments, serving)
    return Asked(
        prompts=[prompt],
        choosing=choosing,
        max_tokens=fit([prompt], most, serving, "input"),
        stops=[],
        begins_text=begins_text,
        is_stream=is_stream,
        constraint=constraint,
        ignored=finish([fields, text], serving),
        extra={"instructions": fields.text("instructions")},
    )


def _read_turns(fields: Fields) -> list[dict[str, Any]]:
    instructions = fields.text("instructions")
    turns = [] if instructions is None else [{"role": "system", "content": instructions}]
    value = fields.raw("input")
    if isinstance(value, str):
        return [*turns, {"role": "user", "content": value}]
    items = fields.list("input", MAX_MESSAGES)
    if not items:
        raise invalid("input", "input must be a text, or a list of at least one message")
    return [*turns, *map(_read_item, items)]


def _read_item(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise invalid("input", f"input must be messages, not {shown(item)}")
    content = item.get("content")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise invalid("input", f"input has a part that is no text: {shown(part)}")
    return {"role": item.get("role"), "content": content}


class ResponsesForm:
    """Answers of /v1/responses."""

    def __init__(self, asked: Asked, serving: Serving) -> None:
        """Begin an answer."""
        self.name = f"resp_{os.urandom(12).hex()}"
        self._item_id = f"msg_{os.urandom(12).hex()}"
        self._created = int(time.time())
        self._asked = asked
        self._serving = serving
        self._n_events = 0

    def _response(self, choices: Sequence[Choice], status: str, **more: Any) -> dict[str, Any]:
        params = self._asked.choosing.params
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._serving.name,
            "instructions": self._asked.extra["instructions"],
            "max_output_tokens": self._asked.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "store": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            **more,
        }

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        is_cut = choices[0].reason == "length"
        status = "incomplete" if is_cut else "completed"
        counts = usage(choices, 1)
        return self._response(
            choices,
            status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=[self._item(status, [_part(choices[0].text)])],
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    **counts["prompt_tokens_details"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        )

    def _event(self, kind: str, **more: Any) -> Sent:
        self._n_events += 1
        return kind, {"type": kind, "sequence_number": self._n_events - 1, **more}

    def _text_event(self, kind: str, **more: Any) -> Sent:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **more)

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the response without its text."""
        response = self._response(choices, "in_progress")
        item = self._item("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._text_event("response.content_part.added", part=_part("")),
        ]

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of text."""
        if not event.text:
            return []
        return [self._text_event("response.output_text.delta", delta=event.text, logprobs=[])]

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the whole text, which ends it."""
        status = "incomplete" if choice.reason == "length" else "completed"
        part = _part(choice.text)
        item = self._item(status, [part])
        return [
            self._text_event("response.output_text.done", text=choice.text, logprobs=[]),
            self._text_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the whole response."""
        response = self.whole(choices)
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error."""
        return [self._event("error", code=problem.code, message=str(problem), param=problem.param)]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
