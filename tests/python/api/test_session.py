"""``Session``: sequences beside each other in one budget, and the rules of threads and life."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.streamed_models import least_options, make_streamed_gpt2
from qsf import errors

PROMPT = "Once upon a time"
LONG = "one two three " * 150  # more than a chunk
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=3) as opened:
        yield opened


@pytest.fixture
def session(model: qsf.Model) -> Iterator[qsf.Session]:
    with model.create_session() as created:
        yield created


def text(source: qsf.Model | qsf.Session, prompt: str = PROMPT, **options: Any) -> str:
    return "".join(source.generate(prompt, **{**GREEDY, **options}))


# ---- sessions beside each other ----
def test_more_sessions_than_the_plan_has_room_for_are_refused(tiny_llama_8bit: Path) -> None:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2) as model:
        second = model.create_session()
        with pytest.raises(errors.QsfMemoryError, match=r"sessions=2.*sessions=3") as caught:
            model.create_session()
        assert caught.value.argument == "sessions"
        second.close()
        model.create_session().close()
        dropped = model.create_session()
        del dropped  # a session that nobody refers to gives its room back
        gc.collect()
        model.create_session().close()


# ---- tokens, rewind, fork ----
def test_tokens_are_those_that_are_evaluated(model: qsf.Model, session: qsf.Session) -> None:
    assert session.tokens == []
    prompt = model.tokenize(PROMPT)
    shown = text(session, max_tokens=3)
    assert session.tokens[: len(prompt)] == prompt
    assert len(session.tokens) == len(prompt) + 2  # the last one that was chosen is not evaluated
    assert shown.startswith(model.tokenizer.decode(session.tokens[len(prompt) :]).strip()[:3])
    session.logits([4, 5, 6])
    assert session.tokens == [4, 5, 6]
    with pytest.raises(errors.QsfArgumentError):
        session.logits([4, 10**6])
    assert session.tokens == [4, 5, 6]


def test_a_fork_goes_its_own_way(model: qsf.Model, session: qsf.Session) -> None:
    """Its bits: test_same_bits.py."""
    session.logits([4, 5, 6])
    session.messages.append({"role": "user", "content": "Hi"})
    with session.fork() as fork:
        assert (fork.tokens, fork.messages) == ([4, 5, 6], session.messages)
        fork.messages[0]["content"] = "changed"
        assert session.messages[0]["content"] == "Hi"
        fork.logits([4, 5, 6, 9], first_row=3)
        assert fork.engine_stats.prompt_tokens == 1  # what it holds was copied
        fork.logits([1, 2])
        assert session.tokens == [4, 5, 6]
        runs = [one.generate(PROMPT, **GREEDY) for one in (session, fork)]
        for run in runs:
            next(run)
        session.cancel()  # and not the other one
        assert len("".join(runs[0])) < len("".join(runs[1]))
        reasons = [one.stats and one.stats.stop_reason for one in (session, fork)]
        assert reasons == ["cancelled", "length"]


# ---- chat ----
def test_a_chat_keeps_the_conversation_and_evaluates_only_what_is_new(tiny_chat_8bit: Path) -> None:
    with qsf.Model(tiny_chat_8bit, ram_budget=None) as model:
        session = model.session
        first = "".join(session.chat("Hi", **GREEDY))
        assert session.messages == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": first},
        ]
        n_before = session.engine_stats.prompt_tokens
        second = "".join(session.chat([{"role": "user", "content": "And you?"}], **GREEDY))
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
        prompt = model.chat_tokens(session.messages[:3])
        assert "".join(model.generate(prompt, begins_text=True, **GREEDY)) == second
        assert session.stats is not None
        assert 0 < session.engine_stats.prompt_tokens - n_before < len(prompt)
        session.messages.clear()
        assert "".join(session.chat("Hi", **GREEDY)) == first


def test_an_answer_cut_short_is_part_of_the_conversation(model: qsf.Model) -> None:
    with model.create_session() as session:
        answer = session.chat("Once", temperature=0, max_tokens=50)
        shown = next(answer) + next(answer)
        answer.close()  # type: ignore[attr-defined]
        assert session.messages[-1] == {"role": "assistant", "content": shown}
        assert session.stats is not None
        assert session.stats.stop_reason == "abandoned"


def test_a_chat_that_cannot_be_answered_changes_nothing(model: qsf.Model) -> None:
    with model.create_session() as session:
        with pytest.raises(errors.QsfArgumentError):
            session.chat("many words " * 3000)
        bad: Any
        for bad in (5, None, [5], [{"role": "user"}], {"role": 5, "content": "x"}, b"Hi"):
            with pytest.raises(errors.QsfArgumentError, match="messages") as caught:
                session.chat(bad)
            assert caught.value.argument == "messages"
        assert session.messages == []


# ---- threads and life ----
def test_the_model_closes_its_sessions(tiny_llama_8bit: Path) -> None:
    model = qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2)
    session = model.create_session()
    run = session.generate(PROMPT)
    next(run)
    model.close()
    for use in (lambda: next(run), lambda: session.tokens, lambda: session.logits([1]),
                lambda: session.rewind(0), session.fork, model.create_session,
                lambda: model.timeline, lambda: session.engine_stats):  # fmt: skip
        with pytest.raises(errors.QsfStateError, match="closed"):
            use()
    session.cancel()
    session.close()
    model.close()


def test_a_session_outlives_a_model_that_nobody_refers_to(tiny_llama_8bit: Path) -> None:
    model = qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2)
    session = model.create_session()
    expected = text(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None  # at once: there is no circle of references
    assert text(session) == expected
    session.close()


@pytest.mark.parametrize("where", ["session", "other", "thread"])
def test_a_progress_callback_may_use_the_model(model: qsf.Model, where: str) -> None:
    ids = model.tokenize(LONG)
    assert len(ids) > model.info.plan.chunk_tokens
    expected = "".join(model.generate(ids, **GREEDY))
    seen: list[int] = []

    def use(n_done: int, _n_all: int) -> None:
        seen.append(n_done)
        if where == "other":
            with model.create_session() as other:
                other.logits([5, 6])
        elif where == "thread":
            thread = threading.Thread(target=lambda: model.logits([5, 6]))
            thread.start()
            thread.join()
        else:
            model.logits([5, 6])

    model.logits([1])
    assert "".join(model.generate(ids, progress=use, **GREEDY)) == expected
    assert len(seen) > 1
    assert seen == sorted(set(seen))
    assert seen[-1] == len(ids)


def test_a_progress_callback_may_cancel_close_or_fail(tiny_llama_8bit: Path) -> None:
    model = qsf.Model(tiny_llama_8bit, ram_budget=None)

    def fail(_n_done: int, _n_all: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(model.generate(LONG, progress=fail))
    assert list(model.generate(LONG, progress=lambda *_: model.cancel())) == []
    assert model.stats is not None
    assert model.stats.stop_reason == "cancelled"
    assert text(model)
    with pytest.raises(errors.QsfStateError, match="closed"):
        list(model.generate(LONG, progress=lambda *_: model.close()))


def test_a_call_inside_a_call_of_the_same_thread_is_refused(session: qsf.Session) -> None:
    with session._turn(), pytest.raises(errors.QsfStateError, match="of this thread"):
        session.logits([1])
    assert session.logits([1]).shape[0] == 1


def in_child(work: Any) -> str:
    """Return what ``work`` returned in a process made by fork, or that it hung."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    watch = threading.Timer(60, os.kill, (pid, 9))  # only where the promise is broken
    watch.start()
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode()
    watch.cancel()
    _, status = os.waitpid(pid, 0)
    return said if status == 0 else f"hung: {status}"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see below
def test_an_exception_of_a_signal_handler_leaves_the_session_usable(session: qsf.Session) -> None:
    """Wherever it comes: a with statement over a generator was left with its lock taken."""

    class Stopped(BaseException):
        pass

    came = False

    def stop(*_: object) -> None:
        nonlocal came
        came = True
        raise Stopped

    delays = random.Random(5)
    expected = list(session.generate("ab", max_tokens=3, temperature=0))
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(200):
            came = False
            try:
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(2e-5, 3e-3))
                while not came:  # Python drops what is raised in a callback of its collector
                    list(session.generate("ab", max_tokens=3, temperature=0))
            except Stopped:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert list(session.generate("ab", max_tokens=3, temperature=0)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_made_by_fork_is_told_to_open_the_model_itself(tmp_path: Path) -> None:
    path = make_streamed_gpt2(tmp_path)
    with qsf.Model(path, **least_options(path)) as model:
        assert model.info.plan.streamed_bytes > 0
        expected = model.logits([1, 2, 3])
        run: Any
        for run in (
            lambda: model.logits([1, 2, 3]),
            lambda: model.session.tokens,
            lambda: model.session.fork(),
            lambda: model.create_session(),
            lambda: model.timeline,
            lambda: model.cancel(),
        ):
            said = in_child(run)
            assert said.startswith("QsfStateError: ")
            assert "open the file after the fork" in said

        def close_and_open() -> bool:
            model.close()  # frees nothing of the parent's, and does not wait for its threads
            with qsf.Model(path, ram_budget=None) as own:
                return bool(own.logits([1, 2]).shape[0] == 2)

        assert in_child(close_and_open) == "True"
        assert np.array_equal(model.logits([1, 2, 3]), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="a lock is held at the fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_call_does_not_wait_for_its_lock(session: qsf.Session) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with session._turn():
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert "open the file after the fork" in in_child(lambda: session.logits([1]))
        assert in_child(session.close) == "None"
    finally:
        go_on.set()
        thread.join()


def test_models_and_sessions_cannot_be_copied(model: qsf.Model, session: qsf.Session) -> None:
    for thing in (model, session):
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(errors.QsfStateError, match="neither copied nor pickled"):
                way(thing)
    assert text(model)
