# SPDX-License-Identifier: Apache-2.0
"""Parts of a token beside each other: a slower kernel on a machine that is slower too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from make.bench_records import Noisy, results_of
from qsf.bench.compare import Change, compare
from qsf.bench.mixture import relatives
from qsf.bench.results import Breakdown, Results, Spread, spread_of

PRODUCTS_MS = {"qkv": 2.0, "attn_out": 2.0, "gate_up": 8.0, "down": 4.0}
PARTS_MS = PRODUCTS_MS | {"head": 0.05, "attention": 3.0, "norm": 0.6, "other": 0.3}


def breakdown(**factors: float) -> Breakdown:
    """Every round is 10 % slower than the one before, in all its parts."""
    parts = {
        name: spread_of([ms * factors.get(name, 1.0) * 1.1**i for i in range(3)])
        for name, ms in PARTS_MS.items()
    }
    return Breakdown(sum(part.median for part in parts.values()), parts)


def test_what_all_parts_have_in_common_cancels_out() -> None:
    slower = breakdown(**dict.fromkeys(PARTS_MS, 1.4))
    for one in relatives(breakdown(), slower, 0.02):
        assert one.new.values == pytest.approx(one.old.values)
        assert one.old.min == pytest.approx(one.old.max)


def test_the_family_with_the_middle_change_is_the_measure() -> None:
    found = relatives(breakdown(), breakdown(gate_up=1.2), 0.02)
    assert {one.family for one in found} <= {"attention", "norms"}
    (gate_up,) = [one for one in found if one.part == "gate_up"]
    assert gate_up.new.median / gate_up.old.median == pytest.approx(1.2)
    (down,) = [one for one in found if one.part == "down"]
    assert down.new.median == pytest.approx(down.old.median)
    found = relatives(breakdown(), breakdown(attention=1.2, norm=0.9), 0.02)
    assert {(one.part, one.family) for one in found} == {
        ("attention", "products"),
        ("norm", "products"),
    }
    values = {one.part: one.new.median / one.old.median for one in found}
    assert values == pytest.approx({"attention": 1.2, "norm": 0.9})
    assert found[0].old.median == pytest.approx(3.0 / 16.0)


def test_two_families_tell_nothing() -> None:
    assert relatives(breakdown(), breakdown(), 0.05) == []
    without = breakdown()
    del without.parts["attention"]
    assert relatives(breakdown(), without, 0.02) == []


@pytest.mark.parametrize("values", [[], [1.0, 1.0], [0.0, 1.0, 1.0]])
def test_parts_without_all_rounds_are_left_out(values: list[float]) -> None:
    odd = breakdown()
    odd.parts["attention"] = Spread(3.0, 3.0, 3.0, values)
    for found in (relatives(breakdown(), odd, 0.02), relatives(odd, breakdown(), 0.02)):
        assert all(one.part != "attention" and one.family != "attention" for one in found)


def drifting(random_: random.Random, slow: dict[str, float]) -> Results:
    """A row whose rounds lie up to 40 % apart, all parts alike but for 2 %."""
    rows = []
    for _ in range(10):
        machine = Noisy(random_, n_rounds=1, noise=0.02)
        pace = 1 + 0.4 * random_.random()
        parts = {name: ms * pace * slow.get(name, 1.0) for name, ms in PARTS_MS.items()}
        rows.append(machine.row(1000 / sum(parts.values()), parts))
    first = rows[0]
    assert first.breakdown is not None
    parts_of = {
        name: spread_of([row.breakdown.parts[name].median for row in rows if row.breakdown])
        for name in PARTS_MS
    }
    wall_ms = spread_of([row.breakdown.wall_ms for row in rows if row.breakdown]).median
    speed = spread_of([row.tok_per_s.median for row in rows])
    return results_of([replace(first, tok_per_s=speed, breakdown=Breakdown(wall_ms, parts_of))])


def slower(old: Results, new: Results) -> list[Change]:
    return [change for change in compare(old, new).changes if change.verdict == "slower"]


def test_ten_percent_are_seen_where_rounds_lie_forty_apart() -> None:
    chosen = random.Random(31)
    n_seen = n_false = 0
    for _ in range(40):
        old = drifting(chosen, {})
        found = slower(old, drifting(chosen, {"attention": 1.1}))
        n_seen += any(change.what.startswith("attention beside") for change in found)
        n_false += bool(slower(old, drifting(chosen, {})))
    assert n_seen >= 38
    assert n_false <= 2
