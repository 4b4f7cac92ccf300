"""An answer that repeats one text for ever ends on a terminal, and is said to."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsf.cli.run.answer import LoopGuard, generate, loop_at_end, terminal_guard
from qsf.errors import QsfCancelledError
from qsf.options import GenerationOptions

TEXT = st.text("ab ", min_size=1, max_size=5)


class Engine:
    """What ``generate`` needs of a model."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@given(st.text("abc ", max_size=40), TEXT, st.integers(1, 12), st.integers(1, 60))
def test_it_is_the_loop_that_plain_search_finds(
    before: str, unit: str, times: int, least: int
) -> None:
    text = before + unit * times
    loops = [
        (period, n)
        for n in range(least, len(text) + 1)
        for period in range(1, n // 8 + 1)
        if text[-n:][period:] == text[-n:][:-period]
    ]
    longest = max((n for _, n in loops), default=0)
    assert loop_at_end(text, least) == min(
        ((p, n) for p, n in loops if n == longest), default=(0, 0)
    )


def test_numbers_that_count_and_short_loops_are_no_loops() -> None:
    guard = LoopGuard()
    for i in range(2000):
        guard.push(f"{i}, ")
    for _ in range(190):  # of tokens
        guard.push("ha ")
    assert guard.found == ""


@pytest.mark.parametrize("is_thought", [False, True])
def test_a_loop_ends_the_answer(monkeypatch: pytest.MonkeyPatch, is_thought: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine: Any = Engine()

    def start(options: GenerationOptions) -> Iterator[str]:
        for _ in range(1000):
            if is_thought:
                assert options.on_reasoning is not None
                options.on_reasoning("Wait. ")
            else:
                yield "It had a robot. "
            if engine.is_cancelled:
                raise QsfCancelledError("cancelled")

    def answer(guard: LoopGuard | None) -> int:
        return len(list(generate(engine, GenerationOptions(), start, is_quiet=False, guard=guard)))

    guard = terminal_guard(is_wanted=True)
    assert guard is not None
    assert answer(guard) == (0 if is_thought else 256)
    assert "came 256 times; --no-loop-guard" in guard.found
    assert terminal_guard(is_wanted=False) is None
    engine.is_cancelled = False
    assert answer(None) == (0 if is_thought else 1000)


def test_a_pipe_has_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_guard(is_wanted=True) is None
