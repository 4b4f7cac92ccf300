"""ollama's API; its answers are lines of JSON."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from qsf.errors import shown
from qsf.options import Whole
from qsf.serve.api import vectors
from qsf.serve.api.answering import Choice, Encoder, Route, Sent
from qsf.serve.api.ask import (
    MAX_MESSAGES,
    Ask,
    Repetition,
    Sampling,
    Stops,
    Thoughts,
    Top,
    as_list,
    fit,
    most_tokens,
    read_choosing,
    read_infill,
    read_prompts,
    read_thoughts,
    texts_or_ids,
)
from qsf.serve.api.openai import chat_ask
from qsf.serve.http.body import DURATION, Duration, Part, within
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import LATEST, Serving
from qsf.serve.tools.call_formats import find_format
from qsf.serve.tools.request import (
    AnswerForm,
    Offered,
    Tools,
    chat_turns,
    read_chat_tools,
    tools_constraint,
)
from qsf.text.infill import infill_marks
from qsf.text.thinking import thinks

if TYPE_CHECKING:
    from qsf.native.binding import ModelInfo
    from qsf.serve.hosts import Host, Hosts
    from qsf.serve.tools.call_reader import CallPart

LINES = "application/x-ndjson"
_LAST = 10_981_785_600.0  # the year 2318, as ollama has it: the model stays as long as the server
# A client loads the model by a request without messages or prompt. This replaces the missing field,
# so that the rest of the request is checked.
_ANY_TEXT = "a"
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "calls": "stop"}
KeepAlive = Annotated[
    float | str, Meta(description=Duration.rule, extra_json_schema={"pattern": DURATION})
]


def problem_body(problem: Problem) -> dict[str, Any]:
    return {"error": str(problem)}


# ---- requests ----


class Options(Sampling):
    IGNORED: ClassVar[tuple[str, ...]] = (  # fields of loading
        *Sampling.IGNORED,
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap"),
        *("use_mlock", "low_vram", "numa", "vocab_only", "f16_kv", "logits_all"),
        *("embedding_only", "rope_frequency_base", "rope_frequency_scale", "penalize_newline"),
        *("draft_num_predict", "repeat_last_n"),
    )

    # -1 and -2 mean no limit
    num_predict: Annotated[int, within(Whole(-2))] | None = None
    repeat_penalty: Repetition | None = None
    stop: Stops | None = None


class Generated(Part):
    REFUSED: ClassVar[Mapping[str, str]] = {
        "template": "the model's own is used; raw: true uses none",
        "images": "there is text only",
    }

    options: Options | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: Annotated[bool | str, Meta(description="true, false or an effort")] | None = None
    keep_alive: KeepAlive | None = None


class Chat(Generated):
    messages: Annotated[list[Any], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Offered | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None


class Generate(Generated):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class Embed(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("options",)

    input: Annotated[Any, texts_or_ids(vectors.MAX_TEXTS, {"type": "null"})] = None
    truncate: bool | None = None
    dimensions: Annotated[int, within(Whole(1))] | None = None
    keep_alive: KeepAlive | None = None


class Embedding(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("options",)

    prompt: str | None = None
    truncate: bool | None = None
    keep_alive: KeepAlive | None = None


class Show(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("verbose",)

    name: str | None = None


class Pull(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("insecure", "username", "password")

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


def _shared(
    fields: Generated, serving: Serving, *, has_logprob: bool = False, n_top: int = 0
) -> dict[str, Any]:
    """Return the fields of an ``Ask`` that need no prompt."""
    options = fields.options or Options()
    return {
        "choosing": read_choosing(
            options,
            serving,
            options.repeat_penalty,
            n_top=n_top,
            has_logprob=has_logprob,
            place="options.",
        ),
        "stops": as_list(options.stop),
        "is_stream": fields.stream is not False,
        "keep_seconds": _seconds(fields.keep_alive),
        "shows_thoughts": fields.think is not False,
    }


def _most(fields: Generated) -> int | None:
    most = None if fields.options is None else fields.options.num_predict
    return None if most in (-1, -2) else most


def _form(fields: Generated) -> AnswerForm | None:
    if isinstance(fields.format, dict):
        return AnswerForm("json", fields.format, "format")
    if fields.format == "json":
        return AnswerForm("json", {"type": "object"}, "format")
    if fields.format:
        raise invalid("format", f"format must be json or a schema, not {shown(fields.format)}")
    return None


def _chat_ask(
    fields: Generated, serving: Serving, turns: list[Any], tools: Tools | None = None, **more: Any
) -> Ask:
    return chat_ask(
        serving,
        turns,
        most=most_tokens(_most(fields), "options.num_predict"),
        thoughts=_thoughts(fields, serving),
        tools=tools,
        form=_form(fields),
        **_shared(fields, serving, **more),
    )


def _seconds(value: float | str | None) -> float | None:
    seconds = Duration.seconds(value)
    if value is not None and seconds is None:
        raise invalid("keep_alive", f"keep_alive must be {Duration.rule}, not {shown(value)}")
    return seconds


def _thoughts(fields: Generated, serving: Serving) -> Thoughts:
    if isinstance(fields.think, str):
        return read_thoughts(fields.think, serving, None)
    is_said = fields.think is not None and not serving.model.chat_template.is_plain
    return Thoughts({"enable_thinking": fields.think} if is_said else {}, None, 1)


def read_chat(fields: Chat, serving: Serving) -> Ask:
    if fields.top_logprobs and not fields.logprobs:
        text = f"top_logprobs is {fields.top_logprobs}, and logprobs is not true"
        raise invalid("top_logprobs", text)
    turns = [_turn(turn) for turn in fields.messages or ()]
    tools = read_chat_tools(fields.tools, None, None, serving)
    messages = chat_turns(turns or [{"role": "user", "content": _ANY_TEXT}])
    scores = {"has_logprob": bool(fields.logprobs), "n_top": fields.top_logprobs or 0}
    ask = _chat_ask(fields, serving, messages, tools, **scores)
    ask.prompts = ask.prompts if turns else []
    return ask


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    if turn.get("images"):
        raise invalid("messages", "images are not supported: there is text only")
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    values = {names.get(name, name): value for name, value in turn.items() if name != "images"}
    values.setdefault("content", "")
    return values


def read_generate(fields: Generate, serving: Serving) -> Ask:
    is_loading = not fields.prompt and not fields.suffix
    text = _ANY_TEXT if is_loading else fields.prompt or ""
    is_raw = fields.raw or fields.suffix or serving.model.chat_template.is_plain
    if is_raw:
        whole = f"{fields.system}\n{text}" if fields.system else text
        if fields.suffix:
            prompts = [read_infill(serving, text, fields.suffix, (), "prompt")]
        else:
            prompts = read_prompts(whole, serving, "prompt", 1)
        ask = Ask(
            prompts=prompts,
            **fit(prompts, _most(fields), serving, "prompt"),
            constraint=tools_constraint(None, _form(fields), serving),
            is_infill=bool(fields.suffix),
            **_shared(fields, serving),
        )
    else:
        turns = [{"role": "system", "content": fields.system}] if fields.system else []
        ask = _chat_ask(fields, serving, [*turns, {"role": "user", "content": text}])
    ask.prompts = [] if is_loading else ask.prompts
    return ask


def read_embed(fields: Embed, serving: Serving) -> Ask:
    return _embed(fields, fields.input, fields.dimensions, serving, "input")


def read_embedding(fields: Embedding, serving: Serving) -> Ask:
    """Return the checked request to the older /api/embeddings. Raises Problem."""
    return _embed(fields, fields.prompt, None, serving, "prompt")


def _embed(
    fields: Embed | Embedding, texts: Any, dimensions: int | None, serving: Serving, name: str
) -> Ask:
    is_loading = texts in (None, "", [])
    body = vectors.Embeddings(
        input=_ANY_TEXT if is_loading else texts,
        truncate=fields.truncate is not False,
        dimensions=dimensions,
    )
    ask = vectors.read_embeddings(body, serving, name)
    ask.keep_seconds = _seconds(fields.keep_alive)
    ask.prompts = [] if is_loading else ask.prompts
    return ask


# ---- answers ----


def _stamp(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _expires(host: Host) -> float:
    """Return when a model leaves memory if no request comes, in seconds since 1970."""
    return time.time() + host.keep_seconds - (0 if host.n_users else time.monotonic() - host.used)


class _Ollama(Encoder):
    prefix = "ollama-"
    kind = LINES

    def __init__(self, ask: Ask, serving: Serving) -> None:
        super().__init__(ask, serving)
        self._started = time.perf_counter_ns()

    def _content(self, text: str, thoughts: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        raise NotImplementedError

    def _line(
        self, text: str = "", thoughts: str = "", calls: Sequence[CallPart] = ()
    ) -> dict[str, Any]:
        content = self._content(text, thoughts if self.ask.shows_thoughts else "", calls)
        return {"model": self.serving.name, "created_at": _stamp(), **content, "done": False}

    def more(self, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of the answer; a call is sent whole, at its end."""
        is_seen = event.text or (event.reasoning and self.ask.shows_thoughts)
        return [("", self._line(event.text, event.reasoning))] if is_seen else []

    def end(self, choice: Choice) -> list[Sent]:
        return [("", self._line(calls=choice.calls))] if choice.calls else []

    def finish(self) -> list[Sent]:
        return [("", {**self._line(), **self._facts()})]

    def fail(self, problem: Problem) -> list[Sent]:
        return [("", problem_body(problem))]

    def whole(self) -> dict[str, Any]:
        texts = ((choice.text, choice.reasoning, choice.calls) for choice in self.choices)
        return {**self._line(*next(texts, ())), **self._facts()}

    def _facts(self) -> dict[str, Any]:
        if not self.choices:
            reason = "load" if self.ask.keep_seconds != 0 else "unload"
            return {"done": True, "done_reason": reason}
        (choice,) = self.choices
        job = choice.job
        return {
            "done": True,
            "done_reason": _REASONS[choice.reason],
            "total_duration": time.perf_counter_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": job.n_prompt,
            "prompt_eval_duration": round(1e9 * max(job.first - job.admitted, 0.0)),
            "eval_count": job.n_generated,
            "eval_duration": round(1e9 * max(job.last - job.first, 0.0)),
        }


class ChatEncoder(_Ollama):
    def _content(self, text: str, thoughts: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values()}} for call in calls
            ]
        return {"message": message}


class GenerateEncoder(_Ollama):
    def _content(self, text: str, thoughts: str, _calls: Sequence[CallPart]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thoughts} if thoughts else {})}


class EmbedEncoder(vectors.EmbeddingsEncoder):
    def whole(self) -> dict[str, Any]:
        return {
            "model": self.serving.name,
            "embeddings": [self.vector(choice) for choice in self.choices],
            "prompt_eval_count": self.usage()["prompt_tokens"],
        }


class EmbeddingEncoder(vectors.EmbeddingsEncoder):
    def whole(self) -> dict[str, Any]:
        return {"embedding": self.vector(self.choices[0]) if self.choices else []}


# ---- the model ----


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "qsf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": f"{info.n_parameters / 1e9:.1f}B",
        "quantization_level": info.quant_type,
    }


def _model(hosts: Hosts, name: str) -> dict[str, Any]:
    info = hosts.infos.get(name)
    path = hosts.paths[name]
    # As ollama names models: Open WebUI looks no other name up.
    full_name = name if ":" in name else name + LATEST
    return {
        "name": full_name,
        "model": full_name,
        "size": path.stat().st_size,
        "digest": _digest(path),
        "details": {"format": "qsf"} if info is None else _details(info),
    }


@functools.cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:  # which begins with the checksum of its directory
        return hashlib.blake2b(file.read(64 << 10), digest_size=32).hexdigest()


def tags(hosts: Hosts, created: int) -> dict[str, Any]:
    stamp = _stamp(created)
    entries = [{**_model(hosts, name), "modified_at": stamp} for name in hosts.paths]
    names = [each.name + LATEST for each in hosts.adapters if each.name]
    return {"models": [*entries, *({**entries[0], "name": each, "model": each} for each in names)]}


async def pull(hosts: Hosts, name: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the lines of progress. Raises Problem, QsfError."""
    name = name.removesuffix(LATEST)
    name = name if name in hosts.paths else hosts.spelled(name)
    if name in hosts.paths:
        yield {"status": "pulling manifest"}
    elif hosts.fetch is None:
        text = f"the model {name[:100]!r} is not here: --allow-pull lets clients get one"
        raise Problem(404, "model_not_found", text, param="model")
    else:
        async with aclosing(hosts.fetch(name)) as lines:
            async for line in lines:
                yield line
    yield {"status": "success"}


def running(hosts: Hosts) -> dict[str, Any]:
    return {
        "models": [
            {
                **_model(hosts, name),
                "expires_at": _stamp(min(_LAST, _expires(host))),
                "size_vram": 0,
                "context_length": host.serving.ctx_tokens,
            }
            for name, host in hosts.loaded.items()
        ]
    }


def show(_fields: Show, serving: Serving) -> dict[str, Any]:
    model, info = serving.model, serving.model.info
    template, family = model.chat_template, info.architecture
    capabilities = ["embedding"] if model.text_vectors.is_encoder else ["completion", "embedding"]
    if find_format(template.tool_source) or not isinstance(serving.constraints, str):
        capabilities.append("tools")
    if thinks(template.source):
        capabilities.append("thinking")
    if infill_marks(model.tokenizer):
        capabilities.append("insert")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template.source,
        "details": _details(serving.model.info),
        "capabilities": capabilities,
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": info.n_parameters,
            f"{family}.context_length": info.max_tokens,
            f"{family}.embedding_length": info.dim,
            f"{family}.vocab_size": info.n_vocab,
        },
    }


_GENERATE = (Generate, read_generate, GenerateEncoder)
_EMBEDDING = (Embedding, read_embedding, EmbeddingEncoder)
ROUTES = (
    Route("/api/chat", "answer messages", Chat, read_chat, ChatEncoder),
    Route("/api/generate", "answer or continue a text", *_GENERATE),
    Route("/api/embed", "a vector for each text", Embed, read_embed, EmbedEncoder),
    Route("/api/embeddings", "the vector of a text", *_EMBEDDING),
    Route("/api/show", "what the model is", Show, show),
)
