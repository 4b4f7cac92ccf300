"""Answers in channels, as gpt-oss writes them (Harmony): the final answer, thoughts, and calls of
functions.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qsf.text.thinking import thinking_decoder
from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from qsf.text.tokenizer import Tokenizer

_ENDS = ("<|return|>", "<|call|>")
_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", *_ENDS)
CALL_BEGIN = "<|channel|>commentary to=functions."
CALL_MIDDLE = " <|constrain|>json<|message|>"
CALL_MARKERS = ("<|channel|>", "<|constrain|>", "<|message|>")
_MAX_HEADER = 200  # characters of a role or a channel's name that are looked at
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def channel_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens around channels, with their texts; {}: there are no channels."""
    markers = {tokenizer.token_id(name): name for name in _MARKERS}
    return {
        token: name for token, name in markers.items() if token is not None and None not in markers
    }


def ends_with_channels(end_ids: frozenset[int], tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a text, without those that end a message of a channel only."""
    markers = {} if tokenizer is None else channel_markers(tokenizer)
    ends = {token for token, name in markers.items() if name in _ENDS}
    return (end_ids - set(markers)) | ends


def final_header(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens between a role and a prefilled answer; []: no channels."""
    if not channel_markers(tokenizer):
        return []
    return tokenizer.encode("<|channel|>final<|message|>", add_prefix=False)


def answer_decoder(
    tokenizer: Tokenizer,
    *,
    begins_text: bool,
    functions: Collection[str] = (),
    prompt: Sequence[int] = (),
) -> IncrementalDecoder:
    """Return a decoder of generated tokens: of an answer if it begins a text, else of a
    continuation.

    ``prompt`` are the tokens before it, which may have begun thoughts. Calls of ``functions``, by
    name, become text in one form: ``CALL_BEGIN``, the name, ``CALL_MIDDLE``, the arguments.
    """
    decoder = tokenizer.incremental(at_start=begins_text)
    if not begins_text:
        return decoder
    markers = channel_markers(tokenizer)
    if markers:
        return _ChannelDecoder(decoder, tokenizer, markers, functions)
    return thinking_decoder(tokenizer, decoder, prompt)


class _ChannelDecoder(IncrementalDecoder):
    """Decodes the final channel and calls as text, and the other channels as reasoning.

    A message is ``<|channel|>``, its channel's name and perhaps more, ``<|message|>``, text,
    ``<|end|>``; before the next one comes ``<|start|>`` with a role. The recipient ("to=") follows
    the role or the channel.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        tokenizer: Tokenizer,
        markers: Mapping[int, str],
        functions: Collection[str],
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._markers = markers
        self._functions = functions
        self._marker = ""  # the last marker; "": none yet
        self._has_text = False  # text before the first marker is shown
        self._role = ""
        self._channel = ""
        self._is_call = False

    def push(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        if marker is None:
            return self._sort(self._decoder.push(token_id))
        text = self._sort(self._decoder.flush())
        self._marker = marker
        self._is_call = False
        if marker == "<|message|>":
            return text + self._begin_message()
        if marker != "<|channel|>":
            self._role = ""
        self._channel = ""
        return text

    def flush(self) -> str:
        held = self._role if self._marker == "" else ""
        self._role = ""
        return held + self._sort(self._decoder.flush())

    @property
    def is_thinking(self) -> bool:
        """True inside a channel whose text is not shown."""
        is_shown = self._is_call or self._channel.split()[:1] in ([], ["final"])
        return self._marker == "<|message|>" and not is_shown

    def end_of_thoughts(self) -> list[int]:
        """Return the tokens that end this message and begin the final one."""
        text = "<|end|><|start|>assistant<|channel|>final<|message|>"
        return self._tokenizer.encode(text, add_prefix=False)

    def _begin_message(self) -> str:
        match = _RECIPIENT.search(f"{self._role} {self._channel}")
        self._is_call = match is not None and match[1] in self._functions
        return CALL_BEGIN + match[1] + CALL_MIDDLE if match and self._is_call else ""

    def _sort(self, text: str) -> str:
        if self._marker == "<|channel|>":
            self._channel = (self._channel + text)[:_MAX_HEADER]
        elif self._marker == "<|message|>":
            if not self.is_thinking:
                return text
            self._reasoning += text
        elif self._marker == "<|start|>":
            self._role = (self._role + text)[:_MAX_HEADER]
        elif self._marker == "":
            return self._sort_first(text)
        return ""

    def _sort_first(self, text: str) -> str:
        """Hold back text before the first marker, which may name the recipient."""
        self._role += text
        start = self._role.lstrip()[:3]
        if not self._has_text and "to=".startswith(start) and len(self._role) < _MAX_HEADER:
            return ""
        text, self._role = self._role, ""
        self._has_text = True
        return text
