"""The windows that a text is cut into for evaluation, and which of their tokens are scored.

This is the protocol, and only figures of the same protocol and context can be compared:

- ``windows``: the text in windows of ctx tokens, side by side; every token but the first of each
  is scored (Frantar et al., GPTQ, 2210.17323; Lin et al., AWQ, 2306.00978).
- ``llama.cpp``: the same windows, the first token of each replaced by BOS where the tokenizer adds
  one; tokens from ctx / 2 + 1 on are scored (llama-perplexity).
- ``sliding``: windows of ctx tokens, each stride tokens after the last; scored are the tokens that
  the window before did not reach (HuggingFace, "Perplexity of fixed-length models").
- ``repeated``: the windows of ``windows``, but the last 64 tokens of each repeat 64 earlier ones
of the same window: the first 64 in the first window, later ones in the next, at eight depths; the
last 48 tokens are scored. It measures how well a model recalls what it has read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError

Tokens = NDArray[np.int64]

PROTOCOLS: Final = ("windows", "llama.cpp", "sliding", "repeated")
DEFAULT_PROTOCOL: Final = "windows"

_REPEATED_TOKENS: Final = 64
_CUE_TOKENS: Final = 16  # of the repeated tokens: not scored
_DEPTHS: Final = 8


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model reads from position 0; logits row i predicts ``tokens[i + 1]``.

    Scored are the rows from ``first_row`` to the last but one: the last token is only predicted,
    so that no model need evaluate it. ``depth``: with ``repeated``, the position of the passage
    that the end repeats.
    """

    tokens: Tokens
    first_row: int
    depth: int | None = None

    @property
    def n_rows(self) -> int:
        return len(self.tokens) - 1 - self.first_row

    @property
    def scored(self) -> Tokens:
        return self.tokens[self.first_row + 1 :]

    def blocks(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """Yield the scored rows as (first, end), at most ``max_rows`` at once."""
        end = len(self.tokens) - 1
        for first in range(self.first_row, end, max_rows):
            yield first, min(first + max_rows, end)


def cut_windows(
    tokens: Sequence[int] | Tokens,
    protocol: str,
    ctx_tokens: int,
    *,
    stride_tokens: int | None = None,
    bos_id: int | None = None,
) -> list[Window]:
    """Return the windows of a protocol; see this module.

    ``bos_id`` is what ``llama.cpp`` puts in place of the first token of each window; None: the
    tokenizer adds none. A remainder shorter than a window is scored with ``sliding`` only; but
    with ``windows`` a text shorter than a window is one window.

    Raises:
        QsfArgumentError: the protocol is unknown or cannot have a stride, a number is out of
            range, or the text is too short.
    """
    stride = checked_stride(protocol, ctx_tokens, stride_tokens)
    ids = np.asarray(tokens, np.int64)
    n_tokens = len(ids)
    if n_tokens < 2:
        raise QsfArgumentError(
            f"the text has {n_tokens} token{'' if n_tokens == 1 else 's'}: at least 2 are needed, "
            "one to predict from and one to be predicted"
        )
    if stride is not None:
        return list(_sliding_windows(ids, ctx_tokens, stride))
    starts = range(0, n_tokens - ctx_tokens + 1, ctx_tokens)
    if protocol == "repeated":
        return _repeated_windows(ids, ctx_tokens, starts)
    if protocol == "windows":
        if not starts:
            return [Window(ids, 0)]
        return [Window(ids[start : start + ctx_tokens], 0) for start in starts]
    if not starts:
        raise QsfArgumentError(
            f"the text has {n_tokens} tokens, less than one window of {ctx_tokens}: protocol "
            "llama.cpp needs a shorter context or a longer text"
        )
    windows = [Window(ids[start : start + ctx_tokens].copy(), ctx_tokens // 2) for start in starts]
    if bos_id is not None:
        for window in windows:
            window.tokens[0] = bos_id
    return windows


def _repeated_windows(ids: Tokens, ctx_tokens: int, starts: Sequence[int]) -> list[Window]:
    if not starts:
        raise QsfArgumentError(f"the text has {len(ids)} tokens, less than one of {ctx_tokens}")
    first_row = ctx_tokens - _REPEATED_TOKENS + _CUE_TOKENS - 1
    windows = []
    for i, start in enumerate(starts):
        tokens = ids[start : start + ctx_tokens].copy()
        depth = (ctx_tokens - 2 * _REPEATED_TOKENS) * (i % _DEPTHS) // (_DEPTHS - 1)
        tokens[-_REPEATED_TOKENS:] = tokens[depth : depth + _REPEATED_TOKENS]
        windows.append(Window(tokens, first_row, depth))
    return windows


def _sliding_windows(ids: Tokens, ctx_tokens: int, stride: int) -> Iterator[Window]:
    n_reached = 0
    for start in range(0, len(ids), stride):
        end = min(start + ctx_tokens, len(ids))
        # No token precedes the first token of a window, so it is not predicted.
        first_scored = max(n_reached - start, 1)
        if start + first_scored < end:
            yield Window(ids[start:end], first_scored - 1)
        n_reached = end
        if end == len(ids):
            return


def checked_stride(protocol: str, ctx_tokens: int, stride_tokens: int | None) -> int | None:
    if protocol not in PROTOCOLS:
        raise QsfArgumentError(
            f"there is no protocol {protocol!r}: {', '.join(PROTOCOLS)} are known"
        )
    least = {"llama.cpp": 3, "repeated": 2 * _REPEATED_TOKENS}.get(protocol, 2)
    if ctx_tokens < least:
        raise QsfArgumentError(
            f"the context must be at least {least} tokens with protocol {protocol}, not "
            f"{ctx_tokens}"
        )
    if protocol != "sliding":
        if stride_tokens is not None:
            raise QsfArgumentError(
                f"a stride of {stride_tokens} is for protocol sliding only: {protocol} has windows "
                "side by side"
            )
        return None
    stride = ctx_tokens // 2 if stride_tokens is None else stride_tokens
    if not 1 <= stride <= ctx_tokens:
        raise QsfArgumentError(
            f"the stride must be from 1 to the context's {ctx_tokens} tokens, not {stride}"
        )
    return stride
