# SPDX-License-Identifier: Apache-2.0
"""Guesses in passes of many sessions: no token, logit or error depends on them, or on others."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.draft_models import make_draft_models, open_streamed
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.native.passing import PassReport, run_pass
from qsf.passes import PassItem, Wants, run_items
from qsf.serve.scheduling import engine as engine_module

N_SESSIONS = 4
N_DRAFTS = 12


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_draft_models(tmp_path_factory.mktemp("shared-drafts"))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "threads": ("llama", {"n_threads": 3, "kv_k_type": 2, "kv_v_type": 2}),
    "exact": ("llama", {"is_exact": True}),
    "small-chunk": ("llama", {"chunk_tokens": 9}),
    "scarce-kv": ("llama", {"kv_contexts": 2, "ctx_tokens": 64}),
    "window": ("mistral", {"chunk_tokens": 16}),
    "experts": ("experts", {"chunk_tokens": 32}),
    "streamed": ("streamed", {"ctx_tokens": 128}),
    "recurrent": ("recurrent", {"chunk_tokens": 32}),
    "delta": ("delta", {"chunk_tokens": 32}),
    "ssd": ("ssd", {"chunk_tokens": 32}),
}


def opened(name: str, path: Path, n_drafts: int, **options: Any) -> binding.NativeModel:
    """Open; a streamed model in little memory."""
    asked: dict[str, Any] = {"draft_rows": n_drafts, "max_sessions": N_SESSIONS, **options}
    if name == "streamed":
        return open_streamed(path, least_chunk_tokens=32, **asked)
    return binding.NativeModel(path, binding.Options(budget_bytes=0, **asked))


class Mixture:
    """Sessions of two models that do the same in passes of all, those of one with guesses."""

    def __init__(self, name: str, path: Path, options: dict[str, Any], seed: int) -> None:
        self.rng = random.Random(seed)
        self.models = [opened(name, path, n, **options) for n in (0, N_DRAFTS)]
        self.n_vocab = self.models[0].n_vocab
        self.pairs = [
            tuple(model.create_session() for model in self.models) for _ in range(N_SESSIONS)
        ]
        plan = self.models[1].info().plan
        self.most = min(32 if "kv_contexts" in options else 110, plan.ctx_tokens)
        self.chunk_tokens = plan.chunk_tokens
        self.future: list[list[int]] = [[] for _ in self.pairs]
        self.n_passes = self.n_tokens = self.n_drafts = 0

    def next_tokens(self, i: int, n: int) -> array[int]:
        while len(self.future[i]) < n + N_DRAFTS:  # what comes again, so that the engine guesses
            pieces = random.Random(self.rng.randrange(3))
            self.future[i] += [pieces.randrange(self.n_vocab) for _ in range(25)]
        return array("I", self.future[i][:n])

    def rewind(self, i: int) -> None:
        plain, drafting = self.pairs[i]
        n_tokens = self.rng.randint(0, plain.position())
        try:
            plain.rewind(n_tokens)
        except QsfArgumentError:  # a window has gone on
            n_tokens = 0
            plain.rewind(0)
        drafting.rewind(n_tokens)

    def act(self) -> None:
        left = self.chunk_tokens
        chosen: list[tuple[int, array[int], Wants]] = []
        for i in self.rng.sample(range(N_SESSIONS), self.rng.randint(1, N_SESSIONS)):
            room = self.most - self.pairs[i][0].position()
            if room < 1 or self.rng.random() < 0.03:
                self.rewind(i)
                continue
            n = 1 if self.rng.random() < 0.85 else min(room, self.rng.randint(1, 5))
            wants: Wants = "ahead"
            if self.rng.random() < 0.1:
                wants = self.rng.choice(["none", "last"])
            if n <= left:
                chosen.append((i, self.next_tokens(i, n), wants))
                left -= n
        for i, _, _ in chosen:
            self.offer(i)
        self.run(chosen)

    def offer(self, i: int) -> None:
        """Give the engine right tokens, then wrong ones; more often let it guess."""
        n = self.rng.choice([0, 0, 3, N_DRAFTS])
        right = self.future[i][1 : 1 + self.rng.randint(0, n)]
        wrong = [self.rng.randrange(self.n_vocab) for _ in range(n - len(right))]
        self.pairs[i][1].draft(array("I", right + wrong))

    def run(self, chosen: list[tuple[int, array[int], Wants]]) -> None:
        """Evaluate: what is ahead first, as the scheduler does, or all together."""
        if not chosen:
            return
        cancelled = {i for i, _, _ in chosen if self.rng.random() < 0.05}
        for i in cancelled:
            for session in self.pairs[i]:
                session.cancel()
        sessions = [self.pairs[i][0] for i, _, _ in chosen]
        items = [PassItem(None, t, "none" if w == "none" else "last") for _, t, w in chosen]
        run_pass(self.models[0], sessions, items)
        is_first = self.rng.random() < 0.8
        ahead = [one for one in chosen if self.is_ahead(one)] if is_first else []
        for part in (ahead, [one for one in chosen if one not in ahead]):
            if part:
                sessions = [self.pairs[i][1] for i, _, _ in part]
                items = [PassItem(None, t, w) for _, t, w in part]
                takes_no_pass = all(map(self.is_ahead, part))
                report = run_pass(self.models[1], sessions, items)
                self.n_passes += report.ns > 0
                self.n_drafts += report.n_drafts
                assert (report.ns == 0) == takes_no_pass
                assert [item.is_cancelled for item in items] == [i in cancelled for i, _, _ in part]
        for i, tokens, wants in chosen:
            self.compare(i, tokens, wants, i in cancelled)

    def is_ahead(self, one: tuple[int, array[int], Wants]) -> bool:
        i, tokens, wants = one
        return len(tokens) == 1 and wants == "ahead" and self.pairs[i][1].is_ahead(tokens[0])

    def compare(self, i: int, tokens: array[int], wants: str, is_cancelled: bool) -> None:
        plain, drafting = self.pairs[i]
        assert plain.position() == drafting.position()
        if is_cancelled:
            return
        del self.future[i][: len(tokens)]
        self.n_tokens += 1
        if wants != "none":
            want, have = np.empty((2, self.n_vocab), np.float32)
            plain.read_logits(want)
            drafting.read_logits(have)
            assert want.tobytes() == have.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_passes_without_guesses(case: str, paths: dict[str, Path]) -> None:
    name, options = CASES[case]
    mixture = Mixture(name, paths[name], options, seed=len(case))
    for _ in range(150):
        mixture.act()
    stats = [drafting.stats() for _, drafting in mixture.pairs]
    n_accepted = sum(sum(one.n_accepted) for one in stats)
    n_drafted = sum(sum(one.n_drafted) for one in stats)
    assert mixture.n_drafts >= n_drafted > n_accepted > 10
    assert all(one.n_step_passes < one.step_tokens for one in stats)


# ---- text ----


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


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 0, "top_p": 1.0, "seed": 100},
    {"temperature": 0.9, "seed": 3, "stop": ["and", "."]},
    *({"temperature": 0.9, "seed": seed} for seed in range(20)),
]


def test_texts_of_a_batch_are_those_without(
    tiny_llama_8bit: Path, guessing: dict[tuple[int, ...], list[int]]
) -> None:
    prompts = ["Once upon a time", "The old man", "She", "Once upon a time there was a dog"]
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as plain,
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as drafting,
    ):
        for sampling in SAMPLINGS:
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
        assert sum(drafting.session_stats.n_accepted) > 100
