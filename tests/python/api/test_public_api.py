"""``import qsf`` and ``Model``: what an application sees."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.attacks import grow
from make.mutants import section_of
from make.qsf_files import repair, write_tiny
from qsf import errors
from qsf.native import binding

PROMPT = "Once upon a time"

# The budget counts the whole process, here one that runs many other tests.
ANY_BUDGET: dict[str, Any] = {"ram_budget": None}


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, **ANY_BUDGET) as opened:
        yield opened


def text(model: qsf.Model, prompt: str | list[int] = PROMPT, **options: Any) -> str:
    return "".join(model.generate(prompt, **options))


def last_stats(model: qsf.Model) -> qsf.GenerationStats:
    assert model.stats is not None
    return model.stats


# ---- the package ----


def test_all_names_exist_and_are_few() -> None:
    assert len([name for name in qsf.__all__ if not name.endswith("Error")]) <= 15
    for name in qsf.__all__:
        assert getattr(qsf, name) is not None
    assert set(qsf.__all__) <= set(dir(qsf))
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        qsf.Modell  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("numpy", "tokenizers", "jinja2", "_cffi_backend", "qsf.model", "typing_extensions")
    code = f"import qsf, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- generating ----


def test_greedy_text_is_the_story_the_model_knows(model: qsf.Model) -> None:
    story = text(model, temperature=0, max_tokens=12)
    assert story.startswith(", there was a little girl named Lily.")


def test_the_same_seed_gives_the_same_text(model: qsf.Model) -> None:
    first = text(model, seed=7, max_tokens=40)
    assert text(model, "Something else", seed=1, max_tokens=3)
    assert text(model, seed=7, max_tokens=40) == first
    assert len({text(model, seed=seed, max_tokens=40) for seed in range(5)}) > 1
    first = text(model, max_tokens=30)  # the seed that was drawn is reported
    assert text(model, max_tokens=30, seed=last_stats(model).seed) == first


def test_a_common_prefix_is_not_evaluated_again(model: qsf.Model) -> None:
    story = text(model, temperature=0, max_tokens=10)
    ids = model.tokenize(PROMPT + story)
    text(model, ids, temperature=0, max_tokens=1)
    stats = last_stats(model)
    assert stats.prompt_tokens == len(ids)
    assert stats.evaluated_tokens <= 2


def test_statistics_describe_the_run(model: qsf.Model) -> None:
    text(model, "A new prompt", temperature=0, max_tokens=8)
    stats = last_stats(model)
    assert stats.stop_reason == "length"
    assert stats.generated_tokens == 8
    assert stats.step_tokens == 7
    assert stats.prompt_rate > 0
    assert stats.step_rate > 0
    assert stats.peak_bytes > 1 << 20
    assert text(model, max_tokens=0) == ""
    assert last_stats(model).stop_reason == "length"


def test_a_stop_string_is_not_part_of_the_text(model: qsf.Model) -> None:
    whole = text(model, temperature=0, max_tokens=30)
    stopped = text(model, temperature=0, max_tokens=30, stop=["nobody", "girl named"])
    assert last_stats(model).stop_reason == "stop"
    assert stopped == whole[: whole.index("girl named")]
    assert text(model, temperature=0, max_tokens=30, stop="girl named") == stopped


def test_the_end_token_ends_the_text(model: qsf.Model) -> None:
    original = model._opened.end_ids
    ids = model.tokenize(PROMPT)
    logits = model.logits(ids)
    model._opened.end_ids = frozenset({int(np.argmax(logits[-1]))})
    try:
        assert text(model, temperature=0) == ""
    finally:
        model._opened.end_ids = original
    assert last_stats(model).stop_reason == "end"


def test_a_repetition_penalty_changes_the_text(model: qsf.Model) -> None:
    plain = text(model, temperature=0, max_tokens=60)
    varied = text(model, temperature=0, max_tokens=60, repetition_penalty=1.5)
    assert varied != plain


def test_two_generations_may_alternate(model: qsf.Model) -> None:
    prompts = (PROMPT, "The old man")
    alone = [text(model, prompt, temperature=0, max_tokens=15) for prompt in prompts]
    runs = [model.generate(prompt, temperature=0, max_tokens=15) for prompt in prompts]
    together = ["", ""]
    for _ in range(40):
        for i, run in enumerate(runs):
            together[i] += next(run, "")
    assert together == alone


def test_cancel_ends_every_generation_from_another_thread(model: qsf.Model) -> None:
    model.cancel()  # nothing runs: no effect on what comes
    runs = [model.generate(PROMPT, temperature=0, max_tokens=400) for _ in range(2)]
    for run in runs:
        next(run)
    thread = threading.Thread(target=model.cancel)
    thread.start()
    thread.join()
    for run in runs:
        assert len("".join(run)) < 20
        assert last_stats(model).stop_reason == "cancelled"
        assert last_stats(model).generated_tokens < 400
    assert text(model, temperature=0, max_tokens=5)


def test_a_cancel_that_comes_too_late_cancels_nothing(model: qsf.Model) -> None:
    whole = text(model, temperature=0, max_tokens=10)
    model.session._native.cancel()  # what remains of a cancel() when the run has ended meanwhile
    assert text(model, temperature=0, max_tokens=10) == whole
    model.session._native.cancel()
    assert model.logits([0, 1]).shape == (2, 2048)


def test_a_full_context_ends_the_text(tiny_llama_8bit: Path) -> None:
    with qsf.Model(tiny_llama_8bit, max_seq_len=16, **ANY_BUDGET) as model:
        text(model, temperature=0, max_tokens=100)
        stats = last_stats(model)
        assert stats.stop_reason == "context"
        assert stats.prompt_tokens + stats.generated_tokens == 16 + 1
        with pytest.raises(
            errors.QsfArgumentError,
            match=r"17 tokens, .* holds 16 \(max_seq_len=273",
        ):
            model.generate(list(range(2, 19)))


# ---- the rest of Model ----


def test_logits_have_a_row_for_each_token(model: qsf.Model) -> None:
    ids = model.tokenize(PROMPT)
    logits = model.logits(ids)
    assert logits.shape == (len(ids), model.info.n_vocab)
    assert logits.dtype == np.float32
    assert np.array_equal(model.logits(ids[:3]), logits[:3])
    first = model.detokenize([int(np.argmax(logits[-1]))])
    assert text(model, temperature=0, max_tokens=1) == first
    for bad in ([], [model.info.n_vocab], [-1]):
        with pytest.raises(errors.QsfArgumentError):
            model.logits(bad)


def test_the_file_alone_knows_template_defaults_and_end_tokens(tiny_chat_8bit: Path) -> None:
    with qsf.Model(tiny_chat_8bit, **ANY_BUDGET) as model:
        assert model.generation_defaults == qsf.SamplingParams(temperature=0.25, top_k=3)
        ids = model.chat_tokens([{"role": "user", "content": "Hi <|end_of_text|>"}])
        shown = model.tokenizer.decode(ids, skip_special=False)
        assert shown == ("<|begin_of_text|><user>Hi <|end_of_text|><|end_of_text|><assistant>")
        assert ids.count(1) == 1
        assert model._opened.end_ids == {1, 5}
        assert model.sampling_params(top_k=9, top_p=None) == qsf.SamplingParams(
            temperature=0.25, top_k=9
        )


def test_a_plan_says_what_opening_takes(tiny_llama_8bit: Path, model: qsf.Model) -> None:
    plan = qsf.Model.plan(tiny_llama_8bit, ram_budget=2000)
    assert plan.is_enough
    assert plan.engine_bytes == model.info.plan.engine_bytes
    assert plan.budget_bytes == 2000 * 2**20
    small = qsf.Model.plan(tiny_llama_8bit, ram_budget=1)
    assert not small.is_enough
    assert small.min_budget_bytes > 2**20


def test_a_file_without_a_tokenizer_has_logits_but_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bare.qsf"
    write_tiny(path)
    with qsf.Model(path, **ANY_BUDGET) as model:
        with pytest.raises(errors.QsfArgumentError, match="no tokenizer"):
            model.generate("Hi")
        with pytest.raises(errors.QsfArgumentError, match="no tokenizer"):
            model.generate([1])


@pytest.mark.skipif(sys.platform != "linux", reason="threads can be pinned on Linux only")
def test_pinned_threads_change_neither_text_nor_caller(
    model: qsf.Model, tiny_llama_8bit: Path
) -> None:
    allowed = os.sched_getaffinity(0)
    n_cores = qsf.native.binding.describe_machine().n_cores
    options = {**ANY_BUDGET, "pin_threads": True}
    with qsf.Model(tiny_llama_8bit, threads=n_cores, **options) as pinned:
        expected = text(model, temperature=0, max_tokens=12)
        assert text(pinned, temperature=0, max_tokens=12) == expected
        assert pinned.session_stats.n_loops > 0
        assert os.sched_getaffinity(0) == allowed
    with pytest.raises(errors.QsfArgumentError, match="cannot be pinned"):
        qsf.Model(tiny_llama_8bit, threads=len(allowed) + 1, **options)


def test_a_broken_chat_template_hinders_only_chat(tmp_path: Path, tiny_llama_8bit: Path) -> None:
    data = bytearray(tiny_llama_8bit.read_bytes())
    chat = json.loads(section_of(data, "CHAT"))
    chat["chat_template"] = "{% for m in messages %}{{ m.content }}"  # the converter refuses it
    grow(data, b"CHAT", json.dumps(chat).encode())
    (tmp_path / "broken.qsf").write_bytes(repair(data))
    with qsf.Model(tmp_path / "broken.qsf", ram_budget=None) as model:
        assert text(model, max_tokens=5)
        with pytest.raises(qsf.QsfError, match="cannot be rendered"):
            model.chat_tokens([{"role": "user", "content": "Hi"}])


def test_a_way_of_reading_that_cannot_be_had_is_named(
    tiny_llama_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise errors.QsfUnsupportedError("the kernel has no io_uring")

    monkeypatch.setattr(binding, "NativeModel", refuse)
    with pytest.raises(errors.QsfUnsupportedError, match=r"^io=uring: the kernel has no io_uring"):
        qsf.Model(tiny_llama_8bit, io="uring")
    with pytest.raises(errors.QsfUnsupportedError, match=r"^the kernel"):
        qsf.Model(tiny_llama_8bit)
    damaged = bytearray(tiny_llama_8bit.read_bytes())
    struct.pack_into("<I", damaged, 4, 99)  # the version: then it is the file's fault
    (tmp_path / "new.qsf").write_bytes(damaged)
    with pytest.raises(errors.QsfUnsupportedError, match=r"version 99"):
        qsf.Model(tmp_path / "new.qsf", io="uring")


def test_who_chose_the_way_of_reading_is_told(
    tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_info = binding.NativeModel.info

    def info(self: binding.NativeModel) -> binding.ModelInfo:
        return replace(real_info(self), io_is_probed=True)

    with qsf.Model(tiny_llama_8bit, ram_budget=None) as model:
        assert model.io_origin == "chosen"
    monkeypatch.setattr(binding.NativeModel, "info", info)
    with qsf.Model(tiny_llama_8bit, ram_budget=None) as model:
        assert model.io_origin == "found by a probe"
    with qsf.Model(tiny_llama_8bit, ram_budget=None, io="buffered") as model:
        assert model.io_origin == "as asked"
