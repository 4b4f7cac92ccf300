"""What a model did and when, as Chrome's trace events: for chrome://tracing and ui.perfetto.dev.

The object form of the Trace Event Format: complete events ("X") with times in microseconds, and
metadata events ("M") that name the process and its threads.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qsf.errors import QsfFormatError

NO_UNIT = 2**32 - 1  # an event that is of no unit of the file
_PID = 1
_N_FIELDS = 7  # begin_ns, end_ns, kind_idx, unit_idx, thread_idx, n_bytes, n_tokens
_BESIDE = {"read": "disk", "checksum": "check"}  # categories of what other threads do
_AROUND = {"pass": "pass", "sample": "python", "python": "python"}


def chrome_trace(
    rows: Sequence[Sequence[int]],
    kinds: Sequence[str],
    *,
    n_layers: int,
    name: str = "qsf",
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the trace of ``rows``: (begin_ns, end_ns, kind, unit, thread, n_bytes, n_tokens).

    ``kinds`` names the kinds. Unit 0 is the embedding, 1 .. ``n_layers`` are the layers, the next
    is what follows them, `NO_UNIT` none. Thread 0 computes, the others read. ``about`` goes to
    ``otherData``. Times count from the first event. Raises QsfFormatError for rows of another form.
    """
    for row in rows:
        _check(row, len(kinds))
    origin_ns = min((row[0] for row in rows), default=0)
    # A pass begins with its first phase: what contains the other comes first.
    ordered = sorted(rows, key=lambda row: (row[0], -row[1], kinds[row[2]] != "pass"))
    events = _names(name, sorted({row[4] for row in rows}))
    events += [_event(row, kinds, n_layers, origin_ns) for row in ordered]
    other = {key: value if isinstance(value, str) else json.dumps(value)
             for key, value in (about or {}).items()}  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(
    path: Path,
    rows: Sequence[Sequence[int]],
    kinds: Sequence[str],
    *,
    n_layers: int,
    name: str = "qsf",
    about: Mapping[str, Any] | None = None,
    overwrite: bool,
) -> None:
    """Write `chrome_trace` as a file, complete or not at all. Raises QsfError."""
    from qsf.converter.output import write_text

    trace = chrome_trace(rows, kinds, n_layers=n_layers, name=name, about=about)
    events = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
    rest = json.dumps(trace)[1:]
    write_text(path, f'{{"traceEvents": [\n{events}\n], {rest}\n', overwrite=overwrite)


def _check(row: Sequence[int], n_kinds: int) -> None:
    if len(row) != _N_FIELDS:
        raise QsfFormatError(f"an event of the trace has {len(row)} fields, not {_N_FIELDS}")
    begin_ns, end_ns, kind_idx = row[:3]
    if end_ns < begin_ns:
        raise QsfFormatError(f"an event of the trace ends {begin_ns - end_ns} ns before it begins")
    if not 0 <= kind_idx < n_kinds:
        raise QsfFormatError(f"an event of the trace is of kind {kind_idx}, there are {n_kinds}")


def _names(process: str, threads: Sequence[int]) -> list[dict[str, Any]]:
    """The metadata: names, and that the computing thread is shown first."""
    events = [_metadata("process_name", 0, {"name": process})]
    for thread_idx in threads:
        label = "computing" if thread_idx == 0 else f"reading {thread_idx}"
        events.append(_metadata("thread_name", thread_idx, {"name": label}))
        events.append(_metadata("thread_sort_index", thread_idx, {"sort_index": thread_idx}))
    return events


def _metadata(name: str, thread_idx: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": _PID, "tid": thread_idx, "args": args}


def _event(
    row: Sequence[int], kinds: Sequence[str], n_layers: int, origin_ns: int
) -> dict[str, Any]:
    begin_ns, end_ns, kind_idx, unit_idx, thread_idx, n_bytes, n_tokens = row
    kind = kinds[kind_idx]
    args: dict[str, Any] = {}
    if unit_idx != NO_UNIT:
        args["unit"] = _unit(unit_idx, n_layers)
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
        "tid": thread_idx,
        "args": args,
    }


def _unit(unit_idx: int, n_layers: int) -> str:
    if unit_idx == 0:
        return "embedding"
    return f"layer {unit_idx - 1}" if unit_idx <= n_layers else "final"
