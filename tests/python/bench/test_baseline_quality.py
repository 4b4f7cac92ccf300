"""The parts of bench/baseline_quality.py that need no llama.cpp, and what it says without."""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.numpy


@pytest.fixture(scope="module")
def quality(project_root: Path) -> Iterator[ModuleType]:
    sys.path.append(str(project_root / "bench"))
    yield importlib.import_module("baseline_quality")
    sys.path.remove(str(project_root / "bench"))


@pytest.fixture(scope="module")
def quantiser(quality: ModuleType) -> ModuleType:
    return importlib.import_module("llama_quantiser")


def test_score(quality: ModuleType) -> None:
    """Two windows of two scored tokens over three words, by hand."""
    p = np.log(np.array([[[0.5, 0.25, 0.25]] * 2] * 2, np.float32))
    q = p.copy()
    q[1, 1] = np.log([0.125, 0.5, 0.375])
    tokens = np.array([[2, 0, 0], [2, 1, 0]], np.int32)
    same = quality.score(p + 7, p - 3, tokens)  # logits, not logarithms of probabilities
    assert same["kl_mean"] == pytest.approx(0, abs=1e-7)
    assert same["top1_agreement"] == 1
    assert same["perplexity"] == pytest.approx((1 / (0.5 * 0.5 * 0.25 * 0.5)) ** 0.25)
    other = quality.score(p, q, tokens)
    kl = 0.5 * math.log(4) + 0.25 * math.log(0.5) + 0.25 * math.log(2 / 3)  # of p || q
    assert other["kl_mean"] == pytest.approx(kl / 4)
    assert other["kl_p99"] == pytest.approx(0.97 * kl)  # linear between the last two of four
    assert other["top1_agreement"] == 0.75
    assert other["perplexity"] == pytest.approx((1 / (0.5 * 0.5 * 0.25 * 0.125)) ** 0.25)


def test_cut_windows(quality: ModuleType) -> None:
    assert quality.cut_windows([5, 6, 7, 8, 9], 0, 3).tolist() == [[0, 5, 6], [0, 7, 8]]
    with pytest.raises(SystemExit, match="the text has 1 tokens; a window needs 2"):
        quality.cut_windows([5], 0, 3)


def test_rows_of_q_and_k_are_turned_in_the_same_pairs(quantiser: ModuleType) -> None:
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)  # two heads of four
    found = quantiser.interleave(rows, 2)[:, 0] / 2
    assert found.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_safetensors_are_read_as_f32(quantiser: ModuleType, tmp_path: Path, dtype: str) -> None:
    values = np.array([[1, -2.5, 0.125], [3, 0, -64]], np.float32)
    path = tmp_path / "model.safetensors"
    if dtype == "BF16":
        header = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
        text = json.dumps(header).encode()
        stored = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        path.write_bytes(len(text).to_bytes(8, "little") + text + stored)
    else:
        kind = {"F32": np.float32, "F16": np.float16}[dtype]
        safetensors.numpy.save_file({"b": values.astype(kind), "a": values[0].astype(kind)}, path)
    found = dict(quantiser.read_safetensors(path))
    assert (found["b" if "b" in found else "a"] == values).all()


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
    original, eight, four = json.loads(out.read_text())
    assert original["bits_per_weight"] == 32
    assert original["kl_mean"] == 0
    assert 8 < eight["bits_per_weight"] < 9
    assert 0 < eight["kl_mean"] < four["kl_mean"] / 8
    assert four["kl_mean"] < 0.1
    assert abs(eight["perplexity"] / original["perplexity"] - 1) < 0.02
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].startswith(f"| {tiny_llama_8bit.name} | QSF |")


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
