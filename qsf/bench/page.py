"""The report of a benchmark as one HTML page that needs nothing else: no script, font or network.

It is made of a `results.Results`, which may come from somebody else's JSON: every name goes through
`text`, and a plot leaves out what no axis can show. What has nothing to show is not on the page.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from qsf.bench import page_plots as plots
from qsf.bench import page_tables as tables
from qsf.bench.page_style import PAGE_STYLE
from qsf.bench.page_times import time_section
from qsf.bench.plots import figure
from qsf.bench.results import Results, Row
from qsf.shell.output import write_text
from qsf_converter.report import parts as parts

_MAX_PLOTTED = 600  # rows
_MAX_NAMED = 6
_MAX_CHANGES = 500


class Change(NamedTuple):
    """What became of a row since another result, in words."""

    label: str
    old: str
    new: str
    change: str
    verdict: str


def write_page(
    results: Results,
    path: Path,
    *,
    overwrite: bool,
    changes: Sequence[Change] = (),
    change_notes: Sequence[str] = (),
) -> None:
    """Write the page, complete or not at all.

    Raises QsfArgumentError when ``path`` exists and ``overwrite`` is false, QsfIOError when the
    system refuses.
    """
    write_text(path, page(results, changes, change_notes), overwrite=overwrite)


def page(results: Results, changes: Sequence[Change] = (), change_notes: Sequence[str] = ()) -> str:
    """Return the page.

    ``changes``: of these results since earlier ones, if they were compared; ``change_notes``: what
    a reader must know of them.
    """
    sections = [
        tables.headline(results),
        tables.note_section(results.notes),
        _change_section(changes, change_notes),
        tables.limit_section(results.limits),
        *_plot_sections(results),
        tables.ratio_section(results),
        tables.row_section(results.rows),
        tables.failure_section(results),
        tables.method_section(results),
    ]
    name = _compared(results.rows)
    return parts.document(
        "Benchmark",
        name,
        machine_line(results),
        "\n".join(section for section in sections if section),
        "Made by python -m qsf.bench.",
        title=f"{name}: benchmark",
        style=PAGE_STYLE,
    )


def _compared(rows: Sequence[Row]) -> str:
    """Return what was compared, such as "1.1B: QSF and llama.cpp"."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    engines = list(dict.fromkeys(plots.engine_name(row.engine) for row in rows))
    if not rows:
        return "No measurements"
    return f"{', '.join(shapes[:_MAX_NAMED])}: {' and '.join(engines[:_MAX_NAMED])}"


def machine_line(results: Results) -> str:
    """Return the machine in a line, of what `machine.describe` knows of it."""
    known = tables.flat(results.machine)
    said = [known.get("cpu", "")]
    if "cores" in known:
        said.append(f"{known['cores']} core{'' if known['cores'] == '1' else 's'}")
    if "memory bytes" in known:
        said.append(f"{known['memory bytes']} of memory")
    said += [known.get("isa", ""), known.get("date", "")[:10]]
    return ", ".join(part for part in said if part)


def _plot_sections(results: Results) -> Iterator[str]:
    rows = results.rows[:_MAX_PLOTTED]
    look = plots.Look.of(rows)
    unlimited = [row for row in rows if plots.is_unlimited(row)]
    first = plots.least_depth(unlimited)
    bars = "Bars around points go from the least to the most of all rounds."
    yield _plotted(
        [(plots.BY_BITS, first)], look, "Speed and bits per weight", "bits",
        f"Generated or prompt tokens in a second. {bars}",
    )  # fmt: skip
    yield _plotted(
        [(plots.BY_BUDGET, [row for row in rows if row.cap is None]),
         (plots.BY_CAP, [row for row in rows if row.cap is not None])],
        look, "Speed in little memory", "memory",
        "What does not fit into its budget QSF reads from the disk for every token. A control "
        "group limits all memory of a process, page cache included.",
    )  # fmt: skip
    yield _plotted(
        [(plots.BY_DEPTH, unlimited)], look, "Speed and context depth", "depth",
        "Each test after so many tokens, which attention has to look at.",
    )  # fmt: skip
    yield time_section(results.rows)
    yield _roofline(unlimited or rows, results, look)
    yield _plotted(
        [(plots.BY_QUALITY, first)], look, "Speed and quality", "quality",
        "Upwards is faster, to the left is better.",
    )  # fmt: skip


def _plotted(
    planned: Sequence[tuple[plots.Plan, Sequence[Row]]],
    look: plots.Look,
    title: str,
    anchor: str,
    note: str,
) -> str:
    drawn: list[str] = []
    shown: list[Row] = []
    for plan, rows in planned:
        panels, kept = plots.panels(plan, rows, look, name=title)
        drawn += panels
        shown += kept
    if not drawn:
        return ""
    legend = look.legend(shown, by_type=planned[0][0].by_type)
    content = f'{legend}<div class="panels">{"".join(drawn)}</div>'
    return parts.section(title, note, content, anchor=anchor)


def _roofline(rows: Sequence[Row], results: Results, look: plots.Look) -> str:
    placed = [one for row in plots.least_depth(rows) if (one := plots.on_roofline(row)) is not None]
    drawn = plots.roofline(placed, results.limits, look)
    if not drawn:
        return ""
    n_threads = plots.most_threads(results.limits.memory_gb_per_s)
    said = plots.threads_words(int(n_threads[0])) if n_threads else ""
    note = (
        "A token needs each weight once, a prompt uses what it has read for all its tokens (it is "
        "shown as one pass over the weights): so generating is under the slope, where memory is "
        "the limit, and a prompt under the level roof, where arithmetic is. The roofs are those "
        f"of {said}."
    )
    legend = look.legend([one.row for one in placed], by_type=True)
    content = f'{legend}<div class="panels"><figure>{drawn}</figure>{_roof_table(placed)}</div>'
    return parts.section("Roofline", note, content, anchor="roofline")


def _roof_table(placed: Sequence[plots.OnRoofline]) -> str:
    heads = ("Point", "per byte", "billion/s", "of limit")
    rows = [
        (
            f"{one.row.type}, {tables.setting_words(one.row)}",
            figure(one.madds_per_byte),
            figure(one.gmadds_per_s),
            "" if one.row.fraction_of_limit is None else f"{100 * one.row.fraction_of_limit:.0f} %",
        )
        for one in placed
    ]
    return parts.scroll("points of the roofline", parts.table(heads, rows, {0}), kind="table")


def _change_section(changes: Sequence[Change], notes: Sequence[str]) -> str:
    if not changes and not notes:
        return ""
    heads = ("What", "Before", "Now", "Change", "Verdict")
    table = parts.scroll(
        "changes", parts.table(heads, changes[:_MAX_CHANGES], {0, 4}), kind="table"
    )
    note = "These results and earlier ones: what is within the noise of both is no change."
    content = (table if changes else "") + tables.sentences(notes)
    return parts.section("Since the earlier results", note, content, anchor="changes")
