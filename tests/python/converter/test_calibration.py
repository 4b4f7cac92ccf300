# SPDX-License-Identifier: Apache-2.0
"""Calibration layer by layer: what it yields, what it says of itself, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from make import calibrated_models
from make.stored import Reader
from oracle import reference
from qsf.errors import QsfConversionError
from qsf.file.layout import EMBEDDING_UNIT, Dtype
from qsf_converter.calibrate import calibration as calibration_module
from qsf_converter.calibrate.calibration import FEEDBACK, Calibration
from qsf_converter.calibrate.texts import CalibrationText, read_calibration_text
from qsf_converter.convert import convert
from qsf_converter.request import Request

MODELS: dict[str, Callable[[Path, Path], Path]] = {
    "llama": calibrated_models.small_llama,
    "llama-tied-biases": lambda f, t: calibrated_models.small_llama(
        f, t, tied_head=True, attention_bias=True, mlp_bias=True
    ),
    "gpt2": calibrated_models.small_gpt2,
    "gpt2-untied": lambda f, t: calibrated_models.small_gpt2(f, t, tied_head=False),
    "outliers": lambda f, t: calibrated_models.with_outliers(calibrated_models.small_llama(f, t)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    """A model's folder by its name, with text.txt beside it."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if not (folder / name / "m").exists():
            (folder / name).mkdir()
            calibrated_models.write_text(folder / name / "text.txt")
            MODELS[name](folder / name / "m", tiny_llama_dir)
        return folder / name / "m"

    return get


def samples(n: int = 5, n_tokens: int = 32, seed: int = 0) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return rng.integers(2, calibrated_models.N_VOCAB, (n, n_tokens)).astype(np.int32)


def all_data(run: Calibration) -> bytes:
    """All that is written, in file order."""
    return b"".join(
        piece.data for unit in run.units() for tensor in unit.tensors for piece in tensor.pieces
    )


def data_of(folder: Path, layers: Dtype = Dtype.Q3, **options: Any) -> dict[str, bytes]:
    """What is written of every tensor, by its name."""
    found: dict[str, bytes] = {}
    with calibrated_models.planned(folder, layers, Dtype.Q4) as (source, plan):
        run = Calibration(plan, source.checkpoint, samples(), samples(2, seed=1), **options)
        for unit in run.units():
            for tensor in unit.tensors:
                found[tensor.target.name] = b"".join(piece.data for piece in tensor.pieces)
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_all_tensors_come_in_the_order_of_the_file(name: str, made: Callable[[str], Path]) -> None:
    with calibrated_models.planned(made(name), Dtype.Q2, Dtype.Q4) as (source, plan):
        steps: list[int] = []
        run = Calibration(
            plan, source.checkpoint, samples(), samples(2, seed=1), progress=steps.append
        )
        names: list[str] = []
        n_bytes: dict[str, int] = {}
        for unit in run.units():
            for tensor in unit.tensors:
                target = tensor.target
                assert target in unit.unit.targets
                names.append(target.name)
                n_bytes[target.name] = 0
                is_head = source.facts.arch.tied_head and target.dtype == Dtype.Q4
                is_fitted = target.is_matrix and (target.unit != EMBEDDING_UNIT or is_head)
                assert (tensor.action or "").endswith(FEEDBACK) == is_fitted
                for rounded in tensor.pieces:
                    n_bytes[target.name] += len(rounded.data)
                    assert (rounded.output_error is not None) == is_fitted
                    assert rounded.errors.n_values == rounded.piece.n_rows * target.n_cols
        assert names == [target.name for target in plan.targets]
        assert n_bytes == {target.name: target.n_bytes for target in plan.targets}
        assert min(steps) >= 0
        assert sum(steps) == plan.source_bytes
        assert run.divergence is not None
        assert run.divergence.n_tokens == 2 * 31


@pytest.mark.parametrize("name", list(MODELS))
def test_the_file_is_as_far_from_its_original_as_it_says(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, out = made(name), tmp_path / "out.qsf"
    text = folder.parent / "text.txt"
    report = convert(folder, out, quant_type="2bit", calibration=text, calibration_tokens=1024)
    said = report.quality.evaluation
    assert said is not None
    held_out = text_of(folder, text, 1024).held_out
    assert said.kl_mean == pytest.approx(calibrated_models.mean_kl(folder, out, held_out), rel=1e-3)
    models = reference.load_qsf(out), reference.load_huggingface(folder)
    losses: tuple[list[Any], list[Any]] = [], []
    best: tuple[list[Any], list[Any]] = [], []
    for sample in held_out:
        for i, model in enumerate(models):
            logits = reference.forward(model, sample).logits[:-1]
            values = calibrated_models.log_softmax(logits)
            losses[i].extend(-values[np.arange(len(values)), sample[1:]])
            best[i].extend(values.argmax(axis=1))
    assert said.perplexity == pytest.approx(np.exp(np.mean(losses[0])), rel=1e-3)
    assert said.perplexity_original == pytest.approx(np.exp(np.mean(losses[1])), rel=1e-3)
    # One position may be a tie in f32.
    agreement = np.mean(np.array(best[0]) == np.array(best[1]))
    assert said.top1_agreement == pytest.approx(agreement, abs=1.1 / said.tokens)
    assert said.tokens == held_out[:, 1:].size


def text_of(folder: Path, text: Path | str, n_tokens: int) -> CalibrationText:
    with calibrated_models.planned(folder) as (source, _):
        found = read_calibration_text(
            source, Request("2bit", calibration=str(text), calibration_tokens=n_tokens)
        )
    assert found is not None
    return found


@pytest.mark.slow
def test_the_bundled_model_is_nearer_with_calibration(
    tiny_llama_dir: Path, converted: Callable[[str, str], Path]
) -> None:
    text = text_of(tiny_llama_dir, "bundled", 4096)
    held_out = text.held_out[:, :192]
    with calibrated_models.planned(tiny_llama_dir, Dtype.Q3) as (source, plan):
        run = Calibration(plan, source.checkpoint, text.fitted[:, :192], held_out)
        all_data(run)
    assert run.divergence is not None
    plain = calibrated_models.mean_kl(tiny_llama_dir, converted("tiny-llama", "3bit"), held_out)
    assert run.divergence.kl.mean() < 0.85 * plain


@pytest.mark.parametrize("name", ["llama-tied-biases", "gpt2-untied"])
def test_the_bytes_do_not_depend_on_threads_or_ranges_of_the_head(
    name: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = data_of(made(name), n_threads=1)
    assert data_of(made(name), n_threads=2) == one
    monkeypatch.setattr(calibration_module, "_HEAD_ROWS", 640)
    assert data_of(made(name), n_threads=1) == one


def test_other_samples_round_otherwise(made: Callable[[str], Path]) -> None:
    folder = made("llama")
    with calibrated_models.planned(folder, Dtype.Q3) as (source, plan):
        found = []
        for fitted, held_out in ((0, 1), (0, 2), (3, 1)):
            run = Calibration(
                plan, source.checkpoint, samples(seed=fitted), samples(2, seed=held_out)
            )
            found.append(all_data(run))
    assert found[0] == found[1]  # what is held out decides nothing
    assert found[0] != found[2]


def test_one_short_sample_is_enough(made: Callable[[str], Path]) -> None:
    with calibrated_models.planned(made("llama"), Dtype.Q2) as (source, plan):
        run = Calibration(plan, source.checkpoint, samples(1, 2), samples(1, 2, seed=1))
        assert len(all_data(run)) == sum(target.n_bytes for target in plan.targets)
        assert run.divergence is not None
        assert np.isfinite(run.divergence.kl).all()


def test_floats_are_not_fed_back(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = made("llama"), tmp_path / "out.qsf"
    report = convert(
        folder,
        out,
        quant_type="f16",
        calibration=folder.parent / "text.txt",
        calibration_tokens=512,
    )
    assert {tensor.action for tensor in report.quality.tensors} == {"exact"}
    assert report.quality.evaluation is not None
    assert report.quality.evaluation.kl_mean == pytest.approx(0, abs=1e-6)
    convert(folder, tmp_path / "plain.qsf", quant_type="f16")
    with Reader(out) as reader, Reader(tmp_path / "plain.qsf") as plain:
        for tensor, other in zip(reader.tensors, plain.tensors, strict=True):
            assert reader.read_tensor(tensor) == plain.read_tensor(other)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("model", "tensor", "at"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", (3, 5)),
        ("llama", "model.layers.2.post_attention_layernorm.weight", (7,)),
        ("llama", "model.embed_tokens.weight", (700, 3)),
        ("llama", "model.norm.weight", (2,)),
        ("llama", "lm_head.weight", (1033, 40)),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (9, 95)),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias", (11,)),
    ],
)
def test_what_is_not_finite_is_named(
    value: float,
    model: str,
    tensor: str,
    at: tuple[int, ...],
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = made(model)
    folder = tmp_path / "m"
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    weights[tensor][at] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(QsfConversionError) as caught:
        convert(
            folder,
            tmp_path / "out.qsf",
            calibration=source.parent / "text.txt",
            calibration_tokens=512,
        )
    assert str(caught.value) == f"tensor {tensor} at {list(at)}: the value is {value:g}"
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        ["m"],
        ["m", "out.qsf.calibration"],
    )


def test_meta_holds_what_was_measured(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = made("llama"), tmp_path / "out.qsf"
    text = folder.parent / "text.txt"
    report = convert(folder, out, quant_type="3bit", calibration=text, calibration_tokens=512)
    with Reader(out) as reader:
        quality = json.loads(reader.read_section("META"))["quality"]
        entries = reader.layers
    assert quality == report.quality.meta()
    assert quality["calibration"] == {
        "text": "text.txt",
        "sha256": text_of(folder, text, 512).sha256,
        "samples": 8,
        "sample_tokens": 64,
        "tokens": 512,
        "held_out_tokens": 64,
    }
    assert quality["evaluation"]["text"] == "text.txt, held out"
    assert quality["evaluation"]["tokens"] == 63
    layers = quality["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    for layer, entry in zip(layers, entries, strict=True):
        assert entry.importance == pytest.approx(layer["importance"], rel=1e-3)
        assert layer["kl_skipped"] > 0
    assert len({layer["importance"] for layer in layers}) == 3
