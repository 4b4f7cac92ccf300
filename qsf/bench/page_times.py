"""Where the time of a token goes: bars, and the milliseconds beneath them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qsf.bench.page_plots import engine_name, is_generating
from qsf.bench.page_style import N_PART_COLOURS
from qsf.bench.plots import figure
from qsf.bench.results import Breakdown, Row, Spread
from qsf_converter.report import parts as parts
from qsf_converter.report.svg import stacked_bar, text

_MAX_BARS = 40
# In the order of a token's way, the rest at the end; the place is the colour.
_NAMES = {
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


def time_section(rows: Sequence[Row]) -> str:
    """Return the section; nothing when no row of a generation has a breakdown."""
    timed = [(row, row.breakdown) for row in rows if row.breakdown and is_generating(row.test)]
    timed = [(row, known) for row, known in timed if 0 < _total(known) < math.inf]
    if not timed:
        return ""
    timed = timed[:_MAX_BARS]
    names = _ordered(name for _, known in timed for name in known.parts)
    legend = "".join(
        f'<li><i class="p{_colour(name)}"></i>{text(_word(name))}</li>' for name in names
    )
    bars = "".join(_bar(row, known, names) for row, known in timed)
    note = (
        "Each bar is the time of one generated token on the computing thread: its parts follow "
        "each other. What other threads do meanwhile is said beneath the bar."
    )
    content = f'<ul class="keys">{legend}</ul><ul class="times">{bars}</ul>{_table(timed, names)}'
    return parts.section("Where the time goes", note, content, anchor="time")


def _ordered(found: Iterable[str]) -> list[str]:
    """Return each name once: those that are known in their order, then the others."""
    return sorted(dict.fromkeys(found), key=_place)


def _place(name: str) -> int:
    names = list(_NAMES)
    return names.index(name) if name in names else len(names)


def _word(name: str) -> str:
    return _NAMES.get(name, name)


def _colour(name: str) -> int:
    return min(_place(name), N_PART_COLOURS - 1)


def _total(known: Breakdown) -> float:
    """What is less than nothing, by noise, takes no room."""
    return sum(max(0.0, part.median) for part in known.parts.values())


def _label(row: Row) -> str:
    return row.label.removeprefix(f"{row.engine}, ")


def _ms(value: float) -> str:
    return f"{figure(value)} ms"


def _range(part: Spread) -> str:
    return f"{_ms(part.median)} ({figure(part.min)} to {figure(part.max)})"


def _bar(row: Row, known: Breakdown, names: Sequence[str]) -> str:
    total = _total(known)
    pieces = [
        (part.median / total, _colour(name), f"{_word(name)}: {_range(part)}, "
         f"{100 * part.median / total:.1f} %")
        for name in names
        if (part := known.parts.get(name)) is not None and part.median > 0
    ]  # fmt: skip
    said = "; ".join(title for _, _, title in pieces)
    beside = ""
    busy = {name: part for name, part in known.beside.items() if part.median > 0}
    if busy:
        works = ", ".join(
            f"{_BESIDE.get(name, name)} {_ms(part.median)}" for name, part in busy.items()
        )
        beside = f'<p class="soft">Meanwhile on other threads: {text(works)}</p>'
    return (
        f"<li><p><span>{text(_label(row))}</span><span>{text(_ms(known.wall_ms))} a token</span>"
        f"</p>{stacked_bar(f'{_label(row)}: {said}', pieces, palette='p')}{beside}</li>"
    )


def _table(timed: Sequence[tuple[Row, Breakdown]], names: Sequence[str]) -> str:
    beside = list(dict.fromkeys(name for _, known in timed for name in known.beside))
    heads = [f"{engine_name(timed[0][0].engine)}: ms a token", "all", *map(_word, names)]
    heads += [f"beside: {_BESIDE.get(name, name)}" for name in beside]
    rows = [
        [
            _label(row),
            _fixed(known.wall_ms),
            *(_cell(known.parts.get(name)) for name in names),
            *(_cell(known.beside.get(name)) for name in beside),
        ]
        for row, known in timed
    ]
    return parts.scroll("time of a token", parts.table(heads, rows, {0}), kind="table")


def _cell(part: Spread | None) -> str:
    return "" if part is None else _fixed(part.median)


def _fixed(value: float) -> str:
    """Two digits after the point, so that columns can be compared."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
