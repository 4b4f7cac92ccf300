# SPDX-License-Identifier: Apache-2.0
"""Contexts longer than memory (``kv_policy="disk"``): the same bits, from a file that may fail."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.kind_models import (
    MIXED,
    VOCAB,
    Layer,
    kind,
    write_model,
)
from make.streamed_models import least_options
from qsf import errors
from qsf.file.layout import Dtype

TOKENS = np.random.default_rng(9).integers(0, VOCAB, 400).tolist()
GREEDY: dict[str, Any] = {"temperature": 0, "stop": ()}
PROMPT = "Tom saw a red ball. " * 55  # more than a chunk and what stays of a context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cold")


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, tiny_llama_8bit: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32").close()
    except errors.QsfArgumentError as error:
        if "lies in memory" in str(error):
            pytest.skip(str(error))
        raise


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.qsf"
    if not path.exists():
        layers = MIXED if name == "mixed" else [Layer(kind()), Layer(kind(n_kv_heads=4))]
        write_model(path, layers, dtype=Dtype.Q4, seed=5)
    return path


def test_a_small_budget_has_the_same_text(tiny_llama_8bit: Path) -> None:
    texts = []
    for policy in ("none", "disk:32"):
        how = least_options(tiny_llama_8bit, max_seq_len=512, kv_policy=policy)
        with qsf.Model(tiny_llama_8bit, **how) as model:
            for _ in model.generate(PROMPT, max_tokens=60, **GREEDY):
                pass
            assert model.stats is not None
            texts.append(model.stats.token_ids)
            assert (model.session_stats.kv_read_bytes > 0) == (policy == "disk:32")
            assert model.session_stats.allocated_bytes <= model.info.plan.engine_bytes
    assert texts[0] == texts[1]


def test_what_stays_in_memory_follows_from_the_budget(tiny_llama_8bit: Path) -> None:
    """Where a context would be shortened, and down to less than any plan has without a file."""
    how: dict[str, Any] = {"sessions": 200, "max_seq_len": 512, "threads": 1}
    least = qsf.Model.plan(tiny_llama_8bit, ram_budget=1, **how, kv_policy="disk")
    none = qsf.Model.plan(tiny_llama_8bit, ram_budget=1, **how)
    assert (none.ctx_tokens, least.ctx_tokens) == (512, 512)
    assert least.kv_resident_tokens == 256
    assert least.min_budget_bytes < none.min_budget_bytes - 0.3 * none.kv_pool_bytes
    budget = -(-none.min_budget_bytes // 2**20) - 8
    fits = qsf.Model.plan(tiny_llama_8bit, ram_budget=budget, **how, kv_policy="disk")
    assert fits.is_enough
    assert 256 <= fits.kv_resident_tokens < 512
    assert fits.process_bytes + fits.reserve_bytes + fits.engine_bytes <= budget * 2**20


# ---- sessions ----


@pytest.mark.parametrize("name", ["mixed", "plain"])
def test_going_back_forks_and_files(folder: Path, tmp_path: Path, name: str) -> None:
    """Without a window the pages that are still held are read back."""
    path, file = written(folder, name), tmp_path / "kept"
    how: dict[str, Any] = {"ram_budget": None, "sessions": 2, "max_seq_len": 390, "draft": "off"}
    with qsf.Model(path, **how) as model:
        model.logits(TOKENS[:300])
        model.session.save(tmp_path / "whole")
        want = model.logits(TOKENS[:390])
        branch = model.logits([*TOKENS[:11], *TOKENS[200:330]], first_row=11)
    with qsf.Model(path, **how, kv_policy="disk:1") as model:
        for n in range(0, 300, 20):
            model.logits(TOKENS[: n + 20], first_row=n)
        model.session.save(file)
        assert file.read_bytes() == (tmp_path / "whole").read_bytes()
        with model.session.fork() as fork:
            assert np.array_equal(fork.logits(TOKENS[:390], first_row=300), want[300:])
            fork.load(file)
            assert np.array_equal(fork.logits(TOKENS[:390], first_row=300), want[300:])
        have = model.logits([*TOKENS[:11], *TOKENS[200:330]], first_row=11)
        assert np.array_equal(have, branch)
        assert np.array_equal(model.logits(TOKENS[:390], first_row=0), want)
    with qsf.Model(path, **how) as model:
        model.session.load(file)
        assert np.array_equal(model.logits(TOKENS[:390], first_row=300), want[300:])


def test_a_cancelled_call_goes_on(tiny_llama_8bit: Path) -> None:
    how: dict[str, Any] = {"ram_budget": None, "draft": "off"}
    with qsf.Model(tiny_llama_8bit, **how) as model:
        want = "".join(model.generate(PROMPT, max_tokens=40, **GREEDY))
    with qsf.Model(tiny_llama_8bit, **how, kv_policy="disk:32") as model:
        pieces = model.generate(PROMPT, max_tokens=40, **GREEDY)
        for _ in range(20):
            next(pieces)
        model.cancel()
        assert len(list(pieces)) < 20
        assert "".join(model.generate(PROMPT, max_tokens=40, **GREEDY)) == want


# ---- a disk that has no room ----


def test_a_full_disk_leaves_the_session_as_it_was(folder: Path) -> None:
    """The limit of a file's size fails as a full disk does: in the middle of a write."""
    path = written(folder, "mixed")
    with qsf.Model(path, ram_budget=None, max_seq_len=390, draft="off") as model:
        want = model.logits(TOKENS[:390])
    with qsf.Model(
        path, ram_budget=None, max_seq_len=390, kv_policy="disk:1", draft="off"
    ) as model:
        n_chunk = model.info.plan.chunk_tokens
        model.logits(TOKENS[:n_chunk], first_row=0)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        try:
            with pytest.raises(errors.QsfIOError, match=r"keys and values in .*File too large"):
                model.logits(TOKENS[:390])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        held = len(model.session.tokens)
        assert held >= n_chunk
        assert np.array_equal(model.logits(TOKENS[:390], first_row=held), want[held:])


def test_a_folder_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama_8bit: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(errors.QsfIOError, match=r"cannot create a file in .*none"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32")
    qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk").close()  # needs no file
    with pytest.raises(errors.QsfArgumentError, match="kv_contexts must be 0"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32", sessions=2, kv_contexts=1)


# ---- what is asked for ----
