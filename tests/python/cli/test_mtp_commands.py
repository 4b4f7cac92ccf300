# SPDX-License-Identifier: Apache-2.0
"""A file with an MTP head through the commands: the same texts with and without its guesses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make import mtp_models
from make.commands import Run
from make.served import serving
from qsf import Model
from qsf.cli.serve_options import ServeOptions
from qsf_converter.convert import convert

GREEDY = ("-n", 40, "--temperature", 0)
N_LAYERS = 48  # a guess costs one layer, a pass all of them


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory, tiny_chat_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("sure")
    source = mtp_models.write_sure(folder / "m", tiny_chat_dir, n_layers=N_LAYERS)
    convert(source, folder / "m.qsf")
    return folder / "m.qsf"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_chat_dir: Path) -> Path:
    """A draft model that guesses as well."""
    folder = tmp_path_factory.mktemp("small")
    convert(mtp_models.write_sure(folder / "m", tiny_chat_dir, n_layers=3), folder / "m.qsf")
    return folder / "m.qsf"


def test_run_says_how_many_guesses_were_right(run: Run, sure: Path, small: Path) -> None:
    def answer(*options: object) -> Any:
        done = run(sure, "-p", "Once upon a time", *GREEDY, "--json", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    off = answer("--draft", "off")
    assert (off["drafted_tokens"], off["accepted_tokens"]) == (0, 0)
    for draft in ("auto", small):
        found = answer("--draft", draft)
        assert (found["text"], found["ids"]) == (off["text"], off["ids"])
        assert 5 <= found["accepted_tokens"] <= found["drafted_tokens"], draft
    assert len(off["ids"]) == 40
    assert len(set(off["ids"])) > 20  # the text itself has little to guess from
    sampled = [
        run(sure, "-p", "Once", "-n", 30, "--seed", 3, "--draft", draft).stdout
        for draft in ("auto", "off", small)
    ]
    assert sampled[0] == sampled[1] == sampled[2] != ""


def test_chats_and_sessions_go_on_with_and_without(run: Run, sure: Path, tmp_path: Path) -> None:
    asked = "Hi\nAnd you?\n/undo\nWhy?\n/save kept\nSo?\n/load kept\nThen?\n"
    chats = [run(sure, "-i", *GREEDY, "--draft", d, stdin=asked) for d in ("auto", "off")]
    assert [chat.returncode for chat in chats] == [0, 0], chats
    assert chats[0].stdout == chats[1].stdout
    stayed = run(sure, "-i", *GREEDY, "--draft", "off", stdin="Hi\nAnd you?\nWhy?\n").stdout
    for kinds in (("auto", "auto", "auto"), ("auto", "off", "auto")):
        session = tmp_path / f"{'-'.join(kinds)}.qsfs"
        answers = [
            run(sure, "-p", text, *GREEDY, "--session", session, "--draft", kind)
            for text, kind in zip(("Hi", "And you?", "Why?"), kinds, strict=True)
        ]
        assert "".join(done.stdout for done in answers) == stayed
        assert "known from before" in answers[2].stderr


@pytest.mark.parametrize("draft", ["auto", "off"])
def test_two_clients_of_a_server(run: Run, sure: Path, draft: str) -> None:
    prompts = ["Once upon a time", "The cat saw"]
    wanted = [run(sure, "--raw", "-p", p, *GREEDY, "--draft", "off").stdout for p in prompts]
    options = {**ServeOptions(parallel=2).sessions()[0], "draft": draft}
    with (
        Model(sure, ram_budget=None, **options) as model,
        serving(sure, model, parallel=2) as client,
    ):

        def complete(prompt: str) -> str:
            fields = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
            answer = client.post("/v1/completions", fields)
            return f"{answer.json['choices'][0]['text']}\n"

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(complete, prompts * 3)) == wanted * 3
        lines = client.get("/metrics").body.decode().splitlines()
    (right,) = (line for line in lines if "num_accepted_tokens_total" in line and line[0] != "#")
    assert (float(right.split()[-1]) > 0) == (draft == "auto")
