# SPDX-License-Identifier: Apache-2.0
"""Whether qsf.bench --compare tells changes from noise and from the machine's drift."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from make.bench_records import Noisy, results_of
from qsf_bench.judge.compare import Change, Comparison, compare, judge
from qsf_bench.judge.results import Ratio, Results, Row, spread_of


def one_row(machine: Noisy, slow: float = 1.0) -> Results:
    """Return a result of one row that is ``slow`` times as slow."""
    return results_of([machine.row(50 / slow)])


def beside_baseline(
    machine: Noisy, drift: float = 1.0, slow: float = 1.0, **baseline: Any
) -> Results:
    """Return QSF and a baseline in turns; each round of both is ``drift`` times as slow."""
    weather = [machine.chance.uniform(0.8, 1.2) * drift for _ in range(machine.n_rounds)]

    def disturbed(row: Row) -> Row:
        values = [v / w for v, w in zip(row.tok_per_s.values, weather, strict=True)]
        return replace(row, tok_per_s=spread_of(values))

    rows = [disturbed(machine.row(50 / slow)), disturbed(machine.baseline(25, **baseline))]
    pairs = zip(rows[0].tok_per_s.values, rows[1].tok_per_s.values, strict=True)
    ratio = spread_of([a / b for a, b in pairs])
    return results_of(rows, ratios=[Ratio(0, 1, ratio.median, ratio.min, ratio.max, ratio.values)])


def only(comparison: Comparison) -> Change:
    (change,) = comparison.changes
    return change


# ---- the rule ----


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([10.0, 10.1, 9.9], [9.0, 9.1, 9.05], "slower"),
        ([10.0, 10.1, 9.9], [11.0, 11.1, 11.05], "faster"),
        ([10.0, 10.1, 9.9], [9.8, 9.8, 9.8], "same"),  # less than 3 %
        ([10.0, 10.4, 9.9], [9.6, 9.7, 9.5], "same"),  # inside the spread, though none overlaps
        ([10.0, 12.0, 9.0], [9.0, 9.1, 9.0], "noisy"),  # so wide that 10 % would be hidden
        ([10.0, 12.0, 9.0], [5.0, 5.1, 5.0], "slower"),
        ([10.0, 10.0], [18.0, 2.0], "noisy"),
        ([10.0], [5.0, 5.0, 5.0], "noisy"),  # a single round has no spread
    ],
)
def test_a_change_is_more_than_the_wider_spread(
    old: list[float], new: list[float], verdict: str
) -> None:
    assert judge(old, new)[2] == verdict


@pytest.mark.parametrize(("n_rounds", "most", "least"), [(3, 0.05, 0.7), (8, 0.03, 0.95)])
def test_error_rates_at_noise_of_three_percent(n_rounds: int, most: float, least: float) -> None:
    machine = Noisy(random.Random(n_rounds), n_rounds=n_rounds)
    pairs = [(machine.spread(10).values, machine.spread(10).values) for _ in range(1000)]
    n_alarms = sum(judge(old, new)[2] == "slower" for old, new in pairs)
    n_seen = sum(judge(old, [0.9 * v for v in new])[2] == "slower" for old, new in pairs)
    assert n_alarms / 1000 <= most
    assert n_seen / 1000 >= least


# ---- the machine ----


@pytest.mark.parametrize("drift", [1.3, 1.0, 0.7])
def test_the_baseline_cancels_the_machine(drift: float) -> None:
    machine = Noisy(random.Random(3), noise=0.01)
    same = only(compare(beside_baseline(machine), beside_baseline(machine, drift)))
    assert (same.verdict, same.is_relative) == ("same", True)
    slower = compare(beside_baseline(machine), beside_baseline(machine, drift, slow=1.1))
    assert only(slower).verdict == "slower"
    assert only(slower).change == pytest.approx(-0.09, abs=0.03)


@pytest.mark.parametrize(
    "baseline", [{"version": "llama.cpp 2"}, {"kernels": "other"}, {"n_weights": 2_000_000_000}]
)
def test_another_build_of_the_baseline_cancels_nothing(baseline: dict[str, Any]) -> None:
    machine = Noisy(random.Random(3), noise=0.01)
    done = compare(beside_baseline(machine), beside_baseline(machine, 2.0, **baseline))
    assert not only(done).is_relative


def test_another_machine_is_noted_and_judged_by_the_baseline_alone() -> None:
    machine = Noisy(random.Random(4), noise=0.01)
    alone = [one_row(machine), one_row(machine, 3.0)]
    other = replace(alone[1], machine=alone[1].machine | {"cpu": "Processor Y"})
    done = compare(alone[0], other)
    assert only(done).verdict == "noisy"
    assert "the processors differ: Processor X, then Processor Y" in done.notes
    slow = beside_baseline(machine, slow=1.2)
    slow = replace(slow, machine=slow.machine | {"cpu": "Processor Y"})
    assert compare(beside_baseline(machine), slow).is_regression


# ---- what belongs together ----


def test_rows_are_matched_by_key_and_order_and_the_rest_is_noted() -> None:
    machine = Noisy(random.Random(6), noise=0.0)
    old = [machine.row(10), machine.row(20), machine.row(5, threads=1)]
    new = [machine.row(11), machine.row(22), machine.row(7, depth=64)]
    done = compare(results_of(old), results_of(new))
    assert [(change.old, change.new) for change in done.changes] == [(10, 11), (20, 22)]
    assert done.notes == [
        "only in the newer result: small, qsf, 4bit, tg128 @ 64, 2 threads",
        "only in the older result: small, qsf, 4bit, tg128, 1 thread",
    ]


@pytest.mark.parametrize("change", [{"file_bytes": 800_000_000}, {"n_weights": 900_000_000}])
def test_different_work_is_not_compared(change: dict[str, Any]) -> None:
    machine = Noisy(random.Random(7))
    done = compare(results_of([machine.row(10)]), results_of([machine.row(10, **change)]))
    assert done.changes == []
    assert "not compared, the files differ (1,000,000,000 weights in 700,000,000" in done.notes[0]


def test_the_baseline_is_not_judged() -> None:
    machine = Noisy(random.Random(8), noise=0.001)
    done = compare(results_of([machine.baseline(10)]), results_of([machine.baseline(5)]))
    assert done == Comparison([], [])
