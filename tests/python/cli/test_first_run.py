"""The question of the first run: memory that is free, asked for once and remembered."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from make.commands import Run
from make.terminals import OnTerminal
from qsf_bench.models.random_qsf import embed_type_of, write_model
from qsf_bench.models.shapes import Shape
from qsf_converter.rounding.plan import parse_quant_type

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="config.toml takes Python 3.11"),
    pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning"),
]
QUESTION = "use what is free from now on? [Y/n] "


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A model of 265 MB, whose layers are holes in the file: not in 200 MB, nor on the disk."""
    path = tmp_path_factory.mktemp("large") / "large.qsf"
    shape = Shape(7, 2048, 8192, 16, 16, n_vocab=2048, max_tokens=512)
    write_model(
        path, shape, parse_quant_type("4bit"), embed_type_of("4bit"),
        n_real_layers=0, tokenizer_from=tiny_llama_dir,
    )  # fmt: skip
    return path


@pytest.mark.parametrize(("answer", "kept"), [("\n", '"auto"'), ("n\n", "200")])
def test_a_model_that_does_not_fit_asks_once(
    on_terminal: OnTerminal, large: Path, tmp_path: Path, answer: str, kept: str
) -> None:
    config = tmp_path / "qsf" / "config.toml"
    config.parent.mkdir()
    config.write_text("temperature = 0.5\n", "utf-8")
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    first = on_terminal("chat", large, environment=environment)
    first.read_until(QUESTION)
    assert "In 200 MB " in first.text
    first.type(answer)
    first.read_until(f"(kept: ram-budget in {config}; --ram-budget SIZE is for one run)")
    first.ask("/exit\n", "\n")
    assert first.wait() == 0
    assert config.read_text("utf-8") == f"ram-budget = {kept}\ntemperature = 0.5\n"
    again = on_terminal("chat", large, environment=environment)
    again.ask("/exit\n", "\n")
    assert again.wait() == 0
    assert QUESTION not in again.text
    assert ("in 200 MB, context" in again.text) == (kept == "200")


def test_nobody_is_asked_who_says_a_budget_or_cannot_answer(
    on_terminal: OnTerminal, run: Run, large: Path, tmp_path: Path
) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    chat = on_terminal("chat", large, "--ram-budget", 200, environment=environment)
    chat.ask("/exit\n", "\n")
    assert chat.wait() == 0
    assert QUESTION not in chat.text
    done = run(large, "-p", "x", "-n", 1)
    assert done.returncode == 0
    assert "--ram-budget auto would read" in done.stderr
    assert QUESTION not in done.stderr
