"""Messages to the prompt of a chat model, by the file's template.

Templates are rendered as HuggingFace transformers renders them, by Jinja2 with the same settings
(``qsf/text/render_child.py``).

**Without a template** (a model not trained for chat) the turns are joined by line breaks and the
model continues the last one: plain text, no roles.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.foreign_json import JsonError, read_json
from qsf.options import Keywords, check_value
from qsf.text.tokenizer import max_text_bytes, protect_special

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qsf.text.tokenizer import Tokenizer

# A Unicode noncharacter, which no real text contains.
_SEAM = "\ufdd0"
MAX_SOURCE_BYTES = 128 << 10  # several times the longest known template
# Most private memory of the process that renders a template for a prompt of up to 64 KB. Jinja2's
# and Python's syntax trees come on top, for each byte of the template.
RENDER_BYTES = 11 << 20
COMPILER_PER_BYTE = 160
# With a template of up to 10 KB, of a process that stays and its fork together
KEPT_RENDER_BYTES = 16 << 20
_MAX_TEXT_BYTES = 4 << 20
_REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's thoughts

# What a conversion tries a template with
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "Hello"}
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "A text."}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A function.", "parameters": _PARAMETERS},
}


class Trusted(str):
    """A text of a message that may name special tokens; what it has of others is ``protected``."""

    __slots__ = ()


def _template_source(template: object) -> str | None:
    """Return the template's text; of several named templates the one called "default"."""
    if template is None or isinstance(template, str):
        return template or None
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named
    if isinstance(template, dict) and isinstance(template.get("default"), str):
        return str(template["default"])
    raise QsfFormatError("the file's chat template is neither a text nor a list with a default")


class ChatTemplate:
    """The chat template of one model.

    Args:
        template: ``chat_template`` of the file's CHAT section; None: there is none.
        special_tokens: names such as ``bos_token`` and their texts, for the template.
        tool_template: used instead if there are tools; None: the same template.

    Example::

        template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
        template.render([{"role": "user", "content": "Hi"}])    # "[user]Hi"
    """

    def __init__(
        self,
        template: object = None,
        special_tokens: Mapping[str, object] | None = None,
        tool_template: str | None = None,
    ) -> None:
        """Keep the template, which is compiled on first use. Raises QsfFormatError for no text."""
        self._source = _template_source(template)
        self._tool_source = tool_template or self._source
        n_bytes = max(
            len((source or "").encode("utf-8", "replace"))
            for source in (self._source, self._tool_source)
        )
        if n_bytes > MAX_SOURCE_BYTES:
            raise QsfFormatError(
                f"the file's chat template has {n_bytes} bytes, allowed: up to {MAX_SOURCE_BYTES}"
            )
        self.render_bytes = RENDER_BYTES + COMPILER_PER_BYTE * n_bytes
        self._special_tokens = {
            name: text for name, text in (special_tokens or {}).items() if isinstance(text, str)
        }

    @property
    def is_plain(self) -> bool:
        """The file has no template: turns are joined as plain text."""
        return self._source is None

    @property
    def source(self) -> str:
        """The template in Jinja; "": none."""
        return self._source or ""

    @property
    def tool_source(self) -> str:
        """The template for prompts with tools; "": none."""
        return self._tool_source or ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_bytes: int = _MAX_TEXT_BYTES,
    ) -> str:
        """Return the prompt as text.

        Args:
            messages: mappings with ``role`` ("system", "user", "assistant") and ``content``; all
                their values are JSON values.
            tools: functions that the model may call, as JSON values in the template's form.
            template_args: variables of the template by name, JSON values, such as
                ``enable_thinking``.
            add_generation_prompt: end with the template's beginning of an answer.
            max_bytes: longest prompt, in UTF-8.

        Raises:
            QsfArgumentError: the template refuses these messages, a message has no role, the
                messages and arguments, or the prompt, are longer than ``max_bytes``, or there are
                arguments and the file has no template.
            QsfFormatError: the template is broken, or exceeds its limit of memory or time.
        """
        for message in messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise QsfArgumentError(
                    f"a message needs a role and a content: {shown(dict(message))}"
                )
        values: dict[str, Any] = {"tools": tools, "documents": None, **(template_args or {})}
        check_value("template_args", values, Keywords())
        if self._source is None and (tools is not None or template_args):
            raise QsfArgumentError(
                "template_args are for a chat template, and the file has none",
                argument="template_args",
            )
        values["messages"] = [_message(message) for message in messages]
        values = _json_values(values, max_bytes)
        if self._source is None:
            return "\n".join(str(message.get("content", "")) for message in values["messages"])
        from qsf.text.render import render  # imports subprocess, which only chats need

        values["add_generation_prompt"] = add_generation_prompt
        source = self._source if tools is None else self._tool_source
        return render(
            source or "",
            {**self._special_tokens, **values},
            max_bytes=max_bytes,
            compiler_bytes=COMPILER_PER_BYTE * len(source or ""),
        )

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Any] | None = None,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the prompt as token ids; refuses a prompt of clearly more than ``max_tokens``.

        Special tokens come from the template and from ``Trusted`` texts only: where a message, a
        tool or an argument reads like one, it is encoded as ordinary text, so that nobody can end a
        turn by typing its marker. The arguments are those of ``render``.
        """
        names = tokenizer.special_names
        safe = [
            {key: v if key == "role" else protected(v, names) for key, v in message.items()}
            for message in messages
        ]
        max_bytes = _MAX_TEXT_BYTES if max_tokens is None else max_text_bytes(max_tokens)
        text = self.render(
            safe,
            tools=protected(tools, names),
            template_args=protected(dict(template_args or {}), names),
            add_generation_prompt=add_generation_prompt,
            max_bytes=max_bytes,
        )
        pieces = text.split(_SEAM)
        ids = tokenizer.encode(pieces[0], add_prefix=self.is_plain, max_tokens=max_tokens)
        for piece in pieces[1:]:
            ids += tokenizer.encode(piece, add_prefix=False, max_tokens=max_tokens)
        return ids


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as transformers gives it to templates: without what is None, and with
    thoughts under the names that templates read.
    """
    given = {name: value for name, value in message.items() if value is not None}
    thoughts = [given[name] for name in _REASONING if name in given]
    if thoughts:
        given = {"thinking": thoughts[0], **given, "reasoning_content": thoughts[0]}
    return given


def protected(content: Any, names: Sequence[str]) -> Any:
    """Return a value whose texts name none of ``names``, special tokens, if they are encoded."""
    if isinstance(content, Trusted):
        return content
    if isinstance(content, str):
        return protect_special(content, names, _SEAM)
    if isinstance(content, list):
        return [protected(part, names) for part in content]
    if isinstance(content, dict):
        return {protected(key, names): protected(value, names) for key, value in content.items()}
    return content


def _json_values(values: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """Return a copy of plain dicts, lists and texts. Raises QsfArgumentError."""
    try:
        text = json.dumps(values, ensure_ascii=False)
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise QsfArgumentError("a message is not valid Unicode: it has lone surrogates") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise QsfArgumentError(
            f"a message, or an argument of the template, is not made of JSON values: {error}"
        ) from error
    if n_bytes > max_bytes:
        raise QsfArgumentError(
            f"the conversation is too long: {n_bytes} bytes, and {max_bytes} is the limit",
            argument="prompt",
        )
    try:
        # Values are stored once and the text is limited, so the copy's memory is bounded.
        copy: dict[str, Any] = read_json(text, memory_bytes=1 << 40, has_nan=True)
    except JsonError as error:
        raise QsfArgumentError(f"a message, or an argument of the template, is {error}") from error
    return copy


def template_fault(
    template: object,
    special_tokens: Mapping[str, object] | None = None,
    named: Mapping[str, str] | None = None,
) -> str | None:
    """Try a chat template; return why it fails, or None (also without a template).

    A template that refuses the messages (``raise_exception``) is fine. ``named`` are all templates
    of a file that has several; the one for tools is tried too.
    """
    if template is None and named:
        return f"none of the file's chat templates ({', '.join(named)}) is called default"
    fault = _fault(template, special_tokens, [_USER])
    others: tuple[Any, ...] = (([_SYSTEM, _USER], None), ([_USER], [_TOOL]))
    if fault and not all(_fault(template, special_tokens, *how) for how in others):
        fault = None
    tool_template = (named or {}).get("tool_use")
    return fault or (tool_template and _fault(tool_template, special_tokens, [_USER], [_TOOL]))


def _fault(
    template: object,
    special_tokens: Mapping[str, object] | None,
    messages: list[dict[str, str]],
    tools: list[Any] | None = None,
) -> str | None:
    from qsf.text.render import TemplateFailedError

    try:
        ChatTemplate(template, special_tokens).render(messages, tools=tools)
    except (QsfFormatError, TemplateFailedError) as error:
        return str(error)
    except QsfArgumentError:
        return None
    return None
