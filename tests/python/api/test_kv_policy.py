# SPDX-License-Identifier: Apache-2.0
"""Keys and values: types, windows, contexts begun anew or in a file, one pool for all sessions."""

from __future__ import annotations

import contextlib
import resource
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsf
from make.kind_models import LATENT, MIXED, ROUTED, VOCAB, write_model
from make.tiny_checkpoints import make_llama
from qsf import errors
from qsf.file.layout import Dtype
from qsf.kv import KvPolicy, kv_type_name, parse_kv_policy, parse_kv_type, resident_tokens
from qsf.native import binding
from qsf_converter import convert

TOKENS = np.random.default_rng(9).integers(0, VOCAB, 400).tolist()
WINDOW, PINNED = 32, 20
POLICY = f"window:{WINDOW}:{PINNED}"
GREEDY: dict[str, Any] = {"temperature": 0, "stop": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.qsf"
    if not path.exists():
        write_model(path, MIXED if name == "mixed" else ROUTED, dtype=Dtype.Q4, seed=5)
    return path


# ---- windows of the model's own ----
def test_a_window_holds_only_its_pages(folder: Path) -> None:
    """KV memory grows with the context only in the layers without a window."""
    path = written(folder, "mixed")

    def kv_bytes(ctx_tokens: int) -> int:
        options = binding.Options(
            ctx_tokens=ctx_tokens, chunk_tokens=8, max_sessions=1, kv_k_type=4, kv_v_type=4
        )
        return binding.plan_model(path, options).kv_bytes

    pages = [0, 0]  # of all layers and heads, at contexts of 256 and 512
    for layer in MIXED:
        kind = layer.kind
        ring = -(-(kind.window_tokens + 8) // 32) + 1 if kind.window_tokens else 1000
        for i, all_pages in enumerate((8, 16)):
            pages[i] += kind.n_kv_heads * min(ring, all_pages)
    page_bytes = 2 * 576 + 64 + 64 + 32 * 32  # K tiles; V scales, mins, codes
    more_tokens = 256 * 4  # the tokens themselves
    have = kv_bytes(512) - kv_bytes(256)
    assert abs(have - (pages[1] - pages[0]) * page_bytes - more_tokens) < 4096


# ---- the window: sessions ----
@pytest.mark.parametrize("policy", ["none", POLICY])  # windows of the model's own, and of all
def test_going_back_to_what_was_dropped(folder: Path, policy: str) -> None:
    path = written(folder, "mixed")
    with qsf.Model(path, ram_budget=None, max_seq_len=400, kv_policy=policy) as model:
        want = model.logits([*TOKENS[:100], 7])
        short = model.logits([*TOKENS[:390], 7], first_row=390)
        model.logits(TOKENS)
        with pytest.raises(errors.QsfArgumentError, match="window hold only the last"):
            model.session.rewind(20)
        assert model.session.tokens == TOKENS
        assert np.array_equal(model.logits([*TOKENS[:390], 7], first_row=390), short)
        assert np.array_equal(model.logits([*TOKENS[:100], 7]), want)


# ---- a context that is full ----
def greedy_tokens(model: qsf.Model, tokens: list[int]) -> int:
    return int(model.logits(tokens, first_row=len(tokens) - 1)[0].argmax())


@pytest.mark.parametrize("policy", ["recompute:10", "window:32:10"])
def test_the_middle_is_forgotten(tiny_llama_8bit: Path, policy: str) -> None:
    """Against a loop that evaluates what is left as a text of its own."""
    n_ctx, prompt = 96, [0, *range(100, 160)]
    how: dict[str, Any] = {"ram_budget": None, "max_seq_len": n_ctx}
    with qsf.Model(tiny_llama_8bit, kv_policy=policy, **how) as model:
        tokens, want = list(prompt), []
        n_newest = 43 if policy.startswith("recompute") else 32
        for _ in range(200):
            if len(tokens) > n_ctx:
                tokens = tokens[:10] + tokens[-n_newest:]
            want.append(greedy_tokens(model, tokens))
            if want[-1] in model.end_ids:
                break
            tokens.append(want[-1])
        for _ in model.generate(prompt, max_tokens=200, **GREEDY):
            pass
        stats = model.stats
        assert stats is not None
        assert list(stats.token_ids) == [token for token in want if token not in model.end_ids]
        assert stats.n_shortened >= 1
        assert len(model.session.tokens) <= n_ctx


@given(st.integers(0, 60), st.integers(0, 200), st.integers(1, 200), st.integers(0, 3))
def test_what_stays_fits_and_is_begin_and_end(
    pinned: int, window: int, n_more: int, n_over: int
) -> None:
    n_ctx = pinned + max(window, 1) + n_more
    policy = KvPolicy("x", window, pinned)
    policy.check_context(n_ctx)
    tokens = array("I", range(n_ctx + 1 + n_over))
    kept = policy.shortened(tokens, n_ctx)
    n_newest = policy.newest_tokens(n_ctx)
    assert kept == tokens[:pinned] + tokens[len(tokens) - n_newest :]
    assert len(kept) <= n_ctx
    assert n_newest <= (window or n_ctx)


# ---- what is asked for ----
def test_names_of_policies_and_types() -> None:
    assert parse_kv_policy("none") is parse_kv_policy("disk") is parse_kv_policy("disk:64") is None
    assert [resident_tokens(name) for name in ("disk", "disk:64", "none")] == [0, 64, None]
    assert parse_kv_policy("window:64") == KvPolicy("window:64", 64, 256)
    assert parse_kv_policy("recompute:0") == KvPolicy("recompute:0", 0, 0)
    for name in ("", "window", "window:", "window:31", "window:-5", "window:64:", "recompute:x",
                 "h2o:9", "disk:", "disk:x", "disk:1:2"):  # fmt: skip
        with pytest.raises(ValueError, match=r"is not a policy|is too small"):
            parse_kv_policy(name)
    for name in ("f32", "f16", "8bit", "4bit", "2bit", "k8v4", "k4v2", "k16v8"):
        assert kv_type_name(*parse_kv_type(name)) == name
    for name in ("", "3bit", "k8", "k8v3", "K8V4", "k8v4 ", "16"):
        with pytest.raises(ValueError, match="is not a type of KV cache"):
            parse_kv_type(name)


@pytest.mark.parametrize("policy", ["window:400:112", "recompute:511", "window:4000"])
def test_a_context_with_nothing_to_forget_is_refused(tiny_llama_8bit: Path, policy: str) -> None:
    with pytest.raises(errors.QsfArgumentError, match="the context has only 512"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy=policy)
    with pytest.raises(errors.QsfArgumentError, match="the context has only 512"):
        qsf.Model.plan(tiny_llama_8bit, ram_budget=None, kv_policy=policy)


def test_a_batch_has_no_recompute(tiny_llama_8bit: Path) -> None:
    with (
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="recompute") as model,
        pytest.raises(errors.QsfArgumentError, match="not for a batch"),
    ):
        list(model.batch(["Once"], max_tokens=2))


def test_a_model_of_windows_needs_none(folder: Path) -> None:
    path = folder / "windows.qsf"
    layer = next(layer for layer in MIXED if layer.kind.window_tokens)
    write_model(path, (layer, layer), dtype=Dtype.Q4)
    with pytest.raises(errors.QsfArgumentError, match="and no more: this model has none"):
        qsf.Model(path, ram_budget=None, kv_policy=POLICY, max_seq_len=200)
    with qsf.Model(path, ram_budget=None, kv_policy="recompute:4", max_seq_len=200) as model:
        assert model.info.plan.kv_policy == "recompute:4"


# ---- types: names, defaults and memory; numbers: test_forward.py ----
@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 heads of 16 on 2 KV heads."""
    folder = tmp_path_factory.mktemp("kv")
    convert(
        make_llama(folder / "hf", seed=7, head_dim=16, max_tokens=600),
        folder / "m.qsf",
        quant_type="f16",
    )
    return folder / "m.qsf"


def test_options_and_what_the_plan_says(long_llama: Path) -> None:
    plan = qsf.Model.plan(long_llama, ram_budget=None)
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 8, True)
    plan = qsf.Model.plan(long_llama, ram_budget=None, exact=True)
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (32, 32, False)
    plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="k8v16")
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 16, True)
    plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="f16", kv_rotation=True)
    assert plan.kv_is_rotated
    for rotation in (None, False):
        plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="k8v4", kv_rotation=rotation)
        assert plan.kv_is_rotated == (rotation is None)
    sizes = [
        qsf.Model.plan(long_llama, ram_budget=None, kv_type=kv_type).kv_bytes
        for kv_type in ("f32", "f16", "8bit", "4bit", "2bit")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5 * sizes[3]


def test_a_latent_is_stored_once(tmp_path: Path) -> None:
    """The values are the first dimensions of the keys, which have two blocks of 64 here."""
    path = write_model(tmp_path / "m.qsf", LATENT[:1], dtype=Dtype.F16)
    for kv_type, block_bytes in (("8bit", 66), ("4bit", 36), ("f16", 128), ("k8v16", 66)):
        sizes = [
            qsf.Model.plan(
                path, ram_budget=None, kv_type=kv_type, max_seq_len=n_tokens
            ).kv_pool_bytes
            for n_tokens in (64, 320)
        ]
        assert sizes[1] - sizes[0] == (320 - 64) * 2 * block_bytes


def test_types_that_cannot_be(long_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(
        errors.QsfArgumentError, match=r"kv_type must be a type of KV cache.*'k3v4'"
    ):
        qsf.Model(long_llama, kv_type="k3v4")
    with pytest.raises(errors.QsfArgumentError, match="exact arithmetic needs 32 bits"):
        qsf.Model(long_llama, exact=True, kv_type="4bit")
    convert(make_llama(tmp_path / "hf", head_dim=10), tmp_path / "m.qsf")
    plan = qsf.Model.plan(tmp_path / "m.qsf", ram_budget=None)
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 8, False)
    with pytest.raises(errors.QsfArgumentError, match="heads of 10 dimensions cannot be rotated"):
        qsf.Model(tmp_path / "m.qsf", ram_budget=None, kv_rotation=True)


# ---- keys and values in a file ----
@pytest.fixture
def on_a_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, tiny_llama_8bit: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32").close()
    except errors.QsfArgumentError as error:
        if "lies in memory" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.usefixtures("on_a_disk")
def test_what_stays_in_memory_follows_from_the_budget(tiny_llama_8bit: Path) -> None:
    """Where a context would be shortened, and down to less than any plan has without a file."""
    how: dict[str, Any] = {"sessions": 200, "max_seq_len": 512, "threads": 1}
    least = qsf.Model.plan(tiny_llama_8bit, ram_budget=1, **how, kv_policy="disk")
    none = qsf.Model.plan(tiny_llama_8bit, ram_budget=1, **how)
    assert (none.ctx_tokens, least.ctx_tokens) == (512, 512)
    assert least.kv_resident_tokens == 256
    assert least.min_budget_bytes < none.min_budget_bytes - 0.3 * none.kv_pool_bytes
    budget = -(-none.min_budget_bytes // 2**20) - 8
    fits = qsf.Model.plan(tiny_llama_8bit, ram_budget=budget, **how, kv_policy="disk")
    assert fits.is_enough
    assert 256 <= fits.kv_resident_tokens < 512
    assert fits.process_bytes + fits.reserve_bytes + fits.engine_bytes <= budget * 2**20


# ---- a disk that has no room ----
@pytest.mark.usefixtures("on_a_disk")
def test_a_full_disk_leaves_the_session_as_it_was(folder: Path) -> None:
    """The limit of a file's size fails as a full disk does: in the middle of a write."""
    path = written(folder, "mixed")
    with qsf.Model(path, ram_budget=None, max_seq_len=390, draft="off") as model:
        want = model.logits(TOKENS[:390])
    with qsf.Model(
        path, ram_budget=None, max_seq_len=390, kv_policy="disk:1", draft="off"
    ) as model:
        n_chunk = model.info.plan.chunk_tokens
        model.logits(TOKENS[:n_chunk], first_row=0)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        try:
            with pytest.raises(errors.QsfIOError, match=r"keys and values in .*File too large"):
                model.logits(TOKENS[:390])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        held = len(model.session.tokens)
        assert held >= n_chunk
        assert np.array_equal(model.logits(TOKENS[:390], first_row=held), want[held:])


@pytest.mark.usefixtures("on_a_disk")
def test_a_folder_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama_8bit: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(errors.QsfIOError, match=r"cannot create a file in .*none"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32")
    qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk").close()  # needs no file
    with pytest.raises(errors.QsfArgumentError, match="kv_contexts must be 0"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, kv_policy="disk:32", sessions=2, kv_contexts=1)


# ---- one pool for all sessions; any order of operations: check_kv_pool.c, test_same_bits.py ----
N_VOCAB = 16  # tokens that are used
CTX_TOKENS = 96  # three blocks
N_SESSIONS = 4


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    """A pool of six blocks for four sessions."""
    with opened(tiny_llama_8bit) as model:
        yield model


def opened(path: Path) -> qsf.Model:
    return qsf.Model(
        path, ram_budget=None, sessions=N_SESSIONS, max_seq_len=CTX_TOKENS, kv_contexts=2
    )


def hold(session: qsf.Session, tokens: list[int]) -> Any:
    """Evaluate what is new; return the last logits."""
    return session.logits(tokens, first_row=len(tokens) - 1)[0]


def tokens_of(n: int, first: int = 1) -> list[int]:
    return [(first + i * i) % N_VOCAB for i in range(n)]


def test_a_full_pool_is_an_error_that_changes_nothing(model: qsf.Model) -> None:
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(model.create_session()) for _ in range(N_SESSIONS - 1)
        )
        want = hold(model.session, tokens_of(CTX_TOKENS))
        hold(first, tokens_of(64, 2))
        hold(second, tokens_of(32, 3))
        with pytest.raises(errors.QsfMemoryError, match=r"192 positions is full.* 6 blocks"):
            hold(third, [1])
        with pytest.raises(errors.QsfMemoryError, match="for position 32"):
            hold(second, tokens_of(33, 3))
        assert second.tokens == tokens_of(32, 3)
        assert third.tokens == []
        model.session.rewind(65)  # two blocks and a token: nothing is given back
        with pytest.raises(errors.QsfMemoryError):
            hold(third, [1])
        model.session.rewind(64)
        got = hold(third, [1])
        third.close()
        model.session.rewind(0)
        assert np.array_equal(hold(model.session, [1]), got)
        first.close()
        assert np.array_equal(hold(model.session, tokens_of(CTX_TOKENS)), want)


def test_contexts_are_at_most_as_many_as_sessions(tiny_llama_8bit: Path) -> None:
    with pytest.raises(errors.QsfArgumentError, match=r"kv_contexts is 3.* 2"):
        qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, kv_contexts=3)
