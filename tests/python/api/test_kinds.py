# SPDX-License-Identifier: Apache-2.0
"""Layers that compute different things: the numbers, and that settings change no bit of them."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
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
from oracle import reference
from oracle.reference_models import load_qsf
from qsf import errors
from qsf.file.layout import Arch, Dtype, Norm
from qsf.native import binding

TOKENS = np.random.default_rng(8).integers(0, VOCAB, 200).tolist()
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


def written(folder: Path, name: str, dtype: Dtype) -> Path:
    path = folder / f"{name}-{dtype.name}.qsf"
    if not path.exists() and name == "mixed":
        write_model(path, MIXED, dtype=dtype)
    elif not path.exists() and name == "routed":
        write_model(path, ROUTED, dtype=dtype, seed=5)
    elif not path.exists() and name == "recurrent":
        write_model(path, RECURRENT, dtype=dtype, seed=6)
    elif not path.exists() and name == "shared":
        write_model(path, SHARED, dtype=dtype, arch=OWN_ARCH, seed=7)
    elif not path.exists():
        arch = Arch(tied_head=name == "tied")
        write_model(path, LAYER_NORMS, dtype=dtype, norm=Norm.LAYER, arch=arch, seed=3)
    return path


NAMES = ("mixed", "layer-norms", "tied", "routed", "recurrent", "shared")
MODELS = [(name, dtype) for name in NAMES for dtype in (Dtype.F16, Dtype.Q4)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[1].name}")
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    return written(folder, *request.param)


def last_logits(path: Path, n_tokens: int = len(TOKENS), **options: object) -> Logits:
    """The logits of the last token, by the engine alone."""
    with_budget = binding.Options(**{"budget_bytes": 0, **options})  # type: ignore[arg-type]
    model = binding.NativeModel(path, with_budget)
    session = model.create_session()
    tokens = array("I", TOKENS[:n_tokens])
    while session.position() < n_tokens:
        session.sync_chunk(tokens)
    logits = np.empty(VOCAB, np.float32)
    session.read_logits(logits)
    session.close()
    model.close()
    return logits


# ---- the numbers ----


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(folder: Path, name: str) -> None:
    path = written(folder, name, Dtype.F16)
    want = reference.forward(load_qsf(path, 200), TOKENS).logits
    with qsf.Model(path, exact=True, kv_type="f32", max_seq_len=200, ram_budget=None) as model:
        got = model.logits(TOKENS)
    bound = 2e-4 if name == "recurrent" else 3e-5  # what the delta rule puts out may be small
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


def test_the_context_chooses_the_frequencies(folder: Path) -> None:
    path = written(folder, "mixed", Dtype.F16)
    want = reference.forward(load_qsf(path, 300), TOKENS).logits
    with qsf.Model(path, exact=True, kv_type="f32", max_seq_len=300, ram_budget=None) as model:
        got = model.logits(TOKENS)
    assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()
    shorter = reference.forward(load_qsf(path, 299), TOKENS).logits
    assert np.abs(shorter - want).max() > 1e-2 * np.abs(want).max()


# ---- the same bits ----


def test_threads_and_chunks(path: Path) -> None:
    """Chunks of one token leave a ring of two pages to the windows of 5, 20 and 33."""
    want = last_logits(path, n_threads=1, chunk_tokens=256)
    assert np.isfinite(want).all()
    for n_threads, chunk_tokens in ((2, 1), (3, 7), (1, 64), (2, 100)):
        have = last_logits(path, n_threads=n_threads, chunk_tokens=chunk_tokens)
        assert np.array_equal(want, have)


def test_rows_without_logits_end_early(folder: Path) -> None:
    """Layers behind the last that stores something run for the rows whose logits are asked."""
    for dtype in (Dtype.F16, Dtype.Q4):
        path = written(folder, "shared", dtype)
        with qsf.Model(path, ram_budget=None, max_seq_len=200, threads=2, sessions=2) as model:
            whole = model.logits(TOKENS)
            for n in (1, 2, 9, 33, 64, 97, 200):
                with model.create_session() as session:
                    last = session.logits(TOKENS[:n], first_row=n - 1)
                assert np.array_equal(whole[n - 1], last[0])
            with model.create_session() as session:
                some = session.logits(TOKENS, first_row=150)
            assert np.array_equal(whole[150:], some)


def test_prefixes(path: Path) -> None:
    with qsf.Model(path, ram_budget=None, max_seq_len=200) as model:
        whole = model.logits(TOKENS)
        for n in (1, 6, 33, 64, 97):
            assert np.array_equal(whole[:n], model.logits(TOKENS[:n]))


def test_streamed(path: Path) -> None:
    want = last_logits(path, chunk_tokens=16, ctx_tokens=256)
    plan = qsf.Model.plan(path, ram_budget=1, max_seq_len=256)
    budget_bytes = plan.min_budget_bytes + 2**20
    options = {"ctx_tokens": 256, "budget_bytes": budget_bytes}
    assert np.array_equal(want, last_logits(path, **options))


DUMP = """
import sys, qsf, numpy
isa, out, tokens, *paths = sys.argv[1:]
for i, path in enumerate(paths):
    with qsf.Model(path, threads=2, ram_budget=None, exact=i % 2 == 1) as model:
        assert model.info.isa_name == isa, model.info.isa_name
        numpy.save(f"{out}-{i}.npy", model.logits([int(t) for t in tokens.split(",")]))
"""


def test_instruction_sets(folder: Path, tmp_path: Path) -> None:
    available = binding.describe_machine().isa_available
    paths = [str(written(folder, *model)) for model in MODELS]
    tokens = ",".join(map(str, TOKENS[:70]))
    for isa in available:
        arguments = [isa, str(tmp_path / isa), tokens, *paths]
        env = {**os.environ, "QSF_ISA": isa}
        subprocess.run([sys.executable, "-c", DUMP, *arguments], env=env, check=True)
    for i, model in enumerate(MODELS):
        first = np.load(tmp_path / f"scalar-{i}.npy")
        assert np.isfinite(first).all()
        for isa in available:
            assert np.array_equal(first, np.load(tmp_path / f"{isa}-{i}.npy")), (isa, model)


# ---- windows ----


def test_a_window_holds_only_its_pages(folder: Path) -> None:
    """KV memory grows with the context only in the layers without a window."""
    path = written(folder, "mixed", Dtype.Q4)

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


def test_what_a_ring_gave_up_is_evaluated_again(folder: Path) -> None:
    path = written(folder, "mixed", Dtype.Q4)
    want = last_logits(path, 20)
    model = binding.NativeModel(path, binding.Options(chunk_tokens=8, budget_bytes=0))
    session = model.create_session()
    tokens = array("I", TOKENS)
    while session.position() < len(TOKENS):
        session.sync_chunk(tokens)
    session.rewind(len(TOKENS) - 1)
    with pytest.raises(errors.QsfArgumentError, match="layers with a window hold only the last"):
        session.rewind(20)
    assert session.position() == len(TOKENS) - 1
    session.sync_chunk(array("I", TOKENS[:20]))
    assert session.position() == 8  # from the start
    while session.position() < 20:
        session.sync_chunk(array("I", TOKENS[:20]))
    have = np.empty(VOCAB, np.float32)
    session.read_logits(have)
    assert np.array_equal(want, have)
    session.close()
    model.close()


def test_a_short_step_back_keeps_what_is_held(folder: Path) -> None:
    path = written(folder, "mixed", Dtype.Q4)
    with qsf.Model(path, ram_budget=None, max_seq_len=256) as model:
        want = model.logits([*TOKENS[:190], 7])
        model.logits(TOKENS)
        assert np.array_equal(want, model.logits([*TOKENS[:190], 7]))


@pytest.mark.parametrize(("name", "n_skipped"), [("mixed", 2), ("shared", 1)])
def test_skipped_layers_leave_the_others_their_kinds(
    folder: Path, name: str, n_skipped: int
) -> None:
    """A layer whose keys and values another reads is never skipped."""
    path = written(folder, name, Dtype.F16)
    with qsf.Model(path, exact=True, kv_type="f32", max_seq_len=200, ram_budget=None,
                   quality=0.8) as model:  # fmt: skip
        skipped = model.info.plan.skipped_layers
        have = model.logits(TOKENS)
    want = reference.forward(load_qsf(path, 200), TOKENS, skip=skipped).logits
    assert len(skipped) == n_skipped
    assert np.abs(have - want).max() <= 3e-5 * np.abs(want).max()
