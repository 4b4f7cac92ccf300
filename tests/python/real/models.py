"""Real models: GGUF files, what `qsf` makes of them, and what llama.cpp says to the same."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from real.questions import QUESTIONS, TEXTS

import qsf_converter
from qsf.file.reader import Reader

N_TOKENS = 16  # of an answer
N_EQUAL = 18  # of 20 answers, at least
ROOT = Path(__file__).resolve().parents[3]
_LLAMA = Path(__file__).with_name("ask_llama.py")


@dataclass
class RealModel:
    """A GGUF file and the .qsf file that `qsf convert` makes of it."""

    source: Path
    path: Path
    conversion: subprocess.CompletedProcess[str]
    all_models: Sequence[RealModel]
    figures: dict[str, str] = field(default_factory=dict)  # for the table
    _answers: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    _llama: Any = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.source.stem

    def smaller(self) -> list[RealModel]:
        """Return the models of the folder that can draft for this one."""
        n_bytes, n_vocab = self.path.stat().st_size, _n_vocab(self.path)
        models = [model for model in self.all_models if model.path.stat().st_size < n_bytes]
        return [model for model in models if _n_vocab(model.path) == n_vocab]

    def run(self, *words: str, command: str = "run") -> str:
        """Return what a command of qsf prints about the model."""
        return checked("-m", "qsf", command, str(self.path), *words)

    def answers(self, *words: str, questions: Sequence[str] = QUESTIONS) -> list[str]:
        """Return the greedy answers to questions, with options of `qsf run`."""
        key = (*words, *questions)
        if key not in self._answers:
            prompts = self.path.with_suffix(".jsonl")
            prompts.write_text("".join(json.dumps(question) + "\n" for question in questions))
            limits = ("--temperature", "0", "--max-tokens", str(N_TOKENS))
            out = self.run("--prompts", str(prompts), *limits, "-q", *words)
            records = sorted(map(json.loads, out.splitlines()), key=lambda record: record["index"])
            self._answers[key] = [record["text"] for record in records]
        return self._answers[key]

    def llama(self) -> Any:
        """Return what llama.cpp makes of ``TEXTS`` and ``QUESTIONS``: see ask_llama.py."""
        pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip: xllamacpp)")
        if self._llama is None:
            request = {"texts": TEXTS, "chats": QUESTIONS, "n_predict": N_TOKENS}
            out = checked(str(_LLAMA), str(self.source), stdin=json.dumps(request))
            self._llama = json.loads(out.splitlines()[-1])
        return self._llama


def measured_text() -> Path:
    """Return the text of perplexity: wikitext-2 where it is at hand, else that of calibration."""
    wikitext = (
        Path(os.environ.get("QSF_SHARED", ROOT.parent / "shared")) / "text/wikitext2-test.txt"
    )
    bundled = Path(qsf_converter.__path__[0]) / "calibrate" / "calibration_text.txt"
    return wikitext if wikitext.is_file() else bundled


def _n_vocab(path: Path) -> int:
    with Reader(path) as reader:
        return reader.header.n_vocab


def checked(*words: str, stdin: str = "") -> str:
    """Return the output of a Python program that must succeed."""
    done = subprocess.run(
        [sys.executable, *words], input=stdin, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
    return done.stdout


def count_equal(real: RealModel, other: str, texts: Sequence[str], others: Sequence[str]) -> None:
    """At least ``N_EQUAL`` of the answers to ``QUESTIONS`` must be those of ``other``."""
    wrong = [
        f"{real.name}: {question}\n  defaults: {text!r}\n  {other}: {theirs!r}"
        for question, text, theirs in zip(QUESTIONS, texts, others, strict=True)
        if text.strip() != theirs.strip()
    ]
    n_equal = len(QUESTIONS) - len(wrong)
    real.figures[f"answers as {other}"] = f"{n_equal} of {len(QUESTIONS)}"
    assert n_equal >= N_EQUAL, f"{n_equal} answers are equal, {N_EQUAL} must be\n" + "\n".join(
        wrong
    )


def check_same(real: RealModel, texts: dict[str, list[str]], questions: Sequence[str]) -> None:
    """All answers must be those that the first options gave."""
    first, *others = texts
    for name in others:
        for question, text, other in zip(questions, texts[first], texts[name], strict=True):
            assert text == other, (
                f"{real.name}: {question}\n  {first}: {text!r}\n  {name}: {other!r}"
            )
