# SPDX-License-Identifier: Apache-2.0
"""``Model.batch``: many prompts at a time, each answered as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qsf
from qsf.errors import QsfArgumentError, QsfCancelledError

PROMPTS: list[Any] = [
    "Once upon a time",
    "Once upon a time there was",
    [5, 6, 7, 8],
    "The old man " * 60,
    "She",
    "Once upon a time there was a dog who",
    [9],
]


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as opened:
        yield opened


def alone(model: qsf.Model, prompt: Any, **options: Any) -> tuple[str, str, tuple[int, ...]]:
    text = "".join(model.generate(prompt, **options))
    assert model.stats is not None
    return text, model.stats.stop_reason, model.stats.token_ids


def n_open(model: qsf.Model) -> int:
    return sum(not session.is_closed for session in model._opened.sessions)


WAYS: list[dict[str, Any]] = [
    {"max_tokens": 20, "temperature": 0},
    {"max_tokens": 30, "seed": 4, "temperature": 1.2, "repetition_penalty": 1.2},
    {"max_tokens": 60, "seed": 5, "stop": ["a", "and"]},
    {"max_tokens": 0},
    {"max_tokens": 10_000, "seed": 1},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_each_answer_is_that_of_generate(model: qsf.Model, options: dict[str, Any]) -> None:
    answers = list(model.batch(PROMPTS, **options))
    assert sorted(answer.index for answer in answers) == list(range(len(PROMPTS)))
    for answer in answers:
        assert answer.stats is not None
        have = answer.text, answer.stats.stop_reason, answer.stats.token_ids
        assert have == alone(model, PROMPTS[answer.index], **options)
    assert n_open(model) == 1


def test_equal_beginnings_are_evaluated_once(model: qsf.Model) -> None:
    beginning = list(range(5, 105))
    prompts = [[*beginning, i] for i in range(7)]
    model.session.rewind(0)
    answers = list(model.batch(prompts, max_tokens=3, temperature=0))
    evaluated = {answer.index: answer.stats.evaluated_tokens for answer in answers if answer.stats}
    assert evaluated == {0: 101, **dict.fromkeys(range(1, 7), 1)}
    for answer in answers:
        assert answer.text == alone(model, prompts[answer.index], max_tokens=3, temperature=0)[0]


def test_messages_are_answered_as_by_chat(tiny_chat_8bit: Path) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?")]
    with qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=2) as model:
        want = ["".join(model.chat(m, max_tokens=12, temperature=0)) for m in asked]
        answers = {a.index: a.text for a in model.batch(asked, max_tokens=12, temperature=0)}
    assert [answers[0], answers[1]] == want


def test_what_is_wrong_with_one_prompt_is_in_its_answer(model: qsf.Model) -> None:
    wrong: list[Any] = [[], [10**6], "word " * 5000, 7, [1, "x"]]
    answers = sorted(model.batch([*wrong, "fine"], max_tokens=3), key=lambda a: a.index)
    assert [type(answer.error) for answer in answers] == [QsfArgumentError] * 5 + [type(None)]
    assert all(answer.stats is None and answer.text == "" for answer in answers[:5])
    assert answers[5].stats is not None
    with pytest.raises(QsfArgumentError, match="on_token is for one prompt"):
        model.batch(["x"], on_token=print)
    with pytest.raises(QsfArgumentError, match="temperature"):
        model.batch(["x"], temperature=-1)


def test_prompts_are_taken_when_there_is_room(model: qsf.Model) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "Once"

    answers = model.batch(endless(), max_tokens=2)
    for _ in range(5):
        next(answers)
    assert taken <= 5 + 3
    answers.close()  # type: ignore[attr-defined]
    assert n_open(model) == 1


def test_cancelling_ends_the_batch(model: qsf.Model) -> None:
    prompts = [[5] * 500, [6] * 500, [7] * 500]
    for _ in range(100):
        timer = threading.Timer(0.002, model.cancel)
        timer.start()
        try:
            list(model.batch(prompts, max_tokens=2))
        except QsfCancelledError:
            break
        finally:
            timer.join()
        model.session.rewind(0)
    else:
        pytest.fail("a batch was never cancelled")
    assert len(list(model.batch(["again"], max_tokens=1))) == 1
