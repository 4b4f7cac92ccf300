# SPDX-License-Identifier: Apache-2.0
"""The reference against transformers (stored, and live when installed) and against itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import tiny_checkpoints
from make.golden import MODELS, load_golden
from oracle import reference

TOKENS = np.random.default_rng(5).integers(0, 101, 48)
BIASED = {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh", "tied_head": True}

CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny_checkpoints.make_llama, {}),
    "llama-biases": (tiny_checkpoints.make_llama, BIASED),
    "llama-mlp-bias": (tiny_checkpoints.make_llama, {"mlp_bias": True, "hidden_act": "relu"}),
    "llama-linear": (
        tiny_checkpoints.make_llama,
        {"rope_scaling": tiny_checkpoints.LINEAR_SCALING, "rope_theta": 500.0},
    ),
    "llama-llama3": (
        tiny_checkpoints.make_llama,
        {"rope_scaling": tiny_checkpoints.LLAMA3_SCALING, "n_heads": 6, "head_dim": 40, "dim": 96},
    ),
    "mistral-window": (tiny_checkpoints.make_mistral, {"sliding_window": 8}),
    "mistral-no-window": (tiny_checkpoints.make_mistral, {"sliding_window": None}),
    "gpt2": (tiny_checkpoints.make_gpt2, {}),
    "gpt2-erf-untied": (tiny_checkpoints.make_gpt2, {"hidden_act": "gelu", "tied_head": False}),
    "bf16-shards": (tiny_checkpoints.make_llama, {"storage": "bf16", "n_shards": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_bundled_models_equal_golden(name: str) -> None:
    golden = load_golden(name)
    model = reference.load_huggingface(MODELS[name])
    assert golden.tokens[0] == 0
    assert golden.logits.shape == (256, 2048)
    assert len(golden.tokens) == 256
    logits = reference.forward(model, golden.tokens).logits
    assert logits.dtype == np.float32
    assert np.abs(logits - golden.logits).max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_golden_continuations_are_the_likeliest_tokens(name: str) -> None:
    golden = load_golden(name)
    model = reference.load_huggingface(MODELS[name])
    assert len(golden.prompts) == len(golden.prompt_ids) == len(golden.continuations) == 10
    for prompt, new in zip(golden.prompt_ids, golden.continuations, strict=True):
        assert len(new) == 32
        logits = reference.forward(model, prompt + new).logits
        likeliest = logits[len(prompt) - 1 : -1].argmax(axis=1)
        assert likeliest.tolist() == new


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_weight_and_setting_matters(name: str, tmp_path: Path) -> None:
    # A test that compares logits can only find a dropped weight if the weight changes them.
    make, options = CHECKPOINTS[name]
    folder = make(tmp_path, seed=3, **options)
    model = reference.load_huggingface(folder)
    logits = reference.forward(model, TOKENS).logits
    for weight, values in model.weights.items():
        # A K bias without RoPE adds the same to all scores of a query, which softmax ignores.
        if weight.endswith(".k_bias") and model.config.positions == "learned":
            continue
        changed = dataclasses.replace(model, weights={**model.weights, weight: values * 1.5})
        assert np.abs(reference.forward(changed, TOKENS).logits - logits).max() > 1e-3, weight
    settings: dict[str, Any] = {"norm_epsilon": 0.1}
    if model.config.positions == "rope":
        settings |= {"rope_theta": 99.0, "rope_interleaved": True, "rope_dims": 8}
    if model.config.rope_scaling != "none":
        settings |= {"rope_factor": 2.0}
    if model.config.window_tokens:
        settings |= {"window_tokens": model.config.window_tokens + 1}
    for setting, value in settings.items():
        changed = dataclasses.replace(
            model, config=dataclasses.replace(model.config, **{setting: value})
        )
        assert np.abs(reference.forward(changed, TOKENS).logits - logits).max() > 1e-3, setting


def test_float64_is_near_float32(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_llama(tmp_path))
    exact = reference.forward(model, TOKENS, dtype=np.float64)
    assert exact.logits.dtype == np.float64
    assert all(value.dtype == np.float64 for value in exact.values.values())
    assert np.abs(reference.forward(model, TOKENS).logits - exact.logits).max() < 2e-5


def test_a_prefix_has_the_same_logits(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_mistral(tmp_path))
    whole = reference.forward(model, TOKENS, dtype=np.float64).logits
    part = reference.forward(model, TOKENS[:20], dtype=np.float64).logits
    np.testing.assert_allclose(part, whole[:20], rtol=0, atol=1e-12)


def test_window_hides_what_is_too_far_back() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(6, 1, 4)), rng.normal(size=(6, 1, 4))
    v = np.zeros((6, 1, 4))
    v[1] = 1.0
    seen = reference.attend(q, k, v, window_tokens=3)[:, 0] > 0
    assert seen.tolist() == [False, True, True, True, False, False]


def test_grouped_heads_equal_repeated_ones() -> None:
    rng = np.random.default_rng(1)
    q = rng.normal(size=(5, 6, 8))
    k, v = rng.normal(size=(5, 2, 8)), rng.normal(size=(5, 2, 8))
    repeated = reference.attend(q, k.repeat(3, axis=1), v.repeat(3, axis=1))
    np.testing.assert_array_equal(reference.attend(q, k, v), repeated)


def rope_config(**options: Any) -> reference.Config:
    return reference.Config(
        1, 32, 1, 1, 16, norm="rms", activation="silu", positions="rope", **options
    )


def test_interleaved_rope_is_split_rope_with_dimensions_reordered() -> None:
    x = np.random.default_rng(2).normal(size=(9, 3, 16))
    order = np.arange(16).reshape(2, 8).T.ravel()  # split dimension of each interleaved one
    split = reference.rotate(x, rope_config())
    interleaved = reference.rotate(x[..., order], rope_config(rope_interleaved=True))
    np.testing.assert_array_equal(interleaved, split[..., order])


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_leaves_the_rest_and_rotates_by_position(interleaved: bool) -> None:
    config = rope_config(rope_dims=6, rope_interleaved=interleaved)
    x = np.random.default_rng(2).normal(size=(9, 3, 16))
    out = reference.rotate(x, config)
    np.testing.assert_array_equal(out[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(out[0], x[0])
    a, b = (0, 1) if interleaved else (0, 3)  # the first pair turns one radian a position
    turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * np.arange(9))[:, None]
    np.testing.assert_allclose(out[..., a] + 1j * out[..., b], turned, atol=1e-12)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = reference.rope_frequencies(rope_config())
    scaled = reference.rope_frequencies(
        rope_config(rope_scaling="llama3", rope_factor=8.0, rope_original_tokens=32)
    )
    turns = 32 * plain / (2 * np.pi)
    assert (scaled[turns > 4] == plain[turns > 4]).all()
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert (turns > 4).any()
    assert (turns < 1).any()
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_activations_are_rounded_per_block() -> None:
    x = np.zeros((2, 70), np.float32)
    x[0, :3] = [127.0, 0.5, -1.5]  # scale 1: ties go up
    x[0, 64:66] = [-4.0, 1.0]
    codes, scales = reference.quantise_activations(x, 8)
    assert codes.shape == (2, 2, 64)
    assert codes[0, 0, :4].tolist() == [127, 1, -1, 0]
    assert codes[0, 1, :3].tolist() == [-127, 32, 0]
    np.testing.assert_array_equal(scales, np.array([[1, 4 / 127], [0, 0]], np.float32))
    assert not codes[1].any()
    halves, scales = reference.quantise_activations(x, 8, 32)
    assert halves.shape == (2, 3, 32)
    assert halves[0, 0, :4].tolist() == [127, 1, -1, 0]
    np.testing.assert_array_equal(scales[0], np.array([1, 0, 4 / 127], np.float32))


def test_integer_activations_change_only_quantised_matrices(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_llama(tmp_path))
    with pytest.raises(ValueError, match="no matrix"):
        reference.forward(model, TOKENS, activations="integer")
    plain = reference.forward(model, TOKENS)
    only_up = dataclasses.replace(model, integer={"layer.1.ffn_up": 8})
    rounded = reference.forward(only_up, TOKENS, activations="integer")
    difference = reference.first_difference(rounded.values, plain.values, 0.0)
    assert difference is not None
    assert difference.startswith("layer.1.ffn_hidden:")
    assert 1e-4 < np.abs(rounded.logits - plain.logits).max() < 0.2


@pytest.mark.parametrize("bits", [8, 16])
def test_product_equals_the_integer_form(bits: int) -> None:
    # The engine sums integers per block and scales afterwards; the reference scales first.
    rng = np.random.default_rng(4)
    codes, scales = reference.quantise_activations(
        rng.normal(size=(3, 128)).astype(np.float32), bits
    )
    weight_codes = rng.integers(0, 16, (5, 2, 64))
    weight_scales, mins = rng.uniform(0.1, 1, (5, 2)), rng.normal(size=(5, 2))
    dots = np.einsum("tbc,rbc->trb", codes.astype(np.int64), weight_codes)
    sums = codes.astype(np.int64).sum(axis=2)[:, None]
    per_block = dots * weight_scales * scales[:, None] + mins * scales[:, None] * sums
    values = (weight_codes * weight_scales[..., None] + mins[..., None]).reshape(5, 128)
    scaled = (codes * scales[..., None].astype(np.float64)).reshape(3, 128)
    np.testing.assert_allclose(scaled @ values.T, per_block.sum(axis=2), atol=1e-9)


def test_f16_cache_rounds_k_and_v(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_llama(tmp_path))
    plain = reference.forward(model, TOKENS)
    rounded = reference.forward(model, TOKENS, kv="f16")
    for name in ("layer.0.k_rope", "layer.0.v"):
        wanted = plain.values[name].astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(rounded.values[name], wanted)
    assert 0 < np.abs(rounded.logits - plain.logits).max() < 0.02


def test_first_difference_names_the_value_and_the_place(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_gpt2(tmp_path))
    values = reference.forward(model, TOKENS).values
    assert reference.first_difference(values, values, 0.0) is None
    changed = {name: value.copy() for name, value in values.items()}
    changed["layer.1.q_rope"][7, 2] += 0.5
    changed["layer.1.ffn_out"][0, 0] = np.nan
    found = reference.first_difference(changed, values, 1e-3)
    assert found == "layer.1.q_rope: 0.5 at token 7, element 2"
    changed["layer.0.v"][3, 1] = np.nan
    found = reference.first_difference(changed, values, 1e-3)
    assert found == "layer.0.v: nan at token 3, element 1"


def test_greedy_stops_at_end_of_text(tmp_path: Path) -> None:
    model = reference.load_huggingface(tiny_checkpoints.make_llama(tmp_path))
    new = reference.greedy(model, [0, 5], 6)
    assert len(new) == 6
    stop = new[2]
    assert reference.greedy(model, [0, 5], 6, eos_id=stop) == new[: new.index(stop) + 1]


def test_tokenizer_is_copied_when_asked_for(tmp_path: Path) -> None:
    source = MODELS["tiny-llama"]
    without = tiny_checkpoints.make_llama(tmp_path / "without")
    assert not (without / "tokenizer.json").exists()
    folder = tiny_checkpoints.make_llama(tmp_path / "with", n_vocab=2048, tokenizer_from=source)
    copied = (folder / "tokenizer.json").read_bytes()
    assert copied == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_8bit_qsf_file_is_near_golden(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    model = load_converted(MODELS[name], tmp_path / "8bit.qsf", "8bit")
    matrices = {"layer.5.q", "layer.5.attn_out", "layer.5.ffn_down", "embedding"}
    assert matrices <= model.integer.keys()
    assert set(model.integer.values()) == {16}
    assert not any("norm" in weight or "bias" in weight for weight in model.integer)
    run = reference.forward(model, golden.tokens, activations="integer", kv="f16")
    wanted = log_softmax(golden.logits.astype(np.float64))
    got = log_softmax(run.logits.astype(np.float64))
    divergence = (np.exp(wanted) * (wanted - got)).sum(axis=1).mean()
    assert 0 < divergence < 2e-3


def load_converted(folder: Path, path: Path, quant_type: str) -> reference.Model:
    converter = pytest.importorskip("qsf_converter")
    converter.convert(folder, path, quant_type=quant_type)
    return reference.load_qsf(path)


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
