"""Answers in channels, as gpt-oss writes them (Harmony): the final one is shown."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qsf.text.tokenizer import Tokenizer

_ENDS = ("<|return|>", "<|call|>")
_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", *_ENDS)


def channel_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens around channels, with their texts; {}: the model has none."""
    found = {tokenizer.token_id(name): name for name in _MARKERS}
    return {token: name for token, name in found.items() if token is not None and None not in found}


def ends_with_channels(end_ids: frozenset[int], tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a text: where there are channels, not what ends a message."""
    markers = {} if tokenizer is None else channel_markers(tokenizer)
    ends = {token for token, name in markers.items() if name in _ENDS}
    return (end_ids - set(markers)) | ends


def answer_decoder(tokenizer: Tokenizer, *, begins_text: bool) -> IncrementalDecoder:
    """Return a decoder of what is generated: an answer if it begins a text, else a continuation."""
    decoder = tokenizer.incremental(at_start=begins_text)
    markers = channel_markers(tokenizer) if begins_text else {}
    return _ChannelDecoder(decoder, markers) if markers else decoder


class _ChannelDecoder(IncrementalDecoder):
    """Gives the text of the final channel, and that of the others as reasoning.

    A message is ``<|channel|>``, its channel's name and perhaps more, ``<|message|>``, text,
    ``<|end|>``; before the next one comes ``<|start|>`` with a role.
    """

    def __init__(self, decoder: IncrementalDecoder, markers: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._markers = markers
        self._marker = ""  # the last one; "": none has come yet
        self._channel = ""
        self._reasoning = ""

    def push(self, token_id: int) -> str:
        """Return the text to be shown that is complete with this token."""
        marker = self._markers.get(token_id)
        if marker is None:
            return self._sort(self._decoder.push(token_id))
        text = self.flush()
        self._marker = marker
        if marker != "<|message|>":
            self._channel = ""
        return text

    def flush(self) -> str:
        """Return what is left of the text to be shown."""
        return self._sort(self._decoder.flush())

    def take_reasoning(self) -> str:
        """Return what other channels have said since the last call."""
        text, self._reasoning = self._reasoning, ""
        return text

    def _sort(self, text: str) -> str:
        if self._marker == "<|channel|>":
            self._channel += text
        elif self._marker == "<|message|>" and self._channel.split()[:1] not in ([], ["final"]):
            self._reasoning += text
        elif self._marker in ("", "<|message|>"):
            return text
        return ""
