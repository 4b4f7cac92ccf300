"""Write the tables of speed in docs/benchmarks.md.

They are made from results of `python -m qsf.bench` in bench/results/. A table stands between two
comments, the first of which names its sources:

    <!-- in-memory: python bench/readme_table.py bench/results/1.1b.json -->
    <!-- end -->

Tables are ``in-memory`` (QSF and llama.cpp with enough memory), ``budgets`` (QSF alone by
--ram-budget) and ``capped`` (both in a memory cgroup).

Usage: .venv/bin/python bench/readme_table.py [--check] [--readme README.md]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qsf.errors import QsfError
from qsf_bench.judge.results import Ratio, Results, Row, read
from qsf_bench.show.report import mb_text, spread_text

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(
    r"(<!-- (?P<name>[\w-]+): python bench/readme_table\.py(?P<files>(?: \S+)+) -->\n)"
    r"(?:(?!<!-- ).)*(<!-- end -->)",
    re.DOTALL,
)
NOTHING = "-"
COLUMNS = 115  # of the lines of the document


class TableError(Exception):
    """A document or result from which no table can be made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of QSF, with the compared row of llama.cpp, if any."""

    results: Results
    row: Row
    baseline: Row | None = None
    ratio: Ratio | None = None


def entries_of(all_results: Sequence[Results]) -> list[Entry]:
    """Return QSF's rows, each with the baseline's."""
    entries = []
    for results in all_results:
        for i, row in enumerate(results.rows):
            if row.engine != "qsf":
                continue
            ratio = next((ratio for ratio in results.ratios if ratio.row == i), None)
            baseline = None if ratio is None else results.rows[ratio.vs]
            entries.append(Entry(results, row, baseline, ratio))
    return entries


# ---- cells ----


def rate(entry: Entry | None) -> str:
    """Return QSF's tok/s."""
    return NOTHING if entry is None else spread_text(entry.row.tok_per_s)


def baseline_rate(entry: Entry | None) -> str:
    """Return llama.cpp's tok/s."""
    if entry is None or entry.baseline is None:
        return NOTHING
    return spread_text(entry.baseline.tok_per_s)


def times(entry: Entry | None) -> str:
    """Return the ratio in bold, because readers look for it."""
    if entry is None or entry.ratio is None:
        return NOTHING
    return f"**{spread_text(entry.ratio, 'x').replace('x', 'x**', 1)}"


def of_limit(entry: Entry | None, limited_by: str) -> str:
    """Return the reached share of a limit; "" if another limit binds."""
    if entry is None or entry.row.limited_by != limited_by:
        return NOTHING
    return entry.row.share_of_limit or NOTHING


def type_name(rows: Sequence[Entry]) -> str:
    """Return the type, followed by that of llama.cpp."""
    baseline = next((entry.baseline for entry in rows if entry.baseline is not None), None)
    return rows[0].row.type + (f" ({baseline.type})" if baseline else "")


def bits(rows: Sequence[Entry]) -> str:
    """Return bits per weight of QSF's file, then of llama.cpp's."""
    baseline = next((entry.baseline for entry in rows if entry.baseline is not None), None)
    own = f"{rows[0].row.bits_per_weight:.2f}"
    return own + (f" ({baseline.bits_per_weight:.2f})" if baseline else "")


# ---- tables ----


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [list(headings), ["---"] * len(headings), *map(list, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def uncapped(all_results: Sequence[Results]) -> list[Entry]:
    """Return the rows without cgroup and depth, with the most threads measured."""
    free = [
        entry for entry in entries_of(all_results) if entry.row.cap is None and entry.row.depth == 0
    ]
    threads = max((entry.row.threads for entry in free), default=0)
    return [entry for entry in free if entry.row.threads == threads]


def grouped(rows: Sequence[Entry], key: Callable[[Row], object]) -> list[list[Entry]]:
    """Return rows grouped by key, in their order."""
    groups: dict[object, list[Entry]] = {}
    for entry in rows:
        groups.setdefault(key(entry.row), []).append(entry)
    return list(groups.values())


def first(rows: Sequence[Entry], kind: str) -> Entry | None:
    """Return the first row of a kind of test, "pp" or "tg"."""
    return next((entry for entry in rows if entry.row.test.startswith(kind)), None)


def in_memory(all_results: Sequence[Results]) -> str:
    """Return the comparison without a memory limit."""
    shown = [entry for entry in uncapped(all_results) if entry.row.budget_mb is None]
    if not shown:
        raise TableError("no row of QSF without a limit on memory and without depth")
    cells = []
    for rows in grouped(shown, lambda row: (row.shape, row.type, row.file)):
        prompt, generation = first(rows, "pp"), first(rows, "tg")
        peak = max(entry.row.peak_rss_bytes for entry in rows)
        cells.append(
            [
                *(rows[0].row.shape, type_name(rows), bits(rows)),
                *(rate(prompt), baseline_rate(prompt), times(prompt)),
                *(rate(generation), baseline_rate(generation), times(generation)),
                *(f"{mb_text(peak)} MB", of_limit(generation, "memory")),
            ]
        )
    prompt, generation = first(shown, "pp"), first(shown, "tg")
    headings = [
        *("shape", "type", "bits per weight"),
        *(f"{prompt.row.test if prompt else 'prompt'}, tok/s", "llama.cpp", "ratio"),
        *(f"{generation.row.test if generation else 'generation'}, tok/s", "llama.cpp", "ratio"),
        *("peak memory", "of memory's limit"),
    ]
    return markdown(headings, cells) + "\n" + origins(shown)


def budgets(all_results: Sequence[Results]) -> str:
    """Return the speeds with each budget, and without one."""
    shown = uncapped(all_results)
    if all(entry.row.budget_mb is None for entry in shown):
        raise TableError("no row of QSF with a budget")
    cells = []
    for rows in grouped(shown, lambda row: (row.shape, row.type, row.file, row.budget_mb)):
        row = rows[0].row
        peak = max(entry.row.peak_rss_bytes for entry in rows)
        cells.append(
            [
                *(f"{row.shape}, {row.type}", f"{mb_text(row.file_bytes)} MB"),
                "none" if row.budget_mb is None else f"{row.budget_mb:,} MB",
                *(f"{mb_text(peak)} MB", rate(first(rows, "pp")), rate(first(rows, "tg"))),
            ]
        )
    headings = ["model", "file", "`--ram-budget`", "peak memory", "prompt tok/s", "generated tok/s"]
    return markdown(headings, cells) + "\n" + origins(shown)


def capped(all_results: Sequence[Results]) -> str:
    """Return generation in a memory cgroup, by shape, type and limit."""
    rows = [
        entry
        for entry in entries_of(all_results)
        if entry.row.cap is not None and entry.row.test.startswith("tg")
    ]
    if not rows:
        raise TableError("no row of QSF that generates in a memory cgroup")
    cells = [
        [
            entry.row.shape,
            type_name([entry]),
            f"{entry.row.cap.limit_mb:,} MB" if entry.row.cap else NOTHING,
            f"{mb_text(entry.row.peak_rss_bytes)} MB",
            *(rate(entry), of_limit(entry, "disk"), baseline_rate(entry), times(entry)),
        ]
        for entry in rows
    ]
    headings = [
        *("shape", "type", "limit", "peak memory", "tok/s", "of what the disk allows"),
        *("llama.cpp", "ratio"),
    ]
    return markdown(headings, cells) + "\n" + origins(rows)


def origins(rows: Sequence[Entry]) -> str:
    """Return the origin of the figures, a line for each run."""
    lines = []
    for results in {id(entry.results): entry.results for entry in rows}.values():
        own = [entry.row for entry in rows if entry.results is results]
        n_rounds = max(len(row.tok_per_s.values) for row in own)
        threads = sorted({row.threads for row in own})
        machine = results.machine
        words = [
            f"Median (least-most) of {n_rounds} round{'' if n_rounds == 1 else 's'}",
            f"{' and '.join(map(str, threads))} thread{'' if threads == [1] else 's'}",
            f"{machine.get('cpu', 'unknown processor')} with {machine.get('n_cores', '?')} cores",
            *(str(machine[key]) for key in ("baseline",) if machine.get(key)),
            *(f"commit {machine[key]}" for key in ("commit",) if machine.get(key)),
            *(str(machine[key])[:10] for key in ("date",) if machine.get(key)),
        ]
        lines.append(textwrap.fill(", ".join(words) + ".", COLUMNS) + "\n")
    return "".join(dict.fromkeys(lines))


TABLES: dict[str, Callable[[Sequence[Results]], str]] = {
    "in-memory": in_memory,
    "budgets": budgets,
    "capped": capped,
}


# ---- README.md ----


def rewritten(text: str, root: Path) -> str:
    """Return the text with its tables made anew from the files named in their comments."""

    def anew(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise TableError(f"there is no table {name!r}, only {', '.join(TABLES)}")
        results = [read(root / file) for file in match["files"].split()]
        return match[1] + TABLES[name](results) + match[4]

    new, n_tables = MARKED.subn(anew, text)
    if n_tables == 0:
        raise TableError("there is no comment that begins a table, or none that ends it")
    return new


def main(arguments: Sequence[str]) -> int:
    """Write or check; return 1 if the document differs from the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--readme", metavar="FILE", type=Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args(arguments)
    try:
        text = args.readme.read_text("utf-8")
        new = rewritten(text, ROOT if args.readme == DOCUMENT else args.readme.parent)
    except (QsfError, TableError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if new == text:
        return 0
    if args.check:
        print(f"{args.readme.name} differs: python bench/readme_table.py", file=sys.stderr)
        return 1
    args.readme.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
