"""What a model did and when, as Chrome's trace events: for chrome://tracing and ui.perfetto.dev.

The object form of the Trace Event Format: complete events ("X") with times in microseconds, and
metadata events ("M") that name the process and its threads.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PID = 1
_COMPUTING = 0  # the thread
_BESIDE = {"read": "disk", "checksum": "check"}  # categories of what other threads do
_AROUND = {"pass": "pass", "sample": "python", "python": "python"}  # of no unit of the file


def chrome_trace(
    rows: Sequence[Sequence[int]], kinds: Sequence[str], *, unit_names: Sequence[str], name: str
) -> dict[str, Any]:
    """Return the trace of ``rows``: (begin_ns, end_ns, kind, unit, thread, n_bytes, n_tokens).

    ``kinds`` names the kinds. A unit is a place in ``unit_names``; any other number is none.
    Thread 0 computes, the others read; one that has several reads under way gets a line for each.
    Times count from the first event.
    """
    origin_ns = min((row[0] for row in rows), default=0)
    # A pass begins with its first phase: what contains the other comes first.
    ordered = sorted(rows, key=lambda row: (row[0], -row[1], kinds[row[2]] != "pass"))
    placed = _placed(ordered)
    lines = sorted(set(placed))
    events = _names(name, lines)
    events += [
        _event(row, kinds, unit_names, origin_ns) | {"tid": lines.index(line)}
        for row, line in zip(ordered, placed, strict=True)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _placed(ordered: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the thread of each row and its line there.

    Events of one line follow or contain each other: viewers draw nothing sensible otherwise. What
    computes is nested; reads of one thread are beside each other.
    """
    open_ends: dict[int, list[list[int]]] = {}  # of each thread and line, the ends of what is open
    placed = []
    for begin_ns, end_ns, _, _, thread_idx, *_ in ordered:
        lines = open_ends.setdefault(thread_idx, [])
        nests = thread_idx == _COMPUTING
        line_idx = next(
            (idx for idx, ends in enumerate(lines) if _has_room(ends, begin_ns, end_ns, nests)),
            len(lines),
        )
        if line_idx == len(lines):
            lines.append([])
        lines[line_idx].append(end_ns)
        placed.append((thread_idx, line_idx))
    return placed


def _has_room(open_ends: list[int], begin_ns: int, end_ns: int, nests: bool) -> bool:
    """Does an event fit, also into the one that is open if it ``nests``? Closes what has ended."""
    while open_ends and open_ends[-1] <= begin_ns:
        open_ends.pop()
    return not open_ends or (nests and end_ns <= open_ends[-1])


def _names(process: str, lines: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The metadata: names, and that the computing thread is shown first."""
    events = [_metadata("process_name", 0, {"name": process})]
    for tid, (thread_idx, line_idx) in enumerate(lines):
        label = "computing" if thread_idx == _COMPUTING else f"reading {thread_idx}"
        label += f" ({line_idx + 1})" if line_idx else ""
        events.append(_metadata("thread_name", tid, {"name": label}))
        events.append(_metadata("thread_sort_index", tid, {"sort_index": tid}))
    return events


def _metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": _PID, "tid": tid, "args": args}


def _event(
    row: Sequence[int], kinds: Sequence[str], names: Sequence[str], origin_ns: int
) -> dict[str, Any]:
    begin_ns, end_ns, kind_idx, unit_idx, _, n_bytes, n_tokens = row
    kind = kinds[kind_idx]
    args: dict[str, Any] = {}
    if kind not in _AROUND and 0 <= unit_idx < len(names):
        args["unit"] = names[unit_idx]
    if n_tokens:
        args["tokens"] = n_tokens
    if n_bytes:
        args["bytes"] = n_bytes
        if end_ns > begin_ns:
            args["GB/s"] = round(n_bytes / (end_ns - begin_ns), 3)
    return {
        "name": kind,
        "cat": _BESIDE.get(kind) or _AROUND.get(kind) or "compute",
        "ph": "X",
        "ts": (begin_ns - origin_ns) / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "pid": _PID,
        "args": args,
    }
