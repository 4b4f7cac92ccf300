# SPDX-License-Identifier: Apache-2.0
"""Many sessions in one pass: an answer never depends on who else is in it."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.kind_models import LATENT, LAYER_NORMS, MIXED, write_model
from make.recurrent_models import write_recurrent
from make.streamed_models import make_streamed_gpt2
from make.tiny_checkpoints import make_llama, make_mistral
from qsf.errors import QsfArgumentError
from qsf.file.layout import Dtype, Norm
from qsf.native import binding
from qsf.native.passing import run_pass
from qsf.passes import Choice, Chosen, PassItem, Sampler, Wants
from qsf_converter import convert

N_SESSIONS = 5


def make_tiny(folder: Path, make: Callable[..., Path], name: str) -> Path:
    make(folder / name, seed=3)
    convert(folder / name, folder / f"{name}.qsf", quant_type="4bit")
    return folder / f"{name}.qsf"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("passes")
    return {
        "llama": make_tiny(folder, make_llama, "llama"),
        "mistral": make_tiny(folder, make_mistral, "mistral"),
        "mixed": write_model(folder / "mixed.qsf", MIXED),
        "layer-norms": write_model(folder / "norms.qsf", LAYER_NORMS, norm=Norm.LAYER, seed=1),
        "latent": write_model(folder / "latent.qsf", LATENT, dtype=Dtype.Q8),
        "streamed": make_streamed_gpt2(folder),
        "experts": Path(__file__).parents[2] / "golden" / "tiny-experts-4bit.qsf",
        "recurrent": write_recurrent(folder),
        "delta": write_recurrent(folder, case="qwen3_5-three"),
        "kda": write_recurrent(folder, case="kimi_linear"),
        "own": write_recurrent(folder, case="gemma4-own"),
        "ssd": write_recurrent(folder, case="nemotron_h-moe"),
        "ssd-beside": write_recurrent(folder, case="falcon_h1"),
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one-thread": ("llama", {"n_threads": 1}),
    "three-threads": ("llama", {"n_threads": 3, "chunk_tokens": 37}),
    "exact": ("llama", {"is_exact": True}),
    **{f"{bits}-bit-kv": ("llama", {"kv_k_type": bits, "kv_v_type": bits})
       for bits in (2, 4, 8, 16, 32)},
    "window": ("mistral", {"chunk_tokens": 16}),
    "mixed": ("mixed", {"chunk_tokens": 16}),
    "latent": ("latent", {"chunk_tokens": 16, "n_threads": 3, "kv_k_type": 4, "kv_v_type": 8}),
    "mixed-many-rows": ("mixed", {"n_threads": 2, "logits_rows": 40, "chunk_tokens": 40}),
    "layer-norms": ("layer-norms", {"chunk_tokens": 24}),
    "experts": ("experts", {"chunk_tokens": 16}),
    "streamed": ("streamed", {"chunk_tokens": 32, "ctx_tokens": 128}),
    "recurrent": ("recurrent", {"n_threads": 3}),
    "delta": ("delta", {"chunk_tokens": 16, "n_threads": 3}),
    "kda": ("kda", {"chunk_tokens": 16, "n_threads": 3}),
    "own": ("own", {"chunk_tokens": 16, "n_threads": 2}),
    "ssd": ("ssd", {"chunk_tokens": 16, "n_threads": 3}),
    "ssd-beside": ("ssd-beside", {"chunk_tokens": 24, "kv_window_tokens": 40}),
    "recurrent-window": ("recurrent", {"chunk_tokens": 16, "kv_window_tokens": 40}),
}  # fmt: skip


def opened(name: str, path: Path, **options: Any) -> binding.NativeModel:
    """Open with what the case asks for; a streamed model in the least budget."""
    asked = binding.Options(budget_bytes=0, **options)
    if name == "streamed":
        least = binding.plan_model(path, replace(asked, budget_bytes=1 << 20)).min_budget_bytes
        asked = replace(asked, budget_bytes=least + (1 << 20))
    model = binding.NativeModel(path, asked)
    assert (model.info().plan.streamed_bytes > 0) == (name == "streamed")
    return model


class Mixture:
    """Random passes, and what each of them gave: (tokens of a session, logits of the last)."""

    def __init__(self, model: binding.NativeModel, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = model
        self.plan = model.info().plan
        self.most = min(120, self.plan.ctx_tokens)
        self.sessions = [model.create_session() for _ in range(N_SESSIONS)]
        self.tokens = [array("I") for _ in self.sessions]
        self.seen: list[tuple[list[int], NDArray[np.float32]]] = []
        self.n_cancelled = 0

    def draw(self, n: int) -> array[int]:
        return array("I", [self.rng.randrange(self.model.n_vocab) for _ in range(n)])

    def rewind(self, i: int) -> None:
        n_tokens = self.rng.randrange(len(self.tokens[i]) + 1)
        try:
            self.sessions[i].rewind(n_tokens)
        except QsfArgumentError:  # a window has gone on
            n_tokens = 0
            self.sessions[i].rewind(0)
        del self.tokens[i][n_tokens:]

    def items(self) -> list[tuple[int, PassItem]]:
        left, rows_left = self.plan.chunk_tokens, self.plan.logits_rows
        items: list[tuple[int, PassItem]] = []
        for i in self.rng.sample(range(N_SESSIONS), self.rng.randint(1, N_SESSIONS)):
            if len(self.tokens[i]) >= self.most - 2 or self.rng.random() < 0.1:
                self.rewind(i)
            room = min(left, self.most - len(self.tokens[i]))
            if room < 1:
                continue
            n = 1 if self.rng.random() < 0.5 else self.rng.randint(1, room)
            wants: Wants = self.rng.choice(["none", "last", "last", "all"])
            n_rows = {"none": 0, "last": 1, "all": n}[wants]
            if n_rows > rows_left:
                wants, n_rows = "none", 0
            rows_left -= n_rows
            logits = np.empty((n, self.model.n_vocab), np.float32) if wants == "all" else None
            items.append((i, PassItem(self.sessions[i], self.draw(n), wants, logits)))
            left -= n
        return items

    def step(self) -> None:
        items = self.items()
        asked = {i for i, _ in items if self.rng.random() < 0.1}
        for i in asked:
            self.sessions[i].cancel()
        if not items:
            return
        natives = [item.session for _, item in items]
        report = run_pass(self.model, natives, [item for _, item in items])
        assert report.n_tokens == sum(len(item.tokens) for _, item in items)
        for i, item in items:
            assert item.is_cancelled == (i in asked)
            if item.is_cancelled:
                self.n_cancelled += 1
            else:
                self.tokens[i].extend(item.tokens)
                self.note(i, item)
            assert self.sessions[i].position() == len(self.tokens[i])

    def note(self, i: int, item: PassItem) -> None:
        n_before = len(self.tokens[i]) - len(item.tokens)
        if item.logits is not None:
            for row, logits in enumerate(item.logits):
                self.seen.append((self.tokens[i][: n_before + row + 1].tolist(), logits))
        if item.wants != "none":
            out = np.empty(self.model.n_vocab, np.float32)
            self.sessions[i].read_logits(out)
            self.seen.append((self.tokens[i].tolist(), out))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_each_sequence_is_as_if_it_were_alone(paths: dict[str, Path], case: str, seed: int) -> None:
    name, options = CASES[case]
    model = opened(name, paths[name], max_sessions=N_SESSIONS, **options)
    mixture = Mixture(model, seed)
    for _ in range(40):
        mixture.step()
    assert len(mixture.seen) > 40
    assert mixture.n_cancelled > 0
    alone = opened(name, paths[name], **options)
    session = alone.create_session()
    row = np.empty((1, model.n_vocab), np.float32)
    for tokens, logits in mixture.seen:
        n_done = 0
        while n_done < len(tokens):
            n_done = session.score_chunk(array("I", tokens), row, n_done, len(tokens) - 1)
        assert np.array_equal(row[0], logits)


# ---- Model.run_pass and Model.choose ----


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=4) as opened:
        yield opened


@pytest.fixture
def sessions(model: qsf.Model) -> Iterator[list[qsf.Session]]:
    created = [model.create_session() for _ in range(3)]
    yield created
    for session in created:
        session.close()


def mask_of(n_vocab: int, *allowed: int) -> bytes:
    words = array("I", [0] * ((n_vocab + 31) // 32))
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return words.tobytes()


def test_together_is_the_text_of_each_alone(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    prompts = ["Once upon a time", "The old man", "She"]
    params = model.sampling_params(temperature=0.8, repetition_penalty=1.1)
    alone = []
    for i, prompt in enumerate(prompts):
        chosen: list[qsf.ChosenToken] = []
        list(model.generate(prompt, temperature=0.8, repetition_penalty=1.1, seed=i, max_tokens=9,
                            on_token=chosen.append, top_logprobs=2))  # fmt: skip
        alone.append([(token.id, token.logprob, token.top) for token in chosen])
    tokens = [array("I", model.tokenize(prompt)) for prompt in prompts]
    samplers = [Sampler(params, seed) for seed in range(3)]
    have: list[list[tuple[int, float | None, tuple[tuple[int, float], ...]]]] = [[], [], []]
    new: list[Sequence[int]] = list(tokens)
    for _ in range(9):
        items = [PassItem(*pair) for pair in zip(sessions, new, strict=True)]
        report = model.run_pass(items)
        assert report.n_rows == 3
        each = zip(sessions, samplers, tokens, strict=True)
        choices = [Choice(*parts, top_logprobs=2) for parts in each]
        for i, result in enumerate(model.choose(choices)):
            assert isinstance(result, Chosen)
            have[i].append((result.token, result.logprob, result.top))
            new[i] = [result.token]
        tokens = [array("I", [*t, *n]) for t, n in zip(tokens, new, strict=True)]
    assert [answer[: len(want)] for answer, want in zip(have, alone, strict=True)] == alone
    assert [s.tokens for s in sessions] == [t[:-1].tolist() for t in tokens]


def test_all_rows_are_those_of_logits(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    item = PassItem(sessions[0], [5, 6, 7, 8, 9, 10, 11], "all")
    model.run_pass([item, PassItem(sessions[1], [1, 2], "none")])
    assert item.logits is not None
    assert np.array_equal(item.logits, model.logits([5, 6, 7, 8, 9, 10, 11]))
    with pytest.raises(QsfArgumentError, match="no logits"):
        model.choose([Choice(sessions[1], None, array("I"))])


def test_a_choice_obeys_mask_bias_and_penalties(
    model: qsf.Model, sessions: list[qsf.Session]
) -> None:
    n_vocab = model.info.n_vocab
    greedy = model.sampling_params(temperature=0)
    model.run_pass([PassItem(sessions[0], [1, 2, 3])])
    order = np.argsort(-model.logits([1, 2, 3])[-1], kind="stable").tolist()
    first, second, third = order[:3]

    def choose(sampler: Sampler, recent: Sequence[int] = (), **more: Any) -> Any:
        choice = Choice(sessions[0], sampler, array("I", recent), **more)
        result = model.choose([choice])[0]
        return result.token if isinstance(result, Chosen) else result

    plain = Sampler(greedy, 0)
    assert choose(plain) == first
    assert choose(plain, mask=mask_of(n_vocab, third, second)) == second
    assert choose(plain, mask=mask_of(n_vocab, n_vocab - 1)) == n_vocab - 1
    assert isinstance(choose(plain, mask=mask_of(n_vocab)), QsfArgumentError)
    assert choose(Sampler(greedy, 0, logit_bias={first: -50.0, third: 100.0})) == third
    often = Sampler(greedy, 0, frequency_penalty=50.0)
    assert choose(often, [first, second, second], n_counted=3) == third
    assert choose(often, [first, second, second], n_counted=2) == first
    assert choose(often, [first, second], n_counted=1) == first
    once = Sampler(greedy, 0, presence_penalty=50.0)
    assert choose(once, [first, first, second], n_counted=3) == third
    drawn = Sampler(model.sampling_params(temperature=5, top_p=1, top_k=0), 7)
    allowed = {choose(drawn, mask=mask_of(n_vocab, *order[40:50])) for _ in range(200)}
    assert allowed == set(order[40:50])
    few = Sampler(model.sampling_params(temperature=5, top_p=0.9, top_k=40), 7)
    assert {choose(few, mask=mask_of(n_vocab, *order[-5:])) for _ in range(99)} <= set(order[-5:])
    with pytest.raises(QsfArgumentError, match="too short"):
        choose(plain, mask=b"\xff")
    with pytest.raises(QsfArgumentError, match="frequency_penalty is 1e\\+07"):
        choose(Sampler(greedy, 0, frequency_penalty=1e7))


def test_one_allowed_token_draws_nothing(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    n_vocab = model.info.n_vocab
    params = model.sampling_params(temperature=1.5, top_p=1, top_k=0)
    model.run_pass([PassItem(sessions[0], [1, 2, 3])])

    def draws(forced_first: bool) -> list[Any]:
        sampler = Sampler(params, 3)
        masks = [mask_of(n_vocab, 4)] * forced_first + [None] * 5
        return [model.choose([Choice(sessions[0], sampler, array("I"), mask=m)])[0]
                for m in masks][-5:]  # fmt: skip

    assert draws(forced_first=True) == draws(forced_first=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [10**6]}, "outside the vocabulary"),
        ({"tokens": [1] * 600}, "context|chunk"),
        ({"wants": "some"}, "wants must be one of"),
    ],
)
def test_a_wrong_item_evaluates_nothing(
    model: qsf.Model, sessions: list[qsf.Session], change: dict[str, Any], match: str
) -> None:
    wrong = {"session": sessions[1], "tokens": [1], "wants": "last", **change}
    with pytest.raises(QsfArgumentError, match=match):
        model.run_pass([PassItem(sessions[0], [1, 2]), PassItem(**wrong)])
    assert sessions[0].tokens == sessions[1].tokens == []
    items = [PassItem(sessions[0], array("I", [1]))] * 2
    with pytest.raises(QsfArgumentError, match="same session"):
        run_pass(model._opened.native, [sessions[0]._native] * 2, items)


def test_a_cancelled_session_stays_as_it_was(model: qsf.Model, sessions: list[qsf.Session]) -> None:
    """What comes between two passes is too late; what comes during one ends its own item."""
    sessions[0].cancel()
    sessions[0]._native.cancel()  # as if it came at the very end of a pass
    first = PassItem(sessions[0], [1, 2])
    model.run_pass([first, PassItem(sessions[1], [3])])
    assert not first.is_cancelled
    assert sessions[0].tokens == [1, 2]
    ended = 0
    for _ in range(200):
        item, other = PassItem(sessions[0], [5] * 60), PassItem(sessions[1], [6])
        thread = threading.Timer(0.0005, sessions[0].cancel)
        thread.start()
        model.run_pass([item, other])
        thread.join()
        ended += item.is_cancelled
        assert not other.is_cancelled
        assert sessions[0].tokens == [1, 2] + ([] if item.is_cancelled else [5] * 60)
        sessions[0].rewind(2)
        sessions[1].rewind(1)
        if ended:
            break
    assert ended
