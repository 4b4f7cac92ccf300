# SPDX-License-Identifier: Apache-2.0
"""A file with an MTP head through the commands: the same texts with and without its guesses."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make import mtp_models
from make.commands import Run
from make.served import started
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
    for kinds in (("auto", "auto", "auto"), ("auto", "off", "auto"), ("off", "auto", "off")):
        session = tmp_path / f"{'-'.join(kinds)}.qsfs"
        answers = [
            run(sure, "-p", text, *GREEDY, "--session", session, "--draft", kind)
            for text, kind in zip(("Hi", "And you?", "Why?"), kinds, strict=True)
        ]
        assert "".join(done.stdout for done in answers) == stayed
        assert "known from before" in answers[2].stderr


@pytest.fixture
def url(sure: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    words = [sys.executable, "-m", "qsf", "serve", str(sure), "--port", "0", "--parallel", "2"]
    with started([*words, "--draft", request.param]) as process:
        assert process.stderr is not None
        while " at http" not in (line := process.stderr.readline()):
            assert line
        yield "http" + line.split(" at http")[1].split()[0].rstrip("/,")


@pytest.mark.parametrize("url", ["auto", "off"], indirect=True)
def test_two_clients_of_a_server(
    url: str, run: Run, sure: Path, request: pytest.FixtureRequest
) -> None:
    def complete(prompt: str) -> str:
        fields = {"model": "m", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        asked = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(fields).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    prompts = ["Once upon a time", "The cat saw"]
    wanted = [run(sure, "--raw", "-p", p, *GREEDY, "--draft", "off").stdout for p in prompts]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(complete, prompts * 3))
    assert [text.rstrip("\n") for text in answers] == [text.rstrip("\n") for text in wanted] * 3
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    (right,) = (line for line in lines if "num_accepted_tokens_total" in line and line[0] != "#")
    assert (float(right.split()[-1]) > 0) == ("auto" in request.node.name)
