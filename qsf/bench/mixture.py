"""Parts of a token held against each other: what a shared machine's minutes do not change.

A neighbour on the same core, or a lower clock, makes all kernels of a process slower alike: runs of
the same thing lie 20 % apart and more, while attention in terms of the products stays within 3 %.
So a kernel that became slower shows beside the others long before it shows in seconds.

Parts fall into families that share no kernel. Of three families or more one is the measure: that
with the middle change, because one change moves one family. All parts of the others are then
given in terms of it, round by round.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from qsf.bench.results import Breakdown, Spread, spread_of

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "products": ("qkv", "attn_out", "gate_up", "down"),
    "head": ("head",),
    "attention": ("attention",),
    "norms": ("norm",),
}
_LEAST_FAMILIES = 3


@dataclass(frozen=True, slots=True)
class Relative:
    """A part in terms of a family, in both results."""

    part: str
    family: str
    old: Spread
    new: Spread


def relatives(before: Breakdown, after: Breakdown, least_share: float) -> list[Relative]:
    """Return the parts that can be told apart from the machine; none with too few families.

    ``least_share``: of the token, in both results: smaller families are no measure, and smaller
    parts are not judged.
    """
    sums = [_family_values(breakdown, least_share) for breakdown in (before, after)]
    names = [name for name in sums[0] if name in sums[1]]
    if len(names) < _LEAST_FAMILIES:
        return []
    changes = {name: _log_mean(sums[1][name]) - _log_mean(sums[0][name]) for name in names}
    measure = sorted(names, key=changes.__getitem__)[len(names) // 2]
    found = []
    for name in names:
        for part in FAMILIES[name] if name != measure else ():
            spreads = [
                _ratio(breakdown, part, known[measure], least_share)
                for breakdown, known in zip((before, after), sums, strict=True)
            ]
            if spreads[0] is not None and spreads[1] is not None:
                found.append(Relative(part, measure, spreads[0], spreads[1]))
    return found


def _family_values(breakdown: Breakdown, least_share: float) -> dict[str, list[float]]:
    """Return ms of the larger families, by round."""
    found = {}
    for name, parts in FAMILIES.items():
        values = [breakdown.parts[part].values for part in parts if part in breakdown.parts]
        n_rounds = {len(of_part) for of_part in values}
        if len(n_rounds) != 1:  # none of its parts is there, or rounds are missing
            continue
        sums = [math.fsum(of_round) for of_round in zip(*values, strict=True)]
        if sums and statistics.median(sums) >= least_share * breakdown.wall_ms and min(sums) > 0:
            found[name] = sums
    return found


def _ratio(
    breakdown: Breakdown, part: str, measure: list[float], least_share: float
) -> Spread | None:
    spread = breakdown.parts.get(part)
    if spread is None or spread.median < least_share * breakdown.wall_ms:
        return None
    if len(spread.values) != len(measure) or min(spread.values) <= 0:
        return None
    return spread_of([value / of for value, of in zip(spread.values, measure, strict=True)])


def _log_mean(values: list[float]) -> float:
    return statistics.fmean(math.log(value) for value in values)
