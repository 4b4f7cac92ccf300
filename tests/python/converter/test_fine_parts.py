# SPDX-License-Identifier: Apache-2.0
"""What is stored more finely: small V, rows of frequent tokens, key channels of equal size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import qsf
from make import calibrated_models, tiny_checkpoints
from make.golden_families import cases
from make.large_keys import Tensors, read_checkpoint, with_large_keys
from make.stored import Reader
from make.streamed_models import least_options
from make.tiny_checkpoints import make_gpt2, make_llama, write_checkpoint
from oracle import reference
from qsf import Model
from qsf.evaluate.evaluation import evaluate
from qsf.file.layout import FINAL_UNIT, Dtype, TensorType, layer_unit
from qsf_converter import convert
from qsf_converter.calibrate.sensitivity import measure, round_matrix
from qsf_converter.calibrate.texts import bundled_text
from qsf_converter.original.layers import Original
from qsf_converter.rounding import plan as planning
from qsf_converter.rounding.key_channels import equal_exponents
from qsf_converter.rounding.plan import QUANT_TYPES
from qsf_converter.rounding.tiles import dequantise_tiles

convert_module = importlib.import_module("qsf_converter.convert")
N_ROWS, N_FIRST = 16400, 512


@pytest.mark.parametrize(
    ("n_kv_heads", "quant_type", "dtype"),
    [(2, "4bit", Dtype.Q8), (2, "2bit-sym", Dtype.Q8), (4, "4bit", Dtype.Q4),
     (2, "ternary", Dtype.TERNARY), (2, "8bit", Dtype.Q8), (2, "f16", Dtype.F16)],
)  # fmt: skip
def test_values_that_many_heads_share_keep_8_bits(
    tmp_path: Path, n_kv_heads: int, quant_type: str, dtype: Dtype
) -> None:
    model = tiny_checkpoints.make_llama(tmp_path / "m", n_heads=8, n_kv_heads=n_kv_heads)
    out = tmp_path / "out.qsf"
    convert(model, out, quant_type=quant_type)
    asked = QUANT_TYPES[quant_type]
    with Reader(out) as reader:
        for kind, expected in ((TensorType.V, dtype), (TensorType.K, asked)):
            assert [t.dtype for t in reader.tensors if t.type == kind] == [expected] * 2
        assert reader.header.dtype == asked
        assert [unit.dtype for unit in reader.units[1:-1]] == [asked] * 2
    traced = reference.forward(reference.load_qsf(out), [1, 5, 9])
    with Model(out, kv_type="f32", exact=True, ram_budget=4096) as opened:
        np.testing.assert_allclose(opened.logits([1, 5, 9]), traced.logits, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "m"
    return tiny_checkpoints.make_llama(path, n_vocab=N_ROWS, dim=24, n_heads=2, n_kv_heads=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A model with a tokenizer, and text.txt beside it; 2048 tokens."""
    path = tmp_path_factory.mktemp("small")
    calibrated_models.write_text(path / "text.txt")
    return calibrated_models.small_llama(path / "m", tiny_llama_dir)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_LEAST_ROWS", 1024)


def head_of(file: Path) -> list[tuple[TensorType, int, Dtype]]:
    """The head's matrices as (type, rows, quantisation type), in file order."""
    with Reader(file) as reader:
        reader.verify()
        final = reader.units[-1]
        return [
            (TensorType(t.type), t.n_rows, Dtype(t.dtype)) for t in final.tensors if t.n_rows > 1
        ]


def test_rows_of_frequent_tokens_keep_8_bits(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    report = convert(folder, out, quant_type="4bit", embed_type="4bit-nl")
    parts = head_of(out)
    assert parts == [
        (TensorType.HEAD, N_FIRST, Dtype.Q8),
        (TensorType.HEAD_REST, N_ROWS - N_FIRST, Dtype.Q4_NL),
    ]
    with calibrated_models.original(folder) as original, Reader(out) as reader:
        rows = np.concatenate([part for _, part in original.head_rows()])
        for tensor, part in zip(
            reader.units[-1].tensors[-2:], (rows[:N_FIRST], rows[N_FIRST:]), strict=True
        ):
            dtype, data = Dtype(tensor.dtype), reader.read_tensor(tensor)
            stored = dequantise_tiles(dtype, data, *part.shape)
            np.testing.assert_array_equal(stored, round_matrix(dtype, part))
    names = [tensor.name for tensor in report.quality.tensors]
    assert names[-2:] == ["HEAD", "HEAD_REST"]


@pytest.mark.parametrize(
    ("changes", "options", "dtype"),
    [({}, {"embed_type": "8bit"}, Dtype.Q8), ({}, {"quant_type": "f16"}, Dtype.F16),
     ({}, {"embed_type": "f16"}, Dtype.F16), ({"n_vocab": 16383}, {"embed_type": "4bit"}, Dtype.Q4),
     ({"tied_head": True}, {"embed_type": "4bit"}, None)],
)  # fmt: skip
def test_heads_that_stay_whole(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], dtype: Dtype | None
) -> None:
    """Those of 8 bits and more, small ones, and those that are the embedding."""
    sizes = {"n_vocab": N_ROWS, "dim": 24, "n_heads": 2, "n_kv_heads": 1, **changes}
    model = tiny_checkpoints.make_llama(tmp_path / "m", **sizes)
    convert(model, tmp_path / "out.qsf", **{"quant_type": "4bit", **options})
    whole = [] if dtype is None else [(TensorType.HEAD, sizes["n_vocab"], dtype)]
    assert head_of(tmp_path / "out.qsf") == whole


@pytest.mark.parametrize(("is_streamed", "n_vocab"), [(False, 2048), (True, 1999)])
def test_the_split_changes_no_bit_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool, n_vocab: int
) -> None:
    """Both parts with 8 bits, as the whole."""
    model = tiny_checkpoints.make_llama(tmp_path / "m", n_vocab=n_vocab)
    real = planning.with_split_head
    monkeypatch.setattr(planning, "_LEAST_ROWS", 1024)
    logits = []
    for name, is_split in (("whole", False), ("split", True)):
        monkeypatch.setattr(
            convert_module,
            "with_split_head",
            lambda plan, has_free_type, is_split=is_split: real(plan, has_free_type=is_split),
        )
        out = tmp_path / f"{name}.qsf"
        convert(model, out, quant_type="4bit", embed_type="8bit")
        assert len(head_of(out)) == 1 + is_split
        budget = least_options(out, max_seq_len=64) if is_streamed else {"ram_budget": 4096}
        for threads in (1, 3):
            with Model(out, threads=threads, **budget) as opened:
                logits.append(opened.logits([1, 5, 9, 700, 3]))
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(("embed_type", "has_text"), [(None, True), ("4bit", False)])
def test_both_parts_get_a_type_by_size(
    small: Path, tmp_path: Path, embed_type: str | None, has_text: bool
) -> None:
    out = tmp_path / "out.qsf"
    text: dict[str, Any] = {"calibration": small.parent / "text.txt", "calibration_tokens": 512}
    most_mb = 0.36
    convert(small, out, target_size=most_mb, embed_type=embed_type, **(text if has_text else {}))
    assert out.stat().st_size <= most_mb * 2**20
    parts = head_of(out)
    assert [kind for kind, _, _ in parts] == [TensorType.HEAD, TensorType.HEAD_REST]
    if embed_type is not None:
        assert [dtype for _, _, dtype in parts] == [Dtype.Q8, Dtype.Q4]


@pytest.mark.usefixtures("small_is_large")
def test_each_part_costs_what_it_loses(small: Path) -> None:
    dtype = Dtype.Q2
    samples = np.random.default_rng(3).integers(2, 2048, (2, 24)).astype(np.int32)
    with calibrated_models.planned(small) as (source, plan):
        plan = planning.with_split_head(plan, has_free_type=True)
        original = Original(plan, source.checkpoint)
        costs = measure(original, samples, {"HEAD": (dtype,), "HEAD_REST": (dtype,)}).kl
        x = original.embed(samples)
        for layer in range(original.header.n_layers):
            x = original.layer(original.weights(layer_unit(layer)), x)
        states = original.final_norm(original.vectors(FINAL_UNIT), x)
        head = np.concatenate([rows for _, rows in original.head_rows()])
    exact = calibrated_models.log_softmax(states @ head.T)
    rounded = round_matrix(dtype, head)
    for name, rows in (("HEAD", slice(0, 64)), ("HEAD_REST", slice(64, None))):
        changed = head.copy()
        changed[rows] = rounded[rows]
        other = calibrated_models.log_softmax(states @ changed.T)
        kl = np.mean(np.sum(np.exp(exact) * (exact - other), axis=-1))
        assert costs[name][dtype] == pytest.approx(kl, rel=1e-3, abs=2e-6)


# ---- key channels of equal size ----


TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 101, 48)]


def convert_both(monkeypatch: pytest.MonkeyPatch, hf: Path, quant_type: str) -> tuple[Path, Path]:
    """Convert with equal key channels and without."""
    equal, plain = hf.parent / "equal.qsf", hf.parent / "plain.qsf"
    convert(hf, equal, quant_type=quant_type, force=True)
    with monkeypatch.context() as patched:
        module = importlib.import_module("qsf_converter.convert")
        patched.setattr(module, "with_equal_keys", lambda plan, _checkpoint: plan)
        convert(hf, plain, quant_type=quant_type, force=True)
    return equal, plain


def logits(path: Path, n_vocab: int = 101, **options: Any) -> NDArray[np.float32]:
    with qsf.Model(path, ram_budget=None, **options) as model:
        return np.asarray(model.logits([token % n_vocab for token in TOKENS]))


def large(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    """Sizes around 1, some far larger and one far smaller."""
    sizes = rng.normal(0, 0.3, n) * 2.0 ** (rng.integers(4, 9, n) * (rng.random(n) < 0.2))
    return np.asarray(sizes, np.float32)


def write_coarse(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write weights of 10 bits behind the point, which f16 keeps exactly also where they are
    divided by 2^8."""
    step = np.float32(2**-10)
    coarse = {name: np.rint(array / step) * step for name, array in tensors.items()}
    return write_checkpoint(folder, config, coarse, storage="fp32")


# Biases; norms of heads, and of all heads together; neighbours that turn, in half of a head.
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2", "glm"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_is_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    case, rng = cases()[name], np.random.default_rng(seed)
    tensors = case.tensors()
    for at, values in tensors.items():
        if at.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[at] = 1 + large(rng, values.size)
        elif at.endswith(("q_proj.bias", "k_proj.bias")):
            tensors[at] = large(rng, values.size)
    hf = write_coarse(tmp_path / "hf", case.config, tensors)
    equal, plain = convert_both(monkeypatch, hf, "f16")
    assert equal.read_bytes() != plain.read_bytes()
    np.testing.assert_array_equal(logits(equal, 67, exact=True), logits(plain, 67, exact=True))


def test_channels_that_nothing_rotates_have_factors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has Q, K and V in one transposed matrix, and positions that are added."""
    config, tensors = read_checkpoint(make_gpt2(tmp_path / "hf", dim=96, storage="fp32"))
    tensors["transformer.h.0.attn.c_attn.bias"][config["n_embd"] + 5] = 200
    hf = write_coarse(tmp_path / "hf", config, tensors)
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
