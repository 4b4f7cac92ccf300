"""Whether a figure of a few rounds has changed: shifts of logarithms, their noise, verdicts.

Figures are compared as logarithms, so that twice as fast and half as fast are equally far from
nothing. Of five rounds or more, each side leaves out one that lies four times as far from the
median as any other: on a shared machine that is somebody else's minute. What is left is
compared as means, with Student's t.

Three or five rounds say little of their own noise, and what looks quiet by chance gives false
alarms. But figures of one run share the machine, so the noise of a figure is mixed with the median
of all of them, weighted as `_COMMON_FREE` degrees of freedom; what is plainly noisier than the rest
is judged by itself. At noise of 3 % and five rounds this finds 10 % in 96 of 100 cases, with one
false alarm (either way) among 100 figures. By itself each figure needs two for the same. Ranks
cannot tell three rounds from three others at any change; of the median of absolute deviations so
little is known from five rounds that it misses 10 % in every third case.

Less than `LEAST` is never called a change: runs apart in time differ more than their rounds do.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

LEAST = 0.03
NOTICED = 0.10  # "same": a slowdown of that would have shown
_ONE_SIDED = 0.005  # false alarms of one figure in one direction
_OF_ALL = 0.05  # false alarms of all figures together, where one is called sure
_FAR = 4.0
_ROUNDS_TO_LEAVE_ONE_OUT = 5
_COMMON_FREE = 8
_NOISIER = 4.0  # in variance
_LARGEST_LOG = 700.0  # e to this is still a float

Verdict = Literal["slower", "faster", "same", "noisy"]


@dataclass(frozen=True, slots=True)
class Shift:
    """How far the logarithms of two sets of rounds are apart.

    ``variance`` is that of one round, of both sets together, on ``n_free`` degrees of freedom; of
    the shift it is ``spread`` times that.
    """

    log: float
    variance: float
    n_free: int
    spread: float


def shift_of(old: Sequence[float], new: Sequence[float]) -> Shift:
    """Return the shift from ``old`` to ``new``; all values are above zero."""
    sides = [_without_far([math.log(value) for value in values]) for values in (old, new)]
    means = [statistics.fmean(side) for side in sides]
    squares = sum(
        (value - mean) ** 2 for side, mean in zip(sides, means, strict=True) for value in side
    )
    n_free = sum(len(side) - 1 for side in sides)
    spread = sum(1 / len(side) for side in sides)
    return Shift(means[1] - means[0], squares / n_free if n_free else 0.0, n_free, spread)


def _without_far(values: list[float]) -> list[float]:
    """Return the values without the one that is far from all others, if there is one."""
    if len(values) < _ROUNDS_TO_LEAVE_ONE_OUT:
        return values
    middle = statistics.median(values)
    *rest, last = sorted(values, key=lambda value: abs(value - middle))
    return rest if abs(last - middle) > _FAR * abs(rest[-1] - middle) else values


@dataclass(frozen=True, slots=True)
class CommonNoise:
    """The noise that figures of two runs have in common: a variance, and what it is worth."""

    variance: float = 0.0
    n_free: int = 0

    def error_of(self, shift: Shift) -> tuple[float, int]:
        """Return the standard error of a shift and its degrees of freedom; 0: it is unknown."""
        n_free, variance = shift.n_free, shift.variance
        if self.n_free and variance <= _NOISIER * self.variance:
            variance = (self.n_free * self.variance + n_free * variance) / (self.n_free + n_free)
            n_free += self.n_free
        return math.sqrt(variance * shift.spread), n_free


def common_noise(shifts: Iterable[Shift]) -> CommonNoise:
    """Return the median of the shifts' variances, worth the less the fewer there are."""
    # The median of so few squares lies below their mean (Wilson and Hilferty's approximation).
    variances = [
        shift.variance / (1 - 2 / (9 * shift.n_free)) ** 3 for shift in shifts if shift.n_free
    ]
    if not variances:
        return CommonNoise()
    return CommonNoise(statistics.median(variances), min(_COMMON_FREE, len(variances) - 1))


def threshold(
    error: float, n_free: int, n_figures: int | None = None, *, least: float = LEAST
) -> float:
    """Return how far a logarithm must be from zero to be a change; infinite: nothing is known.

    Of ``n_figures`` that are looked at together, with so few false alarms that one among them is
    worth raising; None: of one alone. ``least`` is never called a change, however sure.
    """
    if n_free < 1:
        return math.inf
    alarms = _ONE_SIDED if n_figures is None else min(_ONE_SIDED, _OF_ALL / max(n_figures, 1))
    return max(math.log1p(least), _student_t(1 - alarms, n_free) * error)


def _student_t(probability: float, n_free: int) -> float:
    """Return the quantile of Student's t.

    Below four degrees of freedom, where the expansion (Fisher and Cornish) is not good enough,
    exact for one and two, and for three the safe side of both.
    """
    if n_free == 1:
        return math.tan(math.pi * (probability - 0.5))
    if n_free <= 3:
        a = 4 * probability * (1 - probability)
        return (2 * probability - 1) * math.sqrt(2 / a)
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(n_free) ** (i + 1) for i, term in enumerate(terms))


def change_of(log: float) -> float:
    """Return what a logarithm means: 0.1 for 10 % more. What no float can hold is infinite."""
    return math.expm1(log) if log < _LARGEST_LOG else math.inf


def verdict_of(slowdown: float, limit: float) -> Verdict:
    """Judge a logarithm of time, of which more is slower, by its threshold."""
    if slowdown > limit:
        return "slower"
    if slowdown < -limit:
        return "faster"
    return "same" if slowdown + limit <= math.log1p(NOTICED) else "noisy"
