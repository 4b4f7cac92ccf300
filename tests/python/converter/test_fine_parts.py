# SPDX-License-Identifier: Apache-2.0
"""What keeps 8 bits: small V, and in a large head, which has two parts, rows of frequent tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import calibrated_models, tiny_checkpoints
from make.stored import Reader
from make.streamed_models import least_options
from oracle import reference
from qsf import Model
from qsf.file.layout import FINAL_UNIT, Dtype, TensorType, layer_unit
from qsf_converter.calibrate.sensitivity import measure, round_matrix
from qsf_converter.calibrate.texts import read_calibration_text
from qsf_converter.convert import convert
from qsf_converter.original.layers import Original
from qsf_converter.request import Request
from qsf_converter.rounding import plan as planning
from qsf_converter.rounding.plan import QUANT_TYPES
from qsf_converter.rounding.tiles import dequantise_tiles

convert_module = importlib.import_module("qsf_converter.convert")
N_ROWS, N_FIRST = 16400, 512


def types_of(file: Path, kind: TensorType) -> list[Dtype]:
    """The types of the tensors of a kind, in all layers."""
    with Reader(file) as reader:
        return [Dtype(t.dtype) for t in reader.tensors if t.type == kind]


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
    assert types_of(out, TensorType.V) == [dtype] * 2
    assert types_of(out, TensorType.K) == [asked] * 2
    with Reader(out) as reader:
        assert reader.header.dtype == asked
        assert [unit.dtype for unit in reader.units[1:-1]] == [asked] * 2
    traced = reference.forward(reference.load_qsf(out), [1, 5, 9])
    with Model(out, kv_type="f32", exact=True, ram_budget=4096) as opened:
        np.testing.assert_allclose(opened.logits([1, 5, 9]), traced.logits, atol=1e-4)


def test_a_target_size_chooses_the_type_of_values(tmp_path: Path) -> None:
    model = tiny_checkpoints.make_llama(tmp_path / "m", n_heads=8, n_kv_heads=2)
    out = tmp_path / "out.qsf"
    convert(model, out, target_bpw=32.0)
    largest = out.stat().st_size / 2**20
    convert(model, out, target_size=largest * 0.5, force=True)
    assert set(types_of(out, TensorType.V)) != {Dtype.Q8}


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
    ("options", "dtype"),
    [({"quant_type": "4bit"}, Dtype.Q8), ({"quant_type": "f16"}, Dtype.F16),
     ({"quant_type": "4bit", "embed_type": "f16"}, Dtype.F16)],
)  # fmt: skip
def test_a_head_of_8_bits_stays_whole(
    folder: Path, tmp_path: Path, options: dict[str, Any], dtype: Dtype
) -> None:
    convert(folder, tmp_path / "out.qsf", **options)
    assert head_of(tmp_path / "out.qsf") == [(TensorType.HEAD, N_ROWS, dtype)]


def test_small_and_tied_heads_stay_whole(tmp_path: Path) -> None:
    for name, options in (("few", {"n_vocab": 16383}), ("tied", {"tied_head": True})):
        sizes = {"n_vocab": N_ROWS, "dim": 24, "n_heads": 2, "n_kv_heads": 1, **options}
        model = tiny_checkpoints.make_llama(tmp_path / name, **sizes)
        out = tmp_path / f"{name}.qsf"
        convert(model, out, quant_type="4bit", embed_type="4bit")
        whole = [(TensorType.HEAD, 16383, Dtype.Q4)]
        assert head_of(out) == ([] if name == "tied" else whole)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("n_vocab", [2048, 1999])  # whole tiles, and rows behind the last
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
def test_a_calibrated_file_is_as_far_from_its_original_as_it_says(
    small: Path, tmp_path: Path
) -> None:
    out, text = tmp_path / "out.qsf", small.parent / "text.txt"
    report = convert(
        small, out, quant_type="3bit", embed_type="3bit", calibration=text, calibration_tokens=1024
    )
    assert [dtype for _, _, dtype in head_of(out)] == [Dtype.Q8, Dtype.Q3]
    with calibrated_models.planned(small) as (source, _):
        request = Request("3bit", calibration=str(text), calibration_tokens=1024)
        held_out = read_calibration_text(source, request)
    assert held_out is not None
    assert report.quality.evaluation is not None
    expected = calibrated_models.mean_kl(small, out, held_out.held_out)
    assert report.quality.evaluation.kl_mean == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("embed_type", [None, "4bit"])
@pytest.mark.parametrize("has_text", [False, True])
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
    exact = log_softmax(states @ head.T)
    rounded = round_matrix(dtype, head)
    for name, rows in (("HEAD", slice(0, 64)), ("HEAD_REST", slice(64, None))):
        changed = head.copy()
        changed[rows] = rounded[rows]
        other = log_softmax(states @ changed.T)
        kl = np.mean(np.sum(np.exp(exact) * (exact - other), axis=-1))
        assert costs[name][dtype] == pytest.approx(kl, rel=1e-3, abs=2e-6)


log_softmax: Callable[[NDArray[np.float32]], NDArray[np.float64]] = calibrated_models.log_softmax
