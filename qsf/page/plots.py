"""A plot as inline SVG: points with error bars on axes that are linear or logarithmic.

A plot is 360 units wide, so that its text can be read on a phone. Colours are the classes of the
page's style (`c0` ..), shapes of the markers `MARKERS`. Texts are escaped here, and numbers that no
axis can show are left out: all of it may come from somebody else's file.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qsf.page.svg import text

WIDTH, HEIGHT = 360, 262
_TOP, _RIGHT, _BOTTOM = 24, 14, 42
_LETTER = 7.2  # mean width at 12 pixels in the wider of the usual fonts
_LEAST, _MOST = 1e-9, 1e15  # the values that an axis shows
_MAX_TICKS = 6
_MAX_LABEL = 14  # characters

MARKERS = (
    "M-4.6 0a4.6 4.6 0 1 0 9.2 0a4.6 4.6 0 1 0-9.2 0Z",
    "M-4.1-4.1H4.1V4.1H-4.1Z",
    "M0-5.8L5.8 0L0 5.8L-5.8 0Z",
    "M0-5.4L5.2 4H-5.2Z",
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
    """A value with its spread. ``label`` is written beside it if there is room."""

    x: float
    y: float
    low: float
    high: float
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, 0 to 5, and one of `MARKERS`, joined by a line."""

    colour: int
    marker: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis; a linear one of ``y`` begins at zero. ``ticks``: values to mark, else round ones."""

    title: str
    is_log: bool = False
    ticks: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels: ``first`` is the pixel of ``low``."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)


def _is_shown(value: float, axis: Axis) -> bool:
    in_range = _LEAST <= value <= _MOST or (value == 0 and not axis.is_log)
    return math.isfinite(value) and in_range


def plot(label: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Return the plot; "" unless at least two points have different values of x."""
    shown = [
        Series(one.colour, one.marker,
               [p for p in one.points if _is_shown(p.x, x) and _is_shown(p.y, y)])
        for one in series
    ]  # fmt: skip
    points = [p for one in shown for p in one.points]
    if len({p.x for p in points}) < 2:
        return ""
    spreads = [v for p in points for v in (p.low, p.y, p.high) if _is_shown(v, y)]
    low, high, ticks = _range(spreads, y, from_zero=not y.is_log)
    left = 14 + _LETTER * max(map(len, tick_texts(ticks, is_log=y.is_log)))
    y_scale = _Scale(low, high, HEIGHT - _BOTTOM, _TOP, y.is_log, ticks)
    low, high, ticks = _range([p.x for p in points], x, from_zero=False)
    x_scale = _Scale(low, high, left, WIDTH - _RIGHT, x.is_log, ticks)
    return "".join(
        [
            f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{text(label)}">',
            *_axes(x_scale, y_scale, x.title, y.title),
            *(part for one in shown for part in _drawn(one, x_scale, y_scale, y)),
            *_labels(points, x_scale, y_scale),
            "</svg>",
        ]
    )


def key(marker: int | None, colour: int | None) -> str:
    """Return a legend's marker; without a colour in that of the text, without a shape a bar."""
    shape = "M-6-3H6V3H-6Z" if marker is None else MARKERS[marker % len(MARKERS)]
    style = "ink" if colour is None else f"c{colour}"
    return (
        '<svg class="key" viewBox="-7 -7 14 14" aria-hidden="true">'
        f'<path class="{style}" d="{shape}"/></svg>'
    )


# ---- axes ----


def tick_texts(ticks: Sequence[float], *, is_log: bool = False) -> list[str]:
    """Return the numbers of ticks as short as they go; those of a linear axis are alike."""
    if max(ticks) >= 1e6 or max(ticks) < 1e-3:
        return [f"{tick:.4g}" for tick in ticks]
    if is_log:
        return [f"{tick:,.6g}" for tick in ticks]
    n_digits = next(
        (n for n in range(7) if all(math.isclose(t, round(t, n), rel_tol=1e-6) for t in ticks)), 7
    )
    return [f"{tick:,.{n_digits}f}" for tick in ticks]


def _range(
    values: Sequence[float], axis: Axis, *, from_zero: bool
) -> tuple[float, float, list[float]]:
    """Return the ends of an axis and its ticks."""
    low, high = min(values), max(values)
    if axis.is_log:
        room = max(1.25, (high / low) ** 0.06)
        low, high = low / room, high * room
        ticks = [t for t in axis.ticks if low <= t <= high] or _log_ticks(low, high)
        return low, high, ticks if len(ticks) > 1 else _round_ticks(low, high)
    if from_zero:
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
    return next(f * power for f in (5, 2, 1) if f == 1 or span / (f * power) >= 4)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) <= _MAX_TICKS:
            break
    return ticks[:: max(1, math.ceil(len(ticks) / _MAX_TICKS))]


def _axes(x: _Scale, y: _Scale, x_title: str, y_title: str) -> Iterator[str]:
    yield f'<text class="ax" x="0" y="12">{text(y_title)}</text>'
    for tick, label in zip(y.ticks, tick_texts(y.ticks, is_log=y.is_log), strict=True):
        at = y.at(tick)
        yield f'<path class="grid" d="M{x.first:.1f} {at:.1f}H{x.last:.1f}"/>'
        yield _text(x.first - 7, at + 4, "end", label)
    end = -math.inf
    for tick, label in zip(x.ticks, tick_texts(x.ticks, is_log=x.is_log), strict=True):
        at, half = x.at(tick), _LETTER * len(label) / 2
        yield f'<path class="grid" d="M{at:.1f} {y.first:.1f}v5"/>'
        if at - half < end + 8:
            continue
        end = min(at, WIDTH - half) + half
        yield _text(end - half, y.first + 18, "middle", label)
    yield _text(x.last, y.first + _BOTTOM - 5, "end", text(x_title))
    yield f'<path class="axis" d="M{x.first:.1f} {y.first:.1f}H{x.last:.1f}"/>'


def _text(x: float, y: float, anchor: str, content: str, style: str = "ax") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


# ---- points ----


def _drawn(one: Series, x: _Scale, y: _Scale, axis: Axis) -> Iterator[str]:
    points = sorted(one.points, key=lambda p: p.x)
    if len(points) > 1:
        steps = "L".join(f"{x.at(p.x):.1f} {y.at(p.y):.1f}" for p in points)
        yield f'<path class="join s{one.colour}" d="M{steps}"/>'
    for p in points:
        px, py = x.at(p.x), y.at(p.y)
        low, high = (v if _is_shown(v, axis) else p.y for v in (p.low, p.high))
        if (bottom := y.at(low)) - (top := y.at(high)) >= 0.5:
            yield (
                f'<path class="err s{one.colour}" d="M{px:.1f} {top:.1f}V{bottom:.1f}'
                f'M{px - 4:.1f} {top:.1f}h8M{px - 4:.1f} {bottom:.1f}h8"/>'
            )
        yield (
            f'<g class="pt" transform="translate({px:.1f} {py:.1f})">'
            f'<title>{text(p.title)}</title><circle r="11" class="hit"/>'
            f'<path class="c{one.colour}" d="{MARKERS[one.marker % len(MARKERS)]}"/></g>'
        )


def _labels(points: Sequence[Point], x: _Scale, y: _Scale) -> Iterator[str]:
    """Yield the names of points, above or below them; none where another name is."""
    taken: list[tuple[float, float, float]] = []  # middle, baseline, half of the width
    for p in points:
        if not p.label:
            continue
        name = p.label[:_MAX_LABEL]
        half = _LETTER * len(name) / 2
        at = min(max(x.at(p.x), x.first + half), WIDTH - half)
        for base in (min(y.at(p.high), y.at(p.y)) - 8, max(y.at(p.low), y.at(p.y)) + 18):
            is_free = all(abs(at - a) > half + h or abs(base - b) > 13 for a, b, h in taken)
            if is_free and _TOP < base < y.first:
                taken.append((at, base, half))
                yield _text(at, base, "middle", text(name), "lo")
                break
