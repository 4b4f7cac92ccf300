"""The examples for other programs run: a plain one, and a plugin of the command llm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def said(*command: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_example_answers(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old man lived in a small house by the sea.", "utf-8")
    command = [str(ROOT / "examples" / "answer.py"), str(tiny_chat_8bit), str(text), "Where?"]
    assert len(said(*command)) > 20
    done = subprocess.run([sys.executable, command[0]], capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.slow
def test_the_plugin_of_llm_chats(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    pip = ["-m", "pip", "install", "-q", "--target", str(packages)]
    said(*pip, "llm>=0.20")
    plugin = shutil.copytree(ROOT / "examples" / "llm-qsf", tmp_path / "llm-qsf")
    said(*pip, "--no-deps", str(plugin))  # of a copy: setuptools builds beside the source
    where = {
        "PYTHONPATH": str(packages),
        "LLM_USER_PATH": str(tmp_path / "llm"),
        "QSF_MODELS": str(tiny_chat_8bit.parent),
    }
    model = ["-m", f"qsf/{tiny_chat_8bit.stem}", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    assert f"qsf/{tiny_chat_8bit.stem}" in said("-m", "llm", "models", **where)
    first = said("-m", "llm", *model, "Who are you?", **where)
    import qsf

    with qsf.Model(tiny_chat_8bit, ram_budget=None) as opened:
        history = [{"role": "user", "content": "Who are you?"}]
        expected = "".join(opened.chat(history, max_tokens=12, temperature=0))
        history += [{"role": "assistant", "content": expected}, *history]
        again = "".join(opened.chat(history, max_tokens=12, temperature=0))
    assert first == f"{expected}\n"
    assert said("-m", "llm", "-c", *model[2:], "Who are you?", **where) == f"{again}\n"
