# SPDX-License-Identifier: Apache-2.0
"""Whether qsf.bench --compare tells changes from noise and from the machine's drift."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from make.bench_records import Noisy, results_of, small_results
from qsf.bench.compare import Change, Comparison, compare
from qsf.bench.noise import CommonNoise, common_noise, shift_of, threshold, verdict_of
from qsf.bench.results import Failure, Ratio, Results, Row, Spread, spread_of

PARTS_MS = {
    "attention": 4.0,
    "ffn": 10.0,
    "qkv": 3.0,
    "head": 2.0,
    "sample": 0.8,
    "python": 0.6,
}


def one_row(machine: Noisy, slow: dict[str, float] | None = None) -> Results:
    """Return a result of one row; ``slow`` says how many times as long parts take."""
    parts = {name: ms * (slow or {}).get(name, 1.0) for name, ms in PARTS_MS.items()}
    return results_of([machine.row(1000 / sum(parts.values()), parts)])


def of(comparison: Comparison, what: str) -> Change:
    (change,) = [change for change in comparison.changes if change.what == what]
    return change


def verdicts(comparison: Comparison) -> set[str]:
    """Of all figures but those of parts beside each other, which all of this leaves alone."""
    beside = {change.verdict for change in comparison.changes if change.unit == "of"}
    assert not beside & {"slower", "faster"}
    return {change.verdict for change in comparison.changes if change.unit != "of"}


# ---- noise ----


def false_alarms(n_rounds: int, seed: int) -> tuple[float, float, float]:
    """Return the fractions of figures and of rows with a false alarm, and of regressions."""
    machine = Noisy(random.Random(seed), n_rounds=n_rounds)
    n_pairs, n_figures, n_changed, n_rows, n_regressions = 1000, 0, 0, 0, 0
    for _ in range(n_pairs):
        done = compare(one_row(machine), one_row(machine))
        verdicts = [change.verdict for change in done.changes]
        n_figures += len(verdicts)
        n_changed += sum(verdict in ("slower", "faster") for verdict in verdicts)
        n_rows += "slower" in verdicts
        n_regressions += done.is_regression
    return n_changed / n_figures, n_rows / n_pairs, n_regressions / n_pairs


@pytest.mark.parametrize(("n_rounds", "seed"), [(3, 1), (5, 2)])
def test_two_runs_of_the_same_thing_rarely_differ(n_rounds: int, seed: int) -> None:
    of_figures, of_rows, of_regressions = false_alarms(n_rounds, seed)
    assert of_figures < 0.02
    assert of_rows < 0.05
    assert of_regressions < 0.05


def test_ten_percent_in_one_part_is_seen() -> None:
    machine = Noisy(random.Random(3))
    n_pairs = 300
    n_seen = sum(
        of(
            compare(one_row(machine), one_row(machine, {"attention": 1.1})),
            "attention",
        ).verdict
        == "slower"
        for _ in range(n_pairs)
    )
    assert n_seen > 0.95 * n_pairs


def test_one_disturbed_round_does_not_hide_it() -> None:
    machine = Noisy(random.Random(4))
    old, new = one_row(machine), one_row(machine, {"ffn": 1.12})
    breakdown = old.rows[0].breakdown
    assert breakdown is not None
    values = breakdown.parts["ffn"].values
    values[2] *= 1.6
    assert of(compare(old, new), "ffn").verdict == "slower"


def test_a_part_that_became_faster_is_no_regression() -> None:
    machine = Noisy(random.Random(5))
    done = compare(one_row(machine), one_row(machine, {"ffn": 0.8}))
    assert of(done, "ffn").verdict == "faster"
    assert of(done, "tok/s").verdict == "faster"
    assert not done.is_regression


def test_fewer_tokens_are_slower_and_more_milliseconds_too() -> None:
    quiet = Noisy(random.Random(6), noise=0.002)
    done = compare(one_row(quiet), one_row(quiet, dict.fromkeys(PARTS_MS, 1.25)))
    assert verdicts(done) == {"slower"}
    assert of(done, "tok/s").change == pytest.approx(-0.2, abs=0.01)
    assert of(done, "ffn").change == pytest.approx(0.25, abs=0.01)
    assert done.is_regression


def test_less_than_three_percent_is_never_a_change() -> None:
    exact = Noisy(random.Random(7), noise=0.0001)
    done = compare(one_row(exact), one_row(exact, dict.fromkeys(PARTS_MS, 1.025)))
    assert verdicts(done) == {"same"}
    assert of(done, "tok/s").noise == pytest.approx(0.03)


def test_small_parts_are_not_judged() -> None:
    quiet = Noisy(random.Random(8), noise=0.001)
    parts = PARTS_MS | {"tiny": 0.1}
    slow = parts | {"tiny": 0.2}
    rows = [[quiet.row(50, ms)] for ms in (parts, slow)]
    done = compare(results_of(rows[0]), results_of(rows[1]))
    assert "tiny" not in [change.what for change in done.changes]
    grown = results_of([quiet.row(50, parts | {"tiny": 1.0})])
    assert of(compare(results_of(rows[0]), grown), "tiny").verdict == "slower"


def test_single_rounds_tell_nothing() -> None:
    single = Noisy(random.Random(9), n_rounds=1)
    done = compare(results_of([single.row(50)]), results_of([single.row(30)]))
    assert [change.verdict for change in done.changes] == ["noisy"]
    assert math.isinf(done.changes[0].noise)


def test_much_noise_is_called_noisy_and_not_same() -> None:
    loud = [spread_of([40, 50, 60]), spread_of([41, 52, 58])]
    machine = Noisy(random.Random(10))
    rows = [replace(machine.row(50), tok_per_s=spread) for spread in loud]
    done = compare(results_of(rows[:1]), results_of(rows[1:]))
    assert [change.verdict for change in done.changes] == ["noisy"]


def test_figures_that_no_logarithm_can_be_taken_of_are_left_out() -> None:
    quiet = Noisy(random.Random(11), noise=0.001)
    old, new = one_row(quiet), one_row(quiet)
    breakdown = new.rows[0].breakdown
    assert breakdown is not None
    breakdown.parts["qkv"].values[0] = 0.0
    assert "qkv" not in [change.what for change in compare(old, new).changes]


# ---- the arithmetic of noise ----


def test_one_far_round_of_five_is_left_out_but_not_of_four() -> None:
    even = [10.0, 10.1, 9.9, 10.05]
    assert shift_of(even, [*even, 15.0]).log == pytest.approx(0, abs=0.005)
    assert shift_of(even, [*even[:3], 15.0]).log > 0.09
    assert shift_of(even, [*even, 10.2]).n_free == 7
    assert shift_of(even, [*even, 15.0]).n_free == 6


def test_the_shift_has_the_pooled_variance_of_both_sides() -> None:
    old, new = [math.exp(x) for x in (1.0, 3.0)], [math.exp(x) for x in (2.0, 6.0, 7.0)]
    shift = shift_of(old, new)
    assert shift.log == pytest.approx(3.0)
    assert shift.variance == pytest.approx((2.0 + 14.0) / 3)
    assert shift.n_free == 3
    assert shift.spread == pytest.approx(1 / 2 + 1 / 3)


@pytest.mark.parametrize(
    ("n_free", "quantile"),
    [(1, 63.657), (2, 9.925), (4, 4.604), (5, 4.032), (8, 3.355), (16, 2.921), (40, 2.704)],
)
def test_thresholds_are_those_of_students_t(n_free: int, quantile: float) -> None:
    assert threshold(1.0, n_free) == pytest.approx(quantile, rel=0.012)


def test_many_figures_raise_what_is_sure() -> None:
    assert threshold(1.0, 16, 5) == threshold(1.0, 16)
    assert threshold(1.0, 16, 100) == pytest.approx(4.015, rel=0.01)  # of 0.0005
    assert math.isinf(threshold(0.0, 0))


def test_quiet_by_chance_gets_the_common_noise_and_a_loud_figure_its_own() -> None:
    quiet, loud = shift_of([10, 10, 10], [10, 10, 10]), shift_of([10, 14, 18], [10, 14, 18])
    common = CommonNoise(0.01, 8)
    error, n_free = common.error_of(quiet)
    assert (error, n_free) == pytest.approx((math.sqrt(0.01 * 8 / 12 * 2 / 3), 12))
    error, n_free = common.error_of(loud)
    assert (error, n_free) == pytest.approx((math.sqrt(loud.variance * 2 / 3), 4))
    assert common_noise([]) == CommonNoise()
    assert common_noise([quiet, loud, loud]).n_free == 2


@pytest.mark.parametrize(
    ("slowdown", "limit", "verdict"),
    [
        (0.06, 0.05, "slower"),
        (-0.06, 0.05, "faster"),
        (0.04, 0.05, "same"),
        (0.049, 0.05, "noisy"),  # 10 % would be hidden
        (-0.08, 0.09, "same"),
    ],
)
def test_verdicts(slowdown: float, limit: float, verdict: str) -> None:
    assert verdict_of(slowdown, limit) == verdict


# ---- the machine's drift ----

Make = Callable[[Noisy, float, float], list[Row]]


def with_peer(machine: Noisy, slow: float, drift: float) -> list[Row]:
    """Return a row of each engine; ``drift`` slows both, ``slow`` QSF's attention."""
    parts = {name: ms * drift for name, ms in PARTS_MS.items()}
    parts["attention"] *= slow
    return [machine.row(1000 / sum(parts.values()), parts), machine.peer(20 / drift)]


def drifted(seed: int, slow: float, drift: float, **limits: Any) -> Comparison:
    machine = Noisy(random.Random(seed), noise=0.01)
    old = results_of(with_peer(machine, 1.0, 1.0))
    return compare(old, results_of(with_peer(machine, slow, drift), **limits))


@pytest.mark.parametrize("drift", [0.88, 1.0, 1.12])
def test_the_peer_shows_what_is_the_machine(drift: float) -> None:
    same = drifted(12, 1.0, drift)
    assert not same.is_regression
    assert of(same, "tok/s").corrected == pytest.approx(0, abs=0.03)
    slower = drifted(13, 1.15, drift)
    assert of(slower, "attention").verdict == "slower"
    assert of(slower, "ffn").verdict == "same"
    assert slower.is_regression
    (found,) = slower.drifts
    assert (found.kind, found.threads, found.source) == ("memory", 2, "llama.cpp")
    assert found.slowdown == pytest.approx(drift - 1, abs=0.02)
    assert found.is_applied == (drift != 1.0)


def test_another_build_of_the_peer_says_nothing_of_the_machine() -> None:
    machine = Noisy(random.Random(14), noise=0.01)
    old, new = with_peer(machine, 1.0, 1.0), with_peer(machine, 1.0, 1.2)
    new[1] = replace(new[1], version="llama.cpp 2")
    done = compare(results_of(old), results_of(new))
    assert of(done, "tok/s").verdict == "slower"
    assert any("another build says nothing" in note for note in done.notes)


def test_a_peer_on_other_threads_says_nothing_of_these() -> None:
    machine = Noisy(random.Random(15), noise=0.01)
    rows = [with_peer(machine, 1.0, drift) for drift in (1.0, 1.2)]
    rows = [[own, replace(peer, threads=1)] for own, peer in rows]
    done = compare(results_of(rows[0]), results_of(rows[1]))
    assert of(done, "tok/s").verdict == "slower"


def alone(seed: int, slowdown: float, memory_gb_per_s: float) -> Comparison:
    """Compare where only the limit can tell the machine from QSF."""
    machine = Noisy(random.Random(seed), noise=0.01)
    old = one_row(machine)
    slow = results_of(
        one_row(machine, dict.fromkeys(PARTS_MS, slowdown)).rows, memory_gb_per_s=memory_gb_per_s
    )
    return compare(old, slow)


def test_a_limit_that_moved_as_much_casts_doubt() -> None:
    done = alone(16, 1.15, 20.0 / 1.15)
    assert verdicts(done) == {"noisy"}
    assert not done.is_regression
    assert any("the limit of memory moved by -13 %" in note for note in done.notes)
    assert done.drifts[0].is_applied


@pytest.mark.parametrize("memory_gb_per_s", [20.0, 19.0, 25.0])
def test_a_limit_that_did_not_move_so_excuses_nothing(memory_gb_per_s: float) -> None:
    done = alone(17, 1.15, memory_gb_per_s)
    assert verdicts(done) == {"slower"}
    assert any("may be the machine" in note for note in done.notes)


def test_a_limit_that_moved_alone_makes_no_change() -> None:
    done = alone(18, 1.0, 16.0)
    assert verdicts(done) == {"same"}


def test_another_machine_is_said_and_judged_by_the_peer_alone() -> None:
    machine = Noisy(random.Random(19), noise=0.01)
    old = results_of(with_peer(machine, 1.0, 1.0))
    new = results_of(with_peer(machine, 1.0, 0.5), cpu="Processor Y")
    done = compare(old, new)
    assert "the processors differ: Processor X, then Processor Y" in done.notes
    assert verdicts(done) == {"same"}
    lonely = [replace(results, rows=results.rows[:1]) for results in (old, new)]
    done = compare(lonely[0], lonely[1])
    assert verdicts(done) == {"noisy"}


def test_a_busy_machine_is_said() -> None:
    machine = Noisy(random.Random(30))
    old, new = (results_of([machine.row(50)], load=load) for load in (0.9, 1.5))
    assert compare(old, new).notes == [
        "the machine was busy when the newer result began: load 1.5 on 2 cores"
    ]
    odd = compare(results_of([], load="x"), results_of([], load=9, n_cores=None)).notes
    assert not any("busy" in note for note in odd)


def test_kernels_that_are_no_longer_used_are_a_regression_of_the_same_machine() -> None:
    machine = Noisy(random.Random(20), noise=0.01)
    new = results_of(one_row(machine, dict.fromkeys(PARTS_MS, 2.0)).rows, isa="scalar")
    done = compare(one_row(machine), new)
    assert "the kernels in use differ: avx2, then scalar" in done.notes
    assert done.is_regression


# ---- ratios ----


def with_ratio(machine: Noisy, ratio: float, drift: float = 1.0) -> Results:
    rows = [machine.row(50 / drift), machine.peer(20 / drift)]
    spread = machine.spread(ratio)
    known = Ratio(0, 1, spread.median, spread.min, spread.max, spread.values)
    return results_of(rows, ratios=[known])


def test_ratios_are_judged_as_they_are() -> None:
    machine = Noisy(random.Random(21), noise=0.01)
    done = compare(with_ratio(machine, 2.5), with_ratio(machine, 2.2, drift=1.3))
    change = of(done, "ratio to llama.cpp Q4_K_M")
    assert (change.verdict, change.unit) == ("slower", "x")
    assert change.change == change.corrected == pytest.approx(-0.12, abs=0.02)
    assert done.is_regression
    done = compare(with_ratio(machine, 2.5), with_ratio(machine, 2.5))
    assert of(done, "ratio to llama.cpp Q4_K_M").verdict == "same"


def test_a_ratio_to_another_build_is_not_compared() -> None:
    machine = Noisy(random.Random(22), noise=0.01)
    new = with_ratio(machine, 2.2)
    new.rows[1] = replace(new.rows[1], kernels="other")
    done = compare(with_ratio(machine, 2.5), new)
    assert not any(change.what.startswith("ratio") for change in done.changes)


# ---- which rows ----


def rows_of(changes: Iterable[Change]) -> list[str]:
    return list(dict.fromkeys(change.row for change in changes))


def settings(machine: Noisy, changes: Sequence[dict[str, Any]]) -> Results:
    return results_of([machine.row(50, **change) for change in changes])


def test_rows_are_matched_by_what_they_are_and_the_rest_is_listed() -> None:
    machine = Noisy(random.Random(23))
    old = settings(machine, [{"threads": 1}, {"threads": 2}, {"depth": 512}])
    new = settings(machine, [{"threads": 2}, {"threads": 1}, {"budget_mb": 300}])
    done = compare(old, new)
    names = ["small, qsf, 4bit, tg128, 2 threads", "small, qsf, 4bit, tg128, 1 thread"]
    assert rows_of(done.changes) == names
    assert done.only_old == ["small, qsf, 4bit, tg128 @ 512, 2 threads"]
    assert done.only_new == ["small, qsf, 4bit, tg128, 2 threads, budget 300 MB"]


def test_two_files_of_one_kind_are_matched_in_their_order() -> None:
    quiet = Noisy(random.Random(24), noise=0.001)
    old = results_of([quiet.row(50), quiet.row(80)])
    done = compare(old, results_of([quiet.row(50), quiet.row(80), quiet.row(90)]))
    assert verdicts(done) == {"same"}
    assert len(done.only_new) == 1


@pytest.mark.parametrize("change", [{"file_bytes": 600_000_000}, {"n_weights": 900_000_000}])
def test_different_work_is_refused(change: dict[str, int]) -> None:
    machine = Noisy(random.Random(25))
    done = compare(results_of([machine.row(50)]), settings(machine, [change]))
    assert done.changes == []
    assert any("not compared, the files differ" in note for note in done.notes)


def test_the_peer_is_not_judged() -> None:
    machine = Noisy(random.Random(26), noise=0.01)
    done = compare(results_of([machine.peer(20)]), results_of([machine.peer(10)]))
    assert (done.changes, done.is_regression) == ([], False)


def test_memory_that_grew_and_new_failures_are_said() -> None:
    machine = Noisy(random.Random(27))
    failure = Failure("qsf", "small-4bit.qsf", "2 threads", "killed by signal 9")
    new = settings(machine, [{"peak_rss_bytes": 800 << 20}])
    notes = compare(results_of([machine.row(50)]), replace(new, failures=[failure])).notes
    assert notes == [
        "small, qsf, 4bit, tg128, 2 threads: peak memory 700 MB, then 800 MB",
        "qsf small-4bit.qsf, 2 threads, failed now: killed by signal 9",
    ]


def test_a_result_is_the_same_as_itself() -> None:
    done = compare(small_results(), small_results())
    assert {change.change for change in done.changes} == {0.0}
    assert not {change.verdict for change in done.changes} & {"slower", "faster"}
    assert (done.only_old, done.only_new, done.notes) == ([], [], [])


def test_spreads_without_values_count_as_one_round() -> None:
    machine = Noisy(random.Random(28))
    bare = replace(machine.row(50), tok_per_s=Spread(50, 49, 51))
    assert compare(results_of([bare]), results_of([bare])).changes[0].verdict == "noisy"


def test_among_many_figures_the_exit_code_wants_more() -> None:
    machine = Noisy(random.Random(29))
    n_regressions = n_slower = 0
    for _ in range(40):
        rows = [[machine.row(50, PARTS_MS, depth=depth) for depth in range(20)] for _ in range(2)]
        done = compare(results_of(rows[0]), results_of(rows[1]))
        n_slower += any(change.verdict == "slower" for change in done.changes)
        n_regressions += done.is_regression
    assert n_slower > 10  # of 140 figures one looks slower more often than not
    assert n_regressions <= 4
