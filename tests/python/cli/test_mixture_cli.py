"""The bundled mixture of experts through the commands: it tells a story, and is evaluated."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from make.commands import PROMPT, Run
from qsf.cli import evaluate as eval_cli

STORY = (
    "there was a little girl named Lily. She loved to play with her toys and run around outside. "
    "One day, she saw a big ball in the park. She wanted to play with it, but her mom said no. "
)


@pytest.fixture(scope="module")
def mixture(converted: Callable[[str, str], Path]) -> Path:
    return converted("tiny-moe", "4bit")


def test_a_story_is_told(run: Run, mixture: Path) -> None:
    options = ("--raw", "--max-tokens", "20", "--temperature", "0", "--verbose")
    done = run(mixture, "--prompt", PROMPT, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a little girl named Lily.")
    assert "32 of 32 experts" in done.stderr


def test_it_is_evaluated_against_its_original(
    mixture: Path, tiny_moe_dir: Path, tmp_path: Path
) -> None:
    text = tmp_path / "story.txt"
    text.write_text(PROMPT + ", " + STORY, "utf-8")
    arguments = [mixture, "--text", text, "--against", tiny_moe_dir, "--json", tmp_path / "e.json"]
    assert eval_cli.run([*map(str, arguments), "--ram-budget", "0"]) == 0
    found = json.loads((tmp_path / "e.json").read_text("utf-8"))
    assert found["kl_mean"] < 0.1
    assert found["perplexity"] < 20
