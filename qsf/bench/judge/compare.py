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

from qsf.bench.judge.results import Results, Row
from qsf.bench.run.tasks import QSF

LEAST = 0.03
NOISY = 0.10  # a wider spread hides what matters
MANY_ROUNDS = 8
_PEAK_GREW = 0.05
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
        baselines = _common_baseline(old, k, new, i)
        changes.append(_change(before, row, baselines, is_other_machine=is_other_machine))
        if row.peak_rss_bytes > before.peak_rss_bytes * (1 + _PEAK_GREW):
            peaks = [f"{one.peak_rss_bytes / 2**20:,.0f} MB" for one in (before, row)]
            notes.append(f"{_name(row)}: peak memory {', then '.join(peaks)}")
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


def _change(
    before: Row, after: Row, baselines: tuple[Row, Row] | None, *, is_other_machine: bool
) -> Change:
    sides = [_rounds(before), _rounds(after)]
    weather = [row.tok_per_s.values for row in baselines] if baselines is not None else []
    is_relative = [len(values) for values in weather] == [len(side) for side in sides] and all(
        value > 0 for values in weather for value in values
    )
    if is_relative:
        sides = [
            [v / b for v, b in zip(side, values, strict=True)]
            for side, values in zip(sides, weather, strict=True)
        ]
    change, noise, verdict = judge(*sides)
    if is_other_machine and not is_relative:
        verdict = "noisy"
    old, new = before.tok_per_s.median, after.tok_per_s.median
    return Change(_name(after), old, new, change, noise, verdict, is_relative)


def _common_baseline(old: Results, k: int, new: Results, i: int) -> tuple[Row, Row] | None:
    """Return the rows of a baseline that both results have beside rows k and i; None: none."""

    def beside(results: Results, row_idx: int) -> list[Row]:
        return [results.rows[ratio.vs] for ratio in results.ratios if ratio.row == row_idx]

    for then in beside(old, k):
        for now in beside(new, i):
            is_same_build = (then.version, then.kernels) == (now.version, now.kernels)
            if then.key == now.key and is_same_build and _is_same_work(then, now):
                return then, now
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
