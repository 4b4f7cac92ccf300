"""The plots of `qsf.bench`'s page: what is drawn is what was measured, by the axes beside it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from make.bench_results import full_results
from make.drawn_pages import Drawn, anchors, drawn, row_of, section
from make.page_parser import PageParser
from qsf.bench.judge.results import Results, Row
from qsf.bench.show.page import page
from qsf.page.plots import Axis, Point, Series, figure, plot, tick_texts

# Not of all pages: a comparison, and ratios where there is no baseline.
SECTIONS = {
    *("failed", "bits", "memory", "cgroup", "depth", "time"),
    *("rows", "files", "limits", "notes", "method"),
}


@pytest.fixture(scope="module")
def full() -> Results:
    return full_results()


@pytest.fixture(scope="module")
def full_page(full: Results) -> str:
    return page(full)


PLOTTED = ("bits", "memory", "cgroup", "depth")


def x_of(anchor: str) -> Callable[[Row], float]:
    return {
        "bits": lambda row: row.bits_per_weight,
        "memory": lambda row: float(row.budget_mb or 0),
        "cgroup": lambda row: float(row.cap.limit_mb if row.cap else 0),
        "depth": lambda row: float(row.depth),
    }[anchor]


@pytest.mark.parametrize("anchor", PLOTTED)
def test_points_are_where_the_axes_say(full: Results, full_page: str, anchor: str) -> None:
    plots = drawn(full_page, anchor)
    assert len(plots) == (1 if anchor in ("memory", "cgroup") else 2)
    for one in plots:
        assert len(one.points) >= 5
        assert one.is_log_x == (anchor in ("memory", "cgroup"))
        assert one.y_title == "tok/s"
        spans = [abs(ticks[0][0] - ticks[-1][0]) for ticks in (one.x_ticks, one.y_ticks)]
        assert min(spans) > 80
        for x, y, title in one.points:
            row = row_of(full, title)
            near: dict[str, Any] = {"rel": 0.02, "abs": 0.006 * one.y_ticks[-1][1]}
            assert one.value(y, of_y=True) == pytest.approx(row.tok_per_s.median, **near)
            near_x: dict[str, Any] = {"rel": 0.04, "abs": 15 if anchor == "depth" else 0.0}
            assert one.value(x, of_y=False) == pytest.approx(x_of(anchor)(row), **near_x)


@pytest.mark.parametrize("anchor", PLOTTED)
def test_error_bars_are_the_spread_around_their_point(
    full: Results, full_page: str, anchor: str
) -> None:
    n_bars = 0
    for one in drawn(full_page, anchor):
        n_bars += len(one.errors)
        for x, top, bottom in one.errors:
            inside = [p for p in one.points if abs(p[0] - x) < 0.06 and top <= p[1] <= bottom]
            assert inside
            ends = (one.value(bottom, of_y=True), one.value(top, of_y=True))
            fits = [
                (row.tok_per_s.min, row.tok_per_s.max)
                for row in (row_of(full, p[2]) for p in inside)
            ]
            tolerance: dict[str, Any] = {"abs": 0.006 * one.y_ticks[-1][1]}
            assert any(ends == pytest.approx(fit, **tolerance) for fit in fits)
    assert n_bars >= 2


def test_every_row_that_fits_a_plot_is_in_it(full: Results, full_page: str) -> None:
    def titles(anchor: str) -> list[str]:
        return sorted(p[2].split(": ")[0] for one in drawn(full_page, anchor) for p in one.points)

    plain = [row for row in full.rows if row.budget_mb is None and row.cap is None]
    limited = [row for row in full.rows if row not in plain]
    shallow = sorted(row.label for row in plain if row.depth == 0)
    assert len(shallow) == 16
    assert titles("bits") == shallow
    assert titles("depth") == sorted(row.label for row in plain)
    assert sorted(titles("memory") + titles("cgroup")) == sorted(row.label for row in limited)


def only(full: Results, keep: Callable[[Row], bool]) -> Results:
    return replace(full, rows=[row for row in full.rows if keep(row)], ratios=[])


@pytest.mark.parametrize(
    ("keep", "absent"),
    [
        (lambda row: row.type == "4bit", {"bits"}),
        (lambda row: row.depth == 0, {"depth"}),
        (lambda row: row.budget_mb in (None, 200) and row.cap is None, {"memory", "cgroup"}),
        (lambda row: row.engine == "llama.cpp", {"time", "memory"}),
        (lambda row: row.test == "pp512", {"time", "memory", "cgroup"}),
    ],
)
def test_a_plot_without_two_places_across_is_left_out(
    full: Results, keep: Callable[[Row], bool], absent: set[str]
) -> None:
    made = page(only(full, keep))
    PageParser().read(made)
    assert SECTIONS - set(anchors(made)) == absent


def test_engines_and_types_have_colours_of_their_own(full: Results, full_page: str) -> None:
    shown = section(full_page, "depth")
    keys = re.findall(r'<path class="(c\d)" d="[^"]*"/></svg>([^<]*)</li>', shown)
    assert [name for _, name in keys] == [
        *("qsf 4bit", "qsf 2bit", "llama.cpp Q4_K_M", "llama.cpp Q2_K")
    ]
    assert len({colour for colour, _ in keys}) == 4
    of_bits = re.findall(r'class="(c\d)" d="[^"]*"/></svg>([^<]*)</li>', section(full_page, "bits"))
    assert of_bits == [("c0", "qsf"), ("c2", "llama.cpp")]


def test_a_label_that_has_no_room_is_left_out() -> None:
    points = [Point(x, 1, 1, 1, "", "name") for x in (1.0, 1.001, 1.002, 9.0)]
    points.append(Point(5, 2, 2, 2, ""))
    svg = plot("x", [Series(0, 0, points)], Axis("x"), Axis("y"))
    labels = [t for t in ElementTree.fromstring(svg).findall("text") if t.get("class") == "lo"]
    assert len(labels) == 3  # above, below, and that of the last


def test_round_numbers_are_on_axes() -> None:
    assert tick_texts([0, 0.5, 1]) == ["0.0", "0.5", "1.0"]
    assert tick_texts([0, 2000.0]) == ["0", "2,000"]
    assert tick_texts([0.5, 1, 20], is_log=True) == ["0.5", "1", "20"]
    assert [figure(v) for v in (0, 4.2, 34.21, 99.97, 1234.4, 2.5e12, 1e-7)] == [
        *("0", "4.20", "34.2", "100", "1,234", "2.5e+12", "1e-07")
    ]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1, 2), (0.3, 0.31), (5, 5000), (1e-6, 1e12), (3, 3)])
def test_ticks_are_few_and_inside(low: float, high: float, is_log: bool) -> None:
    points = [Point(low, low, low, low, "a"), Point(high * 2, high, high, high, "b")]
    svg = plot("x", [Series(0, 0, points)], Axis("x", is_log), Axis("y", is_log))
    one = Drawn(ElementTree.fromstring(svg))
    assert 2 <= len(one.y_ticks) <= 11
    assert len(one.x_ticks) >= 2
    assert all(20 <= pixel <= 230 for pixel, _ in one.y_ticks)
    assert all(0 <= pixel <= 360 for pixel, _ in one.x_ticks)
