# SPDX-License-Identifier: Apache-2.0
"""Guesses of the next tokens in a pass change its time, never a token or an error.

That they change no logit is in test_same_bits.py.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.streamed_models import least_options, make_streamed_gpt2, write_random_mixture
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.passes import PassItem, PassReport, run_items
from qsf.serve.scheduling import engine as engine_module


def test_wrong_drafts_are_refused(tiny_llama_4bit: Path) -> None:
    options = binding.Options(budget_bytes=0, draft_rows=4)
    session = binding.NativeModel(tiny_llama_4bit, options).create_session()
    with pytest.raises(QsfArgumentError, match="5 drafts are too many: the plan has room for 4"):
        session.draft(array("I", [1] * 5))
    with pytest.raises(QsfArgumentError, match="outside the vocabulary"):
        session.draft(array("I", [1, 2**31]))


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


# ---- text ----


@contextmanager
def drafted(text: list[int], n_prompt: int, seed: int) -> Iterator[list[int]]:
    """Let every step draft what comes in ``text`` next, with mistakes; yields counts of drafts."""
    rng = random.Random(seed)
    counts: list[int] = []
    step = binding.NativeSession.step

    def guessing(self: binding.NativeSession, token: int) -> None:
        at = self.position() + 1
        drafts = text[at : at + rng.randint(1, 15)]
        if drafts and rng.random() < 0.3:
            drafts[rng.randrange(len(drafts))] = text[0]
        self.draft(array("I", drafts))
        step(self, token)
        counts.append(self.stats().n_step_passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding.NativeSession, "step", guessing)
        yield counts


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 0, "top_p": 1.0, "seed": 100},
    *({"temperature": 0.9, "seed": seed} for seed in range(4)),
]


def test_text_is_the_same(tiny_llama_8bit: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None, threads=3) as drafting,
    ):
        prompt = plain.tokenize("Once upon a time")
        for i, sampling in enumerate(SAMPLINGS):
            asked = {"max_tokens": 60, **sampling}
            want = "".join(plain.generate(prompt, **asked))
            assert plain.stats is not None
            tokens = [*prompt, *plain.stats.token_ids]
            for _ in range(2):  # what the first one has taught is used by the second
                assert "".join(drafting.generate(prompt, **asked)) == want
                drafting.session.rewind(0)
            before = drafting.session_stats
            with drafted(tokens, len(prompt), i):
                have = "".join(drafting.generate(prompt, **asked))
            after = drafting.session_stats
            assert have == want
            assert drafting.stats is not None
            assert drafting.stats.token_ids == plain.stats.token_ids
            assert drafting.session.tokens == plain.session.tokens
            assert after.n_step_passes - before.n_step_passes < 0.8 * drafting.stats.step_tokens
            for model in (plain, drafting):
                model.session.rewind(0)


def test_a_stop_string_inside_accepted_drafts(tiny_llama_8bit: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None) as drafting,
    ):
        prompt = plain.tokenize("Once upon a time")
        asked: dict[str, Any] = {"max_tokens": 50, "temperature": 0.9, "seed": 4}
        pieces = list(plain.generate(prompt, **asked))
        assert plain.stats is not None
        tokens = [*prompt, *plain.stats.token_ids]
        for n in range(5, len(pieces), 7):
            stop = "".join(pieces[n : n + 2])
            want = "".join(plain.generate(prompt, stop=stop, **asked))
            with drafted(tokens, len(prompt), n):
                have = "".join(drafting.generate(prompt, stop=stop, **asked))
                held = drafting.session.tokens
            assert have == want
            assert held == plain.session.tokens
            more = "".join(plain.generate([*held, 5], **asked))
            assert "".join(drafting.generate([*held, 5], **asked)) == more


def test_cancelled_and_abandoned_answers(tiny_llama_8bit: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None) as drafting,
    ):
        prompt = plain.tokenize("Once upon a time")
        asked: dict[str, Any] = {"max_tokens": 50, "temperature": 0.0}
        want = "".join(plain.generate(prompt, **asked))
        assert plain.stats is not None
        tokens = [*prompt, *plain.stats.token_ids]
        for n_taken in (3, 11, 20):
            for is_cancelled in (False, True):
                held = []
                for model in (plain, drafting):
                    with drafted(tokens if model is drafting else [], len(prompt), n_taken):
                        pieces = model.generate(prompt, **asked)
                        text = "".join(next(pieces) for _ in range(n_taken))
                        if is_cancelled:
                            model.cancel()
                            text += "".join(pieces)
                        else:
                            pieces.close()  # type: ignore[attr-defined]
                    assert model.stats is not None
                    held.append((text, model.session.tokens, model.stats.stop_reason))
                    assert want.startswith(text)
                assert held[0] == held[1]
        assert "".join(drafting.generate(prompt, **asked)) == want


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


# ---- batches ----


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Let passes of a batch guess what comes next in texts, by their beginnings, with mistakes."""
    texts: dict[tuple[int, ...], list[int]] = {}
    rng = random.Random(7)

    def run(opened: Any, items: Sequence[PassItem]) -> PassReport:
        for item in items:
            held = [*item.session.tokens, *item.tokens]
            text = next((t for t in texts.values() if t[: len(held)] == held), [])
            drafts = text[len(held) :][: rng.randint(0, 5)]
            if drafts and rng.random() < 0.3:
                drafts[rng.randrange(len(drafts))] = 1
            item.session._native.draft(array("I", drafts))
        return run_items(opened, items)

    monkeypatch.setattr(engine_module, "run_items", run)
    return texts


def test_texts_of_a_batch_are_those_without(
    tiny_llama_8bit: Path, guessing: dict[tuple[int, ...], list[int]]
) -> None:
    prompts = ["Once upon a time", "The old man", "She", "Once upon a time there was a dog"]
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as drafting,
    ):
        for sampling in (*SAMPLINGS, {"temperature": 0.9, "seed": 3, "stop": ["and", "."]}):
            asked = {"max_tokens": 25, **sampling}
            wanted = []
            guessing.clear()
            for prompt in prompts:
                text = "".join(plain.generate(prompt, **asked))
                assert plain.stats is not None
                tokens = plain.tokenize(prompt)
                guessing[tuple(tokens)] = [*tokens, *plain.stats.token_ids]
                wanted.append((text, plain.stats.token_ids, plain.stats.stop_reason))
            answers = sorted(drafting.batch(prompts, **asked), key=lambda answer: answer.index)
            have = [(a.text, a.stats.token_ids, a.stats.stop_reason) for a in answers if a.stats]
            assert have == wanted
        assert sum(drafting.session_stats.n_accepted) > 20
