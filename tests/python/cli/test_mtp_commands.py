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


def test_a_server_counts_the_guesses_of_two_clients(run: Run, sure: Path) -> None:
    prompts = ["Once upon a time", "The cat saw"]
    wanted = [run(sure, "--raw", "-p", p, *GREEDY, "--draft", "off").stdout for p in prompts]
    options = ServeOptions(parallel=2).sessions()[0]
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
    assert float(right.split()[-1]) > 0
