"""What programs build upon: chat with a history, log-probabilities, asyncio, conversion, names."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from qsf import errors

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
HISTORY = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def model(tiny_chat_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=3) as opened:
        yield opened


async def joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


# ---- chat ----


def test_a_model_answers_a_whole_conversation(model: qsf.Model) -> None:
    answer = "".join(model.chat(HISTORY, **GREEDY))
    assert answer == "".join(model.generate(model.chat_tokens(HISTORY), begins_text=True, **GREEDY))
    with model.create_session() as session:
        session.messages[:] = HISTORY[:2]
        assert "".join(session.chat("Who are you?", **GREEDY)) == answer
    longer = [*HISTORY, {"role": "assistant", "content": answer}, HISTORY[0]]
    "".join(model.chat(longer, **GREEDY))
    assert model.stats is not None
    assert model.stats.evaluated_tokens < model.stats.prompt_tokens / 2
    assert "".join(model.chat(HISTORY, **GREEDY)) == answer  # nothing was remembered


def test_content_may_be_parts_with_text(model: qsf.Model) -> None:
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]
    in_parts = [{"role": "user", "content": parts}]
    assert model.chat_tokens(in_parts) == model.chat_tokens("Who\nare you?")
    assert model.chat_tokens([{"role": "user", "content": ["Hi"]}]) == model.chat_tokens("Hi")


# ---- log-probabilities ----


def expected_logprobs(model: qsf.Model, tokens: list[int], first: int) -> np.ndarray[Any, Any]:
    """The log-softmax of the logits before each token from ``first`` on, [n, n_vocab] in f64."""
    logits = model.logits(tokens[:-1], first_row=first - 1).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize("options", [GREEDY, {"temperature": 1.5, "seed": 7, "max_tokens": 12}])
def test_logprobs_are_those_of_the_logits(model: qsf.Model, options: dict[str, Any]) -> None:
    chosen: list[qsf.ChosenToken] = []
    text = "".join(model.generate(PROMPT, on_token=chosen.append, top_logprobs=5, **options))
    assert text == "".join(model.generate(PROMPT, **options))
    prompt = model.tokenize(PROMPT)
    assert model.detokenize([token.id for token in chosen]) == text.lstrip() or len(chosen) == 12
    rows = expected_logprobs(model, [*prompt, *(token.id for token in chosen)], len(prompt))
    assert len(rows) == len(chosen) == 12
    for row, token in zip(rows, chosen, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=2e-5)
        best = np.lexsort((np.arange(len(row)), -row))[:5]
        assert [id_ for id_, _ in token.top] == best.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(row[best], abs=2e-5)
        if options["temperature"] == 0:
            assert (token.id, token.logprob) == token.top[0]


def test_the_end_of_a_text_is_told_and_on_token_may_use_the_model(model: qsf.Model) -> None:
    chosen: list[int] = []

    def use(token: qsf.ChosenToken) -> None:
        assert token.top == ()
        chosen.append(token.id)
        model.logits([1, 2, 3])

    expected = "".join(model.generate(PROMPT, temperature=0, max_tokens=8))
    assert "".join(model.generate(PROMPT, temperature=0, max_tokens=8, on_token=use)) == expected
    assert len(chosen) == 8


# ---- asyncio ----


def test_async_variants_give_the_same_text(model: qsf.Model) -> None:
    async def both() -> list[str]:
        with model.create_session() as session:
            answers = list(
                await asyncio.gather(
                    joined(model.agenerate(PROMPT, **GREEDY)),
                    joined(session.agenerate("The old man", **GREEDY)),
                )
            )
            answers.append(await joined(model.achat(HISTORY, **GREEDY)))
            session.messages[:] = HISTORY[:2]
            answers.append(await joined(session.achat("Who are you?", **GREEDY)))
            return [*answers, session.messages[-1]["content"]]

    answer = "".join(model.chat(HISTORY, **GREEDY))
    assert asyncio.run(both()) == [
        "".join(model.generate(PROMPT, **GREEDY)),
        "".join(model.generate("The old man", **GREEDY)),
        answer,
        answer,
        answer,
    ]


def test_other_tasks_run_meanwhile(model: qsf.Model) -> None:
    async def count() -> int:
        n_turns = 0
        done = asyncio.ensure_future(joined(model.agenerate(PROMPT, **GREEDY)))
        while not done.done():
            n_turns += 1
            await asyncio.sleep(0)
        assert len(await done) > 10
        return n_turns

    assert asyncio.run(count()) > 12  # more than one for each token


def test_a_cancelled_task_ends_its_own_generation_only(model: qsf.Model) -> None:
    async def first_then_cancelled(begun: asyncio.Event) -> None:
        async for _ in model.agenerate(PROMPT, temperature=0, max_tokens=10**6):
            begun.set()

    async def both() -> str:
        begun = asyncio.Event()
        endless = asyncio.ensure_future(first_then_cancelled(begun))
        await begun.wait()
        other = asyncio.ensure_future(joined(model.agenerate("The old man", **GREEDY)))
        await asyncio.sleep(0.001)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert model.stats is not None
        assert model.stats.stop_reason in ("cancelled", "length", "abandoned")
        return await other

    assert asyncio.run(both()) == "".join(model.generate("The old man", **GREEDY))


def test_async_variants_raise_at_once_and_while_running(model: qsf.Model) -> None:
    with pytest.raises(qsf.QsfArgumentError, match="max_tokens"):
        model.agenerate(PROMPT, max_tokens=-1)
    with pytest.raises(qsf.QsfArgumentError, match="role"):
        model.achat([{"content": "Hi"}])

    def fail(_token: qsf.ChosenToken) -> None:
        raise RuntimeError("from a callback")

    with pytest.raises(RuntimeError, match="from a callback"):
        asyncio.run(joined(model.agenerate(PROMPT, on_token=fail)))


# ---- names ----


def test_models_and_sessions_say_what_they_are(tiny_chat_8bit: Path) -> None:
    with qsf.Model(tiny_chat_8bit, ram_budget=None) as model:
        assert f"{str(tiny_chat_8bit)!r}: llama, 8bit, " in repr(model)
        assert repr(model.session).startswith("<qsf.Session: context ")
        assert "closed" not in repr(model) + repr(model.session)
        session = model.session
    assert "closed" in repr(model)
    assert "closed" in repr(session)


def test_every_error_is_a_name_of_qsf() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, qsf.QsfError)
    }
    assert len(kinds) >= 10
    assert kinds <= set(qsf.__all__)
    assert all(getattr(qsf, name) is getattr(errors, name) for name in kinds)


def test_what_the_package_takes_from_others_comes_with_its_first_use() -> None:
    code = (
        "import sys, qsf\n"
        "qsf.Model\n"
        "assert not any(name.startswith('qsf_converter') for name in sys.modules)\n"
        "import qsf_converter\n"
        "assert qsf.convert is qsf_converter.convert\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_pretrained_takes_any_name(
    tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a name means, and that a conversion is kept: tests/python/find."""
    asked: list[str] = []

    def find(name: str, **_: Any) -> Path:
        asked.append(str(name))
        return tiny_llama_8bit

    with monkeypatch.context() as patch:
        patch.setattr("qsf.find.prepare.find_model", find)
        with qsf.Model.from_pretrained("org/name:8bit", ram_budget=None) as model:
            assert model.info.quant_type == "8bit"
    assert asked == ["org/name:8bit"]
    with pytest.raises(qsf.QsfArgumentError, match="ram_budget"):
        qsf.Model.from_pretrained("nothing.qsf", ram_budget=-1)
    with pytest.raises(qsf.QsfError, match=r"nothing\.qsf"):
        qsf.Model.from_pretrained(tmp_path / "nothing.qsf")
