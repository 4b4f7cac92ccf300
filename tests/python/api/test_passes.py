# SPDX-License-Identifier: Apache-2.0
"""``Model.run_pass``, ``choose``, ``batch``; their bits are in test_same_bits.py."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from qsf.errors import QsfArgumentError, QsfCancelledError
from qsf.passes import Choice, Chosen, PassItem, Sampler, run_pass


# ---- Model.run_pass and Model.choose ----
@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=4) as opened:
        yield opened


@pytest.fixture
def sessions(model: qsf.Model) -> Iterator[list[qsf.Session]]:
    created = [model.create_session() for _ in range(3)]
    yield created
    for session in created:
        session.close()


def mask_of(n_vocab: int, *allowed: int) -> bytes:
    words = array("I", [0] * ((n_vocab + 31) // 32))
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return words.tobytes()


def test_all_rows_are_those_of_logits(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    item = PassItem(sessions[0], [5, 6, 7, 8, 9, 10, 11], "all")
    model.run_pass([item, PassItem(sessions[1], [1, 2], "none")])
    assert item.logits is not None
    assert np.array_equal(item.logits, model.logits([5, 6, 7, 8, 9, 10, 11]))
    with pytest.raises(QsfArgumentError, match="no logits"):
        model.choose([Choice(sessions[1], None, array("I"))])


def test_a_choice_obeys_mask_bias_and_penalties(
    model: qsf.Model, sessions: list[qsf.Session]
) -> None:
    n_vocab = model.info.n_vocab
    greedy = model.sampling_params(temperature=0)
    model.run_pass([PassItem(sessions[0], [1, 2, 3])])
    order = np.argsort(-model.logits([1, 2, 3])[-1], kind="stable").tolist()
    first, second, third = order[:3]

    def choose(sampler: Sampler, recent: Sequence[int] = (), **more: Any) -> Any:
        choice = Choice(sessions[0], sampler, array("I", recent), **more)
        result = model.choose([choice])[0]
        return result.token if isinstance(result, Chosen) else result

    plain = Sampler(greedy, 0)
    assert choose(plain) == first
    assert choose(plain, mask=mask_of(n_vocab, third, second)) == second
    assert choose(plain, mask=mask_of(n_vocab, n_vocab - 1)) == n_vocab - 1
    assert isinstance(choose(plain, mask=mask_of(n_vocab)), QsfArgumentError)
    assert choose(Sampler(greedy, 0, logit_bias={first: -50.0, third: 100.0})) == third
    often = Sampler(greedy, 0, frequency_penalty=50.0)
    assert choose(often, [first, second, second], n_counted=3) == third
    assert choose(often, [first, second, second], n_counted=2) == first
    assert choose(often, [first, second], n_counted=1) == first
    once = Sampler(greedy, 0, presence_penalty=50.0)
    assert choose(once, [first, first, second], n_counted=3) == third
    drawn = Sampler(model.sampling_params(temperature=5, top_p=1, top_k=0), 7)
    allowed = {choose(drawn, mask=mask_of(n_vocab, *order[40:50])) for _ in range(200)}
    assert allowed == set(order[40:50])
    few = Sampler(model.sampling_params(temperature=5, top_p=0.9, top_k=40), 7)
    assert {choose(few, mask=mask_of(n_vocab, *order[-5:])) for _ in range(99)} <= set(order[-5:])
    with pytest.raises(QsfArgumentError, match="too short"):
        choose(plain, mask=b"\xff")
    with pytest.raises(QsfArgumentError, match="frequency_penalty is 1e\\+07"):
        choose(Sampler(greedy, 0, frequency_penalty=1e7))


def test_one_allowed_token_draws_nothing(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    n_vocab = model.info.n_vocab
    params = model.sampling_params(temperature=1.5, top_p=1, top_k=0)
    model.run_pass([PassItem(sessions[0], [1, 2, 3])])

    def draws(forced_first: bool) -> list[Any]:
        sampler = Sampler(params, 3)
        masks = [mask_of(n_vocab, 4)] * forced_first + [None] * 5
        return [model.choose([Choice(sessions[0], sampler, array("I"), mask=m)])[0]
                for m in masks][-5:]  # fmt: skip

    assert draws(forced_first=True) == draws(forced_first=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [10**6]}, "outside the vocabulary"),
        ({"tokens": [1] * 600}, "context|chunk"),
        ({"wants": "some"}, "wants must be one of"),
    ],
)
def test_a_wrong_item_evaluates_nothing(
    model: qsf.Model, sessions: list[qsf.Session], change: dict[str, Any], match: str
) -> None:
    wrong = {"session": sessions[1], "tokens": [1], "wants": "last", **change}
    with pytest.raises(QsfArgumentError, match=match):
        model.run_pass([PassItem(sessions[0], [1, 2]), PassItem(**wrong)])
    assert sessions[0].tokens == sessions[1].tokens == []
    items = [PassItem(sessions[0], array("I", [1]))] * 2
    with pytest.raises(QsfArgumentError, match="same session"):
        run_pass(model._opened, items)


# ---- ``Model.batch``: many prompts at a time, each answered as if it were alone ----
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
def batching(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as opened:
        yield opened


def alone(batching: qsf.Model, prompt: Any, **options: Any) -> tuple[str, str, tuple[int, ...]]:
    text = "".join(batching.generate(prompt, **options))
    assert batching.stats is not None
    return text, batching.stats.stop_reason, batching.stats.token_ids


def n_open(batching: qsf.Model) -> int:
    return sum(not session.is_closed for session in batching._opened.sessions)


WAYS: list[dict[str, Any]] = [
    {"max_tokens": 20, "temperature": 0},
    {"max_tokens": 30, "seed": 4, "temperature": 1.2, "repetition_penalty": 1.2},
    {"max_tokens": 60, "seed": 5, "stop": ["a", "and"]},
    {"max_tokens": 0},
    {"max_tokens": 10_000, "seed": 1},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_each_answer_is_that_of_generate(batching: qsf.Model, options: dict[str, Any]) -> None:
    answers = list(batching.batch(PROMPTS, **options))
    assert sorted(answer.index for answer in answers) == list(range(len(PROMPTS)))
    for answer in answers:
        assert answer.stats is not None
        have = answer.text, answer.stats.stop_reason, answer.stats.token_ids
        assert have == alone(batching, PROMPTS[answer.index], **options)
    assert n_open(batching) == 1


def test_equal_beginnings_are_evaluated_once(batching: qsf.Model) -> None:
    beginning = list(range(5, 105))
    prompts = [[*beginning, i] for i in range(7)]
    batching.session.rewind(0)
    answers = list(batching.batch(prompts, max_tokens=3, temperature=0))
    evaluated = {answer.index: answer.stats.evaluated_tokens for answer in answers if answer.stats}
    assert evaluated == {0: 101, **dict.fromkeys(range(1, 7), 1)}
    for answer in answers:
        assert answer.text == alone(batching, prompts[answer.index], max_tokens=3, temperature=0)[0]


def test_messages_are_answered_as_by_chat(tiny_chat_8bit: Path) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("Hello", "Who are you?")]
    with qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=2) as batching:
        want = ["".join(batching.chat(m, max_tokens=12, temperature=0)) for m in asked]
        answers = {a.index: a.text for a in batching.batch(asked, max_tokens=12, temperature=0)}
    assert [answers[0], answers[1]] == want


def test_what_is_wrong_with_one_prompt_is_in_its_answer(batching: qsf.Model) -> None:
    wrong: list[Any] = [[], [10**6], "word " * 5000, 7, [1, "x"]]
    answers = sorted(batching.batch([*wrong, "fine"], max_tokens=3), key=lambda a: a.index)
    assert [type(answer.error) for answer in answers] == [QsfArgumentError] * 5 + [type(None)]
    assert all(answer.stats is None and answer.text == "" for answer in answers[:5])
    assert answers[5].stats is not None
    with pytest.raises(QsfArgumentError, match="on_token is for one prompt"):
        batching.batch(["x"], on_token=print)
    with pytest.raises(QsfArgumentError, match="temperature"):
        batching.batch(["x"], temperature=-1)


def test_prompts_are_taken_when_there_is_room(batching: qsf.Model) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "Once"

    answers = batching.batch(endless(), max_tokens=2)
    for _ in range(5):
        next(answers)
    assert taken <= 5 + 3
    answers.close()  # type: ignore[attr-defined]
    assert n_open(batching) == 1


def test_cancelling_ends_the_batch(batching: qsf.Model) -> None:
    prompts = [[5] * 500, [6] * 500, [7] * 500]
    for _ in range(100):
        timer = threading.Timer(0.002, batching.cancel)
        timer.start()
        try:
            list(batching.batch(prompts, max_tokens=2))
        except QsfCancelledError:
            break
        finally:
            timer.join()
        batching.session.rewind(0)
    else:
        pytest.fail("a batch was never cancelled")
    assert len(list(batching.batch(["again"], max_tokens=1))) == 1
