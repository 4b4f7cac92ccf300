# SPDX-License-Identifier: Apache-2.0
"""The original model, layer by layer; how far another is from it, and what each of its matrices
costs; api/test_families.py compares its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from make import calibrated_models, golden_families, tiny_checkpoints
from make.calibrated_models import log_softmax
from oracle import reference
from qsf.errors import QsfConversionError
from qsf.file.layout import EMBEDDING_UNIT, FINAL_UNIT, Dtype, TensorType, layer_unit, pass_units
from qsf_converter.calibrate import sensitivity
from qsf_converter.calibrate.sensitivity import Divergence, measure, measure_layers, round_matrix
from qsf_converter.convert import convert
from qsf_converter.original import layers as original_module
from qsf_converter.original.layers import Observer, Original
from qsf_converter.original.weights import linear
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.families.rules import INPUT_GROUPS
from qsf_converter.sources.source import open_source

T = TensorType
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_checkpoints.make_llama,
    "llama-biases": lambda f: tiny_checkpoints.make_llama(f, attention_bias=True, mlp_bias=True),
    "gpt2": tiny_checkpoints.make_gpt2,
    "gpt2-untied": lambda f: tiny_checkpoints.make_gpt2(f, tied_head=False),
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


# ---- how far: KL, perplexity and agreement from parts of the vocabulary ----
N_VOCAB = 61
LOGITS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "normal": lambda x: x,
    "ascending": lambda x: np.asarray(np.sort(x, axis=-1)),
    "descending": lambda x: np.asarray(-np.sort(-x, axis=-1)),
    "large": lambda x: x * 1e4,
    "large, all negative": lambda x: x * 10 - 1e4,
    "small": lambda x: x * 1e-3,
}


def in_parts(
    tokens: NDArray[np.integer], p: NDArray[np.float32], q: NDArray[np.float32], step: int
) -> Divergence:
    found = Divergence(tokens)
    for start in range(0, p.shape[-1], step):
        for sample in range(len(tokens)):
            part = slice(start, start + step)
            found.add(sample, start, p[sample][:, part], q[sample][:, part])
    return found


def made(kind: str) -> tuple[NDArray[np.integer], NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(2)
    p = LOGITS[kind](rng.standard_normal((3, 9, N_VOCAB)) * 3).astype(np.float32)
    noise = rng.standard_normal(p.shape) * (1e-3 if kind == "small" else 0.7)
    return rng.integers(0, N_VOCAB, (3, 9)), p, (p + noise).astype(np.float32)


@pytest.mark.parametrize("kind", list(LOGITS))
@pytest.mark.parametrize("step", [N_VOCAB, 31, 7, 1])
def test_parts_of_the_vocabulary_give_what_the_whole_gives(kind: str, step: int) -> None:
    tokens, p, q = made(kind)
    found = in_parts(tokens, p, q, step)
    log_p, log_q = log_softmax(p[:, :-1]), log_softmax(q[:, :-1])
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    # Logits of 1e4 are 1e-3 apart as f32; the sums are f64.
    tolerance = 1e-9 if np.abs(p).max() < 1e3 else 2e-3
    np.testing.assert_allclose(found.kl, kl, rtol=1e-5, atol=tolerance)
    assert found.kl.shape == (3, 8)
    assert found.n_tokens == 24
    expected = []
    for values in (log_p, log_q):
        chosen = np.take_along_axis(values, tokens[:, 1:, None], axis=-1)
        expected.append(-chosen.mean())
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found.perplexities, np.exp(expected), rtol=1e-6)
    same = p[:, :-1].argmax(axis=-1) == q[:, :-1].argmax(axis=-1)
    assert found.top1_agreement == same.mean()


def test_the_first_token_is_not_predicted_and_the_last_predicts_nothing() -> None:
    tokens, p, q = made("normal")
    before = in_parts(tokens, p, q, 20)
    p[:, -1], q[:, -1] = 1e3, -1e3
    tokens = tokens.copy()
    tokens[:, 0] = 0
    after = in_parts(tokens, p, q, 20)
    np.testing.assert_array_equal(before.kl, after.kl)
    assert before.perplexities == after.perplexities


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    tokens = np.zeros((1, 2), np.int32)
    p, q = np.zeros((1, 2, 6), np.float32), np.zeros((1, 2, 6), np.float32)
    p[0, 0, [1, 4]] = 1
    q[0, 0, 1] = 1
    assert all(in_parts(tokens, p, q, step).top1_agreement == 1 for step in (1, 2, 3, 6))
    q[0, 0, [1, 4]] = 0, 1
    assert all(in_parts(tokens, p, q, step).top1_agreement == 0 for step in (1, 2, 3, 6))


# ---- sensitivity, against one changed model at a time, computed from the start ----
TYPES = (Dtype.Q2, Dtype.Q4)
SENSITIVE: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: tiny_checkpoints.make_llama(folder, n_layers=3),
    "llama-tied": lambda folder: tiny_checkpoints.make_llama(
        folder, tied_head=True, attention_bias=True, mlp_bias=True
    ),
    "gpt2": tiny_checkpoints.make_gpt2,
}


@pytest.fixture(params=list(SENSITIVE))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Original]:
    yield from open_original(SENSITIVE[request.param](tmp_path / "model"))


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Original]:
    yield from open_original(SENSITIVE["llama"](tmp_path / "model"))


def open_original(folder: Path) -> Iterator[Original]:
    with open_source(folder) as source:
        plan = make_plan(source.family, source.facts, source.checkpoint, Policy(Dtype.Q4, Dtype.Q8))
        yield Original(plan, source.checkpoint)


def measure_types(measured: tuple[Dtype, ...], *arguments: Any) -> sensitivity.Sensitivity:
    """Measure with streams of these types in layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "MEASURED", measured)
        return measure(*arguments)


def short_samples(n_samples: int = 2, n_tokens: int = 24) -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, 101, (n_samples, n_tokens)).astype(np.int32)


def all_candidates(
    model: Original, types: tuple[Dtype, ...] = TYPES
) -> dict[str, tuple[Dtype, ...]]:
    units = pass_units(model.header.n_layers)
    return {t.name: types for unit in units for t in model.targets(unit) if t.is_matrix}


def predict(
    model: Original,
    samples: NDArray[np.int32],
    changed: tuple[str, Dtype] | None = None,
    skipped: int | None = None,
) -> NDArray[np.float64]:
    """Log-probabilities of the model with one matrix rounded, or one layer skipped."""
    n_layers = model.header.n_layers
    units = {unit: model.weights(unit) for unit in pass_units(n_layers)}
    if changed is not None:
        name, dtype = changed
        for unit, weights in units.items():
            for target in model.targets(unit):
                if target.name == name:
                    kind = TensorType(target.rule.target or 0)
                    weights[kind] = round_matrix(dtype, weights[kind])
    table = units[EMBEDDING_UNIT][TensorType.EMBEDDING]
    # The positions, if there are any, are what the embedding adds to the rows of the table.
    exact = model.weights(EMBEDDING_UNIT)[TensorType.EMBEDDING]
    x = table[samples] + (model.embed(samples) - exact[samples])
    for layer in range(n_layers):
        if layer != skipped:
            x = model.layer(units[layer_unit(layer)], x)
    head = table if model.arch.tied_head else units[FINAL_UNIT][TensorType.HEAD]
    logits = (model.final_norm(units[FINAL_UNIT], x) @ head.T).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    values: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return values


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def test_every_matrix_costs_what_a_model_computed_from_the_start_loses(model: Original) -> None:
    samples = short_samples()
    found = measure_types(TYPES, model, samples, all_candidates(model))
    base = predict(model, samples)
    assert list(found.kl) == list(all_candidates(model))
    for name, by_type in found.kl.items():
        assert tuple(by_type) == found.measured[name] == TYPES
        for dtype, value in by_type.items():
            expected = divergence(base, predict(model, samples, (name, dtype)))
            # Logits of about 10 in f32: their roundings are about 1e-6, and come in linearly.
            assert value == pytest.approx(expected, rel=1e-3, abs=2e-6), (name, dtype)
        assert by_type[Dtype.Q2] > by_type[Dtype.Q4] > 0


def test_every_layer_matters_as_much_as_skipping_it_changes(model: Original) -> None:
    samples = short_samples()
    layers = measure_layers(model, samples)
    base = predict(model, samples)
    x = model.embed(samples)
    for layer, found in enumerate(layers):
        out = model.layer(model.weights(layer_unit(layer)), x)
        norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(out, axis=-1)
        assert found.layer == layer
        assert found.cosine == pytest.approx(np.mean(np.sum(x * out, axis=-1) / norms), rel=1e-4)
        expected = divergence(base, predict(model, samples, skipped=layer))
        assert found.kl_skipped == pytest.approx(expected, rel=1e-3, abs=2e-6)
        x = out
    assert len(layers) == model.header.n_layers


def test_types_that_are_not_measured_are_scaled_by_their_output_error(llama: Original) -> None:
    samples = short_samples()
    types = (Dtype.Q8, Dtype.Q2, Dtype.Q3, Dtype.Q4)
    found = measure_types((Dtype.Q2, Dtype.Q4), llama, samples, all_candidates(llama, types))
    for name, by_type in found.kl.items():
        assert list(by_type) == [Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.Q8]
        if name in ("EMBEDDING", "HEAD"):
            assert len(found.measured[name]) == 4
            continue
        assert found.measured[name] == (Dtype.Q2, Dtype.Q4)
        errors = found.output_error[name]
        for dtype, nearest in ((Dtype.Q3, Dtype.Q2), (Dtype.Q8, Dtype.Q4)):
            expected = by_type[nearest] * errors[dtype] / errors[nearest]
            assert by_type[dtype] == pytest.approx(expected, rel=1e-12)
    # KL is quadratic in a small change, so what is scaled is near what would be measured.
    measured = measure_types(types, llama, samples, all_candidates(llama, types))
    scaled = [found.kl[name][Dtype.Q8] for name in found.output_error]
    exact = [measured.kl[name][Dtype.Q8] for name in found.output_error]
    assert sum(scaled) == pytest.approx(sum(exact), rel=0.3)


def test_output_errors_are_those_of_the_matrix_on_its_inputs(llama: Original) -> None:
    samples = short_samples()
    found = measure_types(TYPES, llama, samples, {"0.Q": TYPES})
    seen = []
    weights = llama.weights(layer_unit(0))
    llama.layer(
        weights,
        llama.embed(samples),
        lambda kinds, values: seen.append(values) if TensorType.Q in kinds else None,
    )
    exact = np.concatenate(seen) @ weights[TensorType.Q].T
    for dtype in TYPES:
        lost = np.concatenate(seen) @ round_matrix(dtype, weights[TensorType.Q]).T - exact
        expected = np.sum(lost**2) / np.sum(exact**2)
        assert found.output_error["0.Q"][dtype] == pytest.approx(expected, rel=1e-3)


def test_the_same_samples_give_the_same_numbers(model: Original) -> None:
    samples = short_samples()
    first = measure(model, samples, all_candidates(model))
    assert measure(model, samples, all_candidates(model)) == first
    assert first.n_tokens == samples.size
    assert first.layers == measure_layers(model, samples)
    for layer in first.layers:
        assert first.importance(layer.layer) == layer.kl_skipped


def test_progress_counts_the_tokens_of_every_pass(model: Original) -> None:
    calls: list[tuple[int, int]] = []
    samples = short_samples()
    measure(model, samples, all_candidates(model), progress=lambda *call: calls.append(call))
    n_each = samples.size
    assert [done for done, _ in calls] == [n_each * (i + 1) for i in range(len(calls))]
    assert {total for _, total in calls} == {n_each * len(calls)}


def spoil(folder: Path, name: str, value: float) -> Path:
    """Give one weight of a checkpoint another value."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].flat[5] = value
    data = tiny_checkpoints.safetensors_bytes(tensors, "fp32")
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("model.embed_tokens.weight", "EMBEDDING"),
        ("model.layers.1.mlp.up_proj.weight", "1.FFN_UP"),
        ("lm_head.weight", "HEAD"),
    ],
)
def test_weights_that_cannot_be_rounded_are_named(tmp_path: Path, tensor: str, name: str) -> None:
    folder = spoil(tiny_checkpoints.make_llama(tmp_path / "m", storage="fp32"), tensor, 1e6)
    samples = np.zeros((1, 8), np.int32)
    for model in open_original(folder):
        with pytest.raises(QsfConversionError, match=rf"{name} as f16: 1e\+06 is larger"):
            measure(model, samples, {name: (Dtype.F16,)})


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "the value is nan"), (3e38, "NaN or infinity")]
)
def test_a_model_that_computes_nan_is_refused(
    tmp_path: Path, tensor: str, value: float, message: str
) -> None:
    folder = spoil(tiny_checkpoints.make_llama(tmp_path / "m", storage="fp32"), tensor, value)
    for model in open_original(folder):
        with np.errstate(all="ignore"), pytest.raises(QsfConversionError, match=message):
            measure_layers(model, short_samples())


def test_own_embeddings_and_keys_of_others(tmp_path: Path) -> None:
    """What each costs is what the numpy reference loses with it, from the stored tensors."""
    folder = golden_families.cases()["gemma4-own"].write(tmp_path / "m")
    convert(folder, tmp_path / "m.qsf", quant_type="f16", embed_type="f16")
    exact = reference.load_qsf(tmp_path / "m.qsf")
    names = {"OWN_TABLE": "own_table", "EMBEDDING": "embedding", "1.V": "layer.1.v",
             "2.K": "layer.2.k", "3.Q": "layer.3.q"}  # fmt: skip
    samples = np.random.default_rng(3).integers(0, 67, (2, 24)).astype(np.int32)

    def predict(model: reference.Model) -> NDArray[np.float64]:
        rows = [reference.forward(model, sample).logits for sample in samples]
        return calibrated_models.log_softmax(np.stack(rows))

    for model in open_original(folder):
        found = measure_types(TYPES, model, samples, dict.fromkeys(names, TYPES))
        assert set(found.kl) == set(names)
        for name, key in names.items():
            for dtype, value in found.kl[name].items():
                rounded = round_matrix(dtype, exact.weights[key].astype(np.float32))
                changed = dataclasses.replace(exact, weights={**exact.weights, key: rounded})
                expected = divergence(predict(exact), predict(changed))
                assert value == pytest.approx(expected, rel=2e-3, abs=2e-6), (name, dtype)
            assert found.kl[name][Dtype.Q2] > 1e-5, name


def test_so_many_tokens_keep_the_streams_in_memory(llama: Original) -> None:
    candidates = all_candidates(llama, (Dtype.Q2, Dtype.Q3, Dtype.Q4))
    n_matrices, n_fixed = 3 * 7, 3 * 2 + 3 + 3  # embedding and head at 3 types, skips, spare
    token_bytes = 80 * 4
    assert sensitivity.n_tokens_within(llama, candidates) == sensitivity.MOST_TOKENS
    memory_bytes = 400 * token_bytes * (2 * n_matrices + n_fixed)
    assert sensitivity.n_tokens_within(llama, candidates, memory_bytes) == 400
    assert sensitivity.n_tokens_within(llama, candidates, 0) == 1
