"""The HTML report of `qsf.bench`: what it says is what was measured, and a browser can show it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from make.bench_results import full_results
from make.drawn_pages import anchors, cells, number, section
from make.page_parser import PageParser
from qsf.bench.judge.compare import Change, Comparison
from qsf.bench.judge.results import Breakdown, Limits, Results, spread_of
from qsf.bench.show.page import page, write_page
from qsf.errors import QsfArgumentError
from qsf.page.plots import figure

SECTIONS = (
    *("failed", "changes", "ratios", "bits", "memory", "cgroup", "depth"),
    *("time", "rows", "limits", "notes", "method"),
)
CHANGES = [Change("1.1B, qsf, 4bit", 33.1, 34.2, 0.034, 0.03, "faster", is_relative=True)]
COMPARISON = Comparison(CHANGES, ["Measured on another day."])
HOSTILE = '<b onclick="x">&\'\u202e\x1b]0;</title></script><script>'


@pytest.fixture(scope="module")
def full() -> Results:
    return full_results()


@pytest.fixture(scope="module")
def full_page(full: Results) -> str:
    return page(full, COMPARISON)


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
    assert "1.1B-4bit.qsf, 1.1B-2bit.qsf" in parser.texts
    line = "Example CPU @ 2.80 GHz, 2 cores, 8.32 GB of memory, amx, 0.3.36, 2025-01-02"
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
        limits=Limits({HOSTILE: 1.0}, {HOSTILE: 2.0}, {HOSTILE: 3.0}),
        rows=rows,
        ratios=full.ratios,
        failures=[replace(full.failures[0], engine=HOSTILE, file=HOSTILE, what=HOSTILE,
                          why=HOSTILE)],
        notes=[HOSTILE],
        settings={HOSTILE: HOSTILE},
    )  # fmt: skip
    made = page(results, Comparison([replace(CHANGES[0], row=HOSTILE)], [HOSTILE]))
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
    write_page(full, path, COMPARISON, overwrite=True)
    assert path.read_text("utf-8") == page(full, COMPARISON)


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
        for name, value in (
            ("tok/s", row.tok_per_s.median),
            ("least", row.tok_per_s.min),
            ("most", row.tok_per_s.max),
            ("limit, tok/s", row.limit_tok_per_s),
            ("GB/s", row.gb_per_s),
            ("Peak memory", row.peak_rss_bytes / 1e6),
            ("Bits a weight", row.bits_per_weight),
        ):
            assert number(said[name]) == pytest.approx(value, rel=6e-3), name
        assert row.fraction_of_limit is not None
        assert number(said["of the limit"]) == pytest.approx(100 * row.fraction_of_limit, abs=0.51)
        assert said["limited by"] == row.limited_by


def test_columns_that_nothing_is_known_of_are_left_out(full: Results) -> None:
    row = replace(full.rows[0], cap=None, kernels="", load_seconds=None)
    names = set(cells(section(page(replace(full, rows=[row], ratios=[])), "rows"))[0])
    assert names.isdisjoint({"Kernels", "Loaded in, s", "Cgroup, MB", "Budget, MB"})
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
        other = full.rows[ratio.vs]
        speeds = [figure(one.tok_per_s.median) for one in (row, other)]
        assert more.startswith(f"{row.test}: QSF {row.type} {speeds[0]} tok/s, ")
        assert f"llama.cpp {other.type} {speeds[1]} tok/s; " in more
        assert more.endswith("; faster in every round")
    assert len(said) == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5, 0.6, 0.7], "slower in every round"),
        ([0.9, 1.1, 1.2], "not told apart by the rounds"),
        ([1.01, 1.2, 1.3], "faster in every round"),
    ],
)
def test_a_ratio_is_called_what_all_rounds_say(
    full: Results, values: list[float], said: str
) -> None:
    spread = spread_of(values)
    ratio = replace(
        full.ratios[0], median=spread.median, min=spread.min, max=spread.max, values=values
    )
    (row,) = cells(section(page(replace(full, ratios=[ratio])), "ratios"))
    assert row["QSF is"] == said
    numbers = [number(row[name]) for name in ("least", "ratio", "most")]
    assert numbers == pytest.approx(values, rel=6e-3)


def test_limits_are_those_of_the_json(full: Results, full_page: str) -> None:
    said = re.findall(r"<tr>(.*?)</tr>", section(full_page, "limits"), re.DOTALL)[1:]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in said]
    expected = [
        *((f"{n} thread{'s' if n != '1' else ''}", v) for n, v in
          full.limits.memory_gb_per_s.items()),
        *full.limits.disk_gb_per_s.items(),
        *((f"{n} thread{'s' if n != '1' else ''}", v) for n, v in
          full.limits.gmadds_per_s.items()),
    ]  # fmt: skip
    assert [row[1] for row in rows] == [name for name, _ in expected]
    values = [number(row[2]) for row in rows]
    assert values == pytest.approx([value for _, value in expected], rel=6e-3)


def test_more_than_a_limit_is_never_claimed(full: Results) -> None:
    rows = [replace(row, fraction_of_limit=1.07, limited_by="disk") for row in full.rows]
    made = page(replace(full, rows=rows))
    why = "faster than the disk as it was measured: the page cache holds streamed weights"
    assert "107 %" not in made
    shown = section(made, "rows")
    assert [row["of the limit"] for row in cells(shown)] == ["cached *"] * len(rows)
    assert shown.count(why) == len(rows)


def test_random_weights_give_shape_and_types_as_title(full: Results) -> None:
    made = page(replace(full, settings={"weights": "random"}))
    assert "<h1>1.1B, 4bit and 2bit (random weights)</h1>" in made


def test_failures_notes_and_settings_are_said(full: Results, full_page: str) -> None:
    (failed,) = cells(section(full_page, "failed"))
    assert failed["Why"] == full.failures[0].why
    assert failed["Times"] == "3"
    for note in full.notes:
        assert note in section(full_page, "notes")
    method = section(full_page, "method")
    for said in ("0123abc", "QSF 0.1.0, llama.cpp 0.3.36", "--threads 1,2", "ctx_tokens"):
        assert said in method
    assert "<dt>warm up</dt><dd>true</dd>" in method


def test_a_comparison_is_shown(full: Results, full_page: str) -> None:
    table = cells(section(full_page, "changes"))
    assert [tuple(row.values()) for row in table] == [
        ("1.1B, qsf, 4bit*", "33.1", "34.2", "+3.4 %", "3.0 %", "faster")
    ]
    assert "Measured on another day." in section(full_page, "changes")
    assert section(page(full), "changes") == ""


# ---- where the time goes ----


def test_bars_are_the_parts_of_a_token(full: Results, full_page: str) -> None:
    timed = [row for row in full.rows if row.breakdown and row.test == "tg128"]
    shown = section(full_page, "time")
    stacks = re.findall(r'<svg class="stack".*?</svg>', shown, re.DOTALL)
    assert len(stacks) == len(timed) == 17
    words = {
        "qkv": "Q, K, V", "wait": "waiting for the disk",
        "other": "the rest", "python": "Python",
    }  # fmt: skip
    for row, stack in zip(timed, stacks, strict=True):
        known = row.breakdown
        assert known is not None
        pieces = re.findall(r'x="([\d.]+)" width="([\d.]+)" height="10"><title>(.*?):', stack)
        assert float(pieces[0][0]) == 0
        assert float(pieces[-1][0]) + float(pieces[-1][1]) == pytest.approx(100, abs=0.01)
        total = sum(max(0.0, part.median) for part in known.parts.values())
        width = {name: float(width) for _, width, name in pieces}
        for name, word in words.items():
            if name in known.parts and known.parts[name].median > 0:
                share = 100 * known.parts[name].median / total
                assert width[word] == pytest.approx(share, abs=0.01)
        assert len(pieces) == sum(part.median > 0 for part in known.parts.values())
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
