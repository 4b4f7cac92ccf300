# SPDX-License-Identifier: Apache-2.0
"""The engine against the plain numpy transformer, and both against the original implementation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.golden import MODELS, load_golden
from make.tiny_checkpoints import (
    LINEAR_SCALING,
    LLAMA3_SCALING,
    make_gpt2,
    make_llama,
    make_mistral,
)
from oracle.near import assert_near, count_near, tokens_for
from oracle.reference import forward, load_qsf
from qsf_converter import convert
from qsf_converter.rounding.plan import QUANT_TYPES

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "llama biases": (make_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama tied": (make_llama, {"tied_head": True}),
    "llama linear": (make_llama, {"rope_scaling": LINEAR_SCALING}),
    "llama llama3": (make_llama, {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0}),
    "llama multi-head": (make_llama, {"n_heads": 3, "n_kv_heads": 3, "head_dim": 8}),
    "llama one KV head": (make_llama, {"n_heads": 5, "n_kv_heads": 1, "head_dim": 10}),
    "llama bf16": (make_llama, {"storage": "bf16"}),
    "llama shards": (make_llama, {"storage": "fp32", "n_shards": 3}),
    "mistral window 8": (make_mistral, {}),
    "mistral no window": (make_mistral, {"sliding_window": None}),
    "gpt2": (make_gpt2, {}),
    "gpt2 erf": (make_gpt2, {"hidden_act": "gelu", "tied_head": False}),
    "gpt2 relu": (make_gpt2, {"hidden_act": "relu"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_layer_of_every_variant(name: str, tmp_path: Path) -> None:
    """Exact path against the reference, cut after each layer: the first wrong one shows."""
    make, options = VARIANTS[name]
    checkpoint = make(tmp_path / "whole", seed=11, n_layers=3, **options)
    for n_layers in (1, 2, 3):
        cut = tmp_path / f"cut-{n_layers}"
        shutil.copytree(checkpoint, cut)
        config = json.loads((cut / "config.json").read_text("utf-8"))
        key = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
        config[key] = n_layers
        (cut / "config.json").write_text(json.dumps(config), encoding="utf-8")
        path = tmp_path / f"{n_layers}.qsf"
        convert(cut, path, quant_type="f16")
        tokens = tokens_for(config["vocab_size"])
        with qsf.Model(path, exact=True, ram_budget=None) as model:
            got = model.logits(tokens)
        assert_near(got, forward(load_qsf(path), tokens, dtype=np.float64).logits)


# The embeddings and the head have the type of the layers too, where they by default have 8 bits.
QUANTISED = [
    *(
        (name, quant, quant)
        for name in ("llama", "gpt2")
        for quant in QUANT_TYPES
        if quant != "f16"
    ),
    ("llama", "4bit", None),
    ("mistral window 8", "4bit", None),
    ("mistral window 8", "8bit", None),
    ("gpt2", "4bit", None),
]


@pytest.mark.parametrize(("name", "quant_type", "embed_type"), QUANTISED)
def test_quantised_weights_exact_path(
    name: str, quant_type: str, embed_type: str | None, tmp_path: Path
) -> None:
    make, options = VARIANTS[name]
    path = tmp_path / "model.qsf"
    hf = make(tmp_path / "hf", seed=3, **options)
    convert(hf, path, quant_type=quant_type, embed_type=embed_type)
    tokens = tokens_for(101)
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        assert_near(model.logits(tokens), forward(load_qsf(path), tokens, dtype=np.float64).logits)


@pytest.mark.parametrize(
    ("name", "quant_type", "embed_type"), [case for case in QUANTISED if case[1] != "f32"]
)
def test_default_path_rounds_as_the_reference_does(
    name: str, quant_type: str, embed_type: str | None, tmp_path: Path
) -> None:
    """Integer activations give what the reference gives that rounds alike.

    Of short sequences: a value on the edge of two codes may fall either way when sums are ordered
    differently, and from there on everything differs a little. With 8-bit codes that is rare and
    large; with 16-bit ones one in a hundred values does, by little: a tenth of the rounding's
    own noise. So most must be near, and none further off than two ways of rounding are.
    """
    make, options = VARIANTS[name]
    path = tmp_path / "model.qsf"
    hf = make(tmp_path / "hf", seed=3, **options)
    convert(hf, path, quant_type=quant_type, embed_type=embed_type)
    assert count_near(path, quant_type, n_pairs=40) >= 28


def kl_divergence(want: NDArray[Any], got: NDArray[Any]) -> NDArray[np.float64]:
    """KL(want || got) of each row of logits, in nats."""
    p = want.astype(np.float64) - want.max(-1, keepdims=True)
    q = got.astype(np.float64) - got.max(-1, keepdims=True)
    p -= np.log(np.exp(p).sum(-1, keepdims=True))
    q -= np.log(np.exp(q).sum(-1, keepdims=True))
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return divergence


@pytest.mark.parametrize("name", MODELS)
def test_exact_path_equals_transformers(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    convert(MODELS[name], tmp_path / "f16.qsf", quant_type="f16")
    with qsf.Model(tmp_path / "f16.qsf", exact=True, ram_budget=None) as model:
        got = model.logits(golden.tokens)
    assert len(golden.tokens) == 256
    difference = float(np.abs(got - golden.logits).max())
    print(f"{name}: largest logit difference {difference:.3g}")
    assert difference <= 2e-4


# With f16 KV, and with the default of 4 bits. 8bit: what is asked of the weights. The others are
# above what was measured for the two models (bench/LOG.md); one wrongly packed tensor costs more.
KL_LIMITS = {
    ("8bit", "f16"): 2e-3,
    ("4bit", "f16"): 0.03,
    ("4bit-sym", "f16"): 0.03,
    ("4bit-nl", "f16"): 0.03,
    ("3bit", "f16"): 0.1,
    ("2bit", "f16"): 0.55,
    ("2bit-sym", "f16"): 0.55,
    ("ternary", "f16"): 1.0,
    ("ternary-dense", "f16"): 1.0,
    ("8bit", None): 0.02,
    ("4bit", None): 0.05,
}


@pytest.mark.parametrize(("quant_type", "kv_type"), KL_LIMITS)
@pytest.mark.parametrize("name", MODELS)
def test_default_path_is_close_to_transformers(
    name: str, quant_type: str, kv_type: str | None, tmp_path: Path
) -> None:
    golden = load_golden(name)
    convert(MODELS[name], tmp_path / "m.qsf", quant_type=quant_type)
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None, kv_type=kv_type) as model:
        kl = float(kl_divergence(golden.logits, model.logits(golden.tokens)).mean())
    print(f"{name} {quant_type}, KV {kv_type or 'default'}: mean KL {kl:.3g}")
    assert 0 < kl <= KL_LIMITS[quant_type, kv_type]


def n_same_continuations(name: str, quant_type: str, path: Path) -> int:
    """How many of the ten greedy continuations of 32 tokens equal the original's, f16 KV."""
    golden = load_golden(name)
    convert(MODELS[name], path, quant_type=quant_type)
    assert len(golden.prompts) == 10
    n_same = 0
    with qsf.Model(path, ram_budget=None, kv_type="f16") as model:
        for prompt, continuation in zip(golden.prompt_ids, golden.continuations, strict=True):
            tokens = list(prompt)
            while len(tokens) < len(prompt) + len(continuation):
                tokens.append(int(model.logits(tokens)[-1].argmax()))
            n_same += tokens[len(prompt) :] == continuation
    print(f"{name} {quant_type}: {n_same} of 10 greedy continuations the same")
    return n_same


@pytest.mark.parametrize("name", MODELS)
def test_f16_greedy_text_is_the_originals(name: str, tmp_path: Path) -> None:
    assert n_same_continuations(name, "f16", tmp_path / "m.qsf") == 10


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "tiny-llama",
            marks=pytest.mark.xfail(
                reason="7 of 10: rounding the weights to 8 bits alone turns three near-ties "
                "(f32 activations give the same 7); needs calibrated rounding",
                strict=True,
            ),
        ),
        "tiny-gpt2",
    ],
)
def test_8bit_greedy_text_is_the_originals(name: str, tmp_path: Path) -> None:
    assert n_same_continuations(name, "8bit", tmp_path / "m.qsf") >= 8


def test_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    golden = load_golden("tiny-llama")
    convert(MODELS["tiny-llama"], tmp_path / "m.qsf")
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
        for prompt, ids in zip(golden.prompts, golden.prompt_ids, strict=True):
            assert model.tokenize(prompt) == ids
