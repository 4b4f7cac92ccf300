"""The HTML report of `qsf.bench`: what it says is what was measured, and a browser can show it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from make.bench_results import COMPARISON, full_results
from make.drawn_pages import SECTIONS, anchors, cells, section
from make.page_parser import PageParser
from qsf.bench.judge.compare import Comparison
from qsf.bench.judge.results import Breakdown, Limits, Results, spread_of
from qsf.bench.show.page import page
from qsf.bench.show.report import changes_of, parts_of

HOSTILE = '<b onclick="x">&\'\u202e\x1b]0;</title></script><script>'


@pytest.fixture(scope="module")
def full() -> Results:
    return full_results()


@pytest.fixture(scope="module")
def full_page(full: Results) -> str:
    return page(full, COMPARISON)


# ---- the page as a whole ----


def test_the_page_needs_nothing_else(full_page: str) -> None:
    PageParser().check_needs_nothing(full_page)


def test_every_section_is_there_once_and_in_order(full: Results, full_page: str) -> None:
    assert anchors(full_page) == list(SECTIONS)
    parser = PageParser().read(full_page)
    ids = [attrs["id"] for _, attrs in parser.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert "1.1B-4bit.qsf, 1.1B-2bit.qsf" in parser.texts
    line = "Example CPU @ 2.80 GHz, 2 cores, 8.32 GB of memory, amx, 0.3.36, 2025-01-02"
    assert line in parser.texts
    made = page(replace(full, settings={"weights": "random"}))
    assert "<h1>1.1B, 4bit and 2bit (random weights)</h1>" in made
    assert anchors(page(Results({}, Limits(), [], []))) == []


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
        limits=Limits({HOSTILE: 1.0}, {HOSTILE: 2.0}, {HOSTILE: 3.0}),
        rows=rows,
        ratios=full.ratios,
        failures=[replace(full.failures[0], engine=HOSTILE, file=HOSTILE, what=HOSTILE,
                          why=HOSTILE)],
        notes=[HOSTILE],
        settings={HOSTILE: HOSTILE},
    )  # fmt: skip
    made = page(results, Comparison([replace(COMPARISON.changes[0], row=HOSTILE)], [HOSTILE]))
    parser = PageParser().read(made)
    names = {tag for tag, _ in parser.tags}
    assert names.isdisjoint({"b", "script"})
    assert not {name for _, attrs in parser.tags for name in attrs if name.startswith("on")}
    assert "\u202e" not in made
    assert "\x1b" not in made
    assert made.count("&lt;b onclick=") > 100


# ---- what is said is what was measured ----


def test_the_tables_are_those_of_the_terminal(full: Results, full_page: str) -> None:
    parts = [*parts_of(full), *changes_of(COMPARISON)]
    for part in parts:
        if part.anchor == "time":
            continue
        shown = section(full_page, part.anchor)
        is_one = sum(other.anchor == part.anchor for other in parts) == 1
        table = shown if is_one else shown[shown.index(f"<h3>{part.title}</h3>") :]
        if part.rows:
            assert [tuple(row.values()) for row in cells(table)] == [*map(tuple, part.rows)]
        assert all(line in shown for line in part.lines)
    method = section(full_page, "method")
    for said in ("0123abc", "QSF 0.1.0, llama.cpp 0.3.36", "--threads 1,2", "ctx_tokens"):
        assert said in method


def test_more_than_a_limit_is_never_claimed(full: Results) -> None:
    rows = [replace(row, fraction_of_limit=1.07, limited_by="disk") for row in full.rows]
    made = page(replace(full, rows=rows))
    assert "107 %" not in made
    assert {row["of limit"] for row in cells(section(made, "rows"))} == {"cached"}


# ---- where the time goes ----


def test_bars_are_the_parts_of_a_token(full: Results, full_page: str) -> None:
    timed = [row for row in full.rows if row.breakdown and row.test == "tg128"]
    shown = section(full_page, "time")
    stacks = re.findall(r'<svg class="stack".*?</svg>', shown, re.DOTALL)
    assert len(stacks) == len(timed) == 17
    for row, stack in zip(timed, stacks, strict=True):
        known = row.breakdown
        assert known is not None
        pieces = re.findall(r'x="([\d.]+)" width="([\d.]+)" height="10"><title>(.*?):', stack)
        assert float(pieces[0][0]) == 0
        assert float(pieces[-1][0]) + float(pieces[-1][1]) == pytest.approx(100, abs=0.01)
        total = sum(max(0.0, part.median) for part in known.parts.values())
        width = {name: float(width) for _, width, name in pieces}
        for name in ("qkv", "wait", "other", "python"):
            if name in known.parts and known.parts[name].median > 0:
                share = 100 * known.parts[name].median / total
                assert width[name] == pytest.approx(share, abs=0.01)
        assert len(pieces) == sum(part.median > 0 for part in known.parts.values())
    assert shown.count("Meanwhile on other threads: read ") == 8
    keys = re.findall(r'<i class="p(\d+)"></i>(.*?)</li>', shown)
    assert len({colour for colour, _ in keys}) == len(keys) == 13
    for colour, name in keys:
        titled = re.findall(rf'<rect class="p(\d+)"[^>]*><title>{re.escape(name)}:', shown)
        assert set(titled) == {colour}
