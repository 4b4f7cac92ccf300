# SPDX-License-Identifier: Apache-2.0
"""Key channels of equal size: the model computes the same, and few bits then keep its keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import qsf
from make.large_keys import Tensors, read_checkpoint, with_large_keys
from make.tiny_checkpoints import make_gpt2, make_llama, write_checkpoint
from qsf.evaluate.evaluation import evaluate
from qsf_converter import convert
from qsf_converter.calibrate.texts import bundled_text
from qsf_converter.rounding.key_channels import equal_exponents

TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 101, 48)]

Change = Callable[[dict[str, Any], Tensors, np.random.Generator], None]


def convert_both(monkeypatch: pytest.MonkeyPatch, hf: Path, quant_type: str) -> tuple[Path, Path]:
    """Convert with equal key channels and without."""
    equal, plain = hf.parent / "equal.qsf", hf.parent / "plain.qsf"
    convert(hf, equal, quant_type=quant_type, force=True)
    with monkeypatch.context() as patched:
        module = importlib.import_module("qsf_converter.convert")
        patched.setattr(module, "with_equal_keys", lambda plan, _checkpoint: plan)
        convert(hf, plain, quant_type=quant_type, force=True)
    return equal, plain


def logits(path: Path, **options: Any) -> NDArray[np.float32]:
    with qsf.Model(path, ram_budget=None, **options) as model:
        return np.asarray(model.logits(TOKENS))


def rewritten(folder: Path, change: Change, seed: int) -> Path:
    """Write a checkpoint again with weights of 10 bits behind the point, which f16 keeps exactly
    also where they are divided by 2^8."""
    config, tensors = read_checkpoint(folder)
    change(config, tensors, np.random.default_rng(seed))
    step = np.float32(2**-10)
    coarse = {name: np.rint(array / step) * step for name, array in tensors.items()}
    return write_checkpoint(folder, config, coarse, storage="fp32")


def large(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """Sizes around 1, some far larger and one far smaller."""
    sizes = rng.normal(0, 0.3, n) * 2.0 ** (rng.integers(4, 9, n) * (rng.random(n) < 0.2))
    return np.asarray(sizes, np.float32)


def biases(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    for name, array in tensors.items():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            tensors[name] = large(rng, array.size)


def head_norms(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            at = f"model.layers.{layer}.self_attn.{name}.weight"
            tensors[at] = 1 + large(rng, config["head_dim"])


def whole_norms(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    config |= {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors[f"{at}.post_feedforward_layernorm.weight"] = tensors.pop(
            f"{at}.input_layernorm.weight"
        )
        for name, n_heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            tensors[f"{at}.self_attn.{name}_norm.weight"] = 1 + large(
                rng, config[n_heads] * config["head_dim"]
            )


def partly_rotated(config: dict[str, Any], tensors: Tensors, rng: np.random.Generator) -> None:
    """GLM rotates neighbours, in half of a head."""
    config |= {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True}
    config["partial_rotary_factor"] = 0.5
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp"
        parts = [tensors.pop(f"{at}.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{at}.gate_up_proj.weight"] = np.concatenate(parts)
        del tensors[f"model.layers.{layer}.self_attn.o_proj.bias"]
    biases(config, tensors, rng)


CHANGES: dict[str, Change] = {
    "biases": biases,
    "norms of heads": head_norms,
    "norms of all heads": whole_norms,
    "half of a head, neighbours": partly_rotated,
}


@pytest.mark.parametrize("name", CHANGES)
@given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    heads=st.sampled_from([(4, 2), (4, 1), (2, 2)]),
    seed=st.integers(0, 2**16),
)
def test_the_model_is_the_same_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    head_dim: int,
    heads: tuple[int, int],
    seed: int,
) -> None:
    has_bias = name in ("biases", "half of a head, neighbours")
    hf = make_llama(
        tmp_path / "hf",
        seed=seed,
        head_dim=head_dim,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        attention_bias=has_bias,
        storage="fp32",
    )
    equal, plain = convert_both(monkeypatch, rewritten(hf, CHANGES[name], seed), "f16")
    assert equal.read_bytes() != plain.read_bytes()
    np.testing.assert_array_equal(logits(equal, exact=True), logits(plain, exact=True))


def test_channels_that_nothing_rotates_have_factors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has Q, K and V in one transposed matrix, and positions that are added."""

    def one_channel(config: dict[str, Any], tensors: Tensors, _rng: np.random.Generator) -> None:
        bias = tensors["transformer.h.0.attn.c_attn.bias"]
        bias[config["n_embd"] + 5] = 200

    hf = rewritten(make_gpt2(tmp_path / "hf", dim=96, storage="fp32"), one_channel, 1)
    equal, plain = convert_both(monkeypatch, hf, "f16")
    np.testing.assert_array_equal(logits(equal, exact=True), logits(plain, exact=True))
    exact = logits(plain, exact=True)
    errors = [np.abs(logits(path, kv_type="k8v16") - exact).max() for path in (equal, plain)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_heads_of_every_size_keep_large_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    hf = make_llama(tmp_path / "hf", head_dim=head_dim, n_vocab=101)
    hf = with_large_keys(hf, tmp_path / "large", size=150)
    equal, plain = convert_both(monkeypatch, hf, "8bit")
    # Activations are rounded alike in all of them, so that only the cache differs.
    differences = [
        np.square(logits(path) - logits(path, kv_type="f32")).mean() for path in (equal, plain)
    ]
    assert differences[0] < differences[1] / 4


def test_ordinary_models_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path
) -> None:
    hf = with_large_keys(tiny_llama_dir, tmp_path / "hf", size=0)
    equal, plain = convert_both(monkeypatch, hf, "8bit")
    assert equal.read_bytes() == plain.read_bytes()


def test_the_default_cache_costs_half_a_percent_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path
) -> None:
    """A trained model with the keys of Qwen 2: its first layers have biases of 150 and more."""
    hf = with_large_keys(tiny_llama_dir, tmp_path / "hf", size=150)
    equal, plain = convert_both(monkeypatch, hf, "8bit")

    def cost(path: Path, kv_type: str | None) -> float:
        """How much larger the perplexity is than with an f32 cache, two errors counted in."""
        nll = []
        for cache in ("f32", kv_type):
            with qsf.Model(path, ram_budget=None, kv_type=cache) as model:
                found = evaluate(model, bundled_text(), ctx_tokens=256, max_tokens=4096)
                nll.append(found.token_nll)
        change = nll[1] - nll[0]
        return float(np.expm1(change.mean()) + 2 * change.std() / np.sqrt(len(change)))

    assert cost(equal, None) < 0.005
    assert cost(plain, "8bit") > 0.005
    assert cost(plain, "4bit") > 0.25


@given(
    seed=st.integers(0, 2**16),
    n_heads=st.integers(1, 4),
    n_pairs=st.integers(0, 4),
    n_others=st.integers(1, 3),
    spread=st.floats(0, 8),
)
def test_exponents(seed: int, n_heads: int, n_pairs: int, n_others: int, spread: float) -> None:
    """Pairs share one, the median is left alone, and queries and keys come nearer to each other."""
    rng = np.random.default_rng(seed)
    partners = np.arange(2 * n_pairs + n_others)
    partners[: 2 * n_pairs] = np.roll(partners[: 2 * n_pairs], n_pairs)
    shape = n_heads, len(partners)
    keys, queries = (2.0 ** rng.normal(0, spread, shape) for _ in range(2))
    keys[rng.random(shape) < 0.1] = 0
    exponents = equal_exponents(keys, queries, partners)
    assert (exponents == exponents[:, partners]).all()
    assert np.abs(exponents).max() <= 8
    assert (np.abs(exponents) != 1).all()
    squares = np.square(keys)
    pairs = np.sqrt(squares + squares[:, partners])
    by_size = equal_exponents(keys, np.ones(shape), partners)
    for head in range(n_heads):
        assert (np.diff(by_size[head][np.argsort(pairs[head])]) >= 0).all() or 0 in pairs[head]
