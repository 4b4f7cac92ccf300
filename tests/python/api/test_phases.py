"""The binding of what the engine measures: phases of calls, the machine's limits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path

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


def test_phases_have_names() -> None:
    names = binding.phase_names()
    assert " ".join(names) == (
        "embedding norm qkv attention attn_out gate_up down head wait decompress other"
    )


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
