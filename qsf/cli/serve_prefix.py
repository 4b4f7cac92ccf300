"""``--prefix FILE``: tokens that prompts share at their beginning."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.run.conversation import read_messages
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.foreign_text import text_of
from qsf.text.arguments import as_tokens, count_common

if TYPE_CHECKING:
    from qsf.model import Model


def read_prefix(path: Path, model: Model) -> array[int]:
    """Return the tokens of a text, or of messages rendered by the chat template.

    A file called FILE.json has messages. Raises QsfIOError, QsfArgumentError: the file cannot be
    read, has another form, or does not fit in the context.
    """
    ctx_tokens = model.info.plan.ctx_tokens
    try:
        if path.suffix == ".json":
            tokens = _message_tokens(path, model)
        else:
            text = text_of(path.read_bytes(), f"--prefix {path}")
            tokens = as_tokens(model.tokenizer.encode(text, max_tokens=ctx_tokens))
    except OSError as error:
        raise QsfIOError(f"--prefix {path}: {error.strerror}") from error
    if not 0 < len(tokens) < ctx_tokens:
        raise QsfArgumentError(
            f"--prefix {path} has {len(tokens)} tokens; it must have 1 to {ctx_tokens - 1}, so "
            f"that an answer fits a context of {ctx_tokens} too"
        )
    return tokens


def _message_tokens(path: Path, model: Model) -> array[int]:
    """Return the common beginning of two different conversations that start with the messages."""
    messages = read_messages(path, model.input_bytes)
    role = "assistant" if messages and messages[-1]["role"] == "user" else "user"
    a, b = (
        model.chat_template.encode(
            [*messages, {"role": role, "content": content}],
            model.tokenizer,
            add_generation_prompt=False,
            max_tokens=model.info.plan.ctx_tokens,
        )
        for content in ("Yes", "7")
    )
    return as_tokens(a)[: count_common(as_tokens(a), as_tokens(b))]
