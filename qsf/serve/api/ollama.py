"""ollama's API: OpenAI's readers check its requests; its answers are lines of JSON."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import shown
from qsf.options import Whole
from qsf.serve.api import openai, vectors
from qsf.serve.api.answering import Choice, Form, Sent
from qsf.serve.api.completion_request import (
    MAX_MESSAGES,
    MAX_TOP,
    CompletionRequest,
    ignored_fields,
    read_infill,
)
from qsf.serve.http.fields import Duration, Fields, Probe
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import LATEST, Serving
from qsf.serve.tools.call_formats import find_format
from qsf.serve.tools.request import MAX_TOOLS
from qsf.text.infill import infill_marks
from qsf.text.thinking import thinks

if TYPE_CHECKING:
    from qsf.native.binding import ModelInfo
    from qsf.serve.hosts import Host, Hosts
    from qsf.serve.tools.call_reader import CallPart

_LAST = 10_981_785_600.0  # the year 2318, as ollama has it: the model stays as long as the server
_OF_LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap"),
    *("use_mlock", "low_vram", "numa", "vocab_only", "f16_kv", "logits_all", "embedding_only"),
    *("rope_frequency_base", "rope_frequency_scale", "penalize_newline", "draft_num_predict"),
)
# Fields of ``options`` and their names here; those of loading have no effect.
_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty"),
            *("frequency_penalty", "typical_p", "mirostat", "tfs_z"),
        )
    },
}
_CLIENT_NAMES = {new: f"options.{old}" for old, new in _OPTIONS.items()}
_TO_THE_END = (-1, -2)  # values of num_predict that mean no limit
# A client loads the model by a request without messages or prompt. This replaces the missing field,
# so that the rest of the request is checked.
_ANY_TEXT = "a"
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "calls": "stop"}
_REFUSED = {
    "template": "the model's own is used; raw: true uses none",
    "images": "there is text only",
}


def problem_body(problem: Problem) -> dict[str, Any]:
    """Return an error in ollama's form."""
    return {"error": str(problem)}


# ---- requests ----


def _translated(fields: Fields) -> tuple[dict[str, Any], Fields]:
    """Return the shared fields of chats and texts under OpenAI's names, and the options."""
    fields.refuse(_REFUSED)
    options = fields.object("options")
    body = {new: value for old, new in _OPTIONS.items() if (value := options.raw(old)) is not None}
    options.ignore(*_OF_LOADING)
    if body.get("max_tokens") in _TO_THE_END:
        body["max_tokens"] = -1
    body |= {"model": fields.text("model"), "stream": fields.flag("stream", True)}
    form = fields.raw("format")
    if isinstance(form, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    elif form == "json":
        body["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        raise invalid("format", f"format must be json or a schema, not {shown(form)}")
    return body, options


def _add_thinking(fields: Fields, body: dict[str, Any], serving: Serving) -> bool:
    """Read ``think``; return whether thoughts are a field of their own."""
    think = fields.raw("think")
    if not isinstance(think, bool | str | None):
        raise invalid("think", f"think must be true, false or an effort, not {shown(think)}")
    if isinstance(think, str):
        body["reasoning_effort"] = think
    elif think is not None and not serving.model.chat_template.is_plain:
        body["chat_template_kwargs"] = {"enable_thinking": think}
    return think is not False


def is_unloading(body: dict[str, Any]) -> bool:
    """Return whether a request only wants its model to leave memory."""
    text = body.get("prompt") or body.get("messages") or body.get("input")
    return Duration.seconds(body.get("keep_alive")) == 0 and not text


def _with_rest(
    request: CompletionRequest, fields: Fields, options: Fields, serving: Serving, **extra: Any
) -> CompletionRequest:
    request.keep_seconds = Duration.seconds(fields.take("keep_alive", Duration()))
    request.ignored = [*request.ignored, *ignored_fields([fields, options], serving)]
    request.extra |= extra
    request.is_lines = True
    return request


def read_chat(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /api/chat. Raises Problem."""
    fields = Fields(body)
    new, options = _translated(fields)
    shows = _add_thinking(fields, new, serving)
    turns = [_turn(turn) for turn in fields.list("messages", MAX_MESSAGES)]
    new |= {
        "messages": turns or [{"role": "user", "content": _ANY_TEXT}],
        "tools": fields.list("tools", MAX_TOOLS),
        "logprobs": fields.flag("logprobs"),
        "top_logprobs": fields.take("top_logprobs", Whole(0, MAX_TOP), 0),
    }
    request = openai.read_chat(Probe(new, _CLIENT_NAMES), serving)
    if not turns:
        request.prompts = []
    return _with_rest(request, fields, options, serving, has_thoughts=shows)


def _turn(turn: Any) -> Any:
    """Return a message in OpenAI's form."""
    if not isinstance(turn, dict):
        return turn
    if turn.get("images"):
        raise invalid("messages", "images are not supported: there is text only")
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    values = {names.get(name, name): value for name, value in turn.items() if name != "images"}
    values.setdefault("content", "")
    return values


def read_generate(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /api/generate. Raises Problem."""
    fields = Fields(body)
    new, options = _translated(fields)
    prompt, suffix = fields.text("prompt", "") or "", fields.text("suffix")
    system = fields.text("system")
    is_raw = fields.flag("raw") or serving.model.chat_template.is_plain
    shows = _add_thinking(fields, new, serving)
    is_loading = not prompt and not suffix
    prompt = _ANY_TEXT if is_loading else prompt
    if suffix:
        new["prompt"] = read_infill(serving, prompt, suffix, (), "prompt")
        is_raw = True
    if is_raw:
        new.pop("reasoning_effort", None)
        new.pop("chat_template_kwargs", None)
        new.setdefault("prompt", f"{system}\n{prompt}" if system else prompt)
        new.setdefault("max_tokens", -1)
        request = openai.read_completion(Probe(new, _CLIENT_NAMES), serving)
        request.is_infill = bool(suffix)
    else:
        turns = [{"role": "system", "content": system}] if system else []
        new["messages"] = [*turns, {"role": "user", "content": prompt}]
        request = openai.read_chat(Probe(new, _CLIENT_NAMES), serving)
    if is_loading:
        request.prompts = []
    return _with_rest(request, fields, options, serving, has_thoughts=shows)


def read_embed(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /api/embed. Raises Problem."""
    return _read_embed(body, serving, "input")


def read_embedding(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to the older /api/embeddings. Raises Problem."""
    return _read_embed(body, serving, "prompt")


def _read_embed(body: dict[str, Any], serving: Serving, name: str) -> CompletionRequest:
    fields = Fields(body)
    fields.ignore("options")
    new = {"model": fields.text("model"), name: fields.raw(name)}
    new["truncate"] = fields.flag("truncate", True)
    new["dimensions"] = fields.take("dimensions", Whole(1))
    is_loading = new[name] in (None, "", [])
    if is_loading:
        new[name] = _ANY_TEXT
    request = vectors.read_embeddings(new, serving, name)
    if is_loading:
        request.prompts = []
    return _with_rest(request, fields, Fields({}), serving)


# ---- answers ----


def _stamp(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _expires(host: Host) -> float:
    """Return when a model leaves memory if no request comes, in seconds since 1970."""
    return time.time() + host.keep_seconds - (0 if host.n_users else time.monotonic() - host.used)


class _Form(Form):
    """The shared part of answers."""

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        self.name = f"ollama-{time.time_ns():x}"
        self.request = request
        self.serving = serving
        self._started = time.perf_counter_ns()

    def _line(self, text: str, thoughts: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        raise NotImplementedError

    def _thoughts(self, text: str) -> str:
        return text if self.request.extra["has_thoughts"] else ""

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of the answer; a call is sent whole, at its end."""
        thoughts = self._thoughts(event.reasoning)
        if not (event.text or thoughts):
            return []
        return [("", {**self._line(event.text, thoughts, ()), "done": False})]

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the calls."""
        if not choice.calls:
            return []
        return [("", {**self._line("", "", choice.calls), "done": False})]

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the last line, with times and counts."""
        return [("", {**self._line("", "", ()), **self._facts(choices)})]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error, which ollama's clients raise."""
        return [("", problem_body(problem))]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        if not choices:
            return {**self._line("", "", ()), **self._facts(choices)}
        choice = choices[0]
        thoughts = self._thoughts(choice.reasoning)
        return {**self._line(choice.text, thoughts, choice.calls), **self._facts(choices)}

    def _facts(self, choices: Sequence[Choice]) -> dict[str, Any]:
        if not choices:
            reason = "load" if self.request.keep_seconds != 0 else "unload"
            return {"done": True, "done_reason": reason}
        job = choices[0].job
        return {
            "done": True,
            "done_reason": _REASONS[choices[0].reason],
            "total_duration": time.perf_counter_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": job.n_prompt,
            "prompt_eval_duration": round(1e9 * max(job.first - job.admitted, 0.0)),
            "eval_count": job.n_generated,
            "eval_duration": round(1e9 * max(job.last - job.first, 0.0)),
        }


class ChatForm(_Form):
    """Answers of /api/chat."""

    def _line(self, text: str, thoughts: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values()}} for call in calls
            ]
        return {"model": self.serving.name, "created_at": _stamp(), "message": message}


class GenerateForm(_Form):
    """Answers of /api/generate."""

    def _line(self, text: str, thoughts: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        line = {"model": self.serving.name, "created_at": _stamp(), "response": text}
        return {**line, "thinking": thoughts} if thoughts else line


class EmbedForm(vectors.EmbeddingsForm):
    """Answers of /api/embed."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the vectors, in the order of the texts."""
        return {
            "model": self.model,
            "embeddings": [self.vector(choice) for choice in choices],
            "prompt_eval_count": self.usage(choices)["prompt_tokens"],
        }


class EmbeddingForm(vectors.EmbeddingsForm):
    """Answers of /api/embeddings."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the vector."""
        return {"embedding": self.vector(choices[0]) if choices else []}


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
    """Answer /api/tags: all models."""
    stamp = _stamp(created)
    return {"models": [{**_model(hosts, name), "modified_at": stamp} for name in hosts.paths]}


def read_pull(body: dict[str, Any], _serving: Serving | None) -> tuple[str, bool]:
    """Return the name in a request to /api/pull, and whether lines are wanted. Raises Problem."""
    fields = Fields(body)
    fields.ignore("insecure", "username", "password")
    model, name = fields.text("model"), fields.text("name")  # both are checked
    return model or name or "", fields.flag("stream", True)


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
    """Answer /api/ps: the models in memory."""
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


def show(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /api/show."""
    fields = Fields(body)
    fields.text("model")
    fields.ignore("name", "verbose")
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
