"""Endpoints about the model and its text: models, props, slots, tokens, templates."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.options import Keywords
from qsf.serve.api.completion_request import read_messages, too_long
from qsf.serve.api.openai import as_turns, read_turns
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import invalid
from qsf.serve.serving import Serving
from qsf.serve.tools.fitting import fit_messages
from qsf.serve.tools.request import chat_turns, read_chat_tools
from qsf.text.tokenizer import max_text_bytes

if TYPE_CHECKING:
    from qsf.serve.hosts import Hosts
    from qsf.serve.scheduling.scheduler import Scheduler

_MAX_IDS = 1 << 16


def model_entries(hosts: Hosts, created: int) -> dict[str, dict[str, Any]]:
    """Return the models by name, as OpenAI lists them; ``meta`` and ``status`` as llama-server."""
    return {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "qsf",
            "status": {"value": "loaded" if name in hosts.loaded else "unloaded"},
            "meta": _meta(hosts, name),
        }
        for name in hosts.paths
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
            "params": {
                "temperature": defaults.temperature,
                "top_p": defaults.top_p,
                "top_k": defaults.top_k,
                "min_p": defaults.min_p,
                "repetition_penalty": defaults.repetition_penalty,
            },
        },
        "plan": {
            "budget_bytes": info.plan.budget_bytes,
            "process_bytes": info.plan.process_bytes,
            "reserve_bytes": info.plan.reserve_bytes,
            "engine_bytes": info.plan.engine_bytes,
            "kv_bytes": info.plan.kv_bytes,
            "streamed_bytes": info.plan.streamed_bytes,
        },
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


def tokenize(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /tokenize with llama-server's ``content``, or vLLM's ``prompt`` or ``messages``."""
    fields = Fields(body)
    tokenizer = serving.model.tokenizer
    has_pieces = fields.flag("with_pieces")
    parse_special = fields.flag("parse_special", True)
    has_prefix = fields.flag("add_special", fields.flag("add_special_tokens", "prompt" in body))
    text = fields.text("content", fields.text("prompt"))
    if "messages" in fields:
        tokens, _, _ = read_turns(fields, serving, read_chat_tools(fields, serving))
    else:
        if text is None:
            raise invalid("content", "content is missing: a text, or messages")
        try:
            tokens = tokenizer.encode(
                text,
                add_prefix=has_prefix,
                parse_special=parse_special,
                max_tokens=serving.ctx_tokens,
            )
        except QsfArgumentError as error:
            raise too_long(error, "content") from None
    answer: dict[str, Any] = {"tokens": tokens}
    if has_pieces:
        pieces = [tokenizer.token_bytes(t, skip_special=False) for t in tokens]
        answer["tokens"] = [
            {"id": token, "piece": piece.decode("utf-8", "replace")}
            for token, piece in zip(tokens, pieces, strict=True)
        ]
    return {**answer, "count": len(tokens), "max_model_len": serving.ctx_tokens}


def tokenizer_info(serving: Serving) -> dict[str, Any]:
    """Answer /tokenizer_info as vLLM does, for clients without a tokenizer."""
    info, tokenizer = serving.model.info, serving.model.tokenizer

    def text_of(token: int | None) -> str | None:
        return None if token is None else tokenizer.decode([token], skip_special=False)

    return {"bos_token": text_of(info.bos_id), "eos_token": text_of(info.eos_id)}


def detokenize(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /detokenize: ``tokens`` to ``content``, which vLLM calls ``prompt``."""
    fields = Fields(body)
    if "tokens" not in fields:
        raise invalid("tokens", "tokens is missing")
    tokens = fields.list("tokens", _MAX_IDS)
    n_vocab = serving.model.info.n_vocab
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < n_vocab:
            raise invalid("tokens", f"tokens must be ids below {n_vocab}, not {shown(token)}")
    text = serving.model.tokenizer.decode(tokens)
    return {"content": text, "prompt": text}


def apply_template(body: dict[str, Any], serving: Serving) -> dict[str, Any]:
    """Answer /apply-template: the prompt made of ``messages``; refuses as chats do."""
    fields = Fields(body)
    messages = read_messages(fields)
    template = serving.model.chat_template
    arguments = fields.take("chat_template_kwargs", Keywords(), {})
    tools = read_chat_tools(fields, serving)
    try:
        described = None if tools is None else tools.described
        turns, described = fit_messages(as_turns(chat_turns(messages)), described, template, ())
        prompt = template.render(
            turns,
            tools=described,
            template_args={} if template.is_plain else arguments,
            add_generation_prompt=fields.flag("add_generation_prompt", True),
            max_bytes=max_text_bytes(serving.ctx_tokens),
        )
    except (QsfArgumentError, QsfFormatError) as error:
        raise too_long(error, "messages") from None
    return {"prompt": prompt}
