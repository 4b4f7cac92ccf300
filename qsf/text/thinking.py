"""Answers with thoughts between marks: Qwen 3, DeepSeek, GLM, Gemma 4, Magistral, Granite and more.

Marks that are tokens of the vocabulary count anywhere in an answer. Marks of ordinary text count
only at the beginning of an answer, so that an answer may quote them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError
from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.text.generation import TokenConstraint
    from qsf.text.tokenizer import Tokenizer

_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
_LABELS = {"<|channel>": "thought\n"}  # a line after the mark that is not part of the thoughts
# A template whose answers begin with thoughts ends with the mark, perhaps followed by a line break.
_LAST_TOKENS = 4
_LAST_TEXT_TOKENS = 16  # the same for a mark of ordinary text

_SWITCHES = (
    ("enable_thinking", re.compile(r"(?<![.\w])enable_thinking\b")),
    # DeepSeek V3.1 and Granite; `message.thinking` means something else.
    ("thinking", re.compile(r"\b(?:if|not|and|or|set) +(?:not +)?thinking\b(?!\.)")),
)


def thinking_args(template: str, *, is_on: bool) -> dict[str, Any]:
    """Return the variable with which a chat template in Jinja switches thoughts on or off.

    Raises QsfArgumentError if the template has no such switch.
    """
    for name, pattern in _SWITCHES:
        if pattern.search(template):
            return {name: is_on}
    always = "<|channel|>" in template or any(
        mark in template for marks in _MARKS for mark in marks
    )
    if always and is_on:
        return {}
    if not always:
        raise QsfArgumentError("the model's chat template knows no thinking: leave it out")
    least = (
        "--template-arg reasoning_effort=low asks for less"
        if "reasoning_effort" in template
        else "--hide-thinking does not show it"
    )
    raise QsfArgumentError(f"the model always thinks, its chat template has no switch: {least}")


def thinks(template: str) -> bool:
    """Return whether a chat template in Jinja handles thoughts."""
    try:
        thinking_args(template, is_on=True)
    except QsfArgumentError:
        return False
    return True


def thinking_decoder(
    tokenizer: Tokenizer, decoder: IncrementalDecoder, prompt: Sequence[int]
) -> IncrementalDecoder:
    """Return a decoder that separates thoughts from the answer.

    ``prompt`` are the tokens before the answer; thinking may begin in them.
    """
    for marks in _MARKS:
        begin, end = map(tokenizer.token_id, marks)
        if begin is not None and end is not None:
            last = list(prompt[-_LAST_TOKENS:])
            is_open = begin in last and end not in last
            return _ThinkingDecoder(decoder, begin, end, _LABELS.get(marks[0], ""), is_open=is_open)
    text = tokenizer.decode(prompt[-_LAST_TEXT_TOKENS:]).rstrip()
    return _WrittenThinkingDecoder(decoder, tokenizer, text)


class ThoughtsLimit:
    """A ``TokenConstraint`` that ends the thoughts of an answer after ``most`` tokens.

    It forces the tokens of the end mark; the answer continues after them.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        most: int,
        n_vocab: int,
        inner: TokenConstraint | None = None,
    ) -> None:
        """Follow a decoder, which receives each token first; ``inner`` constrains the rest."""
        self._decoder = decoder
        self._most = most
        self._n_vocab = n_vocab
        self._inner = inner
        self._ends: list[int] = []  # forced tokens
        self._look()

    def _look(self) -> None:
        if self._decoder.is_thinking and self._most <= 0 and not self._ends:
            self._ends = self._decoder.end_of_thoughts()

    def forced(self) -> int | None:
        """Return the forced token; None: there is a choice. Raises QsfError."""
        if self._ends:
            return self._ends[0]
        return None if self._inner is None else self._inner.forced()

    def mask(self) -> bytes | None:
        """Return the mask of allowed tokens, a bit each; None: all. Raises QsfError."""
        if not self._ends:
            return None if self._inner is None else self._inner.mask()
        mask = bytearray((self._n_vocab + 31) // 32 * 4)
        mask[self._ends[0] // 8] = 1 << self._ends[0] % 8
        return bytes(mask)

    def take(self, token: int) -> bool:
        """Record the chosen token; return True at the end of the form. Raises QsfError."""
        self._most -= self._decoder.is_thinking
        if self._ends:
            self._ends.pop(0)
        self._look()
        return self._inner is not None and self._inner.take(token)


class _ThinkingDecoder(IncrementalDecoder):
    """Decodes text outside of the marks as the answer, and text between them as reasoning."""

    def __init__(
        self, decoder: IncrementalDecoder, begin: int, end: int, label: str, *, is_open: bool
    ) -> None:
        self._decoder = decoder
        self._marks = {begin: True, end: False}
        self._is_open = is_open
        self._at_edge = is_open  # after a mark: line breaks there belong to neither text
        self._end = end
        self._label = label
        self._held = ""  # may be the label

    @property
    def is_thinking(self) -> bool:
        """True if the next text stands between the marks."""
        return self._is_open

    def end_of_thoughts(self) -> list[int]:
        return [self._end]

    def push(self, token_id: int) -> str:
        """Return the text of the answer that is complete with this token."""
        if token_id not in self._marks:
            return self._sort(self._decoder.push(token_id))
        text = self._sort(self._decoder.flush())
        self._is_open = self._marks[token_id]
        self._at_edge = True
        self._held = ""
        return text

    def flush(self) -> str:
        return self._sort(self._decoder.flush())

    def _sort(self, text: str) -> str:
        if self._at_edge:
            text = (self._held + text).lstrip("\n")
            is_label = self._is_open and bool(text) and self._label.startswith(text)
            self._held = text if is_label else ""
            text = "" if is_label else text
            if self._is_open and self._label and text.startswith(self._label):
                text = text.removeprefix(self._label).lstrip("\n")
            self._at_edge = not text
        if not self._is_open:
            return text
        self._reasoning += text
        return ""


class _WrittenThinkingDecoder(IncrementalDecoder):
    """The decoder for marks of ordinary text: thoughts at the beginning of an answer."""

    def __init__(self, decoder: IncrementalDecoder, tokenizer: Tokenizer, prompt: str) -> None:
        """``prompt`` is the end of the text before the answer."""
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._end = next((end for begin, end in _MARKS if prompt.endswith(begin)), "")
        self._is_undecided = not self._end
        self._at_edge = bool(self._end)
        self._held = ""  # may be the beginning of a mark

    @property
    def is_thinking(self) -> bool:
        """True until the mark that ends the thoughts has come."""
        return bool(self._end)

    def end_of_thoughts(self) -> list[int]:
        """Return the tokens of the end mark, on a line of its own."""
        return self._tokenizer.encode(f"\n{self._end}", add_prefix=False, parse_special=False)

    def push(self, token_id: int) -> str:
        """Return the text of the answer that is complete with this token."""
        return self._sort(self._decoder.push(token_id), is_last=False)

    def flush(self) -> str:
        return self._sort(self._decoder.flush(), is_last=True)

    def _sort(self, text: str, *, is_last: bool) -> str:
        if not (self._is_undecided or self._end or self._at_edge):
            return text
        text, self._held = self._held + text, ""
        if self._is_undecided:
            start = text.lstrip()
            self._end = next((end for begin, end in _MARKS if start.startswith(begin)), "")
            if not self._end and not is_last and any(b.startswith(start) for b, _ in _MARKS):
                self._held = text
                return ""
            self._is_undecided = False
            if not self._end:
                return text
            begin = next(begin for begin, end in _MARKS if end == self._end)
            text = start.removeprefix(begin)
            self._at_edge = True
        if self._end:
            thoughts, mark, text = text.partition(self._end)
            n_free = len(thoughts)
            if not mark and not is_last:
                n_free -= _common_edge(thoughts, self._end)
            self._held = thoughts[n_free:]
            self._reasoning += self._trimmed(thoughts[:n_free])
            if not mark:
                return ""
            self._end = ""
            self._at_edge = True
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip("\n")
            self._at_edge = not text
        return text


def _common_edge(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
