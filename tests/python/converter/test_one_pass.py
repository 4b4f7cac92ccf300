# SPDX-License-Identifier: Apache-2.0
"""`--quant-type auto`: types within the bytes of Q4_K_M, and error feedback after one pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import tiny_checkpoints
from oracle.kept_tiles import decode_tiles
from qsf import Model
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.evaluate.evaluation import evaluate
from qsf.file.layout import Dtype
from qsf_converter import convert
from qsf_converter.calibrate import one_pass
from qsf_converter.calibrate.type_choice import auto_policy, q4_k_m_bytes, with_policy
from qsf_converter.request import Request
from qsf_converter.rounding.plan import make_plan
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.sources.source import open_source

TEXT = "Once upon a time there was a little bear who lived near the big river. " * 12


def test_half_of_what_4bit_loses(
    tmp_path: Path, converted: Callable[[str, str], Path], tiny_llama_dir: Path
) -> None:
    for n_threads in (1, 2):
        convert(tiny_llama_dir, tmp_path / f"{n_threads}.qsf", quant_type="auto", threads=n_threads)
    assert (tmp_path / "1.qsf").read_bytes() == (tmp_path / "2.qsf").read_bytes()
    found = []
    for path in (tmp_path / "1.qsf", converted("tiny-llama", "4bit")):
        with Model(path) as model, Model(converted("tiny-llama", "f16")) as against:
            found.append(evaluate(model, TEXT, against=against).kl_mean)
    auto, plain = found
    assert auto is not None
    assert plain is not None
    assert auto < 0.4 * plain


@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_are_those_of_q4_k_m(tmp_path: Path, is_tied: bool) -> None:
    """Of 8 layers llama.cpp gives V and down of 0, 3, 6 and 7 more bits, and the head; those of an
    embedding that is not the head are not read with a token.
    """
    sizes = {"dim": 256, "ffn_dim": 512, "n_heads": 4, "n_kv_heads": 4, "head_dim": 64}
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", n_layers=8, n_vocab=512, tied_head=is_tied, **sizes
    )
    with open_source(folder) as source:
        policy = Request(quant_type="auto").first_policy()
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        matrices = [target for target in plan.targets if target.is_matrix]
        attention, feed = 256 * 256, 256 * 512
        fine_bits = 512 * 256 + 4 * (attention + feed)
        all_weights = (1 if is_tied else 2) * 512 * 256 + 8 * (4 * attention + 3 * feed)
        theirs = fine_bits * 6.5625 / 8 + (all_weights - fine_bits) * 4.5 / 8
        assert sum(q4_k_m_bytes(target, plan) for target in matrices) == theirs
        chosen = with_policy(plan, auto_policy(plan))
        ours = sum(target.n_bytes for target in chosen.targets if target.is_matrix)
        assert 0.97 * theirs < ours <= theirs
        dtypes = {target.name: target.dtype for target in chosen.targets if target.is_matrix}
        assert set(dtypes.values()) == {Dtype.Q4_K, Dtype.Q5_K, Dtype.Q8}
        if not is_tied:
            assert dtypes["EMBEDDING"] == Dtype.Q4_K  # as theirs


@pytest.mark.parametrize("dtype", [Dtype.Q4_NL, Dtype.Q4_K, Dtype.Q5_0, Dtype.Q5_K])
def test_wide_inputs_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    """Inputs that move together: what a column loses, its neighbours make up for."""
    rng = np.random.default_rng(3)
    common = rng.standard_normal((2048, 4))
    x = common @ rng.standard_normal((4, 768)) + 0.1 * rng.standard_normal((2048, 768))
    weights = rng.standard_normal((40, 768)).astype(np.float32)
    errors = {}
    for part_cols in (256, 4096):
        monkeypatch.setattr(one_pass, "_PART_COLS", part_cols)
        inputs = one_pass._Input(x.astype(np.float32))
        for part in inputs.parts:
            inputs.factorise(part)
        assert [part.cols.stop for part in inputs.parts][-1] == 768
        rounded = inputs.round(dtype, weights, n_threads=2)
        again = decode_tiles(dtype, rounded.tiles, *weights.shape)
        np.testing.assert_array_equal(rounded.stored, again)
        errors[len(inputs.parts)] = np.square((rounded.stored - weights) @ x.T).sum()
    plain = np.empty_like(weights)
    quantise_rows(dtype, weights, stored=plain)
    lost = np.square((plain - weights) @ x.T).sum()
    assert errors[1] < errors[3] < 0.7 * lost


def test_what_columns_make_up_for_may_exceed_the_range_of_the_rows() -> None:
    """Inputs that follow larger ones take up errors that are 40 times their weights."""
    rng = np.random.default_rng(4)
    large = rng.standard_normal((2048, 256))
    small = 0.6 * large + 0.01 * rng.standard_normal((2048, 256))
    x = np.concatenate([large, small], axis=1).astype(np.float32)
    weights = rng.standard_normal((80, 512)).astype(np.float32)
    weights[:, 256:] *= 0.001
    errors = {}
    for dtype in (Dtype.Q5_0, Dtype.Q5_K):
        inputs = one_pass._Input(x)
        inputs.factorise(inputs.parts[0])
        rounded = inputs.round(dtype, weights, n_threads=1)
        again = decode_tiles(dtype, rounded.tiles, *weights.shape)
        np.testing.assert_array_equal(rounded.stored, again)
        assert rounded.errors.n_values == weights.size
        errors[dtype] = np.square((rounded.stored - weights) @ x.T).sum()
    assert errors[Dtype.Q5_K] < errors[Dtype.Q5_0]


def test_it_is_the_default_where_it_was_measured(
    tmp_path: Path,
    tiny_llama_dir: Path,
    auto_weights: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of large models, of those without a tokenizer, nor with a request of its own."""
    bare = tiny_checkpoints.make_llama(tmp_path / "bare")
    small, large = auto_weights, 1_000_000
    cases: tuple[tuple[int, Path, dict[str, Any], str], ...] = (
        (small, tiny_llama_dir, {}, "auto"),
        (large, tiny_llama_dir, {}, "4bit"),
        (small, bare, {}, "4bit"),
        (small, tiny_llama_dir, {"quant_type": "4bit"}, "4bit"),
        (small, tiny_llama_dir, {"embed_type": "4bit"}, "4bit"),
    )
    for limit, folder, options, expected in cases:
        monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_WEIGHTS", limit)
        report = convert(folder, tmp_path / "m.qsf", force=True, **options)
        is_auto = any(note.startswith("auto, ") for note in report.notes)
        assert is_auto == (expected == "auto"), (limit, folder, options)
    monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_WEIGHTS", small)
    monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_BYTES", 1 << 60)
    report = convert(tiny_llama_dir, tmp_path / "m.qsf", force=True)
    assert any("MB are free" in warning for warning in report.warnings)
    assert not any(note.startswith("auto, ") for note in report.notes)


def test_what_auto_cannot_do_is_said(tmp_path: Path, tiny_llama_dir: Path) -> None:
    for options in ({"calibration": "bundled"}, {"embed_type": "8bit"}, {"target_size": 2}):
        with pytest.raises(QsfArgumentError, match="auto"):
            convert(tiny_llama_dir, tmp_path / "m.qsf", quant_type="auto", **options)
    bare = tiny_checkpoints.make_llama(tmp_path / "bare")
    with pytest.raises(QsfConversionError, match="tokenizer"):
        convert(bare, tmp_path / "m.qsf", quant_type="auto")
