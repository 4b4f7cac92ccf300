"""Beginnings of prompts that several slots of a real model have in common: the same bits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.fake_engine import Told
from make.kind_models import MIXED, VOCAB, write_model
from make.recurrent_models import write_recurrent
from make.served import Client, engine_of, serving
from qsf import errors
from qsf.cli.serve import read_prefix
from qsf.cli.serve_options import ServeOptions
from qsf.file.layout import Dtype
from qsf.serve.scheduling.job import Choosing
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.scheduler import Scheduler
from qsf.serve.scheduling.slot_files import SlotFiles

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 150).tolist()


def greedy(model: qsf.Model) -> Choosing:
    return Choosing(params=model.sampling_params(temperature=0), seed=1)


def by_argmax(model: qsf.Model, prompt: list[int]) -> list[int]:
    """Six tokens, each from logits that are evaluated from the start."""
    tokens = list(prompt)
    for _ in range(6):
        model.session.rewind(0)
        tokens.append(int(model.logits(tokens, first_row=len(tokens) - 1)[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["llama", "mixed", "own"])
def test_the_text_is_that_of_a_prompt_alone(
    tmp_path: Path, tiny_llama_8bit: Path, name: str
) -> None:
    path = tiny_llama_8bit
    if name == "mixed":
        path = tmp_path / "mixed.qsf"
        write_model(path, MIXED, dtype=Dtype.Q4)
    elif name == "own":
        path = write_recurrent(tmp_path, case="gemma4-own")
    prompts = [TOKENS[:100], [*TOKENS[:100], 3], [*TOKENS[:70], 4, 5], TOKENS[:100]]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        alone = [by_argmax(model, prompt) for prompt in prompts]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        scheduler = Scheduler(engine_of(model), Metrics())
        told = []
        for prompt in prompts:  # each while those before are written
            told.append(Told(prompt, max_tokens=6, is_endless=True))
            told[-1].job.choosing = greedy(model)
            scheduler.submit([told[-1].job])
            scheduler.step()
        while scheduler.step():
            pass
    assert [one.job.tokens[one.job.n_prompt :].tolist() for one in told] == alone
    cached = [one.job.n_cached for one in told]
    assert cached[:3] == [0, 100, 70]
    assert cached[3] >= 99


def test_what_slots_hold_outlasts_the_server(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options: dict[str, Any] = {"parallel": 2, "session_dir": str(folder)}
    fields = {"prompt": "Once upon a time " * 9, "max_tokens": 9, "seed": 4, "cache_salt": "mine"}

    def cached(client: Client, **more: Any) -> int:
        answer = client.post("/v1/completions", {**fields, **more}).json
        texts.append(answer["choices"][0]["text"])
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    texts: list[str] = []
    no_engine: Any = None
    with serving(tiny_chat_8bit, **options) as client:
        texts.append(client.post("/v1/completions", fields).json["choices"][0]["text"])
        with pytest.raises(errors.QsfArgumentError, match="in use by another server"):
            SlotFiles(folder, no_engine, 1 << 20, print)
    assert folder.stat().st_mode & 0o077 == 0
    with serving(tiny_chat_8bit, **options) as client:
        assert cached(client, cache_salt="another") == 0
        assert cached(client) > 20
    assert len(set(texts)) == 1
    for path in folder.glob("*.qsfs"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with serving(tiny_chat_8bit, **options) as client:
        assert cached(client) == 0
    assert len(set(texts)) == 1


@pytest.mark.parametrize("is_messages", [False, True])
def test_a_pinned_prefix_is_shared_by_all_and_stays(
    tiny_chat_8bit: Path, tmp_path: Path, is_messages: bool
) -> None:
    text = "You tell stories about animals in the wood. " * 4
    path = tmp_path / ("prefix.json" if is_messages else "prefix.txt")
    path.write_text(json.dumps([{"role": "system", "content": text}]) if is_messages else text)

    def ask(client: Client, i: int) -> tuple[str, int]:
        fields: dict[str, Any] = {"max_tokens": 5, "seed": 4, "cache_salt": str(i)}
        if is_messages:
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": f"{i} foxes"},
            ]
            answer = client.post("/v1/chat/completions", {**fields, "messages": messages}).json
            said = answer["choices"][0]["message"]["content"]
        else:
            answer = client.post("/v1/completions", {**fields, "prompt": f"{text}{i} foxes"}).json
            said = answer["choices"][0]["text"]
        return said, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(tiny_chat_8bit, parallel=1) as client:
        alone = [ask(client, i) for i in range(4)]
    with serving(tiny_chat_8bit, parallel=1, prefix=str(path)) as client:
        n_prefix = client.server.scheduler.slots[-1].n_held
        shared = [ask(client, i) for i in range(4)]
    assert [text for text, _ in shared] == [text for text, _ in alone]
    assert [n for _, n in alone] == [0] * 4
    assert all(n_prefix - 2 <= n <= n_prefix for _, n in shared)  # the last may merge
    assert n_prefix > 40


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.txt", b"word " * 900, "tokens"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.json", b"{}", "not a conversation"),
        ("none.txt", None, "No such file"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(
    tiny_chat_8bit: Path, tmp_path: Path, name: str, data: bytes | None, text: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with (
        qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=3, max_seq_len=200) as model,
        pytest.raises(errors.QsfError, match=text),
    ):
        read_prefix(tmp_path / name, model)
    with pytest.raises(errors.QsfArgumentError, match="at most 255"):
        ServeOptions(prefix="a", parallel=256)
