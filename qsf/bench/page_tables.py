"""The page's tables and figures: headline, ratios, limits, all rows, how it was measured."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qsf.bench.page_plots import engine_name, is_generating, is_unlimited, threads_words
from qsf.bench.plots import figure
from qsf.bench.results import Limits, Ratio, Results, Row
from qsf_converter.report import parts as parts
from qsf_converter.report.svg import text

_MAX_ROWS = 2_000
_MAX_RATIOS = 80
_MAX_RATIO_BOXES = 4
_MAX_TEXT = 400  # characters of a setting
_MAX_SAID = 200  # notes, settings
_MOST = 1e18  # bytes; what is more is no size
_TIMES = "\N{MULTIPLICATION SIGN}"
_COLOUR_FASTER, _COLOUR_SLOWER, _COLOUR_EQUAL = 0, 1, 5


def size_words(n_bytes: float) -> str:
    """Return bytes in MB or GB of powers of ten, as memory budgets and disks are counted."""
    if n_bytes < 1e6:
        return f"{figure(n_bytes / 1e3)} kB"
    return f"{figure(n_bytes / 1e9)} GB" if n_bytes >= 4e9 else f"{figure(n_bytes / 1e6)} MB"


def setting_words(row: Row) -> str:
    """Return the test and its setting, without engine, type and shape."""
    return row.label.removeprefix(f"{row.engine}, {row.type}, ")


# ---- the figures at the top ----


def headline(results: Results) -> str:
    """Return the boxes at the top: ratios, how near the limits, the least memory."""
    boxes = [_ratio_box(results.rows, ratio) for ratio in _main_ratios(results)]
    own = [row for row in results.rows if row.engine == "qsf"]
    near = [row for row in own if row.fraction_of_limit is not None and is_generating(row.test)]
    if near:
        best = max(near, key=lambda row: (is_unlimited(row), row.fraction_of_limit or 0.0))
        boxes.append(
            (
                "Of what the machine allows",
                f"{100 * (best.fraction_of_limit or 0.0):.0f} %",
                f"At best: {best.type}, {setting_words(best)}, {figure(best.tok_per_s.median)} "
                f"tok/s; limited by {best.limited_by or 'nothing known'}",
            )
        )
    limited = [row for row in own if not is_unlimited(row) and is_generating(row.test)]
    if limited:
        least = min(limited, key=lambda row: row.peak_rss_bytes)
        boxes.append(
            (
                "Least memory",
                size_words(least.peak_rss_bytes),
                f"{least.type}, {setting_words(least)}: {figure(least.tok_per_s.median)} tok/s "
                f"from a file of {size_words(least.file_bytes)}",
            )
        )
    return parts.figures(boxes) if boxes else ""


def _main_ratios(results: Results) -> list[Ratio]:
    """Those without a limit on memory, without depth, with the most threads; generation first."""
    rows = results.rows
    plain = [ratio for ratio in results.ratios if is_unlimited(rows[ratio.row])]
    found = plain or results.ratios
    most = max((rows[ratio.row].threads for ratio in found), default=0)
    least = min((rows[ratio.row].depth for ratio in found), default=0)
    found = [r for r in found if rows[r.row].threads == most and rows[r.row].depth == least]
    found = sorted(found, key=lambda ratio: not is_generating(rows[ratio.row].test))
    return found[:_MAX_RATIO_BOXES]


def _ratio_box(rows: Sequence[Row], ratio: Ratio) -> tuple[str, str, str]:
    row, other = rows[ratio.row], rows[ratio.vs]
    what = "Generating" if is_generating(row.test) else "Reading a prompt"
    rounds = f" in {len(ratio.values)} rounds" if len(ratio.values) > 1 else ""
    speeds = ", ".join(
        f"{engine_name(one.engine)} {one.type} {figure(one.tok_per_s.median)} tok/s"
        for one in (row, other)
    )
    return (
        f"{what}, {threads_words(row.threads)}",
        f"{figure(ratio.median)} {_TIMES}",
        f"{row.test}: {speeds}; {verdict(ratio)}, {figure(ratio.min)} to {figure(ratio.max)} "
        f"{_TIMES}{rounds}",
    )


def verdict(ratio: Ratio) -> str:
    """Return in words whether one is faster in all rounds."""
    if ratio.min > 1:
        return "faster in every round" if len(ratio.values) > 1 else "faster"
    if ratio.max < 1:
        return "slower in every round" if len(ratio.values) > 1 else "slower"
    return "not told apart by the rounds"


# ---- ratios ----


def ratio_section(results: Results) -> str:
    """Return all ratios, each as a range around the line where both are equally fast."""
    shown = [r for r in results.ratios[:_MAX_RATIOS] if 0 < r.min <= r.median <= r.max < math.inf]
    if not shown:
        return ""
    ends = [abs(math.log(value)) for r in shown for value in (r.min, r.max)]
    span = max(0.1, *ends) * 1.04
    items = []
    for ratio in shown:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        label = f"{row.type} to {other.type}, {setting_words(row)}"
        label += f", {row.shape}" if len({one.shape for one in results.rows}) > 1 else ""
        said = f"{figure(ratio.median)} {_TIMES} ({figure(ratio.min)} to {figure(ratio.max)})"
        items.append(
            f"<dt>{text(label)}</dt><dd>{_range_bar(ratio, span, f'{label}: {said}')}</dd>"
            f'<dd class="v">{text(said)}</dd>'
        )
    more = ""
    if len(shown) < len(results.ratios):
        more = f" {len(shown)} of {len(results.ratios)} are shown."
    first, second = (results.rows[idx] for idx in (shown[0].row, shown[0].vs))
    one, two = engine_name(first.engine), engine_name(second.engine)
    note = (
        f"tok/s of {one} in those of {two}: median, and the least and the most of all rounds. In "
        f"the middle both are equally fast, on the right {one} is faster; the scale is "
        f"logarithmic.{more}"
    )
    content = f'<dl class="ratios">{"".join(items)}</dl>'
    return parts.section("Ratios", note, content, anchor="ratios", is_long=True)


def _range_bar(ratio: Ratio, span: float, title: str) -> str:
    """A range on a logarithmic scale from -``span`` to ``span``, 0 being in the middle."""
    low, middle, high = (
        50 + 50 * math.log(value) / span for value in (ratio.min, ratio.median, ratio.max)
    )
    colour = _COLOUR_EQUAL
    if ratio.min > 1 or ratio.max < 1:
        colour = _COLOUR_FASTER if ratio.min > 1 else _COLOUR_SLOWER
    start, width = min(50.0, middle), abs(middle - 50)
    return (
        '<svg class="range" viewBox="0 0 100 16" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title>'
        '<rect class="track" y="2" width="100" height="12"/>'
        f'<rect class="c{colour}" x="{start:.2f}" y="5" width="{width:.2f}" height="6" '
        'opacity=".35"/>'
        f'<rect class="c{colour}" x="{low:.2f}" y="5" width="{max(0.4, high - low):.2f}" '
        'height="6"/>'
        f'<rect class="c{colour}" x="{middle - 0.5:.2f}" y="2" width="1" height="12"/>'
        '<rect class="one" x="49.85" width=".3" height="16"/></svg>'
    )


# ---- limits ----


def limit_section(limits: Limits) -> str:
    """Return what the machine can do at most; nothing when nothing was measured."""
    kinds = (
        ("Memory, read", limits.memory_gb_per_s, "GB/s", 0, _threads),
        ("Disk, read", limits.disk_gb_per_s, "GB/s", 1, str),
        ("Arithmetic", limits.gmadds_per_s, "billion multiply-adds/s", 2, _threads),
    )
    blocks = [
        f"<div><h3>{text(title)} <span>{text(unit)}</span></h3>"
        + parts.bars(
            [
                (name_of(name), _share(value, known.values()), colour, figure(value), "")
                for name, value in known.items()
            ]
        )
        + "</div>"
        for title, known, unit, colour, name_of in kinds
        if known
    ]
    if not blocks:
        return ""
    note = "The best of two measurements, before and after; no engine can be faster than these."
    content = f'<div class="limits">{"".join(blocks)}</div>'
    return parts.section("Limits of the machine", note, content, anchor="limits")


def _threads(name: str) -> str:
    return threads_words(int(name)) if name.isascii() and name.isdecimal() else name


def _share(value: float, values: Any) -> float:
    largest = max(values)
    return value / largest if largest > 0 else 0.0


# ---- all rows ----

_Column = tuple[str, Callable[[Row], str]]


def _or_empty(value: float | None, show: Callable[[float], str] = figure) -> str:
    return "" if value is None else show(value)


_COLUMNS: tuple[_Column, ...] = (
    ("Type", lambda row: row.type),
    ("Engine", lambda row: engine_name(row.engine)),
    ("Shape", lambda row: row.shape),
    ("Test", lambda row: row.test),
    ("Depth", lambda row: f"{row.depth:,}" if row.depth else ""),
    ("Threads", lambda row: str(row.threads)),
    ("Budget, MB", lambda row: _or_empty(row.budget_mb, "{:,}".format)),
    ("Cgroup, MB", lambda row: f"{row.cap.limit_mb:,}" if row.cap else ""),
    ("tok/s", lambda row: figure(row.tok_per_s.median)),
    ("least", lambda row: figure(row.tok_per_s.min)),
    ("most", lambda row: figure(row.tok_per_s.max)),
    ("of the limit", lambda row: _or_empty(row.fraction_of_limit, lambda f: f"{100 * f:.0f} %")),
    ("limited by", lambda row: row.limited_by),
    ("limit, tok/s", lambda row: _or_empty(row.limit_tok_per_s)),
    ("GB/s", lambda row: _or_empty(row.gb_per_s)),
    ("Peak memory", lambda row: size_words(row.peak_rss_bytes)),
    ("Needed a pass", lambda row: _or_empty(row.bytes_per_token, size_words)),
    ("From the disk a token", lambda row: _or_empty(row.read_bytes_per_token or None, size_words)),
    ("Bits a weight", lambda row: f"{row.bits_per_weight:.2f}"),
    ("File", lambda row: size_words(row.file_bytes)),
    ("Perplexity", lambda row: _or_empty(row.quality.perplexity if row.quality else None)),
    ("KL", lambda row: _or_empty(row.quality.mean_kl if row.quality else None)),
    ("Same choice", lambda row: _or_empty(
        row.quality.top1 if row.quality else None, lambda f: f"{100 * f:.1f} %")),
    ("KV cache", lambda row: row.kv_type),
    ("Reads by", lambda row: row.io),
    ("Loaded in, s", lambda row: _or_empty(row.load_seconds)),
    ("Version", lambda row: row.version),
    ("Kernels", lambda row: row.kernels),
)  # fmt: skip
_TEXTS = {"Type", "Engine", "Shape", "Test", "limited by", "KV cache", "Reads by", "Version",
          "Kernels"}  # fmt: skip


def row_section(rows: Sequence[Row]) -> str:
    """Return the table of all rows; a column that would be empty is left out."""
    shown = rows[:_MAX_ROWS]
    if not shown:
        return ""
    columns = [(name, [show(row) for row in shown]) for name, show in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    heads = [name for name, _ in columns]
    texts = {idx for idx, name in enumerate(heads) if name in _TEXTS}
    table = parts.table(heads, list(zip(*(cells for _, cells in columns), strict=True)), texts)
    more = f" The first {_MAX_ROWS:,} of {len(rows):,} are shown." if len(rows) > _MAX_ROWS else ""
    note = f"tok/s are medians over the rounds, with the least and the most beside them.{more}"
    scrolled = parts.scroll("all measurements", table, kind="table tall")
    return parts.section("All measurements", note, scrolled, anchor="rows", is_long=True)


# ---- the rest ----


def failure_section(results: Results) -> str:
    """Return the processes that gave no figures."""
    if not results.failures:
        return ""
    heads = ("Engine", "What", "Why", "Times", "File")
    rows = [
        (engine_name(f.engine), f.what, f.why, f"{f.n_times:,}", f.file)
        for f in results.failures[:_MAX_ROWS]
    ]
    table = parts.scroll("failures", parts.table(heads, rows, {0, 1, 2, 4}), kind="table")
    return parts.section("What failed", "Processes that gave no figures.", table, anchor="failed")


def note_section(notes: Sequence[str]) -> str:
    """Return what a reader must know."""
    if not notes:
        return ""
    note = "What these figures do and do not say."
    return parts.section("To know", note, sentences(notes), anchor="notes")


def sentences(said: Sequence[str]) -> str:
    """Return a list of sentences; nothing when there are none."""
    items = "".join(f"<li>{text(one)}</li>" for one in said[:_MAX_SAID])
    return f'<ul class="says">{items}</ul>' if items else ""


def flat(known: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return settings as names and texts; objects in objects get both names."""
    found: dict[str, str] = {}
    for name, value in known.items():
        if isinstance(value, dict) and value and not before:
            found |= flat(value, f"{name.replace('_', ' ')}: ")
        elif value not in (None, "", [], {}):
            found[before + name.removeprefix("n_").replace("_", " ")] = _setting(name, value)
    return dict(list(found.items())[:_MAX_SAID])


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        said = "yes" if value else "no"
    elif isinstance(value, int | float) and name.endswith("_bytes") and abs(value) < _MOST:
        said = size_words(value)
    elif isinstance(value, str | int | float):
        said = str(value)
    elif isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        said = ", ".join(map(str, value))
    else:
        try:
            said = json.dumps(value)
        except RecursionError:  # of somebody else's file
            said = "..."
    return said if len(said) <= _MAX_TEXT else f"{said[:_MAX_TEXT]} ..."


def method_section(results: Results) -> str:
    """Return settings, versions and machine."""
    versions = dict.fromkeys(row.version for row in results.rows if row.version)
    known = flat(results.settings)
    if versions:
        known.setdefault("versions", ", ".join(versions))
    blocks = [
        f"<div><h3>{title}</h3>{parts.facts(named)}</div>"
        for title, named in (("Settings", known), ("Machine", flat(results.machine)))
        if named
    ]
    if not blocks:
        return ""
    note = (
        "Engines take turns, each in processes of its own, and each test is run after a warm-up; "
        "ratios are those of runs next to each other."
    )
    content = f'<div class="panels">{"".join(blocks)}</div>'
    return parts.section("How it was measured", note, content, anchor="method")
