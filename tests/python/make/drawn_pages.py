"""The page of a benchmark as a reader sees it: tables by their columns, plots by their axes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import math
import re
from xml.etree import ElementTree

from qsf.bench.judge.results import Results, Row

# Of a page with everything in it, in their order.
SECTIONS = (
    *("failed", "changes", "rows", "ratios", "bits", "memory", "cgroup", "depth"),
    *("time", "files", "limits", "notes", "method"),
)


def section(page: str, anchor: str) -> str:
    """The section of an id; nothing when it is not there."""
    found = re.search(rf'<section id="{anchor}".*?</section>', page, re.DOTALL)
    return found[0] if found else ""


def anchors(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


def svgs(text: str) -> list[ElementTree.Element]:
    """The plots in a part of the page; HTML escapes as XML does."""
    found = re.findall(r'<svg class="plot".*?</svg>', text, re.DOTALL)
    return [ElementTree.fromstring(one) for one in found]


def cells(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a part of the page, by the names of columns."""
    table = re.search(r"<table>.*?</table>", text, re.DOTALL)
    assert table
    heads, *rows = re.findall(r"<tr>(.*?)</tr>", table[0], re.DOTALL)
    names = re.findall(r"<th[^>]*>(.*?)</th>", heads)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    assert all(len(row) == len(names) for row in found)
    return [dict(zip(names, map(html.unescape, row), strict=True)) for row in found]


def number(text: str) -> float:
    found = re.match(r"-?[\d,]*\.?\d+(e[+-]?\d+)?", text)
    assert found, text
    return float(found[0].replace(",", ""))


class Drawn:
    """A plot as a reader sees it: points and bars turned to values by the ticks of its axes."""

    def __init__(self, svg: ElementTree.Element) -> None:
        self.points: list[tuple[float, float, str]] = []  # x and y in pixels, and the title
        self.texts = svg.findall("text")
        self.errors = [self.bar(one) for one in svg.findall("path") if self.is_of(one, "err")]
        for group in svg.findall("g"):
            place = re.fullmatch(r"translate\(([\d.-]+) ([\d.-]+)\)", group.get("transform", ""))
            title = group.find("title")
            assert place
            assert title is not None
            self.points.append((float(place[1]), float(place[2]), title.text or ""))
        titles = [one.text or "" for one in self.texts]
        self.is_log_x = any("log scale" in t for t in titles[1:] if not t[0].isdigit())
        self.is_log_y = "log scale" in titles[0]
        self.y_title = titles[0]
        # The marks of the axes: where the line of a tick is, and what is written there.
        self.y_ticks = self.ticks("end", "y", 4)
        self.x_ticks = self.ticks("middle", "x", 0)

    @staticmethod
    def is_of(one: ElementTree.Element, kind: str) -> bool:
        return kind in one.get("class", "").split()

    @staticmethod
    def bar(one: ElementTree.Element) -> tuple[float, float, float]:
        found = re.match(r"M([\d.-]+) ([\d.-]+)V([\d.-]+)M", one.get("d", ""))
        assert found
        return float(found[1]), float(found[2]), float(found[3])

    def ticks(self, anchor: str, axis: str, offset: float) -> list[tuple[float, float]]:
        return [
            (float(one.get(axis, "")) - offset, number(one.text or ""))
            for one in self.texts
            if one.get("text-anchor") == anchor and re.fullmatch(r"[\d.,e+-]+", one.text or "")
        ]

    def value(self, pixel: float, *, of_y: bool) -> float:
        """What the axis says of a place, by its first and last tick."""
        ticks = self.y_ticks if of_y else self.x_ticks
        (p0, v0), (p1, v1) = ticks[0], ticks[-1]
        share = (pixel - p0) / (p1 - p0)
        if self.is_log_y if of_y else self.is_log_x:
            return v0 * math.exp(share * math.log(v1 / v0))
        return v0 + share * (v1 - v0)


def drawn(page: str, anchor: str) -> list[Drawn]:
    return [Drawn(svg) for svg in svgs(section(page, anchor))]


def row_of(results: Results, title: str) -> Row:
    return next(row for row in results.rows if title.startswith(row.label + ": "))
