"""Keeps the parts of a model's text sections that ``qsf run`` can use, and warns about the others.

A value that nobody can use would make the converted file fail in every run. The code that uses a
value also checks it here; the converter has no rules of its own. What a chat template says is
added: the fixed texts around messages, for programs without Jinja, and which tokens end a turn.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qsf.errors import QsfError, QsfFormatError, shown
from qsf.file.layout import Header
from qsf.foreign_json import read_json
from qsf.text.chat import ChatTemplate, template_fault
from qsf.text.render import one_process
from qsf.text.sampling import end_ids, end_texts, resolve_sampling
from qsf.text.tokenizer import Tokenizer
from qsf_converter.sources.metadata import TOKEN_IDS
from qsf_converter.text.tables import open_tokenizer

_MARKS = ("qZ0Xk", "qZ1Xk", "qZ2Xk")
_TRIALS = ("Hi", "  two words\n", "A \n\n B ", "tail ", "end.")
_SYSTEM = " be brief\n"


def chat_form(template: object, special_tokens: Mapping[str, object]) -> dict[str, Any] | None:
    """Return the form of a template (docs/format.md, section CHAT), or None if it has none."""
    chat = ChatTemplate(template, special_tokens)
    if chat.is_plain or "strftime_now" in chat.source:
        return None
    try:
        form = _form_of(chat)
        is_exact = form is not None and all(
            _render(chat, _TRIALS[:n], system) == joined(form, _TRIALS[:n], system)
            for system in (None, _SYSTEM)[: 1 + ("system" in form)]
            for n in (1, 3, 5)
        )
    except QsfError:
        return None
    return form if is_exact else None


def _form_of(chat: ChatTemplate) -> dict[str, Any] | None:
    texts = _around(_render(chat, _MARKS, None), _MARKS)
    if texts is None:
        return None
    form: dict[str, Any] = dict(zip(("begin", "answer", "next", "ask"), texts, strict=True))
    form["trimmed"] = _TRIALS[1] not in _render(chat, _TRIALS[1:2], None)
    try:
        before = _around(_render(chat, _MARKS[1:2], _MARKS[0]), _MARKS[:2])
    except QsfError:  # the template refuses a system message
        before = None
    if before is not None:
        form["system"] = before[:2]
    return form


def _around(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marks, if each occurs once and in order."""
    parts = []
    for mark in marks:
        part, separator, text = text.partition(mark)
        if not separator or mark in text:
            return None
        parts.append(part)
    return [*parts, text]


def _render(chat: ChatTemplate, turns: Sequence[str], system: str | None) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return chat.render(messages)


def joined(form: Mapping[str, Any], turns: Sequence[str], system: str | None) -> str:
    """Return the form's prompt for turns that alternate between user and model."""
    trim = str.strip if form["trimmed"] else str
    text = form["begin"] if system is None else trim(system).join(form["system"])
    for i, turn in enumerate(turns):
        is_last = i + 1 == len(turns)
        text += trim(turn) + form["ask" if is_last else ("answer", "next")[i % 2]]
    return str(text)


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
# Shorter texts, and those of signs alone, stand within answers, too.
_LEAST_END_CHARS = 4
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
    written, text = _written_after(template, tokenizer)
    more = [token for token in dict.fromkeys([*more, *written]) if token not in ends]
    between = _between_thoughts_and_answer(template) if more or text else ""
    inner = _written_within(between, tokenizer)
    more = [token for token in more if token not in inner]
    generation = dict(chat["generation"])
    if more:
        generation["eos_token_id"] = ends + more
    if text and text not in between:
        generation["stop_strings"] = [*dict.fromkeys([*end_texts(generation), text])]
    return {**chat, "generation": generation}


def _written_after(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return the tokens that end a turn; if none does, the text that does, or ""."""
    question = {"role": "user", "content": _QUESTION}
    messages = [question, {"role": "assistant", "content": _ANSWER}]
    last = _rendered(template, messages).partition(_ANSWER)[2]
    followed = _rendered(template, [*messages, question]).partition(_ANSWER)[2]
    followed = followed.partition(_QUESTION)[0]
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(last, followed, strict=False))
    text = "".join(char for char, _ in pairs).strip()
    both = _marks(text, tokenizer)
    if both:
        return both[-1:], ""
    # Nothing in common: an end of the whole here, the end of a turn or the next one there.
    firsts = (_marks(text, tokenizer, at_start=True)[:1] for text in (last, followed))
    tokens = list(itertools.chain(*firsts))
    # Less than what is written behind the last answer is the beginning of the next turn.
    is_end = not tokens and text == last.strip() and len(text) >= _LEAST_END_CHARS
    is_end = is_end and re.search(r"\w", text) is not None
    return tokens, text if is_end else ""


def _between_thoughts_and_answer(template: ChatTemplate) -> str:
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _rendered(template, [{"role": "user", "content": _QUESTION}, message])
    return text.partition(_THOUGHT)[2].partition(_ANSWER)[0]


def _written_within(between: str, tokenizer: Tokenizer) -> set[int | None]:
    """Return the tokens that the template writes between thoughts and the answer."""
    tokens = set(_marks(between, tokenizer))
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
            end_texts({name: meant})
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
