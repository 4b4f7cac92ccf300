"""Sequences of slots are written to files and read again: bits, room, damage, kills."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import qsf
from make.fake_engine import FakeEngine, Told, next_token
from make.kind_models import MIXED, VOCAB, write_model
from make.recurrent_models import write_recurrent
from make.served import Client, engine_of, serving
from qsf import errors
from qsf.cli.serve import read_prefix
from qsf.cli.serve_options import ServeOptions
from qsf.file.layout import Dtype
from qsf.serve.scheduling.job import Choosing
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.scheduler import Scheduler
from qsf.serve.scheduling.slot_files import Costs, SlotFiles


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Tiers:
    """A scheduler on a made-up engine, with a folder."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 20, **engine: Any) -> None:
        self.engine = FakeEngine(**engine)
        self.clock = Clock()
        self.said: list[str] = []
        self.files = SlotFiles(folder, self.engine, limit_bytes, self.said.append, self.clock)
        self.metrics = Metrics()
        self.scheduler = Scheduler(self.engine, self.metrics, self.clock, self.files)

    def submit(self, first: int, n: int = 40, most: int = 8, owner: str = "") -> Told:
        told = Told(prompt(first, n), max_tokens=most, owner=owner, is_endless=True)
        self.scheduler.submit([told.job])
        return told

    def run(self) -> None:
        for _ in range(5000):
            if not self.scheduler.step():
                return
        pytest.fail("it does not end")

    def ask(self, first: int, n: int = 40, owner: str = "") -> int:
        """Answer a prompt; return how many of its tokens were not evaluated."""
        told = self.submit(first, n, owner=owner)
        self.run()
        assert told.text == text(first, n)
        return told.job.n_cached

    def close(self) -> None:
        self.scheduler.write_all()
        self.files.close()


def prompt(first: int, n: int) -> list[int]:
    return [1 + (first + i * (1 + first % 7)) % 49 for i in range(n)]


def text(first: int, n: int, most: int = 8) -> str:
    tokens = prompt(first, n)
    for _ in range(most):
        tokens.append(next_token(tokens, 1))
    return "".join(chr(0x40 + token) for token in tokens[n:])


def test_what_memory_gives_up_comes_back_from_a_file(tmp_path: Path) -> None:
    tmp_path /= "kept"
    tiers = Tiers(tmp_path, n_slots=2)
    assert tmp_path.stat().st_mode & 0o077 == 0
    with pytest.raises(errors.QsfArgumentError, match="in use by another server"):
        Tiers(tmp_path)
    assert [tiers.ask(first) for first in range(5)] == [0] * 5
    assert [tiers.ask(first) for first in range(5)] == [39] * 5
    assert tiers.engine.n_loaded >= 3
    assert tiers.ask(0, owner="b") == 0
    assert tiers.metrics.counters["kv_restored_tokens_total"] >= 3 * 39
    assert tiers.metrics.counters["kv_saved_seconds_total"] > 0
    assert tiers.scheduler.gauges()["kv_tokens_on_disk"] == tiers.files.n_tokens > 100
    tiers.close()
    again = Tiers(tmp_path, n_slots=2)
    assert [again.ask(first) for first in range(5)] == [39] * 5
    again.close()


def test_what_goes_on_replaces_its_beginning(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, n_slots=1)
    tokens = prompt(0, 34)
    for _ in range(3):
        told = Told(tokens, max_tokens=6, is_endless=True)
        tiers.scheduler.submit([told.job])
        tiers.run()
        tokens = [*told.job.tokens.tolist(), 3]
        tiers.ask(1)  # what was said goes to a file
    begun = [kept for kept in tiers.files.all if kept.tokens[:34].tolist() == prompt(0, 34)]
    assert [len(kept.tokens) for kept in begun] == [34 + 6 + 7 + 6]
    assert len(list(tmp_path.glob("*.qsfs"))) == len(tiers.files.all) == 2
    tiers.close()


def test_the_files_stay_inside_their_limit(tmp_path: Path) -> None:
    stranger = tmp_path / "0123456789abcdef-1.qsfs"
    stranger.write_bytes(b"of another model")
    limit_bytes = 4 * 4600
    tiers = Tiers(tmp_path, limit_bytes, n_slots=1)
    for first in range(9):
        tiers.ask(first)
        assert tiers.files.n_bytes <= limit_bytes
    assert len(tiers.files.all) >= 2
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("0000*.qsfs"))
    assert on_disk == tiers.files.n_bytes
    assert stranger.read_bytes() == b"of another model"
    assert tiers.ask(7) == 39  # the newest is there
    tiers.close()
    small = Tiers(tmp_path, 5000, n_slots=1)  # a smaller limit at the next start
    assert small.files.n_bytes <= 5000
    small.close()


def test_a_full_disk_costs_what_it_would_have_kept(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, n_slots=1)
    tiers.engine.is_disk_full = True
    assert [tiers.ask(first) for first in (0, 1, 0)] == [0, 0, 0]
    assert tiers.said == ["not kept: no space left"]  # once, and then it is off for a while
    assert tiers.scheduler.gauges()["session_files_failures"] == 1
    tiers.engine.is_disk_full = False
    tiers.clock.now += 61
    assert [tiers.ask(first) for first in (1, 0)] == [0, 39]
    tiers.close()


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_full_pool_sets_the_youngest_aside(tmp_path: Path, has_folder: bool) -> None:
    """Four at a time in the room of one and a half: all are answered, the oldest first."""
    engine = FakeEngine(4, n_contexts=2, ctx_tokens=64)
    engine.n_pool = 130
    clock, metrics = Clock(), Metrics()
    files = SlotFiles(tmp_path, engine, 1 << 20, print, clock) if has_folder else None
    scheduler = Scheduler(engine, metrics, clock, files)
    told = [Told(prompt(i, 36), max_tokens=12, is_endless=True) for i in range(6)]
    for one in told:
        scheduler.submit([one.job])
    for _ in range(1000):
        if not scheduler.step():
            break
        if told[0].n_ends == 0:  # the oldest is never set aside
            assert told[0].job in scheduler.running
        assert sum(len(tokens) for tokens in engine.held) <= 130
    assert [one.text for one in told] == [text(i, 36, 12) for i in range(6)]
    assert metrics.counters["kv_swaps_total"] >= 2
    assert metrics.counters["requests_total"] == sum(metrics.ends.values()) == 6
    assert (engine.n_loaded > 0) == has_folder
    if files is not None:
        files.close()


def test_a_damaged_file_is_removed_and_computed_again(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, n_slots=1)
    assert [tiers.ask(first) for first in (0, 1)] == [0, 0]
    (path,) = tmp_path.glob("*.qsfs")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tiers.scheduler._slots.keep(tiers.scheduler.slots[0], 0)
    assert tiers.ask(0) == 0
    assert not path.exists()
    assert len(tiers.said) == 1
    tiers.close()
    (path,) = tmp_path.glob("*.qsfs")
    path.write_bytes(path.read_bytes()[:200])
    again = Tiers(tmp_path, n_slots=1)
    assert not path.exists()
    assert again.ask(0) == 0
    again.close()


@pytest.mark.parametrize("n_steps", [1, 4, 9])
def test_who_was_set_aside_can_leave(n_steps: int) -> None:
    engine = FakeEngine(3, n_contexts=1)
    scheduler = Scheduler(engine, Metrics(), Clock(), queue_seconds=1)
    told = [Told(prompt(i, 30), max_tokens=10, is_endless=True) for i in range(3)]
    for one in told:
        scheduler.submit([one.job])
    for _ in range(n_steps):
        scheduler.step()
    scheduler.cancel(told[2].job)
    scheduler.close()
    while scheduler.step():
        pass
    assert [one.n_ends for one in told] == [1, 1, 1]
    assert told[2].end == "cancelled"
    assert all(one.text == text(i, 30, 10) for i, one in enumerate(told) if one.end == "length")
    assert told[0].end == "length"


class AnyTier(RuleBasedStateMachine):
    """Conversations come back in any order, servers end or are killed, files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.start(20_000)

    def start(self, limit_bytes: int) -> None:
        path = Path(self.folder)
        self.tiers = Tiers(path, limit_bytes, n_slots=2, n_kept=1, n_contexts=1)
        self.asked: list[tuple[Told, int, int]] = []

    @rule(first=st.integers(0, 6), n=st.integers(1, 50), owner=st.sampled_from("ab"))
    def ask(self, first: int, n: int, owner: str) -> None:
        self.asked.append((self.tiers.submit(first, n, owner=owner), first, n))

    @rule(n_steps=st.integers(1, 9))
    def step(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.tiers.scheduler.step()

    @rule()
    def finish(self) -> None:
        self.tiers.run()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Let a client go, perhaps one whose job was set aside."""
        if self.asked:
            told, _, _ = data.draw(st.sampled_from(self.asked))
            self.tiers.scheduler.cancel(told.job)

    @rule(is_killed=st.booleans(), limit_bytes=st.sampled_from([9_000, 20_000, 60_000]))
    def restart(self, is_killed: bool, limit_bytes: int) -> None:
        if is_killed:
            self.tiers.files.close()
        else:
            self.tiers.run()
            self.tiers.close()
        self.start(limit_bytes)

    @rule(data=st.data(), is_full=st.booleans())
    def damage(self, data: st.DataObject, is_full: bool) -> None:
        self.tiers.engine.is_disk_full = is_full
        paths = sorted(Path(self.folder).glob("*.qsfs"))
        if paths:
            path = data.draw(st.sampled_from(paths))
            content = bytearray(path.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1
            path.write_bytes(content)

    @invariant()
    def texts_are_right(self) -> None:
        assert self.tiers.files.n_bytes <= self.tiers.files._limit_bytes
        assert {kept.path for kept in self.tiers.files.all} == set(Path(self.folder).glob("*.qsfs"))
        for slot in self.tiers.scheduler.slots:
            assert slot.n_held == len(self.tiers.engine.held[slot.index])
        for told, first, n in self.asked:
            whole = text(first, n)
            assert whole.startswith(told.text)
            if told.n_ends:
                assert told.end == "cancelled" or (told.end, told.text) == ("length", whole)

    def teardown(self) -> None:
        self.tiers.run()
        self.texts_are_right()
        assert all(told.n_ends == 1 for told, _, _ in self.asked)
        self.tiers.files.close()
        shutil.rmtree(self.folder)


TestAnyTier = AnyTier.TestCase
TestAnyTier.settings = settings(stateful_step_count=30)


def write_until_killed(folder: Path, n_calls: int) -> None:
    """In a fork: write sequences, and end as by SIGKILL at the next call of the system."""
    n_left = n_calls

    def before(call: Any) -> Any:
        def checked(*arguments: Any, **named: Any) -> Any:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return checked

    for name in ("pwrite", "fsync", "replace", "rename", "unlink", "open", "close"):
        setattr(os, name, before(getattr(os, name)))
    tiers = Tiers(folder, n_slots=1)
    for first in (0, 1, 0, 2):
        tiers.ask(first)
    tiers.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_call_leaves_no_wrong_text(tmp_path: Path) -> None:
    """While sequences are written: the next start finds whole files, and no others."""
    n_killed = 0
    for n_calls in range(0, 60, 4):
        folder = tmp_path / str(n_calls)
        pid = os.fork()
        if pid == 0:
            try:
                write_until_killed(folder, n_calls)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        n_killed += code != 0
        tiers = Tiers(folder, n_slots=1)
        assert not list(folder.glob(".*.partial"))
        for first in range(3):
            tiers.ask(first)
        assert tiers.said == []
        tiers.close()
    assert n_killed > 5


def by_argmax(model: qsf.Model, tokens: list[int]) -> list[int]:
    """Six tokens, each from logits that are evaluated from the start."""
    tokens = list(tokens)
    for _ in range(6):
        model.session.rewind(0)
        tokens.append(int(model.logits(tokens, first_row=len(tokens) - 1)[0].argmax()))
    return tokens[-6:]


def test_bits_after_swaps_and_restarts(
    tiny_llama_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at a time in the room of one, and ten times what memory holds."""
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("streams wait for the disk"))
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 90).tolist() for i in range(10)]
    options: dict[str, Any] = {"ram_budget": None, "max_seq_len": 128}
    with qsf.Model(tiny_llama_8bit, **options) as model:
        alone = [by_argmax(model, tokens) for tokens in prompts]
    n_swaps = n_cached = 0.0
    for _ in range(2):
        with qsf.Model(tiny_llama_8bit, sessions=4, kv_contexts=1, **options) as model:
            engine = engine_of(model, 3)
            files = SlotFiles(tmp_path, engine, 64 << 20, pytest.fail)
            scheduler = Scheduler(engine, metrics := Metrics(), files=files)
            scheduler.prepare()
            told = [Told(tokens, max_tokens=6, is_endless=True) for tokens in prompts]
            for one in told:
                one.job.choosing = Choosing(params=model.sampling_params(temperature=0), seed=1)
                scheduler.submit([one.job])
            while scheduler.step():
                pass
            scheduler.write_all()
            files.close()
        assert [one.job.tokens[90:].tolist() for one in told] == alone
        n_swaps += metrics.counters["kv_swaps_total"]
        n_cached = metrics.counters["prefix_cache_hits_total"]
    assert n_swaps > 0
    assert n_cached == 10 * 89


def test_costs_are_learned() -> None:
    costs = Costs()
    for first in (0, 256, 512, 1024):
        costs.learn_evaluating(first, 256, 256 * 2e-3 + 1e-6 * 256 * (first + 128))
    assert costs.evaluating(0, 1000) == pytest.approx(2.0 + 0.5, rel=1e-6)
    assert costs.evaluating(1000, 1100) == pytest.approx(0.2 + 0.105, rel=1e-6)
    costs.learn_reading(10_000_000, 0.05)
    assert costs.reading(20_000_000) == pytest.approx(0.1)
    one = Costs()
    one.learn_evaluating(0, 64, 0.64)
    assert one.evaluating(0, 64) == pytest.approx(0.64)


# ---- beginnings of prompts that several slots of a real model have in common: the same bits ----
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 150).tolist()


def greedy(model: qsf.Model) -> Choosing:
    return Choosing(params=model.sampling_params(temperature=0), seed=1)


@pytest.mark.parametrize("name", ["llama", "mixed", "own"])
def test_the_text_is_that_of_a_prompt_alone(
    tmp_path: Path, tiny_llama_8bit: Path, name: str
) -> None:
    path = tiny_llama_8bit
    if name == "mixed":
        path = tmp_path / "mixed.qsf"
        write_model(path, MIXED, dtype=Dtype.Q4)
    elif name == "own":
        path = write_recurrent(tmp_path, case="gemma4-own")
    prompts = [TOKENS[:100], [*TOKENS[:100], 3], [*TOKENS[:70], 4, 5], TOKENS[:100]]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        alone = [by_argmax(model, prompt) for prompt in prompts]
    with qsf.Model(path, ram_budget=None, sessions=3, max_seq_len=200) as model:
        scheduler = Scheduler(engine_of(model), Metrics())
        told = []
        for prompt in prompts:  # each while those before are written
            told.append(Told(prompt, max_tokens=6, is_endless=True))
            told[-1].job.choosing = greedy(model)
            scheduler.submit([told[-1].job])
            scheduler.step()
        while scheduler.step():
            pass
    assert [one.job.tokens[one.job.n_prompt :].tolist() for one in told] == alone
    cached = [one.job.n_cached for one in told]
    assert cached[:3] == [0, 100, 70]
    assert cached[3] >= 99


@pytest.mark.parametrize("is_messages", [False, True])
def test_a_pinned_prefix_is_shared_by_all_and_stays(
    tiny_chat_8bit: Path, tmp_path: Path, is_messages: bool
) -> None:
    text = "You tell stories about animals in the wood. " * 4
    path = tmp_path / ("prefix.json" if is_messages else "prefix.txt")
    path.write_text(json.dumps([{"role": "system", "content": text}]) if is_messages else text)

    def ask(client: Client, i: int) -> tuple[str, int]:
        fields: dict[str, Any] = {"max_tokens": 5, "seed": 4, "cache_salt": str(i)}
        if is_messages:
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": f"{i} foxes"},
            ]
            answer = client.post("/v1/chat/completions", {**fields, "messages": messages}).json
            said = answer["choices"][0]["message"]["content"]
        else:
            answer = client.post("/v1/completions", {**fields, "prompt": f"{text}{i} foxes"}).json
            said = answer["choices"][0]["text"]
        return said, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(tiny_chat_8bit, parallel=1) as client:
        alone = [ask(client, i) for i in range(4)]
    with serving(tiny_chat_8bit, parallel=1, prefix=str(path)) as client:
        n_prefix = client.server.scheduler.slots[-1].n_held
        shared = [ask(client, i) for i in range(4)]
    assert [text for text, _ in shared] == [text for text, _ in alone]
    assert [n for _, n in alone] == [0] * 4
    assert all(n_prefix - 2 <= n <= n_prefix for _, n in shared)  # the last may merge
    assert n_prefix > 40


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.txt", b"word " * 900, "tokens"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.json", b"{}", "not a conversation"),
        ("none.txt", None, "No such file"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(
    tiny_chat_8bit: Path, tmp_path: Path, name: str, data: bytes | None, text: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with (
        qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=3, max_seq_len=200) as model,
        pytest.raises(errors.QsfError, match=text),
    ):
        read_prefix(tmp_path / name, model)
    with pytest.raises(errors.QsfArgumentError, match="at most 255"):
        ServeOptions(prefix="a", parallel=256)
