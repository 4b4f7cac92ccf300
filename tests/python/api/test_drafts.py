# SPDX-License-Identifier: Apache-2.0
"""Guesses of the next tokens in a pass change its time, never a token, a logit or an error."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.draft_models import make_draft_models, open_streamed
from make.kind_models import LATENT, LAYER_NORMS, MIXED, write_model
from make.recurrent_models import write_recurrent
from make.streamed_models import least_options, write_random_mixture
from qsf.errors import QsfArgumentError, QsfCancelledError
from qsf.file.layout import Dtype, Norm
from qsf.native import binding


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        **make_draft_models(folder),
        "mixed": write_model(folder / "mixed.qsf", MIXED),
        "latent": write_model(folder / "latent.qsf", LATENT, dtype=Dtype.Q8),
        "own": write_recurrent(folder, case="gemma4-own"),
        "layer-norms": write_model(folder / "norms.qsf", LAYER_NORMS, norm=Norm.LAYER, seed=1),
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one-thread": ("llama", {"n_threads": 1}),
    "three-threads": ("llama", {"n_threads": 3, "draft_rows": 40}),
    "exact": ("llama", {"is_exact": True}),
    **{f"{bits}-bit-kv": ("llama", {"kv_k_type": bits, "kv_v_type": bits})
       for bits in (2, 4, 8, 16, 32)},
    "small-chunk": ("llama", {"chunk_tokens": 4}),
    "window": ("mistral", {"chunk_tokens": 8}),
    "mixed": ("mixed", {"chunk_tokens": 8}),
    "latent": ("latent", {"chunk_tokens": 8, "n_threads": 3}),
    "layer-norms": ("layer-norms", {}),
    "own": ("own", {"chunk_tokens": 8}),
    "experts": ("experts", {}),
    "streamed": ("streamed", {"ctx_tokens": 128}),
    "recurrent": ("recurrent", {"chunk_tokens": 40}),
    "recurrent-small": ("recurrent", {"chunk_tokens": 8, "n_threads": 3, "draft_rows": 5}),
    "delta": ("delta", {"chunk_tokens": 40, "n_threads": 2}),
    "delta-small": ("delta", {"chunk_tokens": 8, "draft_rows": 5}),
    "kda": ("kda", {"chunk_tokens": 24, "n_threads": 2, "draft_rows": 5}),
    "ssd": ("ssd", {"chunk_tokens": 24, "n_threads": 2, "draft_rows": 5}),
    "recurrent-short": ("recurrent", {"chunk_tokens": 8, "ctx_tokens": 100}),
}  # fmt: skip


def opened(name: str, path: Path, **options: Any) -> binding.NativeModel:
    """Open with what the case asks for; a streamed model in little memory."""
    if name == "streamed":
        model = open_streamed(path, **options)
    else:
        model = binding.NativeModel(path, binding.Options(budget_bytes=0, **options))
    plan = model.info().plan
    assert (plan.streamed_bytes > 0) == (name == "streamed")
    assert plan.draft_rows == options["draft_rows"]
    return model


class Walk:
    """Two sessions that do the same, one of them with drafts."""

    def __init__(self, name: str, path: Path, options: dict[str, Any], seed: int) -> None:
        self.rng = random.Random(seed)
        n_drafts = options.get("draft_rows", 12)
        self.models = [opened(name, path, **{**options, "draft_rows": n}) for n in (0, n_drafts)]
        self.n_drafts = n_drafts
        self.n_vocab = self.models[0].n_vocab
        self.plain, self.drafting = (model.create_session() for model in self.models)
        self.most = min(200, self.models[0].info().plan.ctx_tokens)
        self.tokens = array("I")
        self.future: list[int] = []

    def next_token(self) -> int:
        if not self.future:  # pieces that come again and again, so that the engine guesses too
            pieces = random.Random(self.rng.randrange(3))
            self.future = [pieces.randrange(self.n_vocab) for _ in range(30)]
        return self.future.pop(0)

    def offer(self) -> None:
        """Give the engine the right tokens, then wrong ones."""
        n = self.rng.randint(0, self.n_drafts)
        right = self.future[: self.rng.randint(0, n)]
        wrong = [self.rng.randrange(self.n_vocab) for _ in range(n - len(right))]
        self.drafting.draft(array("I", right + wrong))

    def rewind(self, n_tokens: int) -> None:
        try:
            self.plain.rewind(n_tokens)
        except QsfArgumentError:  # a window has gone on
            n_tokens = 0
            self.plain.rewind(0)
        self.drafting.rewind(n_tokens)
        del self.tokens[n_tokens:]

    def sync(self) -> None:
        del self.tokens[self.rng.randint(1, len(self.tokens)) :]
        self.tokens.extend(self.rng.randrange(self.n_vocab) for _ in range(3))
        for session in (self.plain, self.drafting):
            while session.sync_chunk(self.tokens) < len(self.tokens):
                pass

    def step(self) -> None:
        token = self.next_token()
        if self.rng.random() < 0.7:
            self.offer()
        if self.rng.random() < 0.1:
            for session in (self.plain, self.drafting):
                session.cancel()
                with pytest.raises(QsfCancelledError):
                    session.step(token)
        self.plain.step(token)
        self.drafting.step(token)
        self.tokens.append(token)

    def act(self) -> None:
        doubt = self.rng.random()
        if len(self.tokens) == self.most or doubt < 0.03:
            self.rewind(self.rng.randint(0, len(self.tokens)))
        elif doubt < 0.06 and 0 < len(self.tokens) < self.most - 3:
            self.sync()
        else:
            self.step()
            self.compare()

    def compare(self) -> None:
        want, have = np.empty((2, self.n_vocab), np.float32)
        self.plain.read_logits(want)
        self.drafting.read_logits(have)
        assert want.tobytes() == have.tobytes()
        assert self.drafting.position() == self.plain.position() == len(self.tokens)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_plain_steps(case: str, paths: dict[str, Path]) -> None:
    name, options = CASES[case]
    walk = Walk(name, paths[name], options, seed=len(case))
    for _ in range(250):
        walk.act()
    plain, drafting = walk.plain.stats(), walk.drafting.stats()
    assert plain.n_step_passes == plain.n_step_rows == plain.step_tokens == drafting.step_tokens
    assert drafting.n_step_passes < 0.8 * drafting.step_tokens
    n_right = drafting.step_tokens - drafting.n_step_passes
    assert sum(drafting.n_accepted) == n_right
    assert sum(drafting.n_drafted) == drafting.n_step_rows - drafting.n_step_passes > n_right


def test_two_sessions_take_turns_with_the_rows(paths: dict[str, Path]) -> None:
    model = opened("llama", paths["llama"], draft_rows=8, max_sessions=2)
    plain = opened("llama", paths["llama"], draft_rows=0, max_sessions=2)
    pairs = [(model.create_session(), plain.create_session()) for _ in range(2)]
    rng = random.Random(5)
    want, have = np.empty((2, model.n_vocab), np.float32)
    text = [rng.randrange(model.n_vocab) for _ in range(60)]
    for i in range(50):
        for drafting, other in pairs:
            if rng.random() < 0.5:
                drafting.draft(array("I", text[i + 1 : i + 5]))
            drafting.step(text[i])
            other.step(text[i])
            drafting.read_logits(have)
            other.read_logits(want)
            assert want.tobytes() == have.tobytes()


def test_wrong_drafts_are_refused(paths: dict[str, Path]) -> None:
    session = opened("llama", paths["llama"], draft_rows=4).create_session()
    with pytest.raises(QsfArgumentError, match="5 drafts are too many: the plan has room for 4"):
        session.draft(array("I", [1] * 5))
    with pytest.raises(QsfArgumentError, match="outside the vocabulary"):
        session.draft(array("I", [1, 2**31]))


def test_a_plan_without_room_has_no_drafts(paths: dict[str, Path]) -> None:
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15)
    least = binding.plan_model(paths["streamed"], asked)
    without = binding.plan_model(paths["streamed"], replace(asked, draft_rows=0))
    assert least.engine_bytes == without.engine_bytes  # of the least plan
    assert least.draft_rows == 0
    tight = replace(asked, budget_bytes=least.min_budget_bytes + 4096)
    assert binding.plan_model(paths["streamed"], tight).draft_rows == 0
    roomy = binding.plan_model(paths["streamed"], replace(asked, budget_bytes=0))
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
    *({"temperature": 0.9, "seed": seed} for seed in range(20)),
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
