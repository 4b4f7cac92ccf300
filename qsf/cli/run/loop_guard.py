"""Notices that an answer repeats one text for ever, as small models do."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections import deque
from typing import Final

LEAST_TOKENS: Final = 200  # of a loop
LEAST_TIMES: Final = 8
_KEPT_TOKENS: Final = 4096  # so the longest period has 512
_CHECKED_EVERY: Final = 64  # tokens; a check takes 5 ms at most


class LoopGuard:
    """Watches the pieces of an answer; each is taken for a token.

    Attributes:
        found: what to tell the user about the loop that ends the answer; "": there is none.
    """

    def __init__(self) -> None:
        self.found = ""
        self._pieces: deque[str] = deque(maxlen=_KEPT_TOKENS)
        self._n_unchecked = 0

    def push(self, piece: str) -> None:
        """Take the next piece, and look for a loop now and then."""
        self._pieces.append(piece)
        self._n_unchecked += 1
        if self._n_unchecked < _CHECKED_EVERY:
            return
        self._n_unchecked = 0
        period, n_chars = loop_at_end("".join(self._pieces), self._least_chars())
        if period:
            self.found = (
                f"(stopped: the same {period} character{'' if period == 1 else 's'} came "
                f"{n_chars // period} times; --no-loop-guard lets it go on)"
            )

    def _least_chars(self) -> int:
        """Return the characters of LEAST_TOKENS pieces; if there are fewer, one more than that."""
        pieces = list(self._pieces)[-LEAST_TOKENS:]
        return sum(map(len, pieces)) + (len(pieces) < LEAST_TOKENS)


def terminal_guard(*, is_wanted: bool) -> LoopGuard | None:
    return LoopGuard() if is_wanted and sys.stdout.isatty() else None


def loop_at_end(text: str, least_chars: int) -> tuple[int, int]:
    """Return the period of the longest loop that ends the text, and its length, or (0, 0).

    A loop has ``least_chars`` characters or more and LEAST_TIMES periods. By the prefix function of
    the reversed text (Knuth, Morris, Pratt 1977): time is linear in the length of the text.
    """
    turned = text[::-1]
    borders = [0] * len(turned)
    found = (0, 0)
    border = 0
    for i in range(1, len(turned)):
        while border and turned[i] != turned[border]:
            border = borders[border - 1]
        border += turned[i] == turned[border]
        borders[i] = border
        n_chars = i + 1
        period = n_chars - border
        if n_chars >= least_chars and n_chars >= LEAST_TIMES * period:
            found = (period, n_chars)
    return found
