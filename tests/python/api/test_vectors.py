# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts: hidden states of the last norm, pooled; equal whatever runs beside them."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.golden import MODELS, ROOT
from make.tiny_checkpoints import make_gpt2, make_llama
from oracle.reference import forward, load_qsf, tokens_for
from qsf.errors import QsfArgumentError
from qsf.passes import PassItem
from qsf_converter import convert

TEXTS = ["Once upon a time", "The cat", "Lily and Ben went to the park to play in the sun.", "A"]


def hidden_states(path: Path, tokens: list[int]) -> NDArray[Any]:
    """Return what the last norm gives, [n_tokens, dim], by the reference."""
    return forward(load_qsf(path), tokens).final_norm


def pooled(states: NDArray[Any], pooling: str, dimensions: int | None = None) -> NDArray[Any]:
    """Pool as sentence-transformers does: Pooling, truncate_dim, Normalize."""
    vector = states[-1] if pooling == "last" else states.mean(axis=0)
    vector = vector[:dimensions]
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_vectors_are_those_of_the_reference(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "hf", seed=4, n_vocab=2048, tokenizer_from=MODELS["tiny-llama"])
    convert(folder, tmp_path / "m.qsf", quant_type="f16")
    tokens = tokens_for(101)
    states = hidden_states(tmp_path / "m.qsf", tokens)
    with qsf.Model(tmp_path / "m.qsf", exact=True, ram_budget=None) as model:
        for pooling in ("last", "mean"):
            for dimensions in (None, 8):
                (got,) = model.embed([tokens], pooling=pooling, dimensions=dimensions)
                want = pooled(states, pooling, dimensions)
                assert np.abs(np.array(got) - want).max() < 1e-5
                assert abs(np.linalg.norm(got) - 1) < 1e-6


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_sentence_transformers(tiny_llama_f16: Path, pooling: str) -> None:
    golden = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text("utf-8"))
    with qsf.Model(tiny_llama_f16, exact=True, ram_budget=None) as model:
        (got,) = model.embed([golden["tokens"]], pooling=pooling)
    assert np.abs(np.array(got[:24]) - golden[pooling]).max() < 1e-5


def vectors(path: Path, pooling: str, **options: Any) -> list[array[float]]:
    with qsf.Model(path, **{"ram_budget": None, **options}) as model:
        return list(model.embed(TEXTS, pooling=pooling))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_threads_and_batches_change_no_bit(tiny_llama_8bit: Path, pooling: str) -> None:
    plain = vectors(tiny_llama_8bit, pooling, threads=1)
    for options in ({"threads": 3, "sessions": 4}, {"threads": 2, "sessions": 2}):
        assert vectors(tiny_llama_8bit, pooling, **options) == plain


def test_neighbours_that_are_continued_change_nothing(tiny_llama_8bit: Path) -> None:
    """In one pass: an answer, a prompt, hidden states. Each as if it were alone."""
    with qsf.Model(tiny_llama_8bit, ram_budget=None, threads=2, sessions=3) as model:
        sessions = [model.session, model.create_session(), model.create_session()]
        alone: Any = [array("d", bytes(8 * model.info.dim)) for _ in range(2)]
        model.run_pass([PassItem(sessions[0], [7, 8, 9], "none", n_hidden=3, hidden=alone[0])])
        model.run_pass([PassItem(sessions[1], [3, 4], "none", n_hidden=1, hidden=alone[1])])
        logits = model.logits([5, 6])
        for session in sessions:
            session.rewind(0)
        sums: Any = [array("d", bytes(8 * model.info.dim)) for _ in range(2)]
        items = [
            PassItem(sessions[0], [7, 8, 9], "none", n_hidden=3, hidden=sums[0]),
            PassItem(sessions[2], [5, 6], "all"),
            PassItem(sessions[1], [3, 4], "none", n_hidden=1, hidden=sums[1]),
        ]
        model.run_pass(items)
        assert sums == alone
        sessions[0].rewind(0)
        cut: Any = array("d", bytes(8 * model.info.dim))
        for piece in ([7, 8], [9]):
            how = {"n_hidden": len(piece), "hidden": cut}
            model.run_pass([PassItem(sessions[0], piece, "none", **how)])
        assert cut == alone[0]
        assert np.array_equal(items[1].logits, logits)


def test_what_cannot_be_is_refused(tiny_llama_8bit: Path) -> None:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, threads=1) as model:
        room = array("d", bytes(8 * model.info.dim))
        for item, match in (
            (PassItem(model.session, [1], "none", n_hidden=2, hidden=room), "2 hidden .* 1 tokens"),
            (PassItem(model.session, [1], "last", n_hidden=1, hidden=room), "logits too"),
            (PassItem(model.session, [1], "none", n_hidden=1, hidden=room[1:]), "8 bytes each"),
        ):
            with pytest.raises(QsfArgumentError, match=match):
                model.run_pass([item])
        assert not any(room)
        for options, match in (
            ({"pooling": "max"}, "pooling must be last or mean"),
            ({"dimensions": 0}, "dimensions"),
            ({"dimensions": model.info.dim + 1}, "dimensions"),
        ):
            with pytest.raises(QsfArgumentError, match=match):
                list(model.embed(["a"], **options))
        with pytest.raises(QsfArgumentError, match="empty"):
            list(model.embed(["a", []]))


@pytest.fixture(scope="module")
def embedder(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers writes it, whose tokenizer ends texts with a token."""
    import shutil

    folder = tmp_path_factory.mktemp("embedder") / "hf"
    shutil.copytree(tiny_llama_dir, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    end = tokenizer["added_tokens"][1]
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, end["content"]
    last = {"SpecialToken": {"id": special, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, last], "pair": [text, last],
        "special_tokens": {special: {"id": special, "ids": [end["id"]], "tokens": [special]}},
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer), "utf-8")
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode), "utf-8")
    convert(folder, folder.parent / "m.qsf", quant_type="f16")
    return folder


def test_the_conventions_of_the_makers_are_kept(embedder: Path) -> None:
    path = embedder.parent / "m.qsf"
    with qsf.Model(path, ram_budget=None, exact=True) as model:
        (end_id,) = model.text_vectors.end_ids
        assert model.text_vectors.pooling == "last"
        tokens = [*model.tokenizer.encode(TEXTS[0]), end_id]
        assert list(model.embed([TEXTS[0]])) == list(model.embed([tokens], pooling="last"))
        (got,) = model.embed([TEXTS[0]])
    assert np.abs(np.array(got) - pooled(hidden_states(path, tokens), "last")).max() < 1e-5
