"""One pool of KV memory for all sessions: sharing, giving back, being full.

Any order of operations: tests/c/check_kv_pool.c, and test_same_bits.py.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from qsf import errors

N_VOCAB = 16  # tokens that are used
CTX_TOKENS = 96  # three blocks
N_SESSIONS = 4


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


def test_contexts_are_at_most_as_many_as_sessions(tiny_llama_8bit: Path) -> None:
    with pytest.raises(errors.QsfArgumentError, match=r"kv_contexts is 3.* 2"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, kv_contexts=3)
