"""How many prompt rows a pass can take in addition to decoding rows."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math

from qsf.options import MAX_U32

_WEIGHT = 0.2  # weight of the newest measurement
_LEAST_ROWS = 8  # least rows, so that slow machines progress too
_FIRST_ROWS = 32  # before the first measurement
# A pass that exceeds the target time even without prompt rows may take longer by this share.
_STREAMED_SHARE = 0.5


class Pace:
    """Learns the duration of passes.

    A pass takes as long as reading the weights or computing its rows, whichever is longer. So rows
    are nearly free if weights are read from a disk, and expensive if they are in memory. One figure
    covers both: the seconds that a prompt row adds to a pass.
    """

    def __init__(self, pass_seconds: float) -> None:
        """Set the longest duration of a pass while a job decodes; infinity: no limit."""
        self._wanted_seconds = pass_seconds
        self._base_seconds = 0.0  # duration of a pass without prompt rows
        self._row_seconds = 0.0  # that a prompt row adds
        self.tokens_per_second = 0.0

    def prompt_rows(self, n_decoding: int) -> int:
        """Return how many prompt rows the next pass may have in addition to decoding ones."""
        if self._wanted_seconds == math.inf:
            return MAX_U32
        if self._row_seconds <= 0.0 or n_decoding == 0:
            return _FIRST_ROWS
        most_seconds = max(self._wanted_seconds, (1 + _STREAMED_SHARE) * self._base_seconds)
        return max(_LEAST_ROWS, int((most_seconds - self._base_seconds) / self._row_seconds))

    def learn(self, n_decoded: int, n_prompt: int, seconds: float) -> None:
        if seconds <= 0.0 or n_decoded + n_prompt == 0:
            return
        self.tokens_per_second = _mean(self.tokens_per_second, (n_decoded + n_prompt) / seconds)
        if n_prompt == 0:
            self._base_seconds = _mean(self._base_seconds, seconds)
        elif n_decoded:
            self._row_seconds = _mean(
                self._row_seconds, max(seconds - self._base_seconds, 1e-9) / n_prompt
            )
        elif self._row_seconds <= 0.0:
            self._row_seconds = seconds / n_prompt


def _mean(before: float, now: float) -> float:
    return now if before <= 0.0 else before + _WEIGHT * (now - before)
