"""The terminal's report: what rich shows of a result or a comparison. Nothing here prints.

Tables fit 80 columns: what all rows share goes into the heading, and what belongs to a file, not
to a test, has a table of its own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsf.bench.judge.compare import Change, Comparison
from qsf.bench.judge.results import Failure, Limits, Ratio, Results, Row, Spread
from qsf.bench.run.tasks import QSF

_FILE_COLUMN = 20
_TEST_COLUMN = 19
_N_BESIDE = 3  # rows of a breakdown beside each other: with their names, 80 columns
_LEAST_SHARE = 0.0005  # of a token: parts below it show as zeros
_STYLES = {"slower": "bold red", "faster": "green", "noisy": "yellow", "same": ""}


def report(results: Results) -> RenderableType:
    """Return the whole report of a result."""
    parts: list[RenderableType | None] = [
        _machine(results),
        *(table for rows in _by_shape(results.rows) for table in _rows_of_shape(results, rows)),
        _ratios(results),
        *_breakdowns(results.rows),
        _files(results.rows),
        _limits(results.limits),
        _failures(results.failures),
        _sentences("Notes", results.notes),
    ]
    return Group(*(part for part in parts if part is not None))


def comparison_report(comparison: Comparison) -> RenderableType:
    """Return the changes, then the notes."""
    table = _table([("", False), *((heading, True) for heading in CHANGE_HEADINGS[1:-1]),
                    ("", False)])  # fmt: skip
    for change in comparison.changes:
        *cells, verdict = change_words(change)
        table.add_row(*cells, Text(verdict, _STYLES[change.verdict]))
    counts = {
        verdict: sum(change.verdict == verdict for change in comparison.changes)
        for verdict in _STYLES
    }
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    parts: list[RenderableType] = [table, Text()] if comparison.changes else []
    parts.append(_sentences("Notes", comparison.notes) or Text())
    parts.append(Text(f"{len(comparison.changes)} speeds compared: {words}"))
    if comparison.changes:
        parts.append(Text(COMPARISON_RULE))
    return Group(*parts)


COMPARISON_RULE = (
    "before, now: medians. A change is more than the spread of the rounds and 3 %. *: in terms of "
    "the baseline, round by round"
)
CHANGE_HEADINGS = ("", "before", "now", "change", "noise", "verdict")


def change_words(change: Change) -> list[str]:
    """Return the cells of a change, of the columns `CHANGE_HEADINGS`."""
    return [
        change.row + ("*" if change.is_relative else ""),
        rate_text(change.old),
        rate_text(change.new),
        f"{100 * change.change:+.1f} %",
        f"{100 * change.noise:.1f} %" if change.noise < 10 else "unknown",
        change.verdict,
    ]


def as_text(what: RenderableType, width: int = 80) -> str:
    """Return lines without colours or trailing blanks, at most ``width`` columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(what)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


# ---- figures in words ----


def rate_text(value: float) -> str:
    """Return a figure with three digits or more that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread_text(spread: Spread, suffix: str = "") -> str:
    """Return a median with least and most behind it, where there was more than one round."""
    middle = f"{rate_text(spread.median)}{suffix}"
    if len(spread.values) == 1 or spread.min == spread.max:
        return middle
    return f"{middle} ({rate_text(spread.min)}-{rate_text(spread.max)})"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio such as "1.90x (1.85-1.98)"."""
    return spread_text(Spread(ratio.median, ratio.min, ratio.max, ratio.values), "x")


def mb_text(n_bytes: float | None) -> str:
    """Return bytes in MB of 2^20, as everywhere."""
    return "" if n_bytes is None else f"{n_bytes / 2**20:,.0f}"


def test_text(row: Row) -> str:
    """Return the test, with its depth where there is one."""
    return f"{row.test} @{row.depth}" if row.depth else row.test


def memory_text(row: Row) -> str:
    """Return what bounds the memory, such as "cgroup 300" in MB; "" for nothing."""
    if row.cap is not None:
        return f"cgroup {row.cap.limit_mb}"
    return f"budget {row.budget_mb}" if row.budget_mb is not None else ""


# ---- tables ----


def _table(columns: Iterable[tuple[str, bool]]) -> Table:
    """Return an empty table; ``columns`` are headings, and whether figures are below."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, is_number in columns:
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=is_number, overflow="fold")
    return table


def _titled(title: str, *parts: RenderableType) -> RenderableType:
    """Return a heading, what is under it, and an empty line."""
    return Group(Text(title, style="bold"), *parts, Text())


def _filled(
    rows: Sequence[Row], columns: Sequence[tuple[str, bool, Callable[[Row], str]]]
) -> Table:
    """Return a table of rows, without the columns that would be empty."""
    shown = [column for column in columns if any(column[2](row) for row in rows)]
    table = _table([(heading, is_number) for heading, is_number, _ in shown])
    for row in rows:
        table.add_row(*(Text(cell(row)) for _, _, cell in shown))
    return table


def _machine(results: Results) -> RenderableType:
    known = results.machine
    first = f"{known.get('cpu', 'unknown processor')}, {known.get('n_cores', '?')} cores"
    if known.get("isa"):
        first += f", {known['isa']} kernels"
    names = (("qsf", "QSF"), ("commit", "commit"), ("baseline", ""), ("date", ""), ("load", "load"))
    second = [f"{label} {known[key]}".strip() for key, label in names if known.get(key)]
    lines = [first, ", ".join(second)] if second else [first]
    return Group(*map(Text, lines), Text())


def _limits(limits: Limits) -> RenderableType | None:
    rows = limit_rows(limits)
    if not rows:
        return None
    table = _table([("", False), ("", False), ("", True), ("", False)])
    table.show_header = False
    for row in rows:
        table.add_row(*map(Text, row))
    return _titled("Limits of the machine", table)


def limit_rows(limits: Limits) -> list[tuple[str, str, str, str]]:
    """Return the limits in words: of what, how, how much, of which unit."""
    return [
        (what, how(key), rate_text(rate), unit)
        for what, rates, how, unit in (
            ("memory, read", limits.memory_gb_per_s, _threads_text, "GB/s"),
            ("disk, read", limits.disk_gb_per_s, str, "GB/s"),
            ("8-bit multiply-adds", limits.gmadds_per_s, _threads_text, "10^9/s"),
        )
        for key, rate in rates.items()
    ]


def _files(rows: Sequence[Row]) -> RenderableType | None:
    """Return what is true of a file, whatever the test."""
    firsts: dict[tuple[str, ...], Row] = {}
    for row in rows:
        firsts.setdefault((row.engine, row.shape, row.type, row.file, row.kv_type), row)
    if not firsts:
        return None
    has_shapes = _has_shapes(rows)
    table = _filled(
        list(firsts.values()),
        [
            ("engine", False, lambda row: row.engine),
            ("shape", False, lambda row: row.shape if has_shapes else ""),
            ("type", False, lambda row: row.type),
            ("bits/wt", True, lambda row: f"{row.bits_per_weight:.2f}"),
            ("MB", True, lambda row: mb_text(row.file_bytes)),
            ("KV", False, lambda row: row.kv_type),
            (
                "load s",
                True,
                lambda row: "" if row.load_seconds is None else f"{row.load_seconds:.2f}",
            ),
            ("kernels", False, lambda row: row.kernels),
        ],
    )
    return _titled("Files", table)


def _has_shapes(rows: Sequence[Row]) -> bool:
    """Return whether a row must say its shape."""
    return len({row.shape for row in rows}) > 1


def _by_shape(rows: Sequence[Row]) -> list[list[Row]]:
    return [
        [row for row in rows if row.shape == shape]
        for shape in dict.fromkeys(row.shape for row in rows)
    ]


def _title_of(results: Results, rows: Sequence[Row]) -> str:
    """Return the shape, behind the user's file where there is one."""
    files = dict.fromkeys(row.file for row in rows if row.engine == QSF and row.file)
    if results.settings.get("weights") == "random" or len(files) != 1:
        return rows[0].shape
    return f"{next(iter(files))}: {rows[0].shape}"


def _rows_of_shape(results: Results, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield a table of a shape for each setting."""
    title = _title_of(results, rows)
    for setting in dict.fromkeys(map(_setting_text, rows)):
        shown = [row for row in rows if _setting_text(row) == setting]
        table = _filled(
            shown,
            [
                ("file", False, file_text),
                ("test", False, test_text),
                ("tok/s", True, lambda row: spread_text(row.tok_per_s)),
                ("of limit", False, _limit_text),
                ("GB/s", True, lambda row: "" if row.gb_per_s is None else rate_text(row.gb_per_s)),
                ("peak MB", True, lambda row: mb_text(row.peak_rss_bytes or None)),
            ],
        )
        table.columns[0].max_width = _FILE_COLUMN
        table.columns[0].min_width = min(_FILE_COLUMN, max(len(file_text(row)) for row in shown))
        yield _titled(f"{title}, {setting}", table)


def _setting_text(row: Row) -> str:
    memory = memory_text(row)
    return _threads_text(row.threads) + (f", {memory} MB" if memory else "")


def file_text(row: Row) -> str:
    """Return engine and type."""
    return f"{row.engine} {row.type}"


def _threads_text(n_threads: int | str) -> str:
    return f"{n_threads} thread{'' if str(n_threads) == '1' else 's'}"


def _limit_text(row: Row) -> str:
    if row.fraction_of_limit is None:
        return ""
    short = {"arithmetic": "arith."}.get(row.limited_by, row.limited_by)
    return row.share_of_limit if row.above_limit else f"{row.share_of_limit} {short}"


def _ratios(results: Results) -> RenderableType | None:
    if not results.ratios:
        return None
    headings = ("files", "test", "thr", "MB at most", "ratio")
    table = _table([(heading, heading in ("thr", "ratio")) for heading in headings])
    has_shapes = _has_shapes(results.rows)
    for ratio in results.ratios:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        files = f"{row.type} / {file_text(other)}" + f", {row.shape}" * has_shapes
        cells = [files, test_text(row), str(row.threads), memory_text(row)]
        table.add_row(*map(Text, cells), ratio_text(ratio))
    return _titled("QSF / baseline, round by round", table)


# ---- breakdowns ----


def _breakdowns(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield tables: parts downwards, rows sideways."""
    shown = [row for row in rows if row.breakdown is not None and row.test.startswith("tg")]
    has_shapes = _has_shapes(rows)
    for first in range(0, len(shown), _N_BESIDE):
        table = _breakdown_table(shown[first : first + _N_BESIDE], has_shapes=has_shapes)
        yield _titled("Where a token's time goes, ms and share", table)


def _breakdown_table(rows: Sequence[Row], *, has_shapes: bool) -> Table:
    headings = [f"{row.shape} " * has_shapes + _breakdown_heading(row) for row in rows]
    table = _table([("", False), *((heading, True) for heading in headings)])
    for column in table.columns[1:]:
        column.no_wrap, column.max_width = False, _TEST_COLUMN - 2
    breakdowns = [row.breakdown for row in rows if row.breakdown is not None]
    table.add_row("all of it", *(f"{known.wall_ms:.3f} 100 %" for known in breakdowns))
    for prefix, kinds in (
        ("", [known.parts for known in breakdowns]),
        ("beside: ", [known.beside for known in breakdowns]),
    ):
        for name in dict.fromkeys(name for parts in kinds for name in parts):
            cells = [
                _part_text(parts.get(name), known.wall_ms)
                for parts, known in zip(kinds, breakdowns, strict=True)
            ]
            if any(cells):
                table.add_row(Text(prefix + name.replace("_", " ")), *cells)
    return table


def _part_text(spread: Spread | None, wall_ms: float) -> str:
    if spread is None or wall_ms <= 0 or spread.median < _LEAST_SHARE * wall_ms:
        return ""
    share = spread.median / wall_ms
    return f"{spread.median:.3f} {100 * share:3.0f} %"


def _breakdown_heading(row: Row) -> str:
    words = [row.type, test_text(row), f"{row.threads} thr", memory_text(row)]
    return " ".join(word for word in words if word)


# ---- sentences ----


def _failures(failures: Sequence[Failure]) -> RenderableType | None:
    lines = []
    for failure in failures:
        times = f" ({failure.n_times} times)" if failure.n_times > 1 else ""
        who = f"{failure.engine} {failure.file}".rstrip()
        lines.append(f"{who}, {failure.what}{times}: {failure.why}")
    return _sentences("Failed", lines)


def _sentences(title: str, lines: Sequence[str]) -> RenderableType | None:
    if not lines:
        return None
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row("-", Text(line, overflow="fold"))
    return _titled(title, table)
