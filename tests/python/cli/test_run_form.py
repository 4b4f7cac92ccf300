"""``qsf run --json-schema``, ``--grammar``, ``--regex``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from make.commands import Run
from qsf import Model
from qsf.text.constraints import Constraints
from qsf.text.generation import Generation

pytest.importorskip("llguidance")

SCHEMA: Any = {
    "type": "object",
    "properties": {"age_of_the_cat": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["age_of_the_cat"],
    "additionalProperties": False,
}


@pytest.fixture
def ask(run: Run) -> Callable[..., str]:
    """Run the command; return what it prints, or the error where it must end with a code."""

    def call(*words: object, code: int = 0) -> str:
        done = run(*words)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return call


def is_cat(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["age_of_the_cat"] and 0 <= value["age_of_the_cat"] <= 40


def test_answers_have_the_form(
    ask: Callable[..., str], tmp_path: Path, tiny_chat_8bit: Path, tiny_llama_4bit: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    grammar = tmp_path / "grammar.gbnf"
    grammar.write_text('root ::= "<" [xyz] [xyz] ">"')
    history = tmp_path / "history.json"
    hot = ("--temperature", "1.5", "--seed", "3", "-q")
    asked: tuple[object, ...]
    for model in (tiny_chat_8bit, tiny_llama_4bit):
        asked = (model, "--prompt", "How old is the cat?", *hot)
        assert is_cat(ask(*asked, "--json-schema", schema))
        assert re.fullmatch("<[xyz]{2}>\n", ask(*asked, "--grammar", grammar))
        said = json.loads(ask(*asked, "--regex", "[a-c]{3}", "--json"))
        assert re.fullmatch("[a-c]{3}", said["text"])
        assert said["stop_reason"] == "end"
    asked = (tiny_chat_8bit, "--prompt", "How old?", "--history", history, *hot)
    text = ask(*asked, "--json-schema", schema)
    turns = json.loads(history.read_text())
    assert turns[-1] == {"role": "assistant", "content": text.removesuffix("\n")}


def test_forced_tokens_do_not_change_the_text(
    tiny_chat_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraints(tiny_chat_8bit).make("json", SCHEMA, "x")
    n_passes: list[int] = []
    with Model(tiny_chat_8bit, ram_budget=None) as model:
        texts = []
        for is_forcing in (True, False):
            for seed in range(5):
                if not is_forcing:
                    monkeypatch.setattr(Generation, "take_forced", lambda _: "")
                n_before = model.timeline[1].n_passes
                options: dict[str, Any] = {"temperature": 1.5, "seed": seed}
                pieces = list(model.chat("Hm", constraint=constraint.copy, **options))
                n_passes.append(model.timeline[1].n_passes - n_before)
                texts.append("".join(pieces))
                stats = model.stats
                assert stats is not None
                assert stats.stop_reason == "end"
        assert texts[:5] == texts[5:]
        assert all(map(is_cat, texts))
        assert sum(n_passes[:5]) < 0.6 * sum(n_passes[5:])


def test_wrong_forms_are_refused(
    ask: Callable[..., str],
    process: Run,
    tmp_path: Path,
    tiny_chat_8bit: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"$ref": "#/$defs/none"}}))
    asked = (tiny_chat_8bit, "--prompt", "x")
    said = ask(*asked, "--json-schema", schema, code=1)
    assert "error: --json-schema cannot be enforced" in said
    assert "/$defs/none" in said
    # A context that is too small ends the command behind the warning.
    schema.write_text(json.dumps({"enum": [[1, 2]], "uniqueItems": True}))
    assert "warning: --json-schema: uniqueItems cannot be enforced: check the answer" in ask(
        *asked, "--json-schema", schema, "--max-seq-len", "1", code=1
    )
    schema.write_text("{")
    assert "error: --json-schema: not JSON: Expecting" in ask(
        *asked, "--json-schema", schema, code=1
    )
    assert "absent" in ask(*asked, "--json-schema", tmp_path / "absent", code=1)
    (tmp_path / "llguidance.py").write_text("raise ModuleNotFoundError('no llguidance')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    done = process("run", *asked, "--regex", "a")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith("pip install llguidance\n")
