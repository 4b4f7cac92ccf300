"""The report of a benchmark as one HTML page that needs nothing else: no script, font or network.

The page is made of a `results.Results`, which may come from somebody else's JSON: every text is
escaped, and a plot leaves out what no axis can show. A section without content is left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsf.bench.judge.compare import Comparison
from qsf.bench.judge.results import Breakdown, Limits, Ratio, Results, Row
from qsf.bench.run.tasks import QSF
from qsf.bench.show import plots, table
from qsf.page import html
from qsf.page.plots import figure
from qsf.page.svg import N_PART_COLOURS, stacked_bar, text
from qsf.shell.output import write_text

_MAX_ROWS = 2_000
_MAX_BARS = 40
_MAX_BOXES = 4
_MAX_TEXT = 400  # characters of a setting
_MAX_LINES = 200  # notes, settings
_MOST = 1e18  # bytes; more is no size
_TIMES = "\N{MULTIPLICATION SIGN}"
_FASTER, _SLOWER, _EQUAL = 0, 1, 5  # colours

# In the order of a token's way; the place is the colour.
_PARTS = {
    "embedding": "embedding",
    "norm": "norms",
    "qkv": "Q, K, V",
    "attention": "attention",
    "attn_out": "output of attention",
    "gate_up": "gate and up",
    "down": "down",
    "head": "output head",
    "wait": "waiting for the disk",
    "decompress": "decompressing",
    "sample": "choosing a token",
    "python": "Python",
    "other": "the rest",
}
_BESIDE = {"read": "reading", "checksum": "checksums"}


def write_page(
    results: Results, path: Path, comparison: Comparison | None = None, *, overwrite: bool
) -> None:
    """Write the page, complete or not at all.

    Raises QsfArgumentError when ``path`` exists and ``overwrite`` is false, QsfIOError when the
    system refuses.
    """
    write_text(path, page(results, comparison), overwrite=overwrite)


def page(results: Results, comparison: Comparison | None = None) -> str:
    """Return the page, with the changes since an earlier result if there is one."""
    sections = [
        _headline(results),
        _failures(results),
        _changes(comparison),
        _ratios(results),
        *plots.sections(results.rows),
        _times(results.rows),
        _all_rows(results.rows),
        _limits(results.limits),
        _notes(results.notes),
        _method(results),
    ]
    name = _name(results)
    return html.document(
        "Benchmark",
        name,
        _machine_line(results),
        "\n".join(section for section in sections if section),
        "Made by python -m qsf.bench.",
        title=f"{name}: benchmark",
    )


def _name(results: Results) -> str:
    """Return the names of QSF's files; of random weights their shapes and types."""
    own = [row for row in results.rows if row.engine == QSF] or results.rows
    if results.settings.get("weights") == "random":
        shapes = dict.fromkeys(row.shape for row in own)
        types = dict.fromkeys(row.type for row in own)
        return f"{', '.join(shapes)}, {' and '.join(types)} (random weights)"
    files = dict.fromkeys(row.file for row in own if row.file)
    return ", ".join(list(files)[:_MAX_BOXES]) or "No measurements"


def _machine_line(results: Results) -> str:
    known = _flat(results.machine)
    words = [known.get("cpu", "")]
    if "cores" in known:
        words.append(f"{known['cores']} core{'' if known['cores'] == '1' else 's'}")
    if "memory bytes" in known:
        words.append(f"{known['memory bytes']} of memory")
    words += [known.get("isa", ""), known.get("baseline", ""), known.get("date", "")[:10]]
    return ", ".join(word for word in words if word)


def _size(n_bytes: float) -> str:
    """Return bytes in MB or GB of powers of ten."""
    if n_bytes < 1e6:
        return f"{figure(n_bytes / 1e3)} kB"
    return f"{figure(n_bytes / 1e9)} GB" if n_bytes >= 4e9 else f"{figure(n_bytes / 1e6)} MB"


def _setting(row: Row) -> str:
    """Return the test and its setting, without engine and type."""
    return row.label.removeprefix(f"{row.engine}, {row.type}, ")


# ---- the figures at the top ----


def _headline(results: Results) -> str:
    """Return the boxes at the top: ratios, share of the limit, least memory."""
    boxes = [_ratio_box(results.rows, ratio) for ratio in _main_ratios(results)]
    own = [row for row in results.rows if row.engine == QSF and row.test.startswith("tg")]
    near = [row for row in own if row.fraction_of_limit is not None]
    if near:
        best = max(near, key=lambda row: (plots.is_unlimited(row), row.fraction_of_limit or 0.0))
        why = f"More than 100 %: {best.above_limit}. " if best.above_limit else ""
        boxes.append(
            (
                "Of the machine's limit",
                f"{100 * (best.fraction_of_limit or 0.0):.0f} %",
                f"{why}{best.type}, {_setting(best)}: {figure(best.tok_per_s.median)} tok/s; "
                f"limited by {best.limited_by or 'nothing known'}",
            )
        )
    limited = [row for row in own if not plots.is_unlimited(row)]
    if limited:
        least = min(limited, key=lambda row: row.peak_rss_bytes)
        boxes.append(
            (
                "Least memory",
                _size(least.peak_rss_bytes),
                f"{least.type}, {_setting(least)}: {figure(least.tok_per_s.median)} tok/s "
                f"from a file of {_size(least.file_bytes)}",
            )
        )
    return html.figures(boxes) if boxes else ""


def _main_ratios(results: Results) -> list[Ratio]:
    """Return the ratios with the most threads and least depth; generation first."""
    rows = results.rows
    ratios = [ratio for ratio in results.ratios if plots.is_unlimited(rows[ratio.row])]
    ratios = ratios or results.ratios
    most = max((rows[ratio.row].threads for ratio in ratios), default=0)
    least = min((rows[ratio.row].depth for ratio in ratios), default=0)
    ratios = [r for r in ratios if rows[r.row].threads == most and rows[r.row].depth == least]
    return sorted(ratios, key=lambda r: not rows[r.row].test.startswith("tg"))[:_MAX_BOXES]


def _ratio_box(rows: Sequence[Row], ratio: Ratio) -> tuple[str, str, str]:
    row, other = rows[ratio.row], rows[ratio.vs]
    what = "Generating" if row.test.startswith("tg") else "Reading a prompt"
    is_sure = "in every round" if len(ratio.values) > 1 else "in the only round"
    verdict = "not told apart by the rounds"
    if ratio.min > 1 or ratio.max < 1:
        verdict = f"{'faster' if ratio.min > 1 else 'slower'} {is_sure}"
    speeds = ", ".join(f"{plots.file_words(one)} {figure(one.tok_per_s.median)} tok/s"
                       for one in (row, other))  # fmt: skip
    return (
        f"{what}, {plots.threads_words(row.threads)}",
        f"{figure(ratio.median)} {_TIMES}",
        f"{row.test}: {speeds}; {verdict}, {figure(ratio.min)} to {figure(ratio.max)} {_TIMES}",
    )


# ---- ratios and changes ----


def _ratios(results: Results) -> str:
    """Return all ratios, each as a range around the line of equal speed."""
    shown = [r for r in results.ratios if 0 < r.min <= r.median <= r.max < math.inf]
    shown = shown[: 2 * _MAX_BARS]
    if not shown:
        return ""
    span = 1.04 * max(0.1, *(abs(math.log(v)) for r in shown for v in (r.min, r.max)))
    has_shapes = len({row.shape for row in results.rows}) > 1
    items = []
    for ratio in shown:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        label = f"{row.type} to {plots.file_words(other)}, {_setting(row)}"
        label += f", {row.shape}" if has_shapes else ""
        words = f"{figure(ratio.median)} {_TIMES} ({figure(ratio.min)} to {figure(ratio.max)})"
        items.append(
            f"<dt>{text(label)}</dt><dd>{_range_bar(ratio, span, f'{label}: {words}')}</dd>"
            f'<dd class="v">{text(words)}</dd>'
        )
    more = f" {len(shown)} of {len(results.ratios)} are shown." * (len(shown) < len(results.ratios))
    note = (
        "tok/s of QSF divided by those of the baseline: median, least and most of the rounds. On "
        f"the right of the middle QSF is faster; the scale is logarithmic.{more}"
    )
    content = f'<dl class="ratios">{"".join(items)}</dl>'
    return html.section("Ratios", note, content, anchor="ratios", is_long=True)


def _range_bar(ratio: Ratio, span: float, title: str) -> str:
    """Return a range on a logarithmic scale from -``span`` to ``span``, 0 in the middle."""
    low, middle, high = (50 + 50 * math.log(v) / span for v in (ratio.min, ratio.median, ratio.max))
    colour = _FASTER if ratio.min > 1 else _SLOWER if ratio.max < 1 else _EQUAL
    return (
        '<svg class="range" viewBox="0 0 100 16" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title>'
        '<rect class="track" y="2" width="100" height="12"/>'
        f'<rect class="c{colour}" x="{min(50.0, middle):.2f}" y="5" width="{abs(middle - 50):.2f}" '
        f'height="6" opacity=".35"/><rect class="c{colour}" x="{low:.2f}" y="5" '
        f'width="{max(0.4, high - low):.2f}" height="6"/>'
        f'<rect class="c{colour}" x="{middle - 0.5:.2f}" y="2" width="1" height="12"/>'
        '<rect class="ink" x="49.85" width=".3" height="16"/></svg>'
    )


def _changes(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    shown = [change for change in comparison.changes if table.is_worth_a_line(change)]
    heads = ("What", *(heading.capitalize() for heading in table.CHANGE_HEADINGS[1:]))
    rows = []
    for change in shown[:_MAX_ROWS]:
        what, *cells = table.change_words(change)
        rows.append([f"{change.row}: {what}", *cells])
    content = html.scroll("changes", html.table(heads, rows, {0, 5}), kind="table") if rows else ""
    note = f"These results and the earlier ones; {table.COMPARISON_RULE}."
    lines = html.sentences(comparison.notes[:_MAX_LINES])
    return html.section("Since the earlier results", note, content + lines, anchor="changes")


# ---- where the time goes ----


def _times(rows: Sequence[Row]) -> str:
    """Return a bar for each row of generation that has a breakdown."""
    timed = [(row, row.breakdown) for row in rows if row.breakdown and row.test.startswith("tg")]
    timed = [(row, known) for row, known in timed if 0 < _total(known) < math.inf][:_MAX_BARS]
    if not timed:
        return ""
    names = dict.fromkeys(name for _, known in timed for name in known.parts)
    names = dict.fromkeys(sorted(names, key=_place))
    legend = "".join(
        f'<li><i class="p{_colour(name)}"></i>{text(_PARTS.get(name, name))}</li>' for name in names
    )
    bars = "".join(_time_bar(row, known, list(names)) for row, known in timed)
    note = (
        "Each bar is the time of one generated token on the computing thread: its parts follow "
        "each other. The work of other threads at the same time is beneath the bar."
    )
    content = f'<ul class="keys">{legend}</ul><ul class="times">{bars}</ul>'
    return html.section("Where the time goes", note, content, anchor="time")


def _place(name: str) -> int:
    names = list(_PARTS)
    return names.index(name) if name in names else len(names)


def _colour(name: str) -> int:
    return min(_place(name), N_PART_COLOURS - 1)


def _total(known: Breakdown) -> float:
    return sum(max(0.0, part.median) for part in known.parts.values())


def _time_bar(row: Row, known: Breakdown, names: Sequence[str]) -> str:
    total = _total(known)
    pieces = [
        (part.median / total, _colour(name),
         f"{_PARTS.get(name, name)}: {figure(part.median)} ms ({figure(part.min)} to "
         f"{figure(part.max)}), {100 * part.median / total:.1f} %")
        for name in names
        if (part := known.parts.get(name)) is not None and part.median > 0
    ]  # fmt: skip
    label = f"{row.type}, {_setting(row)}"
    titles = "; ".join(title for _, _, title in pieces)
    busy = [
        f"{_BESIDE.get(name, name)} {figure(part.median)} ms"
        for name, part in known.beside.items()
        if part.median > 0
    ]
    beside = f'<p class="soft">Meanwhile on other threads: {text(", ".join(busy))}</p>'
    return (
        f"<li><p><span>{text(label)}</span><span>{text(figure(known.wall_ms))} ms a token</span>"
        f"</p>{stacked_bar(f'{label}: {titles}', pieces, palette='p')}{beside if busy else ''}</li>"
    )


# ---- tables ----


def _or_empty(value: float | None, show: Callable[[float], str] = figure) -> str:
    return "" if value is None else show(value)


def _of_limit(row: Row) -> str:
    share = _or_empty(row.fraction_of_limit, lambda f: f"{100 * f:.0f} %")
    return f"{share} *" if row.above_limit else share


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("Type", lambda row: row.type),
    ("Engine", lambda row: plots.engine_words(row.engine)),
    ("Shape", lambda row: row.shape),
    ("Test", lambda row: row.test),
    ("Depth", lambda row: f"{row.depth:,}" if row.depth else ""),
    ("Threads", lambda row: str(row.threads)),
    ("Budget, MB", lambda row: _or_empty(row.budget_mb, "{:,}".format)),
    ("Cgroup, MB", lambda row: f"{row.cap.limit_mb:,}" if row.cap else ""),
    ("tok/s", lambda row: figure(row.tok_per_s.median)),
    ("least", lambda row: figure(row.tok_per_s.min)),
    ("most", lambda row: figure(row.tok_per_s.max)),
    ("of the limit", _of_limit),
    ("limited by", lambda row: row.limited_by),
    ("limit, tok/s", lambda row: _or_empty(row.limit_tok_per_s)),
    ("GB/s", lambda row: _or_empty(row.gb_per_s)),
    ("Peak memory", lambda row: _or_empty(row.peak_rss_bytes or None, _size)),
    ("Needed a pass", lambda row: _or_empty(row.bytes_per_token, _size)),
    ("From the disk a token", lambda row: _or_empty(row.read_bytes_per_token or None, _size)),
    ("Bits a weight", lambda row: f"{row.bits_per_weight:.2f}"),
    ("File", lambda row: _size(row.file_bytes)),
    ("KV cache", lambda row: row.kv_type),
    ("Reads by", lambda row: row.io),
    ("Loaded in, s", lambda row: _or_empty(row.load_seconds)),
    ("Version", lambda row: row.version),
    ("Kernels", lambda row: row.kernels),
)  # fmt: skip
_TEXTS = {"Type", "Engine", "Shape", "Test", "limited by", "KV cache", "Reads by", "Version",
          "Kernels"}  # fmt: skip


def _all_rows(rows: Sequence[Row]) -> str:
    """Return the table of all rows; an empty column is left out."""
    shown = rows[:_MAX_ROWS]
    if not shown:
        return ""
    columns = [(name, [show(row) for row in shown]) for name, show in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    texts = {idx for idx, (name, _) in enumerate(columns) if name in _TEXTS}
    content = html.table(
        [name for name, _ in columns],
        list(zip(*(cells for _, cells in columns), strict=True)),
        texts,
    )
    above = [f"* {row.label}: {row.above_limit}" for row in shown if row.above_limit]
    more = f" The first {_MAX_ROWS:,} of {len(rows):,} are shown." if len(rows) > _MAX_ROWS else ""
    note = f"tok/s are medians over the rounds, with the least and the most beside them.{more}"
    return html.section(
        "All measurements",
        note,
        html.scroll("all measurements", content, kind="table tall") + html.sentences(above),
        anchor="rows",
        is_long=True,
    )


def _limits(limits: Limits) -> str:
    """Return the limits of the machine; "" if nothing was measured."""
    kinds = (
        ("Memory, read", limits.memory_gb_per_s, "GB/s", 0, True),
        ("Disk, read", limits.disk_gb_per_s, "GB/s", 1, False),
        ("Arithmetic", limits.gmadds_per_s, "billion multiply-adds/s", 2, True),
    )
    blocks = []
    for title, known, unit, colour, is_by_threads in kinds:
        largest = max(known.values(), default=0.0)
        bars = [
            (
                plots.threads_words(int(name)) if is_by_threads and name.isdecimal() else name,
                value / largest if largest > 0 else 0.0,
                colour,
                figure(value),
                "",
            )
            for name, value in known.items()
        ]
        if bars:
            head = f"<h3>{text(title)} <span>{text(unit)}</span></h3>"
            blocks.append(f"<div>{head}{html.bars(bars)}</div>")
    if not blocks:
        return ""
    note = (
        "The better of two measurements, before and after the rounds. A row above its limit says "
        "why: limits are measured for half a second."
    )
    content = f'<div class="limits">{"".join(blocks)}</div>'
    return html.section("Limits of the machine", note, content, anchor="limits")


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    heads = ("Engine", "What", "Why", "Times", "File")
    rows = [
        (plots.engine_words(f.engine), f.what, f.why, f"{f.n_times:,}", f.file)
        for f in results.failures[:_MAX_ROWS]
    ]
    content = html.scroll("failures", html.table(heads, rows, {0, 1, 2, 4}), kind="table")
    return html.section("Failures", "Processes that gave no figures.", content, anchor="failed")


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = html.sentences(notes[:_MAX_LINES])
    return html.section("Notes", "What these figures do and do not say.", lines, anchor="notes")


def _method(results: Results) -> str:
    """Return settings, versions and machine."""
    versions = dict.fromkeys(row.version for row in results.rows if row.version)
    settings = _flat(results.settings)
    if versions:
        settings.setdefault("versions", ", ".join(versions))
    blocks = [
        f"<div><h3>{title}</h3>{html.facts(named)}</div>"
        for title, named in (("Settings", settings), ("Machine", _flat(results.machine)))
        if named
    ]
    if not blocks:
        return ""
    note = (
        "Engines take turns, each in processes of its own, and each test runs after a warm-up; "
        "ratios are those of runs next to each other."
    )
    content = f'<div class="panels">{"".join(blocks)}</div>'
    return html.section("How it was measured", note, content, anchor="method")


def _flat(known: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return settings as names and texts; objects in objects get both names."""
    flat: dict[str, str] = {}
    for name, value in known.items():
        if isinstance(value, dict) and value and not before:
            flat |= _flat(value, f"{name.replace('_', ' ')}: ")
        elif value not in (None, "", [], {}):
            flat[before + name.removeprefix("n_").replace("_", " ")] = _value(name, value)
    return dict(list(flat.items())[:_MAX_LINES])


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        words = "yes" if value else "no"
    elif isinstance(value, int | float) and name.endswith("_bytes") and abs(value) < _MOST:
        words = _size(value)
    elif isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        words = ", ".join(map(str, value))
    elif isinstance(value, str | int | float):
        words = str(value)
    else:
        try:
            words = json.dumps(value)
        except RecursionError:  # of somebody else's file
            words = "..."
    return words if len(words) <= _MAX_TEXT else f"{words[:_MAX_TEXT]} ..."
