"""Answers with thoughts between <think> and </think>: Qwen 3, DeepSeek R1, GLM-4.5, SmolLM3."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.text.tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
# Templates that let an answer begin with thoughts end with the mark, and perhaps with a line break.
_LAST_TOKENS = 4


def thinking_decoder(
    tokenizer: Tokenizer, decoder: IncrementalDecoder, prompt: Sequence[int]
) -> IncrementalDecoder:
    """Return a decoder that separates thoughts from the answer; ``decoder`` without such marks.

    ``prompt`` are the tokens before the answer; thinking may begin in them.
    """
    begin, end = tokenizer.token_id(_BEGIN), tokenizer.token_id(_END)
    if begin is None or end is None:
        return decoder
    last = list(prompt[-_LAST_TOKENS:])
    return _ThinkingDecoder(decoder, begin, end, is_open=begin in last and end not in last)


class _ThinkingDecoder(IncrementalDecoder):
    """Gives the text outside of the marks as the answer, the text between them as reasoning."""

    def __init__(self, decoder: IncrementalDecoder, begin: int, end: int, *, is_open: bool) -> None:
        self._decoder = decoder
        self._marks = {begin: True, end: False}
        self._is_open = is_open
        self._at_edge = is_open  # behind a mark: line breaks there belong to neither text
        self._reasoning = ""

    def push(self, token_id: int) -> str:
        """Return the text of the answer that is complete with this token."""
        if token_id not in self._marks:
            return self._sort(self._decoder.push(token_id))
        text = self._sort(self._decoder.flush())
        self._is_open = self._marks[token_id]
        self._at_edge = True
        return text

    def flush(self) -> str:
        """Return what is left of the answer."""
        return self._sort(self._decoder.flush())

    def take_reasoning(self) -> str:
        """Return the thoughts since the last call."""
        text, self._reasoning = self._reasoning, ""
        return text

    def _sort(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip("\n")
            self._at_edge = not text
        if not self._is_open:
            return text
        self._reasoning += text
        return ""
