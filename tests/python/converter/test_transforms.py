# SPDX-License-Identifier: Apache-2.0
"""Layers that are changed into equivalent ones: the same function, and a smaller error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import calibrated_models, golden_families, tiny_checkpoints
from qsf.file.layout import Dtype, TensorType, layer_unit
from qsf_converter.calibrate import transforms
from qsf_converter.calibrate.transforms import ROTATED, SCALED, choose, rotate_heads, scale_inputs
from qsf_converter.original.layers import Original
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.sources.families.rules import INPUT_GROUPS

T = TensorType
Array = NDArray[np.float32]
OF_QKV = (T.Q, T.K, T.V)  # of a layer without a gate
OF_OUT, _, OF_GATE, OF_DOWN = INPUT_GROUPS[1:]

MODELS: dict[str, Callable[[Path], Path]] = {
    f"llama-{n_kv_heads}": lambda f, n=n_kv_heads: tiny_checkpoints.make_llama(
        f, n_heads=4, n_kv_heads=n, head_dim=16, attention_bias=n == 2, mlp_bias=n == 2
    )
    for n_kv_heads in (4, 2, 1)
} | {"gpt2": lambda f: tiny_checkpoints.make_gpt2(f, dim=96, n_heads=3)}
# Norms before, behind and between; attention and FFN beside each other; factors and caps.
FAMILIES: dict[str, Callable[[Path], Path]] = {
    name: golden_families.cases()[name].write
    for name in (
        "qwen3-bias",
        "phi",
        "gpt_neox",
        "olmo2",
        "bitnet",
        "gemma2",
        "granite-bias",
        "qwen3_5",
        "qwen3_5-three",
        "granitemoehybrid-h",
        "falcon_h1",
    )
}


def stream(original: Original) -> Array:
    return original.embed(np.random.default_rng(4).integers(0, original.header.n_vocab, (2, 30)))


def energies_of(original: Original, weights: Weights, x: Array) -> dict[Any, Any]:
    found: dict[Any, Any] = {}

    def observe(kinds: tuple[TensorType, ...], y: Array) -> None:
        found[kinds] = found.get(kinds, 0) + (y.T @ y).astype(np.float64)

    original.layer(weights, x, observe)
    return found


def same_for_shared_heads(scales: Array, original: Original) -> Array:
    header = original.header
    n_kv_heads = header.n_kv_heads or header.n_heads
    grid = scales.reshape(n_kv_heads, -1, header.head_dim)
    return np.repeat(grid[:, :1], grid.shape[1], axis=1).ravel()


# Nothing in front can take a factor: an activation, the stream itself, or a norm that two read.
UNSCALED = {
    ("gpt2", OF_DOWN),
    ("phi", OF_QKV),
    ("phi", (T.FFN_UP,)),
    ("phi", OF_DOWN),
    ("gpt_neox", OF_DOWN),
    ("olmo2", OF_QKV),
    ("olmo2", OF_GATE),
    ("falcon_h1", (T.SSD_OUT,)),  # no norm takes it
}


@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_scaled_inputs_leave_the_layer_as_it_is(name: str, tmp_path: Path) -> None:
    with calibrated_models.original({**MODELS, **FAMILIES}[name](tmp_path / "m")) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        before = original.layer(weights, x)
        rng = np.random.default_rng(0)
        for kinds in energies_of(original, weights, x):
            scales = np.exp(rng.normal(0, 1, weights[kinds[0]].shape[1])).astype(np.float32)
            if kinds == OF_OUT and not weights.kind.has_attention:
                continue  # which nothing scales
            if kinds == OF_OUT:
                scales = same_for_shared_heads(scales, original)
            kept = {kind: values.copy() for kind, values in weights.items()}
            scaled = scale_inputs(weights, kinds, scales)
            for kind, values in kept.items():
                np.testing.assert_array_equal(weights[kind], values)
            if (name, kinds) in UNSCALED:
                assert scaled is None
                continue
            assert scaled is not None
            for kind in kinds:
                assert np.abs(scaled[kind] - weights[kind]).max() > 0.01
            assert {values.dtype for values in scaled.values()} == {np.dtype("f4")}
            np.testing.assert_allclose(original.layer(scaled, x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(MODELS))
def test_turned_heads_leave_the_layer_as_it_is(name: str, tmp_path: Path) -> None:
    with calibrated_models.original(MODELS[name](tmp_path / "m")) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        turned = rotate_heads(weights)
        assert turned is not None
        for kind in (T.V, T.ATTN_OUT):
            assert np.abs(turned[kind] - weights[kind]).max() > 0.01
            assert turned[kind].dtype == np.float32
        out = original.layer(turned, x)
        np.testing.assert_allclose(out, original.layer(weights, x), rtol=1e-4, atol=1e-4)
        # The sums that are turned in place of being gathered anew.
        before, after = (energies_of(original, w, x)[OF_OUT] for w in (weights, turned))
        found = transforms._rotated(before, original.header.head_dim)
        np.testing.assert_allclose(found, after, rtol=1e-3, atol=1e-3 * np.abs(after).max())


@pytest.mark.parametrize("head_dim", [24, 10])
def test_heads_of_other_sizes_are_not_turned(head_dim: int, tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", head_dim=head_dim)
    with calibrated_models.original(folder) as original:
        assert rotate_heads(original.weights(layer_unit(0))) is None


@pytest.mark.parametrize("n", [1, 2, 64])
def test_hadamard_is_orthogonal(n: int) -> None:
    turn = transforms._hadamard(n)
    np.testing.assert_allclose(turn @ turn.T, np.eye(n), atol=1e-6)
    np.testing.assert_allclose(np.abs(turn), n**-0.5, rtol=1e-6)


def chosen(
    original: Original, weights: Weights, x: Array, dtype: Dtype = Dtype.Q2
) -> tuple[Weights, dict[TensorType, str]]:
    dtypes = {kind: Dtype.F32 if w.ndim == 1 else dtype for kind, w in weights.items()}
    return choose(weights, dtypes, energies_of(original, weights, x))


def true_error(
    original: Original,
    weights: Weights,
    x: Array,
    kinds: tuple[TensorType, ...],
    dtype: Dtype,
) -> float:
    """What plain rounding of a group does to its outputs, each token computed."""
    total = 0.0
    seen: list[Array] = []
    original.layer(weights, x, lambda k, y: seen.append(y) if k == kinds else None)
    y = np.concatenate(seen)
    energies = np.square(y).sum(axis=0)
    for kind in kinds:
        stored = np.empty_like(weights[kind])
        quantise_rows(dtype, weights[kind], weights=energies, stored=stored)
        total += float(np.square(y @ (stored - weights[kind]).T).sum())
    return total


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_inputs_that_stand_out_are_scaled(n_kv_heads: int, tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", n_kv_heads=n_kv_heads, head_dim=24, dim=128, ffn_dim=128
    )
    with calibrated_models.original(folder) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        for norm in (T.ATTN_NORM, T.FFN_NORM):
            weights[norm] = weights[norm].copy()
            weights[norm][[3, 40, 77]] *= 30
        changed, actions = chosen(original, weights, x, Dtype.Q4_SYM)
        assert {actions.get(kind) for kind in (*OF_QKV, *OF_GATE)} == {SCALED}
        out = original.layer(changed, x)
        before = original.layer(weights, x)
        np.testing.assert_allclose(out, before, rtol=1e-3, atol=1e-3 * np.abs(before).max())
        for kinds in (OF_QKV, OF_GATE):
            lost = true_error(original, changed, x, kinds, Dtype.Q4_SYM)
            assert lost < 0.9 * true_error(original, weights, x, kinds, Dtype.Q4_SYM)
        # With few codes the search by weights has spent them on those columns already.
        assert not set(chosen(original, weights, x, Dtype.Q2)[1]) & {*OF_QKV, *OF_GATE}


def test_heads_with_outlying_values_are_turned(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_kv_heads=4, head_dim=16, dim=128)
    with calibrated_models.original(folder) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        # In every head one column stands out, of weights whose inputs are alike.
        out = weights[T.ATTN_OUT].copy()
        out[:, 5::16] *= 12
        weights[T.ATTN_OUT] = out
        changed, actions = chosen(original, weights, x)
        assert actions[T.ATTN_OUT].startswith(ROTATED)
        after, before = original.layer(changed, x), original.layer(weights, x)
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-3 * np.abs(before).max())
        lost = true_error(original, changed, x, OF_OUT, Dtype.Q2)
        assert lost < 0.9 * true_error(original, weights, x, OF_OUT, Dtype.Q2)


def test_what_gains_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    with calibrated_models.original(folder) as original:
        weights = original.weights(layer_unit(0))
        # Inputs that are all alike: no column is worth more than another.
        alike: dict[tuple[TensorType, ...], NDArray[np.float64]] = {
            group: np.eye(weights[group[0]].shape[1]) * 7.0
            for group in (OF_QKV, OF_OUT, OF_GATE, OF_DOWN)
        }
        dtypes = {kind: Dtype.F32 if w.ndim == 1 else Dtype.Q3 for kind, w in weights.items()}
        changed, actions = choose(weights, dtypes, alike)
        assert actions == {}
        assert all(changed[kind] is values for kind, values in weights.items())
        # Nor are floats changed, whatever the inputs.
        floats = dict.fromkeys(weights, Dtype.F16)
        changed, actions = choose(weights, floats, energies_of(original, weights, stream(original)))
        assert actions == {}
        assert all(changed[kind] is values for kind, values in weights.items())


def test_inputs_that_are_always_zero_are_not_scaled(tmp_path: Path) -> None:
    with calibrated_models.original(tiny_checkpoints.make_llama(tmp_path / "m")) as original:
        weights, x = original.weights(layer_unit(0)), stream(original)
        weights[T.ATTN_NORM] = weights[T.ATTN_NORM] * 0
        changed, actions = chosen(original, weights, x)
        assert not set(OF_QKV) & set(actions)
        assert np.isfinite(original.layer(changed, x)).all()


@pytest.mark.parametrize("name", ["llama-2", "gpt2"])
def test_changes_are_judged_by_the_inputs_that_they_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared with each change are the energies that the changed layer really has."""
    error = transforms._error
    with calibrated_models.original(MODELS[name](tmp_path / "m")) as original:
        x = stream(original)
        judged: list[tuple[TensorType, ...]] = []

        def checked(
            weights: Weights, group: tuple[TensorType, ...], dtypes: Any, energies: Any
        ) -> float:
            real = np.diag(energies_of(original, weights, x)[group])
            np.testing.assert_allclose(energies, real, rtol=1e-3, atol=1e-5 * real.max())
            judged.append(group)
            return error(weights, group, dtypes, energies)

        monkeypatch.setattr(transforms, "_error", checked)
        chosen(original, original.weights(layer_unit(0)), x, Dtype.Q4_SYM)
        assert len(judged) >= 3 * 3


def test_the_measured_error_is_that_of_the_outputs() -> None:
    """With inputs that do not hang together, scaled weights and energies belong together."""
    rng = np.random.default_rng(8)
    n_tokens, n_cols = 20000, 128
    sizes = np.exp(rng.normal(0, 1, n_cols))
    y = (rng.standard_normal((n_tokens, n_cols)) * sizes).astype(np.float32)
    weights: dict[TensorType, Array] = {
        T.FFN_GATE: rng.standard_normal((48, n_cols)).astype(np.float32),
        T.FFN_UP: rng.standard_normal((80, n_cols)).astype(np.float32),
    }
    dtypes = {T.FFN_GATE: Dtype.Q2, T.FFN_UP: Dtype.Q3}
    energies = np.square(y, dtype=np.float64).sum(axis=0)
    for scales in (np.ones(n_cols), sizes**0.5):
        scaled = {kind: (w * scales).astype(np.float32) for kind, w in weights.items()}
        weighed = energies / scales**2
        wanted = 0.0
        for kind, values in scaled.items():
            stored = np.empty_like(values)
            quantise_rows(dtypes[kind], values, weights=weighed.astype(np.float32), stored=stored)
            outputs = (y / scales) @ (stored - values).T
            wanted += float(np.square(outputs, dtype=np.float64).sum())
        found = transforms._error(scaled, OF_GATE, dtypes, weighed)
        assert found == pytest.approx(wanted, rel=0.02)


def test_a_sample_of_the_rows_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    weights: dict[TensorType, Array] = {
        T.FFN_DOWN: rng.standard_normal((400, 64)).astype(np.float32)
    }
    dtypes = {T.FFN_DOWN: Dtype.Q2}
    whole = transforms._error(weights, OF_DOWN, dtypes, np.ones(64))
    monkeypatch.setattr(transforms, "_MOST_ROWS", 100)
    sample = transforms._error(weights, OF_DOWN, dtypes, np.ones(64))
    assert sample != whole
    assert sample == pytest.approx(whole, rel=0.1)
