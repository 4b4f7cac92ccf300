# SPDX-License-Identifier: Apache-2.0
"""What qsf.bench shows on a terminal, and README's tables made of its results."""

from __future__ import annotations

import html
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from make.bench_records import small_results
from qsf_bench.judge.results import Results, Row, spread_of, write
from qsf_bench.run.tasks import Cap
from qsf_bench.show.report import rate_text
from qsf_bench.show.table import as_page, as_text, report

WIDTHS = (80, 140)


def lines_of(results: Results, width: int = 80) -> list[str]:
    return as_text(report(results), width).splitlines()


def line_with(lines: list[str], *words: str) -> str:
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


def cells(line: str) -> list[str]:
    """Return what lies between two blanks or more."""
    return re.split(r"\s{2,}", line.strip())


# ---- figures ----


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (100.0, "100"), (99.94, "99.9"), (9.994, "9.99"), (0.5374, "0.537")],
)
def test_figures_have_three_digits_or_more(value: float, text: str) -> None:
    assert rate_text(value) == text


# ---- results ----


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_show_speed_limit_and_memory(width: int) -> None:
    lines = lines_of(small_results(), width)
    row = cells(line_with(lines, "qsf 4bit", "pp512", "500 (480-520)"))
    assert row[-1] == "720"
    assert "25 % arith." in row
    row = cells(line_with(lines, "qsf 4bit", "tg128", "25.0 (24.0-26.0)"))
    assert row[-3:] == ["75 % memory", "15.0", "720"]
    row = cells(line_with(lines, "qsf 4bit", "tg128", "3.00 (2.88-3.12)"))
    assert row[-3:] == ["75 % disk", "1.50", "720"]
    assert line_with(lines, "llama.cpp Q4_K_M", "10.0 (9.60-10.4)")


def test_files_limits_ratios_parts_failures_and_notes_are_shown() -> None:
    results = small_results()
    lines = lines_of(replace(results, notes=["a [note] to read"]))
    assert lines[0] == "Processor X, 2 cores, avx2 kernels"
    assert "commit abc1234" in lines[1]
    assert line_with(lines, "memory, read", "2 threads").split()[-2:] == ["20.0", "GB/s"]
    assert line_with(lines, "multiply-adds", "1 thread ").split()[-2:] == ["1,000", "10^9/s"]
    assert line_with(lines, "disk, read", "direct x4").split()[-2:] == ["2.00", "GB/s"]
    file = cells(line_with(lines, "qsf  ", "4.60"))
    assert file[:5] == ["qsf", "4bit", "4.60", "668", "4bit"]
    assert cells(line_with(lines, "4bit / llama.cpp Q4_K_M", "pp512"))[-1] == "4.00x (4.00-4.00)"
    assert (
        cells(line_with(lines, "4bit / llama.cpp Q4_K_M", "cgroup 300"))[-1] == "6.00x (6.00-6.00)"
    )
    assert cells(line_with(lines, "attention")) == ["attention", "12.000", "30 %"]
    assert cells(line_with(lines, "all of it")) == ["all of it", "40.000 100 %"]
    assert "- llama.cpp small-Q4_K_M.gguf, 2 threads: killed by signal 9" in lines
    assert "- a [note] to read" in lines


def many_rows() -> Results:
    """Return results whose cells are as wide as they get."""
    results = small_results()
    rows = [
        replace(
            row,
            engine=engine,
            type=type_name,
            depth=depth,
            threads=threads,
            tok_per_s=spread_of([12345.6, 12001.1, 12999.9]),
            peak_rss_bytes=31_234 << 20,
            cap=Cap(30000, None, 0) if threads == 64 else None,
        )
        for row in results.rows[:2]
        for engine, type_name in (("qsf", "4bit"), ("llama.cpp", "Q4_K_M"))
        for depth in (0, 16384)
        for threads in (1, 8, 64)
    ]
    return replace(results, rows=rows, ratios=[], notes=["long words " * 30, "x" * 200])


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_is_wider_than_the_terminal_or_cut_off(width: int) -> None:
    text = as_text(report(many_rows()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert text.count("12,346 (12,001-13,000)") == 24
    assert text.count("llama.cpp Q4_K_M") == 12


# ---- README.md ----

BEFORE = "# QSF\n\n<!-- in-memory: python bench/readme_table.py a.json -->\n"
BETWEEN = "old\n<!-- end -->\n\ntext\n\n"
SECOND = "<!-- capped: python bench/readme_table.py a.json b.json -->\n"
AFTER = "<!-- end -->\nlast\n"


@pytest.fixture(scope="module")
def readme_table(project_root: Path) -> Iterator[ModuleType]:
    sys.path.append(str(project_root / "bench"))
    yield importlib.import_module("readme_table")
    sys.path.remove(str(project_root / "bench"))


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """A README.md with both tables, and the results that they are made of."""
    results = small_results()
    write(results, tmp_path / "a.json", overwrite=False)
    larger = [replace(row, shape="large") for row in results.rows]
    other = replace(results, rows=larger, machine={"cpu": "Processor Y", "n_cores": 4})
    write(other, tmp_path / "b.json", overwrite=False)
    path = tmp_path / "README.md"
    path.write_text(BEFORE + BETWEEN + SECOND + AFTER)
    return path


def table_rows(text: str, first: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() == first]


def test_tables_are_written_between_their_comments(readme: Path, readme_table: ModuleType) -> None:
    assert readme_table.main(["--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(BEFORE + "| shape | type | bits per weight | pp512, tok/s | llama.cpp")
    assert text.endswith(AFTER)
    assert "old\n" not in text
    first, second = text.split("\ntext\n")
    assert table_rows(first, "small") == [
        [
            *("small", "4bit (Q4_K_M)", "4.60 (4.60)"),
            *("500 (480-520)", "125 (120-130)", "**4.00x** (4.00-4.00)"),
            *("25.0 (24.0-26.0)", "10.0 (9.60-10.4)", "**2.50x** (2.50-2.50)"),
            *("720 MB", "75 %"),
        ]
    ]
    (row,) = table_rows(second, "small")
    assert row[2:] == [
        *(
            "300 MB",
            "720 MB",
            "3.00 (2.88-3.12)",
            "75 %",
            "0.500 (0.480-0.520)",
            "**6.00x** (6.00-6.00)",
        )
    ]
    assert len(table_rows(second, "large")) == 1
    origin = "Median (least-most) of 3 rounds, 2 threads, Processor X with 2 cores, llama.cpp 1, "
    assert text.count(origin + "commit abc1234, 2026-01-02.\n") == 2
    assert second.count("Processor Y with 4 cores.\n") == 1


def test_writing_twice_changes_nothing_and_check_sees_a_change(
    readme: Path, readme_table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    check = ["--readme", str(readme), "--check"]
    assert readme_table.main(check) == 1
    assert "README.md differs" in capsys.readouterr().err
    assert readme.read_text() == BEFORE + BETWEEN + SECOND + AFTER
    assert readme_table.main(["--readme", str(readme)]) == 0
    assert readme_table.main(check) == 0
    readme.write_text(readme.read_text().replace("**4.00x**", "**5.00x**"))
    assert readme_table.main(check) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no table", "there is no comment that begins a table"),
        (BEFORE + "no end\n", "there is no comment that begins a table"),
        (BEFORE + BETWEEN + SECOND, ""),  # that has no end; the first one is found all the same
        (BEFORE.replace("in-memory", "other") + AFTER, "there is no table 'other'"),
        (BEFORE.replace("a.json", "absent.json") + AFTER, "absent.json: No such file"),
        (BEFORE.replace("a.json", "README.md") + AFTER, "is not a result of python -m qsf.bench"),
    ],
)
def test_a_readme_without_tables_or_results_is_refused(
    readme: Path,
    readme_table: ModuleType,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    readme.write_text(text)
    code = readme_table.main(["--readme", str(readme)])
    assert code == (2 if said else 0)
    assert said in capsys.readouterr().err


def only(rows: list[Row]) -> Results:
    return replace(small_results(), rows=rows, ratios=[])


def test_the_table_of_budgets_has_a_line_for_each(readme_table: ModuleType) -> None:
    prompt, generation = small_results().rows[:2]
    rows = [
        prompt,
        generation,
        replace(prompt, budget_mb=300, tok_per_s=spread_of([30.0])),
        replace(generation, budget_mb=300, tok_per_s=spread_of([3.0]), peak_rss_bytes=290 << 20),
        replace(generation, budget_mb=200, threads=1),
        replace(generation, budget_mb=200, depth=64),
    ]
    found = table_rows(readme_table.budgets([only(rows)]), "small, 4bit")
    assert [row[2:4] for row in found] == [["none", "720 MB"], ["300 MB", "720 MB"]]
    assert found[1][4:] == ["30.0", "3.00"]
    with pytest.raises(readme_table.TableError, match="no row of QSF with a budget"):
        readme_table.budgets([only([generation])])


def test_the_page_has_what_the_terminal_has_and_loads_nothing() -> None:
    results = small_results()
    results.notes.append("<script>alert(1)</script>")
    page = as_page(report(results))
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    shown_text = html.unescape(re.sub(r"<[^>]*>", "", page.split("<pre>")[1]))
    assert shown_text.split() == as_text(report(results), 120).split()
    assert "<script" not in page
