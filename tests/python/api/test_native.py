"""The binding: statuses become exceptions, handles become objects, settings are obeyed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.file.stored_tokenizer import unpack_tokenizer
from oracle.readers import verify_file
from qsf import errors
from qsf.errors import QsfFormatError
from qsf.native import binding
from qsf.native._qsf import lib

TOKENS = array("I", [0, 10, 20, 30, 40, 50, 60, 70])


def options(**values: Any) -> binding.Options:
    """Return options without a budget, which would count what all other tests hold, too."""
    return binding.Options(budget_bytes=0, **values)


def read_logits(session: binding.NativeSession, n_vocab: int) -> np.ndarray:
    out = np.empty(n_vocab, dtype=np.float32)
    session.read_logits(out)
    return out


def sync(session: binding.NativeSession, tokens: array[int]) -> int:
    """Return how many calls it took."""
    n_calls = 1
    while session.sync_chunk(tokens) < len(tokens):
        n_calls += 1
    return n_calls


@pytest.fixture
def model(tiny_llama_8bit: Path) -> Iterator[binding.NativeModel]:
    opened = binding.NativeModel(tiny_llama_8bit, options(chunk_tokens=3, max_sessions=2))
    yield opened
    opened.close()


@pytest.fixture
def session(model: binding.NativeModel) -> Iterator[binding.NativeSession]:
    created = model.create_session()
    yield created
    created.close()


def test_every_status_has_its_exception() -> None:
    statuses = {getattr(lib, name) for name in dir(lib) if name.startswith("QSF_ERR_")}
    assert set(binding._ERROR_OF_STATUS) == statuses
    kinds = [kind for status, kind in binding._ERROR_OF_STATUS.items()
             if status != lib.QSF_ERR_DAMAGED]  # fmt: skip
    assert len(set(kinds)) == len(statuses) - 1


def test_damage_is_a_status_of_its_own(tmp_path: Path, tiny_llama_8bit: Path) -> None:
    """And the exception says so, whatever its text."""
    data = bytearray(tiny_llama_8bit.read_bytes())
    for at, is_damage in ((0, False), (len(data) // 2, True), (len(data) - 1, True)):
        path = tmp_path / f"{at}.qsf"
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(QsfFormatError) as caught:
            verify_file(path)
        assert caught.value.is_damage == is_damage, str(caught.value)


def test_the_machine_is_described() -> None:
    machine = binding.describe_machine()
    assert machine.isa_name in machine.isa_available
    assert "scalar" in machine.isa_available
    assert machine.n_cores >= 1
    assert 0 < machine.resident_bytes <= machine.peak_bytes < machine.memory_bytes


def test_facts_are_those_of_the_checkpoint(model: binding.NativeModel) -> None:
    info = model.info()
    assert (info.architecture, info.quant_type) == ("llama", "8bit")
    assert (info.n_layers, info.dim, info.n_heads, info.n_kv_heads) == (6, 192, 6, 2)
    assert (info.head_dim, info.ffn_dim, info.n_vocab, info.max_tokens) == (32, 512, 2048, 512)
    assert (info.bos_id, info.eos_id, info.pad_id) == (0, 1, None)
    assert info.plan.chunk_tokens == 3


def test_the_parts_of_a_plan_add_up(tiny_llama_8bit: Path) -> None:
    plan = binding.plan_model(tiny_llama_8bit, binding.Options(budget_bytes=2000 << 20))
    parts = (
        plan.weights_bytes + plan.stream_bytes + plan.embedding_bytes + plan.kv_bytes
        + plan.scratch_bytes + plan.tables_bytes + plan.stacks_bytes
    )  # fmt: skip
    assert plan.engine_bytes == parts
    assert plan.is_enough
    assert plan.min_budget_bytes <= plan.budget_bytes == 2000 << 20


def test_a_plan_that_does_not_fit_says_what_would(tiny_llama_8bit: Path) -> None:
    plan = binding.plan_model(tiny_llama_8bit, binding.Options(budget_bytes=1 << 20))
    assert not plan.is_enough
    assert plan.min_budget_bytes > 1 << 20
    with pytest.raises(errors.QsfMemoryError):
        binding.NativeModel(tiny_llama_8bit, binding.Options(budget_bytes=1 << 20))


def test_numbers_that_do_not_fit_are_refused_by_name() -> None:
    for bad in (-1, 2**32, "many"):
        with pytest.raises(errors.QsfArgumentError, match="n_threads"):
            binding.Options(n_threads=bad).as_struct()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "most"),
    [("io_method", 4), ("io_depth", 32)],
)
def test_ways_of_reading_have_ranges(tiny_llama_8bit: Path, field: str, most: int) -> None:
    with pytest.raises(errors.QsfArgumentError, match=f"{field} is {most + 1}; .*{most}"):
        binding.NativeModel(tiny_llama_8bit, options(**{field: most + 1}))
    with pytest.raises(errors.QsfArgumentError, match=f"{field} is {most + 1}; .*{most}"):
        binding.plan_model(tiny_llama_8bit, options(**{field: most + 1}))


def test_units_and_events_are_listed(model: binding.NativeModel) -> None:
    session = model.create_session()
    sync(session, TOKENS)
    session.close()
    units = model.timeline()
    assert [unit.name for unit in units][:2] == ["embedding", "layer 0"]
    assert [unit.name for unit in units][-2:] == ["layer 5", "final"]
    assert all(unit.is_resident for unit in units)
    assert {unit.n_passes for unit in units[1:-1]} == {3}  # chunks of 3 tokens of 8
    assert model.memory_events() == []
    model.close()
    with pytest.raises(errors.QsfArgumentError, match="is closed"):
        model.timeline()
    with pytest.raises(errors.QsfArgumentError, match="is closed"):
        model.memory_events()


def test_files_that_are_not_there_or_not_qsf(tmp_path: Path, tiny_llama_8bit: Path) -> None:
    with pytest.raises(errors.QsfIOError):
        binding.NativeModel(tmp_path / "absent.qsf", options())
    with pytest.raises(errors.QsfIOError):
        binding.NativeModel(tmp_path, options())
    other = tmp_path / "other.qsf"
    other.write_bytes(b"GGUF" * 100)
    with pytest.raises(errors.QsfFormatError):
        binding.NativeModel(other, options())
    other.write_bytes(tiny_llama_8bit.read_bytes()[:5000])
    with pytest.raises(errors.QsfFormatError):
        binding.NativeModel(other, options())
    with pytest.raises(errors.QsfArgumentError, match="zero byte"):
        binding.NativeModel("a\0b", options())


def test_sections_are_read(model: binding.NativeModel, tiny_llama_dir: Path) -> None:
    tokenizer_json = (tiny_llama_dir / "tokenizer.json").read_bytes()
    assert unpack_tokenizer(model.section("TOKN") or b"") == tokenizer_json
    assert model.section("WXYZ") is None


def test_a_call_evaluates_one_chunk(session: binding.NativeSession) -> None:
    assert session.sync_chunk(TOKENS) == 3
    assert session.position() == 3
    assert sync(session, TOKENS) == 2
    assert session.position() == 8
    assert session.stats().prompt_tokens == 8


def test_a_common_prefix_is_kept(session: binding.NativeSession) -> None:
    sync(session, TOKENS)
    sync(session, array("I", [*TOKENS[:6], 99]))
    assert session.position() == 7
    assert session.stats().prompt_tokens == 8 + 1


def test_steps_and_chunks_give_the_same_bits(session: binding.NativeSession) -> None:
    sync(session, TOKENS)
    expected = read_logits(session, 2048)
    session.rewind(2)
    with pytest.raises(errors.QsfArgumentError):
        read_logits(session, 2048)
    for token in TOKENS[2:]:
        session.step(token)
    assert np.array_equal(read_logits(session, 2048), expected)
    rows = np.empty((len(TOKENS), 2048), dtype=np.float32)
    n_done = 0
    while n_done < len(TOKENS):
        n_done = session.score_chunk(TOKENS, rows, n_done)
    assert np.array_equal(rows[-1], expected)


def test_tokens_outside_the_vocabulary_are_refused(session: binding.NativeSession) -> None:
    with pytest.raises(errors.QsfArgumentError):
        session.sync_chunk(array("I", [0, 2048]))
    with pytest.raises(errors.QsfArgumentError):
        session.step(2048)


def test_sessions_are_independent_and_counted(model: binding.NativeModel) -> None:
    one, two = model.create_session(), model.create_session()
    with pytest.raises(errors.QsfMemoryError):
        model.create_session()
    sync(one, TOKENS)
    assert (one.position(), two.position()) == (8, 0)
    one.close()
    model.create_session().close()
    two.close()


def test_a_cancelled_session_goes_on_working(session: binding.NativeSession) -> None:
    session.cancel()
    with pytest.raises(errors.QsfCancelledError):
        session.sync_chunk(TOKENS)
    assert sync(session, TOKENS) == 3


def test_closed_handles_are_refused_and_a_session_outlives_its_model(
    tiny_llama_8bit: Path,
) -> None:
    model = binding.NativeModel(tiny_llama_8bit, options())
    session = model.create_session()
    model.close()
    model.close()
    with pytest.raises(errors.QsfArgumentError, match="is closed"):
        model.info()
    sync(session, TOKENS)
    session.close()
    session.close()
    with pytest.raises(errors.QsfArgumentError, match="is closed"):
        session.position()


def choose(session: binding.NativeSession, seed: int, **how: float) -> int:
    plain = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    values: dict[str, Any] = plain | how
    top_k = int(values.pop("top_k", 0))
    sampler = binding.NativeSampler(top_k=top_k, seed=seed, **values)
    return sampler.choose(session, TOKENS)


def test_sampling_obeys_its_parameters(session: binding.NativeSession) -> None:
    sync(session, TOKENS)
    best = int(np.argmax(read_logits(session, 2048)))
    assert choose(session, 1, temperature=0.0) == best
    assert {choose(session, seed, top_k=1) for seed in range(20)} == {best}
    assert {choose(session, seed, min_p=1.0) for seed in range(20)} == {best}
    assert {choose(session, seed, top_p=1e-6) for seed in range(20)} == {best}
    assert len({choose(session, seed) for seed in range(20)}) > 1
    assert [choose(session, 5) for _ in range(3)] == [choose(session, 5)] * 3
    with pytest.raises(errors.QsfArgumentError):
        choose(session, 1, temperature=-1.0)
