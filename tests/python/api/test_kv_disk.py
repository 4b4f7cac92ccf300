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
from qsf import errors
from qsf.file.layout import Dtype

TOKENS = np.random.default_rng(9).integers(0, VOCAB, 400).tolist()


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
