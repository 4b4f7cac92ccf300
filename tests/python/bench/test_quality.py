"""Our logits beside those of llama.cpp, the real one, on files of the same weights."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from make import bench_baselines, gguf_files
from qsf.bench.models import random_gguf
from qsf.bench.models.shapes import Shape
from qsf.evaluate.windows import Window
from qsf.model import Model
from qsf_converter.convert import convert
from qsf_converter.original.logits import open_original

N_TOKENS = 60

Ask = Callable[..., None]


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


def log_probs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def check_agreement(theirs: npt.NDArray[np.float32], ours: Path, original: Path) -> None:
    """Both are the original but for rounding, and so are alike."""
    tokens = text_tokens()
    with Model(ours, ram_budget=None, threads=1, kv_type="f16", max_seq_len=N_TOKENS) as model:
        q = log_probs(model.logits(tokens)[:-1])
    with open_original(original) as source:
        rows = source.logits([Window(np.array(tokens), 0)], N_TOKENS, lambda _n: None)
        p = log_probs(np.concatenate([np.array(block, np.float32) for block in rows]))
    r = log_probs(theirs)
    assert p.shape == q.shape == r.shape
    kl = (np.exp(p) * (p - r)).sum(axis=1).mean()
    assert kl < 1e-5
    following = np.array(tokens[1:])
    at = np.arange(len(following))
    assert r[at, following].mean() == pytest.approx(q[at, following].mean(), rel=1e-3)


def text_tokens() -> list[int]:
    """Return tokens that every model of the tests has."""
    return [1, *np.random.default_rng(0).integers(3, 200, N_TOKENS - 1).tolist()]


def test_llama_and_qsf_agree_on_what_is_not_quantised(
    tmp_path: Path, ask_llama: Ask, tiny_llama_dir: Path, tiny_llama_f16: Path
) -> None:
    gguf = tmp_path / "F32.gguf"
    ask_llama("gguf", tiny_llama_dir, gguf)
    check_agreement(llama_logits(ask_llama, gguf, text_tokens()), tiny_llama_f16, tiny_llama_dir)


@pytest.mark.slow
def test_llama_and_qsf_agree_on_gpt2(tmp_path: Path, ask_llama: Ask, tiny_gpt2_dir: Path) -> None:
    gguf = gguf_files.write(tiny_gpt2_dir, tmp_path / "F16.gguf", tokenizer=True)
    ours = tmp_path / "f16.qsf"
    convert(tiny_gpt2_dir, ours, quant_type="f16")
    check_agreement(llama_logits(ask_llama, gguf, text_tokens()), ours, tiny_gpt2_dir)


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
