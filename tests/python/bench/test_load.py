"""``python -m qsf.bench serve``: the load client, and a server that it loads."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

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
        url = client.url
    assert bench(["serve", url, "--streams", "2", *words]) == 1
    (failed,) = json.loads(capsys.readouterr().out)
    assert failed["n_failed"] == 5
    assert "no connection" in failed["failures"][0]
    for wrong in (["ftp://x"], ["http://x", "--rate", "0"], ["http://x", "--streams", "0"], []):
        with pytest.raises(SystemExit) as caught:
            load.parse(wrong)
        assert caught.value.code == 2
