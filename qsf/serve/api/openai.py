"""OpenAI's chat and text completions: the readers of requests, and the form of answers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.options import Keywords, Whole
from qsf.passes import Chosen
from qsf.serve.api.answering import Choice, Form, Sent
from qsf.serve.api.completion_request import (
    ANY_TOKENS,
    MAX_TOP,
    MOST_CHOICES,
    MOST_TOKENS,
    CompletionRequest,
    Thoughts,
    fit,
    ignored_fields,
    read_choices,
    read_choosing,
    read_messages,
    read_prompts,
    read_same,
    read_stops,
    read_thoughts,
    too_long,
)
from qsf.serve.api.timings import timings, usage
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.forms import read_form
from qsf.serve.tools.request import Tools, chat_turns, read_chat_tools, tools_constraint
from qsf.text.arguments import as_messages
from qsf.text.channels import final_header

if TYPE_CHECKING:
    from qsf.serve.tools.call_reader import CallPart
    from qsf.text.tokenizer import Tokenizer

MAX_PROMPTS = 64
# Names of llama-server and vLLM for the most tokens of thoughts.
_BUDGETS = ("thinking_budget_tokens", "thinking_token_budget")
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "calls": "tool_calls"}
# OpenAI's fields that are accepted without effect, and those that are refused.
_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("verbosity", "prompt_cache_retention"),
)
_OLD = "tools and tool_choice have taken its place"
_USE = "structured_outputs and response_format say what form an answer must have"
_REFUSED = {
    "functions": _OLD,
    "function_call": _OLD,
    "audio": "answers are text",
    "web_search_options": "nothing is searched",
    "prediction": "answers are not predicted",
    "guided_json": _USE,
    "guided_regex": _USE,
    "guided_choice": _USE,
    "guided_grammar": _USE,
    "json_schema": _USE,
    "kv_policy": "it is fixed when the server starts, by qsf serve --kv-policy",
}


def read_common(fields: Fields, serving: Serving, request: dict[str, Any]) -> Fields:
    """Read the fields that all requests share; return those of ``stream_options``."""
    request["is_stream"] = fields.flag("stream")
    options = fields.object("stream_options")
    request["has_usage"] = options.flag("include_usage")
    options.ignore("include_obfuscation")
    request["has_progress"] = fields.flag("return_progress")
    request["has_timings"] = fields.flag("timings_per_token")
    request["has_pings"] = fields.flag("sse_ping", True)
    request["ignores_end"] = fields.flag("ignore_eos")
    salt = fields.text("cache_salt")
    request["salt"] = "" if salt is None else f"salt {salt}"
    fields.ignore(*_NO_EFFECT)
    fields.refuse(_REFUSED)
    modalities = fields.list("modalities", 8)
    if any(modality != "text" for modality in modalities):
        raise invalid("modalities", f"modalities {shown(modalities)}: answers are text")
    tools = request["tools"] = read_chat_tools(fields, serving)
    form = read_form(fields, fields.object("response_format"), "response_format")
    request["constraint"] = tools_constraint(tools, form, serving)
    return options


def read_chat(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /v1/chat/completions. Raises Problem."""
    fields = Fields(body)
    fields.text("model")
    common: dict[str, Any] = {}
    options = read_common(fields, serving, common)
    has_logprob = fields.flag("logprobs")
    n_top = fields.take("top_logprobs", Whole(0, MAX_TOP), 0)
    if n_top and not has_logprob:
        raise invalid("top_logprobs", f"top_logprobs is {n_top}, and logprobs is not true")
    choosing = read_choosing(fields, serving, n_top=n_top, has_logprob=has_logprob)
    most = read_same(fields, MOST_TOKENS, "max_completion_tokens", "max_tokens")
    prompt, begins_text, thoughts = read_turns(fields, serving, common["tools"])
    room = fit([prompt], most, serving, "messages")
    n, stops = read_choices(fields, serving), read_stops(fields)
    return CompletionRequest(
        prompts=[prompt],
        choosing=choosing,
        **room,
        max_thoughts=thoughts.most(room["max_tokens"]),
        stops=stops,
        n=n,
        begins_text=begins_text,
        ignored=ignored_fields([fields, options], serving),
        **common,
    )


def read_turns(
    fields: Fields, serving: Serving, tools: Tools | None
) -> tuple[list[int], bool, Thoughts]:
    """Return the prompt for ``messages``, whether the answer begins a text, and the thinking
    options.
    """
    values = fields.take("chat_template_kwargs", Keywords(), {})
    thoughts = read_thoughts(fields, serving, "reasoning_effort", *_BUDGETS)
    arguments = {**thoughts.arguments, **values}
    turns = chat_turns(read_messages(fields))
    return *encode_messages(turns, arguments, serving, tools), thoughts


def encode_messages(
    messages: list[Any],
    arguments: dict[str, Any],
    serving: Serving,
    tools: Tools | None = None,
    name: str = "messages",
) -> tuple[list[int], bool]:
    """Return the prompt for the messages of a field, and whether the answer begins a text.

    If the last message is the assistant's, the answer continues it.
    """
    model = serving.model
    template = model.chat_template
    if template.is_plain:
        arguments = {}
    try:
        turns = as_turns(messages)
        prefix = ""
        last = turns[-1]
        is_begun = last["role"] == "assistant" and len(turns) > 1 and not last.get("tool_calls")
        if is_begun and not template.is_plain:
            prefix = turns.pop()["content"] or ""
        described = None if tools is None else tools.described
        turns, described = fit_messages(turns, described, template, model.tokenizer.special_names)
        prompt = model.chat_tokens(turns, arguments, described)
        if prefix:
            prompt += final_header(model.tokenizer) + model.tokenizer.encode(
                prefix, add_prefix=False, parse_special=False, max_tokens=serving.ctx_tokens
            )
    except (QsfArgumentError, QsfFormatError) as error:  # of the template, for these messages
        raise too_long(error, name) from None
    return prompt, not prefix and not template.is_plain


def as_turns(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates. Raises QsfArgumentError."""
    turns = as_messages(messages)
    for turn in turns:
        if turn["role"] == "developer":
            turn["role"] = "system"
        if turn["content"] is None and turn["role"] != "assistant":
            raise QsfArgumentError(f"the content of a message of {shown(turn['role'])} is null")
        turn["content"] = turn["content"] or ""
        thoughts = turn.get("reasoning_content")
        if isinstance(thoughts, str) and turn.get("tool_calls") and not turn["content"]:
            turn.setdefault("thinking", thoughts)  # gpt-oss's name of the field
    return turns


def read_completion(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /v1/completions. Raises Problem."""
    fields = Fields(body)
    fields.text("model")
    common: dict[str, Any] = {}
    fields.refuse({"tools": "calls are for /v1/chat/completions"})
    options = read_common(fields, serving, common)
    n_top = fields.take("logprobs", Whole(0, MAX_TOP))
    has_echo = fields.flag("echo")
    suffix = fields.text("suffix")
    if suffix:
        raise invalid(
            "suffix",
            "suffix is not supported: text is continued at its end",
            "unsupported_parameter",
        )
    n = read_choices(fields, serving)
    best_of = fields.take("best_of", MOST_CHOICES, n)
    if best_of != n:
        raise invalid("best_of", f"best_of is {best_of} and n is {n}: all that is made is sent")
    value = fields.raw("prompt")
    if value is None:
        raise invalid("prompt", "prompt is missing")
    prompts = read_prompts(value, serving, "prompt", MAX_PROMPTS)
    most = fields.take("max_tokens", ANY_TOKENS)
    choosing = read_choosing(fields, serving, n_top=n_top or 0, has_logprob=n_top is not None)
    return CompletionRequest(
        prompts=prompts,
        choosing=choosing,
        **fit(prompts, 16 if most is None else most, serving, "prompt"),
        stops=read_stops(fields),
        n=n,
        wants_scores=has_echo and n_top is not None,
        ignored=ignored_fields([fields, options], serving),
        extra={"has_echo": has_echo},
        **common,
    )


# ---- answers ----


class _OpenAiForm(Form):
    """The shared part of both kinds of completions."""

    stream_object = ""
    object = ""
    prefix = ""

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        self.request = request
        self.serving = serving
        self.name = f"{self.prefix}-{os.urandom(12).hex()}"
        self._base = {
            "id": self.name,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> Sent:
        value = {**self._base, "object": self.stream_object, "choices": choices, **more}
        if self.request.has_usage:
            value.setdefault("usage", None)
        return "", value

    def _times(self, choice: Choice) -> dict[str, Any]:
        return {"timings": timings([choice])} if self.request.has_timings else {}

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the usage if requested, and the end mark."""
        events = []
        if self.request.has_usage:
            events.append(
                self._chunk([], usage=usage(choices, self.request.n), timings=timings(choices))
            )
        return [*events, ("", "[DONE]")]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error event, which OpenAI's clients raise."""
        return [("", problem.body())]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        return {
            **self._base,
            "object": self.object,
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage(choices, self.request.n),
            "timings": timings(choices),
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(_OpenAiForm):
    """Answers of /v1/chat/completions."""

    stream_object = "chat.completion.chunk"
    object = "chat.completion"
    prefix = "chatcmpl"

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._delta(index, delta) for index in range(len(choices))]

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of the answer."""
        if event.n_done:
            job = choice.job
            progress = {"total": job.n_prompt, "cache": job.n_cached, "processed": event.n_done}
            return [self._chunk([], prompt_progress=progress)]
        delta: dict[str, Any] = {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.text or not (event.reasoning or event.calls):
            delta["content"] = event.text
        if event.calls:
            delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in event.calls]
        return [self._delta(index, delta, event.tokens, **self._times(choice))]

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the stop reason."""
        return [self._delta(index, {}, reason=_REASONS[choice.reason])]

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[Chosen] = (),
        reason: str | None = None,
        **more: Any,
    ) -> Sent:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice], **more)

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        has_logprob = self.request.choosing.has_logprob
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens) if has_logprob else None,
            "finish_reason": _REASONS[choice.reason],
        }

    def _logprobs(self, tokens: Sequence[Chosen]) -> dict[str, Any]:
        tokenizer = self.serving.model.tokenizer
        entries = [
            {
                **token_entry(chosen.token, chosen.logprob or 0.0, tokenizer),
                "top_logprobs": [
                    token_entry(*alternative, tokenizer) for alternative in chosen.top
                ],
            }
            for chosen in tokens
        ]
        return {"content": entries, "refusal": None}


def _call(part: CallPart) -> dict[str, Any]:
    """Return a call, or more of its arguments, in OpenAI's form."""
    if not part.name:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def token_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a token with its log-probability in OpenAI's form."""
    data = tokenizer.token_bytes(token, skip_special=False)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class TextForm(_OpenAiForm):
    """Answers of /v1/completions."""

    stream_object = "text_completion"
    object = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        super().__init__(request, serving)
        self._begun: set[int] = set()  # choices whose prompt was sent with its log-probabilities

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the prompts if ``echo`` requests them."""
        if not self.request.extra["has_echo"] or self.request.wants_scores:
            return []
        return [self._text(i, self._echo(i)) for i in range(len(choices))]

    def _begin_scored(self, index: int, choice: Choice) -> list[Sent]:
        """Return the prompt with its log-probabilities, once for each choice."""
        if not self.request.wants_scores or index in self._begun:
            return []
        self._begun.add(index)
        entry = {
            "index": index,
            "text": self._echo(index),
            "logprobs": self._logprobs((), choice),
            "finish_reason": None,
        }
        return [self._chunk([entry])]

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of text."""
        if event.n_done:
            return []
        sent = self._begin_scored(index, choice)
        return [*sent, self._text(index, event.text, event.tokens, **self._times(choice))]

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the stop reason."""
        sent = self._begin_scored(index, choice)
        return [*sent, self._text(index, "", reason=_REASONS[choice.reason])]

    def _echo(self, index: int) -> str:
        prompt = self.request.prompts[index // self.request.n]
        return self.serving.model.tokenizer.decode(prompt)

    def _text(
        self,
        index: int,
        text: str,
        tokens: Sequence[Chosen] = (),
        reason: str | None = None,
        **more: Any,
    ) -> Sent:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice], **more)

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echo(index) if self.request.extra["has_echo"] else ""
        has_logprobs = choice.tokens or choice.job.wants_scores
        return {
            "index": index,
            "text": echo + choice.text,
            "logprobs": self._logprobs(choice.tokens, choice) if has_logprobs else None,
            "finish_reason": _REASONS[choice.reason],
        }

    def _logprobs(self, tokens: Sequence[Chosen], choice: Choice | None = None) -> dict[str, Any]:
        """Return log-probabilities, after those of the prompt if ``echo`` requests them."""
        tokenizer = self.serving.model.tokenizer

        def text(token: int) -> str:
            return tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace")

        def name(token: int) -> str:  # as OpenAI names tokens that are parts of characters
            data = tokenizer.token_bytes(token, skip_special=False)
            is_text = data.decode("utf-8", "ignore").encode() == data
            return text(token) if is_text else "bytes:" + "".join(f"\\x{b:02x}" for b in data)

        def top_names(top: Sequence[tuple[int, float]]) -> dict[str, float]:
            # The most probable token of each name
            return {name(t): value for t, value in reversed(top)}

        ids: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if choice is not None and choice.job.wants_scores:
            ids.append(choice.job.prompt[0])
            logprobs.append(None)  # no token precedes it
            tops.append(None)
            tokens = [*choice.job.scores, *tokens]
        ids += [chosen.token for chosen in tokens]
        ends = itertools.accumulate((len(text(token)) for token in ids), initial=0)
        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [*logprobs, *(chosen.logprob for chosen in tokens)],
            "top_logprobs": [*tops, *(top_names(chosen.top) for chosen in tokens)],
            "text_offset": list(ends)[:-1],
        }
