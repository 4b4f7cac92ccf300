"""The plots of the quality report as inline SVG: no script, no font, nothing from elsewhere.

Colours are classes, so that the page's style gives them for light and for dark. Shades run from
0 to 8, `e0` .. `e8` for errors and `b0` .. `b8` for bits; categories are `c0` .. `c5`. Texts are
escaped here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsf.shell.command import clean

N_SHADES = 9
N_CATEGORIES = 6

_FIRST_LIGHT_ON_DARK = 6  # shades from here on carry text of the other brightness
_DIGIT = 7.7  # widths at 12 pixels in the wider of the usual fonts
_CAPITAL = 8.7
_CELL_HEIGHT = 28
_LEAST_CELL = 24.0  # a layer's number fits above it
_LABELLED_COLUMN = 40.0  # a value fits above it
_WIDTH = 870  # what a plot is laid out for; the page scales it down
_MAX_LABEL = 24  # characters
_NEGLIGIBLE = 1e-12  # no logarithm is taken of less
_LOG_SPAN = 30  # largest / smallest from which a linear axis would hide the small


def text(value: str) -> str:
    """Return ``value`` for HTML, in text or attribute; it may come from a file."""
    return html.escape(clean(value))


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a heat map: its shade, 0 to 8, what is written in it, what a pointer shows."""

    shade: int
    label: str
    title: str


def scale_ends(values: Sequence[float], *, is_log: bool) -> tuple[float, float]:
    """Return the ends of a colour scale: the least and largest value, or somewhat further apart.

    Values that hardly differ shall look so: a logarithmic scale spans a factor of 4 at least, a
    linear one 4. Zeros are below a logarithmic scale.
    """
    if not is_log:
        low, high = min(values), max(values)
        missing = max(0.0, 4.0 - (high - low)) / 2
        return low - min(missing, low), high + missing
    positive = [value for value in values if value > _NEGLIGIBLE]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    missing = math.sqrt(max(1.0, 4.0 / (high / low)))
    return low / missing, high * missing


def shades(values: Sequence[float], *, is_log: bool) -> list[int]:
    """Return a shade for each value, from 0 at the low end of the scale; zeros get 0 as well."""
    low, high = scale_ends(values, is_log=is_log)
    if is_log:
        values = [math.log(max(value, low)) for value in values]
        low, high = math.log(low), math.log(high)
    return [min(N_SHADES - 1, int((v - low) / (high - low) * N_SHADES)) for v in values]


def heat_map(
    label: str,
    rows: Sequence[str],
    columns: Sequence[int],
    cells: Mapping[tuple[str, int], Cell],
    *,
    palette: str,
) -> str:
    """Return a grid: kinds of tensors down, layers across; what has no cell stays empty."""
    left = _CAPITAL * min(_MAX_LABEL, max(len(row) for row in rows)) + 12
    wanted = _DIGIT * max(5, *(len(cell.label) for cell in cells.values())) + 8
    is_labelled = left + wanted * len(columns) <= _WIDTH
    cell_width = wanted if is_labelled else max(_LEAST_CELL, (_WIDTH - left) / len(columns))
    width, height = left + cell_width * len(columns), _CELL_HEIGHT * len(rows) + 22
    parts = [_open(label, width, height)]
    parts += _column_labels(columns, left, cell_width, 14)
    column_idx = {column: idx for idx, column in enumerate(columns)}
    for row_idx, row in enumerate(rows):
        y = 22 + row_idx * _CELL_HEIGHT
        parts.append(
            f'<text class="ax" x="{left - 8:.0f}" y="{y + 18}" text-anchor="end">'
            f"{text(row[:_MAX_LABEL])}</text>"
        )
        for column, idx in column_idx.items():
            cell = cells.get((row, column))
            if cell is None:
                continue
            x = left + idx * cell_width
            parts.append(
                f'<g><title>{text(cell.title)}</title><rect class="{palette}{cell.shade}" '
                f'x="{x:.1f}" y="{y}" width="{cell_width - 2:.1f}" height="{_CELL_HEIGHT - 2}" '
                'rx="3"/>'
            )
            if is_labelled:
                ink = "hi" if cell.shade >= _FIRST_LIGHT_ON_DARK else "lo"
                parts.append(
                    f'<text class="{ink}" x="{x + cell_width / 2 - 1:.1f}" y="{y + 17}" '
                    f'text-anchor="middle">{text(cell.label)}</text>'
                )
            parts.append("</g>")
    return "".join([*parts, "</svg>"])


def columns_chart(
    label: str,
    columns: Sequence[int],
    values: Sequence[float],
    titles: Sequence[str],
    marked: frozenset[int],
) -> str:
    """Return vertical bars over layers; those of ``marked`` are drawn in the other colour."""
    plot_height, top, left = 150.0, 18.0, 12.0
    width_each = min(46.0, max(_LEAST_CELL, (_WIDTH - left) / len(columns)))
    width, height = left + width_each * len(columns), plot_height + top + 24
    heights = _bar_heights(values, plot_height)
    parts = [_open(label, width, height)]
    base = top + plot_height
    for idx, (column, value, bar, title) in enumerate(
        zip(columns, values, heights, titles, strict=True)
    ):
        x = left + idx * width_each
        shade = "c1" if column in marked else "c0"
        parts.append(
            f'<g><title>{text(title)}</title><rect class="{shade}" x="{x:.1f}" '
            f'y="{base - bar:.1f}" width="{width_each - 4:.1f}" height="{bar:.1f}" rx="2"/>'
        )
        if width_each >= _LABELLED_COLUMN:
            parts.append(
                f'<text class="ax" x="{x + width_each / 2 - 2:.1f}" y="{base - bar - 5:.1f}" '
                f'text-anchor="middle">{value:.3g}</text>'
            )
        parts.append("</g>")
    parts.append(f'<line class="base" x1="0" x2="{width:.0f}" y1="{base}" y2="{base}"/>')
    parts += _column_labels(columns, left, width_each, base + 16)
    return "".join([*parts, "</svg>"])


def is_log_scale(values: Sequence[float]) -> bool:
    """Would a linear axis hide the small of these values?"""
    return min(values) > _NEGLIGIBLE and max(values) / min(values) > _LOG_SPAN


def _bar_heights(values: Sequence[float], full: float) -> list[float]:
    """Heights in pixels, at least 2: linear from 0, or logarithmic from half the least."""
    largest = max(values)
    if largest <= 0:
        return [2.0] * len(values)
    if is_log_scale(values):
        start = math.log(min(values) / 2)
        span = math.log(largest) - start
        return [max(2.0, full * (math.log(value) - start) / span) for value in values]
    return [max(2.0, full * value / largest) for value in values]


def bar(fraction: float, category: int) -> str:
    """Return a horizontal bar that fills ``fraction`` of whatever width it is given."""
    width = min(100.0, max(0.4, 100 * fraction))
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="10"/><rect class="c{category % N_CATEGORIES}" '
        f'width="{width:.2f}" height="10"/></svg>'
    )


def stacked_bar(label: str, parts: Sequence[tuple[float, int, str]]) -> str:
    """Return one bar of (fraction, category, title) beside each other."""
    pieces = []
    x = 0.0
    for fraction, category, title in parts:
        width = 100 * fraction
        pieces.append(
            f'<rect class="c{category}" x="{x:.3f}" width="{width:.3f}" '
            f'height="10"><title>{text(title)}</title></rect>'
        )
        x += width
    return (
        f'<svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(label)}">{"".join(pieces)}</svg>'
    )


def legend(palette: str, low: str, high: str) -> str:
    """Return the scale of a heat map with the values at its ends."""
    fields = "".join(
        f'<rect class="{palette}{shade}" x="{shade * 16}" width="16" height="10"/>'
        for shade in range(N_SHADES)
    )
    return (
        f'<p class="legend"><span>{text(low)}</span><svg width="144" height="10" '
        f'viewBox="0 0 144 10" role="img" aria-label="scale from {text(low)} to {text(high)}">'
        f"{fields}</svg><span>{text(high)}</span></p>"
    )


def _open(label: str, width: float, height: float) -> str:
    """Begin a plot that shrinks with the page as far as it stays readable, then scrolls."""
    least, most = 0.85 * width, max(width, min(_WIDTH, 1.25 * width))
    return (
        f'<svg class="plot" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{text(label)}" style="min-width:{least:.0f}px;max-width:{most:.0f}px">'
    )


def _column_labels(columns: Sequence[int], left: float, each: float, y: float) -> list[str]:
    longest = max(len(str(column)) for column in columns)
    step = math.ceil((longest * _DIGIT + 2) / each)
    return [
        f'<text class="ax" x="{left + idx * each + each / 2 - 1:.1f}" y="{y:.0f}" '
        f'text-anchor="middle">{column}</text>'
        for idx, column in enumerate(columns)
        if idx % step == 0
    ]
