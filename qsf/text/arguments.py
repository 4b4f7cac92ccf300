"""Arguments that are token ids or chat messages: checked and converted for the engine."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


def as_tokens(ids: Sequence[int], name: str = "tokens") -> array[int]:
    """Return token ids as an array. Raises QsfArgumentError for other values."""
    if isinstance(ids, bytes | bytearray | str):
        kind = "text: tokenize" if isinstance(ids, str) else "bytes: decode"
        raise QsfArgumentError(
            f"{name} must be a sequence of token ids, not {kind} them", argument=name
        )
    try:
        return array("I", ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise QsfArgumentError(
            f"{name} must be a sequence of token ids: {error}", argument=name
        ) from error


def count_common(a: array[int], b: array[int]) -> int:
    """Return how many leading tokens two sequences have in common."""
    at, step, n_most = 0, 32, min(len(a), len(b))
    while at < n_most:
        end = min(at + step, n_most)
        if a[at:end] == b[at:end]:
            at, step = end, 2 * step
        else:  # neither is a prefix of the other
            n_most, step = end - 1, max((end - at) // 2, 1)
    return at


def check_rows(out: npt.NDArray[np.float32], n_rows: int, n_cols: int) -> None:
    """Raise QsfArgumentError unless the array can hold n_rows of n_cols floats."""
    import numpy

    if (
        not isinstance(out, numpy.ndarray)
        or out.dtype != numpy.float32
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        raise QsfArgumentError(
            "out must be a C-contiguous, writable array of float32", argument="out"
        )
    if out.ndim != 2 or len(out) < n_rows or out.shape[1] != n_cols:
        raise QsfArgumentError(
            f"out has the shape {list(out.shape)}: at least {n_rows} rows of {n_cols} are needed",
            argument="out",
        )


def as_messages(messages: object) -> list[dict[str, Any]]:
    """Return chat messages; a text is the user's. Raises QsfArgumentError for other values."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, list | tuple):
        raise QsfArgumentError(
            "messages must be a text, a mapping with role and content, or a list of such "
            f"mappings, not {shown(messages)}",
            argument="messages",
        )
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise QsfArgumentError(
                f"each of messages must be a mapping with role and content, not {shown(message)}",
                argument="messages",
            )
    return [{**message, "content": _content(message["content"])} for message in messages]


def _content(content: object) -> str | None:
    """Return the text of a message; texts of a list of parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        for part, text in zip(content, texts, strict=True):
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise QsfArgumentError(
                    f"a message has a part that is no text: {shown(kind)}; images and sounds "
                    "cannot be read",
                    argument="messages",
                )
        return "\n".join(text for text in texts if isinstance(text, str))
    raise QsfArgumentError(
        f"the content of a message must be a text or a list of parts with text, not "
        f"{shown(content)}",
        argument="messages",
    )
