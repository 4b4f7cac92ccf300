"""One pool of KV memory for all sessions: growing, sharing, giving back, and being full."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import qsf
from qsf import errors

N_VOCAB = 16  # tokens that are used
CTX_TOKENS = 96  # three blocks
N_SESSIONS = 4
N_BLOCKS = 6


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    """A pool of six blocks for four sessions."""
    with opened(tiny_llama_8bit) as model:
        yield model


def opened(path: Path) -> qsf.Model:
    return qsf.Model(
        path, ram_budget=None, sessions=N_SESSIONS, max_seq_len=CTX_TOKENS, kv_contexts=2
    )


def hold(session: qsf.Session, tokens: list[int]) -> Any:
    """Evaluate what is new; return the last logits."""
    return session.logits(tokens, first_row=len(tokens) - 1)[0]


def tokens_of(n: int, first: int = 1) -> list[int]:
    return [(first + i * i) % N_VOCAB for i in range(n)]


def test_a_full_pool_is_an_error_that_changes_nothing(model: qsf.Model) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(model.create_session()) for _ in range(N_SESSIONS - 1)
        )
        want = hold(model.session, tokens_of(CTX_TOKENS))
        hold(first, tokens_of(64, 2))
        hold(second, tokens_of(32, 3))
        with pytest.raises(errors.QsfMemoryError, match=r"192 positions is full.* 6 blocks"):
            hold(third, [1])
        with pytest.raises(errors.QsfMemoryError, match="for position 32"):
            hold(second, tokens_of(33, 3))
        assert second.tokens == tokens_of(32, 3)
        assert third.tokens == []
        model.session.rewind(65)  # two blocks and a token: nothing is given back
        with pytest.raises(errors.QsfMemoryError):
            hold(third, [1])
        model.session.rewind(64)
        got = hold(third, [1])
        third.close()
        model.session.rewind(0)
        assert np.array_equal(hold(model.session, [1]), got)
        first.close()
        assert np.array_equal(hold(model.session, tokens_of(CTX_TOKENS)), want)


def test_sessions_with_the_same_beginning_hold_it_once(model: qsf.Model) -> None:
    hold(model.session, tokens_of(80))
    want = hold(model.session, [*tokens_of(80), 5])
    model.session.rewind(80)
    with contextlib.ExitStack() as stack:
        # Three blocks, and for each of three that go on a copy of the last one: six.
        forks = [stack.enter_context(model.session.fork()) for _ in range(3)]
        for token, fork in enumerate(forks, 5):
            assert fork.tokens == tokens_of(80)
            got = hold(fork, [*tokens_of(80), token])
            assert np.array_equal(got, want) == (token == 5)
        assert model.session.tokens == tokens_of(80)
        assert np.array_equal(hold(model.session, [*tokens_of(80), 5]), want)
    assert np.array_equal(hold(model.session, [*tokens_of(80), 5]), want)
    model.session.rewind(0)


def test_guesses_never_make_a_full_pool(tiny_llama_8bit: Path) -> None:
    """A token for which there is room is evaluated, also where its guesses have none."""
    with qsf.Model(
        tiny_llama_8bit, ram_budget=None, sessions=2, max_seq_len=64, kv_contexts=1, draft_rows=15
    ) as model:
        with model.create_session() as other:
            hold(other, [1])
            hold(model.session, tokens_of(20))
            native = model.session._native
            for token in tokens_of(12):
                native.step(token)
            assert native.position() == 32
            with pytest.raises(errors.QsfMemoryError):
                native.step(1)
        native.step(1)


def test_contexts_are_at_most_as_many_as_sessions(tiny_llama_8bit: Path) -> None:
    with pytest.raises(errors.QsfArgumentError, match=r"kv_contexts is 3.* 2"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, kv_contexts=3)


class Naive:
    """What a session should hold: its tokens, and a number for each of its blocks."""

    def __init__(self, session: qsf.Session) -> None:
        self.session = session
        self.tokens: list[int] = []
        self.blocks: list[int] = []


class AnyOrder(RuleBasedStateMachine):
    """Sessions of a pool against lists."""

    model: qsf.Model
    alone: qsf.Model
    folder: Path
    known: dict[tuple[int, ...], Any]

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Naive] = []
        self.n_blocks = 0  # numbers given so far
        self.model.session.rewind(0)

    def teardown(self) -> None:
        for held in self.held:
            held.session.close()
        assert self.n_free() == N_BLOCKS

    def n_free(self) -> int:
        return self.model.session.engine_stats.kv_free_tokens // 32

    def holders(self, block: int) -> int:
        return sum(block in held.blocks for held in self.held)

    def take(self, held: Naive, begin: int, end: int) -> bool:
        """Do what a pass over these positions does with blocks; False: the pool is full."""
        del held.blocks[-(-end // 32) :]
        for page in range(begin // 32, -(-end // 32)):
            is_there = page < len(held.blocks)
            if is_there and self.holders(held.blocks[page]) == 1:
                continue
            if len({block for one in self.held for block in one.blocks}) == N_BLOCKS:
                return False
            self.n_blocks += 1
            held.blocks[page : page + 1] = [self.n_blocks]
        return True

    @rule()
    @precondition(lambda self: len(self.held) < N_SESSIONS - 1)
    def begin(self) -> None:
        self.held.append(Naive(self.model.create_session()))

    @rule(which=st.integers(0, 9), n=st.integers(1, 70), first=st.integers(0, 3))
    @precondition(lambda self: self.held)
    def grow(self, which: int, n: int, first: int) -> None:
        held = self.held[which % len(self.held)]
        more = tokens_of(n, first)[: CTX_TOKENS - len(held.tokens)]
        if not more:
            return
        want = held.tokens + more
        n_chunk = self.model.info.plan.chunk_tokens
        has_room = True
        while has_room and len(held.tokens) < len(want):
            begin = len(held.tokens)
            end = min(begin + n_chunk, len(want))
            has_room = self.take(held, begin, end)
            held.tokens = want[: end if has_room else begin]
        if has_room:
            assert np.array_equal(hold(held.session, want), self.expected(want))
        else:
            with pytest.raises(errors.QsfMemoryError):
                hold(held.session, want)

    def expected(self, tokens: list[int]) -> Any:
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = hold(self.alone.session, tokens)
        return self.known[key]

    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    @precondition(lambda self: self.held)
    def go_back(self, which: int, share: float) -> None:
        held = self.held[which % len(self.held)]
        del held.tokens[int(share * len(held.tokens)) :]
        del held.blocks[-(-len(held.tokens) // 32) :]
        held.session.rewind(len(held.tokens))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: 0 < len(self.held) < N_SESSIONS - 1)
    def fork(self, which: int) -> None:
        held = self.held[which % len(self.held)]
        fork = Naive(held.session.fork())
        fork.tokens = list(held.tokens)
        fork.blocks = held.blocks[: -(-len(held.tokens) // 32)]
        self.held.append(fork)

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.held)
    def save_and_load(self, which: int) -> None:
        """To a file and back: other blocks, if there is room for them, and the same bits."""
        held = self.held[which % len(self.held)]
        path = self.folder / "kept.qsfs"
        held.session.save(path)
        held.blocks = []
        if not held.tokens or self.take(held, 0, len(held.tokens)):
            held.session.load(path)
            return
        with pytest.raises(errors.QsfMemoryError):
            held.session.load(path)
        held.tokens, held.blocks = [], []
        held.session.rewind(0)

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.held)
    def close(self, which: int) -> None:
        self.held.pop(which % len(self.held)).session.close()

    @invariant()
    def everything_is_in_order(self) -> None:
        for held in self.held:
            assert held.session.tokens == held.tokens
        n_used = len({block for held in self.held for block in held.blocks})
        assert self.n_free() == N_BLOCKS - n_used


@pytest.mark.hypothesis
def test_any_order_of_operations(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    with opened(tiny_llama_8bit) as model, opened(tiny_llama_8bit) as alone:
        members = {"model": model, "alone": alone, "known": {}, "folder": tmp_path}
        machine = type("Machine", (AnyOrder,), members)
        how = settings(max_examples=40, stateful_step_count=30, deadline=None)
        run_state_machine_as_test(machine, settings=how)
