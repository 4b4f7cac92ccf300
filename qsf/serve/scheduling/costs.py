"""The cost of restoring a sequence: evaluating its tokens again, or reading a file."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

_KEPT_SHARE = 0.9  # weight of the older measurements in each update
_SLOPE = 1 / 2048  # assumed slope before measurements: a token at 2048 takes twice as long as at 0
_LEAST_SECONDS = 1e-3  # least time without use in the value


class Costs:
    """Durations in seconds, learned from passes and files.

    Evaluating a token at position p takes c0 + c1 * p seconds: attention reads all earlier
    positions.
    """

    def __init__(self) -> None:
        self._c0, self._c1 = 1e-3, 1e-3 * _SLOPE
        # Sums of a*a, a*b, b*b, a*s, b*s over passes with s = c0 * a + c1 * b
        self._sums = [0.0] * 5
        self._read_sums = [0.0, 0.0]  # sums of bytes and seconds

    def learn_evaluating(self, first: int, n_tokens: int, seconds: float) -> None:
        """Record the duration of a prompt pass that starts at position ``first``."""
        a, b = float(n_tokens), n_tokens * (first + n_tokens / 2)
        new = (a * a, a * b, b * b, a * seconds, b * seconds)
        self._sums = [_KEPT_SHARE * s + x for s, x in zip(self._sums, new, strict=True)]
        aa, ab, bb, at, bt = self._sums
        determinant = aa * bb - ab * ab
        if determinant > 1e-3 * aa * bb:
            c0 = (at * bb - bt * ab) / determinant
            c1 = (aa * bt - ab * at) / determinant
            if c0 > 0 and c1 >= 0:
                self._c0, self._c1 = c0, c1
                return
        self._c0 = max(at, 0.0) / (aa + _SLOPE * ab)
        self._c1 = self._c0 * _SLOPE

    def learn_reading(self, n_bytes: int, seconds: float) -> None:
        """Record the duration of reading a session file."""
        sums = zip(self._read_sums, (n_bytes, seconds), strict=True)
        self._read_sums = [_KEPT_SHARE * s + x for s, x in sums]

    def evaluating(self, first: int, end: int) -> float:
        """Return the seconds for the tokens from position ``first`` up to ``end``."""
        return self._c0 * (end - first) + self._c1 * (end * end - first * first) / 2

    def reading(self, n_bytes: int) -> float:
        """Return the seconds for reading a file; before the first one, at 500 MB/s."""
        read_bytes, seconds = self._read_sums
        return n_bytes * (seconds / read_bytes if read_bytes else 2e-9)


def value(cost_seconds: float, n_tokens: int, inactive_seconds: float) -> float:
    """Return the retention value of a sequence: its restoring cost divided by the time without use.

    The value is per token that eviction frees, or one long sequence would outweigh many short ones.
    """
    return cost_seconds / max(n_tokens, 1) / max(inactive_seconds, _LEAST_SECONDS)
