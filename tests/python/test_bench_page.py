"""The HTML report of `qsf.bench`: what it says is what was measured, and a browser can show it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_results import full_results
from page_parser import PageParser

from qsf.bench.page import Change, page, write_page
from qsf.bench.page_plots import Look
from qsf.bench.plots import Axis, Point, Series, figure, plot, tick_texts
from qsf.bench.results import Breakdown, Limits, Ratio, Results, Row, Spread, spread_of
from qsf.errors import QsfArgumentError

SECTIONS = (
    *("notes", "changes", "limits", "bits", "memory", "depth", "time", "roofline", "quality"),
    *("ratios", "rows", "failed", "method"),
)
CHANGES = (
    Change("qsf, 4bit, tg128, 2 threads", "33.1 tok/s", "34.2 tok/s", "+3.4 %", "faster"),
    Change("qsf, 2bit, tg128, 2 threads", "43.5 tok/s", "43.7 tok/s", "+0.3 %", "same"),
)
HOSTILE = '<b onclick="x">&\'\u202e\x1b]0;</title></script><script>'


@pytest.fixture(scope="module")
def full() -> Results:
    return full_results()


@pytest.fixture(scope="module")
def full_page(full: Results) -> str:
    return page(full, CHANGES, ["Measured on another day."])


def section(page: str, anchor: str) -> str:
    """The section of an id; nothing when it is not there."""
    found = re.search(rf'<section id="{anchor}".*?</section>', page, re.DOTALL)
    return found[0] if found else ""


def anchors(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


def svgs(text: str) -> list[ElementTree.Element]:
    """The plots in a part of the page; HTML escapes as XML does."""
    found = re.findall(r'<svg class="plot".*?</svg>', text, re.DOTALL)
    return [ElementTree.fromstring(one) for one in found]


def cells(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a part of the page, by the names of columns."""
    table = re.search(r"<table>.*?</table>", text, re.DOTALL)
    assert table
    heads, *rows = re.findall(r"<tr>(.*?)</tr>", table[0], re.DOTALL)
    names = re.findall(r"<th[^>]*>(.*?)</th>", heads)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    assert all(len(row) == len(names) for row in found)
    return [dict(zip(names, map(html.unescape, row), strict=True)) for row in found]


def number(text: str) -> float:
    found = re.match(r"-?[\d,]*\.?\d+(e[+-]?\d+)?", text)
    assert found, text
    return float(found[0].replace(",", ""))


class Drawn:
    """A plot as a reader sees it: points and bars turned to values by the ticks of its axes."""

    def __init__(self, svg: ElementTree.Element) -> None:
        self.points: list[tuple[float, float, str]] = []  # x and y in pixels, and the title
        self.texts = svg.findall("text")
        self.errors = [self.bar(one) for one in svg.findall("path") if self.is_of(one, "err")]
        self.roofs = [
            [float(n) for n in re.findall(r"-?[\d.]+", one.get("d", ""))]
            for one in svg.findall("path") if self.is_of(one, "roof")
        ]  # fmt: skip
        for group in svg.findall("g"):
            place = re.fullmatch(r"translate\(([\d.-]+) ([\d.-]+)\)", group.get("transform", ""))
            title = group.find("title")
            assert place
            assert title is not None
            self.points.append((float(place[1]), float(place[2]), title.text or ""))
        titles = [one.text or "" for one in self.texts]
        self.is_log_x = any("log scale" in t for t in titles[1:] if not t[0].isdigit())
        self.is_log_y = "log scale" in titles[0]
        self.y_title = titles[0]
        # The marks of the axes: where the line of a tick is, and what is written there.
        self.y_ticks = self.ticks("end", "y", 4)
        self.x_ticks = self.ticks("middle", "x", 0)

    @staticmethod
    def is_of(one: ElementTree.Element, kind: str) -> bool:
        return kind in one.get("class", "").split()

    @staticmethod
    def bar(one: ElementTree.Element) -> tuple[float, float, float]:
        found = re.match(r"M([\d.-]+) ([\d.-]+)V([\d.-]+)M", one.get("d", ""))
        assert found
        return float(found[1]), float(found[2]), float(found[3])

    def ticks(self, anchor: str, axis: str, offset: float) -> list[tuple[float, float]]:
        return [
            (float(one.get(axis, "")) - offset, number(one.text or ""))
            for one in self.texts
            if one.get("text-anchor") == anchor and re.fullmatch(r"[\d.,e+-]+", one.text or "")
        ]

    def value(self, pixel: float, *, of_y: bool) -> float:
        """What the axis says of a place, by its first and last tick."""
        ticks = self.y_ticks if of_y else self.x_ticks
        (p0, v0), (p1, v1) = ticks[0], ticks[-1]
        share = (pixel - p0) / (p1 - p0)
        if self.is_log_y if of_y else self.is_log_x:
            return v0 * math.exp(share * math.log(v1 / v0))
        return v0 + share * (v1 - v0)


def drawn(page: str, anchor: str) -> list[Drawn]:
    return [Drawn(svg) for svg in svgs(section(page, anchor))]


def row_of(results: Results, title: str) -> Row:
    return next(row for row in results.rows if title.startswith(row.label + ": "))


# ---- the page as a whole ----


def test_the_page_needs_nothing_else(full_page: str) -> None:
    parser = PageParser().read(full_page)
    names = {tag for tag, _ in parser.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form"})
    for word in ("http:", "https:", "//", "url(", "@import", "javascript:", "data:"):
        assert word not in full_page
    attributes = {name for _, attrs in parser.tags for name in attrs}
    assert attributes.isdisjoint({"src", "href", "srcset", "action", "background"})
    assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for t, a in parser.tags if t == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_section_is_there_once_and_in_order(full_page: str) -> None:
    assert anchors(full_page) == list(SECTIONS)
    parser = PageParser().read(full_page)
    ids = [attrs["id"] for _, attrs in parser.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert "1.1B: QSF and llama.cpp" in parser.texts
    line = "Example CPU @ 2.80 GHz, 2 cores, 8,323 MB of memory, amx, 2025-01-02"
    assert line in parser.texts


def test_names_of_a_file_cannot_do_harm(full: Results) -> None:
    rows = [
        replace(row, engine=HOSTILE, shape=HOSTILE, type=HOSTILE, test=f"tg{HOSTILE}{idx}",
                limited_by=HOSTILE, kv_type=HOSTILE, io=HOSTILE, file=HOSTILE, version=HOSTILE,
                kernels=HOSTILE, breakdown=Breakdown(1.0, {HOSTILE: spread_of([1.0])},
                                                     {HOSTILE: spread_of([1.0])}))
        for idx, row in enumerate(full.rows)
    ]  # fmt: skip
    rows += [replace(row, test=row.test, type=HOSTILE) for row in full.rows]
    results = Results(
        machine={HOSTILE: HOSTILE, "cpu": HOSTILE, "x": {HOSTILE: [HOSTILE, {HOSTILE: 1}]}},
        limits=Limits({HOSTILE: 1.0, "2": 3.0}, {HOSTILE: 2.0}, {HOSTILE: 3.0, "2": 9.0}),
        rows=rows,
        ratios=full.ratios,
        failures=[replace(full.failures[0], engine=HOSTILE, file=HOSTILE, what=HOSTILE,
                          why=HOSTILE)],
        notes=[HOSTILE],
        settings={HOSTILE: HOSTILE},
    )  # fmt: skip
    made = page(results, [Change(*[HOSTILE] * 5)], [HOSTILE])
    parser = PageParser().read(made)
    names = {tag for tag, _ in parser.tags}
    assert names.isdisjoint({"b", "script"})
    assert not {name for _, attrs in parser.tags for name in attrs if name.startswith("on")}
    assert "\u202e" not in made
    assert "\x1b" not in made
    assert made.count("&lt;b onclick=") > 100


def test_nothing_measured_is_a_page_too() -> None:
    made = page(Results({}, Limits(), [], []))
    PageParser().read(made)
    assert anchors(made) == []


def test_the_file_is_the_page(full: Results, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(full, path, overwrite=False)
    assert path.read_text("utf-8") == page(full)
    with pytest.raises(QsfArgumentError, match="exists"):
        write_page(full, path, overwrite=False)
    write_page(full, path, overwrite=True, changes=CHANGES, change_notes=["x"])
    assert path.read_text("utf-8") == page(full, CHANGES, ["x"])


# ---- what is said is what was measured ----


def test_the_table_has_every_row(full: Results, full_page: str) -> None:
    table = cells(section(full_page, "rows"))
    assert len(table) == len(full.rows)
    for row, said in zip(full.rows, table, strict=True):
        assert said["Type"] == row.type
        assert said["Engine"] == {"qsf": "QSF"}.get(row.engine, row.engine)
        assert said["Test"] == row.test
        assert said["Depth"] == (f"{row.depth:,}" if row.depth else "")
        assert said["Threads"] == str(row.threads)
        assert said["Budget, MB"] == ("" if row.budget_mb is None else str(row.budget_mb))
        assert said["Cgroup, MB"] == ("" if row.cap is None else str(row.cap.limit_mb))
        assert row.quality is not None
        for name, value in (
            ("tok/s", row.tok_per_s.median),
            ("least", row.tok_per_s.min),
            ("most", row.tok_per_s.max),
            ("limit, tok/s", row.limit_tok_per_s),
            ("GB/s", row.gb_per_s),
            ("Perplexity", row.quality.perplexity),
            ("KL", row.quality.mean_kl),
            ("Peak memory", row.peak_rss_bytes / 1e6),
            ("Bits a weight", row.bits_per_weight),
        ):
            assert number(said[name]) == pytest.approx(value, rel=6e-3), name
        assert row.fraction_of_limit is not None
        assert number(said["of the limit"]) == pytest.approx(100 * row.fraction_of_limit, abs=0.51)
        assert said["limited by"] == row.limited_by


def test_columns_that_nothing_is_known_of_are_left_out(full: Results) -> None:
    row = replace(full.rows[0], quality=None, cap=None, kernels="", load_seconds=None)
    names = set(cells(section(page(replace(full, rows=[row], ratios=[])), "rows"))[0])
    assert names.isdisjoint({"Perplexity", "KL", "Same choice", "Cgroup, MB", "Budget, MB"})
    assert names.isdisjoint({"Kernels", "Loaded in, s", "Depth"})
    assert {"Type", "tok/s", "Peak memory"} <= names


def test_headline_ratios_are_plain_ones_of_the_most_threads(full: Results, full_page: str) -> None:
    figures = re.search(r'<dl class="figures">.*?</dl>', full_page, re.DOTALL)
    assert figures
    said = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", figures[0])
    plain = [
        r for r in full.ratios
        if (row := full.rows[r.row]).threads == 2 and row.depth == 0 and row.cap is None
    ]  # fmt: skip
    plain.sort(key=lambda ratio: full.rows[ratio.row].test, reverse=True)  # tg, then pp
    assert len(plain) == 4
    for ratio, (name, value, more) in zip(plain, said, strict=False):
        row = full.rows[ratio.row]
        assert name == f"{'Generating' if row.test == 'tg128' else 'Reading a prompt'}, 2 threads"
        assert number(value) == pytest.approx(ratio.median, rel=6e-3)
        assert f"QSF {row.type} against llama.cpp {full.rows[ratio.vs].type}, {row.test}" in more
        assert f"faster in every round, {figure(ratio.min)} to {figure(ratio.max)}" in more
        assert more.endswith("in 5 rounds")
    assert [name for name, _, _ in said[4:]] == ["Of what the machine allows", "Least memory"]
    own = [row for row in full.rows if row.engine == "qsf" and row.test == "tg128"]
    best = max(row.fraction_of_limit or 0 for row in own)
    assert number(said[4][1]) == pytest.approx(100 * best, abs=0.51)
    least = min(row.peak_rss_bytes for row in own if row.budget_mb or row.cap)
    assert number(said[5][1]) == pytest.approx(least / 1e6, rel=6e-3)


@pytest.mark.parametrize(
    ("values", "said", "colour"),
    [
        ([0.5, 0.6, 0.7], "slower in every round", "c1"),
        ([0.9, 1.0, 1.2], "not told apart by the rounds", "c5"),
        ([1.01, 1.2, 1.3], "faster in every round", "c0"),
    ],
)
def test_a_ratio_is_called_what_all_rounds_say(
    full: Results, values: list[float], said: str, colour: str
) -> None:
    spread = spread_of(values)
    ratio = replace(
        full.ratios[0], median=spread.median, min=spread.min, max=spread.max, values=values
    )
    made = page(replace(full, ratios=[ratio]))
    assert said in made
    bar = re.search(r'<svg class="range".*?</svg>', section(made, "ratios"), re.DOTALL)
    assert bar
    found = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="\d" width="([\d.]+)"', bar[0])
    assert {one[0] for one in found} == {colour}
    _, low, width = found[1]
    ends = [float(low), float(low) + float(width)]
    middle = float(found[2][1]) + 0.5
    assert ends[0] <= middle <= ends[1]
    for place, value in zip((*ends, middle), (spread.min, spread.max, spread.median), strict=True):
        assert (place > 50) == (value > 1) or value == 1
    scale = [(p - 50) / math.log(v) for p, v in zip(ends, (spread.min, spread.max), strict=True)]
    assert scale[0] == pytest.approx(scale[1], rel=0.05)


def test_limits_are_those_of_the_json(full: Results, full_page: str) -> None:
    shown = section(full_page, "limits")
    said = re.findall(r'<dt>(.*?)</dt>.*?<dd class="v">([\d.,]+) ', shown, re.DOTALL)
    expected = [
        *((f"{n} thread{'s' if n != '1' else ''}", v) for n, v in
          full.limits.memory_gb_per_s.items()),
        *full.limits.disk_gb_per_s.items(),
        *((f"{n} thread{'s' if n != '1' else ''}", v) for n, v in
          full.limits.gmadds_per_s.items()),
    ]  # fmt: skip
    assert [name for name, _ in said] == [name for name, _ in expected]
    for (_, shown_value), (_, value) in zip(said, expected, strict=True):
        assert number(shown_value) == pytest.approx(value, rel=6e-3)


def test_failures_notes_and_settings_are_said(full: Results, full_page: str) -> None:
    (failed,) = cells(section(full_page, "failed"))
    assert failed["Why"] == full.failures[0].why
    assert failed["Times"] == "3"
    for note in full.notes:
        assert note in section(full_page, "notes")
    method = section(full_page, "method")
    for said in ("0123abc", "QSF 0.1.0, llama.cpp 0.3.36", "--threads 1,2", "plan: ctx tokens"):
        assert said in method
    assert "<dt>warm up</dt><dd>yes</dd>" in method


def test_a_comparison_is_shown(full: Results, full_page: str) -> None:
    table = cells(section(full_page, "changes"))
    assert [tuple(row.values()) for row in table] == [tuple(change) for change in CHANGES]
    assert "Measured on another day." in section(full_page, "changes")
    assert section(page(full), "changes") == ""


# ---- plots ----

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
    def titles(anchor: str) -> set[str]:
        return {p[2].split(": ")[0] for one in drawn(full_page, anchor) for p in one.points}

    plain = {row.label for row in full.rows if row.budget_mb is None and row.cap is None}
    limited = {row.label for row in full.rows} - plain
    shallow = {label for label in plain if "@" not in label}
    assert len(shallow) == 16
    assert titles("bits") == titles("quality") == titles("roofline") == shallow
    assert titles("depth") == plain
    assert titles("memory") == limited


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
    gone = {*SECTIONS, "time"} - set(anchors(made)) - {"changes", "ratios"}
    assert gone == absent


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


def test_labels_cover_neither_each_other_nor_points(full_page: str) -> None:
    n_labels = 0
    for one in drawn(full_page, "bits") + drawn(full_page, "quality"):
        boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in one.points]
        for text in one.texts:
            if not one.is_of(text, "lo"):
                continue
            n_labels += 1
            half = 3.6 * len(text.text or "")
            x, y = float(text.get("x", "")), float(text.get("y", ""))
            box = (x - half, y - 11, x + half, y + 2)
            for other in boxes:
                apart = box[2] <= other[0] or other[2] <= box[0]
                assert apart or box[3] <= other[1] + 0.1 or other[3] <= box[1] + 0.1
            boxes.append(box)
    assert n_labels == 16


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


# ---- where the time goes ----


def test_bars_are_the_parts_of_a_token(full: Results, full_page: str) -> None:
    timed = [row for row in full.rows if row.breakdown and row.test == "tg128"]
    shown = section(full_page, "time")
    stacks = re.findall(r'<svg class="stack".*?</svg>', shown, re.DOTALL)
    table = cells(shown)
    assert len(stacks) == len(table) == len(timed) == 17
    names = list(table[0])[2:]
    words = {"qkv": "Q, K, V", "wait": "waiting for the disk", "other": "the rest"}
    assert set(words.values()) <= set(names)
    for row, stack, said in zip(timed, stacks, table, strict=True):
        known = row.breakdown
        assert known is not None
        pieces = re.findall(r'x="([\d.]+)" width="([\d.]+)" height="10"><title>(.*?):', stack)
        assert number(said["all"]) == pytest.approx(known.wall_ms, abs=0.006)
        assert float(pieces[0][0]) == 0
        assert float(pieces[-1][0]) + float(pieces[-1][1]) == pytest.approx(100, abs=0.01)
        total = sum(max(0.0, part.median) for part in known.parts.values())
        width = {name: float(width) for _, width, name in pieces}
        for name, word in words.items():
            if name in known.parts and known.parts[name].median > 0:
                share = 100 * known.parts[name].median / total
                assert width[word] == pytest.approx(share, abs=0.01)
                assert number(said[word]) == pytest.approx(known.parts[name].median, abs=0.006)
        assert len(pieces) == sum(part.median > 0 for part in known.parts.values())
        if known.beside:
            reading = known.beside["read"].median
            assert number(said["beside: reading"]) == pytest.approx(reading, abs=0.006)
        else:
            assert said["beside: reading"] == ""
    assert shown.count("Meanwhile on other threads: reading") == 8


def test_colours_of_the_parts_are_told_apart(full_page: str) -> None:
    shown = section(full_page, "time")
    keys = re.findall(r'<i class="p(\d+)"></i>(.*?)</li>', shown)
    assert len({colour for colour, _ in keys}) == len(keys) == 13
    for colour, name in keys:
        titled = re.findall(rf'<rect class="p(\d+)"[^>]*><title>{re.escape(name)}:', shown)
        assert set(titled) == {colour}
        assert full_page.count(f"--p{colour}:") == 2  # light and dark
        assert f".p{colour}{{" in full_page


# ---- numbers that no run gives ----


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1e308, 1e-12, 1e16])
@pytest.mark.parametrize("which", ["speed", "bits", "madds", "bytes", "limits", "parts", "ratios"])
def test_any_number_is_survived(full: Results, which: str, value: float) -> None:
    rows, limits, ratios = list(full.rows), full.limits, list(full.ratios)
    for idx in range(0, len(rows), 3):
        row = rows[idx]
        if which == "speed":
            rows[idx] = replace(row, tok_per_s=Spread(value, -value, value))
        elif which == "bits":
            rows[idx] = replace(row, bits_per_weight=value, fraction_of_limit=value)
        elif which == "madds":
            rows[idx] = replace(row, madds_per_token=value, gb_per_s=value)
        elif which == "bytes":
            rows[idx] = replace(row, bytes_per_token=int(min(value, 2**62)), peak_rss_bytes=2**62)
        elif which == "parts" and row.breakdown:
            parts = {name: Spread(value, value, value) for name in row.breakdown.parts}
            rows[idx] = replace(row, breakdown=Breakdown(value, parts, parts))
    if which == "limits":
        limits = Limits({"2": value}, {"direct x1": value}, {"2": value})
    if which == "ratios":
        ratios = [Ratio(0, 1, value, -value, value), Ratio(0, 1, value, value, value), *ratios]
    made = page(replace(full, rows=rows, limits=limits, ratios=ratios))
    PageParser().read(made)
    for svg in re.findall(r"<svg.*?</svg>", made, re.DOTALL):
        drawn = re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", svg)
        assert not re.search(r"\b(nan|inf)\b", drawn), drawn[:200]
        for width in re.findall(r'(?:width|x)="(-?[\d.e+]+)"', drawn):
            assert -10 <= float(width) <= 400
