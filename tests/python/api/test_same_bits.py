# SPDX-License-Identifier: Apache-2.0
"""Settings change speed and memory, never a bit of the logits: one model of each kind.

That all instruction sets give the same bits is what tests/c/kernels proves of each kernel, and
``python -m qsf.selftest`` of a whole model.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.golden_adapters import write_adapter
from make.kind_models import (
    LAYER_NORMS,
    MIXED,
    OWN_ARCH,
    RECURRENT,
    ROUTED,
    SHARED,
    VOCAB,
    write_model,
)
from make.mtp_models import open_streamed, write_pair
from make.outlier_files import add_outliers, convert_fine, random_entries
from make.recurrent_models import write_recurrent
from make.stored import Reader
from make.streamed_models import make_streamed_gpt2
from make.tiny_checkpoints import make_llama
from qsf.errors import QsfArgumentError, QsfCancelledError
from qsf.file.layout import Arch, Dtype, Norm
from qsf.native import binding
from qsf.native.binding import copy_tokens
from qsf.passes import PassItem, Wants, run_pass
from qsf.report.record import read_meta
from qsf.session import copy_held
from qsf_converter import convert, convert_adapter

TOKENS = array("I", np.random.default_rng(8).integers(0, VOCAB, 150).tolist())
LONG = array("I", np.random.default_rng(9).integers(0, VOCAB, 330).tolist())
N_SESSIONS = 3
Logits = NDArray[np.float32]


def llama(folder: Path, path: Path, call: Callable[..., Any] = convert) -> None:
    call(make_llama(folder / "llama", seed=3, max_tokens=512), path, quant_type="4bit", force=True)


def outliers(folder: Path, path: Path) -> None:
    llama(folder, folder / "plain.qsf")
    add_outliers(folder / "plain.qsf", path, random_entries(9))


MAKERS: dict[str, Callable[[Path, Path], Any]] = {
    "llama": llama,
    "fine": lambda folder, path: llama(folder, path, convert_fine),  # 16-bit activations
    "outliers": outliers,
    "mixed": lambda _, path: write_model(path, MIXED, dtype=Dtype.Q4),
    "layer-norms": lambda _, path: write_model(
        path, LAYER_NORMS, dtype=Dtype.Q4, norm=Norm.LAYER, arch=Arch(tied_head=True), seed=3
    ),
    "routed": lambda _, path: write_model(path, ROUTED, dtype=Dtype.Q8, seed=5),
    "recurrent": lambda _, path: write_model(path, RECURRENT, dtype=Dtype.Q4, seed=6),
    "shared": lambda _, path: write_model(path, SHARED, dtype=Dtype.F16, arch=OWN_ARCH, seed=7),
    "short-conv": lambda folder, path: write_recurrent(folder, case="lfm2").rename(path),
    "mtp": lambda folder, path: write_recurrent(folder, case="qwen3_5+mtp").rename(path),
    "looped": lambda folder, path: write_recurrent(folder, case="inkling2_loop").rename(path),
}
KINDS = list(MAKERS)


def with_adapter(folder: Path, path: Path) -> None:
    """The model of `llama`, and beside it an adapter of all of its matrices, of several ranks."""
    llama(folder, path)
    rng, tensors = np.random.default_rng(4), {}
    with Reader(path) as reader:
        sources = {t["source"]: t for t in (read_meta(reader) or {})["quality"]["tensors"]}
    for i, (name, t) in enumerate(sources.items()):
        if "_proj" in name:
            at, rank = "base_model.model." + name.removesuffix(".weight"), 1 + 9 * i % 40
            tensors[f"{at}.lora_A.weight"] = rng.normal(0, 0.1, (rank, t["n_cols"])).astype("f4")
            tensors[f"{at}.lora_B.weight"] = rng.normal(0, 0.1, (t["n_rows"], rank)).astype("f4")
    ranks = {n[17:-14]: len(v) for n, v in tensors.items() if "lora_A" in n}
    adapter = write_adapter(folder / "lora", tensors, rank_pattern=ranks)
    convert_adapter(str(adapter), path, path.with_suffix(".adapter"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("same")

    def make(name: str) -> Path:
        if name == "experts":
            return Path(__file__).parents[2] / "golden" / "tiny-experts-4bit.qsf"
        path = folder / f"{name}.qsf"
        if not path.exists():
            MAKERS[name](folder, path)
        return path

    MAKERS["lora"] = with_adapter
    MAKERS["lent"] = lambda folder, path: write_pair(folder, path.stem)
    MAKERS["streamed"] = lambda folder, path: make_streamed_gpt2(folder).rename(path)
    return make


def opened(path: Path, **options: Any) -> binding.NativeModel:
    if path.with_suffix(".adapter").exists():
        options["adapters"] = ((str(path.with_suffix(".adapter")), 0.5),) * 2
    try:
        return binding.NativeModel(path, binding.Options(**{"budget_bytes": 0, **options}))
    except QsfArgumentError as error:
        if "lies in memory" in str(error):  # no disk for cold pages here
            pytest.skip(str(error))
        raise


def all_logits(path: Path, tokens: array[int] = TOKENS, **options: Any) -> Logits:
    """The logits of each token, chunk by chunk."""
    model = opened(path, **options)
    session = model.create_session()
    rows, n_done = np.empty((len(tokens), model.n_vocab), np.float32), 0
    while n_done < len(tokens):
        n_done = session.score_chunk(tokens, rows, n_done)
    session.close()
    model.close()
    return rows


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "lora"])
def test_threads_pieces_and_memory(
    made: Callable[[str], Path], kind: str, is_exact: bool, tmp_path: Path
) -> None:
    path = made(kind)
    how: dict[str, Any] = {"exact": is_exact, "ctx_tokens": 256}
    want = all_logits(path, n_threads=1, chunk_tokens=256, **how)
    assert np.isfinite(want).all()
    for n_threads, chunk_tokens in ((2, 1), (3, 7), (2, 100)):
        how |= {"n_threads": n_threads, "chunk_tokens": chunk_tokens}
        assert np.array_equal(all_logits(path, **how), want)
    how |= {"chunk_tokens": 16, "draft_rows": 0}
    least = binding.plan_model(path, binding.Options(budget_bytes=1 << 20, **how))
    how["budget_bytes"] = least.min_budget_bytes + (1 << 20)
    assert np.array_equal(all_logits(path, **how), want)
    how |= {"budget_bytes": 0, "kv_folder": tmp_path, "kv_resident_tokens": 32}
    assert np.array_equal(all_logits(path, **how), want)


@pytest.mark.parametrize("kv_types", [(32, 32), (16, 16), (8, 8), (4, 4), (2, 16), (8, 2)])
@pytest.mark.parametrize("kind", ["llama", "mixed", "routed"])
def test_contexts_of_several_spans(
    made: Callable[[str], Path], kind: str, kv_types: tuple[int, int], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"ctx_tokens": 400, "kv_folder": tmp_path}
    how |= {"kv_k_type": kv_types[0], "kv_v_type": kv_types[1]}
    want = all_logits(made(kind), LONG, n_threads=1, chunk_tokens=64, **how)
    for n_threads, chunk_tokens, n_resident in ((1, 1, None), (3, 64, 1), (2, 7, 130)):
        how |= {"n_threads": n_threads, "chunk_tokens": chunk_tokens}
        how["kv_resident_tokens"] = n_resident
        assert np.array_equal(all_logits(made(kind), LONG, **how), want)
    if kind == "mixed":  # a policy that keeps no file; chunks cross the window and what is pinned
        how |= {"kv_window_tokens": 140, "kv_pinned_tokens": 100}
        how |= {"kv_folder": None, "kv_resident_tokens": None}
        want = all_logits(made(kind), LONG, **{**how, "n_threads": 1, "chunk_tokens": 64})
        assert np.array_equal(all_logits(made(kind), LONG, **how), want)


# ---- sessions ----
@pytest.mark.parametrize("kind", [*KINDS, "window"])
def test_forks_and_files_go_on(made: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """With other threads, and a context for which rings have other sizes; and going back."""
    tokens, kept = TOKENS.tolist(), tmp_path / "kept"
    kv_type = ("k8v4", "f16", "2bit")[[*KINDS, "window"].index(kind) % 3]
    how: dict[str, Any] = {"ram_budget": None, "kv_type": kv_type, "sessions": 3}
    if kind == "window":
        kind, how["kv_policy"] = "mixed", "window:32:20"
    with qsf.Model(made(kind), threads=1, max_seq_len=220, **how) as model:
        want = model.logits(tokens)
        other = [*tokens[:75], *tokens[20:40]]
        with model.create_session() as session, model.create_session() as fork:
            session.logits(tokens[:101])
            session.save(kept)
            copy_held(fork, session)
            assert np.array_equal(fork.logits(tokens, first_row=101), want[101:])
            assert fork.engine_stats.prompt_tokens == 49
            assert np.array_equal(session.logits(tokens, first_row=101), want[101:])
        branch = model.logits(other, first_row=75)
    for ctx, threads in ((220, 2), (299, 3)):
        with qsf.Model(made(kind), threads=threads, max_seq_len=ctx, **how) as model:
            model.session.load(kept)
            assert np.array_equal(model.logits(tokens, first_row=101), want[101:])
            assert model.session_stats.prompt_tokens == 49
            assert np.array_equal(model.logits(other, first_row=75), branch)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {"chunk_tokens": 24, "n_threads": 2}) for kind in KINDS},
    **{f"{bits}-bit-kv": ("llama", {"kv_k_type": bits, "kv_v_type": 16 // bits})
       for bits in (2, 4, 8)},
    "exact": ("llama", {"exact": True, "n_threads": 3}),
    "lora": ("lora", {"chunk_tokens": 24, "n_threads": 2}),
    "small-chunk": ("mixed", {"chunk_tokens": 9, "logits_rows": 9}),
    "scarce-kv": ("llama", {"kv_contexts": 2, "ctx_tokens": 64}),
    "window": ("mixed", {"kv_window_tokens": 40, "kv_pinned_tokens": 33, "chunk_tokens": 16}),
    "recurrent-window": ("recurrent", {"kv_window_tokens": 40, "chunk_tokens": 16}),
    "few-drafts": ("recurrent", {"draft_rows": 5, "chunk_tokens": 8}),
    "experts": ("experts", {"chunk_tokens": 32}),
    "cold": ("llama", {"chunk_tokens": 8, "kv_resident_tokens": 1, "draft_rows": 5}),
    "streamed": ("streamed", {"ctx_tokens": 128}),
    "borrowed": ("lent", {"draft_path": "drafter.qsf"}),
    "lent-window": ("lent", {
        "draft_path": "drafter.qsf", "kv_window_tokens": 40, "chunk_tokens": 16,
    }),
}  # fmt: skip


class Walk:
    """Passes of many sessions, steps of one, right and wrong drafts, rewinds and cancels.

    ``seen`` has tokens, and the logits that a session gave for the last of them.
    """

    def __init__(self, case: str, path: Path) -> None:
        self.rng = random.Random(case)
        options = {
            "max_sessions": N_SESSIONS,
            "draft_rows": 12,
            "logits_rows": 24,
            **CASES[case][1],
        }
        if "kv_resident_tokens" in options:
            options["kv_folder"] = path.parent
        if "draft_path" in options:
            options["draft_path"] = path.with_name(options["draft_path"])
        if case == "streamed":
            self.model = open_streamed(path, least_chunk_tokens=32, **options)
        else:
            self.model = opened(path, **options)
        plan = self.model.info().plan
        assert (plan.streamed_bytes > 0) == (case == "streamed")
        self.n_drafts, self.chunk_tokens = plan.draft_rows, min(plan.chunk_tokens, plan.logits_rows)
        assert self.n_drafts == options["draft_rows"]
        self.most = 32 if case == "scarce-kv" else 110
        self.sessions = [self.model.create_session() for _ in range(N_SESSIONS)]
        self.tokens = [array("I") for _ in self.sessions]
        self.future: list[list[int]] = [[] for _ in self.sessions]
        self.seen: dict[tuple[int, ...], Logits] = {}

    def next_tokens(self, i: int, n: int) -> array[int]:
        while len(self.future[i]) < n + self.n_drafts:  # what comes again, so the engine guesses
            pieces = random.Random(self.rng.randrange(3))
            self.future[i] += [pieces.randrange(self.model.n_vocab) for _ in range(25)]
        return array("I", self.future[i][:n])

    def offer(self, i: int) -> None:
        """Give the engine right tokens, then wrong ones; more often let it guess."""
        n = self.rng.choice([0, 0, 3, self.n_drafts])
        right = self.future[i][1 : 1 + self.rng.randint(0, n)]
        wrong = [self.rng.randrange(self.model.n_vocab) for _ in range(n - len(right))]
        self.sessions[i].draft(array("I", (right + wrong)[: self.n_drafts]))

    def go_back(self, i: int) -> None:
        """Hold fewer tokens, or the first ones of another session."""
        if not self.tokens[i]:
            return
        other = self.rng.choice([i, self.rng.randrange(N_SESSIONS)])
        n_tokens = self.rng.randint(0, len(self.tokens[other]))
        if other != i:
            try:
                copy_tokens(self.sessions[i], self.sessions[other], n_tokens)
            except QsfArgumentError:  # a window of the other has gone on
                return
        elif self.rng.random() < 0.7:
            try:
                self.sessions[i].rewind(n_tokens)
            except QsfArgumentError:  # a window has gone on
                n_tokens = 0
                self.sessions[i].rewind(0)
            if n_tokens < len(self.tokens[i]):
                with pytest.raises(QsfArgumentError):
                    self.sessions[i].read_logits(np.empty(self.model.n_vocab, np.float32))
        else:  # as a prompt does
            tokens = self.tokens[i][: max(1, n_tokens)]
            while self.sessions[i].sync_chunk(tokens) < len(tokens):
                pass
            n_tokens = len(tokens)
        if self.rng.random() < 0.5:  # on as before: what was evaluated ahead must not come back
            self.future[i][:0] = self.tokens[i][n_tokens:].tolist()
        self.tokens[i] = self.tokens[other][:n_tokens]

    def act(self) -> None:
        if self.rng.random() < 0.2:  # alone: a pass of others takes what was evaluated ahead
            i = self.rng.randrange(N_SESSIONS)
            self.go_back(i)
            if len(self.tokens[i]) < self.most:
                self.step(i, PassItem(None, self.next_tokens(i, 1), "ahead"))
        else:
            self.act_together()

    def act_together(self) -> None:
        left = rows_left = self.chunk_tokens
        chosen: list[tuple[int, PassItem]] = []
        for i in self.rng.sample(range(N_SESSIONS), self.rng.randint(1, N_SESSIONS)):
            room = min(self.most - len(self.tokens[i]), left)
            if len(self.tokens[i]) == self.most:
                self.go_back(i)
                continue
            n = 1 if self.rng.random() < 0.8 else self.rng.randint(1, 7)
            wants: Wants = "ahead" if self.rng.random() < 0.85 else self.rng.choice(["none", "all"])
            n_rows = {"none": 0, "all": n}.get(wants, 1)
            if n > room or n_rows > rows_left:
                continue
            rows_left -= n_rows
            session = SimpleNamespace(_native=self.sessions[i])
            item = PassItem(session, self.next_tokens(i, n), wants)
            if wants == "all":
                item.logits = np.empty((n, self.model.n_vocab), np.float32)
            chosen.append((i, item))
            left -= n
            self.offer(i)
        if len(chosen) == 1 and chosen[0][1].wants == "ahead" and len(chosen[0][1].tokens) == 1:
            self.step(*chosen[0])
        elif chosen:
            self.run(chosen)

    def step(self, i: int, item: PassItem) -> None:
        if self.rng.random() < 0.1:
            self.sessions[i].cancel()
            with pytest.raises(QsfCancelledError):
                self.sessions[i].step(item.tokens[0])
        self.sessions[i].step(item.tokens[0])
        self.note(i, item)

    def run(self, chosen: list[tuple[int, PassItem]]) -> None:
        """Evaluate: what is ahead first, as the scheduler does, or all together."""
        cancelled = {i for i, _ in chosen if self.rng.random() < 0.05}
        for i in cancelled:
            self.sessions[i].cancel()
        ahead = [one for one in chosen if self.is_ahead(*one)] if self.rng.random() < 0.8 else []
        for part in (ahead, [one for one in chosen if one not in ahead]):
            if part:
                takes_no_pass = all(self.is_ahead(*one) for one in part)
                model: Any = SimpleNamespace(native=self.model)
                report = run_pass(model, [item for _, item in part])
                assert (report.ns == 0) == takes_no_pass
        for i, item in chosen:
            assert item.is_cancelled == (i in cancelled)
            if not item.is_cancelled:
                self.note(i, item)
            assert self.sessions[i].position() == len(self.tokens[i])

    def is_ahead(self, i: int, item: PassItem) -> bool:
        is_one = len(item.tokens) == 1 and item.wants == "ahead"
        return is_one and self.sessions[i].is_ahead(item.tokens[0])

    def note(self, i: int, item: PassItem) -> None:
        n_before = len(self.tokens[i])
        self.tokens[i].extend(item.tokens)
        del self.future[i][: len(item.tokens)]
        for row, logits in enumerate(item.logits if item.wants == "all" else ()):
            self.seen[tuple(self.tokens[i][: n_before + row + 1])] = logits
        if item.wants != "none":
            out = np.empty(self.model.n_vocab, np.float32)
            self.sessions[i].read_logits(out)
            self.seen[tuple(self.tokens[i])] = out


@pytest.mark.parametrize("case", CASES)
def test_any_order_of_passes_is_as_if_each_sequence_were_alone(
    made: Callable[[str], Path], case: str
) -> None:
    name, options = CASES[case]
    walk = Walk(case, made(name))
    for _ in range(120):
        walk.act()
    stats = [session.stats() for session in walk.sessions]
    assert sum(sum(one.n_drafted) for one in stats) > sum(sum(one.n_accepted) for one in stats) > 9
    alone = {
        **options,
        "n_threads": 1,
        "draft_rows": 0,
        "draft_path": None,
        "kv_contexts": None,
        "kv_resident_tokens": None,
    }
    plain = opened(made(name), **alone)
    session, row = plain.create_session(), np.empty((1, plain.n_vocab), np.float32)
    assert len(walk.seen) > 100
    for tokens, logits in list(walk.seen.items())[::3]:
        n_done = 0
        while n_done < len(tokens):
            n_done = session.score_chunk(array("I", tokens), row, n_done, len(tokens) - 1)
        assert np.array_equal(row[0], logits), len(tokens)
