"""What a file says about text: tokenizer, chat template, generation defaults."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.reader import Reader
from qsf.text.chat import ChatTemplate
from qsf.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TextParts:
    """What the file says about text, read without the engine."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | QsfFormatError  # the error: it is broken, which only chat minds
    generation: Mapping[str, Any]


def read_text_parts(path: str | os.PathLike[str]) -> TextParts:
    """Read the sections TOKN and CHAT.

    This happens before the engine is opened, because the engine measures the process at
    that moment and gives the model what the budget leaves: the tokenizer, 4 MiB for small
    vocabularies and over 100 for large ones, must already be there.
    """
    with Reader(path) as reader:
        has_tokenizer = "TOKN" in reader.sections
        tokenizer_json = reader.read_section("TOKN") if has_tokenizer else b""
        chat = _json_object(reader.read_section("CHAT") if "CHAT" in reader.sections else b"{}")
        bos_id = reader.header.bos_id
    special = chat.get("special_tokens") or {}
    generation = chat.get("generation") or {}
    if not isinstance(special, dict) or not isinstance(generation, dict):
        raise QsfFormatError("the section CHAT is not of the form that it should have")
    tokenizer = None
    if has_tokenizer:
        add_bos = special.get("add_bos_token")
        tokenizer = Tokenizer(
            tokenizer_json, bos_id=bos_id, add_bos=add_bos if isinstance(add_bos, bool) else None
        )
    template: ChatTemplate | QsfFormatError
    try:
        template = ChatTemplate(chat.get("chat_template"), special)
    except QsfFormatError as error:
        template = error
    return TextParts(tokenizer, template, generation)


def require_tokenizer(path: str | os.PathLike[str]) -> None:
    """Refuse a file without tokenizer, by its directory alone. Raises QsfArgumentError."""
    with Reader(path) as reader:
        if "TOKN" not in reader.sections:
            raise QsfArgumentError(
                f"{os.fspath(path)} has no tokenizer, so there is no text: convert the model with "
                "its tokenizer.json"
            )


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
    except ValueError as error:
        raise QsfFormatError(f"the section CHAT is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise QsfFormatError("the section CHAT is not a JSON object")
    return value
