"""Two results of the same thing, and whether their differences are more than noise.

Whether a figure has changed is for `noise` to say.

**The machine's drift.** A shared machine may be 10 % slower an hour later, in all it does. What
shows that is what no change of QSF can alter: llama.cpp of the same version and file, measured in
turns with QSF. By kind of work (arithmetic, memory, disk) and number of threads the median of its
changes is taken out of QSF's, if it is beyond its own noise; that noise adds to the threshold.
Without llama.cpp there are the limits, measured at both ends of a run: they can cast doubt on a
change but not make one. A limit counts where it moved by more than `LIMIT_MOVED` and most of QSF's
figures moved with it; what then looks different with and without the drift is "noisy". Ratios to
llama.cpp round by round need no correction and are judged as they are.

Parts of a token are judged apart: a kernel that became 10 % slower may be a tenth of the token.
And they are judged beside each other (`mixture`), which needs no drift to be known.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from qsf.bench.mixture import relatives
from qsf.bench.noise import (
    LEAST,
    CommonNoise,
    Shift,
    Verdict,
    change_of,
    common_noise,
    shift_of,
    threshold,
    verdict_of,
)
from qsf.bench.results import Breakdown, Results, Row, Spread

PART_SHARE = 0.02  # of the token, in either result: smaller parts are not judged
LEAST_BESIDE = 0.05  # kernels that wait for memory and those that do not feel a machine unlike
LIMIT_MOVED = 0.10
_PEAK_GREW = 0.05
_SAME_FILE = 0.01
_BUSY = 0.5  # processes that want to run for each core
_EVERYWHERE = 0.75  # so many of all changes in one direction look like the machine

Kind = Literal["arithmetic", "memory", "disk"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both results.

    ``change`` and ``corrected`` are of the figure: -0.1 is 10 % fewer tokens a second, or, for
    milliseconds, 10 % less time. ``corrected`` is without the machine's drift; ``noise`` is how far
    it must lie from zero. All are of means of logarithms, so not quite those of the medians.
    ``is_sure``: it would be a change even if it were the most that one of all figures changed.
    """

    row: str  # shape and label
    what: str  # "tok/s", "ratio to llama.cpp Q4_K_M", or the name of a part
    unit: str  # "tok/s", "x", "ms", or "of" a family: see `mixture`
    old: Spread
    new: Spread
    change: float
    corrected: float
    noise: float
    verdict: Verdict
    is_sure: bool = False


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
        """Whether anything surely became slower: among many figures some seem so by chance."""
        return any(change.verdict == "slower" and change.is_sure for change in self.changes)


def compare(old: Results, new: Results) -> Comparison:
    """Return all changes, those of rows in the order of ``new``."""
    machine_notes = _machine_notes(old, new)
    pairs, only_old, only_new = _matched(old.rows, new.rows)
    same = [pair for pair in pairs if _is_same_work(*pair)]
    own = [pair for pair in same if pair[1].engine == "qsf"]
    peers, peer_notes = _controls([pair for pair in same if pair[1].engine != "qsf"])
    figures = [figure for pair in own for figure in _figures(*pair)]
    common = common_noise([f.shift for f in figures] + [shift for _, shift in peers])
    corrections = _corrections(figures, peers, common, old, new)
    ratios = _ratio_figures(old, new)
    relative = [figure for pair in own for figure in _relative_figures(*pair)]
    n_figures = len(figures) + len(ratios) + len(relative)
    judge = _Judge(n_figures, is_other_machine=bool(machine_notes))
    changes = [judge.change(f, common, corrections.get((f.kind, f.threads))) for f in figures]
    for alike in (ratios, relative):
        common_of_them = common_noise(figure.shift for figure in alike)
        changes += [judge.change(figure, common_of_them, None) for figure in alike]
    notes = [
        *machine_notes,
        *_load_notes(old, new),
        *_limit_notes(old, new),
        *peer_notes,
        *(_difference_note(*pair) for pair in pairs if not _is_same_work(*pair)),
        *(note for pair in own for note in _peak_notes(*pair)),
        *_failure_notes(old, new),
        *_everywhere_notes(changes, corrections.values()),
    ]
    drifts = [correction.drift for correction in corrections.values()]
    return Comparison(changes, drifts, only_old, only_new, notes)


# ---- what is judged ----


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of QSF in both results."""

    row: str
    what: str
    unit: str
    old: Spread
    new: Spread
    shift: Shift
    kind: Kind
    threads: int

    @property
    def is_time(self) -> bool:
        return self.unit in ("ms", "of")

    @property
    def slowdown(self) -> float:
        """The logarithm of how much longer it takes."""
        return self.shift.log if self.is_time else -self.shift.log


def _figure(row: Row, what: str, unit: str, old: Spread, new: Spread) -> _Figure | None:
    """Return a figure; None: a round has a value that no logarithm can be taken of."""
    values = [spread.values or [spread.median] for spread in (old, new)]
    if any(value <= 0 for side in values for value in side):
        return None
    shift = shift_of(*values)
    return _Figure(_name(row), what, unit, old, new, shift, _kind(row), row.threads)


def _figures(before: Row, after: Row) -> list[_Figure]:
    """Return what is judged of a row: its speed, then those of its parts that matter."""
    found = [_figure(after, "tok/s", "tok/s", before.tok_per_s, after.tok_per_s)]
    if before.breakdown is not None and after.breakdown is not None:
        for part, now in after.breakdown.parts.items():
            then = before.breakdown.parts.get(part)
            if then is None:
                continue
            share = max(_share(then, before.breakdown), _share(now, after.breakdown))
            if share >= PART_SHARE:
                found.append(_figure(after, part, "ms", then, now))
    return [figure for figure in found if figure is not None]


def _relative_figures(before: Row, after: Row) -> list[_Figure]:
    """Return the parts of a row in terms of each other."""
    if before.breakdown is None or after.breakdown is None:
        return []
    found = [
        _figure(after, f"{one.part} beside {one.family}", "of", one.old, one.new)
        for one in relatives(before.breakdown, after.breakdown, PART_SHARE)
    ]
    return [figure for figure in found if figure is not None]


def _share(part: Spread, breakdown: Breakdown) -> float:
    return part.median / breakdown.wall_ms if breakdown.wall_ms > 0 else 0.0


def _ratio_figures(old: Results, new: Results) -> list[_Figure]:
    """Return the ratios to the peer that both have: round by round, the machine cancels out."""
    known = {(old.rows[r.row].key, old.rows[r.vs].key): r for r in old.ratios}
    found = []
    for ratio in new.ratios:
        row, peer = new.rows[ratio.row], new.rows[ratio.vs]
        before = known.get((row.key, peer.key))
        if before is None or not _is_same_work(old.rows[before.row], row):
            continue
        if not _is_same_peer(old.rows[before.vs], peer):
            continue
        spreads = [Spread(r.median, r.min, r.max, r.values) for r in (before, ratio)]
        what = f"ratio to {peer.engine} {peer.type}"
        found.append(_figure(row, what, "x", spreads[0], spreads[1]))
    return [figure for figure in found if figure is not None]


@dataclass(frozen=True, slots=True)
class _Judge:
    """Judges figures, knowing how many there are and whether the machine is the same."""

    n_figures: int
    is_other_machine: bool

    def change(
        self, figure: _Figure, common: CommonNoise, correction: _Correction | None
    ) -> Change:
        """Judge one figure."""
        error, n_free = common.error_of(figure.shift)
        least = LEAST_BESIDE if figure.unit == "of" else LEAST
        log = figure.slowdown
        verdict = verdict_of(log, threshold(error, n_free, least=least))
        is_of_peer = correction is not None and correction.is_of_peer
        if correction is not None and (
            correction.drift.is_applied or (self.is_other_machine and is_of_peer)
        ):
            log -= correction.log
            error = math.hypot(error, correction.error)
            with_drift, verdict = verdict, verdict_of(log, threshold(error, n_free))
            if not is_of_peer and verdict != with_drift:
                verdict = "noisy"
        if self.is_other_machine and not is_of_peer and figure.unit != "x":
            verdict = "noisy"
        return Change(
            row=figure.row,
            what=figure.what,
            unit=figure.unit,
            old=figure.old,
            new=figure.new,
            change=change_of(figure.shift.log),
            corrected=change_of(log if figure.is_time else -log),
            noise=change_of(threshold(error, n_free, least=least)),
            verdict=verdict,
            is_sure=abs(log) > threshold(error, n_free, self.n_figures, least=least),
        )


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


_Setting = tuple[Kind, int]  # and the number of threads


def _controls(
    pairs: Iterable[tuple[Row, Row]],
) -> tuple[list[tuple[_Setting, Shift]], list[str]]:
    """Return how much longer the peer takes, and which of its rows say nothing about that."""
    found: list[tuple[_Setting, Shift]] = []
    notes = []
    for before, after in pairs:
        if not _is_same_peer(before, after):
            notes.append(
                f"{_name(after)}: {before.version} {before.kernels}, then {after.version} "
                f"{after.kernels}: another build says nothing of the machine's drift"
            )
            continue
        figure = _figure(after, "tok/s", "tok/s", before.tok_per_s, after.tok_per_s)
        if figure is not None:
            slowdown = replace(figure.shift, log=figure.slowdown)
            found.append(((figure.kind, figure.threads), slowdown))
    return found, notes


def _corrections(
    figures: Sequence[_Figure],
    peers: Sequence[tuple[_Setting, Shift]],
    common: CommonNoise,
    old: Results,
    new: Results,
) -> dict[_Setting, _Correction]:
    """Return what the machine did, for every setting in which QSF was measured."""
    found: dict[_Setting, _Correction] = {}
    for setting in dict.fromkeys((figure.kind, figure.threads) for figure in figures):
        shifts = [shift for known, shift in peers if known == setting]
        if shifts:
            found[setting] = _correction_of_peer(setting, shifts, common)
        elif (ratio := _limit_ratio(*setting, old, new)) is not None:
            own = [f.slowdown for f in figures if (f.kind, f.threads) == setting]
            found[setting] = _correction_of_limit(setting, ratio, statistics.median(own))
    return found


def _correction_of_peer(
    setting: _Setting, shifts: Sequence[Shift], common: CommonNoise
) -> _Correction:
    """Return the median of some rows' shifts; its error is that of rounds, or of rows if larger."""
    log = statistics.median(shift.log for shift in shifts)
    errors = [common.error_of(shift) for shift in shifts]
    error = math.sqrt(statistics.fmean(error**2 for error, _ in errors) / len(shifts))
    if len(shifts) > 1:
        between = statistics.stdev(shift.log for shift in shifts) / math.sqrt(len(shifts))
        error = max(error, between)
    is_applied = abs(log) > threshold(error, max(n_free for _, n_free in errors))
    drift = Drift(*setting, change_of(log), "llama.cpp", len(shifts), is_applied)
    return _Correction(drift, log, error)


def _correction_of_limit(setting: _Setting, ratio: float, own_median: float) -> _Correction:
    """Return the limit's change; it is believed where QSF's figures are nearer to it than to 0."""
    log = math.log(ratio)
    is_applied = abs(ratio - 1) > LIMIT_MOVED and abs(own_median - log) < abs(own_median)
    return _Correction(Drift(*setting, ratio - 1, "limits", 1, is_applied), log, 0.0)


def _limit_ratio(kind: Kind, threads: int, old: Results, new: Results) -> float | None:
    """Return how much longer the limit says that things take now."""
    pairs = {
        "arithmetic": (r.limits.gmadds_per_s.get(str(threads)) for r in (old, new)),
        "memory": (r.limits.memory_gb_per_s.get(str(threads)) for r in (old, new)),
        "disk": (r.limits.best_disk_gb_per_s for r in (old, new)),
    }
    before, after = pairs[kind]
    return before / after if before and after and min(before, after) > 0 else None


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


def _is_same_peer(before: Row, after: Row) -> bool:
    """Whether two rows of the peer, which is not under test, can differ by the machine alone."""
    builds = [(row.version, row.kernels) for row in (before, after)]
    return builds[0] == builds[1] and _is_same_work(before, after)


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


def _load_notes(old: Results, new: Results) -> list[str]:
    """Return which of the results began on a busy machine."""
    notes = []
    for when, results in (("older", old), ("newer", new)):
        load, n_cores = results.machine.get("load"), results.machine.get("n_cores")
        if not (isinstance(load, int | float) and isinstance(n_cores, int) and n_cores > 0):
            continue
        if load > _BUSY * n_cores:
            notes.append(
                f"the machine was busy when the {when} result began: load {load} on {n_cores} cores"
            )
    return notes


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


def _difference_note(before: Row, after: Row) -> str:
    return f"{_name(after)}: not compared, the files differ ({_work(before)}, then {_work(after)})"


def _failure_notes(old: Results, new: Results) -> list[str]:
    """Return what failed now and did not before."""
    known = {(failure.engine, failure.file, failure.what) for failure in old.failures}
    return [
        f"{failure.engine} {failure.file}, {failure.what}, failed now: {failure.why}"
        for failure in new.failures
        if (failure.engine, failure.file, failure.what) not in known
    ]


def _everywhere_notes(changes: Sequence[Change], corrections: Iterable[_Correction]) -> list[str]:
    """Return a warning where nearly all became slower and no peer tells code from machine."""
    if any(correction.is_of_peer for correction in corrections):
        return []
    n_slower = sum(change.verdict == "slower" for change in changes)
    if len(changes) < 4 or n_slower < _EVERYWHERE * len(changes):
        return []
    return [
        f"{n_slower} of {len(changes)} figures became slower: that may be the machine; measure "
        "with llama.cpp beside it to know"
    ]
