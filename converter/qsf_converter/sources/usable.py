"""Keeps the parts of a model's text sections that ``qsf-run`` can use, and warns about the others.

A value that nobody can use would make the converted file fail in every run. The code that uses a
value also checks it here; the converter has no rules of its own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qsf.errors import QsfError, QsfFormatError, shown
from qsf.file.layout import Header
from qsf.foreign_json import read_json
from qsf.text.chat import template_fault
from qsf.text.render import one_process
from qsf.text.sampling import end_ids, resolve_sampling
from qsf_converter.sources.chat_form import chat_form
from qsf_converter.sources.metadata import TOKEN_IDS
from qsf_converter.sources.turn_ends import with_turn_ends
from qsf_converter.text.tokenizer import open_tokenizer

_REASON_CHARS = 300


def usable_generation(generation: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    kept: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in generation.items():
        try:
            meant = _meant(name, value)
            json.dumps(meant, allow_nan=False)
            resolve_sampling({name: meant})
            end_ids(None, {name: meant})
        except (ValueError, QsfFormatError) as error:
            warnings.append(
                f"generation default {shown(name)} = {shown(value)} is left out: "
                f"{str(error)[:_REASON_CHARS]}"
            )
            continue
        if meant != value:
            warnings.append(
                f"generation default {name} = {shown(value)} is taken as {shown(meant)}"
            )
        kept[name] = meant
    return kept, tuple(warnings)


@one_process()
def usable_chat(
    data: bytes, embedding: Mapping[str, Any]
) -> tuple[bytes, tuple[str, ...], str | None]:
    """Return the CHAT section with its usable parts, a warning for each other part, and the fault
    of the chat template, which is then left out.

    ``embedding``: settings for vectors of texts, if any.
    """
    chat = read_json(data, has_nan=True)
    if embedding:
        chat["embedding"] = dict(embedding)
    chat["generation"], left_out = usable_generation(chat["generation"])
    fault = template_fault(
        chat["chat_template"], chat["special_tokens"], chat.get("chat_templates")
    )
    if fault is not None:
        fault = f"the chat template is left out: {fault[:_REASON_CHARS]}"
        left_out += (fault,)
        chat["chat_template"] = None
        chat.pop("chat_templates", None)
    form = chat_form(chat["chat_template"], chat["special_tokens"])
    if form is not None:
        chat["form"] = form
    return json.dumps(chat, ensure_ascii=False, allow_nan=False).encode(), left_out, fault


@one_process()
def usable_tokenizer(
    data: bytes, header: Header, chat: bytes
) -> tuple[bytes | None, bytes, tuple[str, ...]]:
    """Return tokenizer.json, or None and a warning that says why it cannot be used; and the CHAT
    section with all tokens that end a turn.
    """
    parsed = read_json(chat, has_nan=True)
    add_bos = parsed["special_tokens"].get("add_bos_token")
    try:
        tokenizer = open_tokenizer(
            data, bos_id=header.bos_id, add_bos=add_bos if isinstance(add_bos, bool) else None
        )
        largest_id = max(tokenizer.encode("Hello"), default=0)
    except QsfError as error:
        reason = str(error)[:_REASON_CHARS]
    else:
        if largest_id < header.n_vocab:
            parsed = with_turn_ends(parsed, tokenizer)
            return data, json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode(), ()
        reason = f"it makes the token {largest_id}, and the model has {header.n_vocab} tokens"
    return None, chat, (f"the tokenizer is left out: {reason}",)


def _meant(name: str, value: Any) -> Any:
    """Normalise spellings of a value: -1 for a top_k that is off, whole numbers as floats."""
    if name == "top_k" and not isinstance(value, bool):
        if value == -1:
            return 0
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if name in TOKEN_IDS:
        ids = value if isinstance(value, list) else [value]
        fine = [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
        if not fine:
            raise QsfFormatError("it is not a token id")
        if len(fine) < len(ids):
            return fine
    return value
