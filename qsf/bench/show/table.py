"""The terminal's report: what rich shows of a result or a comparison. Nothing here prints.

Tables fit 80 columns: what all rows share goes into the heading, and what belongs to a file, not
to a test, has a table of its own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from qsf.bench.judge.compare import Change, Comparison
from qsf.bench.judge.results import Failure, Limits, Ratio, Results, Row, Spread

_WIDE = 100  # columns for all in one table
_FILE_COLUMN = 20
_PART_COLUMN = 18  # of a breakdown
_TEST_COLUMN = 19
_LEAST_SHARE = 0.0005  # of a token: parts below it show as zeros
_STYLES = {"slower": "bold red", "faster": "green", "noisy": "yellow", "same": ""}


def report(results: Results) -> RenderableType:
    """Return the whole report of a result."""
    parts: list[RenderableType | None] = [
        _machine(results),
        _limits(results.limits),
        _files(results.rows),
        *(_Rows(shape, rows) for shape, rows in _by_shape(results.rows)),
        _ratios(results),
        *_breakdowns(results.rows),
        _failures(results.failures),
        _sentences("Notes", results.notes),
    ]
    return Group(*(part for part in parts if part is not None))


def comparison_report(comparison: Comparison) -> RenderableType:
    """Return the changes, row by row, then the notes."""
    parts: list[RenderableType] = []
    for name in dict.fromkeys(change.row for change in comparison.changes):
        parts.append(_changes(name, [c for c in comparison.changes if c.row == name]))
    parts.append(_sentences("Notes", comparison.notes) or Text())
    counts = {
        verdict: sum(change.verdict == verdict for change in comparison.changes)
        for verdict in _STYLES
    }
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    parts.append(Text(f"{len(comparison.changes)} figures compared: {words}"))
    if comparison.changes:
        parts.append(Text(COMPARISON_RULE))
    return Group(*parts)


COMPARISON_RULE = (
    "before, now: medians. A change is more than the spread of the rounds and 3 %. *: in terms of "
    "the baseline, round by round"
)


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


def mb_text(n_bytes: float) -> str:
    """Return bytes in MB of 2^20, as everywhere."""
    return f"{n_bytes / 2**20:,.0f}"


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
    tables: list[RenderableType] = []
    threads = list(dict.fromkeys([*limits.memory_gb_per_s, *limits.gmadds_per_s]))
    if threads:
        table = _table([("", False), *((f"{n} thr", True) for n in threads)])
        for name, rates in (
            ("memory, GB/s read", limits.memory_gb_per_s),
            ("8-bit multiply-adds, 10^9/s", limits.gmadds_per_s),
        ):
            if rates:
                table.add_row(name, *(_rate_or_dash(rates.get(n)) for n in threads))
        tables.append(table)
    if ways := limits.disk_gb_per_s:
        kinds = dict.fromkeys(way.partition(" ")[0] for way in ways)
        counts = dict.fromkeys(way.partition(" ")[2] for way in ways)
        table = _table([("disk, GB/s read", False), *((count, True) for count in counts)])
        for kind in kinds:
            cells = (_rate_or_dash(ways.get(f"{kind} {count}")) for count in counts)
            table.add_row(Text(kind), *cells)
        tables += [Text(), table] if tables else [table]
    return _titled("Limits of the machine", *tables) if tables else None


def _rate_or_dash(rate: float | None) -> str:
    return "-" if rate is None else rate_text(rate)


def _files(rows: Sequence[Row]) -> RenderableType | None:
    """Return what is true of a file, whatever the test."""
    firsts: dict[tuple[str, ...], Row] = {}
    for row in rows:
        firsts.setdefault((row.engine, row.shape, row.type, row.file, row.kv_type), row)
    if not firsts:
        return None
    has_shapes = len({row.shape for row in rows}) > 1
    table = _filled(
        list(firsts.values()),
        [
            ("engine", False, lambda row: row.engine),
            ("shape", False, lambda row: row.shape if has_shapes else ""),
            ("type", False, lambda row: row.type),
            ("bits/wt", True, lambda row: f"{row.bits_per_weight:.2f}"),
            ("MB", True, lambda row: mb_text(row.file_bytes)),
            ("KV", False, lambda row: row.kv_type),
            ("load s", True, lambda row: _known(row.load_seconds, ".2f")),
            ("kernels", False, lambda row: row.kernels),
        ],
    )
    return _titled("Files", table)


def _known(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _by_shape(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [
        (shape, [row for row in rows if row.shape == shape])
        for shape in dict.fromkeys(row.shape for row in rows)
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a shape: one table where there is room, else one for each setting."""

    shape: str
    rows: Sequence[Row]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= _WIDE:
            yield _titled(self.shape, _rows(self.rows, is_wide=True))
            return
        for setting in dict.fromkeys(_setting_text(row) for row in self.rows):
            rows = [row for row in self.rows if _setting_text(row) == setting]
            yield _titled(f"{self.shape}, {setting}", _rows(rows, is_wide=False))


def _setting_text(row: Row) -> str:
    memory = memory_text(row)
    return _threads_text(row.threads) + (f", {memory} MB" if memory else "")


def _rows(rows: Sequence[Row], *, is_wide: bool) -> Table:
    table = _filled(
        rows,
        [
            ("file", False, file_text),
            ("thr", True, lambda row: str(row.threads) if is_wide else ""),
            ("test", False, test_text),
            ("MB at most", False, lambda row: memory_text(row) if is_wide else ""),
            ("tok/s", True, lambda row: spread_text(row.tok_per_s)),
            ("of limit", False, _limit_text),
            ("GB/s", True, lambda row: "" if row.gb_per_s is None else rate_text(row.gb_per_s)),
            (
                "peak MB",
                True,
                lambda row: mb_text(row.peak_rss_bytes) if row.peak_rss_bytes else "",
            ),
        ],
    )
    table.columns[0].max_width = _FILE_COLUMN
    table.columns[0].min_width = min(_FILE_COLUMN, max(len(file_text(row)) for row in rows))
    return table


def file_text(row: Row) -> str:
    """Return engine and type."""
    return f"{row.engine} {row.type}"


def _threads_text(n_threads: int) -> str:
    return f"{n_threads} thread{'' if n_threads == 1 else 's'}"


def _limit_text(row: Row) -> str:
    if row.fraction_of_limit is None:
        return ""
    short = {"arithmetic": "arith."}.get(row.limited_by, row.limited_by)
    return f"{100 * row.fraction_of_limit:.0f} %{'!' if row.above_limit else ''} {short}"


def _ratios(results: Results) -> RenderableType | None:
    if not results.ratios:
        return None
    headings = ("files", "test", "thr", "MB at most", "ratio")
    table = _table([(heading, heading in ("thr", "ratio")) for heading in headings])
    for ratio in results.ratios:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        cells = [f"{row.type} / {file_text(other)}", test_text(row), str(row.threads),
                 memory_text(row)]  # fmt: skip
        table.add_row(*map(Text, cells), ratio_text(ratio))
    return _titled("QSF / baseline, round by round", table)


# ---- breakdowns ----


@dataclass(frozen=True, slots=True)
class _Breakdowns:
    """Parts downwards, rows sideways, as many beside each other as the width holds."""

    rows: Sequence[Row]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        n_beside = max(1, (options.max_width - _PART_COLUMN) // _TEST_COLUMN)
        for first in range(0, len(self.rows), n_beside):
            table = self._table(self.rows[first : first + n_beside])
            yield _titled("Where a token's time goes, ms and share", table)

    def _table(self, rows: Sequence[Row]) -> Table:
        headings = [(_breakdown_heading(row), True) for row in rows]
        table = _table([("", False), *headings])
        for column in table.columns[1:]:
            column.no_wrap, column.max_width = False, _TEST_COLUMN - 2
        breakdowns = [row.breakdown for row in rows if row.breakdown is not None]
        table.add_row("all of it", *(f"{found.wall_ms:.3f} 100 %" for found in breakdowns))
        for name in dict.fromkeys(name for found in breakdowns for name in found.parts):
            spreads = [found.parts.get(name) for found in breakdowns]
            cells = [
                _part_text(spread, found.wall_ms)
                for spread, found in zip(spreads, breakdowns, strict=True)
            ]
            if any(cells):
                table.add_row(Text(part_name(name)), *cells)
        for name in dict.fromkeys(name for found in breakdowns for name in found.beside):
            cells = [_part_text(found.beside.get(name), found.wall_ms) for found in breakdowns]
            if any(cells):
                table.add_row(Text(f"beside: {part_name(name)}"), *cells)
        return table


def part_name(name: str) -> str:
    """Return a part's name for people."""
    return name.replace("_", " ")


def _part_text(spread: Spread | None, wall_ms: float) -> str:
    if spread is None or wall_ms <= 0 or spread.median < _LEAST_SHARE * wall_ms:
        return ""
    share = spread.median / wall_ms
    return f"{spread.median:.3f} {100 * share:3.0f} %"


def _breakdown_heading(row: Row) -> str:
    words = [row.type, test_text(row), f"{row.threads} thr", memory_text(row)]
    return " ".join(word for word in words if word)


def _breakdowns(rows: Sequence[Row]) -> list[RenderableType]:
    shown = [row for row in rows if row.breakdown is not None and row.test.startswith("tg")]
    return [_Breakdowns(shown)] if shown else []


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


# ---- changes ----


def _changes(name: str, changes: Sequence[Change]) -> RenderableType:
    """Return the changes of a row: its speed, and the parts that are not the same."""
    shown = [change for change in changes if is_worth_a_line(change)]
    table = _table([("", False), *((heading, True) for heading in CHANGE_HEADINGS[1:-1]),
                    ("", False)])  # fmt: skip
    for change in shown:
        *cells, verdict = change_words(change)
        table.add_row(*cells, Text(verdict, _STYLES[change.verdict]))
    n_same = len(changes) - len(shown)
    parts = f"{n_same} part{'' if n_same == 1 else 's'} of the token: the same"
    return _titled(name, table, *([Text(parts)] if n_same else []))


CHANGE_HEADINGS = ("", "before", "now", "change", "noise", "verdict")


def change_words(change: Change) -> list[str]:
    """Return the cells of a change, of the columns `CHANGE_HEADINGS`."""
    unit = " ms" if change.unit == "ms" else ""
    return [
        part_name(change.what) + ("*" if change.is_relative else ""),
        f"{rate_text(change.old)}{unit}",
        f"{rate_text(change.new)}{unit}",
        f"{100 * change.change:+.1f} %",
        f"{100 * change.noise:.1f} %" if change.noise < 10 else "unknown",
        change.verdict,
    ]


def is_worth_a_line(change: Change) -> bool:
    """Whether a change is shown: all speeds, and parts that are not the same."""
    return change.unit != "ms" or change.verdict != "same"
