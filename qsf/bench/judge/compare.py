"""Two results of the same thing: which figures changed by more than their spread.

The rule: a figure changed if its medians differ by more than the wider of the two spreads, and by
more than `LEAST`. A spread goes from the least to the most of the rounds; from `MANY_ROUNDS` on it
is that of the middle half, which does not grow with the number of rounds.

A shared machine may be 10 % slower an hour later. Runs of QSF and of a baseline alternate, and the
same build of the baseline cannot change: where both results have it, each round of QSF is taken in
terms of the baseline's of that round, which cancels the machine.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qsf.bench.judge.results import Results, Row, Spread
from qsf.bench.run.tasks import QSF

LEAST = 0.03
NOISY = 0.10  # a wider spread hides what matters
MANY_ROUNDS = 8
PART_SHARE = 0.02  # of the token, in either result: smaller parts are not judged
_LIMIT_MOVED = 0.10
_PEAK_GREW = 0.05
_SAME_FILE = 0.01
_BUSY = 0.5  # load for each core

Verdict = Literal["slower", "faster", "same", "noisy"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both results.

    ``old`` and ``new`` are medians as measured. ``change`` is of the figure: -0.1 is 10 % fewer
    tokens a second, or 10 % fewer milliseconds; if ``is_relative``, in terms of the baseline.
    ``noise`` is how far it must lie from zero, infinite where a single round has no spread.
    """

    row: str  # shape and label
    what: str  # "tok/s", or the name of a part
    unit: str  # "tok/s" or "ms"
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
    machine_notes = _machine_notes(old, new)
    changes: list[Change] = []
    notes = [*machine_notes, *_run_notes(old, new)]
    waiting: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(old.rows):
        waiting.setdefault(row.key, []).append(i)
    for i, row in enumerate(new.rows):
        same = waiting.get(row.key)
        if not same:
            notes.append(f"only in the newer result: {_name(row)}")
            continue
        k = same.pop(0)
        before = old.rows[k]
        if row.engine != QSF:
            continue
        if not _is_same_work(before, row):
            notes.append(f"{_name(row)}: not compared, the files differ ({_work(before)}, then "
                         f"{_work(row)})")  # fmt: skip
            continue
        baselines = _common_baseline(old, k, new, i)
        changes += _changes(before, row, baselines, is_other_machine=bool(machine_notes))
        notes += _peak_notes(before, row)
    left = [old.rows[k] for rows in waiting.values() for k in rows]
    notes += [f"only in the older result: {_name(row)}" for row in left]
    if changes and not any(change.is_relative for change in changes):
        notes += _limit_notes(old, new)
    return Comparison(changes, notes)


def judge(
    old: Sequence[float], new: Sequence[float], *, is_time: bool
) -> tuple[float, float, Verdict]:
    """Return the change of the medians, the noise, both as parts of the older one, and the verdict.

    Args:
        old: positive values of the older rounds, in any unit.
        new: those of the newer rounds.
        is_time: more is slower, else less is.
    """
    before = statistics.median(old)
    change = statistics.median(new) / before - 1
    if min(len(old), len(new)) < 2:
        return change, float("inf"), "noisy"
    noise = max(LEAST, _spread(old) / before, _spread(new) / before)
    if abs(change) > noise:
        return change, noise, "slower" if (change > 0) == is_time else "faster"
    return change, noise, "noisy" if noise > NOISY else "same"


def _spread(values: Sequence[float]) -> float:
    """Return the width of the spread."""
    low, high = min(values), max(values)
    if len(values) >= MANY_ROUNDS:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _changes(
    before: Row, after: Row, baselines: tuple[Row, Row] | None, *, is_other_machine: bool
) -> Iterator[Change]:
    """Yield the speed of a row, then its parts that matter."""
    for what, old, new in _figures(before, after):
        is_time = what != "tok/s"
        sides = [old.values or [old.median], new.values or [new.median]]
        if any(value <= 0 for side in sides for value in side):
            continue
        has_rounds = baselines is not None and all(
            len(row.tok_per_s.values) == len(side)
            for row, side in zip(baselines, sides, strict=True)
        )
        if baselines is not None and has_rounds:
            sides = [
                [
                    v * b if is_time else v / b
                    for v, b in zip(side, row.tok_per_s.values, strict=True)
                ]
                for row, side in zip(baselines, sides, strict=True)
            ]
        change, noise, verdict = judge(*sides, is_time=is_time)
        if is_other_machine and not has_rounds:
            verdict = "noisy"
        unit = "ms" if is_time else "tok/s"
        yield Change(
            _name(after), what, unit, old.median, new.median, change, noise, verdict, has_rounds
        )


def _figures(before: Row, after: Row) -> Iterator[tuple[str, Spread, Spread]]:
    yield "tok/s", before.tok_per_s, after.tok_per_s
    if before.breakdown is None or after.breakdown is None:
        return
    least_ms = [PART_SHARE * row.wall_ms for row in (before.breakdown, after.breakdown)]
    for part, now in after.breakdown.parts.items():
        then = before.breakdown.parts.get(part)
        if then is not None and (then.median >= least_ms[0] or now.median >= least_ms[1]):
            yield part, then, now


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


# ---- notes ----


def _machine_notes(old: Results, new: Results) -> list[str]:
    """Return how the machines differ; empty: they are alike."""
    names = {"cpu": "processors", "n_cores": "numbers of cores",
             "isa_available": "instruction sets"}  # fmt: skip
    return [
        f"the {what} differ: {_words(old.machine.get(key))}, then {_words(new.machine.get(key))}"
        for key, what in names.items()
        if old.machine.get(key) != new.machine.get(key)
    ]


def _words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "unknown" if value is None else str(value)


def _run_notes(old: Results, new: Results) -> Iterator[str]:
    """Yield what makes the runs unlike: load, kernels in use, new failures."""
    for when, results in (("older", old), ("newer", new)):
        load, n_cores = results.machine.get("load"), results.machine.get("n_cores")
        if isinstance(load, int | float) and isinstance(n_cores, int) and load > _BUSY * n_cores:
            yield f"the machine was busy when the {when} run began: load {load} on {n_cores} cores"
    isas = [_words(results.machine.get("isa")) for results in (old, new)]
    if isas[0] != isas[1]:
        yield f"the kernels in use differ: {isas[0]}, then {isas[1]}"
    known = {(failure.engine, failure.file, failure.what) for failure in old.failures}
    for failure in new.failures:
        if (failure.engine, failure.file, failure.what) not in known:
            yield f"{failure.engine} {failure.file}, {failure.what}, failed now: {failure.why}"


def _limit_notes(old: Results, new: Results) -> Iterator[str]:
    """Yield the limits that moved: without a baseline they alone tell of the machine."""
    limits = [("memory", r.limits.memory_gb_per_s) for r in (old, new)]
    limits += [("arithmetic", r.limits.gmadds_per_s) for r in (old, new)]
    for (what, before), (_, after) in zip(limits[::2], limits[1::2], strict=True):
        for key, value in before.items():
            if value > 0 and key in after and abs(after[key] / value - 1) > _LIMIT_MOVED:
                percent = f"{100 * (after[key] / value - 1):+.0f} %"
                yield (
                    f"the machine's limit of {what} moved by {percent} on {key} "
                    f"thread{'' if key == '1' else 's'}: measure with a baseline to tell the "
                    "machine from the code"
                )


def _peak_notes(before: Row, after: Row) -> Iterator[str]:
    if after.peak_rss_bytes > before.peak_rss_bytes * (1 + _PEAK_GREW):
        yield (
            f"{_name(after)}: peak memory {before.peak_rss_bytes / 2**20:,.0f} MB, "
            f"then {after.peak_rss_bytes / 2**20:,.0f} MB"
        )
