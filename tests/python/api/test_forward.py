# SPDX-License-Identifier: Apache-2.0
"""The engine against the converter's numpy model, and against the original implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make import gguf_files
from make.golden import MODELS, load_golden
from make.gpt_oss import make_gpt_oss
from make.kind_models import (
    LAYER_NORMS,
    MIXED,
    OWN_ARCH,
    RECURRENT,
    ROUTED,
    SHARED,
    VOCAB,
    Layer,
    write_model,
)
from make.outlier_files import add_outliers, convert_fine, random_entries
from make.stored import Reader
from make.tiny_checkpoints import LINEAR_SCALING, make_gpt2, make_llama, make_mistral
from oracle.reference import assert_near, forward, load_qsf, tokens_for
from qsf.file.layout import OUTLIERS_OF, Arch, Norm, TensorType
from qsf_converter import convert
from qsf_converter.rounding.plan import QUANT_TYPES

# The embeddings and the head have the type of the layers, too, if the third is not None.
CASES: list[tuple[Any, dict[str, Any], str, str | None]] = [
    *((make_llama, {}, quant, quant) for quant in QUANT_TYPES),
    (make_llama, {"attention_bias": True, "mlp_bias": True}, "4bit", None),
    (make_llama, {"n_heads": 5, "n_kv_heads": 1, "head_dim": 10}, "8bit", None),
    (make_llama, {"storage": "fp32", "n_shards": 3, "rope_scaling": LINEAR_SCALING}, "f16", None),
    (make_mistral, {}, "f16", "f16"),
    (make_mistral, {"sliding_window": None}, "4bit", None),
    (make_gpt2, {"hidden_act": "gelu", "tied_head": False}, "f16", "f16"),
    (make_gpt2, {"hidden_act": "relu"}, "4bit", "2bit"),
]


@pytest.mark.parametrize(("make", "options", "quant_type", "embed_type"), CASES)
def test_checkpoints_of_every_weight_type(
    make: Any, options: dict[str, Any], quant_type: str, embed_type: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.qsf"
    convert(
        make(tmp_path / "hf", seed=3, **options), path, quant_type=quant_type, embed_type=embed_type
    )
    tokens = tokens_for(101)
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        assert_near(model.logits(tokens), forward(load_qsf(path), tokens).logits)


KINDS: dict[str, tuple[Sequence[Layer], dict[str, Any]]] = {
    "mixed": (MIXED, {}),
    "layer-norms": (LAYER_NORMS, {"norm": Norm.LAYER, "seed": 3}),
    "tied": (LAYER_NORMS, {"norm": Norm.LAYER, "arch": Arch(tied_head=True), "seed": 3}),
    "routed": (ROUTED, {"seed": 5}),
    "recurrent": (RECURRENT, {"seed": 6}),
    "shared": (SHARED, {"arch": OWN_ARCH, "seed": 7}),
}
WINDOW = (32, 20)


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_every_kind(name: str, tmp_path: Path) -> None:
    """Also in a longer context, which has other RoPE frequencies; with a window; with few layers.

    A layer whose keys and values another reads is never skipped.
    """
    layers, how = KINDS[name]
    path, tokens = write_model(tmp_path / "m.qsf", layers, **how), tokens_for(VOCAB, 120)
    seen = []
    for options, what in (
        ({}, {}),
        ({"max_seq_len": 300}, {}),
        ({"kv_policy": "window:32:20"}, {"window": WINDOW}),
        ({"quality": 0.8}, None),
    ):
        if len(layers) < 5 and what is None:
            continue  # there is no layer to skip
        opened: dict[str, Any] = {"exact": True, "max_seq_len": 220, "ram_budget": None, **options}
        with qsf.Model(path, **opened) as model:
            skipped = model.info.plan.skipped_layers
            seen.append(model.logits(tokens))
        assert bool(skipped) == (what is None)
        reference = load_qsf(path, opened["max_seq_len"])
        want = forward(reference, tokens, **({"skip": skipped} if what is None else what)).logits
        assert_near(seen[-1], want)
    n_all = sum(WINDOW)  # nobody has lost anything yet
    assert np.array_equal(seen[0][:n_all], seen[2][:n_all])
    scale = np.abs(seen[0]).max()
    assert all(np.abs(other[-1] - seen[0][-1]).max() > 1e-2 * scale for other in seen[1:])


# What rounding K and V may change, by the largest logit: about 1.3 times what was measured.
KV_BOUNDS = {"f16": 5e-4, "8bit": 0.01, "k8v4": 0.13, "4bit": 0.13, "k4v2": 0.5, "2bit": 0.6}


@pytest.mark.parametrize("head_dim", [16, 20, 80])
def test_keys_and_values_of_few_bits(head_dim: int, tmp_path: Path) -> None:
    """Over several spans of 256 tokens; with 4 bits and fewer they are rotated."""
    source = make_llama(tmp_path / "hf", seed=7, head_dim=head_dim, max_tokens=600)
    convert(source, tmp_path / "m.qsf", quant_type="f16")
    tokens, errors = tokens_for(101, 600), {}
    want = forward(load_qsf(tmp_path / "m.qsf"), tokens).logits
    for kv_type, bound in {"f32": 1e-4, **KV_BOUNDS}.items():
        with qsf.Model(tmp_path / "m.qsf", ram_budget=None, kv_type=kv_type) as model:
            error = np.abs(model.logits(tokens) - want).max() / np.abs(want).max()
        errors[kv_type] = error
        assert error < bound, kv_type
    assert list(errors.values()) == sorted(errors.values())


def errors(path: Path) -> float:
    """The largest error against exact arithmetic."""
    found = []
    for exact in (False, True):
        with qsf.Model(path, ram_budget=None, exact=exact, kv_type="f32") as model:
            found.append(model.logits(tokens_for(101)))
    return float(np.abs(found[0] - found[1]).max())


@pytest.mark.parametrize("kind", ["Q5_0", "3bit", "moe"])
def test_activations_of_16_bits_are_nearly_exact(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"quant_type": "4bit" if kind == "moe" else kind}
    if kind == "Q5_0":
        folder, options = make_llama(tmp_path / "hf", dim=96, head_dim=32, ffn_dim=160), {}
        source = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf_files.Type.Q5_0)
    else:
        make = make_gpt_oss if kind == "moe" else make_llama
        source = make(tmp_path / "hf", seed=3)
    convert(source, tmp_path / "8.qsf", **options)
    fine = convert_fine(source, tmp_path / "16.qsf", **options)
    assert 0 < errors(fine) < errors(tmp_path / "8.qsf") / 50


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
    with qsf.Model(tmp_path / "f16.qsf", kv_type="f16", ram_budget=None) as model:
        for ids, want in zip(golden.prompt_ids, golden.continuations, strict=True):
            list(model.generate(list(ids), temperature=0, max_tokens=len(want), stop=()))
            assert model.stats is not None
            have = list(model.stats.token_ids)
            assert have == list(want)[: len(have)]
            assert len(have) == len(want) or want[len(have)] in model.end_ids


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


# ---- outlier tables ----
T = TensorType
TOKENS = tokens_for(101)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    hf = make_llama(folder / "hf", seed=3, attention_bias=True, mlp_bias=True)
    convert(hf, folder / "plain.qsf", quant_type="4bit")
    return folder / "plain.qsf"


@pytest.mark.parametrize("kind", sorted(OUTLIERS_OF))
def test_no_side_table_is_forgotten(plain: Path, kind: int, tmp_path: Path) -> None:
    """Of each matrix alone: the exact path equals the reference, which differs from the plain."""
    path = tmp_path / "m.qsf"
    chosen = random_entries(9)
    add_outliers(plain, path, lambda t: chosen(t) if t.type == kind else [])
    want = forward(load_qsf(path), TOKENS).logits
    without = forward(load_qsf(plain), TOKENS).logits
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        assert_near(model.logits(TOKENS), want)
    assert np.abs(want - without).max() > 1e-3 * np.abs(want).max()


def test_the_plan_counts_what_is_copied(plain: Path, tmp_path: Path) -> None:
    """Gate and up are in memory together; nothing is taken of a model without outlier tables."""
    path = tmp_path / "m.qsf"
    add_outliers(plain, path, random_entries(9))
    with Reader(path) as r:
        pair = [r.tensor(1, kind) for kind in (T.FFN_GATE_OUTLIERS, T.FFN_UP_OUTLIERS)]
        taken = sum(-(-t.data_bytes // 64) * 64 for t in pair if t is not None)
    scratch = [qsf.Model.plan(p, ram_budget=None).scratch_bytes for p in (path, plain)]
    assert scratch[0] - scratch[1] == taken
