# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's drafters, which read their model's keys, values and hidden states.

That no text depends on one is what test_same_bits.py proves.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest

from make import calibrated_models, golden_families
from make.commands import Run
from make.lent_models import write_pair
from make.stored import Reader
from oracle.reference import load_qsf
from qsf import Model
from qsf.cli.run import report
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.native import binding
from qsf_converter import convert

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def test_guesses_are_those_of_transformers(pair: Pair) -> None:
    target, drafter = pair
    case = golden_families.drafted()[1]
    assert case.guesses is not None
    n_taken = np.zeros(len(case.guesses), int)
    options = binding.Options(budget_bytes=0, draft_rows=4, draft_path=drafter, exact=True)
    model = binding.NativeModel(target, options)
    assert model.info().plan.drafter_state == binding.DRAFTER_HELD
    session = model.create_session()
    while (n_taken > 1).mean() < 0.5 or n_taken.max() < 4:  # guesses after guesses
        for n, guesses in enumerate(case.guesses):
            session.rewind(0)
            session.sync_chunk(array("I", case.tokens[: n + 1]))
            before = session.stats().n_drafted
            session.step(case.tokens[n + 1])
            after = session.stats().n_drafted
            n_guessed = after[2] - before[2]
            if sum(after) - sum(before) > n_guessed:
                continue  # some are guesses from the text
            for i, token in enumerate(guesses[:n_guessed]):
                assert session.is_ahead(int(token)), (n, i)
                session.step(int(token))
                n_taken[n] = max(n_taken[n], i + 1)
    model.close()


def test_a_drafter_of_ordered_words_guesses_among_all(pair: Pair, tmp_path: Path) -> None:
    case = golden_families.drafted()[1]
    said = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2}
    (name, embedding), *_ = case.tensors().items()
    assert name == "model.embed_tokens.weight"
    beside = {
        "masked_embedding.centroids.weight": embedding[:8],
        "masked_embedding.token_ordering": np.arange(len(embedding), dtype=np.float32),
    }
    config, tensors = {**case.config, **said}, {**case.tensors(), **beside}
    source = golden_families.write_checkpoint(tmp_path / "m", config, tensors)
    convert(source, tmp_path / "m.qsf", quant_type="f16", embed_type="f16")
    with Reader(tmp_path / "m.qsf") as found, Reader(pair[1]) as plain:
        for i in range(len(plain.units)):
            assert found.read_unit(i) == plain.read_unit(i), i


def test_it_is_described(pair: Pair, qsf: Run) -> None:
    shown = qsf("inspect", pair[1]).stdout
    assert "kv_source another model" in shown
    assert "for another model (--draft)" in qsf("show", pair[1]).stdout


def test_the_plan_counts_it(pair: Pair) -> None:
    target, drafter = pair
    with_it = Model.plan(target, ram_budget=None, draft=drafter)
    assert with_it.drafter_bytes == with_it.drafter_wanted_bytes > 200_000
    more = Model.plan(target, ram_budget=None, draft=drafter, sessions=4)
    assert more.drafter_bytes == with_it.drafter_bytes  # it has no keys of its own


def test_keys_in_a_file_are_not_lent(pair: Pair) -> None:
    target, drafter = pair
    options = binding.Options(
        budget_bytes=0, draft_rows=4, draft_path=drafter, kv_resident_tokens=1, chunk_tokens=8,
        kv_folder=target.parent,
    )  # fmt: skip
    plan = binding.plan_model(target, options)
    assert (plan.drafter_state, plan.drafter_bytes) == (binding.DRAFTER_COLD, 0)
    assert "--kv-policy disk" in report.drafter_lines(plan)[0]


def test_it_is_refused_alone_and_for_another_model(pair: Pair, tmp_path: Path) -> None:
    drafter = pair[1]
    with pytest.raises(QsfArgumentError, match=r"drafter\.qsf only guesses.*dimension 72.*--draft"):
        Model(drafter, ram_budget=None)
    with (
        pytest.raises(QsfConversionError, match="a drafter reads another model's keys"),
        calibrated_models.original(drafter.with_suffix("")),
    ):
        pass
    for name, said in (
        ("gemma4-own", r"its layer 1 reads 1 KV heads of 40 dimensions, window 0, and no .*m\.qsf"),
        ("llama-linear", r"its layer 0 reads 2 KV heads of 24 dimensions, window 9, .*m\.qsf"),
        ("phi", r"it guesses for a model of hidden dimension 72, and .*m\.qsf has 80"),
    ):
        source = golden_families.cases()[name].write(tmp_path / name)
        convert(source, tmp_path / "m.qsf", quant_type="f16", force=True)
        with pytest.raises(QsfArgumentError, match=rf"the draft model .*drafter\.qsf: {said}"):
            Model(tmp_path / "m.qsf", ram_budget=None, draft=drafter)


def test_key_channels_stay_as_a_drafter_reads_them(tmp_path: Path) -> None:
    """Those of other models are made equally large."""
    for name, is_kept in (("gemma4-shared", True), ("qwen3", False)):
        case = golden_families.cases()[name]
        tensors = case.tensors()
        keys = next(key for key in tensors if key.endswith("layers.0.self_attn.k_norm.weight"))
        tensors[keys][:] = 1.0
        tensors[keys][[0, 12]] = 64.0  # the two that RoPE rotates together
        golden_families.write_checkpoint(tmp_path / name, case.config, tensors)
        convert(tmp_path / name, tmp_path / "m.qsf", quant_type="8bit", force=True)
        stored = load_qsf(tmp_path / "m.qsf").weights["layer.0.k_norm"]
        assert np.array_equal(stored, tensors[keys]) is is_kept, name
