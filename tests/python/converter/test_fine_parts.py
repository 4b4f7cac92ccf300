# SPDX-License-Identifier: Apache-2.0
"""Stored more finely: small V, rows of frequent tokens, key channels of equal size; outliers."""

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
from make.outlier_files import naive_table
from make.refusals import refusals
from make.stored import Reader, decode_outliers
from make.streamed_models import least_options
from make.tiny_checkpoints import (
    Arrays,
    make_gpt2,
    make_llama,
    read_checkpoint,
    with_large_keys,
    write_checkpoint,
)
from oracle import reference
from oracle.kept_tiles import decode_tiles
from qsf import Model
from qsf.errors import QsfArgumentError
from qsf.evaluate.evaluation import evaluate
from qsf.file.layout import FINAL_UNIT, KEPT, Dtype, TensorType, layer_unit
from qsf_converter import convert
from qsf_converter.calibrate.sensitivity import measure, round_matrix
from qsf_converter.calibrate.texts import bundled_text
from qsf_converter.original.layers import Original
from qsf_converter.rounding import plan as planning
from qsf_converter.rounding.key_channels import equal_exponents
from qsf_converter.rounding.outliers import (
    FAR_SIGMAS,
    Gain,
    OutlierStats,
    choose_action,
    find_outliers,
    gain,
    join,
    pack_outliers,
    round_apart,
    split,
)
from qsf_converter.rounding.plan import QUANT_TYPES
from qsf_converter.rounding.quantisers import quantise_rows
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


def write_coarse(folder: Path, config: dict[str, Any], tensors: Arrays) -> Path:
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


# ---- outliers in the converter: found, decided on, taken out of their blocks and given back ----
Rows = NDArray[np.float32]
TYPES = [dtype for dtype in Dtype if dtype not in (Dtype.MIXED, *KEPT)]


def gaussian(shape: tuple[int, int], seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spiked(shape: tuple[int, int], fraction: float, sigmas: float) -> Rows:
    rows = gaussian(shape)
    flat = rows.ravel()
    places = np.random.default_rng(1).permutation(flat.size)[: round(fraction * flat.size)]
    flat[places] = np.where(flat[places] < 0, -sigmas, sigmas)
    return rows


def test_statistics_are_those_of_the_whole() -> None:
    rows = spiked((64, 200), 0.002, 9) * np.float32(0.03) + np.float32(0.01)
    stats = OutlierStats.of(rows)
    w = rows.astype(np.float64)
    centred = (w - w.mean()) / w.std()
    assert stats.mean == pytest.approx(w.mean(), rel=1e-9)
    assert stats.sigma == pytest.approx(w.std(), rel=1e-9)
    assert stats.n == w.size
    assert stats.n_near == (np.abs(centred) > 3).sum()
    assert stats.n_far == (np.abs(centred) > FAR_SIGMAS).sum() == round(0.002 * w.size)
    assert stats.near_fraction == stats.n_near / w.size
    assert stats.far_fraction == stats.n_far / w.size
    constant, empty = OutlierStats.of(np.full((4, 64), 0.1, np.float32)), OutlierStats(0, 0)
    assert (constant.n_far, empty.near_fraction, empty.far_fraction) == (0, 0, 0)
    assert constant.sigma <= 1e-8


def test_split_leaves_the_mean_of_the_others() -> None:
    rows = np.arange(2 * 70, dtype=np.float32).reshape(2, 70)
    mask = np.zeros(rows.shape, np.bool_)
    mask[0, [3, 5]] = mask[0, 64:] = mask[1, 69] = True
    plain, entries = split(rows, mask)
    assert np.array_equal(plain[~mask], rows[~mask])
    others = np.delete(np.arange(64.0), [3, 5]).mean()
    assert plain[0, 3] == plain[0, 5] == np.float32(others)
    assert (plain[0, 64:] == 0).all()  # a block of nothing else
    assert plain[1, 69] == rows[1, 64:69].mean()
    assert list(zip(entries.rows, entries.cols, entries.values, strict=True)) == [
        (row, col, rows[row, col]) for row, col in np.argwhere(mask)
    ]
    same, none = split(rows, np.zeros(rows.shape, np.bool_))
    assert same is rows
    assert len(none) == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_a_side_table_gives_the_outliers_back(dtype: Dtype) -> None:
    """In pieces, as a converter goes: what is stored and the deltas are the source's outliers."""
    rows = spiked((80, 300), 0.004, 30)
    stats = OutlierStats.of(rows)
    mask = find_outliers(rows, stats.mean, stats.sigma)
    parts, tiles, both = [], b"", []
    for start in (0, 32, 64):
        here = slice(start, start + 32)
        piece, together, entries = round_apart(dtype, rows[here], mask[here])
        tiles += piece
        both.append(together)
        parts.append(entries.below(start))
    all_of = join(parts)
    table = pack_outliers(all_of.rows, all_of.cols, all_of.values, (80, 300))
    deltas = decode_outliers(table.data, 80, 300)
    assert table.n_entries == stats.n_far == (deltas != 0).sum()
    stored = decode_tiles(dtype, tiles, 80, 300) + deltas
    assert np.array_equal(stored, np.concatenate(both))
    assert np.abs(stored - rows)[mask].max() <= 30 * 2**-10
    plain = decode_tiles(dtype, quantise_rows(dtype, rows), 80, 300)
    if dtype not in (Dtype.F16, Dtype.F32):
        assert np.square(stored - rows).sum() < 0.6 * np.square(plain - rows).sum()


# ---- what to do ----
def action(rows: Rows, dtype: int = Dtype.Q4) -> str:
    stats = OutlierStats.of(rows)
    mask = find_outliers(rows, stats.mean, stats.sigma)
    return choose_action(stats, dtype, gain(dtype, rows, mask))


@pytest.mark.parametrize("dtype", [Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.TERNARY])
def test_the_four_answers(dtype: Dtype) -> None:
    """By what is gained for the bytes; measured on Gaussian weights with values further out."""
    shape = (128, 1024)
    assert action(gaussian(shape), dtype) == "none"
    assert action(spiked(shape, 0.0001, 6), dtype) == "clamp"  # not far enough to matter
    # The best scale of a ternary block leaves so few outliers aside by itself.
    few = "clamp" if dtype == Dtype.TERNARY else "outlier table"
    assert action(spiked(shape, 0.0001, 20), dtype) == few
    assert action(spiked(shape, 0.005, 10), dtype) == "outlier table"
    more = "clamp" if dtype == Dtype.Q4 else "more bits"
    assert action(spiked(shape, 0.02, 20), dtype) == more
    for spanning in (Dtype.Q8, Dtype.F16):
        assert action(spiked((64, 512), 0.005, 20), spanning) == "none"


def test_an_entry_must_be_worth_its_bytes() -> None:
    stats = OutlierStats(0.0, 1.0, n=10000, n_near=100, n_far=50)  # 0.16 bits a weight
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.33)) == "outlier table"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.31)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(0.0, 0.0)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 0.0)) == "outlier table"
    stats.n_far = 101
    assert choose_action(stats, Dtype.Q3, Gain(1.0, 0.0)) == "more bits"
    stats.n_far = 1
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.019)) == "clamp"
    assert choose_action(stats, Dtype.Q4, Gain(1.0, 4**-0.021)) == "outlier table"


def test_a_type_that_keeps_the_weights_is_not_changed() -> None:
    """Weights -s, 0 and s of which few are not 0, also where f16 rounds s."""
    rng = np.random.default_rng(8)
    for density in (0.02, 0.004):
        few = rng.integers(-1, 2, (128, 1024)) * (rng.random((128, 1024)) < density)
        for scale in (0.03125, 1 / 30):
            rows = (few * scale).astype(np.float32)
            assert action(rows, Dtype.TERNARY) == "clamp", (density, scale)
            assert action(rows + 1e-3 * gaussian(rows.shape), Dtype.TERNARY) != "clamp"


# ---- packing ----
@given(st.data())
def test_packing_equals_the_naive_one(data: st.DataObject) -> None:
    n_rows, n_cols = data.draw(st.integers(1, 40)), data.draw(st.integers(100, 9000))
    places = data.draw(
        st.lists(st.integers(0, n_rows * n_cols - 1), min_size=1, max_size=n_cols // 100,
                 unique=True)
    )  # fmt: skip
    at = np.array(places)
    deltas = np.linspace(-3, 5, len(at)).astype(np.float32)
    rows, cols = at // n_cols, at % n_cols
    entries = [
        (int(r), int(c), float(np.float16(d))) for r, c, d in zip(rows, cols, deltas, strict=True)
    ]
    expected = naive_table(entries, n_rows)
    if expected[1] <= n_rows * n_cols // 100:
        assert tuple(pack_outliers(rows, cols, deltas, (n_rows, n_cols))) == expected
    # Entries that are too far apart are bridged.
    rows, cols = np.array([0, 3, 3]), np.array([0, 4096, 20000])
    table = pack_outliers(rows, cols, np.array([1, 2, 3], np.float32), (5, 20001))
    assert tuple(table) == naive_table([(0, 0, 1.0), (3, 4096, 2.0), (3, 20000, 3.0)], 5)


@pytest.mark.parametrize(
    ("places", "delta", "text"),
    [
        *refusals("outliers"),
        ([(1, 1)], float("nan"), "not finite"),
        ([(1, c) for c in range(11)], 1.0, "11 outliers"),
    ],
)
def test_what_no_reader_would_accept(
    places: list[tuple[int, int]], delta: float, text: str
) -> None:
    at = np.array(places, np.int64).reshape(-1, 2)
    with pytest.raises(QsfArgumentError, match=text):
        pack_outliers(at[:, 0], at[:, 1], np.full(len(at), delta, np.float32), (10, 100))
