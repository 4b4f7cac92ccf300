"""Which plots the page of a benchmark has: from rows to panels, one for each shape and test."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qsf.bench.plots import Axis, Point, Roof, Series, figure, is_shown, key, plot
from qsf.bench.results import Limits, Row
from qsf_converter.report.svg import text

_COLOURS = {"qsf": (0, 2, 3, 4, 1), "llama.cpp": (1, 4, 3, 2, 0)}  # in the order of choice
_LAST_COLOUR = 5
_LOG_SPAN = 30  # fastest / slowest from which the slow would lie on a linear axis' bottom
_ROOFLINE_HEIGHT = 380
_MAX_KEYS = 24  # of a legend
_SPEED = "tok/s"
_TEST = re.compile(r"(pp|tg)(\d{1,9})")
_ENGINES = {"qsf": "QSF"}


def engine_name(engine: str) -> str:
    """Return how it is written."""
    return _ENGINES.get(engine, engine)


def tests_tokens(test: str) -> int | None:
    """Return the tokens of ``pp512``; None for another name."""
    match = _TEST.fullmatch(test)
    return int(match[2]) if match else None


def is_generating(test: str) -> bool:
    """Is it a test of one token after another?"""
    return test.startswith("tg")


def test_words(test: str) -> str:
    """Return what a test does, such as "a prompt of 512 tokens"; nothing for another name."""
    match = _TEST.fullmatch(test)
    if match is None:
        return ""
    noun = "token" if int(match[2]) == 1 else "tokens"
    if match[1] == "pp":
        return f"a prompt of {int(match[2]):,} {noun}"
    return f"{int(match[2]):,} {noun}, one by one"


def threads_words(threads: int) -> str:
    """Return "1 thread", "2 threads"."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def speed_words(row: Row) -> str:
    """Return the speed of a row with its spread."""
    speed = row.tok_per_s
    return f"{figure(speed.median)} tok/s ({figure(speed.min)} to {figure(speed.max)})"


def is_unlimited(row: Row) -> bool:
    """Could it take as much memory as it liked?"""
    return row.budget_mb is None and row.cap is None


@dataclass(frozen=True, slots=True)
class Look:
    """How engines, types and numbers of threads are drawn, the same in all plots of a page."""

    colours: dict[tuple[str, str], int]
    markers: dict[int, int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Look:
        """Return that of these rows."""
        types: dict[str, list[str]] = {}
        for row in rows:
            known = types.setdefault(row.engine, [])
            if row.type not in known:
                known.append(row.type)
        # The first types of all engines choose first: those are the colours of the engines.
        pairs = [(idx, engine, kind) for engine, kinds in types.items()
                 for idx, kind in enumerate(kinds)]  # fmt: skip
        colours: dict[tuple[str, str], int] = {}
        for _, engine, kind in sorted(pairs, key=lambda pair: pair[0]):
            free = [c for c in _COLOURS.get(engine, ()) if c not in colours.values()]
            colours[engine, kind] = free[0] if free else _LAST_COLOUR
        threads = sorted({row.threads for row in rows})
        return cls(colours, {n: idx for idx, n in enumerate(threads)})

    def of_engine(self, engine: str) -> int:
        """Return the colour of an engine where types are not told apart."""
        return _COLOURS.get(engine, (_LAST_COLOUR,))[0]

    def legend(self, rows: Sequence[Row], *, by_type: bool) -> str:
        """Return the colours and shapes that these rows have."""
        entries: dict[str, int] = {}
        for row in rows:
            if by_type:
                name = f"{engine_name(row.engine)} {row.type}"
                entries.setdefault(name, self.colours[row.engine, row.type])
            else:
                entries.setdefault(engine_name(row.engine), self.of_engine(row.engine))
        shown = list(entries.items())[:_MAX_KEYS]
        items = [f"<li>{key(None, colour)}{text(name)}</li>" for name, colour in shown]
        threads = sorted({row.threads for row in rows})[:_MAX_KEYS]
        items += [f"<li>{key(self.markers[n], None)}{threads_words(n)}</li>" for n in threads]
        return f'<ul class="keys">{"".join(items)}</ul>'


@dataclass(frozen=True, slots=True)
class Plan:
    """What a kind of plot shows of a row: where, in which panel, and in which series of it."""

    x: Callable[[Row], float | None]
    x_title: str
    panel: Callable[[Row], tuple[object, ...]]  # after the shape and the test
    by_type: bool
    caption: Callable[[Row], str] = lambda _row: ""
    is_log: bool = False
    ticks_are_values: bool = False
    is_joined: bool = True
    is_labelled: bool = False


def _limit_mb(row: Row) -> float | None:
    return row.cap.limit_mb if row.cap is not None else row.budget_mb


def _depth_words(row: Row) -> str:
    return f"after {row.depth:,} tokens" if row.depth else ""


BY_BITS = Plan(
    lambda row: row.bits_per_weight,
    "bits per weight, all tensors",
    lambda row: (row.depth,),
    by_type=False,
    caption=_depth_words,
    is_labelled=True,
)
BY_BUDGET = Plan(
    _limit_mb,
    "QSF's memory budget in MB, log scale",
    lambda row: (row.depth,),
    by_type=True,
    caption=_depth_words,
    is_log=True,
    ticks_are_values=True,
)
BY_CAP = Plan(
    _limit_mb,
    "memory of the control group in MB, log scale",
    lambda row: (row.depth,),
    by_type=True,
    caption=_depth_words,
    is_log=True,
    ticks_are_values=True,
)
BY_DEPTH = Plan(
    lambda row: row.depth,
    "tokens in the context before",
    lambda _row: (),
    by_type=True,
    ticks_are_values=True,
)
BY_QUALITY = Plan(
    lambda row: row.quality.perplexity if row.quality else None,
    "perplexity: less is better",
    lambda row: (row.depth,),
    by_type=False,
    caption=_depth_words,
    is_joined=False,
    is_labelled=True,
)


def panels(
    plan: Plan, rows: Sequence[Row], look: Look, *, name: str
) -> tuple[list[str], list[Row]]:
    """Return the panels of a plan, as HTML, and the rows that are in one of them."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if plan.x(row) is not None:
            groups.setdefault((row.shape, row.test, *plan.panel(row)), []).append(row)
    several = len({row.shape for row in rows}) > 1
    drawn: list[str] = []
    kept: list[Row] = []
    for group in groups.values():
        svg = _panel(plan, group, look, name)
        if svg:
            first = group[0]
            words = (test_words(first.test), plan.caption(first))
            title = f"{first.shape}, {first.test}" if several else first.test
            drawn.append(_figure(title, ", ".join(word for word in words if word), svg))
            kept += group
    return drawn, kept


def _figure(title: str, words: str, svg: str) -> str:
    more = f" <span>{text(words)}</span>" if words else ""
    return f"<figure><h3>{text(title)}{more}</h3>{svg}</figure>"


def _panel(plan: Plan, rows: Sequence[Row], look: Look, name: str) -> str:
    series: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        of_type = (row.type,) if plan.by_type else ()
        series.setdefault((row.engine, row.threads, row.kv_type, *of_type), []).append(row)
    values = [value for row in rows if (value := plan.x(row)) is not None]
    x = Axis(
        plan.x_title,
        is_log=plan.is_log,
        ticks=sorted(set(values)) if plan.ticks_are_values else (),
    )
    y = _speed_axis(rows)
    labelled = _labelled(rows) if plan.is_labelled else set()
    drawn = [
        Series(
            look.colours[one[0].engine, one[0].type] if plan.by_type
            else look.of_engine(one[0].engine),
            look.markers[one[0].threads],
            [_point(row, plan.x(row) or 0.0, row.type if id(row) in labelled else "")
             for row in one],
            is_joined=plan.is_joined,
        )
        for one in series.values()
    ]  # fmt: skip
    return plot(f"{name}: {rows[0].test}", drawn, x, y)


def _speed_axis(rows: Sequence[Row]) -> Axis:
    speeds = [row.tok_per_s.median for row in rows]
    if min(speeds) > 0 and max(speeds) / min(speeds) > _LOG_SPAN:
        return Axis(f"{_SPEED}, log scale", is_log=True)
    return Axis(_SPEED, from_zero=True)


def _labelled(rows: Sequence[Row]) -> set[int]:
    """The fastest row of each engine and type: its point gets the name of the type."""
    fastest: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = fastest.setdefault((row.engine, row.type), row)
        if row.tok_per_s.median > known.tok_per_s.median:
            fastest[row.engine, row.type] = row
    return {id(row) for row in fastest.values()}


def _point(row: Row, x: float, label: str) -> Point:
    speed = row.tok_per_s
    return Point(x, speed.median, speed.min, speed.max, f"{row.label}: {speed_words(row)}", label)


# ---- the roofline ----


@dataclass(frozen=True, slots=True)
class OnRoofline:
    """A row as the roofline sees it."""

    row: Row
    madds_per_byte: float
    gmadds_per_s: float


def on_roofline(row: Row) -> OnRoofline | None:
    """Return where a row is: multiply-adds a byte and a second; None when they are not known."""
    if not row.madds_per_token or not row.bytes_per_token:
        return None
    n_tokens = 1 if is_generating(row.test) else tests_tokens(row.test)
    if n_tokens is None:
        return None
    speed = row.madds_per_token * row.tok_per_s.median / 1e9
    return OnRoofline(row, row.madds_per_token * n_tokens / row.bytes_per_token, speed)


def most_threads(limits: dict[str, float]) -> tuple[str, float] | None:
    """Return the limit of the largest number of threads; None when there is none."""
    counted = [name for name in limits if name.isdecimal() and limits[name] > 0]
    name = max(counted, key=lambda one: int(one[:9]), default=None)
    return None if name is None else (name, limits[name])


def roofline(placed: Sequence[OnRoofline], limits: Limits, look: Look) -> str:
    """Return the plot of rows under the limits of the machine; nothing without limits."""
    memory, arithmetic = most_threads(limits.memory_gb_per_s), most_threads(limits.gmadds_per_s)
    placed = [
        one
        for one in placed
        if is_shown(one.madds_per_byte, is_log=True) and is_shown(one.gmadds_per_s, is_log=True)
    ]
    if memory is None or arithmetic is None or not placed:
        return ""
    ridge = arithmetic[1] / memory[1]
    first = min(ridge, *(one.madds_per_byte for one in placed)) / 2
    last = max(ridge, *(one.madds_per_byte for one in placed)) * 2
    roofs = [
        Roof(((first, first * memory[1]), (ridge, arithmetic[1])),
             f"memory, {figure(memory[1])} GB/s"),
        Roof(((ridge, arithmetic[1]), (last, arithmetic[1])), "arithmetic"),
    ]  # fmt: skip
    disk = limits.best_disk_gb_per_s
    if disk and any(one.row.limited_by == "disk" for one in placed):
        foot = arithmetic[1] / disk
        end = (last, last * disk) if last < foot else (foot, arithmetic[1])
        roofs.append(Roof(((first, first * disk), end), f"disk, {figure(disk)} GB/s"))
    if not all(is_shown(v, is_log=True) for roof in roofs for end in roof.ends for v in end):
        return ""
    series: dict[tuple[str, str, int], list[Point]] = {}
    for one in placed:
        scale = one.gmadds_per_s / one.row.tok_per_s.median if one.row.tok_per_s.median else 0.0
        title = (
            f"{one.row.label}: {figure(one.gmadds_per_s)} billion multiply-adds/s, "
            f"{figure(one.madds_per_byte)} a byte"
        )
        spread = one.row.tok_per_s
        series.setdefault((one.row.engine, one.row.type, one.row.threads), []).append(
            Point(one.madds_per_byte, one.gmadds_per_s, spread.min * scale, spread.max * scale,
                  title)
        )  # fmt: skip
    drawn = [
        Series(look.colours[engine, kind], look.markers[threads], points, is_joined=False)
        for (engine, kind, threads), points in series.items()
    ]
    x = Axis("multiply-adds per byte, log scale", is_log=True)
    y = Axis("billion multiply-adds/s, log scale", is_log=True)
    return plot("roofline", drawn, x, y, roofs, height=_ROOFLINE_HEIGHT)


def least_depth(rows: Iterable[Row]) -> list[Row]:
    """Return of each shape, test and engine the rows at the least depth."""
    kept = list(rows)
    least: dict[tuple[str, str], int] = {}
    for row in kept:
        least[row.shape, row.test] = min(row.depth, least.get((row.shape, row.test), row.depth))
    return [row for row in kept if row.depth == least[row.shape, row.test]]
