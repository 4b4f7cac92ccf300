"""Routes about the model and its text: models, props, slots, tokens, templates."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.serve.api.answering import Route
from qsf.serve.api.ask import too_long
from qsf.serve.api.openai import Messages, Templated, as_turns, chat_tokens, template_values
from qsf.serve.http.body import Part
from qsf.serve.http.problems import invalid
from qsf.serve.serving import Serving
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.request import chat_turns
from qsf.text.tokenizer import max_text_bytes

if TYPE_CHECKING:
    from qsf.serve.hosts import Hosts
    from qsf.serve.scheduling.scheduler import Scheduler

_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLANNED = ("budget", "process", "reserve", "engine", "kv", "streamed")
_IDS: Any = {"items": {"type": "integer", "minimum": 0}}


def model_entry(hosts: Hosts, name: str, created: int) -> dict[str, Any]:
    """Return a model, as OpenAI lists them; ``meta`` and ``status`` as llama-server."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "qsf",
        "status": {"value": "loaded" if name in hosts.loaded else "unloaded"},
        "meta": _meta(hosts, name),
    }


def _meta(hosts: Hosts, name: str) -> dict[str, Any]:
    info = hosts.infos.get(name)
    if info is None:  # it was not loaded yet
        return {"size": hosts.paths[name].stat().st_size}
    return {
        "n_vocab": info.n_vocab,
        "n_ctx": info.plan.ctx_tokens,
        "n_ctx_train": info.max_tokens,
        "n_embd": info.dim,
        "n_params": info.n_parameters,
        "size": info.file_bytes,
        "quant_type": info.quant_type,
    }


def props(serving: Serving, scheduler: Scheduler) -> dict[str, Any]:
    """Return the server's properties by llama-server's names; includes no text of clients."""
    info = serving.model.info
    defaults = serving.model.generation_defaults
    return {
        "model_alias": serving.name,
        "total_slots": scheduler.n_running_most,
        "n_ctx": serving.ctx_tokens,
        "chat_template_is_plain": serving.model.chat_template.is_plain,
        "system_fingerprint": serving.fingerprint,
        "default_generation_settings": {
            "n_ctx": serving.ctx_tokens,
            "params": {name: getattr(defaults, name) for name in _PARAMS},
        },
        "memory": info.plan.text,
        "plan": {f"{name}_bytes": getattr(info.plan, f"{name}_bytes") for name in _PLANNED},
        "is_idle": not scheduler.running and not scheduler.n_waiting,
    }


def slots(serving: Serving, scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the counts of each slot; includes no text."""
    entries = []
    for slot in scheduler.slots:
        job = slot.job
        entry: dict[str, Any] = {
            "id": slot.index,
            "n_ctx": serving.ctx_tokens,
            "n_held": slot.n_held,
            "is_processing": job is not None,
        }
        if job is not None:
            entry |= {
                "request": job.name,
                "state": job.state.value,
                "n_prompt": job.n_prompt,
                "n_cached": job.n_cached,
                "n_decoded": job.n_generated,
            }
        entries.append(entry)
    return entries


class Tokenize(Templated):
    """The body of a request to /tokenize: llama-server's ``content``, or vLLM's others."""

    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None


class Detokenize(Part, kw_only=True):
    tokens: Annotated[list[Any], Meta(max_length=1 << 16, extra_json_schema=_IDS)]


class ApplyTemplate(Templated, kw_only=True):
    messages: Messages
    add_generation_prompt: bool | None = None


def tokenize(fields: Tokenize, serving: Serving) -> dict[str, Any]:
    tokenizer = serving.model.tokenizer
    text = fields.prompt if fields.content is None else fields.content
    has_prefix = fields.prompt is not None
    for said in (fields.add_special_tokens, fields.add_special):
        has_prefix = has_prefix if said is None else said
    if fields.messages is not None:
        tokens = chat_tokens(fields, fields.messages, serving)
    else:
        if text is None:
            raise invalid("content", "content is missing: a text, or messages")
        try:
            tokens = tokenizer.encode(
                text,
                add_prefix=has_prefix,
                parse_special=fields.parse_special is not False,
                max_tokens=serving.ctx_tokens,
            )
        except QsfArgumentError as error:
            raise too_long(error, "content") from None
    answer: dict[str, Any] = {"tokens": tokens}
    if fields.with_pieces:
        pieces = [tokenizer.token_bytes(t, skip_special=False) for t in tokens]
        answer["tokens"] = [
            {"id": token, "piece": piece.decode("utf-8", "replace")}
            for token, piece in zip(tokens, pieces, strict=True)
        ]
    return {**answer, "count": len(tokens), "max_model_len": serving.ctx_tokens}


def tokenizer_info(serving: Serving, _scheduler: Scheduler) -> dict[str, Any]:
    """Answer /tokenizer_info as vLLM does, for clients without a tokenizer."""
    info, tokenizer = serving.model.info, serving.model.tokenizer

    def text_of(token: int | None) -> str | None:
        return None if token is None else tokenizer.decode([token], skip_special=False)

    return {"bos_token": text_of(info.bos_id), "eos_token": text_of(info.eos_id)}


def detokenize(fields: Detokenize, serving: Serving) -> dict[str, Any]:
    """Answer /detokenize: ``tokens`` to ``content``, which vLLM calls ``prompt``."""
    tokens, n_vocab = fields.tokens, serving.model.info.n_vocab
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < n_vocab:
            raise invalid("tokens", f"tokens must be ids below {n_vocab}, not {shown(token)}")
    text = serving.model.tokenizer.decode(tokens)
    return {"content": text, "prompt": text}


def apply_template(fields: ApplyTemplate, serving: Serving) -> dict[str, Any]:
    """Answer /apply-template: the prompt made of ``messages``; refuses as chats do."""
    template = serving.model.chat_template
    arguments = template_values(fields)
    tools = fields.read_tools(serving)
    try:
        described = None if tools is None else tools.described
        turns, described = fit_messages(
            as_turns(chat_turns(fields.messages)), described, template, ()
        )
        prompt = template.render(
            turns,
            tools=described,
            template_args={} if template.is_plain else arguments,
            add_generation_prompt=fields.add_generation_prompt is not False,
            max_bytes=max_text_bytes(serving.ctx_tokens),
        )
    except (QsfArgumentError, QsfFormatError) as error:
        raise too_long(error, "messages") from None
    return {"prompt": prompt}


ROUTES = (
    Route("/tokenize", "text or messages to tokens", Tokenize, tokenize),
    Route("/detokenize", "tokens to text", Detokenize, detokenize),
    Route("/apply-template", "messages to a prompt", ApplyTemplate, apply_template),
)
