# SPDX-License-Identifier: Apache-2.0
"""The original model, layer by layer, against the reference that is written for reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import calibrated_models, golden_families, tiny_checkpoints
from oracle import reference
from qsf.file.layout import TensorType, layer_unit, pass_units
from qsf_converter.original import layers as original_module
from qsf_converter.original.layers import Observer, Original
from qsf_converter.sources.families.rules import INPUT_GROUPS

T = TensorType
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_checkpoints.make_llama,
    "llama-mha-tied": lambda f: tiny_checkpoints.make_llama(f, n_kv_heads=4, tied_head=True),
    "llama-one-kv-head": lambda f: tiny_checkpoints.make_llama(f, n_kv_heads=1),
    "llama-biases": lambda f: tiny_checkpoints.make_llama(f, attention_bias=True, mlp_bias=True),
    "llama3": lambda f: tiny_checkpoints.make_llama(
        f, rope_scaling=tiny_checkpoints.LLAMA3_SCALING
    ),
    "linear-rope": lambda f: tiny_checkpoints.make_llama(
        f, rope_scaling=tiny_checkpoints.LINEAR_SCALING
    ),
    "llama-relu": lambda f: tiny_checkpoints.make_llama(f, hidden_act="relu"),
    "mistral": tiny_checkpoints.make_mistral,
    "gpt2": tiny_checkpoints.make_gpt2,
    "gpt2-untied": lambda f: tiny_checkpoints.make_gpt2(f, tied_head=False),
    "gpt2-erf": lambda f: tiny_checkpoints.make_gpt2(f, hidden_act="gelu"),
    "gpt2-relu": lambda f: tiny_checkpoints.make_gpt2(f, hidden_act="relu"),
}


def assert_near(found: NDArray[np.float32], wanted: NDArray[Any]) -> None:
    """Values of about 1 to 10, sums of some hundred f32 products."""
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


Seen = list[tuple[tuple[TensorType, ...], NDArray[np.float32]]]


def observer(seen: Seen) -> Observer:
    """Note what matrices are told to read."""
    return lambda kinds, values: seen.append((kinds, values))


def some_samples() -> NDArray[np.int32]:
    return np.random.default_rng(1).integers(0, 101, (2, 40)).astype(np.int32)


@pytest.mark.parametrize("name", list(MODELS))
def test_every_value_is_the_references(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "m")
    samples = some_samples()
    model = reference.load_huggingface(folder)
    traces = [reference.forward(model, sample, dtype=np.float64) for sample in samples]

    def wanted(value: str) -> NDArray[np.float64]:
        return np.stack([trace.values[value] for trace in traces])

    inputs = ("attn_norm", "heads", "ffn_norm", "ffn_hidden")
    with calibrated_models.original(folder) as original:
        x = original.embed(samples)
        assert_near(x, wanted("embedded"))
        for layer in range(original.header.n_layers):
            seen: Seen = []
            before = x.copy()
            weights = original.weights(layer_unit(layer))
            x = original.layer(weights, before, observer(seen))
            assert_near(x, wanted(f"layer.{layer}.residual_ffn"))
            kinds = (tuple(k for k in group if k in weights) for group in INPUT_GROUPS)
            groups = [of for of in kinds if of]
            assert [told for told, _ in seen] == groups * len(samples)
            for n, value in enumerate(inputs):
                told = np.stack([y for _, y in seen[n :: len(groups)]])
                assert_near(told, wanted(f"layer.{layer}.{value}"))
        for i, trace in enumerate(traces):
            assert_near(original.logits(x[i]), trace.logits)


def test_a_layer_leaves_what_it_is_given(tmp_path: Path) -> None:
    with calibrated_models.original(MODELS["llama-biases"](tmp_path / "m")) as original:
        x = original.embed(some_samples())
        weights = original.weights(layer_unit(0))
        kept = {kind: values.copy() for kind, values in weights.items()}
        before = x.copy()
        original.layer(weights, x)
        np.testing.assert_array_equal(x, before)
        for kind, values in kept.items():
            np.testing.assert_array_equal(weights[kind], values)


EVALUATED = [name for name, case in golden_families.cases().items() if not case.is_encoder]


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_every_family_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    case = golden_families.cases()[name]
    with calibrated_models.original(case.write(tmp_path / "m")) as original:
        x = original.embed(np.array([case.tokens]))
        for layer in range(original.header.n_layers):
            x = original.layer(original.weights(layer_unit(layer)), x)
        logits = original.logits(x[0])
    bound = 2e-4 if case.has_delta_rule else 1e-5  # see test_families.py
    assert np.abs(logits - case.logits).max() < bound * np.abs(case.logits).max()


def test_vectors_are_those_of_the_weights(tmp_path: Path) -> None:
    with calibrated_models.original(MODELS["gpt2-untied"](tmp_path / "m")) as original:
        for unit in pass_units(original.header.n_layers)[1:]:
            vectors, weights = original.vectors(unit), original.weights(unit)
            assert set(vectors) == {kind for kind, w in weights.items() if w.ndim == 1}
            for kind, values in vectors.items():
                np.testing.assert_array_equal(values, weights[kind])
        assert set(vectors) == {T.FINAL_NORM, T.FINAL_NORM_BIAS}


def test_only_one_unit_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MODELS["llama"](tmp_path / "m")
    with calibrated_models.planned(folder) as (source, plan):
        names: list[str] = []
        read_rows = source.checkpoint.read_rows

        def noted(name: str, first: int, last: int) -> NDArray[np.generic]:
            names.append(name)
            return read_rows(name, first, last)

        monkeypatch.setattr(source.checkpoint, "read_rows", noted)
        original = Original(plan, source.checkpoint)
        assert names == []
        original.embed(some_samples())
        assert set(names) == {"model.embed_tokens.weight"}
        names.clear()
        original.weights(layer_unit(1))
        assert len(names) == 9
        assert {name.split(".")[2] for name in names} == {"1"}


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_tables_come_in_ranges(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", tied_head=is_tied)
    weights = reference.load_huggingface(folder).weights
    samples = some_samples()
    with calibrated_models.original(folder) as original:
        x = original.embed(samples)
        logits = original.logits(x[0])
        monkeypatch.setattr(original_module, "_HEAD_ROWS", 32)
        ranges = list(original.head_rows())
        assert [start for start, _ in ranges] == [0, 32, 64, 96]
        table = weights["embedding" if is_tied else "head"]
        np.testing.assert_array_equal(np.concatenate([rows for _, rows in ranges]), table)
        np.testing.assert_array_equal(original.embed(samples), x)
        np.testing.assert_allclose(original.logits(x[0]), logits, rtol=1e-5, atol=1e-5)
