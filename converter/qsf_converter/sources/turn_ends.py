"""Which tokens end a turn of a chat: the metadata often names that of the base model only.

Further ones are known marks of the vocabulary, and what the template itself writes after an
assistant's message. A token that it writes within a message, such as between thoughts and the
answer, ends no turn.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from qsf.errors import QsfError
from qsf.text.chat import ChatTemplate
from qsf.text.tokenizer import Tokenizer

# What ends a turn where <|end|> ends a message of several (gpt-oss, Solar Open)
_AFTER_MESSAGES = ("<|return|>", "<|flush|>")
# Special tokens that end a turn wherever they exist (llama.cpp, src/llama-vocab.cpp)
_KNOWN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<EOT>", "_<EOT>", "\u2581<EOT>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|END_OF_TURN_TOKEN|>", *_AFTER_MESSAGES),
)
# A token that looks like a mark counts as one without being special
_MARK = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
_THOUGHT, _ANSWER, _QUESTION = "qZ0Xk", "qZ1Xk", "qZ2Xk"


def with_turn_ends(chat: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return CHAT with all ends of a turn in ``generation``; unchanged without a template."""
    template = ChatTemplate(chat["chat_template"], chat["special_tokens"])
    if template.is_plain:
        return dict(chat)
    named = chat["generation"].get("eos_token_id", [])
    ends = list(named) if isinstance(named, list) else [named]
    names = (chat["special_tokens"].get("eos_token"), *_KNOWN)
    known = [tokenizer.token_id(name) for name in names if name]
    more = [token for token in known if token in tokenizer.special_ids]
    more += _written_after(template, tokenizer)
    more = [token for token in dict.fromkeys(more) if token not in ends]
    inner = _written_within(template, tokenizer) if more else set()
    more = [token for token in more if token not in inner]
    if not more:
        return dict(chat)
    return {**chat, "generation": {**chat["generation"], "eos_token_id": ends + more}}


def _written_after(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    question = {"role": "user", "content": _QUESTION}
    messages = [question, {"role": "assistant", "content": _ANSWER}]
    last = _rendered(template, messages).partition(_ANSWER)[2]
    followed = _rendered(template, [*messages, question]).partition(_ANSWER)[2]
    followed = followed.partition(_QUESTION)[0]
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(last, followed, strict=False))
    both = _marks("".join(char for char, _ in pairs), tokenizer)
    if both:
        return both[-1:]
    # Nothing in common: an end of the whole here, the end of a turn or the next one there.
    firsts = (_marks(text, tokenizer, at_start=True)[:1] for text in (last, followed))
    return list(itertools.chain(*firsts))


def _written_within(template: ChatTemplate, tokenizer: Tokenizer) -> set[int | None]:
    """Return the tokens that the template writes between thoughts and the answer."""
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _rendered(template, [{"role": "user", "content": _QUESTION}, message])
    tokens = set(_marks(text.partition(_THOUGHT)[2].partition(_ANSWER)[0], tokenizer))
    if any(tokenizer.token_id(name) is not None for name in _AFTER_MESSAGES):
        return {*tokens, tokenizer.token_id("<|end|>")}
    return {*tokens}


def _marks(text: str, tokenizer: Tokenizer, *, at_start: bool = False) -> list[int]:
    """Return the tokens in a text of marks; ``at_start``: only if it begins with one."""
    names = "|".join([*map(re.escape, tokenizer.special_names), _MARK])
    found = re.compile(names).finditer(text.lstrip())
    ids = [(m.start(), tokenizer.encode(m[0], add_prefix=False)) for m in found]
    return [i[0] for start, i in ids if len(i) == 1 and not (at_start and start)]


def _rendered(template: ChatTemplate, messages: list[dict[str, str]]) -> str:
    """Return the text, or "" if the template fails with these messages."""
    try:
        return template.render(messages, add_generation_prompt=False)
    except QsfError:
        return ""
