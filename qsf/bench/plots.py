"""Plots as inline SVG: points with error bars on axes that are linear or logarithmic.

A plot is 360 units wide, so that its text can be read on a phone; colours are the classes of the
page's style (`c0` ..), shapes of the markers `MARKERS`. All that is drawn comes from a file
somebody else may have made: texts are escaped here, and numbers that no axis can show are left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qsf_converter.report.svg import text

WIDTH = 360
_HEIGHT = 262
_TOP, _RIGHT, _BOTTOM = 24, 14, 42
_LETTER = 7.2  # mean width at 12 pixels in the wider of the usual fonts
_LEAST, _MOST = 1e-9, 1e15  # what an axis shows; a speed beyond them is no speed
_HIT = 11  # radius in which a pointer finds a point
_RADIUS = 5
_MAX_TICKS = 6
_MAX_LABEL = 14  # characters

MARKERS = (
    "M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0-9.2 0Z",
    "M-4.1-4.1H4.1V4.1H-4.1Z",
    "M0-5.8L5.8 0L0 5.8L-5.8 0Z",
    "M0-5.4L5.2 4H-5.2Z",
    "M0 5.4L5.2-4H-5.2Z",
)


def figure(value: float) -> str:
    """Return three digits of a number, more of a whole one: 4.20, 34.2, 1,234."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


@dataclass(frozen=True, slots=True)
class Point:
    """A value with what lies around it. ``label`` is written beside it where there is room."""

    x: float
    y: float
    low: float
    high: float
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, 0 to 5, and one of `MARKERS`; joined by a line if ``is_joined``."""

    colour: int
    marker: int
    points: Sequence[Point]
    is_joined: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows. ``ticks``: values to mark; none given: round ones."""

    title: str
    is_log: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Roof:
    """A line that no point should be above, and its name, written along it."""

    ends: tuple[tuple[float, float], tuple[float, float]]
    name: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels, ``first`` being the pixel of ``low``."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool
    ticks: list[float] = field(default_factory=list)

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)


@dataclass(slots=True)
class _Boxes:
    """Where something is written already."""

    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def add(self, x: float, y: float, width: float, height: float) -> None:
        self.taken.append((x, y, x + width, y + height))

    def is_free(self, x: float, y: float, width: float, height: float) -> bool:
        return all(
            x + width <= left or right <= x or y + height <= top or bottom <= y
            for left, top, right, bottom in self.taken
        )


def is_shown(value: float, *, is_log: bool) -> bool:
    """Can an axis show it?"""
    return math.isfinite(value) and (_LEAST <= value <= _MOST or (value == 0 and not is_log))


def shown(series: Sequence[Series], x: Axis, y: Axis) -> list[Series]:
    """Return what can be drawn; error bars are cut where an axis ends."""
    kept = []
    for one in series:
        points = [
            Point(p.x, p.y, *_ends(p, y), p.title, p.label)
            for p in one.points
            if is_shown(p.x, is_log=x.is_log) and is_shown(p.y, is_log=y.is_log)
        ]
        if points:
            kept.append(Series(one.colour, one.marker, points, one.is_joined))
    return kept


def _ends(point: Point, axis: Axis) -> tuple[float, float]:
    low, high = (
        end if is_shown(end, is_log=axis.is_log) else point.y for end in (point.low, point.high)
    )
    return min(low, point.y), max(high, point.y)


def plot(
    label: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    roofs: Sequence[Roof] = (),
    *,
    height: int = _HEIGHT,
) -> str:
    """Return the plot; nothing unless two points at least are at different places across."""
    series = shown(series, x, y)
    points = [point for one in series for point in one.points]
    if len({point.x for point in points}) < 2:
        return ""
    roof_ends = [end for roof in roofs for end in roof.ends]
    ys = [v for p in points for v in (p.low, p.y, p.high)] + [end[1] for end in roof_ends]
    y_ends = _range(ys, y)
    left = 14 + _LETTER * max(len(label) for label in tick_texts(y_ends[2], is_log=y.is_log))
    y_scale = _Scale(*y_ends[:2], height - _BOTTOM, _TOP, y.is_log, y_ends[2])
    x_ends = _range([p.x for p in points] + [end[0] for end in roof_ends], x)
    x_scale = _Scale(*x_ends[:2], left, WIDTH - _RIGHT, x.is_log, x_ends[2])
    boxes = _Boxes()
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(label)}">',
        *_axes(x_scale, y_scale, x.title, y.title),
        *_roofs(roofs, x_scale, y_scale),
        *(_line(one, x_scale, y_scale) for one in series if one.is_joined),
        *(_error_bar(one.colour, p, x_scale, y_scale) for one in series for p in one.points),
        *(_marker(one, p, x_scale, y_scale, boxes) for one in series for p in one.points),
        *_labels(points, x_scale, y_scale, boxes),
        "</svg>",
    ]
    return "".join(parts)


def key(marker: int | None, colour: int | None) -> str:
    """Return a marker for a legend; without a colour in that of the text, without a shape a bar."""
    shape = "M-6-3H6V3H-6Z" if marker is None else MARKERS[marker % len(MARKERS)]
    style = "ink" if colour is None else f"c{colour}"
    return (
        '<svg class="key" viewBox="-7 -7 14 14" aria-hidden="true">'
        f'<path class="{style}" d="{shape}"/></svg>'
    )


# ---- axes ----


def tick_texts(ticks: Sequence[float], *, is_log: bool = False) -> list[str]:
    """Return the numbers of ticks as short as they go; those of a linear axis are alike."""
    if is_log or max(ticks) >= 1e6 or max(ticks) < 1e-3:
        return [_tick_text(tick) for tick in ticks]
    n_digits = next(
        (n for n in range(7) if all(math.isclose(t, round(t, n), rel_tol=1e-6) for t in ticks)), 7
    )
    return [f"{tick:,.{n_digits}f}" for tick in ticks]


def _tick_text(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= value < 1e6:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float, list[float]]:
    """Return the ends of an axis and its ticks."""
    low, high = min(values), max(values)
    if axis.is_log:
        room = max(1.25, (high / low) ** 0.06)
        low, high = low / room, high * room
        ticks = [t for t in axis.ticks if low <= t <= high] or _log_ticks(low, high)
        return low, high, ticks if len(ticks) > 1 else _round_ticks(low, high)
    if axis.from_zero:
        high = max(high, _LEAST)
        step = _step(high)
        n_steps = math.ceil(high / step - 1e-9)
        return 0.0, n_steps * step, [idx * step for idx in range(n_steps + 1)]
    room = 0.08 * (high - low) or max(high * 0.1, _LEAST)
    low, high = low - room, high + room
    return low, high, [t for t in axis.ticks if low <= t <= high] or _round_ticks(low, high)


def _round_ticks(low: float, high: float) -> list[float]:
    step = _step(high - low)
    return [idx * step for idx in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, of which 4 to 9 make ``span``."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(
        factor * power for factor in (5, 2, 1) if factor == 1 or span / (factor * power) >= 4
    )


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) <= _MAX_TICKS:
            break
    return ticks[:: max(1, math.ceil(len(ticks) / _MAX_TICKS))]


def _axes(x: _Scale, y: _Scale, x_title: str, y_title: str) -> Iterable[str]:
    yield f'<text class="ax" x="0" y="12">{text(y_title)}</text>'
    for tick, label in zip(y.ticks, tick_texts(y.ticks, is_log=y.is_log), strict=True):
        height = y.at(tick)
        kind = "base" if tick == 0 else "grid"
        yield f'<path class="{kind}" d="M{x.first:.1f} {height:.1f}H{x.last:.1f}"/>'
        yield (
            f'<text class="ax" x="{x.first - 7:.1f}" y="{height + 4:.1f}" text-anchor="end">'
            f"{label}</text>"
        )
    end = -math.inf
    for tick, label in zip(x.ticks, tick_texts(x.ticks, is_log=x.is_log), strict=True):
        middle = x.at(tick)
        half = _LETTER * len(label) / 2
        yield f'<path class="grid" d="M{middle:.1f} {y.first:.1f}v5"/>'
        if middle - half < end + 8:
            continue
        middle = min(middle, WIDTH - half)
        end = middle + half
        yield (
            f'<text class="ax" x="{middle:.1f}" y="{y.first + 18:.1f}" text-anchor="middle">'
            f"{label}</text>"
        )
    yield (
        f'<text class="ax" x="{x.last:.1f}" y="{y.first + _BOTTOM - 5:.1f}" text-anchor="end">'
        f"{text(x_title)}</text>"
    )
    yield f'<path class="base" d="M{x.first:.1f} {y.first:.1f}H{x.last:.1f}"/>'


# ---- what is drawn on them ----


def _roofs(roofs: Sequence[Roof], x: _Scale, y: _Scale) -> Iterable[str]:
    for roof in roofs:
        (x0, y0), (x1, y1) = ((x.at(px), y.at(py)) for px, py in roof.ends)
        yield f'<path class="roof" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>'
        if y0 == y1:  # level: above its end, where no roof goes down
            place, anchor = f'x="{x1:.1f}" y="{y1 - 6:.1f}"', "end"
        else:
            angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
            middle = f"{(x0 + x1) / 2:.1f} {(y0 + y1) / 2:.1f}"
            place = f'transform="translate({middle}) rotate({angle:.1f}) translate(0 -6)"'
            anchor = "middle"
        yield f'<text class="ax" {place} text-anchor="{anchor}">{text(roof.name)}</text>'


def _line(one: Series, x: _Scale, y: _Scale) -> str:
    points = sorted(one.points, key=lambda p: p.x)
    if len(points) < 2:
        return ""
    steps = "L".join(f"{x.at(p.x):.1f} {y.at(p.y):.1f}" for p in points)
    return f'<path class="join s{one.colour}" d="M{steps}"/>'


def _error_bar(colour: int, point: Point, x: _Scale, y: _Scale) -> str:
    middle, top, bottom = x.at(point.x), y.at(point.high), y.at(point.low)
    if bottom - top < 0.5:
        return ""
    return (
        f'<path class="err s{colour}" d="M{middle:.1f} {top:.1f}V{bottom:.1f}'
        f'M{middle - 4:.1f} {top:.1f}h8M{middle - 4:.1f} {bottom:.1f}h8"/>'
    )


def _marker(one: Series, point: Point, x: _Scale, y: _Scale, boxes: _Boxes) -> str:
    px, py = x.at(point.x), y.at(point.y)
    boxes.add(px - _RADIUS, py - _RADIUS, 2 * _RADIUS, 2 * _RADIUS)
    return (
        f'<g class="pt" transform="translate({px:.1f} {py:.1f})"><title>{text(point.title)}</title>'
        f'<circle r="{_HIT}" class="hit"/>'
        f'<path class="c{one.colour}" d="{MARKERS[one.marker % len(MARKERS)]}"/></g>'
    )


def _labels(points: Sequence[Point], x: _Scale, y: _Scale, boxes: _Boxes) -> Iterable[str]:
    """Names beside points: above, below, right or left; none where there is no room."""
    for point in points:
        if not point.label:
            continue
        name = point.label[:_MAX_LABEL]
        px, py, width, height = x.at(point.x), y.at(point.y), _LETTER * len(name), 13
        top, bottom = y.at(point.high), y.at(point.low)
        places = (
            (px - width / 2, min(top, py - _RADIUS) - height - 3),
            (px - width / 2, max(bottom, py + _RADIUS) + 3),
            (px + _RADIUS + 4, py - height / 2),
            (px - _RADIUS - 4 - width, py - height / 2),
        )
        for left, upper in places:
            is_inside = x.first <= left and left + width <= WIDTH and 14 <= upper < y.first - height
            if is_inside and boxes.is_free(left, upper, width, height):
                boxes.add(left, upper, width, height)
                yield (
                    f'<text class="lo" x="{left + width / 2:.1f}" y="{upper + 11:.1f}" '
                    f'text-anchor="middle">{text(name)}</text>'
                )
                break
