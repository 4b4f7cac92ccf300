"""The parts of a report: tables and sentences, for a terminal and for a page.

Tables fit 80 columns: properties of all rows are in the title, and properties of a file, not of a
test, in a table of their own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qsf.native.roofline import Limits
from qsf_bench.judge.results import Results, Row, Spread
from qsf_bench.run.tasks import QSF

_N_BESIDE = 3  # rows of a breakdown side by side: with their names, 80 columns
_LEAST_SHARE = 0.0005  # of a token; smaller parts would show as zeros


@dataclass(frozen=True, slots=True)
class Part:
    """A table and sentences under a title; a part without either is left out.

    ``headings`` are pairs: the name of a column, and true if its cells are numbers. Parts with the
    same ``anchor`` are neighbours.
    """

    anchor: str
    title: str
    headings: Sequence[tuple[str, bool]] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows or self.lines)


def parts_of(results: Results) -> list[Part]:
    """Return the whole report of a result."""
    rows, has_shapes = results.rows, len({row.shape for row in results.rows}) > 1
    failures = []
    for failure in results.failures:
        times = f" ({failure.n_times} times)" if failure.n_times > 1 else ""
        who = f"{failure.engine} {failure.file}".rstrip()
        failures.append(f"{who}, {failure.what}{times}: {failure.why}")
    parts = [
        *_measurements(results),
        _ratios(results, has_shapes=has_shapes),
        _experts(rows, has_shapes=has_shapes),
        *_breakdowns(rows, has_shapes=has_shapes),
        _files(rows, has_shapes=has_shapes),
        _limits(results.limits),
        Part("failed", "Failed", lines=failures),
        Part("notes", "Notes", lines=results.notes),
    ]
    return [part for part in parts if part]


# ---- figures in words ----


def rate_text(value: float) -> str:
    """Return a figure with at least three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread_text(spread: Spread, suffix: str = "") -> str:
    """Return a ratio such as "1.90x (1.85-1.98)": least and most after several rounds."""
    middle = f"{rate_text(spread.median)}{suffix}"
    if len(spread.values) == 1 or spread.min == spread.max:
        return middle
    return f"{middle} ({rate_text(spread.min)}-{rate_text(spread.max)})"


def mb_text(n_bytes: float | None) -> str:
    """Return bytes in MB of 2^20; "" if unknown."""
    return f"{n_bytes / 2**20:,.0f}" if n_bytes else ""


def memory_text(row: Row) -> str:
    """Return the memory limit, such as "cgroup 300" in MB; "" without one."""
    if row.cap is not None:
        return f"cgroup {row.cap.limit_mb}"
    return f"budget {row.budget_mb}" if row.budget_mb is not None else ""


def file_text(row: Row) -> str:
    """Return engine and type."""
    return f"{row.engine} {row.type}"


def threads_text(n_threads: int | str) -> str:
    """Return "1 thread", "2 threads"."""
    return f"{n_threads} thread{'' if str(n_threads) == '1' else 's'}"


def _test_text(row: Row) -> str:
    return f"{row.test} @{row.depth}" if row.depth else row.test


# ---- tables ----

Column = tuple[str, bool, Callable[[Row], str]]  # heading, whether cells are numbers, cell


def _filled(anchor: str, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Part:
    """Return a table of rows, without the columns that would be empty."""
    shown = [column for column in columns if any(column[2](row) for row in rows)]
    cells = [[cell(row) for _, _, cell in shown] for row in rows]
    return Part(anchor, title, [(name, is_number) for name, is_number, _ in shown], cells)


def _measurements(results: Results) -> Iterator[Part]:
    """Yield a table for each shape and setting."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        memory = memory_text(row)
        setting = threads_text(row.threads) + (f", {memory} MB" if memory else "")
        groups.setdefault((row.shape, setting), []).append(row)
    columns: list[Column] = [
        ("file", False, file_text),
        ("test", False, _test_text),
        ("tok/s", True, lambda row: spread_text(row.tok_per_s)),
        ("of limit", False, _limit_text),
        ("GB/s", True, lambda row: "" if row.gb_per_s is None else rate_text(row.gb_per_s)),
        ("peak MB", True, lambda row: mb_text(row.peak_rss_bytes)),
    ]
    for shape in dict.fromkeys(shape for shape, _ in groups):
        of_shape = [row for row in results.rows if row.shape == shape]
        files = dict.fromkeys(row.file for row in of_shape if row.engine == QSF and row.file)
        is_one = len(files) == 1 and results.settings.get("weights") != "random"
        title = f"{next(iter(files))}: {shape}" if is_one else shape
        for (name, setting), rows in groups.items():
            if name == shape:
                yield _filled("rows", f"{title}, {setting}", rows, columns)


def _limit_text(row: Row) -> str:
    if row.fraction_of_limit is None or row.above_limit:
        return row.share_of_limit
    return f"{row.share_of_limit} {'arith.' if row.limited_by == 'arithmetic' else row.limited_by}"


def _experts(rows: Sequence[Row], *, has_shapes: bool) -> Part:
    """Return the hit rate of experts in memory, and the bytes read for them."""
    return _filled(
        "experts",
        "Experts",
        [row for row in rows if row.expert_hits is not None],
        [
            ("file", False, lambda row: file_text(row) + f", {row.shape}" * has_shapes),
            ("test", False, _test_text),
            ("thr", True, lambda row: str(row.threads)),
            ("MB at most", False, memory_text),
            ("in memory", True, lambda row: f"{100 * (row.expert_hits or 0):.0f} %"),
            ("MB read a token", True, lambda row: mb_text(row.read_bytes_per_token)),
        ],
    )


def _files(rows: Sequence[Row], *, has_shapes: bool) -> Part:
    """Return the properties of a file, common to all its tests."""
    firsts: dict[tuple[str, ...], Row] = {}
    for row in rows:
        firsts.setdefault((row.engine, row.shape, row.type, row.file, row.kv_type), row)
    return _filled(
        "files",
        "Files",
        list(firsts.values()),
        [
            ("engine", False, lambda row: row.engine),
            ("shape", False, lambda row: row.shape if has_shapes else ""),
            ("type", False, lambda row: row.type),
            ("bits/wt", True, lambda row: f"{row.bits_per_weight:.2f}"),
            ("MB", True, lambda row: mb_text(row.file_bytes)),
            ("KV", False, lambda row: row.kv_type),
            ("load s", True, lambda r: "" if r.load_seconds is None else f"{r.load_seconds:.2f}"),
            ("kernels", False, lambda row: row.kernels),
        ],
    )


def _limits(limits: Limits) -> Part:
    rows = [
        (label, how(key), rate_text(rate), unit)
        for label, rates, how, unit in (
            ("memory, read", limits.memory_gb_per_s, threads_text, "GB/s"),
            ("disk, read", limits.disk_gb_per_s, str, "GB/s"),
            ("8-bit multiply-adds", limits.gmadds_per_s, threads_text, "10^9/s"),
        )
        for key, rate in rates.items()
    ]
    headings = [("what", False), ("how", False), ("at most", True), ("", False)]
    note = "The better of two measurements of half a second, before and after the rounds."
    return Part("limits", "Limits of the machine", headings, rows, note=note)


def _ratios(results: Results, *, has_shapes: bool) -> Part:
    rows = []
    for ratio in results.ratios:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        files = f"{row.type} / {file_text(other)}" + f", {row.shape}" * has_shapes
        setting = [_test_text(row), str(row.threads), memory_text(row)]
        rows.append([files, *setting, spread_text(ratio, "x")])
    names = ("files", "test", "thr", "MB at most", "ratio")
    headings = [(name, name in ("thr", "ratio")) for name in names]
    return Part("ratios", "QSF / baseline, round by round", headings, rows)


# ---- breakdowns ----


def _breakdowns(rows: Sequence[Row], *, has_shapes: bool) -> Iterator[Part]:
    """Yield tables: parts downwards, rows sideways."""
    shown = [row for row in rows if row.breakdown is not None and row.test.startswith("tg")]
    for first in range(0, len(shown), _N_BESIDE):
        yield _breakdown(shown[first : first + _N_BESIDE], has_shapes=has_shapes)


def _breakdown(rows: Sequence[Row], *, has_shapes: bool) -> Part:
    names = [
        [row.shape * has_shapes, row.type, _test_text(row), f"{row.threads} thr", memory_text(row)]
        for row in rows
    ]
    headings = [("", False), *((" ".join(filter(None, words)), True) for words in names)]
    breakdowns = [row.breakdown for row in rows if row.breakdown is not None]
    lines = [["all of it", *(f"{breakdown.wall_ms:.3f} 100 %" for breakdown in breakdowns)]]
    for prefix, kinds in (
        ("", [breakdown.parts for breakdown in breakdowns]),
        ("beside: ", [breakdown.beside for breakdown in breakdowns]),
    ):
        for name in dict.fromkeys(name for parts in kinds for name in parts):
            cells = [
                _part_text(parts.get(name), breakdown.wall_ms)
                for parts, breakdown in zip(kinds, breakdowns, strict=True)
            ]
            if any(cells):
                lines.append([prefix + name.replace("_", " "), *cells])
    return Part("time", "Where a token's time goes, ms and share", headings, lines)


def _part_text(spread: Spread | None, wall_ms: float) -> str:
    if spread is None or wall_ms <= 0 or spread.median < _LEAST_SHARE * wall_ms:
        return ""
    return f"{spread.median:.3f} {100 * spread.median / wall_ms:3.0f} %"
