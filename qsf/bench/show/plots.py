"""The plots of the page: from rows to panels, one for each shape and test."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qsf.bench.judge.results import Row
from qsf.bench.show.report import file_text, threads_text
from qsf.page import html
from qsf.page.plots import Axis, Point, Series, figure, key, plot
from qsf.page.svg import text

_N_COLOURS = 6
_LOG_SPAN = 30  # fastest / slowest from which a linear axis would hide the slow


def is_unlimited(row: Row) -> bool:
    """Whether it could take as much memory as it liked."""
    return row.budget_mb is None and row.cap is None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a plot shows of a row. Panels are split by shape, test and, if ``by_depth``, depth."""

    title: str
    anchor: str
    note: str
    x_title: str
    x: Callable[[Row], float | None]
    by_depth: bool = True
    by_type: bool = False  # a series, and a colour, for each type; else points are labelled
    is_log: bool = False
    has_ticks_at_values: bool = False


_PLANS = (
    _Plan(
        "Speed and bits per weight", "bits",
        "Generated or prompt tokens in a second. Bars around points go from the least to the most "
        "of all rounds.",
        "bits per weight, all tensors",
        lambda row: row.bits_per_weight if is_unlimited(row) else None,
    ),
    _Plan(
        "Speed under a memory budget", "memory",
        "QSF reads from the disk for every token what does not fit into its budget.",
        "QSF's memory budget in MB, log scale",
        lambda row: row.budget_mb if row.cap is None else None,
        by_type=True, is_log=True, has_ticks_at_values=True,
    ),
    _Plan(
        "Speed in a control group", "cgroup",
        "A control group limits all memory of a process, page cache included.",
        "memory of the control group in MB, log scale",
        lambda row: row.cap.limit_mb if row.cap is not None else None,
        by_type=True, is_log=True, has_ticks_at_values=True,
    ),
    _Plan(
        "Speed and context depth", "depth",
        "Each test after so many tokens, which attention has to look at.",
        "tokens in the context before",
        lambda row: row.depth if is_unlimited(row) else None,
        by_depth=False, by_type=True, has_ticks_at_values=True,
    ),
)  # fmt: skip


def sections(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a section for each kind of plot that has something to show."""
    look = _Look(rows)
    for plan in _PLANS:
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in rows if plan.by_type else _least_depth(rows):
            if plan.x(row) is not None:
                depth = row.depth if plan.by_depth else 0
                groups.setdefault((row.shape, row.test, depth), []).append(row)
        drawn = [(group, svg) for group in groups.values() if (svg := _panel(plan, group, look))]
        if drawn:
            panels = "".join(_figure(group[0], svg, plan, rows) for group, svg in drawn)
            legend = look.legend([row for group, _ in drawn for row in group], plan.by_type)
            content = f'{legend}<div class="panels">{panels}</div>'
            yield html.section(plan.title, plan.note, content, anchor=plan.anchor)


def _least_depth(rows: Sequence[Row]) -> list[Row]:
    """Return of each shape and test the rows at the least depth."""
    least: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row.shape, row.test
        least[key] = min(row.depth, least.get(key, row.depth))
    return [row for row in rows if row.depth == least[row.shape, row.test]]


def _figure(first: Row, svg: str, plan: _Plan, rows: Sequence[Row]) -> str:
    has_shapes = len({row.shape for row in rows}) > 1
    title = f"{first.shape}, {first.test}" if has_shapes else first.test
    after = f" after {first.depth:,} tokens" if plan.by_depth and first.depth else ""
    return f"<figure><h3>{text(title + after)}</h3>{svg}</figure>"


class _Look:
    """Colours of engines and types, markers of numbers of threads: the same in all plots."""

    def __init__(self, rows: Sequence[Row]) -> None:
        kinds = dict.fromkeys((row.engine, row.type) for row in rows)
        self.colours = {kind: min(i, _N_COLOURS - 1) for i, kind in enumerate(kinds)}
        self.markers = {n: i for i, n in enumerate(sorted({row.threads for row in rows}))}

    def colour(self, row: Row, *, by_type: bool) -> int:
        """Return the colour of a type; else that of the engine, which is its first type's."""
        if by_type:
            return self.colours[row.engine, row.type]
        return next(c for (engine, _), c in self.colours.items() if engine == row.engine)

    def legend(self, rows: Sequence[Row], by_type: bool) -> str:
        entries = {
            file_text(row) if by_type else row.engine: self.colour(row, by_type=by_type)
            for row in rows
        }
        items = [f"<li>{key(None, colour)}{text(name)}</li>" for name, colour in entries.items()]
        threads = sorted({row.threads for row in rows})
        items += [f"<li>{key(self.markers[n], None)}{threads_text(n)}</li>" for n in threads]
        return f'<ul class="keys">{"".join(items)}</ul>'


def _panel(plan: _Plan, rows: Sequence[Row], look: _Look) -> str:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kind = row.type if plan.by_type else ""
        groups.setdefault((row.engine, row.threads, row.kv_type, kind), []).append(row)
    fastest: dict[tuple[str, str], Row] = {}  # of each engine and type: its point gets the name
    for row in sorted(rows, key=lambda row: row.tok_per_s.median):
        fastest[row.engine, row.type] = row
    labelled = set() if plan.by_type else {id(row) for row in fastest.values()}
    series = [
        Series(
            look.colour(group[0], by_type=plan.by_type),
            look.markers[group[0].threads],
            [_point(row, plan.x(row) or 0.0, row.type if id(row) in labelled else "")
             for row in group],
        )
        for group in groups.values()
    ]  # fmt: skip
    values = sorted({value for row in rows if (value := plan.x(row)) is not None})
    speeds = [row.tok_per_s.median for row in rows]
    is_log = min(speeds) > 0 and max(speeds) / min(speeds) > _LOG_SPAN
    return plot(
        f"{plan.title}: {rows[0].test}",
        series,
        Axis(plan.x_title, plan.is_log, values if plan.has_ticks_at_values else ()),
        Axis("tok/s, log scale" if is_log else "tok/s", is_log),
    )


def _point(row: Row, x: float, label: str) -> Point:
    speed = row.tok_per_s
    words = f"{figure(speed.median)} tok/s ({figure(speed.min)} to {figure(speed.max)})"
    return Point(x, speed.median, speed.min, speed.max, f"{row.label}: {words}", label)
