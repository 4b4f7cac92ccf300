"""Anthropic's Messages: what a request asks for, and the form of the answers. Text only."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
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
    read_stops,
)
from qsf.serve.calls import Choice, Sent
from qsf.serve.fields import Fields, shown
from qsf.serve.job import Event
from qsf.serve.openai import encode_messages
from qsf.serve.problems import Problem, invalid
from qsf.serve.timings import usage

_REASONS = {"end": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
_REFUSED = {
    "tools": "answers are free text: nothing can make them calls of functions",
    "mcp_servers": "no tools are called",
    "container": "there are no containers",
    "output_config": "answers are not constrained",
    "output_format": "answers are not constrained",
    "context_management": "the whole context is kept",
}


def problem_body(problem: Problem) -> dict[str, Any]:
    """Return what is wrong, in Anthropic's form."""
    return {"type": "error", "error": {"type": problem.kind, "message": str(problem)}}


def _read_turns(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages, the system's first."""
    messages = fields.list("messages", MAX_MESSAGES)
    if not messages:
        raise invalid("messages", "messages must be a list of at least one message")
    system = fields.raw("system")
    if system is None:
        return messages
    return [{"role": "system", "content": system}, *messages]


def _refuse(fields: Fields) -> None:
    fields.refuse(_REFUSED)
    if fields.object("tool_choice").text("type", "auto") not in ("auto", "none"):
        raise invalid("tool_choice", "tool_choice is not supported: no tools are called")
    thinking = fields.object("thinking").text("type", "disabled")
    if thinking != "disabled":
        raise invalid(
            "thinking",
            f"thinking {shown(thinking)} is not supported: answers are text",
            "unsupported_parameter",
        )
    fields.ignore("metadata", "service_tier", "inference_geo", "cache_control", "speed")


def read(body: dict[str, Any], serving: Serving) -> Asked:
    """Return what a request to /v1/messages asks for. Raises Problem."""
    fields = Fields(body)
    read_model(fields, serving)
    _refuse(fields)
    most = fields.take("max_tokens", Whole(1))
    if most is None:
        raise invalid("max_tokens", "max_tokens is missing")
    is_stream = fields.flag("stream")
    choosing = read_choosing(fields, serving, n_top=0, has_logprob=False)
    stops = read_stops(fields, "stop_sequences")
    prompt, begins_text = encode_messages(_read_turns(fields), {}, serving)
    return Asked(
        prompts=[prompt],
        choosing=choosing,
        max_tokens=fit([prompt], most, serving, "messages"),
        stops=stops,
        begins_text=begins_text,
        is_stream=is_stream,
        ignored=finish([fields], serving),
    )


def count_tokens(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /v1/messages/count_tokens."""
    fields = Fields(body)
    read_model(fields, serving)
    _refuse(fields)
    return {"input_tokens": len(encode_messages(_read_turns(fields), {}, serving)[0])}


class MessagesForm:
    """Answers of /v1/messages."""

    def __init__(self, asked: Asked, serving: Serving) -> None:
        """Begin an answer."""
        self.name = f"msg_{os.urandom(12).hex()}"
        self._serving = serving

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
    def _usage(choices: Sequence[Choice]) -> dict[str, int]:
        counts = usage(choices, 1)
        n_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - n_cached,
            "cache_read_input_tokens": n_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the message without its text."""
        block = {"type": "text", "text": ""}
        return [
            _event("message_start", message=self._message(choices, [])),
            _event("content_block_start", index=0, content_block=block),
        ]

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of text."""
        delta = {"type": "text_delta", "text": event.text}
        return [_event("content_block_delta", index=0, delta=delta)] if event.text else []

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the end of the text."""
        return [_event("content_block_stop", index=0)]

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return why it has ended, and how many tokens there were."""
        message = self._message(choices, [])
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        last = _event("message_delta", delta=delta, usage=message["usage"])
        return [last, _event("message_stop")]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error, which Anthropic's clients raise."""
        return [("error", problem_body(problem))]

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the answer in one piece."""
        return self._message(choices, [{"type": "text", "text": choices[0].text}])


def _event(kind: str, **more: Any) -> Sent:
    return kind, {"type": kind, **more}
