"""Chrome's trace events of a model at work."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
from typing import Any

import pytest

from qsf_bench.show.trace import chrome_trace

KINDS = ["embedding", "norm", "qkv", "wait", "pass", "read", "checksum", "sample", "python"]
UNITS = ("embedding", "layer 0", "layer 1", "final unit")
ORIGIN_NS = 1_700_000_000_123_456_789  # a clock of today: floats must not lose its nanoseconds


def event(begin: int, end: int, kind: str, unit: int = 0, thread: int = 0, n_bytes: int = 0,
          n_tokens: int = 0) -> list[int]:  # fmt: skip
    return [
        *(ORIGIN_NS + begin, ORIGIN_NS + end, KINDS.index(kind), unit, thread),
        *(n_bytes, n_tokens),
    ]


def a_run() -> list[list[int]]:
    """Two passes, in the order in which events end, as the engine gives them; then Python's."""
    rows = []
    for n in range(2):
        t = 100_000 * n
        rows += [
            event(t, t + 1_001, "embedding", 0, n_tokens=1),
            event(t + 2_000, t + 5_500, "wait", 1, n_bytes=4096, n_tokens=1),
            event(t + 1_001, t + 9_000, "qkv", 1, n_tokens=1),
            event(t + 9_000, t + 12_345, "norm", 3, n_tokens=1),
            event(t, t + 12_345, "pass", 0, n_tokens=1),
            event(t + 13_000, t + 14_000, "sample", 0),
            event(t + 500, t + 4_500, "read", 1, 1, n_bytes=8000),
            event(t + 3_000, t + 6_000, "read", 2, 1, n_bytes=9000),
            event(t + 6_000, t + 6_500, "checksum", 2, 1, n_bytes=9000),
            event(t + 700, t + 5_000, "read", 2, 2, n_bytes=9000),
        ]
    rows.append(event(14_000, 100_000, "python", -1))
    return rows


def trace_of(rows: list[list[int]]) -> dict[str, Any]:
    return chrome_trace(rows, KINDS, unit_names=UNITS, name="tiny")


def of_kind(trace: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one["ph"] == ph]


def assert_valid(trace: dict[str, Any]) -> None:
    """What the format wants, and that events of one line follow or contain each other."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert len(of_kind(trace, "X")) + len(of_kind(trace, "M")) == len(trace["traceEvents"])
    named = {one["tid"] for one in of_kind(trace, "M") if one["name"] == "thread_name"}
    open_ends: dict[int, list[float]] = {}
    last = 0.0
    for one in of_kind(trace, "X"):
        assert set(one) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert isinstance(one["name"], str)
        assert one["pid"] == 1
        assert one["tid"] in named
        assert one["ts"] >= last  # sorted, from 0 on
        assert one["dur"] >= 0
        last, end = one["ts"], one["ts"] + one["dur"]
        ends = open_ends.setdefault(one["tid"], [])
        while ends and ends[-1] <= one["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6
        ends.append(end)
    for one in of_kind(trace, "M"):
        assert set(one) == {"name", "ph", "ts", "pid", "tid", "args"}
        assert one["name"] in ("process_name", "thread_name", "thread_sort_index")


def test_a_run_is_a_valid_trace() -> None:
    rows = a_run()
    trace = trace_of(rows)
    assert_valid(trace)
    events = of_kind(trace, "X")
    assert len(events) == len(rows)
    assert of_kind(trace, "M")[0]["args"] == {"name": "tiny"}
    found = sorted((e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in events)
    assert found == sorted((KINDS[r[2]], r[0] - ORIGIN_NS, r[1] - r[0]) for r in rows)


def test_arguments_say_unit_tokens_and_rate() -> None:
    events = of_kind(trace_of(a_run()), "X")
    args = {(e["name"], e["tid"]): e["args"] for e in events if e["ts"] < 100}
    assert args["embedding", 0] == {"unit": "embedding", "tokens": 1}
    assert args["qkv", 0] == {"unit": "layer 0", "tokens": 1}
    assert args["norm", 0] == {"unit": "final unit", "tokens": 1}
    assert args["read", 1] == {"unit": "layer 0", "bytes": 8000, "GB/s": 2.0}
    assert args["pass", 0] == {"tokens": 1}  # the engine says unit 0 of a pass
    assert args["sample", 0] == args["python", 0] == {}
    assert {e["cat"] for e in events} == {"pass", "compute", "disk", "check", "python"}


@pytest.mark.parametrize("seed", range(3))
def test_any_times_give_a_valid_trace(seed: int) -> None:
    """Also those that overlap on the computing thread, as no engine should say."""
    rng = random.Random(seed)
    rows = []
    for _ in range(60):
        begin = rng.randrange(300)
        kind = rng.choice(KINDS)
        rows.append(event(begin, begin + rng.randrange(40), kind, thread=rng.randrange(3)))
    trace = trace_of(rows)
    assert_valid(trace)
    assert len(of_kind(trace, "X")) == len(rows)
    for tid in {e["tid"] for e in of_kind(trace, "X") if e["tid"] > 0}:
        label = next(
            e["args"]["name"] for e in of_kind(trace, "M")
            if e["name"] == "thread_name" and e["tid"] == tid
        )  # fmt: skip
        if label.startswith("reading"):
            ours = [e for e in of_kind(trace, "X") if e["tid"] == tid]
            ends = [0.0, *(e["ts"] + e["dur"] for e in ours)]
            assert all(e["ts"] >= end - 1e-6 for e, end in zip(ours, ends, strict=False))
