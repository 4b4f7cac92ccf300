# SPDX-License-Identifier: Apache-2.0
"""Every family: engine and converter's original against the logits of transformers."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make import calibrated_models, golden_families
from make.golden_families import Case
from oracle.reference import hidden_states, load_qsf, noted_choices
from qsf.errors import QsfConversionError
from qsf.file.layout import layer_unit
from qsf.passes import PassItem
from qsf_converter import convert
from qsf_converter.original.weights import Choice
from qsf_converter.sources.architectures import FAMILIES

BOUND = 3e-5  # of the largest logit
# What the delta rule puts out is divided by its size, which is small where a query meets nothing:
# transformers itself is that far from the same in f64.
DELTA_BOUND, DELTA_MEDIAN = 2e-4, 5e-6  # of all logits; of the rows' largest differences
CONTEXT = golden_families.N_TOKENS


def difference(logits: NDArray[Any], case: Case) -> float:
    """The largest difference from the golden logits, as a part of the largest of these."""
    return float(np.abs(logits - case.logits).max() / np.abs(case.logits).max())


def check_encoder(path: Path, case: Case) -> None:
    """Compare the hidden states of the reference, and the engine's sums of them."""
    assert difference(hidden_states(load_qsf(path, CONTEXT), case.tokens), case) < 1e-5
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        for n in (1, 17, CONTEXT):
            total = array("d", bytes(8 * model.info.vector_dim))
            item = PassItem(model.session, case.tokens, "none", n_hidden=n, hidden=total)
            model.run_pass([item])
            model.session.rewind(0)
            want = case.logits[:n].sum(axis=0)
            assert np.abs(np.array(total) - want).max() < BOUND * np.abs(want).max()


def check_choices(case: Case, choices: list[Choice]) -> None:
    """Compare where tokens go, and with which weights: [routed layers, tokens, chosen]."""
    experts, weights = [], []
    for choice in choices:
        order = np.argsort(choice.experts, axis=1)
        experts.append(np.take_along_axis(choice.experts, order, 1))
        weights.append(np.take_along_axis(choice.weights, order, 1))
    np.testing.assert_array_equal(np.stack(experts), case.experts)
    assert case.weights is not None
    atol = 1e-4 if case.has_delta_rule else 5e-6
    np.testing.assert_allclose(np.stack(weights), case.weights, atol=atol)


def check_engine(path: Path, case: Case) -> NDArray[Any]:
    """Compare the engine's logits, and return them."""
    with qsf.Model(path, exact=True, kv_type="f32", max_seq_len=CONTEXT, ram_budget=None) as model:
        logits = model.logits(case.tokens)
    assert difference(logits, case) < (DELTA_BOUND if case.has_delta_rule else BOUND)
    assert (logits.argmax(axis=1) == case.logits.argmax(axis=1)).all()
    return logits


@pytest.mark.parametrize("name", golden_families.cases())
def test_engine_and_original_agree_with_transformers(
    name: str, tmp_path: Path, golden: Callable[[Case], Path]
) -> None:
    case = golden_families.cases()[name]
    folder, path = case.write(tmp_path / "m"), golden(case)
    if case.is_encoder:
        check_encoder(path, case)
        return
    if case.has_blocks:
        with (
            pytest.raises(QsfConversionError, match="in residual blocks"),
            calibrated_models.original(folder),
        ):
            pass
        check_engine(path, case)
        return
    with calibrated_models.original(folder) as original, noted_choices() as choices:
        x = original.embed(np.array([case.tokens]))
        for layer in range(original.header.n_layers):
            x = original.layer(original.weights(layer_unit(layer)), x)
        ours = original.logits(x[0])
    if case.experts is not None:
        check_choices(case, choices)
    assert difference(ours, case) < (DELTA_BOUND if case.has_delta_rule else 1e-5)
    logits = check_engine(path, case)
    if case.has_delta_rule:
        of_rows = np.abs(logits - ours).max(axis=1) / np.abs(case.logits).max()
        assert of_rows.max() < DELTA_BOUND
        assert np.median(of_rows) < DELTA_MEDIAN


def test_every_family_has_a_case() -> None:
    configs = [case.config for case in golden_families.cases().values()]
    tried = {c.get("text_config", c)["model_type"] for c in configs}
    older = {"llama", "mistral", "gpt2"}  # tests/golden has texts of these
    assert {family.model_type for family in FAMILIES.values()} <= tried | older


def test_a_tied_head_may_have_a_bias(tmp_path: Path) -> None:
    case = golden_families.cases()["phi"]
    tensors = {name: values for name, values in case.tensors().items() if "lm_head" not in name}
    bias = np.random.default_rng(1).standard_normal(case.logits.shape[1:]).astype(np.float16)
    logits: list[NDArray[np.float32]] = []
    for values in (np.zeros_like(bias), bias):
        folder = golden_families.write_checkpoint(
            tmp_path / "m",
            {**case.config, "tie_word_embeddings": True},
            {**tensors, "lm_head.bias": values.astype(np.float32)},
        )
        path = tmp_path / f"{len(logits)}.qsf"
        convert(folder, path, quant_type="f16", embed_type="f16")
        with qsf.Model(path, exact=True, ram_budget=None) as model:
            logits.append(model.logits(case.tokens))
    np.testing.assert_allclose(logits[1] - logits[0], np.tile(bias, (len(logits[0]), 1)), atol=1e-5)
