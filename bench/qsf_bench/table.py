"""The report of a run: text for a terminal, JSON, and a plain web page."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import datetime
import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qsf_bench.files import FileFacts
from qsf_bench.tasks import QSF, Answer, Runs

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>qsf bench</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: .2em .8em; \
text-align: right }} th {{ border-bottom: 1px solid }} td:first-child {{ text-align: left }}</style>
<h1>{title}</h1>
<table><tr>{heads}</tr>
{rows}
</table>
{notes}
</html>
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, file and test. Speeds are tokens a second: those of the prompt, or generated."""

    file: str
    engine: str
    type: str
    bits_per_weight: float
    threads: int
    budget_mb: int | None
    cap_mb: int | None
    test: str
    rounds: list[float]  # speeds in the order of the rounds
    ratio: float | None  # to llama.cpp: the median over rounds that both did
    peak_mb: float
    token_mb: float  # bytes of weights that one generated token reads
    kl: float | None  # divergence in nats from a file of more bits; None: not measured
    version: str

    @property
    def median(self) -> float:
        """The median speed."""
        return statistics.median(self.rounds)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes of weights a second; None for a prompt, whose passes share them."""
        return self.median * self.token_mb / 1e3 if self.test.startswith("tg") else None


def rows_of(
    runs: Sequence[Runs],
    facts: Mapping[str, FileFacts],
    baseline_of: Mapping[str, str],
    kls: Mapping[str, float],
) -> list[Row]:
    """Return a row for each task and test with an answer.

    Args:
        runs: of the rounds.
        facts: of the files, by `Task.path`.
        baseline_of: the path of llama.cpp's file, by that of QSF's.
        kls: of the files, by `Task.path`.
    """
    rows = []
    for each in runs:
        task, answers = each.task, [answer for answer in each.answers if answer]
        if not answers:
            continue
        other = baseline_of.get(task.path) if task.engine == QSF else None
        rival = next(
            (
                r for r in runs
                if r.task.path == other
                and (r.task.n_threads, r.task.cap_mb) == (task.n_threads, task.cap_mb)
            ),
            None,
        )  # fmt: skip
        file = facts[task.path]
        for i, test in enumerate(task.tests):
            rows.append(
                Row(
                    file.path.name, task.engine, file.type, round(file.bits_per_weight, 3),
                    task.n_threads, task.budget_mb or None, task.cap_mb, test.words,
                    [answer.tok_per_s[i] for answer in answers],
                    _ratio(each.answers, rival.answers, i) if rival else None,
                    max(answer.peak_bytes for answer in answers) / 2**20,
                    file.token_bytes / 1e6, kls.get(task.path), answers[-1].version,
                )
            )  # fmt: skip
    return rows


def _ratio(ours: list[Answer | None], theirs: list[Answer | None], i: int) -> float | None:
    both = zip(ours, theirs, strict=False)  # a stopped round has the first ones' answers
    ratios = [a.tok_per_s[i] / b.tok_per_s[i] for a, b in both if a and b]
    return statistics.median(ratios) if ratios else None


# ---- its forms ----


def _speed(tok_per_s: float) -> str:
    """Return three digits: 0.726, 42.5, 15000."""
    n_places = max(0, 2 - math.floor(math.log10(tok_per_s)))
    return f"{round(tok_per_s, 2 - math.floor(math.log10(tok_per_s))):.{n_places}f}"


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table as text, its heads first; columns without a value are left out."""
    heads = ["model", "engine", "type", "bits", "threads", "limit", "test", "tok/s", "least-most",
             "x llama.cpp", "MB/token", "GB/s", "KL", "peak MB"]  # fmt: skip
    table = [heads]
    for row in rows:
        limit = f"cgroup {row.cap_mb} MB" if row.cap_mb else ""
        limit = limit or (f"{row.budget_mb} MB" if row.budget_mb else "")
        table.append([
            row.file.rsplit(".", 1)[0], row.engine, row.type, f"{row.bits_per_weight:.2f}",
            str(row.threads), limit, row.test, _speed(row.median),
            f"{_speed(min(row.rounds))}-{_speed(max(row.rounds))}",
            f"{row.ratio:.2f}" if row.ratio else "", f"{row.token_mb:.0f}",
            f"{row.gb_per_s:.1f}" if row.gb_per_s else "",
            "" if row.kl is None else f"{row.kl:.4f}", f"{row.peak_mb:.0f}",
        ])  # fmt: skip
    used = [i for i in range(len(heads)) if any(line[i] for line in table[1:])]
    return [[line[i] for i in used] for line in table]


def as_text(rows: Sequence[Row], machine: str, notes: Sequence[str]) -> str:
    """Return the report for a terminal."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = zip(line, widths, strict=True)
        lines.append(
            "  ".join(f"{c:{'<' if i < 3 else '>'}{w}}" for i, (c, w) in enumerate(padded))
        )
    return "\n".join([machine, "", *(line.rstrip() for line in lines), "", *notes, ""])


def as_page(rows: Sequence[Row], machine: str, notes: Sequence[str]) -> str:
    """Return the report as one web page that loads nothing."""
    heads, *lines = _cells(rows)

    def of(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)

    return _PAGE.format(
        title=html.escape(machine),
        heads=of("th", heads),
        rows="\n".join(f"<tr>{of('td', line)}</tr>" for line in lines),
        notes=of("p", notes),
    )


def as_json(rows: Sequence[Row], machine: str, notes: Sequence[str], command: str) -> str:
    """Return the results as JSON."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record: dict[str, Any] = {"format": 2, "machine": machine, "date": now, "command": command}
    record |= {"rows": [asdict(row) | {"median": row.median} for row in rows], "notes": [*notes]}
    return json.dumps(record, indent=1) + "\n"
