"""Beginnings of prompts that several slots of a real model have in common: the same bits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import qsf
from make.fake_engine import Told
from make.kind_models import MIXED, VOCAB, write_model
from qsf.file.layout import Dtype
from qsf.serve.engine import ModelEngine
from qsf.serve.job import Choosing
from qsf.serve.metrics import Metrics
from qsf.serve.scheduler import Limits, Scheduler

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


@pytest.mark.parametrize("is_windowed", [False, True])
def test_the_text_is_that_of_a_prompt_alone(
    tmp_path: Path, tiny_llama_8bit: Path, is_windowed: bool
) -> None:
    path = tiny_llama_8bit
    if is_windowed:
        path = tmp_path / "mixed.qsf"
        write_model(path, MIXED, dtype=Dtype.Q4)
    prompts = [TOKENS[:100], [*TOKENS[:100], 3], [*TOKENS[:70], 4, 5], TOKENS[:100]]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        alone = [by_argmax(model, prompt) for prompt in prompts]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        scheduler = Scheduler(ModelEngine(model), Limits(), Metrics(), time.monotonic)
        told = []
        for prompt in prompts:  # each while those before are written
            told.append(Told(prompt, max_tokens=6))
            told[-1].job.end_ids = frozenset()
            told[-1].job.choosing = greedy(model)
            scheduler.submit([told[-1].job])
            scheduler.step()
        while scheduler.step():
            pass
    assert [one.job.tokens[one.job.n_prompt :].tolist() for one in told] == alone
    cached = [one.job.n_cached for one in told]
    assert cached[:3] == [0, 100, 70]
    assert cached[3] >= 99
