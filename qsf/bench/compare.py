"""Two results of the same thing, and whether their differences are more than noise.

**One difference.** The figures of rounds are compared as logarithms, so that twice as fast and half
as fast are as far from nothing. Of five rounds or more, each side leaves out one that lies four
times as far from the median as any other: on a shared machine that is somebody else's minute. What
is left is compared as means, with the noise of both sides pooled and Student's t for so few
degrees of freedom (`_T`: two sides, 2 %; leaving one out makes that about 3 %). Ranks, the usual
way without assumptions, cannot tell three rounds from three others at any change; the median of
absolute deviations is known so badly from five rounds that 10 % is missed in a third of all cases.
Besides, less than `LEAST` is never called a change: runs that are apart in time differ more than
their rounds do. With noise of 3 % and five rounds, 10 % is found in 96 of 100 cases.

"same" says that a slowdown of `NOTICED` would have shown; where it would not, it is "noisy".

**The machine's drift.** A shared machine may be 10 % slower an hour later, in all it does. What
shows that is what no change of QSF can alter: llama.cpp of the same version and file, measured in
turns with QSF. By kind of work (arithmetic, memory, disk) and number of threads the median of its
changes is taken out of QSF's, if it is beyond its own noise; that noise adds to the threshold.
Without llama.cpp there are the limits, measured once, at the start: that can cast doubt on a
change but not make one. A limit counts where it moved by more than `LIMIT_MOVED` and most of QSF's
figures moved with it; then what is no change both with and without the drift is "noisy". Ratios
to llama.cpp round by round need no correction and are judged as they are.

Parts of a token are judged apart: a kernel that became 10 % slower may be a tenth of the token.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from qsf.bench.results import Breakdown, Results, Row, Spread

LEAST = 0.03
NOTICED = 0.10
PART_SHARE = 0.02  # of the token, in either result: smaller parts are not judged
LIMIT_MOVED = 0.10
_PEAK_GREW = 0.05
_SAME_FILE = 0.01
_FAR = 4.0
_ROUNDS_TO_LEAVE_ONE_OUT = 5
_EVERYWHERE = 0.75  # so many of all changes in one direction look like the machine
# Quantiles of Student's t for 1, 2, ... degrees of freedom, at 99 %.
_T = (31.82, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62, 2.60)

Verdict = Literal["slower", "faster", "same", "noisy"]
Kind = Literal["arithmetic", "memory", "disk"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both results.

    ``change`` and ``corrected`` are of the figure: -0.1 is 10 % fewer tokens a second, or, for
    milliseconds, 10 % less time. ``corrected`` is without the machine's drift; ``noise`` is how far
    it must lie from zero. Both are of means of the rounds, see above, not of medians.
    """

    row: str  # shape and label
    what: str  # "tok/s", "ratio to llama.cpp Q4_K_M", or the name of a part
    unit: str  # "tok/s", "x", "ms"
    old: Spread
    new: Spread
    change: float
    corrected: float
    noise: float
    verdict: Verdict
    old_fraction: float | None = None  # of the limit, for tok/s
    new_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """How much longer the machine took for the same thing in the newer result: 0.1 is 10 %."""

    kind: Kind
    threads: int
    slowdown: float
    source: str  # "llama.cpp" or "limits"
    n_controls: int
    is_applied: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What has changed from the older to the newer result."""

    changes: list[Change]
    drifts: list[Drift]
    only_old: list[str]
    only_new: list[str]
    notes: list[str]

    @property
    def is_regression(self) -> bool:
        """Whether anything became slower, beyond noise and drift."""
        return any(change.verdict == "slower" for change in self.changes)


def compare(old: Results, new: Results) -> Comparison:
    """Return all changes, those of rows in the order of ``new``."""
    notes = _machine_notes(old, new)
    is_other_machine = bool(notes)
    pairs, only_old, only_new = _matched(old.rows, new.rows)
    same = [pair for pair in pairs if _is_same_work(*pair)]
    different = [pair for pair in pairs if not _is_same_work(*pair)]
    drifts, peer_notes = _drifts(same, old, new)
    notes += _limit_notes(old, new) + peer_notes
    notes += [
        f"{_name(after)}: not compared, the files differ ({_work(before)}, then {_work(after)})"
        for before, after in different
    ]
    changes: list[Change] = []
    for before, after in same:
        if after.engine != "qsf":
            continue
        correction = drifts.get((_kind(after), after.threads))
        changes += [
            _with_fractions(
                _change(figure, correction, is_other_machine=is_other_machine), before, after
            )
            for figure in _figures(before, after)
        ]
        notes += _peak_notes(before, after)
    changes += _ratio_changes(old, new)
    notes += _everywhere_notes(changes, drifts)
    if is_other_machine:
        notes.append(
            "on another machine only ratios to llama.cpp, and rows beside which it ran, can be "
            "judged"
        )
    shown = [drift.drift for drift in drifts.values()]
    return Comparison(changes, shown, only_old, only_new, notes)


# ---- one difference ----


@dataclass(frozen=True, slots=True)
class _Shift:
    """How far the logarithms of two sets of rounds are apart, and how well that is known."""

    log: float
    error: float  # standard error; infinite where there is too little to know it
    n_free: int


def _shift(old: Sequence[float], new: Sequence[float]) -> _Shift:
    sides = [_without_far([math.log(value) for value in values]) for values in (old, new)]
    log = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
    n_free = len(sides[0]) + len(sides[1]) - 2
    if n_free < 1:
        return _Shift(log, math.inf, 0)
    squares = sum((x - statistics.fmean(side)) ** 2 for side in sides for x in side)
    return _Shift(log, math.sqrt(squares / n_free * sum(1 / len(side) for side in sides)), n_free)


def _without_far(values: list[float]) -> list[float]:
    """Return the values without the one that is far from all others, if there is one."""
    if len(values) < _ROUNDS_TO_LEAVE_ONE_OUT:
        return values
    middle = statistics.median(values)
    by_distance = sorted(values, key=lambda value: abs(value - middle))
    *rest, last = by_distance
    return rest if abs(last - middle) > _FAR * abs(rest[-1] - middle) else values


def _t(n_free: int) -> float:
    return _T[min(n_free, len(_T)) - 1]


def _threshold(error: float, n_free: int) -> float:
    return max(math.log1p(LEAST), _t(n_free) * error) if n_free else math.inf


def _verdict(slowdown: float, threshold: float) -> Verdict:
    """Judge a logarithm of time, of which more is slower."""
    if slowdown > threshold:
        return "slower"
    if slowdown < -threshold:
        return "faster"
    return "same" if slowdown + threshold <= math.log1p(NOTICED) else "noisy"


@dataclass(frozen=True, slots=True)
class _Figure:
    """What is judged, of both results."""

    row: str
    what: str
    unit: str
    old: Spread
    new: Spread

    @property
    def is_time(self) -> bool:
        return self.unit == "ms"

    @property
    def shift(self) -> _Shift:
        return _shift(_values(self.old), _values(self.new))

    @property
    def slowdown(self) -> float:
        """The logarithm of how much longer it takes."""
        return self.shift.log if self.is_time else -self.shift.log


# ---- drift ----


@dataclass(frozen=True, slots=True)
class _Correction:
    """A drift, and how well it is known."""

    drift: Drift
    log: float
    error: float

    @property
    def is_of_peer(self) -> bool:
        return self.drift.source == "llama.cpp"


def _kind(row: Row) -> Kind:
    if row.cap is not None or row.limited_by == "disk":
        return "disk"
    return "arithmetic" if row.test.startswith("pp") else "memory"


def _drifts(
    pairs: Iterable[tuple[Row, Row]], old: Results, new: Results
) -> tuple[dict[tuple[Kind, int], _Correction], list[str]]:
    """Return corrections by kind of work and number of threads."""
    of_peer: dict[tuple[Kind, int], list[_Shift]] = {}
    own: dict[tuple[Kind, int], list[float]] = {}  # slowdowns of QSF's figures
    notes: list[str] = []
    for before, after in pairs:
        key = (_kind(after), after.threads)
        if after.engine == "qsf":
            figures = _figures(before, after)
            own.setdefault(key, []).extend(figure.slowdown for figure in figures)
        elif before.version != after.version or before.kernels != after.kernels:
            notes.append(
                f"{_name(after)}: {before.version} {before.kernels}, then {after.version} "
                f"{after.kernels}: another build says nothing of the machine's drift"
            )
        elif _usable(before.tok_per_s) and _usable(after.tok_per_s):
            shift = _shift(_values(after.tok_per_s), _values(before.tok_per_s))
            of_peer.setdefault(key, []).append(shift)
    found: dict[tuple[Kind, int], _Correction] = {}
    for (kind, threads), slowdowns in own.items():
        shifts = of_peer.get((kind, threads))
        if shifts:
            found[kind, threads] = _correction_of_peer(kind, threads, shifts)
        elif (ratio := _limit_ratio(kind, threads, old, new)) is not None:
            log = math.log(ratio)
            moved = statistics.median(slowdowns) if slowdowns else 0.0
            is_applied = abs(ratio - 1) > LIMIT_MOVED and abs(moved - log) < abs(moved)
            drift = Drift(kind, threads, ratio - 1, "limits", 1, is_applied)
            found[kind, threads] = _Correction(drift, log, 0.0)
    return found, notes


def _correction_of_peer(kind: Kind, threads: int, shifts: Sequence[_Shift]) -> _Correction:
    """Return the median of some rows' shifts; its error is that of rounds, or of rows if larger."""
    log = statistics.median(shift.log for shift in shifts)
    error = math.sqrt(statistics.fmean(shift.error**2 for shift in shifts) / len(shifts))
    if len(shifts) > 1:
        between = statistics.stdev(shift.log for shift in shifts) / math.sqrt(len(shifts))
        error = max(error, between)
    threshold = _threshold(error, sum(shift.n_free for shift in shifts))
    drift = Drift(kind, threads, math.expm1(log), "llama.cpp", len(shifts), abs(log) > threshold)
    return _Correction(drift, log, error)


def _limit_ratio(kind: Kind, threads: int, old: Results, new: Results) -> float | None:
    """Return how much longer the limit says that things take now."""
    pairs = {
        "arithmetic": (r.limits.gmadds_per_s.get(str(threads)) for r in (old, new)),
        "memory": (r.limits.memory_gb_per_s.get(str(threads)) for r in (old, new)),
        "disk": (r.limits.best_disk_gb_per_s for r in (old, new)),
    }
    before, after = pairs[kind]
    return before / after if before and after and min(before, after) > 0 else None


# ---- rows and parts ----


def _figures(before: Row, after: Row) -> list[_Figure]:
    """Return what is judged of a row: its speed, then those of its parts that matter."""
    name = _name(after)
    found = [_Figure(name, "tok/s", "tok/s", before.tok_per_s, after.tok_per_s)]
    if before.breakdown is not None and after.breakdown is not None:
        for part, now in after.breakdown.parts.items():
            then = before.breakdown.parts.get(part)
            if then is None:
                continue
            share = max(_share(then, before.breakdown), _share(now, after.breakdown))
            if share >= PART_SHARE:
                found.append(_Figure(name, part, "ms", then, now))
    return [figure for figure in found if _usable(figure.old) and _usable(figure.new)]


def _share(part: Spread, breakdown: Breakdown) -> float:
    return part.median / breakdown.wall_ms if breakdown.wall_ms > 0 else 0.0


def _change(
    figure: _Figure, correction: _Correction | None = None, *, is_other_machine: bool = False
) -> Change:
    """Judge one figure with what is known of the machine."""
    shift = figure.shift
    log = slowdown = figure.slowdown
    threshold = _threshold(shift.error, shift.n_free)
    verdict = _verdict(slowdown, threshold)
    is_of_peer = correction is not None and correction.is_of_peer
    if correction is not None and (
        correction.drift.is_applied or (is_other_machine and is_of_peer)
    ):
        log = slowdown - correction.log
        threshold = _threshold(math.hypot(shift.error, correction.error), shift.n_free)
        with_drift, verdict = verdict, _verdict(log, threshold)
        if not is_of_peer and verdict != with_drift:
            verdict = "noisy"
    if is_other_machine and not is_of_peer:
        verdict = "noisy"
    return Change(
        row=figure.row,
        what=figure.what,
        unit=figure.unit,
        old=figure.old,
        new=figure.new,
        change=math.expm1(shift.log),
        corrected=math.expm1(log if figure.is_time else -log),
        noise=math.expm1(threshold),
        verdict=verdict,
    )


def _with_fractions(change: Change, before: Row, after: Row) -> Change:
    if change.what != "tok/s":
        return change
    return replace(
        change, old_fraction=before.fraction_of_limit, new_fraction=after.fraction_of_limit
    )


def _ratio_changes(old: Results, new: Results) -> list[Change]:
    """Return how the ratios to the peer changed: round by round, the machine cancels out."""
    known = {(old.rows[r.row].key, old.rows[r.vs].key): r for r in old.ratios}
    found = []
    for ratio in new.ratios:
        row, peer = new.rows[ratio.row], new.rows[ratio.vs]
        before = known.get((row.key, peer.key))
        if before is None:
            continue
        if not _is_same_work(old.rows[before.row], row):
            continue
        if not _is_same_work(old.rows[before.vs], peer):
            continue
        if old.rows[before.vs].version != peer.version:
            continue
        spreads = [Spread(r.median, r.min, r.max, r.values) for r in (before, ratio)]
        if all(_usable(spread) for spread in spreads):
            what = f"ratio to {peer.engine} {peer.type}"
            found.append(_change(_Figure(_name(row), what, "x", spreads[0], spreads[1])))
    return found


def _values(spread: Spread) -> list[float]:
    return spread.values or [spread.median]


def _usable(spread: Spread) -> bool:
    return all(value > 0 and math.isfinite(value) for value in _values(spread))


# ---- what belongs together ----


def _matched(
    old: Sequence[Row], new: Sequence[Row]
) -> tuple[list[tuple[Row, Row]], list[str], list[str]]:
    """Return rows of the same key, by pairs, and the names of those that have no counterpart."""
    waiting: dict[tuple[object, ...], list[Row]] = {}
    for row in old:
        waiting.setdefault(row.key, []).append(row)
    pairs, only_new = [], []
    for row in new:
        same = waiting.get(row.key)
        if same:
            pairs.append((same.pop(0), row))
        else:
            only_new.append(_name(row))
    only_old = [_name(row) for rows in waiting.values() for row in rows]
    return pairs, only_old, only_new


def _name(row: Row) -> str:
    return f"{row.shape}, {row.label}"


def _work(row: Row) -> str:
    return f"{row.n_weights:,} weights in {row.file_bytes:,} bytes"


def _is_same_work(before: Row, after: Row) -> bool:
    return all(
        abs(a - b) <= _SAME_FILE * max(a, b)
        for a, b in ((before.file_bytes, after.file_bytes), (before.n_weights, after.n_weights))
    )


# ---- what a reader must know ----


def _machine_notes(old: Results, new: Results) -> list[str]:
    """Return in what the machines differ; empty: they are alike."""
    names = {
        "cpu": "processors",
        "n_cores": "numbers of cores",
        "isa_available": "instruction sets",
    }
    return [
        f"the {what} differ: {_words(old.machine.get(key))}, then {_words(new.machine.get(key))}"
        for key, what in names.items()
        if old.machine.get(key) != new.machine.get(key)
    ]


def _words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "unknown" if value is None else str(value)


def _limit_notes(old: Results, new: Results) -> list[str]:
    """Return which limits moved by more than they should, and a change of the kernels in use."""
    notes = []
    isas = [_words(results.machine.get("isa")) for results in (old, new)]
    if isas[0] != isas[1]:
        notes.append(f"the kernels in use differ: {isas[0]}, then {isas[1]}")
    for what, field in (("memory", "memory_gb_per_s"), ("multiply-adds", "gmadds_per_s")):
        before, after = getattr(old.limits, field), getattr(new.limits, field)
        unit = "GB/s" if what == "memory" else "10^9/s"
        notes += [
            f"the limit of {what} moved by {100 * (after[key] / value - 1):+.0f} % on {key} "
            f"thread{'' if key == '1' else 's'}: {value:.1f}, then {after[key]:.1f} {unit}"
            for key, value in before.items()
            if value > 0 and key in after and abs(after[key] / value - 1) > LIMIT_MOVED
        ]
    best = old.limits.best_disk_gb_per_s, new.limits.best_disk_gb_per_s
    if best[0] and best[1] and abs(best[1] / best[0] - 1) > LIMIT_MOVED:
        notes.append(
            f"the limit of the disk moved by {100 * (best[1] / best[0] - 1):+.0f} %: "
            f"{best[0]:.2f}, then {best[1]:.2f} GB/s"
        )
    return notes


def _peak_notes(before: Row, after: Row) -> list[str]:
    if after.peak_rss_bytes <= before.peak_rss_bytes * (1 + _PEAK_GREW):
        return []
    return [
        f"{_name(after)}: peak memory {before.peak_rss_bytes / 2**20:,.0f} MB, "
        f"then {after.peak_rss_bytes / 2**20:,.0f} MB"
    ]


def _everywhere_notes(
    changes: Sequence[Change], drifts: dict[tuple[Kind, int], _Correction]
) -> list[str]:
    """Return a warning where nearly all became slower and no peer tells code from machine."""
    if any(correction.is_of_peer for correction in drifts.values()):
        return []
    n_slower = sum(change.verdict == "slower" for change in changes)
    if len(changes) < 4 or n_slower < _EVERYWHERE * len(changes):
        return []
    return [
        f"{n_slower} of {len(changes)} figures became slower: that may be the machine; measure "
        "with llama.cpp beside it to know"
    ]
