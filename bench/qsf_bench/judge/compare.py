"""Two results of the same thing: which speeds changed by more than their spread.

The rule: a speed changed if its medians differ by more than the wider of the two spreads, and by
more than `LEAST`. A spread goes from the least to the most of the rounds; from `MANY_ROUNDS` on it
is that of the middle half, which does not grow with the number of rounds.

A shared machine may be 10 % slower an hour later. Runs of QSF and of a baseline alternate, and the
same build of the baseline cannot change: where both results have it, each round of QSF is divided
by the baseline's of that round, which cancels the machine.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qsf_bench.judge.results import Ratio, Results, Row
from qsf_bench.run.tasks import QSF

LEAST = 0.03
NOISY = 0.10  # a wider spread hides what matters
MANY_ROUNDS = 8
_SAME_FILE = 0.01

Verdict = Literal["slower", "faster", "same", "noisy"]


@dataclass(frozen=True, slots=True)
class Change:
    """The speed of a row in both results.

    ``old`` and ``new`` are medians as measured, in tok/s. ``change`` is -0.1 for 10 % fewer; if
    ``is_relative``, in terms of the baseline. ``noise`` is how far it must lie from zero, infinite
    where a single round has no spread.
    """

    row: str  # shape and label
    old: float
    new: float
    change: float
    noise: float
    verdict: Verdict
    is_relative: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All changes from the older to the newer result."""

    changes: list[Change]
    notes: list[str]

    @property
    def is_regression(self) -> bool:
        """Whether anything became slower."""
        return any(change.verdict == "slower" for change in self.changes)


def compare(old: Results, new: Results) -> Comparison:
    """Return the changes of QSF's rows, in the order of ``new``."""
    is_other_machine = any(
        old.machine.get(key) != new.machine.get(key) for key in ("cpu", "n_cores")
    )
    changes: list[Change] = []
    notes = list(_machine_notes(old, new))
    left = dict(enumerate(old.rows))
    for i, row in enumerate(new.rows):
        k = next((k for k, before in left.items() if before.key == row.key), None)
        if k is None:
            notes.append(f"only in the newer result: {_name(row)}")
            continue
        before = left.pop(k)
        if row.engine != QSF or min(_rounds(before) + _rounds(row)) <= 0:
            continue
        if not _is_same_work(before, row):
            notes.append(f"{_name(row)}: not compared, the files differ ({_work(before)}, then "
                         f"{_work(row)})")  # fmt: skip
            continue
        ratios = _common_ratios(old, k, new, i)
        change, noise, verdict = judge(*(
            (_rounds(before), _rounds(row)) if ratios is None else (one.values for one in ratios)
        ))  # fmt: skip
        if is_other_machine and ratios is None:
            verdict = "noisy"
        speeds = before.tok_per_s.median, row.tok_per_s.median
        changes.append(Change(_name(row), *speeds, change, noise, verdict, ratios is not None))
    notes += [f"only in the older result: {_name(row)}" for row in left.values()]
    return Comparison(changes, notes)


def judge(old: Sequence[float], new: Sequence[float]) -> tuple[float, float, Verdict]:
    """Return the change of the medians, the noise, both as parts of the older one, and the verdict.

    ``old`` and ``new`` are the speeds of the rounds, all above 0, in any unit.
    """
    before = statistics.median(old)
    change = statistics.median(new) / before - 1
    if min(len(old), len(new)) < 2:
        return change, float("inf"), "noisy"
    noise = max(LEAST, _spread(old) / before, _spread(new) / before)
    if abs(change) > noise:
        return change, noise, "slower" if change < 0 else "faster"
    return change, noise, "noisy" if noise > NOISY else "same"


def _spread(values: Sequence[float]) -> float:
    """Return the width of the spread."""
    low, high = min(values), max(values)
    if len(values) >= MANY_ROUNDS:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _rounds(row: Row) -> list[float]:
    return row.tok_per_s.values or [row.tok_per_s.median]


def _common_ratios(old: Results, k: int, new: Results, i: int) -> tuple[Ratio, Ratio] | None:
    """Return the ratios of rows k and i to one build of a baseline, of all their rounds."""
    for then in (ratio for ratio in old.ratios if ratio.row == k):
        for now in (ratio for ratio in new.ratios if ratio.row == i):
            before, after = old.rows[then.vs], new.rows[now.vs]
            is_same_build = (before.version, before.kernels) == (after.version, after.kernels)
            is_complete = [len(then.values), len(now.values)] == [
                len(_rounds(old.rows[k])),
                len(_rounds(new.rows[i])),
            ]
            is_usable = is_complete and min(then.values + now.values) > 0
            if before.key == after.key and is_same_build and is_usable:
                return (then, now) if _is_same_work(before, after) else None
    return None


def _name(row: Row) -> str:
    return f"{row.shape}, {row.label}"


def _work(row: Row) -> str:
    return f"{row.n_weights:,} weights in {row.file_bytes:,} bytes"


def _is_same_work(before: Row, after: Row) -> bool:
    return all(
        abs(a - b) <= _SAME_FILE * max(a, b)
        for a, b in ((before.file_bytes, after.file_bytes), (before.n_weights, after.n_weights))
    )


def _machine_notes(old: Results, new: Results) -> Iterator[str]:
    """Yield how the machines differ; nothing if they are alike."""
    for key, what in (
        *(("cpu", "processors"), ("n_cores", "numbers of cores")),
        ("isa", "kernels in use"),
    ):
        if old.machine.get(key) != new.machine.get(key):
            words = [str(results.machine.get(key, "unknown")) for results in (old, new)]
            yield f"the {what} differ: {', then '.join(words)}"
