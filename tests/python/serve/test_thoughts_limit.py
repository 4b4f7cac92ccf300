"""A budget of thoughts ends them: the mark is forced, and the answer follows."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make.harmony import make_harmony, make_thinker, said
from make.served import Answer, Client, serving
from qsf.passes import Chosen

CHAT: Any = [{"role": "user", "content": "Who are you?"}]
FIELDS: Any = {"messages": CHAT, "max_tokens": 30, "temperature": 1.2, "seed": 5}


@pytest.fixture(scope="module", params=["tokens", "text"])
def client(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Client]:
    """A model that thinks and would not stop; its marks are tokens, or ordinary text."""
    marks = ("<think>", "</think>") if request.param == "tokens" else ()
    with serving(make_thinker(tmp_path_factory.mktemp("thinker"), marks), parallel=4) as found:
        yield found


def ask(client: Client, **fields: Any) -> tuple[str, str, int]:
    """Return the thoughts, the answer, and how many tokens were thoughts."""
    answer = client.post("/v1/chat/completions", **{**FIELDS, **fields}).json
    message = answer["choices"][0]["message"]
    n_thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content", ""), message["content"], n_thought


def test_a_budget_ends_the_thoughts(client: Client) -> None:
    free, nothing, n_all = ask(client)
    assert (nothing, n_all) == ("", 30)
    n_mark = len(client.model.tokenizer.encode("\n</think>", add_prefix=False))
    n_mark = 1 if client.model.tokenizer.token_id("</think>") else n_mark
    for most in (0, 1, 7):
        thoughts, answer, n_thought = ask(client, thinking_budget_tokens=most)
        assert free.startswith(thoughts.rstrip("\n"))
        assert bool(thoughts.strip()) == bool(most)
        assert answer
        assert "think>" not in thoughts + answer
        assert n_thought == most + n_mark
        assert ask(client, thinking_token_budget=most) == (thoughts, answer, n_thought)
        assert ask(client, thinking_token_budget=most, logprobs=True)[:2] == (thoughts, answer)
    assert ask(client, thinking_budget_tokens=-1) == (free, nothing, n_all)
    assert ask(client, thinking_budget_tokens=1000) == (free, nothing, n_all)
    wrong = client.post(
        "/v1/chat/completions", **FIELDS, thinking_budget_tokens=3, thinking_token_budget=4
    )
    assert "they mean the same" in wrong.error["message"]


def test_streams_and_neighbours_change_nothing(client: Client) -> None:
    fields = {**FIELDS, "thinking_budget_tokens": 5}
    thoughts, answer, _ = ask(client, thinking_budget_tokens=5)

    def stream(seed: int) -> Answer:
        return client.post("/v1/chat/completions", **{**fields, "seed": seed}, stream=True)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(stream, (5, 6, 7, 5)))
    for each in answers[::3]:
        deltas = [event["choices"][0]["delta"] for event in each.events[:-1]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
        assert "".join(delta.get("content", "") for delta in deltas) == answer


def test_an_effort_is_a_share_where_the_template_knows_none(client: Client) -> None:
    assert ask(client, reasoning_effort="low") == ask(client, thinking_budget_tokens=6)
    assert ask(client, reasoning_effort="none")[2] == 0
    fields = {"input": "Who are you?", "max_output_tokens": 30, "temperature": 1.2, "seed": 5}
    by_effort, by_tokens = (
        client.post("/v1/responses", **fields, reasoning=reasoning).json
        for reasoning in ({"effort": "minimal"}, {"max_tokens": 3})
    )
    texts = [[item["content"] for item in each["output"]] for each in (by_effort, by_tokens)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    assert by_tokens["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    ignored = client.post("/v1/responses", **fields, reasoning={"depth": 3})
    assert ignored.headers["x-qsf-ignored"] == "reasoning.depth"


def test_messages_have_a_budget(client: Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    message = client.post("/v1/messages", **FIELDS, thinking=thinking).json
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    n_thought = message["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 4 < n_thought < message["usage"]["output_tokens"]
    wrong = client.post("/v1/messages", **FIELDS, thinking={"budget_tokens": -1})
    assert "thinking.budget_tokens" in wrong.json["error"]["message"]


def test_channels_end_with_the_final_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would analyse forever; it is made to begin its final message."""
    with serving(make_harmony(tmp_path)) as client:
        begin = said(client.model.tokenizer, "<|channel|>analysis<|message|>")
        engine = client.server.scheduler._engine
        choose = engine.choose

        def analyse(jobs: Any) -> Any:
            chosen = choose(jobs)
            return [
                Chosen(begin[job.n_generated])
                if job.n_generated < len(begin) and job.constraint.mask() is None
                else chosen[i]
                for i, (_, job) in enumerate(jobs)
            ]

        monkeypatch.setattr(engine, "choose", analyse)
        thoughts, answer, n_thought = ask(client, thinking_budget_tokens=6)
        assert thoughts
        assert answer
        assert n_thought == 7  # with the mark behind them
