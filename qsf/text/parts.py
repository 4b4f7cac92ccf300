"""A file's data about text, and ``OpenedModel``: the parts of an open model that sessions share."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.family import family_of
from qsf.file.reader import Reader
from qsf.foreign_json import JsonError, read_json
from qsf.text.arguments import as_messages
from qsf.text.chat import ChatTemplate
from qsf.text.embedding import TextVectors, text_vectors
from qsf.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from qsf.native import binding
    from qsf.native.opening import Adapter
    from qsf.options import GenerationOptions


# Most memory for parsing CHAT: the least reserve, which is unused at that time.
_CHAT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TextParts:
    """The file's data about text, read without the engine."""

    tokenizer: Tokenizer | None
    # The error of a broken template, which only chat raises
    template: ChatTemplate | QsfFormatError
    generation: Mapping[str, Any]
    text_bytes: int = 0  # resident memory of the tokenizer
    family: str = ""  # of the model, such as "qwen2"
    vectors: TextVectors = field(default_factory=TextVectors)

    @property
    def reserve_bytes(self) -> int:
        """Least reserve: the memory of the process that renders a chat template."""
        if isinstance(self.template, QsfFormatError) or self.template.is_plain:
            return 0
        return self.template.render_bytes


def read_text_parts(path: str | os.PathLike[str]) -> TextParts:
    """Read the sections TEXT and CHAT.

    This comes before the engine is opened, because the engine then measures the process and gives
    the model the rest of the budget: the tokenizer, some megabytes, must already be loaded.

    Raises:
        QsfUnsupportedError: TEXT is of a newer version.
        QsfFormatError: a section is malformed.
    """
    with Reader(path) as reader:
        has_text = "TEXT" in reader.sections
        tokenizer = Tokenizer(path, bos_id=reader.header.bos_id) if has_text else None
        chat = _json_object(reader.read_section("CHAT") if "CHAT" in reader.sections else b"{}")
        family = family_of(reader)
        header, arch = reader.header, reader.arch
    special = chat.get("special_tokens") or {}
    generation = chat.get("generation") or {}
    if not isinstance(special, dict) or not isinstance(generation, dict):
        raise QsfFormatError("the section CHAT is not of the form that it should have")
    text_bytes = 0 if tokenizer is None else tokenizer.n_bytes
    template: ChatTemplate | QsfFormatError
    try:
        named = chat.get("chat_templates")
        of_tools = named.get("tool_use") if isinstance(named, dict) else None
        template = ChatTemplate(
            chat.get("chat_template"), special, of_tools if isinstance(of_tools, str) else None
        )
    except QsfFormatError as error:
        template = error
    vectors = text_vectors(chat, tokenizer, header, arch)
    return TextParts(tokenizer, template, generation, text_bytes, family, vectors)


def require_tokenizer(path: str | os.PathLike[str]) -> None:
    """Refuse a file without tokenizer, using its directory alone. Raises QsfArgumentError."""
    with Reader(path) as reader:
        if "TEXT" in reader.sections:
            return
        has_other = "TOKN" in reader.sections
    reason = "only a tokenizer.json (TOKN), of a kind or release that the engine lacks"
    raise QsfArgumentError(
        f"{os.fspath(path)} has {reason if has_other else 'no tokenizer'}, so there is no text: "
        "convert the model again with its tokenizer.json"
    )


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = read_json(data, memory_bytes=_CHAT_BYTES)
    except JsonError as error:
        raise QsfFormatError(f"the section CHAT cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise QsfFormatError("the section CHAT is not a JSON object")
    return value


@dataclass(eq=False)
class OpenedModel:
    """The parts of a model that all of its sessions share."""

    native: binding.NativeModel
    info: binding.ModelInfo
    tokenizer_or_none: Tokenizer | None
    template_or_error: ChatTemplate | QsfFormatError
    generation: Mapping[str, Any]
    end_ids: frozenset[int]
    vectors: TextVectors
    name: str = ""  # the file's name, for people
    adapters: tuple[Adapter, ...] = ()
    # The open Sessions, a class of a higher layer
    sessions: WeakSet[Any] = field(default_factory=WeakSet)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Use the native model, only in its own process; close() waits meanwhile."""
        self.native.owner.check()
        with self._lock:
            yield

    def close(self) -> None:
        if self.native.owner.is_elsewhere:
            self.native.close()
            return
        with self._lock:
            for session in tuple(self.sessions):
                session.close()
            self.native.close()

    def adapter_scales(self, name: str | None = None) -> tuple[float, ...]:
        """Return the scales of adapters without a name, and of the one that is called ``name``.

        Raises QsfArgumentError for another name.
        """
        names = [each.name for each in self.adapters if each.name]
        if name is not None and name not in names:
            known = f"there are {', '.join(names)}" if names else "none has a name"
            raise QsfArgumentError(
                f"no adapter is called {name!r}: {known} (lora='NAME=FILE')", argument="adapter"
            )
        return tuple(each.scale if each.name in ("", name) else 0.0 for each in self.adapters)

    @property
    def input_bytes(self) -> int:
        """Most memory that reading untrusted JSON may take: half of the plan's reserve."""
        return self.info.plan.reserve_bytes // 2

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises QsfArgumentError if the file has none."""
        if self.tokenizer_or_none is None:
            raise QsfArgumentError(
                "the file has no tokenizer: logits() and embed() can be used, on token ids"
            )
        return self.tokenizer_or_none

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises QsfFormatError if it is broken."""
        if isinstance(self.template_or_error, QsfFormatError):
            raise self.template_or_error
        return self.template_or_error

    def prompt_of(
        self, messages: Any, options: GenerationOptions
    ) -> tuple[list[int], GenerationOptions]:
        tokens = self.template.encode(
            as_messages(messages),
            self.tokenizer,
            template_args=options.template_args,
            max_tokens=self.info.plan.ctx_tokens,
        )
        begins_text = options.begins_text or not self.template.is_plain
        return tokens, replace(options, begins_text=begins_text, template_args=None)
