"""The report of a benchmark as one HTML page that needs nothing else: no script, font or network.

All texts are escaped. A section without content is left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from qsf.bench.judge.compare import Comparison
from qsf.bench.judge.results import Breakdown, Results, Row
from qsf.bench.run.tasks import QSF
from qsf.bench.show import plots
from qsf.bench.show.report import Part, changes_of, parts_of
from qsf.page import html
from qsf.page.plots import figure
from qsf.page.svg import N_PART_COLOURS, stacked_bar, text

_MAX_FILES = 4  # in the title

# In the order of a token's way; the place is the colour.
_PARTS = (
    *("embedding", "norm", "qkv", "attention", "attn_out", "gate_up", "down", "head"),
    *("wait", "decompress", "sample", "python", "other"),
)


def page(results: Results, comparison: Comparison | None = None) -> str:
    """Return the page, with the changes since an earlier result if there is one."""
    parts = parts_of(results)
    parts.sort(key=lambda part: part.anchor != "failed")
    parts += changes_of(comparison) if comparison is not None else []
    tables = {
        anchor: _section(list(of_anchor))
        for anchor, of_anchor in groupby(parts, lambda p: p.anchor)
    }
    tables["time"] = _times(results.rows)
    order = ("failed", "changes", "rows", "ratios", "plots", "time", "files", "limits", "notes")
    sections = [
        "".join(plots.sections(results.rows)) if anchor == "plots" else tables.get(anchor, "")
        for anchor in order
    ]
    name = _name(results)
    return html.document(
        "Benchmark",
        name,
        _machine_line(results),
        "\n".join(filter(None, [*sections, _method(results)])),
        "Made by python -m qsf.bench.",
        title=f"{name}: benchmark",
    )


def _section(parts: Sequence[Part]) -> str:
    """Return the parts of one anchor as a section, each table under its own title."""
    inner = []
    for part in parts:
        if len(parts) > 1:
            inner.append(f"<h3>{text(part.title)}</h3>")
        if part.rows:
            texts = [i for i, (_, is_number) in enumerate(part.headings) if not is_number]
            content = html.table([name for name, _ in part.headings], part.rows, texts)
            inner.append(html.scroll(part.title, content, kind="table"))
        inner.append(html.sentences(part.lines))
    title = "Measurements" if parts[0].anchor == "rows" else parts[0].title
    return html.section(title, parts[0].note, "".join(inner), anchor=parts[0].anchor)


def _name(results: Results) -> str:
    """Return the names of QSF's files; of random weights their shapes and types."""
    own = [row for row in results.rows if row.engine == QSF] or results.rows
    if results.settings.get("weights") == "random":
        shapes = dict.fromkeys(row.shape for row in own)
        types = dict.fromkeys(row.type for row in own)
        return f"{', '.join(shapes)}, {' and '.join(types)} (random weights)"
    files = dict.fromkeys(row.file for row in own if row.file)
    return ", ".join(list(files)[:_MAX_FILES]) or "No measurements"


def _machine_line(results: Results) -> str:
    machine = _flat(results.machine)
    words = [machine.get("cpu", "")]
    if "cores" in machine:
        words.append(f"{machine['cores']} core{'' if machine['cores'] == '1' else 's'}")
    if "memory bytes" in machine:
        words.append(f"{machine['memory bytes']} of memory")
    words += [machine.get("isa", ""), machine.get("baseline", ""), machine.get("date", "")[:10]]
    return ", ".join(word for word in words if word)


# ---- where the time goes ----


def _times(rows: Sequence[Row]) -> str:
    """Return a bar for each row of generation that has a breakdown."""
    timed = [(row, row.breakdown) for row in rows if row.breakdown and row.test.startswith("tg")]
    if not timed:
        return ""
    names = dict.fromkeys(name for _, breakdown in timed for name in breakdown.parts)
    names = dict.fromkeys(sorted(names, key=_place))
    legend = "".join(
        f'<li><i class="p{_colour(name)}"></i>{text(_words(name))}</li>' for name in names
    )
    bars = "".join(_time_bar(row, breakdown, list(names)) for row, breakdown in timed)
    note = (
        "Each bar is the time of one generated token on the computing thread: its parts follow "
        "each other. The work of other threads at the same time is beneath the bar."
    )
    content = f'<ul class="keys">{legend}</ul><ul class="times">{bars}</ul>'
    return html.section("Where the time goes", note, content, anchor="time")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _place(name: str) -> int:
    return _PARTS.index(name) if name in _PARTS else len(_PARTS)


def _colour(name: str) -> int:
    return min(_place(name), N_PART_COLOURS - 1)


def _time_bar(row: Row, breakdown: Breakdown, names: Sequence[str]) -> str:
    total = sum(max(0.0, part.median) for part in breakdown.parts.values())
    pieces = [
        (part.median / total, _colour(name),
         f"{_words(name)}: {figure(part.median)} ms ({figure(part.min)} to "
         f"{figure(part.max)}), {100 * part.median / total:.1f} %")
        for name in names
        if (part := breakdown.parts.get(name)) is not None and part.median > 0
    ]  # fmt: skip
    label = row.label.removeprefix(f"{row.engine}, ")
    titles = "; ".join(title for _, _, title in pieces)
    busy = [
        f"{_words(name)} {figure(part.median)} ms"
        for name, part in breakdown.beside.items()
        if part.median > 0
    ]
    beside = f'<p class="soft">Meanwhile on other threads: {text(", ".join(busy))}</p>'
    wall = text(figure(breakdown.wall_ms))
    return (
        f"<li><p><span>{text(label)}</span><span>{wall} ms a token</span></p>"
        f"{stacked_bar(f'{label}: {titles}', pieces, palette='p')}{beside if busy else ''}</li>"
    )


# ---- how it was measured ----


def _method(results: Results) -> str:
    """Return settings, versions and machine."""
    versions = dict.fromkeys(row.version for row in results.rows if row.version)
    settings = _flat(results.settings)
    if versions:
        settings["versions"] = ", ".join(versions)
    blocks = [
        f"<div><h3>{title}</h3>{html.facts(named)}</div>"
        for title, named in (("Settings", settings), ("Machine", _flat(results.machine)))
        if named
    ]
    note = (
        "Engines take turns, each in processes of its own, and each test runs after a warm-up; "
        "ratios are those of runs next to each other."
    )
    content = f'<div class="panels">{"".join(blocks)}</div>'
    return html.section("How it was measured", note, content, anchor="method") if blocks else ""


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as names and texts, without those that are empty."""
    return {
        name.removeprefix("n_").replace("_", " "): _value(name, value)
        for name, value in settings.items()
        if value not in (None, "", [], {})
    }


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{figure(value / 1e9)} GB"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
