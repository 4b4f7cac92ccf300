"""What gpt-oss says before its answer is ``reasoning_content``, in a stream and whole."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from make.harmony import ANSWER, THOUGHTS, make_harmony, said
from make.served import Client, serving
from qsf.serve.job import Chosen, Job

CHAT: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path: Path = make_harmony(tmp_path_factory.mktemp("harmony"))
    with serving(path) as found:
        yield found


@pytest.fixture(autouse=True)
def script(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model say what it is to say."""
    tokens = said(client.model.tokenizer)

    def choose(jobs: Sequence[tuple[int, Job]]) -> list[Chosen]:
        return [Chosen(tokens[job.n_generated]) for _, job in jobs]

    monkeypatch.setattr(client.server.scheduler._engine, "choose", choose)


def test_a_whole_answer(client: Client) -> None:
    answer = client.post("/v1/chat/completions", messages=CHAT)
    choice = answer.json["choices"][0]
    assert choice["message"]["content"] == ANSWER
    assert choice["message"]["reasoning_content"] == THOUGHTS + "{}"
    assert choice["finish_reason"] == "stop"


def test_a_stream(client: Client) -> None:
    answer = client.post("/v1/chat/completions", messages=CHAT, stream=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHTS + "{}"
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    kinds = [name for delta in deltas for name in delta if name != "role"]
    assert kinds[1:] == sorted(kinds[1:], reverse=True)  # reasoning first; never an empty text


def test_a_stop_string_is_one_of_the_answer(client: Client) -> None:
    answer = client.post("/v1/chat/completions", messages=CHAT, stop=["cat", ", and"])
    assert answer.json["choices"][0]["message"]["content"] == "I am a dog"


def test_other_forms_have_the_answer_alone(client: Client) -> None:
    response = client.post("/v1/responses", input="Who are you?").json
    assert [part["text"] for part in response["output"][0]["content"]] == [ANSWER]
    message = client.post("/v1/messages", messages=CHAT, max_tokens=100).json
    assert [part["text"] for part in message["content"]] == [ANSWER]
