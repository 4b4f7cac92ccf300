"""``import qsf`` and ``Model``: what an application sees."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.attacks import grow
from make.mutants import section_of
from make.qsf_files import repair
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
            errors.QsfArgumentError, match=r"17 tokens, .* holds 16 \(max_seq_len=273"
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


def test_who_chose_the_way_of_reading_is_told(tiny_llama_8bit: Path) -> None:
    for io, origin in ((None, "chosen"), ("auto", "chosen"), ("buffered", "as asked")):
        with qsf.Model(tiny_llama_8bit, ram_budget=None, io=io) as model:
            assert model.io_origin == origin


# ---- what programs build upon: conversations, log-probabilities, asyncio, names ----
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
HISTORY = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def chatter(tiny_chat_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_chat_8bit, ram_budget=None, sessions=3) as opened:
        yield opened


async def joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


# ---- chat ----
def test_a_model_answers_a_whole_conversation(chatter: qsf.Model) -> None:
    answer = "".join(chatter.chat(HISTORY, **GREEDY))
    assert answer == "".join(
        chatter.generate(chatter.chat_tokens(HISTORY), begins_text=True, **GREEDY)
    )
    with chatter.create_session() as session:
        session.messages[:] = HISTORY[:2]
        assert "".join(session.chat("Who are you?", **GREEDY)) == answer
    longer = [*HISTORY, {"role": "assistant", "content": answer}, HISTORY[0]]
    "".join(chatter.chat(longer, **GREEDY))
    assert chatter.stats is not None
    assert chatter.stats.evaluated_tokens < chatter.stats.prompt_tokens / 2
    assert "".join(chatter.chat(HISTORY, **GREEDY)) == answer  # nothing was remembered


def test_content_may_be_parts_with_text(chatter: qsf.Model) -> None:
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]
    in_parts = [{"role": "user", "content": parts}]
    assert chatter.chat_tokens(in_parts) == chatter.chat_tokens("Who\nare you?")
    assert chatter.chat_tokens([{"role": "user", "content": ["Hi"]}]) == chatter.chat_tokens("Hi")


# ---- log-probabilities ----
def expected_logprobs(chatter: qsf.Model, tokens: list[int], first: int) -> np.ndarray[Any, Any]:
    """The log-softmax of the logits before each token from ``first`` on, [n, n_vocab] in f64."""
    logits = chatter.logits(tokens[:-1], first_row=first - 1).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize("options", [GREEDY, {"temperature": 1.5, "seed": 7, "max_tokens": 12}])
def test_logprobs_are_those_of_the_logits(chatter: qsf.Model, options: dict[str, Any]) -> None:
    chosen: list[qsf.ChosenToken] = []
    text = "".join(chatter.generate(PROMPT, on_token=chosen.append, top_logprobs=5, **options))
    assert text == "".join(chatter.generate(PROMPT, **options))
    prompt = chatter.tokenize(PROMPT)
    assert chatter.detokenize([token.id for token in chosen]) == text.lstrip() or len(chosen) == 12
    rows = expected_logprobs(chatter, [*prompt, *(token.id for token in chosen)], len(prompt))
    assert len(rows) == len(chosen) == 12
    for row, token in zip(rows, chosen, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=2e-5)
        best = np.lexsort((np.arange(len(row)), -row))[:5]
        assert [id_ for id_, _ in token.top] == best.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(row[best], abs=2e-5)
        if options["temperature"] == 0:
            assert (token.id, token.logprob) == token.top[0]


def test_the_end_of_a_text_is_told_and_on_token_may_use_the_model(chatter: qsf.Model) -> None:
    chosen: list[int] = []

    def use(token: qsf.ChosenToken) -> None:
        assert token.top == ()
        chosen.append(token.id)
        chatter.logits([1, 2, 3])

    expected = "".join(chatter.generate(PROMPT, temperature=0, max_tokens=8))
    assert "".join(chatter.generate(PROMPT, temperature=0, max_tokens=8, on_token=use)) == expected
    assert len(chosen) == 8


# ---- asyncio ----
def test_async_variants_give_the_same_text(chatter: qsf.Model) -> None:
    async def both() -> list[str]:
        with chatter.create_session() as session:
            answers = list(
                await asyncio.gather(
                    joined(chatter.agenerate(PROMPT, **GREEDY)),
                    joined(session.agenerate("The old man", **GREEDY)),
                )
            )
            answers.append(await joined(chatter.achat(HISTORY, **GREEDY)))
            session.messages[:] = HISTORY[:2]
            answers.append(await joined(session.achat("Who are you?", **GREEDY)))
            return [*answers, session.messages[-1]["content"]]

    answer = "".join(chatter.chat(HISTORY, **GREEDY))
    assert asyncio.run(both()) == [
        "".join(chatter.generate(PROMPT, **GREEDY)),
        "".join(chatter.generate("The old man", **GREEDY)),
        answer,
        answer,
        answer,
    ]


def test_other_tasks_run_meanwhile(chatter: qsf.Model) -> None:
    async def count() -> int:
        n_turns = 0
        done = asyncio.ensure_future(joined(chatter.agenerate(PROMPT, **GREEDY)))
        while not done.done():
            n_turns += 1
            await asyncio.sleep(0)
        assert len(await done) > 10
        return n_turns

    assert asyncio.run(count()) > 12  # more than one for each token


def test_a_cancelled_task_ends_its_own_generation_only(chatter: qsf.Model) -> None:
    async def first_then_cancelled(begun: asyncio.Event) -> None:
        async for _ in chatter.agenerate(PROMPT, temperature=0, max_tokens=10**6):
            begun.set()

    async def both() -> str:
        begun = asyncio.Event()
        endless = asyncio.ensure_future(first_then_cancelled(begun))
        await begun.wait()
        other = asyncio.ensure_future(joined(chatter.agenerate("The old man", **GREEDY)))
        await asyncio.sleep(0.001)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert chatter.stats is not None
        assert chatter.stats.stop_reason in ("cancelled", "length", "abandoned")
        return await other

    assert asyncio.run(both()) == "".join(chatter.generate("The old man", **GREEDY))


def test_async_variants_raise_at_once_and_while_running(chatter: qsf.Model) -> None:
    with pytest.raises(qsf.QsfArgumentError, match="max_tokens"):
        chatter.agenerate(PROMPT, max_tokens=-1)
    with pytest.raises(qsf.QsfArgumentError, match="role"):
        chatter.achat([{"content": "Hi"}])

    def fail(_token: qsf.ChosenToken) -> None:
        raise RuntimeError("from a callback")

    with pytest.raises(RuntimeError, match="from a callback"):
        asyncio.run(joined(chatter.agenerate(PROMPT, on_token=fail)))


# ---- names ----
def test_models_and_sessions_say_what_they_are(tiny_chat_8bit: Path) -> None:
    with qsf.Model(tiny_chat_8bit, ram_budget=None) as chatter:
        assert f"{str(tiny_chat_8bit)!r}: llama, 8bit, " in repr(chatter)
        assert repr(chatter.session).startswith("<qsf.Session: context ")
        assert "closed" not in repr(chatter) + repr(chatter.session)
        session = chatter.session
    assert "closed" in repr(chatter)
    assert "closed" in repr(session)


def test_every_error_is_a_name_of_qsf() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, qsf.QsfError)
    }
    assert len(kinds) >= 10
    assert kinds <= set(qsf.__all__)
    assert all(getattr(qsf, name) is getattr(errors, name) for name in kinds)


def test_what_the_package_takes_from_others_comes_with_its_first_use() -> None:
    code = (
        "import sys, qsf\n"
        "qsf.Model\n"
        "assert not any(name.startswith('qsf_converter') for name in sys.modules)\n"
        "import qsf_converter\n"
        "assert qsf.convert is qsf_converter.convert\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_pretrained_takes_any_name(
    tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a name means, and that a conversion is kept: tests/python/find."""
    asked: list[str] = []

    def find(name: str, **_: Any) -> Path:
        asked.append(str(name))
        return tiny_llama_8bit

    with monkeypatch.context() as patch:
        patch.setattr("qsf.find.prepare.find_model", find)
        with qsf.Model.from_pretrained("org/name:8bit", ram_budget=None) as chatter:
            assert chatter.info.quant_type == "8bit"
    assert asked == ["org/name:8bit"]
    with pytest.raises(qsf.QsfArgumentError, match="ram_budget"):
        qsf.Model.from_pretrained("nothing.qsf", ram_budget=-1)
    with pytest.raises(qsf.QsfError, match=r"nothing\.qsf"):
        qsf.Model.from_pretrained(tmp_path / "nothing.qsf")
