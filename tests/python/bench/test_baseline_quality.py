"""Quality beside llama.cpp: bench/baseline_quality.py, and our logits beside the real one's."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from make import bench_baselines, gguf_files
from qsf.evaluate.evaluation import evaluate
from qsf.model import Model
from qsf_bench.models import random_gguf
from qsf_bench.models.shapes import Shape
from qsf_converter.convert import convert
from qsf_converter.original.logits import open_original

N_TOKENS = 60

Ask = Callable[..., None]


@pytest.fixture(scope="module")
def quality(project_root: Path) -> Iterator[ModuleType]:
    sys.path.append(str(project_root / "bench"))
    yield importlib.import_module("baseline_quality")
    sys.path.remove(str(project_root / "bench"))


@pytest.fixture(scope="module")
def quantiser(quality: ModuleType) -> ModuleType:
    return importlib.import_module("llama_quantiser")


def test_rows_of_q_and_k_are_turned_in_the_same_pairs(quantiser: ModuleType) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)  # two heads of four
    found = quantiser.interleave(rows, 2)[:, 0] / 2
    assert found.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_tensor_of_a_llama_has_a_name(quantiser: ModuleType, tiny_llama_dir: Path) -> None:
    names = safetensors.numpy.load_file(tiny_llama_dir / "model.safetensors")
    found = {quantiser.gguf_name(name) for name in names}
    assert len(found) == len(names)
    assert {"token_embd.weight", "output_norm.weight", "blk.5.ffn_down.weight"} <= found


def run(quality: ModuleType, patch: pytest.MonkeyPatch, *words: object) -> None:
    patch.setattr(sys, "argv", ["baseline_quality.py", *map(str, words)])
    quality.main()


def test_rows_of_qsf_files(
    quality: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_llama_dir: Path,
    tiny_llama_8bit: Path,
    tiny_llama_4bit: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl named Lily. She had a cat. " * 3)
    out = tmp_path / "out.json"
    words = (tiny_llama_dir, text, "--types", "--ctx", 24, "--windows", 2, "--json", out)
    run(quality, monkeypatch, *words, "--qsf", tiny_llama_8bit, tiny_llama_4bit)
    eight, four = json.loads(out.read_text())
    assert 8 < eight["bits_per_weight"] < 9
    assert 0 < eight["kl_mean"] < four["kl_mean"] / 8
    assert four["kl_mean"] < 0.1
    assert abs(eight["perplexity_change_percent"]) < 2
    assert eight["tokens"] == 2 * 23  # all but BOS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"original: perplexity {eight['against_perplexity']:.4f}"
    assert lines[4].startswith(f"| {tiny_llama_8bit.name} | qsf |")


def test_without_the_baseline(
    quality: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    """It is noticed before anything long is computed: the text does not even exist."""
    absent = tmp_path / "absent"
    words = (tiny_llama_dir, absent, "--baseline-python")
    with pytest.raises(SystemExit, match=f"{absent}: No such file"):
        run(quality, monkeypatch, *words, absent)
    # In an empty folder and isolated, no packages are found but the standard ones.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit) as caught:
        run(quality, monkeypatch, *words, python)
    message = str(caught.value)
    assert "No module named" in message
    assert "llama-cpp-python and gguf" in message


# ---- the real llama.cpp ----


@pytest.fixture
def ask_llama(project_root: Path) -> Ask:
    """Return what runs a command of bench/llama_quantiser.py."""
    python = bench_baselines.baseline_python()
    program = str(project_root / "bench" / "llama_quantiser.py")

    def ask(*words: str | Path) -> None:
        subprocess.run([python, program, *map(str, words)], check=True, capture_output=True)

    return ask


def llama_logits(ask_llama: Ask, gguf: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return llama.cpp's logits after each token but the last: [n_tokens - 1, n_vocab]."""
    folder = gguf.parent
    np.save(folder / "tokens.npy", np.array([tokens], np.int32))
    ask_llama("logits", gguf, folder / "tokens.npy", folder / "logits.npy")
    found: npt.NDArray[np.float32] = np.load(folder / "logits.npy")[0]
    return found


def check_agreement(
    quality: ModuleType, theirs: npt.NDArray[np.float32], ours: Path, original: Path
) -> None:
    """Both are the original but for rounding, and so are alike."""
    tokens = text_tokens()
    with (
        Model(ours, ram_budget=None, threads=1, kv_type="f16", max_seq_len=N_TOKENS) as model,
        open_original(original) as source,
    ):
        mine = evaluate(model, tokens, against=source)
        other = evaluate(quality.StoredLogits(theirs[None]), tokens, against=source)
    assert other.kl_mean is not None
    assert other.kl_mean < 1e-5
    assert math.log(other.perplexity) == pytest.approx(math.log(mine.perplexity), rel=1e-3)


def text_tokens() -> list[int]:
    """Return tokens that every model of the tests has."""
    return [1, *np.random.default_rng(0).integers(3, 200, N_TOKENS - 1).tolist()]


def test_llama_and_qsf_agree_on_what_is_not_quantised(
    quality: ModuleType,
    tmp_path: Path,
    ask_llama: Ask,
    tiny_llama_dir: Path,
    tiny_llama_f16: Path,
) -> None:
    gguf = tmp_path / "F32.gguf"
    ask_llama("gguf", tiny_llama_dir, gguf)
    theirs = llama_logits(ask_llama, gguf, text_tokens())
    check_agreement(quality, theirs, tiny_llama_f16, tiny_llama_dir)


@pytest.mark.slow
def test_llama_and_qsf_agree_on_gpt2(
    quality: ModuleType, tmp_path: Path, ask_llama: Ask, tiny_gpt2_dir: Path
) -> None:
    gguf = gguf_files.write(tiny_gpt2_dir, tmp_path / "F16.gguf", tokenizer=True)
    ours = tmp_path / "f16.qsf"
    convert(tiny_gpt2_dir, ours, quant_type="f16")
    check_agreement(quality, llama_logits(ask_llama, gguf, text_tokens()), ours, tiny_gpt2_dir)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", random_gguf.FILE_TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 256, 512, 4, 2, 320, 64),
        Shape(2, 256, 512, 4, 4, 301, 64, family="gpt2"),
        Shape(2, 192, 320, 4, 2, 301, 64, head_dim=32, is_tied=True),
    ],
    ids=["llama", "gpt2", "odd"],
)
def test_llama_runs_the_random_files(
    tmp_path: Path, ask_llama: Ask, shape: Shape, mixture: str
) -> None:
    path = tmp_path / "m.gguf"
    random_gguf.write_model(path, shape, mixture)
    logits = llama_logits(ask_llama, path, list(range(1, 40)))
    assert logits.shape == (38, shape.n_vocab)
    assert np.isfinite(logits).all()
    assert 0.01 < logits.std() < 10
