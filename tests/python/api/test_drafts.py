# SPDX-License-Identifier: Apache-2.0
"""Guesses of the next tokens, also by a draft model, change the time of a text, never a token.

That they change no logit is in test_same_bits.py.
"""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.streamed_models import least_options, make_streamed_gpt2, write_random_mixture
from make.tiny_checkpoints import make_llama
from qsf.cli.run import report
from qsf.errors import QsfArgumentError, QsfFormatError, QsfIOError
from qsf.native import binding
from qsf.passes import PassItem, PassReport, run_items
from qsf.serve.scheduling import engine as engine_module
from qsf_converter import convert

PROMPT = "Once upon a time"
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.3, "repetition_penalty": 1.2, "top_k": 0, "top_p": 1.0, "seed": 100},
    *({"temperature": 0.9, "seed": seed} for seed in range(3)),
]


@pytest.fixture(scope="module")
def sibling(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with 2-bit weights: it guesses well, but not always."""
    return converted("tiny-llama", "2bit")


@pytest.fixture(scope="module")
def plain(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def drafting(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, threads=3) as opened:
        yield opened


def answer(model: qsf.Model, prompt: Any, **asked: Any) -> tuple[str, list[int], str]:
    """Return the text, the tokens that are held, and why it ended."""
    model.session.rewind(0)
    text = "".join(model.generate(prompt, **asked))
    assert model.stats is not None
    return text, model.session.tokens, model.stats.stop_reason


@contextmanager
def drafted(text: list[int], seed: int) -> Iterator[None]:
    """Let every step draft what comes in ``text`` next, with mistakes."""
    rng = random.Random(seed)
    step = binding.NativeSession.step

    def guessing(self: binding.NativeSession, token: int) -> None:
        at = self.position() + 1
        drafts = text[at : at + rng.randint(1, 15)]
        if drafts and rng.random() < 0.3:
            drafts[rng.randrange(len(drafts))] = text[0]
        self.draft(array("I", drafts))
        step(self, token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding.NativeSession, "step", guessing)
        yield


# ---- text ----


def test_text_is_the_same(plain: qsf.Model, drafting: qsf.Model) -> None:
    for i, sampling in enumerate(SAMPLINGS):
        asked = {"max_tokens": 60, **sampling}
        want = answer(plain, PROMPT, **asked)
        for _ in range(2):  # what the first one has taught is used by the second
            assert answer(drafting, PROMPT, **asked) == want
        before = drafting.session_stats.n_step_passes
        with drafted(want[1], i):
            assert answer(drafting, PROMPT, **asked) == want
        assert drafting.stats is not None
        n_passes = drafting.session_stats.n_step_passes - before
        assert n_passes < 0.8 * drafting.stats.step_tokens


def test_a_stop_string_inside_accepted_drafts(plain: qsf.Model, drafting: qsf.Model) -> None:
    asked: dict[str, Any] = {"max_tokens": 50, "temperature": 0.9, "seed": 4}
    _, tokens, _ = answer(plain, PROMPT, **asked)
    pieces = list(plain.generate(PROMPT, **asked))
    for n in range(5, len(pieces), 7):
        stop = "".join(pieces[n : n + 2])
        want = answer(plain, PROMPT, stop=stop, **asked)
        with drafted(tokens, n):
            assert answer(drafting, PROMPT, stop=stop, **asked) == want
        more = [*want[1], 5]
        assert list(drafting.generate(more, **asked)) == list(plain.generate(more, **asked))


def test_texts_of_a_batch_are_those_without(
    tiny_llama_8bit: Path, plain: qsf.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes guess what comes next in texts, by their beginnings, with mistakes."""
    texts: list[list[int]] = []
    rng = random.Random(7)

    def run(opened: Any, items: Sequence[PassItem]) -> PassReport:
        for item in items:
            held = [*item.session.tokens, *item.tokens]
            text = next((t for t in texts if t[: len(held)] == held), [])
            drafts = text[len(held) :][: rng.randint(0, 5)]
            if drafts and rng.random() < 0.3:
                drafts[rng.randrange(len(drafts))] = 1
            item.session._native.draft(array("I", drafts))
        return run_items(opened, items)

    monkeypatch.setattr(engine_module, "run_items", run)
    prompts = [PROMPT, "The old man", "She", "Once upon a time there was a dog"]
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as drafting:
        for sampling in (*SAMPLINGS, {"temperature": 0.9, "seed": 3, "stop": ["and", "."]}):
            asked = {"max_tokens": 25, **sampling}
            wanted = []
            texts.clear()
            for prompt in prompts:
                text, _, stop_reason = answer(plain, prompt, **asked)
                assert plain.stats is not None
                ids = plain.stats.token_ids
                texts.append([*plain.tokenize(prompt), *ids])
                wanted.append((text, ids, stop_reason))
            answers = sorted(drafting.batch(prompts, **asked), key=lambda answer: answer.index)
            have = [(a.text, a.stats.token_ids, a.stats.stop_reason) for a in answers if a.stats]
            assert have == wanted
        assert sum(drafting.session_stats.n_accepted) > 20


# ---- room ----


def test_a_plan_without_room_has_no_drafts(tmp_path: Path) -> None:
    path = make_streamed_gpt2(tmp_path)
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15)
    least = binding.plan_model(path, asked)
    without = binding.plan_model(path, replace(asked, draft_rows=0))
    assert least.engine_bytes == without.engine_bytes  # of the least plan
    assert least.draft_rows == 0
    tight = replace(asked, budget_bytes=least.min_budget_bytes + 4096)
    assert binding.plan_model(path, tight).draft_rows == 0
    roomy = binding.plan_model(path, replace(asked, budget_bytes=0))
    assert roomy.draft_rows == 15
    assert roomy.scratch_bytes > without.scratch_bytes + 16 * 4 * 256


def test_drafts_take_no_room_from_experts(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """What too few slots for drafts leave without them is all of it: it was a few slots."""
    path = write_random_mixture(tmp_path / "m.qsf", tiny_llama_dir, n_real_layers=0)
    options = least_options(path)
    options["ram_budget"] += 60
    n_slots = [
        qsf.Model.plan(path, **options, draft=draft).expert_slots for draft in ("off", "auto")
    ]
    assert n_slots[0] > 30
    assert n_slots[1] > 0.8 * n_slots[0]


# ---- a draft model ----


def test_sessions_have_a_draft_model_each(
    tiny_llama_8bit: Path, plain: qsf.Model, sibling: Path
) -> None:
    one = qsf.Model.plan(tiny_llama_8bit, ram_budget=None, draft=sibling)
    prompts = (PROMPT, "The little dog saw")
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, draft=str(sibling)) as drafting:
        assert drafting.info.plan.drafter_state == binding.DRAFTER_HELD
        assert drafting.info.plan.drafter_bytes > one.drafter_bytes
        sessions = (drafting.session, drafting.create_session())
        for sampling in SAMPLINGS:
            asked = {"max_tokens": 40, **sampling}
            wanted = ["".join(plain.generate(prompt, **asked)) for prompt in prompts]
            runs = [s.generate(p, **asked) for s, p in zip(sessions, prompts, strict=True)]
            texts = ["", ""]
            for _ in range(80):
                for i, pieces in enumerate(runs):
                    texts[i] += next(pieces, "")
            assert texts == wanted


def test_a_file_that_is_no_draft_model_is_named(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    (tmp_path / "text.qsf").write_text("no model")
    make_llama(tmp_path / "other", seed=1)
    convert(tmp_path / "other", tmp_path / "other.qsf", quant_type="4bit")
    named = r"the draft model .*{}\.qsf"
    for draft, kind, said in (
        (tmp_path / "missing.qsf", QsfIOError, named.format("missing")),
        (tmp_path / "text.qsf", QsfFormatError, named.format("text")),
        (tmp_path / "other.qsf", QsfArgumentError, named.format("other") + ".*tokenizer"),
        ("", QsfArgumentError, r"draft must be one of auto, off, or a \.qsf file"),
    ):
        with pytest.raises(kind, match=said):
            qsf.Model(tiny_llama_8bit, ram_budget=None, draft=draft)


def test_the_plan_says_what_became_of_it(tiny_llama_8bit: Path, sibling: Path) -> None:
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15, draft_path=sibling)
    least = binding.plan_model(tiny_llama_8bit, asked).min_budget_bytes
    without = binding.plan_model(tiny_llama_8bit, replace(asked, draft_path=None))
    assert abs(least - without.min_budget_bytes) < 1 << 20  # what the process holds moves a little
    plan = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=least + (1 << 18)))
    assert plan.drafter_state not in (binding.DRAFTER_HELD, binding.DRAFTER_NOT_WORTH)
    assert plan.drafter_bytes == 0 < plan.drafter_wanted_bytes
    assert "no room" in report.drafter_lines(plan)[0]
    held = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=0))
    assert held.drafter_state == binding.DRAFTER_HELD
    assert held.drafter_bytes == held.drafter_wanted_bytes
    assert report.drafter_lines(held) == []
    assert any(line.strip().startswith("draft model ") for line in report.plan_lines(held))
    not_worth = replace(held, drafter_state=binding.DRAFTER_NOT_WORTH, drafter_bytes=0)
    assert "2.25 times as much" in report.drafter_lines(not_worth)[0]


_PEAK = """
import sys, qsf
target, drafter = sys.argv[1:]
asked = {"draft": drafter, "max_seq_len": 256}
plan = qsf.Model.plan(target, ram_budget=None, **asked)
budget = ((plan.process_bytes + plan.reserve_bytes + plan.engine_bytes) >> 20) + 3
with qsf.Model(target, ram_budget=budget, **asked) as model:
    list(model.generate("Once upon a time", max_tokens=100, temperature=0))
    print(model.info.plan.drafter_state, budget)
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_budget_holds_both(tiny_llama_8bit: Path, sibling: Path) -> None:
    words = [sys.executable, "-c", _PEAK, str(tiny_llama_8bit), str(sibling)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=True)
    state, budget_mb, peak_kb = map(int, done.stdout.split())
    assert state == binding.DRAFTER_HELD
    assert peak_kb <= budget_mb * 1024
