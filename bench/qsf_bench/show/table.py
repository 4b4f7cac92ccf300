"""The report on a terminal: rich's view of its parts. Nothing here prints."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsf_bench.judge.results import Results
from qsf_bench.show.report import Part, parts_of

_FILE_COLUMN = 20
_TIME_COLUMN = 17
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Benchmark by qsf bench</title>
<style>
{stylesheet}
body {{ color: {foreground}; background: {background}; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, monospace; }}
</style>
<pre>{code}</pre>
</html>
"""


def report(results: Results) -> RenderableType:
    """Return the whole report of a result: the machine, then its parts."""
    machine = results.machine
    first = f"{machine.get('cpu', 'unknown processor')}, {machine.get('n_cores', '?')} cores"
    if machine.get("isa"):
        first += f", {machine['isa']} kernels"
    names = (("qsf", "QSF"), ("commit", "commit"), ("baseline", ""), ("date", ""), ("load", "load"))
    second = [f"{label} {machine[key]}".strip() for key, label in names if machine.get(key)]
    lines = [first, ", ".join(second)] if second else [first]
    return Group(*map(Text, lines), Text(), shown(parts_of(results)))


def shown(parts: Sequence[Part]) -> RenderableType:
    """Return the parts one after another."""
    return Group(*map(_shown, parts))


def _shown(part: Part) -> RenderableType:
    """Return a title, its content, and an empty line."""
    inner: list[RenderableType] = [_table(part)] if part.rows else []
    if part.lines:
        lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        for line in part.lines:
            lines.add_row("-", Text(line, overflow="fold"))
        inner += [Text(), lines] if part.rows else [lines]
    if part.note:
        inner.append(Text(part.note, style="dim"))
    return Group(Text(part.title, style="bold"), *inner, Text())


def _table(part: Part) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, is_number in part.headings:
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=is_number, overflow="fold")
    if part.anchor == "rows":
        widest = max(len(row[0]) for row in part.rows)
        table.columns[0].max_width, table.columns[0].min_width = (
            *(_FILE_COLUMN, min(_FILE_COLUMN, widest)),
        )
    if part.anchor == "time":
        for column in table.columns[1:]:
            column.no_wrap, column.max_width = False, _TIME_COLUMN
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table


def as_text(content: RenderableType, width: int = 80) -> str:
    """Return lines without colours or trailing blanks, at most ``width`` columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(content)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def as_page(content: RenderableType, width: int = 120) -> str:
    """Return the same lines with colours as a web page that loads nothing."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(content)
    return console.export_html(code_format=_PAGE)
