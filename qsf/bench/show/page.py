"""The report of a benchmark as one HTML page that needs nothing else: no script, font or network.

All texts are escaped. A section without content is left out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsf.bench.judge.compare import Comparison
from qsf.bench.judge.results import Breakdown, Ratio, Results, Row
from qsf.bench.run.tasks import QSF
from qsf.bench.show import plots, table
from qsf.page import html
from qsf.page.plots import figure
from qsf.page.svg import N_PART_COLOURS, stacked_bar, text
from qsf.shell.output import write_text

_MAX_BOXES = 4

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
        _limits(results),
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
    return f"{figure(n_bytes / 1e9)} GB" if n_bytes >= 4e9 else f"{figure(n_bytes / 1e6)} MB"


def _setting(row: Row) -> str:
    """Return the test and its setting, without engine and type."""
    return row.label.removeprefix(f"{row.engine}, {row.type}, ")


def _table(
    anchor: str,
    title: str,
    note: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    n_texts: int,
    *,
    more: str = "",
) -> str:
    """Return a section with a table, whose first ``n_texts`` columns are words, and more."""
    content = html.table(heads, rows, range(n_texts)) if rows else ""
    content = html.scroll(title, content, kind="table") if rows else ""
    return html.section(title, note, content + more, anchor=anchor) if content or more else ""


# ---- the figures at the top, and ratios ----


def _headline(results: Results) -> str:
    """Return the boxes at the top: ratios with the most threads and least depth, unlimited."""
    rows = results.rows
    ratios = [ratio for ratio in results.ratios if plots.is_unlimited(rows[ratio.row])]
    ratios = ratios or results.ratios
    most = max((rows[ratio.row].threads for ratio in ratios), default=0)
    least = min((rows[ratio.row].depth for ratio in ratios), default=0)
    ratios = [r for r in ratios if rows[r.row].threads == most and rows[r.row].depth == least]
    ratios.sort(key=lambda r: not rows[r.row].test.startswith("tg"))
    boxes = [_ratio_box(rows, ratio) for ratio in ratios[:_MAX_BOXES]]
    return html.figures(boxes) if boxes else ""


def _ratio_box(rows: Sequence[Row], ratio: Ratio) -> tuple[str, str, str]:
    row, other = rows[ratio.row], rows[ratio.vs]
    what = "Generating" if row.test.startswith("tg") else "Reading a prompt"
    speeds = ", ".join(f"{plots.file_words(one)} {figure(one.tok_per_s.median)} tok/s"
                       for one in (row, other))  # fmt: skip
    return (
        f"{what}, {plots.threads_words(row.threads)}",
        f"{figure(ratio.median)} x",
        f"{row.test}: {speeds}; {_verdict(ratio)}",
    )


def _verdict(ratio: Ratio) -> str:
    is_sure = "in every round" if len(ratio.values) > 1 else "in the only round"
    if ratio.min > 1 or ratio.max < 1:
        return f"{'faster' if ratio.min > 1 else 'slower'} {is_sure}"
    return "not told apart by the rounds"


def _ratios(results: Results) -> str:
    has_shapes = len({row.shape for row in results.rows}) > 1
    rows = []
    for ratio in results.ratios:
        row, other = results.rows[ratio.row], results.rows[ratio.vs]
        what = f"{row.type} to {plots.file_words(other)}" + f", {row.shape}" * has_shapes
        numbers = [figure(value) for value in (ratio.median, ratio.min, ratio.max)]
        rows.append([what, _setting(row), _verdict(ratio), *numbers])
    heads = ("Files", "Test", "QSF is", "ratio", "least", "most")
    note = "tok/s of QSF divided by those of the baseline in the same round: median and range."
    return _table("ratios", "Ratios", note, heads, rows, 3)


def _changes(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    heads = ("What", *(heading.capitalize() for heading in table.CHANGE_HEADINGS[1:]))
    rows = [table.change_words(change) for change in comparison.changes]
    note = f"These results and the earlier ones; {table.COMPARISON_RULE}."
    lines = html.sentences(comparison.notes)
    return _table("changes", "Since the earlier results", note, heads, rows, 1, more=lines)


# ---- where the time goes ----


def _times(rows: Sequence[Row]) -> str:
    """Return a bar for each row of generation that has a breakdown."""
    timed = [(row, row.breakdown) for row in rows if row.breakdown and row.test.startswith("tg")]
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
    return f"{row.share_of_limit} *" if row.above_limit else row.share_of_limit


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
    if not rows:
        return ""
    columns = [(name, [show(row) for row in rows]) for name, show in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    texts = {idx for idx, (name, _) in enumerate(columns) if name in _TEXTS}
    cells = list(zip(*(cells for _, cells in columns), strict=True))
    content = html.table([name for name, _ in columns], cells, texts)
    above = [f"* {row.label}: {row.above_limit}" for row in rows if row.above_limit]
    return html.section(
        "All measurements",
        "tok/s are medians over the rounds, with the least and the most beside them.",
        html.scroll("all measurements", content, kind="table tall") + html.sentences(above),
        anchor="rows",
        is_long=True,
    )


def _limits(results: Results) -> str:
    note = (
        "The better of two measurements, before and after the rounds. A row above its limit says "
        "why: limits are measured for half a second."
    )
    rows = [(what, how, value, unit) for what, how, value, unit in table.limit_rows(results.limits)]
    return _table("limits", "Limits of the machine", note, ("What", "How", "", ""), rows, 2)


def _failures(results: Results) -> str:
    heads = ("Engine", "What", "Why", "File", "Times")
    rows = [
        (plots.engine_words(f.engine), f.what, f.why, f.file, f"{f.n_times:,}")
        for f in results.failures
    ]
    return _table("failed", "Failures", "Processes that gave no figures.", heads, rows, 4)


def _notes(notes: Sequence[str]) -> str:
    note = "What these figures do and do not say."
    return _table("notes", "Notes", note, (), (), 0, more=html.sentences(notes))


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
    content = f'<div class="panels">{"".join(blocks)}</div>' if blocks else ""
    return _table("method", "How it was measured", note, (), (), 0, more=content)


def _flat(known: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as names and texts, without those that are empty."""
    return {
        name.removeprefix("n_").replace("_", " "): _value(name, value)
        for name, value in known.items()
        if value not in (None, "", [], {})
    }


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return _size(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
