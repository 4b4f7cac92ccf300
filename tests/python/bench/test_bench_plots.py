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
from make.drawn_pages import Drawn, anchors, drawn, row_of, section, svgs
from make.page_parser import PageParser
from qsf.bench.page import page
from qsf.bench.page_plots import Look
from qsf.bench.plots import Axis, Point, Series, figure, plot, tick_texts
from qsf.bench.results import Results, Row, spread_of

# Not of all pages: a comparison, and ratios where there is no peer.
SECTIONS = {
    *("notes", "limits", "bits", "memory", "depth", "time", "roofline", "quality"),
    *("rows", "failed", "method"),
}


@pytest.fixture(scope="module")
def full() -> Results:
    return full_results()


@pytest.fixture(scope="module")
def full_page(full: Results) -> str:
    return page(full)


PLOTTED = ("bits", "memory", "depth", "roofline", "quality")


def x_of(anchor: str) -> Callable[[Row], float]:
    def cap(row: Row) -> float:
        return float(row.cap.limit_mb if row.cap else row.budget_mb or 0)

    def roof(row: Row) -> float:
        n_tokens = 512 if row.test == "pp512" else 1
        return (row.madds_per_token or 0) * n_tokens / (row.bytes_per_token or 1)

    return {
        "bits": lambda row: row.bits_per_weight,
        "memory": cap,
        "depth": lambda row: float(row.depth),
        "roofline": roof,
        "quality": lambda row: row.quality.perplexity if row.quality else 0.0,
    }[anchor]


@pytest.mark.parametrize("anchor", PLOTTED)
def test_points_are_where_the_axes_say(full: Results, full_page: str, anchor: str) -> None:
    plots = drawn(full_page, anchor)
    assert len(plots) == (1 if anchor == "roofline" else 2)
    for one in plots:
        assert len(one.points) >= 5
        assert one.is_log_x == (anchor in ("memory", "roofline"))
        assert one.is_log_y == (anchor == "roofline")
        assert ("multiply-adds/s" if anchor == "roofline" else "tok/s") in one.y_title
        spans = [abs(ticks[0][0] - ticks[-1][0]) for ticks in (one.x_ticks, one.y_ticks)]
        assert min(spans) > 80
        for x, y, title in one.points:
            row = row_of(full, title)
            scale = (row.madds_per_token or 0) / 1e9 if anchor == "roofline" else 1.0
            near: dict[str, Any] = {"rel": 0.02, "abs": 0.006 * one.y_ticks[-1][1]}
            if one.is_log_y:
                near = {"rel": 0.03}
            height = row.tok_per_s.median * scale
            assert one.value(y, of_y=True) == pytest.approx(height, **near)
            near_x: dict[str, Any] = {"rel": 0.04, "abs": 15 if anchor == "depth" else 0.0}
            assert one.value(x, of_y=False) == pytest.approx(x_of(anchor)(row), **near_x)


@pytest.mark.parametrize("anchor", PLOTTED)
def test_more_is_higher_and_further_right(full: Results, full_page: str, anchor: str) -> None:
    for one in drawn(full_page, anchor):
        rows = [(row_of(full, title), x, y) for x, y, title in one.points]
        for row, x, y in rows:
            for other, other_x, other_y in rows:
                if row.tok_per_s.median > other.tok_per_s.median:
                    assert y <= other_y  # pixels count downwards
                if x_of(anchor)(row) > x_of(anchor)(other):
                    assert x >= other_x


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
                (row.tok_per_s.min * scale, row.tok_per_s.max * scale)
                for row in (row_of(full, p[2]) for p in inside)
                for scale in [(row.madds_per_token or 0) / 1e9 if anchor == "roofline" else 1.0]
            ]
            tolerance: dict[str, Any] = (
                {"rel": 0.03} if one.is_log_y else {"abs": 0.006 * one.y_ticks[-1][1]}
            )
            assert any(ends == pytest.approx(fit, **tolerance) for fit in fits)
    assert n_bars >= 2


def test_every_row_that_fits_a_plot_is_in_it(full: Results, full_page: str) -> None:
    def titles(anchor: str) -> list[str]:
        return sorted(p[2].split(": ")[0] for one in drawn(full_page, anchor) for p in one.points)

    plain = [row for row in full.rows if row.budget_mb is None and row.cap is None]
    limited = [row for row in full.rows if row not in plain]
    shallow = sorted(row.label for row in plain if row.depth == 0)
    assert len(shallow) == 16
    assert titles("bits") == titles("quality") == titles("roofline") == shallow
    assert titles("depth") == sorted(row.label for row in plain)
    assert titles("memory") == sorted(row.label for row in limited)


def test_no_point_is_above_the_roof(full: Results, full_page: str) -> None:
    (one,) = drawn(full_page, "roofline")
    (x0, y0, x1, y1), (x2, y2, x3, y3) = one.roofs
    assert (x1, y1) == (x2, y2)
    assert y2 == y3
    ridge = full.limits.gmadds_per_s["2"] / full.limits.memory_gb_per_s["2"]
    assert one.value(x1, of_y=False) == pytest.approx(ridge, rel=0.03)
    assert one.value(y1, of_y=True) == pytest.approx(full.limits.gmadds_per_s["2"], rel=0.03)
    slope = one.value(y0, of_y=True) / one.value(x0, of_y=False)
    assert slope == pytest.approx(full.limits.memory_gb_per_s["2"], rel=0.03)
    for x, y, _ in one.points:
        assert x0 <= x <= x3
        assert y >= min(y1, y0 + (y1 - y0) * (x - x0) / (x1 - x0)) if x < x1 else y >= y3
    assert "Disk" not in [text.text for text in one.texts]


def test_the_disk_is_a_roof_where_it_limits_a_point(full: Results) -> None:
    rows = [replace(row, limited_by="disk") for row in full.rows]
    (one,) = drawn(page(replace(full, rows=rows)), "roofline")
    assert len(one.roofs) == 3
    x0, y0, _, _ = one.roofs[2]
    slope = one.value(y0, of_y=True) / one.value(x0, of_y=False)
    assert slope == pytest.approx(2.93, rel=0.03)
    assert "disk, 2.93 GB/s" in [text.text for text in one.texts]


def test_a_wide_spread_of_speeds_has_a_logarithmic_axis(full: Results) -> None:
    rows = [
        replace(row, tok_per_s=spread_of([row.tok_per_s.median / 50]))
        if row.engine == "llama.cpp" else row
        for row in full.rows
    ]  # fmt: skip
    results = replace(full, rows=rows)
    for one in drawn(page(results), "bits"):
        assert one.is_log_y
        for _, y, title in one.points:
            speed = row_of(results, title).tok_per_s.median
            assert one.value(y, of_y=True) == pytest.approx(speed, rel=0.04)


def only(full: Results, keep: Callable[[Row], bool]) -> Results:
    return replace(full, rows=[row for row in full.rows if keep(row)], ratios=[])


@pytest.mark.parametrize(
    ("keep", "absent"),
    [
        (lambda row: row.type == "4bit", {"bits", "quality"}),
        (lambda row: row.depth == 0, {"depth"}),
        (lambda row: row.budget_mb in (None, 200) and row.cap is None, {"memory"}),
        (lambda row: row.engine == "llama.cpp", {"time"}),
        (lambda row: row.test == "pp512", {"time", "memory"}),
    ],
)
def test_a_plot_without_two_places_across_is_left_out(
    full: Results, keep: Callable[[Row], bool], absent: set[str]
) -> None:
    made = page(only(full, keep))
    PageParser().read(made)
    assert SECTIONS - set(anchors(made)) == absent


def test_one_row_has_no_plot(full: Results) -> None:
    made = page(only(full, lambda row: row is full.rows[0]))
    assert svgs(made) == []
    assert "rows" in anchors(made)


@pytest.mark.parametrize("missing", ["memory_gb_per_s", "gmadds_per_s"])
def test_without_a_limit_there_is_no_roofline(full: Results, missing: str) -> None:
    limits = replace(full.limits, **{missing: {}})
    assert "roofline" not in anchors(page(replace(full, limits=limits)))


def test_several_shapes_have_plots_of_their_own(full: Results) -> None:
    rows = full.rows + [replace(row, shape="3B") for row in full.rows]
    made = section(page(replace(full, rows=rows)), "bits")
    assert len(svgs(made)) == 4
    heads = [head.split(" <")[0] for head in re.findall(r"<h3>(.*?)</h3>", made)]
    assert heads == ["1.1B, pp512", "1.1B, tg128", "3B, pp512", "3B, tg128"]


def assert_apart(one: Drawn) -> int:
    """Labels cover neither each other nor points; returns how many there are."""
    boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in one.points]
    labels = [text for text in one.texts if one.is_of(text, "lo")]
    for text in labels:
        half = 3.6 * len(text.text or "")
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        box = (x - half, y - 11, x + half, y + 2)
        for other in boxes:
            apart = box[2] <= other[0] + 0.1 or other[2] <= box[0] + 0.1
            assert apart or box[3] <= other[1] + 0.1 or other[3] <= box[1] + 0.1
        boxes.append(box)
    return len(labels)


def test_labels_have_room(full_page: str) -> None:
    assert sum(map(assert_apart, drawn(full_page, "bits") + drawn(full_page, "quality"))) == 16


@pytest.mark.parametrize("apart", [0.0, 0.004, 0.02, 0.1])
def test_labels_without_room_are_left_out(apart: float) -> None:
    points = [Point(1 + idx * apart, 5 + idx * apart, 5, 6, "a", "Q4_K_M") for idx in range(9)]
    points.append(Point(2.0, 1.0, 1.0, 1.0, "b", "far"))
    svg = plot("x", [Series(0, 0, points)], Axis("x"), Axis("y", from_zero=True))
    n_labels = assert_apart(Drawn(ElementTree.fromstring(svg)))
    assert 2 <= n_labels < len(points)


def test_engines_and_types_have_colours_of_their_own(full: Results) -> None:
    look = Look.of(full.rows)
    assert look.colours["qsf", "4bit"] == look.of_engine("qsf") == 0
    assert look.colours["llama.cpp", "Q4_K_M"] == look.of_engine("llama.cpp") == 1
    assert len(set(look.colours.values())) == 4
    assert look.markers == {1: 0, 2: 1}


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
    svg = plot("x", [Series(0, 0, points)], Axis("x", is_log=is_log),
               Axis("y", is_log=is_log, from_zero=not is_log))  # fmt: skip
    one = Drawn(ElementTree.fromstring(svg))
    assert 2 <= len(one.y_ticks) <= 11
    assert len(one.x_ticks) >= 2
    assert all(20 <= pixel <= 230 for pixel, _ in one.y_ticks)
    assert all(0 <= pixel <= 360 for pixel, _ in one.x_ticks)
