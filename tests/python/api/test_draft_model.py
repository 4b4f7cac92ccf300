# SPDX-License-Identifier: Apache-2.0
"""A draft model changes the time of a text, never a token, and stays inside the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.tiny_checkpoints import make_llama
from qsf.cli.run import report
from qsf.cli.run.main import main
from qsf.errors import QsfArgumentError, QsfFormatError, QsfIOError
from qsf.native import binding, records
from qsf_converter import convert

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def sibling(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with 2-bit weights: it guesses well, but not always."""
    return converted("tiny-llama", "2bit")


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.02, "seed": 2},
]


def test_text_is_the_same(tiny_llama_8bit: Path, sibling: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None, threads=3, draft=sibling) as drafting,
    ):
        assert drafting.info.plan.drafter_state == records.DRAFTER_HELD
        for sampling in SAMPLINGS:
            asked = {"max_tokens": 60, **sampling}
            want = "".join(plain.generate(PROMPT, **asked))
            assert "".join(drafting.generate(PROMPT, **asked)) == want
            assert drafting.session.tokens == plain.session.tokens
            for model in (plain, drafting):
                model.session.rewind(3)
        have, want_logits = np.empty((2, plain.info.n_vocab), np.float32)
        for model, out in ((plain, want_logits), (drafting, have)):
            "".join(model.generate(PROMPT, max_tokens=20, temperature=0))
            model.session._native.read_logits(out)
        assert have.tobytes() == want_logits.tobytes()


def test_sessions_have_a_draft_model_each(tiny_llama_8bit: Path, sibling: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, draft=str(sibling)) as drafting,
    ):
        one = qsf.Model.plan(tiny_llama_8bit, ram_budget=None, draft=sibling)
        assert drafting.info.plan.drafter_bytes > one.drafter_bytes
        prompts = (PROMPT, "The little dog saw")
        wanted = ["".join(plain.generate(p, max_tokens=40, temperature=0)) for p in prompts]
        other = drafting.create_session()
        answers = [
            drafting.session.generate(prompts[0], max_tokens=40, temperature=0),
            other.generate(prompts[1], max_tokens=40, temperature=0),
        ]
        texts = ["", ""]
        for _ in range(40):
            for i, pieces in enumerate(answers):
                texts[i] += next(pieces, "")
        assert [text + "".join(rest) for text, rest in zip(texts, answers, strict=True)] == wanted


def test_another_tokenizer_is_refused(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    make_llama(tmp_path / "other", seed=1)
    convert(tmp_path / "other", tmp_path / "other.qsf", quant_type="4bit")
    with pytest.raises(
        QsfArgumentError, match=r"the draft model .*other\.qsf: it(s| has)"
    ) as error:
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft=tmp_path / "other.qsf")
    assert "tokenizer" in str(error.value)


def test_a_file_that_is_none_is_named(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    (tmp_path / "text.qsf").write_text("no model")
    with pytest.raises(QsfIOError, match=r"the draft model .*missing\.qsf"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft=tmp_path / "missing.qsf")
    with pytest.raises(QsfFormatError, match=r"the draft model .*text\.qsf"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft=tmp_path / "text.qsf")
    with pytest.raises(QsfArgumentError, match=r"draft must be one of auto, off, or a \.qsf file"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="")


def test_the_plan_says_what_became_of_it(tiny_llama_8bit: Path, sibling: Path) -> None:
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15, draft_path=sibling)
    least = binding.plan_model(tiny_llama_8bit, asked).min_budget_bytes
    without = binding.plan_model(tiny_llama_8bit, replace(asked, draft_path=None))
    assert abs(least - without.min_budget_bytes) < 1 << 20  # what the process holds moves a little
    plan = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=least + (1 << 18)))
    assert plan.drafter_state not in (records.DRAFTER_HELD, records.DRAFTER_NOT_WORTH)
    assert plan.drafter_bytes == 0 < plan.drafter_wanted_bytes
    assert "no room" in report.drafter_lines(plan)[0]
    held = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=0))
    assert held.drafter_state == records.DRAFTER_HELD
    assert held.drafter_bytes == held.drafter_wanted_bytes
    assert report.drafter_lines(held) == []
    assert any(line.strip().startswith("draft model ") for line in report.plan_lines(held))
    not_worth = replace(held, drafter_state=records.DRAFTER_NOT_WORTH, drafter_bytes=0)
    assert "2.25 times as much" in report.drafter_lines(not_worth)[0]


_PEAK = """
import sys, qsf
target, drafter = sys.argv[1:]
asked = {"draft": drafter, "max_seq_len": 256}
plan = qsf.Model.plan(target, ram_budget=None, **asked)
budget = ((plan.process_bytes + plan.reserve_bytes + plan.engine_bytes) >> 20) + 3
with qsf.Model(target, ram_budget=budget, **asked) as model:
    text = "".join(model.generate("Once upon a time", max_tokens=100, temperature=0))
    print(model.info.plan.drafter_state, budget)
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))
print(text)
"""


def test_the_budget_holds_both(tiny_llama_8bit: Path, sibling: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tiny_llama_8bit), str(sibling)],
        capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    facts, peak_kb, text = done.stdout.split("\n", 2)
    state, budget_mb = map(int, facts.split())
    assert state == records.DRAFTER_HELD
    assert int(peak_kb) <= budget_mb * 1024
    with qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain:
        want = "".join(plain.generate(PROMPT, max_tokens=100, temperature=0))
    assert text == want + "\n"


def test_prompts_of_a_file_have_a_draft_model(
    tiny_llama_8bit: Path, sibling: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, prompts = str(tiny_llama_8bit), tmp_path / "prompts.jsonl"
    prompts.write_text('"Once upon a time"\n"The little dog saw"\n"She"\n' * 3, "utf-8")
    texts = []
    for draft in ("off", str(sibling)):
        words = [model, "--prompts", str(prompts), "-n", "20", "-q", "--draft", draft]
        assert main([*words, "--temperature", "0", "--parallel", "3", "--ram-budget", "0"]) == 0
        answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        texts.append({answer["index"]: answer["text"] for answer in answers})
    assert len(texts[0]) == 9
    assert texts[0] == texts[1]
    assert main([model, "--draft", str(sibling), "--plan", "--ram-budget", "0"]) == 0
    assert "draft model" in capfd.readouterr().out
