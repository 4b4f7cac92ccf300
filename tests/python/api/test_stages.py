"""Stages: the layers of a model in several models give the bits of the whole one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make import golden_families, mtp_models
from make.golden_families import Case
from qsf.errors import QsfArgumentError, QsfCancelledError, QsfIOError
from qsf.native.binding import RowsWanted
from qsf.passes import PassItem
from qsf.stage import Stage
from qsf_converter import convert

# Full and windowed attention, parallel blocks, embedding norms, tied heads, latents, experts,
# per-layer embeddings, and the recurrent states of all kinds
FAMILIES = ("llama-llama3", "gemma2", "gemma4-own", "cohere2", "bloom", "deepseek_v3",
            "mixtral-window", "qwen3_5", "falcon_h1", "kimi_linear", "lfm2")  # fmt: skip


@contextmanager
def staged(path: Path, cuts: Sequence[int], **how: Any) -> Iterator[tuple[list[Stage], qsf.Model]]:
    """Open the stages before each cut, and the model that goes on with their rows."""
    how = {"ram_budget": None, "sessions": 2, **how}
    with ExitStack() as stack:
        stages: list[Stage] = []
        ends = [0, *cuts]
        for layers in zip(ends, cuts, strict=False):
            rows = stages[-1].rows if stages else None
            stages.append(
                stack.enter_context(closing(Stage(path, layers=layers, rows=rows, **how)))
            )
        layers = (cuts[-1], qsf.Model.plan(path, ram_budget=None).n_layers)
        yield (
            stages,
            stack.enter_context(qsf.Model(path, layers=layers, rows=stages[-1].rows, **how)),
        )


def answers(model: qsf.Model, tokens: Sequence[int]) -> tuple[NDArray[np.float32], ...]:
    """Logits of a prompt, of another end after a rewind, and of steps with drafts."""
    n = len(tokens)
    first = model.logits(tokens)
    second = model.logits([*tokens[: n // 2], *tokens[: n // 4]], first_row=n // 2)
    steps = np.empty((12, model.info.n_vocab), np.float32)
    with model.create_session() as session:
        session.logits(tokens[:8], first_row=7)
        for row in steps:
            session._native.read_logits(row)
            session._native.step(int(row.argmax()))
    return first, second, steps


def may_cut(path: Path, cut: int, n_layers: int) -> bool:
    """Whether no layer from ``cut`` on reads keys and values of earlier ones."""
    try:
        qsf.Model.plan(path, layers=(cut, n_layers), ram_budget=None)
    except QsfArgumentError:
        return False
    return True


def check_same_bits(path: Path, tokens: Sequence[int], **how: Any) -> int:
    """Compare all pairs of stages, and three of them, with the whole model; return the pairs."""
    with qsf.Model(path, ram_budget=None, sessions=2, **how) as whole:
        want, n_layers = answers(whole, tokens), whole.info.plan.n_layers
    cuts = [[cut] for cut in range(1, n_layers) if may_cut(path, cut, n_layers)]
    for cut in [*cuts, *([[cuts[0][0], cuts[-1][0]]] if len(cuts) > 1 else [])]:
        with staged(path, cut, **how) as (stages, model):
            for got, same in zip(answers(model, tokens), want, strict=True):
                np.testing.assert_array_equal(got, same, str(cut))
            assert model.info.plan.n_layers_skipped == 0
            parts = [s.model.info.plan.weights_bytes for s in stages]
            assert all(part > 0 for part in parts)
    return len(cuts)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_give_the_bits_of_the_whole_model(name: str, golden: Callable[[Case], Path]) -> None:
    case = golden_families.cases()[name]
    n_cuts = check_same_bits(golden(case), case.tokens)
    n_layers = qsf.Model.plan(golden(case), ram_budget=None).n_layers
    assert n_cuts == (
        1 if name == "gemma4-own" else n_layers - 1
    )  # its last two read keys of others


def test_an_mtp_head_guesses_in_the_last_stage(tmp_path: Path) -> None:
    case = golden_families.cases()["qwen3_5"]
    path = tmp_path / "m.qsf"
    convert(mtp_models.write_hf(case, tmp_path / "hf"), path, quant_type="4bit")
    check_same_bits(path, case.tokens)
    with staged(path, [1]) as (stages, model):
        assert model.info.plan.mtp_state != stages[0].model.info.plan.mtp_state


def test_texts_and_batches_over_a_stage_that_is_lost(tiny_llama_8bit: Path) -> None:
    prompts = ["Once upon a time", "The dog", "There was a girl", "Once upon a day"]
    how: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 5}
    with qsf.Model(tiny_llama_8bit, sessions=2, ram_budget=None) as whole:
        text = "".join(whole.generate(prompts[0], **how))
        batch = {a.index: a.text for a in whole.batch(prompts, **how)}
    opened: list[Stage] = []
    n_calls = 0

    def rows(wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> bytearray:
        nonlocal n_calls
        n_calls += 1
        if n_calls % 4 == 1:  # the one before is gone, with all that it held
            while opened:
                opened.pop().close()
            opened.append(Stage(tiny_llama_8bit, layers=(0, 2), sessions=2, ram_budget=None))
        return opened[-1].rows(wanted, is_cancelled)

    with qsf.Model(tiny_llama_8bit, layers=(2, 6), rows=rows, sessions=2, ram_budget=None) as model:
        assert "".join(model.generate(prompts[0], **how)) == text
        assert {a.index: a.text for a in model.batch(prompts, **how)} == batch
    assert n_calls > 12
    opened.pop().close()


def test_a_stage_holds_its_own_layers_alone(tiny_llama_8bit: Path) -> None:
    whole = qsf.Model.plan(tiny_llama_8bit, ram_budget=None)
    plans = [
        qsf.Model.plan(tiny_llama_8bit, layers=layers, ram_budget=None)
        for layers in ((0, 2), (2, 4), (4, 6))
    ]
    weights = [plan.weights_bytes for plan in plans]
    assert whole.weights_bytes < sum(weights) < 1.2 * whole.weights_bytes  # the table twice
    assert weights[1] < min(weights[0], weights[2])
    assert 3 * weights[1] < whole.weights_bytes
    assert all(2 * plan.kv_pool_bytes < whole.kv_pool_bytes for plan in plans)


# ---- what is refused ----
def test_cuts_that_are_refused_say_why(golden: Callable[[Case], Path]) -> None:
    cases = golden_families.cases()
    for name, layers, said in (
        ("inkling2_loop", (0, 1), "looped layers or residual blocks cannot be cut"),
        ("bert", (0, 1), "an encoder is not cut"),
        ("llama-llama3", (1, 99), "98 layers from layer 1 on: the model has"),
        ("llama-llama3", (99, 100), "1 layers from layer 99 on"),
    ):
        with pytest.raises(QsfArgumentError, match=said):
            qsf.Model(golden(cases[name]), layers=layers, ram_budget=None)
    shared = golden(cases["gemma4-own"])
    last = qsf.Model.plan(shared, ram_budget=None).n_layers
    with pytest.raises(QsfArgumentError, match="is left out, whose keys and values layer"):
        qsf.Model(shared, layers=(last - 1, last), ram_budget=None)
    with pytest.raises(QsfArgumentError, match=r"quality 0\.5 is for a whole model"):
        qsf.Model(golden(cases["llama-llama3"]), layers=(0, 1), quality=0.5, ram_budget=None)
    for wrong in ((1, 1), (2, 1), (-1, 2), 3, (0, 1, 2)):
        with pytest.raises(QsfArgumentError, match="layers must be two whole numbers"):
            qsf.Model(shared, layers=wrong)  # type: ignore[arg-type]


def test_what_a_stage_cannot_do_is_an_error(tiny_llama_8bit: Path) -> None:
    how: dict[str, Any] = {"ram_budget": None}
    with qsf.Model(tiny_llama_8bit, layers=(0, 2), **how) as stage:
        with pytest.raises(QsfArgumentError, match="gives the residual, and no logits"):
            stage.logits([1, 2, 3])
        with pytest.raises(QsfArgumentError, match="gives the residual, and no logits"):
            stage.run_pass([PassItem(stage.session, [1])])
        with pytest.raises(QsfArgumentError, match="residual must have"):
            stage.run_pass([PassItem(stage.session, [1], "none", residual=bytearray(8))])
    with (
        qsf.Model(tiny_llama_8bit, layers=(2, 6), **how) as last,
        pytest.raises(QsfArgumentError, match="from layer 2 on needs a source of rows"),
    ):
        last.logits([1, 2, 3])
    with qsf.Model(tiny_llama_8bit, **how) as whole:
        residual = bytearray(4 * whole.info.dim)
        with pytest.raises(QsfArgumentError, match="only a stage without a head gives"):
            whole.run_pass([PassItem(whole.session, [1], "none", residual=residual)])
    with pytest.raises(QsfArgumentError, match="has its first layer"):
        qsf.Model(tiny_llama_8bit, rows=lambda *_: b"", **how)
    with closing(Stage(tiny_llama_8bit, layers=(0, 2), **how)) as small:
        two = [RowsWanted(i, array("I", [1]), 1) for i in (1, 2)]
        with pytest.raises(QsfArgumentError, match="more than 1 sequences"):
            small.rows(two)
        with pytest.raises(QsfArgumentError, match="2 new tokens of 1"):
            small.rows([RowsWanted(1, array("I", [1]), 2)])


def test_a_source_that_fails_leaves_sessions_as_they_were(tiny_llama_8bit: Path) -> None:
    failing: list[Exception] = []

    def rows(wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        if failing:
            raise failing[0]
        return stage.rows(wanted, is_cancelled)

    with (
        closing(Stage(tiny_llama_8bit, layers=(0, 3), ram_budget=None)) as stage,
        qsf.Model(tiny_llama_8bit, layers=(3, 6), rows=rows, ram_budget=None) as model,
    ):
        want = model.logits([1, 5, 9, 12])
        model.session.rewind(2)
        failing.append(QsfIOError("the network is down"))
        with pytest.raises(QsfIOError, match="the network is down"):
            model.logits([1, 5, 9, 12], first_row=2)
        assert model.session.n_tokens == 2
        failing.clear()
        np.testing.assert_array_equal(model.logits([1, 5, 9, 12], first_row=2), want[2:])
        failing.append(QsfCancelledError("nobody asked for that"))
        with pytest.raises(QsfIOError, match="no rows came from the layers before layer 3"):
            model.logits([1, 5, 9, 13])


def test_a_cancelled_session_does_not_end_a_batch(golden: Callable[[Case], Path]) -> None:
    """Its states lag behind a rewind, so the pass begins by evaluating what it lacks."""
    case = golden_families.cases()["qwen3_5"]
    path = golden(case)

    def rows(wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        if cancels:
            model.session.cancel()
        if is_cancelled():
            raise QsfCancelledError("heard")
        return stage.rows(wanted, is_cancelled)

    cancels: list[bool] = []
    with (
        closing(Stage(path, layers=(0, 3), ram_budget=None, sessions=2)) as stage,
        qsf.Model(path, layers=(3, 4), rows=rows, ram_budget=None, sessions=2) as model,
        model.create_session() as other,
    ):
        model.logits(case.tokens)
        model.session.rewind(37)
        other.logits(case.tokens[:5])
        cancels.append(True)
        items = [PassItem(session, array("I", [3]), "last") for session in (model.session, other)]
        model.run_pass(items)
        assert [item.is_cancelled for item in items] == [True, False]


def test_a_session_may_be_collected_while_rows_are_awaited(tiny_llama_8bit: Path) -> None:
    """The engine's locks are held then, and a session takes one to end."""

    def rows(wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        gc.collect()
        return stage.rows(wanted, is_cancelled)

    with (
        closing(Stage(tiny_llama_8bit, layers=(0, 3), ram_budget=None)) as stage,
        qsf.Model(tiny_llama_8bit, layers=(3, 6), rows=rows, ram_budget=None, sessions=2) as model,
    ):
        circle: list[Any] = [model.create_session()]
        circle.append(circle)
        del circle
        thread = threading.Thread(target=model.logits, args=([1, 5],), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_of_a_cancelled_source_is_not_told_later(tiny_llama_8bit: Path) -> None:
    def rows(_wanted: list[RowsWanted], _is_cancelled: Callable[[], bool]) -> Any:
        model.cancel()
        raise QsfIOError("the network is down")

    with qsf.Model(tiny_llama_8bit, layers=(3, 6), rows=rows, ram_budget=None) as model:
        item = PassItem(model.session, array("I", [1]), "last")
        model.run_pass([item])
        assert item.is_cancelled
        with pytest.raises(QsfArgumentError, match="only 0 are held"):
            model.session.rewind(10**6)


def test_a_wait_for_rows_hears_a_cancel(tiny_llama_8bit: Path) -> None:
    heard = []

    def rows(_wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        heard.append(is_cancelled())
        model.cancel()  # as another thread would
        heard.append(is_cancelled())
        raise QsfCancelledError("cancelled while waiting")

    with qsf.Model(tiny_llama_8bit, layers=(3, 6), rows=rows, ram_budget=None) as model:
        assert list(model.generate("Once upon a time", max_tokens=5)) == []
        assert model.stats is not None
        assert model.stats.stop_reason == "cancelled"
    assert heard == [False, True]
