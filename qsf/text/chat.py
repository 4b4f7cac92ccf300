"""Messages to the prompt of a chat model, by the template that the file carries.

Templates are rendered as HuggingFace transformers renders them: Jinja with trimmed blocks,
loop controls, Python's string methods, ``raise_exception``, ``strftime_now`` and a
``tojson`` that leaves ``<`` alone.

**Without a template** (a model that was not trained for chat) the turns are joined by line
ends and the model continues the last one: plain text, no roles.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import datetime
import json
import re
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.text.tokenizer import protect_special

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qsf.text.tokenizer import Tokenizer

# A noncharacter: valid Unicode that no text contains.
_SEAM = "\ufdd0"
# Enough for any real conversation; a template of a stranger's file must end.
_MAX_STEPS = 20_000_000
# Marks what the model said, for training; the text in between is wanted as it is.
_GENERATION_TAG = re.compile(r"{%(-?)\s*(end)?generation\s*(-?)%}")


class _RefusedError(Exception):
    """What ``raise_exception`` of a template raises."""


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _plain_generation_tags(source: str) -> str:
    return _GENERATION_TAG.sub(
        lambda tag: "{%" + tag[1] + (" endif " if tag[2] else " if true ") + tag[3] + "%}", source
    )


def _template_source(template: object) -> str | None:
    """Return the template's text; of several named ones the one called "default"."""
    if template is None or isinstance(template, str):
        return template or None
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named
    if isinstance(template, dict) and isinstance(template.get("default"), str):
        return str(template["default"])
    raise QsfFormatError("the file's chat template is neither a text nor a list with a default")


class ChatTemplate:
    """The chat template of one model.

    Args:
        template: ``chat_template`` of the file's CHAT section; None: there is none.
        special_tokens: names such as ``bos_token`` and their texts, for the template.

    Example::

        template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
        template.render([{"role": "user", "content": "Hi"}])    # "[user]Hi"
    """

    def __init__(
        self, template: object = None, special_tokens: Mapping[str, object] | None = None
    ) -> None:
        """Compile the template. Raises QsfFormatError where it is broken."""
        source = _template_source(template)
        self._source = None if source is None else _plain_generation_tags(source)
        self._special_tokens = {
            name: text for name, text in (special_tokens or {}).items() if isinstance(text, str)
        }
        self._environment: Any = None
        if self._source is not None:
            self._environment = self._create_environment(self._source)

    @staticmethod
    def _create_environment(source: str) -> Any:
        import minijinja

        environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            debug=False,
            fuel=_MAX_STEPS,
            filters={"tojson": _tojson},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        try:
            environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise _unreadable(error) from error
        return environment

    @property
    def is_plain(self) -> bool:
        """The file has no template: turns are joined as plain text."""
        return self._source is None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt as text.

        Args:
            messages: mappings with ``role`` ("system", "user", "assistant") and ``content``.
            add_generation_prompt: end with what introduces the model's answer.

        Raises:
            QsfArgumentError: the template refuses these messages, or a message has no role.
            QsfFormatError: the template is broken.
        """
        for message in messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise QsfArgumentError(f"a message needs a role and a content: {dict(message)!r}")
        if self._environment is None:
            return "\n".join(str(message["content"]) for message in messages)
        import minijinja

        values = dict(self._special_tokens)
        try:
            text = self._environment.render_template(
                "chat",
                **values,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except _RefusedError as error:
            raise QsfArgumentError(f"the chat template refuses the messages: {error}") from error
        except minijinja.TemplateError as error:
            refusal = error.__cause__
            if isinstance(refusal, _RefusedError):
                raise QsfArgumentError(
                    f"the chat template refuses the messages: {refusal}"
                ) from error
            raise _unreadable(error) from error
        return str(text)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the prompt as token ids.

        Special tokens come from the template only: where a message's content reads like one,
        it is encoded as ordinary text, so that nobody can end a turn by typing its marker.
        """
        names = tokenizer.special_names
        safe = [
            {**message, "content": _protected(message.get("content"), names)}
            if "content" in message
            else message
            for message in messages
        ]
        pieces = self.render(safe, add_generation_prompt=add_generation_prompt).split(_SEAM)
        ids = tokenizer.encode(pieces[0], add_prefix=self.is_plain)
        for piece in pieces[1:]:
            ids += tokenizer.encode(piece, add_prefix=False)
        return ids


def _protected(content: Any, names: Sequence[str]) -> Any:
    if isinstance(content, str):
        return protect_special(content, names, _SEAM)
    if isinstance(content, list):
        return [_protected(part, names) for part in content]
    if isinstance(content, dict):
        return {key: _protected(value, names) for key, value in content.items()}
    return content


def _unreadable(error: Any) -> QsfFormatError:
    where = f"line {error.line}: " if error.line else ""
    return QsfFormatError(
        f"the file's chat template cannot be rendered: {where}{error.detail or error.kind}"
    )
