"""Sessions on disk: nothing is evaluated again, and never wrong text; bits: test_same_bits.py."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.kind_models import RECURRENT, VOCAB, write_model
from make.mutants import session_mutant
from make.recurrent_models import write_recurrent
from qsf import errors
from qsf.file.layout import Dtype

TOKENS = np.random.default_rng(8).integers(0, VOCAB, 200).tolist()
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi ☃"},
    {"role": "assistant", "content": None, "x": [1]},
]


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2) as opened:
        yield opened


@pytest.fixture
def session(model: qsf.Model) -> Iterator[qsf.Session]:
    with model.create_session() as created:
        yield created


@pytest.fixture
def kept(model: qsf.Model, tmp_path: Path) -> Path:
    """A session of 40 tokens."""
    model.logits(TOKENS[:40])
    model.session.messages[:] = MESSAGES
    model.session.save(tmp_path / "kept.qsfs")
    return tmp_path / "kept.qsfs"


def next_logits(session: qsf.Session, tokens: list[int]) -> np.ndarray[Any, Any]:
    return session.logits(tokens, first_row=len(session.tokens))


def test_nothing_is_evaluated_again(model: qsf.Model, session: qsf.Session, kept: Path) -> None:
    session.load(kept)
    assert session.messages == MESSAGES
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    text = "".join(session.generate(TOKENS[:40], **greedy))
    assert session.stats is not None
    assert session.stats.evaluated_tokens == 0  # the logits were kept too
    assert text == "".join(model.generate(TOKENS[:40], **greedy))
    session.load(kept)
    session.rewind(20)
    assert np.array_equal(next_logits(session, TOKENS[:41])[-1], model.logits(TOKENS[:41])[-1])


def test_files_do_not_depend_on_what_was_held_before(
    model: qsf.Model, session: qsf.Session, kept: Path
) -> None:
    session.logits(TOKENS[50:90])
    session.load(kept)
    session.save(kept.with_name("again"))
    assert kept.with_name("again").read_bytes() == kept.read_bytes()
    assert kept.stat().st_mode & 0o077 == 0


def test_an_empty_session_is_kept(model: qsf.Model, session: qsf.Session, tmp_path: Path) -> None:
    session.messages.append({"role": "user", "content": "x" * 5000})
    session.save(tmp_path / "empty")
    model.logits(TOKENS[:3])
    model.session.load(tmp_path / "empty")
    assert model.session.tokens == []
    assert model.session.messages == session.messages
    session.messages.append({"role": "user", "content": {1, 2}})
    with pytest.raises(errors.QsfArgumentError, match="cannot be kept"):
        session.save(tmp_path / "empty")


# ---- refused ----
def test_another_model_type_or_context_is_refused(
    kept: Path, tiny_llama_8bit: Path, tiny_llama_4bit: Path
) -> None:
    for path, options, said in (
        (tiny_llama_8bit, {"kv_type": "k8v4"}, "tiny-llama-8bit.qsf with k8v4"),
        (tiny_llama_8bit, {"kv_rotation": False}, "it goes on with the same file"),
        (tiny_llama_8bit, {"exact": True}, "it goes on with the same file"),
        (tiny_llama_8bit, {"kv_policy": "window:32:20"}, "it goes on with the same file"),
        (tiny_llama_4bit, {}, "computed by tiny-llama-8bit.qsf"),
        (tiny_llama_8bit, {"max_seq_len": 39}, "max_seq_len=40"),
    ):
        with qsf.Model(path, ram_budget=None, **options) as other:
            other.logits([1, 2, 3])
            with pytest.raises(errors.QsfArgumentError, match=said):
                other.session.load(kept)
            assert other.session.tokens == [1, 2, 3]
            assert other.session.messages == []


def put(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


def test_each_byte_flipped_is_found(session: qsf.Session, kept: Path, tmp_path: Path) -> None:
    data = bytearray(kept.read_bytes())
    n_before = len(data) - int.from_bytes(data[24:32], "little")
    flipped = tmp_path / "flipped"
    flipped.write_bytes(data)
    for at in [*range(n_before), *range(n_before, len(data), 211)]:
        put(flipped, at, data[at] ^ 1 << at % 8)
        with pytest.raises(errors.QsfFormatError, match=str(flipped)) as caught:
            session.load(flipped)
        assert caught.value.is_damage or at < 4
        assert session.tokens == []
        put(flipped, at, data[at])
    session.load(flipped)
    assert session.tokens == TOKENS[:40]


def test_each_length_is_found(session: qsf.Session, kept: Path, tmp_path: Path) -> None:
    data = kept.read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(data)
    for n in [len(data) - 1, *range(len(data) - 2, 4200, -1009), *range(4200, -1, -7)]:
        os.truncate(cut, n)
        with pytest.raises(errors.QsfFormatError, match=str(cut)):
            session.load(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(errors.QsfFormatError, match="truncated or extended"):
        session.load(cut)
    for missing in (tmp_path / "absent", tmp_path, Path("/dev/null"), tmp_path / "a\0b"):
        with pytest.raises(errors.QsfIOError):
            session.load(missing)


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_hostile_files_give_typed_errors_or_text(
    tiny_llama_8bit: Path, tmp_path: Path, is_recurrent: bool
) -> None:
    path, model_path = tmp_path / "hostile", tiny_llama_8bit
    if is_recurrent:
        model_path = write_model(tmp_path / "m.qsf", RECURRENT, dtype=Dtype.Q4)
    with qsf.Model(model_path, ram_budget=None, max_seq_len=128) as model:
        model.logits(TOKENS[:100])
        model.session.save(path)
        data, n_loaded, session = path.read_bytes(), 0, model.session
        for seed in range(100):
            path.write_bytes(session_mutant(data, seed))
            try:
                session.load(path)
                n_loaded += 1
                for tokens in ([*session.tokens, 5], [*TOKENS[:70], 6]):  # on, and back
                    session.logits(tokens, first_row=len(tokens) - 1)
            except errors.QsfError:
                continue
    assert 10 < n_loaded < 90


# ---- states that cannot be cut: going back evaluates from a snapshot ----
def hold(session: qsf.Session, tokens: list[int]) -> Any:
    """Evaluate what is new; return the last logits."""
    return session.logits(tokens, first_row=len(tokens) - 1)[0]


# With f32 there is as much memory as takes a snapshot at every multiple of 32.
@pytest.mark.parametrize(
    ("case", "kv_type"),
    [("lfm2", "f32"), ("kimi_linear", "f32"), ("falcon_h1-norm", "f32"), ("qwen3_5+mtp", "f32"),
     ("qwen3_5", "4bit")],
)  # fmt: skip
def test_a_rewind_evaluates_from_the_last_snapshot(case: str, kv_type: str, tmp_path: Path) -> None:
    tokens = [(1 + i * i) % 50 for i in range(150)]
    path = write_recurrent(tmp_path, case=case)
    how: dict[str, Any] = {"sessions": 4, "max_seq_len": 200, "kv_type": kv_type}
    with qsf.Model(path, ram_budget=None, **how) as model:
        for n_tokens in (31, 33, 64, 149) if kv_type == "f32" else (40,):
            with model.create_session() as session, model.create_session() as fresh:
                hold(session, tokens)
                session.rewind(n_tokens)
                assert session.engine_stats.n_again == 0
                session._native.step(7)
                n_again = session.engine_stats.n_again
                if kv_type == "f32":
                    assert n_again == n_tokens % 32
                else:  # fewer snapshots
                    assert n_tokens % 32 < n_again <= 40
                want = hold(fresh, [*tokens[:n_tokens], 7, 8])
                assert np.array_equal(hold(session, [*tokens[:n_tokens], 7, 8]), want)
                assert session.engine_stats.n_again == n_again
