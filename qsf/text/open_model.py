"""``OpenedModel``: the parts of an open model that its sessions share."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.text.arguments import as_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from qsf.native import binding
    from qsf.options import GenerationOptions
    from qsf.text.chat import ChatTemplate
    from qsf.text.embedding import TextVectors
    from qsf.text.tokenizer import Tokenizer


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
