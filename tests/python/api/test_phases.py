"""The binding of what the engine measures: phases of calls, traces, the machine's limits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qsf import errors
from qsf.native import binding

PROMPT = array("I", [0, 10, 20, 30, 40])
N_STEPS = 8


@pytest.fixture
def model(tiny_llama_8bit: Path) -> Iterator[binding.NativeModel]:
    opened = binding.NativeModel(tiny_llama_8bit, binding.Options(budget_bytes=0, max_sessions=2))
    yield opened
    opened.close()


@pytest.fixture
def session(model: binding.NativeModel) -> Iterator[binding.NativeSession]:
    created = model.create_session()
    yield created
    created.close()


def run(session: binding.NativeSession) -> None:
    """Evaluate a prompt and some tokens."""
    session.rewind(0)
    while session.sync_chunk(PROMPT) < len(PROMPT):
        pass
    for token in range(N_STEPS):
        session.step(token)


def names_of(events: list[binding.TraceEvent]) -> list[str]:
    return [binding.trace_kind_name(event.kind) for event in events]


def test_kinds_have_names() -> None:
    names = binding.phase_names()
    assert " ".join(names) == (
        "embedding norm qkv attention attn_out gate_up down head wait decompress other"
    )
    assert [binding.trace_kind_name(i) for i in range(len(names))] == list(names)
    assert [binding.trace_kind_name(len(names) + i) for i in range(5)] == [
        "pass",
        "read",
        "checksum",
        "sample",
        "unknown",
    ]


def test_the_phases_of_a_session_are_its_time(session: binding.NativeSession) -> None:
    assert set(session.stats().phase_ns) == {0}
    for _ in range(20):  # on a busy machine something may come between two looks at the clock
        before = session.stats()
        run(session)
        after = session.stats()
        spent_ns = after.prompt_ns + after.step_ns - before.prompt_ns - before.step_ns
        phases_ns = sum(after.phase_ns) - sum(before.phase_ns)
        assert phases_ns <= spent_ns
        if spent_ns - phases_ns <= spent_ns / 100 + 5000:
            break
    else:
        pytest.fail(f"the phases are {phases_ns} of {spent_ns} ns")
    phases = dict(zip(binding.phase_names(), after.phase_ns, strict=True))
    assert {name for name, ns in phases.items() if ns == 0} == {"wait", "decompress"}


def test_samples_are_counted(session: binding.NativeSession) -> None:
    sampler = binding.NativeSampler(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=1
    )
    run(session)
    assert (session.stats().n_samples, session.stats().sample_ns) == (0, 0)
    begin_ns = time.monotonic_ns()
    for _ in range(3):
        sampler.choose(session, PROMPT)
    assert session.stats().n_samples == 3
    assert 0 < session.stats().sample_ns <= time.monotonic_ns() - begin_ns


def test_a_trace_has_the_passes(model: binding.NativeModel, session: binding.NativeSession) -> None:
    run(session)
    begin_ns = time.monotonic_ns()
    model.start_trace(10_000)
    run(session)
    events = model.stop_trace()
    end_ns = time.monotonic_ns()
    assert model.n_trace_dropped == 0
    assert all(begin_ns <= e.begin_ns <= e.end_ns <= end_ns for e in events)
    assert {e.thread_idx for e in events} == {0}  # nothing is read
    names = names_of(events)
    assert names.count("pass") == N_STEPS + 1
    assert names.count("qkv") == names.count("down") == model.info().n_layers * (N_STEPS + 1)
    n_units = len(model.timeline())
    units = {e.unit_idx for e, name in zip(events, names, strict=True) if name == "down"}
    assert units == set(range(1, n_units - 1))
    assert {e.n_tokens for e in events if e.n_tokens} == {1, len(PROMPT)}
    run(session)  # into no memory
    assert model.stop_trace() == []


def test_a_full_trace_counts_what_is_lost(
    model: binding.NativeModel, session: binding.NativeSession
) -> None:
    model.start_trace(10_000)
    run(session)
    n_events = len(model.stop_trace())
    model.start_trace(7)
    run(session)
    assert len(model.stop_trace()) == 7
    assert model.n_trace_dropped == n_events - 7
    run(session)  # has ended: nothing is even lost any more
    assert model.n_trace_dropped == n_events - 7
    model.start_trace(3)
    model.start_trace(10_000)  # in its place
    run(session)
    assert len(model.stop_trace()) == n_events


@pytest.mark.parametrize("n_events", [0, -1, 2**62, 2**70])
def test_a_trace_without_room_is_refused(model: binding.NativeModel, n_events: int) -> None:
    with pytest.raises(errors.QsfArgumentError):
        model.start_trace(n_events)
    assert model.stop_trace() == []


def test_closing_ends_a_trace(model: binding.NativeModel, session: binding.NativeSession) -> None:
    """The session lives on; the memory of the events does not."""
    model.start_trace(10_000)
    run(session)
    model.close()
    gc.collect()
    blocks = [bytearray(b"\xa5") * 400_000 for _ in range(20)]  # where the events were, maybe
    run(session)
    assert all(block.count(0xA5) == len(block) for block in blocks)
    with pytest.raises(errors.QsfArgumentError, match="closed"):
        model.stop_trace()


def test_streaming_is_traced(tiny_llama_8bit: Path) -> None:
    """Reads and checks come from threads of their own; what they read is what streaming counts."""
    plan = binding.plan_model(tiny_llama_8bit, binding.Options(budget_bytes=1))
    model = binding.NativeModel(
        tiny_llama_8bit, binding.Options(budget_bytes=plan.min_budget_bytes + 2**20)
    )
    session = model.create_session()
    if model.info().plan.streamed_bytes == 0:
        pytest.skip("the interpreter's memory leaves no budget that streams so small a model")
    model.start_trace(100_000)
    run(session)
    events = model.stop_trace()
    names = names_of(events)
    reads = [e for e, name in zip(events, names, strict=True) if name == "read"]
    checks = [e for e, name in zip(events, names, strict=True) if name == "checksum"]
    assert reads
    assert all(e.thread_idx >= 1 for e in reads + checks)
    n_begun_before = model.info().io_depth  # reads whose checks alone are in the trace, at most
    assert len(checks) <= len(reads) + n_begun_before
    assert sum(e.n_bytes for e in reads) <= session.stats().read_bytes
    assert dict(zip(binding.phase_names(), session.stats().phase_ns, strict=True))["wait"] > 0
    session.close()
    model.close()


def test_traces_begin_and_end_beside_passes(
    model: binding.NativeModel, session: binding.NativeSession
) -> None:
    logits = np.empty((2, model.info().n_vocab), np.float32)
    run(session)
    session.read_logits(logits[0])
    is_done = threading.Event()

    def compute() -> None:
        for _ in range(20):
            run(session)
        is_done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    n_events = 0
    while not is_done.is_set():
        model.start_trace(100)
        n_events += len(model.stop_trace())
    thread.join()
    session.read_logits(logits[1])
    assert np.array_equal(logits[0], logits[1])


def test_the_roofline_is_measured() -> None:
    roofline = binding.measure_roofline(1, 64 * 2**20, 1)
    assert roofline.read_gb_per_s > 0.01
    assert roofline.gmadds_per_s >= 0


@pytest.mark.parametrize(
    "asked", [(0, 2**26, 1), (1, 2**26 - 1, 1), (1, 2**26, 0), (-1, 2**26, 1), (1, 2**80, 1)]
)
def test_a_roofline_out_of_bounds_is_refused(asked: tuple[int, int, int]) -> None:
    with pytest.raises(errors.QsfArgumentError):
        binding.measure_roofline(*asked)
    with pytest.raises(errors.QsfMemoryError, match="the system has"):
        binding.measure_roofline(1, 2**60, 1)
