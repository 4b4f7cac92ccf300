"""Layers skipped by importance: ``qsf-run --quality``.

What is skipped, read and refused: tests/c/check_skip.c; numbers: test_forward.py.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from make.commands import PROMPT, Run, check_refused
from make.golden import MODELS
from make.importances import rewrite
from make.tiny_checkpoints import make_llama
from qsf_converter import convert

# Of ten layers; the ends matter least, so that only the rule keeps them. Then 6, 3, 7, 2, 5, 4.
IMPORTANCES = (0.0, 0.01, 0.5, 0.2, 0.9, 0.8, 0.1, 0.4, 0.0, 0.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with a tokenizer, ten layers of 0.6 MB and importances; ``plain`` is beside."""
    folder = tmp_path_factory.mktemp("skip")
    make_llama(
        folder / "llama", seed=7, tokenizer_from=MODELS["tiny-llama"], n_layers=10, dim=192,
        n_heads=3, n_kv_heads=3, head_dim=64, ffn_dim=832, n_vocab=2048, max_tokens=256,
    )  # fmt: skip
    convert(folder / "llama", folder / "plain.qsf", quant_type="8bit")
    return rewrite(folder / "plain.qsf", folder / "m.qsf", importances=IMPORTANCES)


def test_quality_on_the_command_line(run: Run, measured: Path) -> None:
    options = ("-p", PROMPT, "-n", 4, "--temperature", 0)
    done = run(measured, *options, "--quality", 0.7, "--verbose")
    assert done.returncode == 0, done.stderr
    assert "layers skipped: 3 of 10, 3, 6-7\n" in done.stderr
    lines = [" ".join(line.split()) for line in done.stderr.splitlines()]
    assert "layer 3 skipped - - - -" in lines
    assert "layers 6-7 skipped - - - -" in lines
    assert "weights, 9 of 9 units" in done.stderr
    assert "10 layers of 192" in done.stderr
    whole = run(measured, *options, "--quality", 1)
    assert whole.stdout not in ("", done.stdout)
    assert "skipped" not in whole.stderr


def test_less_quality_than_can_be_had(run: Run, measured: Path) -> None:
    """Said unasked, but not to whom wants to hear nothing."""
    said = "layers skipped: 6 of 10, 2-7 (8 were asked for, but the first two and the last two"
    for options in ((), ("--verbose",)):
        done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, *options)
        assert (done.returncode, done.stderr.count(said)) == (0, 1)
    done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    plan = run(measured, "--plan", "--quality", 0.2)
    assert (plan.returncode, plan.stdout.count(said)) == (0, 1)
    said = "(all are 1); qsf-convert --calibration makes a file that has them"
    check_refused(run(measured.with_name("plain.qsf"), "-p", "x", "--quality", "0.5"), 1, said)
