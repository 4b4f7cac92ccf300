"""A conversation as a file: a session with its KV cache, or a JSON list of messages."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfError, QsfIOError, one_line
from qsf.file.session_file import SessionFile, is_session_file
from qsf.foreign_json import JsonError, read_json
from qsf.kv import parse_kv_policy
from qsf.shell import command
from qsf.shell.prose import dim
from qsf.text.arguments import as_messages
from qsf.text.thinking import thinking_args

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from qsf.model import Model
    from qsf.options import GenerationOptions
    from qsf.session import Session

_SHOWN_CHARS = 200  # of a message that is repeated
_TURN_TOKENS = 16  # tokens of a template around a message


def read_conversation(path: Path, session: Session, memory_bytes: int) -> str:
    """Load a file into the session; return why its KV cache was not used, "" if it was.

    Reading may take ``memory_bytes``.

    Raises QsfError if the file has no conversation either.
    """
    if not is_session_file(path):
        session.messages[:] = read_messages(path, memory_bytes)
        return ""
    try:
        session.load(path)
    except QsfError as error:
        with SessionFile(
            path, memory_bytes=memory_bytes
        ) as file:  # raises if the messages cannot be read either
            session.messages[:] = as_messages(file.head.messages)
        return str(error)
    return ""


def write_conversation(path: Path, session: Session) -> None:
    """Save the session, atomically: as JSON if the file is JSON or is named so. Raises QsfError."""
    is_other = path.suffix == ".json" or path.exists()
    if is_other and not is_session_file(path):
        write_messages(path, session.messages)
    else:
        session.save(path)


def read_messages(path: Path, memory_bytes: int) -> list[dict[str, Any]]:
    """Return the messages of a file; reading takes at most ``memory_bytes``.

    Raises QsfIOError, or QsfArgumentError if the file is no list of messages or needs more memory.
    """
    if path.exists() and not path.is_file():
        raise QsfArgumentError(f"{path} is not a regular file, which a conversation is kept in")
    most_bytes = memory_bytes // 4  # text and parsed file take up to three times as much
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise QsfArgumentError(
            f"{path}: a conversation has at most {most_bytes / 2**20:.1f} MB in this context"
        )
    try:
        messages = read_json(data, memory_bytes=memory_bytes - len(data))
        if not isinstance(messages, list):
            raise QsfArgumentError("it is not a list")
        return as_messages(messages)
    except (JsonError, QsfArgumentError) as error:
        raise QsfArgumentError(
            f"{path} is not a conversation, a JSON list of messages with role and content: {error}"
        ) from error


def write_messages(path: Path, messages: Sequence[dict[str, Any]]) -> None:
    from qsf.shell.output import write_text

    text = command.json_text(list(messages), 2)
    write_text(path, f"{text}\n", overwrite=True)


def with_system(messages: Sequence[dict[str, Any]], text: str | None) -> list[dict[str, Any]]:
    """Return the messages with ``text`` as the system message; "" removes it, None keeps it."""
    if text is None:
        return list(messages)
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": text}, *rest] if text else rest


def with_thinking(
    model: Model, options: GenerationOptions, *, is_on: bool | None
) -> GenerationOptions:
    """Return the template options that switch thinking on or off; none if ``wanted`` is None.

    Raises QsfArgumentError if the template has no such switch.
    """
    if is_on is None:
        return options
    args = thinking_args(model.chat_template.source, is_on=is_on)
    return replace(options, template_args={**(options.template_args or {}), **args})


def resumed_lines(model: Model, path: Path, *, is_held: bool = True) -> list[str]:
    """Return how much of a conversation was restored, and its last message.

    ``is_held``: the KV cache of a session file was used.
    """
    session = model.session
    if not session.messages:
        return []
    n_tokens = session.n_tokens if is_held and is_session_file(path) else 0
    cost = (
        f"{n_tokens} of {model.info.plan.ctx_tokens} tokens, which are not evaluated again"
        if n_tokens
        else "the next answer reads them again"
    )
    n = len(session.messages)
    lines = [f"({n} message{'' if n == 1 else 's'} from {path}: {cost})"]
    last = [m for m in session.messages if m["role"] in ("user", "assistant")][-2:]
    for message in last:
        if isinstance(message["content"], str):
            text = one_line(message["content"])
            mark = "> " if message["role"] == "user" else "  "
            cut = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS].rstrip()} ..."
            lines.append(dim(f"{mark}{cut}"))
    return lines


def system_lines(model: Model) -> list[str]:
    """Return a warning if the KV policy will forget a part of the system message."""
    policy = parse_kv_policy(model.info.plan.kv_policy)
    system_texts = [m["content"] for m in model.session.messages if m["role"] == "system"]
    if policy is None or not system_texts or not isinstance(system_texts[0], str):
        return []
    n_tokens = len(model.tokenizer.encode(system_texts[0])) + _TURN_TOKENS
    if n_tokens <= policy.pinned_tokens:
        return []
    kind = policy.name.split(":")[0] + (f":{policy.window_tokens}" if policy.window_tokens else "")
    return [
        f"note: the system message takes about {n_tokens} tokens, and {policy.name} keeps only the "
        f"first {policy.pinned_tokens} when the context is full: --kv-policy {kind}:{n_tokens}"
    ]
