"""``python -m qsf.bench serve``: the load client, and a server that it loads."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from make.served import serving
from qsf.bench import load
from qsf.bench.cli import run as bench


def test_figures_are_those_of_the_answers() -> None:
    answers = [
        load.Answer("done", 4, 0.5, [0.1, 0.3, 0.1], 1.0),
        load.Answer("left", 2, 1.5, [0.2], 2.0),
        load.Answer("status 429"),
    ]
    row = load.figures(answers, 2.0, 3, None)
    assert (row.n_done, row.n_left, row.n_failed) == (1, 1, 1)
    assert row.tokens_per_second == 3.0
    assert (row.first_p50, row.pause_most) == (1.0, 0.3)
    assert row.pause_p50 == pytest.approx(0.15)


def test_requests_are_sent_wrong(tiny_llama_4bit: Path) -> None:
    options = load.parse(["http://x", "--faults", "1", "--max-tokens", "3"])
    first = list(itertools.islice(load.requests(options, 1), 20))
    assert {request.fault for request in first} == {"half", "unread", "value"}
    with serving(tiny_llama_4bit) as client:
        for request in first:
            assert asyncio.run(load.ask(client.url, request)).status == "left"
        whole = load.Request({**first[0].body, "temperature": 0})
        assert asyncio.run(load.ask(client.url, whole)).status == "done"
        wrong = load.Request({**first[0].body, "temperature": -1})
        assert asyncio.run(load.ask(client.url, wrong)).status == "status 400"


def test_a_server_is_loaded(tiny_llama_4bit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "5", "--prompt-tokens", "4,9", "--max-tokens", "6", "--json"]
    with serving(tiny_llama_4bit, parallel=2) as client:
        assert bench(["serve", client.url, "--streams", "1,3", *words]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["streams"], row["n_done"]) for row in rows] == [(1, 5), (3, 5)]
        assert all(row["tokens_per_second"] > 0 < row["first_p50"] for row in rows)
        assert bench(["serve", client.url, "--rate", "50", *words, "--disconnects", "1"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["n_done"] + row["n_left"], row["n_failed"]) == (5, 0)
        assert row["n_left"] > 0
        soak = ["--seconds", "0.5", "--faults", "0.5", "--rate", "30", *words]
        assert bench(["serve", client.url, *soak]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["n_failed"] == 0
        last = row["samples"][-1]
        assert last["n_requests"] == last["n_ends"] > 0 < last["n_files"]
        assert last["memory_bytes"] > 1 << 20
        url = client.url
    assert bench(["serve", url, "--streams", "2", *words]) == 1
    (failed,) = json.loads(capsys.readouterr().out)
    assert failed["n_failed"] == 5
    assert "no connection" in next(iter(failed["failures"]))
    wrong = [["--seconds", "nan"], ["--faults", "2"], ["--rate", "0"], ["--streams", "0"]]
    for words in (*(["http://x", *one] for one in wrong), ["ftp://x"], []):
        with pytest.raises(SystemExit) as caught:
            load.parse(words)
        assert caught.value.code == 2
