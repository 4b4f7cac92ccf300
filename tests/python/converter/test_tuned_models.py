# SPDX-License-Identifier: Apache-2.0
"""The default KV cache of tuned models keeps its bound on a text that it was not chosen by."""

from __future__ import annotations

from pathlib import Path

import pytest

import qsf
from make.large_keys import with_large_keys
from make.tuned_models import with_merged_lora, with_wide_heads
from qsf.evaluate.evaluation import Evaluation, evaluate, perplexity_change
from qsf_converter import convert
from qsf_converter.calibrate.texts import bundled_text

MOST_CHANGE = 0.5  # % of perplexity, two standard errors counted in
N_TOKENS = 8192
pytestmark = pytest.mark.slow


def held_out() -> str:
    """The second half of the text: the conversion takes 2048 tokens from its start."""
    text = bundled_text()
    return text[len(text) // 2 :]


def evaluated(path: Path, kv_type: str | None) -> Evaluation:
    with qsf.Model(path, ram_budget="auto", kv_type=kv_type, max_seq_len=512) as model:
        return evaluate(model, held_out(), ctx_tokens=512, max_tokens=N_TOKENS)


def assert_bound_holds(source: Path, path: Path, original: Path) -> float:
    """The model is no worse than with f16; return its perplexity with f16."""
    convert(source, path, quant_type="8bit")
    convert(original, path.with_suffix(".original"), quant_type="8bit")
    reference = evaluated(path, "f16")
    change, error = perplexity_change(evaluated(path, None).token_nll, reference.token_nll)
    assert reference.tokens > N_TOKENS * 0.9
    assert change + 2 * error <= MOST_CHANGE, f"{change:+.3f} % +- {error:.3f}"
    return reference.perplexity / evaluated(path.with_suffix(".original"), "f16").perplexity


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_large_key_biases(tmp_path: Path, tiny_llama_dir: Path, head_dim: int) -> None:
    """In channels that are read and, in wider heads, in those that turn slowest, which are not."""
    large = with_large_keys(tiny_llama_dir, tmp_path / "large", size=20)
    wide = with_wide_heads(large, tmp_path / "wide", head_dim)
    ratio = assert_bound_holds(wide, tmp_path / "m.qsf", large)
    assert ratio == pytest.approx(1, abs=0.01)  # it computes the same


def test_a_merged_lora(tmp_path: Path, tiny_llama_dir: Path) -> None:
    lora = with_merged_lora(tiny_llama_dir, tmp_path / "lora", rank=8, size=0.1)
    ratio = assert_bound_holds(lora, tmp_path / "m.qsf", tiny_llama_dir)
    assert 1.001 < ratio < 2  # it is another model, and still one
