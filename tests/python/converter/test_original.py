# SPDX-License-Identifier: Apache-2.0
"""The original model, layer by layer; api/test_families.py compares its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import calibrated_models, tiny_checkpoints
from oracle import reference
from qsf.file.layout import TensorType, layer_unit, pass_units
from qsf_converter.original import layers as original_module
from qsf_converter.original.layers import Observer, Original
from qsf_converter.original.weights import linear
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


@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_what_matrices_read_is_told(name: str, tmp_path: Path) -> None:
    """Their outputs, by what an observer is told, add up to the layer's own output."""
    with calibrated_models.original(MODELS[name](tmp_path / "m")) as original:
        x = original.embed(some_samples())
        for layer in range(original.header.n_layers):
            seen: Seen = []
            w = original.weights(layer_unit(layer))
            out = original.layer(w, x, observer(seen))
            kinds = (tuple(k for k in group if k in w) for group in INPUT_GROUPS)
            groups = [of for of in kinds if of]
            assert [told for told, _ in seen] == groups * len(x)
            for i, before in enumerate(x):
                of_mixer, heads, of_ffn, hidden = (
                    y for _, y in seen[i * len(groups) : (i + 1) * len(groups)]
                )
                assert_near(of_mixer, original.attention_input(w, before))
                behind = before + linear(w, T.ATTN_OUT, heads)
                assert_near(of_ffn, original.ffn_input(w, before, behind))
                assert_near(hidden, original.ffn_hidden(w, of_ffn))
                assert_near(out[i], behind + linear(w, T.FFN_DOWN, hidden))
            x = out


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
