# SPDX-License-Identifier: Apache-2.0
"""States that cannot be cut: sessions go back, fork, draft, are saved, and have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.recurrent_models import write_recurrent

N_SESSIONS = 4
CTX_TOKENS = 200
MOST_AGAIN = 40  # tokens that may be evaluated again when a session goes back


@pytest.fixture(scope="module", params=["lfm2", "kimi_linear", "falcon_h1-norm", "qwen3_5+mtp"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("recurrent"), case=request.param)


def opened(path: Path, **options: Any) -> qsf.Model:
    how: dict[str, Any] = {
        "ram_budget": None, "sessions": N_SESSIONS, "max_seq_len": CTX_TOKENS,
        "kv_type": "f32",  # as much memory as takes a snapshot at every multiple of 32
        **options,
    }  # fmt: skip
    return qsf.Model(path, **how)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[qsf.Model]:
    with opened(path) as model:
        yield model


def hold(session: qsf.Session, tokens: list[int]) -> Any:
    """Evaluate what is new; return the last logits."""
    return session.logits(tokens, first_row=len(tokens) - 1)[0]


def tokens_of(n: int, first: int = 1) -> list[int]:
    return [(first + i * i) % 50 for i in range(n)]


def again(session: qsf.Session) -> int:
    return session.engine_stats.n_again


# ---- going back ----


@pytest.mark.parametrize("n_tokens", [31, 33, 64, 149])
def test_a_rewind_evaluates_from_the_last_snapshot(model: qsf.Model, n_tokens: int) -> None:
    with model.create_session() as session, model.create_session() as fresh:
        hold(session, tokens_of(150))
        session.rewind(n_tokens)
        assert again(session) == 0
        session._native.step(7)
        assert again(session) == n_tokens % 32 <= MOST_AGAIN
        want = hold(fresh, [*tokens_of(n_tokens), 7, 8])
        assert np.array_equal(hold(session, [*tokens_of(n_tokens), 7, 8]), want)
        assert again(session) == n_tokens % 32


def test_with_few_snapshots_more_is_evaluated_again(tmp_path: Path) -> None:
    path = write_recurrent(tmp_path, case="qwen3_5")
    with opened(path, kv_type="4bit") as model, model.create_session() as session:
        hold(session, tokens_of(150))
        session.rewind(40)
        have = hold(session, [*tokens_of(40), 7])
        assert MOST_AGAIN >= again(session) > 40 % 32
        session.rewind(0)
        assert np.array_equal(hold(session, [*tokens_of(40), 7]), have)
