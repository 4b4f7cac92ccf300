"""The binding: statuses become exceptions, handles become objects, settings are obeyed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.stored import unpack_tokenizer
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.native._qsf import lib

TOKENS = array("I", [0, 10, 20, 30, 40, 50, 60, 70])


def options(**values: Any) -> binding.Options:
    """Return options without a budget, which would count what all other tests hold, too."""
    return binding.Options(budget_bytes=0, **values)


def sync(session: binding.NativeSession, tokens: array[int]) -> int:
    """Return how many calls it took."""
    n_calls = 1
    while session.sync_chunk(tokens) < len(tokens):
        n_calls += 1
    return n_calls


@pytest.fixture
def model(tiny_llama_8bit: Path) -> Iterator[binding.NativeModel]:
    opened = binding.NativeModel(tiny_llama_8bit, options(chunk_tokens=3, max_sessions=2))
    yield opened
    opened.close()


@pytest.fixture
def session(model: binding.NativeModel) -> Iterator[binding.NativeSession]:
    created = model.create_session()
    yield created
    created.close()


def test_every_status_has_its_exception() -> None:
    statuses = {getattr(lib, name) for name in dir(lib) if name.startswith("QSF_ERR_")}
    assert set(binding._ERROR_OF_STATUS) == statuses
    kinds = [kind for status, kind in binding._ERROR_OF_STATUS.items()
             if status != lib.QSF_ERR_DAMAGED]  # fmt: skip
    assert len(set(kinds)) == len(statuses) - 1


def test_sections_are_read(model: binding.NativeModel, tiny_llama_dir: Path) -> None:
    tokenizer_json = (tiny_llama_dir / "tokenizer.json").read_bytes()
    assert unpack_tokenizer(model.section("TOKN") or b"") == tokenizer_json
    assert model.section("WXYZ") is None


def test_a_call_evaluates_one_chunk(session: binding.NativeSession) -> None:
    assert session.sync_chunk(TOKENS) == 3
    assert session.position() == 3
    assert sync(session, TOKENS) == 2
    assert session.position() == 8
    assert session.stats().prompt_tokens == 8


def test_phases_have_names() -> None:
    names = binding.phase_names()
    assert " ".join(names) == (
        "embedding norm qkv attention attn_out gate_up down head wait decompress other"
    )


def test_the_roofline_is_measured() -> None:
    assert binding.measure_roofline(1, 64 * 2**20, 1) > 0.01
    for asked in ((0, 2**26, 1), (1, 2**26 - 1, 1), (1, 2**26, 0), (1, 2**80, 1)):
        with pytest.raises(QsfArgumentError):
            binding.measure_roofline(*asked)
