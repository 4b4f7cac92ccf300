"""OpenAI's chat and text completions: the readers of requests, and the form of answers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.options import Keywords, Number, Whole
from qsf.passes import Chosen
from qsf.serve.api.answering import Choice, Encoder, Route, Sent, timings, usage
from qsf.serve.api.ask import (
    AnyTokens,
    Ask,
    MostTokens,
    Objects,
    Offering,
    Stops,
    Thoughts,
    Top,
    as_list,
    fit,
    most_tokens,
    one_of,
    read_choosing,
    read_prompts,
    read_thoughts,
    texts_or_ids,
    too_long,
)
from qsf.serve.http.body import Part, within
from qsf.serve.http.problems import invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.request import (
    AnswerForm,
    ResponseFormat,
    Tools,
    chat_turns,
    read_form,
    tools_constraint,
)
from qsf.text.arguments import as_messages
from qsf.text.channels import final_header

if TYPE_CHECKING:
    from qsf.serve.tools.call_reader import CallPart
    from qsf.text.tokenizer import Tokenizer

MAX_PROMPTS = 64
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "calls": "tool_calls"}
_OLD = "tools and tool_choice have taken its place"
_USE = "structured_outputs and response_format say what form an answer must have"
_Choices = Annotated[int, within(Whole(1, 128))]
Prompt = Annotated[Any, texts_or_ids(MAX_PROMPTS)]
Messages = Annotated[
    Objects, Meta(extra_json_schema={"items": {"$ref": "#/components/schemas/Message"}})
]


class Adapter(Part, kw_only=True):
    """The scale of an adapter; those that are not named have none."""

    id: Annotated[int, within(Whole(0))]
    scale: Annotated[float, within(Number(-1e6, 1e6))]


class StreamOptions(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("include_obfuscation",)

    include_usage: bool | None = None


class Common(Offering):
    """The fields that chats and texts share."""

    # OpenAI's fields that are accepted without effect, and those that are refused
    IGNORED: ClassVar[tuple[str, ...]] = (
        *Offering.IGNORED,
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("verbosity", "prompt_cache_retention"),
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        **Offering.REFUSED,
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

    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    lora: Annotated[list[Adapter], Meta(max_length=64)] | None = None
    modalities: (
        Annotated[list[Literal["text"]], Meta(description='a list of "text": answers are text')]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    stop: Stops | None = None
    n: _Choices | None = None


class Templated(Common):
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Names of llama-server and vLLM for the most tokens of thoughts
    thinking_budget_tokens: AnyTokens | None = None
    thinking_token_budget: AnyTokens | None = None


class Chat(Templated, kw_only=True):
    messages: Messages
    max_tokens: MostTokens | None = None
    max_completion_tokens: MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


class Completion(Common, kw_only=True):
    REFUSED: ClassVar[Mapping[str, str]] = {
        **Common.REFUSED,
        "tools": "calls are for /v1/chat/completions",
        "suffix": "text is continued at its end",
    }

    prompt: Prompt
    max_tokens: AnyTokens | None = None
    logprobs: Top | None = None
    echo: bool | None = None
    best_of: _Choices | None = None


def common(fields: Common, serving: Serving) -> dict[str, Any]:
    """Return the fields of an ``Ask`` that need no prompt."""
    n = fields.n or 1
    if n > serving.most_choices:
        raise invalid("n", f"n is {n}, and this server makes {serving.most_choices} at a time")
    return {
        "is_stream": bool(fields.stream),
        "has_usage": fields.stream_options is not None and fields.stream_options.include_usage,
        "has_progress": bool(fields.return_progress),
        "has_timings": bool(fields.timings_per_token),
        "has_pings": fields.sse_ping is not False,
        "ignores_end": bool(fields.ignore_eos),
        "salt": "" if fields.cache_salt is None else f"salt {fields.cache_salt}",
        "stops": as_list(fields.stop),
        "n": n,
        "adapters": None if fields.lora is None else scales_of(fields.lora, serving.model.adapters),
    }


def scales_of(lora: Sequence[Adapter], adapters: Collection[object]) -> tuple[float, ...]:
    """Return the scale of each adapter. Raises Problem for a number that none has."""
    scales = [0.0] * len(adapters)
    for each in lora:
        if each.id >= len(scales):
            text = f"there is no adapter {each.id}: /lora-adapters lists {len(scales)}"
            raise invalid("lora", text)
        scales[each.id] = each.scale
    return tuple(scales)


def _form(fields: Common) -> AnswerForm | None:
    wanted = fields.response_format
    return read_form(wanted, "response_format", fields.structured_outputs, fields.grammar)


def read_chat(fields: Chat, serving: Serving) -> Ask:
    n_top = fields.top_logprobs or 0
    if n_top and not fields.logprobs:
        raise invalid("top_logprobs", f"top_logprobs is {n_top}, and logprobs is not true")
    most = one_of(max_completion_tokens=fields.max_completion_tokens, max_tokens=fields.max_tokens)
    return chat_ask(
        serving,
        chat_turns(fields.messages),
        most=most_tokens(
            most, "max_completion_tokens" if fields.max_tokens is None else "max_tokens"
        ),
        thoughts=_thoughts(fields, serving),
        tools=fields.read_tools(serving),
        form=_form(fields),
        choosing=read_choosing(
            fields,
            serving,
            fields.repetition_penalty,
            n_top=n_top,
            has_logprob=bool(fields.logprobs),
        ),
        **common(fields, serving),
    )


def chat_ask(
    serving: Serving,
    turns: list[Any],
    *,
    most: int | None,
    thoughts: Thoughts,
    tools: Tools | None = None,
    form: AnswerForm | None = None,
    name: str = "messages",
    **more: Any,
) -> Ask:
    """Return the request to answer the messages of field ``name``, whatever API it came by.

    ``more`` are further fields of ``Ask``. Raises Problem.
    """
    prompt, begins_text = encode_messages(turns, thoughts.arguments, serving, tools, name)
    room = fit([prompt], most, serving, name)
    return Ask(
        prompts=[prompt],
        **room,
        max_thoughts=thoughts.most(room["max_tokens"]),
        begins_text=begins_text,
        tools=tools,
        constraint=tools_constraint(tools, form, serving),
        **more,
    )


def chat_tokens(fields: Templated, messages: list[Any], serving: Serving) -> list[int]:
    """Return the prompt that a chat with these fields has."""
    arguments = _thoughts(fields, serving).arguments
    return encode_messages(chat_turns(messages), arguments, serving, fields.read_tools(serving))[0]


def _thoughts(fields: Templated, serving: Serving) -> Thoughts:
    """Return the thinking options, with the other arguments of the chat template."""
    budget = one_of(
        thinking_budget_tokens=fields.thinking_budget_tokens,
        thinking_token_budget=fields.thinking_token_budget,
    )
    return read_thoughts(fields.reasoning_effort, serving, budget, template_values(fields))


def template_values(fields: Templated) -> dict[str, Any]:
    values = fields.chat_template_kwargs or {}
    if not Keywords().is_valid(values):
        name = "chat_template_kwargs"
        raise invalid(name, f"{name} must be {Keywords.rule}, not {shown(values)}")
    return values


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


def read_completion(fields: Completion, serving: Serving) -> Ask:
    most = 16 if fields.max_tokens is None else fields.max_tokens
    return complete(fields, serving, fields.prompt, most, fields.repetition_penalty)


def complete(
    fields: Completion, serving: Serving, prompt: Any, most: int, repetition: float | None
) -> Ask:
    """Return the request to continue a prompt, whatever API it came by. Raises Problem."""
    shared = common(fields, serving)
    n, best_of = shared["n"], fields.best_of
    if best_of is not None and best_of != n:
        raise invalid("best_of", f"best_of is {best_of} and n is {n}: all that is made is sent")
    if prompt is None:
        raise invalid("prompt", "prompt is missing")
    prompts = read_prompts(prompt, serving, "prompt", MAX_PROMPTS)
    n_top = fields.logprobs
    has_logprob = n_top is not None
    choosing = read_choosing(fields, serving, repetition, n_top=n_top or 0, has_logprob=has_logprob)
    return Ask(
        prompts=prompts,
        choosing=choosing,
        **fit(prompts, most, serving, "prompt"),
        constraint=tools_constraint(None, _form(fields), serving),
        wants_scores=bool(fields.echo) and has_logprob,
        has_echo=bool(fields.echo),
        **shared,
    )


# ---- answers ----


class _OpenAi(Encoder):
    object = ""
    stream_object = ""

    def __init__(self, ask: Ask, serving: Serving) -> None:
        super().__init__(ask, serving)
        self._base = {
            "id": self.name,
            "created": int(time.time()),
            "model": serving.name,
            "system_fingerprint": serving.fingerprint,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> Sent:
        value = {**self._base, "object": self.stream_object, "choices": choices, **more}
        if self.ask.has_usage:
            value.setdefault("usage", None)
        return "", value

    def _part(
        self,
        choice: Choice,
        content: dict[str, Any],
        logprobs: Any = None,
        reason: str | None = None,
        **more: Any,
    ) -> Sent:
        """Return a part of a choice."""
        entry = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([entry], **more)

    def _times(self, choice: Choice) -> dict[str, Any]:
        return {"timings": timings([choice])} if self.ask.has_timings else {}

    def _numbers(self) -> dict[str, Any]:
        return {"usage": usage(self.choices, self.ask.n), "timings": timings(self.choices)}

    def finish(self) -> list[Sent]:
        numbers = [self._chunk([], **self._numbers())] if self.ask.has_usage else []
        return [*numbers, ("", "[DONE]")]

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                **self._content(choice),
                "finish_reason": _REASONS[choice.reason],
            }
            for choice in self.choices
        ]
        return {**self._base, "object": self.object, "choices": choices, **self._numbers()}

    def _content(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatEncoder(_OpenAi):
    object = "chat.completion"
    stream_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def begin(self) -> list[Sent]:
        delta = {"role": "assistant", "content": ""}
        return [self._part(choice, {"delta": delta}) for choice in self.choices]

    def more(self, choice: Choice, event: Event) -> list[Sent]:
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
        logprobs = self._logprobs(event.tokens) if event.tokens else None
        return [self._part(choice, {"delta": delta}, logprobs, **self._times(choice))]

    def end(self, choice: Choice) -> list[Sent]:
        return [self._part(choice, {"delta": {}}, reason=_REASONS[choice.reason])]

    def _content(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        has_logprob = self.ask.choosing.has_logprob
        logprobs = self._logprobs(choice.tokens) if has_logprob else None
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[Chosen]) -> dict[str, Any]:
        entries = scored_tokens(tokens, self.serving.model.tokenizer)
        return {"content": entries, "refusal": None}


def _call(part: CallPart) -> dict[str, Any]:
    """Return a call, or more of its arguments, in OpenAI's form."""
    if not part.name:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def scored_tokens(
    tokens: Sequence[Chosen], tokenizer: Tokenizer, *, has_ids: bool = False
) -> list[dict[str, Any]]:
    """Return tokens with their log-probabilities and those of the most probable ones."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token, skip_special=False)
        text = data.decode("utf-8", "replace")
        value = {"token": text, "logprob": logprob or 0.0, "bytes": list(data)}
        return {"id": token, **value} if has_ids else value

    return [
        {
            **entry(chosen.token, chosen.logprob),
            "top_logprobs": [entry(*other) for other in chosen.top],
        }
        for chosen in tokens
    ]


class TextEncoder(_OpenAi):
    object = stream_object = "text_completion"
    prefix = "cmpl-"

    def begin(self) -> list[Sent]:
        if not self.ask.has_echo or self.ask.wants_scores:
            return []
        return [self._part(choice, {"text": self._echo(choice)}) for choice in self.choices]

    def _begin_scored(self, choice: Choice) -> list[Sent]:
        """Return the prompt with its log-probabilities, once for each choice."""
        if not self.ask.wants_scores or choice.is_echoed:
            return []
        choice.is_echoed = True
        return [self._part(choice, {"text": self._echo(choice)}, self._logprobs((), choice))]

    def more(self, choice: Choice, event: Event) -> list[Sent]:
        if event.n_done:
            return []
        logprobs = self._logprobs(event.tokens) if event.tokens else None
        part = self._part(choice, {"text": event.text}, logprobs, **self._times(choice))
        return [*self._begin_scored(choice), part]

    def end(self, choice: Choice) -> list[Sent]:
        part = self._part(choice, {"text": ""}, reason=_REASONS[choice.reason])
        return [*self._begin_scored(choice), part]

    def _echo(self, choice: Choice) -> str:
        prompt = self.ask.prompts[choice.index // self.ask.n]
        return self.serving.model.tokenizer.decode(prompt)

    def _content(self, choice: Choice) -> dict[str, Any]:
        echo = self._echo(choice) if self.ask.has_echo else ""
        has_logprobs = choice.tokens or choice.job.wants_scores
        logprobs = self._logprobs(choice.tokens, choice) if has_logprobs else None
        return {"text": echo + choice.text, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[Chosen], choice: Choice | None = None) -> dict[str, Any]:
        """Return log-probabilities, after those of the prompt if ``echo`` requests them."""
        tokenizer = self.serving.model.tokenizer
        nothing: list[None] = []  # for the first token of a prompt, which no token precedes
        ids: list[int] = []
        if choice is not None and choice.job.wants_scores:
            nothing, ids = [None], [choice.job.prompt[0]]
            tokens = [*choice.job.scores, *tokens]
        ids += [chosen.token for chosen in tokens]
        texts = [
            tokenizer.token_bytes(i, skip_special=False).decode("utf-8", "replace") for i in ids
        ]
        ends = itertools.accumulate(map(len, texts), initial=0)
        tops = (  # the most probable token of each name
            {_name(token, tokenizer): value for token, value in reversed(chosen.top)}
            for chosen in tokens
        )
        return {
            "tokens": [_name(token, tokenizer) for token in ids],
            "token_logprobs": [*nothing, *(chosen.logprob for chosen in tokens)],
            "top_logprobs": [*nothing, *tops],
            "text_offset": list(ends)[:-1],
        }


def _name(token: int, tokenizer: Tokenizer) -> str:
    """Return the name of a token, as OpenAI names those that are parts of characters."""
    data = tokenizer.token_bytes(token, skip_special=False)
    is_text = data.decode("utf-8", "ignore").encode() == data
    return data.decode() if is_text else "bytes:" + "".join(f"\\x{b:02x}" for b in data)


_CHAT = (Chat, read_chat, ChatEncoder)
_TEXT = (Completion, read_completion, TextEncoder)
ROUTES = (
    Route("/v1/chat/completions", "answer messages", *_CHAT),
    Route("/chat/completions", "answer messages", *_CHAT),
    Route("/v1/completions", "continue a text", *_TEXT),
    Route("/completions", "continue a text", *_TEXT),
)
