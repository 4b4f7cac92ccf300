# SPDX-License-Identifier: Apache-2.0
"""Calibration layer by layer, of every family and of experts: what it yields, says and refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from make import calibrated_models, golden_families, mtp_models
from make.commands import Here
from make.stored import Reader
from make.tiny_checkpoints import safetensors_bytes
from oracle import reference
from qsf.errors import QsfConversionError
from qsf.file.layout import EMBEDDING_UNIT, Dtype, TensorType
from qsf_converter import convert
from qsf_converter.calibrate import calibration as calibration_module
from qsf_converter.calibrate import type_choice
from qsf_converter.calibrate.calibration import FEEDBACK, Calibration
from qsf_converter.calibrate.texts import CalibrationText, bundled_text, read_calibration_text
from qsf_converter.request import Request
from qsf_converter.rounding.plan import Policy, make_plan

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


@pytest.mark.parametrize(
    ("model", "tensor", "at", "value"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", (3, 5), np.nan),
        ("llama", "model.embed_tokens.weight", (700, 3), np.inf),
        ("llama", "lm_head.weight", (1033, 40), -np.inf),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", (9, 95), np.nan),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias", (11,), np.inf),
    ],
)
def test_what_is_not_finite_is_named(
    model: str, tensor: str, at: tuple[int, ...], value: float, made: Callable[[str], Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    source, folder = made(model), tmp_path / "m"
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    weights[tensor][at] = value
    save_file(weights, folder / "model.safetensors")
    text = source.parent / "text.txt"
    with pytest.raises(QsfConversionError) as caught:
        convert(folder, tmp_path / "out.qsf", calibration=text, calibration_tokens=512)
    assert str(caught.value) == f"tensor {tensor} at {list(at)}: the value is {value:g}"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["m"], ["m", "out.qsf.calibration"])


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


@pytest.mark.slow
def test_the_bundled_model_is_nearer_at_2_bits(
    tiny_llama_dir: Path, tmp_path: Path, here: Here
) -> None:
    """With a text as training sets have it; and what the command says meanwhile."""
    out, plain, text = tmp_path / "tiny.qsf", tmp_path / "plain.qsf", tmp_path / "stories.jsonl"
    parts = [part for part in bundled_text()[:200_000].split("\n\n") if part.strip()]
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), "utf-8")
    options = ("--quant-type", "2bit", "--calibration", text, "--calibration-tokens", 1024)
    done = here(tiny_llama_dir, out, *options, "--threads", 1, "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("measuring how much each layer matters ...\n")
    assert re.search(r"100%,.* of (?!1024 )\d+ tokens", done.stderr)
    assert re.search(r"100%,.* 1024 of 1024 tokens", done.stderr)
    assert "warning" not in done.stderr
    assert "feedback" in done.stdout
    assert "of stories.jsonl, held out" in done.stdout
    convert(tiny_llama_dir, plain, quant_type="2bit")
    held_out = text_of(tiny_llama_dir, text, 1024).held_out
    kl = [calibrated_models.mean_kl(tiny_llama_dir, file, held_out) for file in (out, plain)]
    assert kl[0] < 0.9 * kl[1]


# ---- experts, and every family ----
T = TensorType
BUNDLED = "bundled"
N_TOKENS = 1024


def test_the_report_counts_experts_that_few_tokens_met(
    tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.qsf"
    monkeypatch.setattr(calibration_module, "LEAST_TOKENS", 225)
    report = convert(
        tiny_moe_dir, path, quant_type="4bit", calibration=BUNDLED, calibration_tokens=N_TOKENS
    )
    n_fitted = int((report.quality.calibration or {})["tokens"])
    for layer in range(4):
        with Reader(path) as reader:
            shares = [unit.importance for unit in reader.experts_of(layer)]
        assert sum(shares) == pytest.approx(2, abs=1e-5)
        n_plain = sum(round(share * n_fitted) < 225 for share in shares)
        found = [t for t in report.quality.tensors if t.name == f"{layer}.EXPERTS.FFN_UP"]
        wanted = {0: "feedback", 8: "rounded"}.get(n_plain, f"feedback, {n_plain} of 8 rounded")
        assert found[0].action == wanted


def test_mixed_gives_experts_fewer_bits_than_what_all_tokens_read(
    tiny_moe_dir: Path, tmp_path: Path
) -> None:
    report = convert(tiny_moe_dir, tmp_path / "model.qsf", quant_type="mixed")
    types = {tensor.name: tensor.type for tensor in report.quality.tensors}
    assert types["1.Q"] == types["1.ATTN_OUT"] == "4bit"
    assert types["1.EXPERTS.FFN_GATE"] == types["1.EXPERTS.FFN_UP"] == "2bit"
    assert types["1.EXPERT_ROUTER"] == "f16"


def test_a_target_size_is_kept_and_used(tiny_moe_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.qsf"
    for n_bytes in (1_900_000, 2_600_000):
        convert(tiny_moe_dir, path, target_size=n_bytes / 2**20)
        assert 0.97 * n_bytes < path.stat().st_size <= n_bytes
        with Reader(path) as reader:
            for layer in range(4):
                dtypes = {tuple(t.dtype for t in e.tensors) for e in reader.experts_of(layer)}
                assert len(dtypes) == 1  # experts of a layer share their types
        path.unlink()


def test_the_size_of_a_mixture_is_known_to_the_byte(tiny_moe_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.qsf"
    convert(tiny_moe_dir, path, quant_type="3bit")
    with calibrated_models.planned(tiny_moe_dir, Dtype.Q3) as (source, _), Reader(path) as reader:
        policy = Policy(Dtype.Q3, Dtype.Q8)
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        others = ("TEXT", "TOKN", "CHAT", "META")
        sizes = {tag: reader.sections[tag].n_bytes for tag in others}
        assert type_choice.file_bytes(plan, sizes) == path.stat().st_size


def test_a_tensor_of_all_experts_never_lies_in_memory(tmp_path: Path) -> None:
    n_experts, width, dim = 8, 1024, 2048  # gate and up: 67 MB as f16, 134 MB as f32
    layer = "model.layers.0."
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.resize((rng.standard_normal(65521) * 0.02).astype(np.float32), shape)

    tensors = {
        "model.embed_tokens.weight": some(256, dim),
        "model.norm.weight": some(dim),
        **{f"{layer}{n}.weight": some(dim) for n in _NORMS},
        **{f"{layer}self_attn.{n}_norm.weight": some(64) for n in "qk"},
        **{f"{layer}self_attn.{n}_proj.weight": some(128, dim) for n in "qkv"},
        f"{layer}self_attn.o_proj.weight": some(dim, 128),
        f"{layer}mlp.gate.weight": some(n_experts, dim),
        f"{layer}mlp.experts.gate_up_proj": some(n_experts, 2 * width, dim),
        f"{layer}mlp.experts.down_proj": some(n_experts, dim, width),
    }
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors, "fp16"))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": dim, "intermediate_size": width, "moe_intermediate_size": width,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "num_experts": n_experts, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    measured = subprocess.run(
        [sys.executable, "-c", _CONVERT, tmp_path], capture_output=True, text=True, check=True
    )
    assert int(measured.stdout) < 130 << 20  # 80 MB on two cores


_NORMS = ("input_layernorm", "post_attention_layernorm")
_CONVERT = """
import sys
from pathlib import Path
from qsf_converter import convert
folder = Path(sys.argv[1])
convert(folder, folder / "model.qsf", quant_type="2bit-sym")
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


# ---- every family ----


# Of each way that streams go: norms, positions, parallel parts, experts, mixers, shared keys.
NAMES = ("phi", "bloom", "stablelm-heads", "olmo2", "gemma2", "gpt_oss", "qwen3_5_moe+mtp",
         "nemotron_h-moe", "falcon_h1-norm", "gemma4-moe", "gemma4-own", "deepseek_v2",
         "minicpm3")  # fmt: skip


def kl_of(folder: Path, dtype: Dtype) -> float:
    """KL of the calibrated model on texts that it was not fitted to."""
    with calibrated_models.planned(folder, dtype, dtype) as (source, plan):
        tokens = np.random.default_rng(3).integers(0, 67, (6, 24))
        run = Calibration(plan, source.checkpoint, tokens[:4], tokens[4:])
        for unit in run.units():
            for tensor in unit.tensors:
                assert all(piece.data for piece in tensor.pieces)
    assert run.divergence is not None
    return float(run.divergence.kl.mean())


@pytest.mark.parametrize("name", NAMES)
def test_both_streams_pass_all_layers(name: str, tmp_path: Path) -> None:
    case = golden_families.cases()[name.removesuffix("+mtp")]
    folder = (mtp_models.write_hf if "+mtp" in name else type(case).write)(case, tmp_path / "m")
    unrounded = abs(kl_of(folder, Dtype.F16))
    assert unrounded < 1e-7
    assert 10 * unrounded < kl_of(folder, Dtype.Q8) < 1e-2
