"""The scheduler with an engine and a clock that are made up."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from make.fake_engine import FakeEngine, Told, alone
from qsf import Model
from qsf.cli import serve
from qsf.cli.serve_options import parse
from qsf.errors import QsfFormatError, QsfIOError, QsfMemoryError, QsfNumericError
from qsf.file.layout import Dtype
from qsf.options import call_with
from qsf.serve.http.problems import Problem
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.scheduler import Pace, Scheduler
from qsf_bench.models.random_qsf import write_model
from qsf_bench.models.shapes import Shape


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    def __init__(
        self, n_slots: int = 2, n_kept: int = 0, most_drafts: int = 0, **limits: float
    ) -> None:
        self.engine = FakeEngine(n_slots, n_kept=n_kept, most_drafts=most_drafts)
        self.clock = Clock()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.engine,
            self.metrics,
            self.clock,
            **limits,  # type: ignore[arg-type]
        )

    def submit(self, *told: Told) -> None:
        self.scheduler.submit([one.job for one in told])

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.step():
                return
        pytest.fail("it does not end")


def prompt(n: int, first: int = 1) -> list[int]:
    return [(first + i) % 40 + 1 for i in range(n)]


def test_tokens_that_were_guessed_take_no_pass() -> None:
    passes, texts = [], []
    for most_drafts in (0, 4):
        setup = Setup(3, most_drafts=most_drafts)
        told = [Told(prompt(3 + i, i), max_tokens=20, is_endless=True) for i in range(3)]
        setup.submit(*told)
        setup.run()
        texts.append([one.text for one in told])
        counters = setup.metrics.counters
        passes.append(counters["passes_total"])
        assert counters["generation_tokens_total"] == 60
        assert counters["spec_decode_num_accepted_tokens_total"] == setup.engine.n_accepted
        assert counters["spec_decode_num_draft_tokens_total"] >= setup.engine.n_accepted
    assert texts[0] == texts[1]
    assert 0 < passes[1] < passes[0] / 3


def test_prompts_go_in_pieces_beside_those_who_decode() -> None:
    setup = Setup(3)
    first = Told(prompt(2), max_tokens=50, is_endless=True)
    second, third = Told(prompt(40)), Told(prompt(30, 9))
    setup.submit(first)
    setup.scheduler.step()
    setup.submit(second, third)
    setup.scheduler.step()
    rows = {item.session: len(item.tokens) for item in setup.engine.passes[-1]}
    assert rows == {0: 1, 1: 8, 2: 7}  # of 15 rows beside the one that decodes, the older has half
    n_before = first.job.n_generated
    for _ in range(3):
        setup.scheduler.step()
    assert first.job.n_generated == n_before + 3


def test_a_prefix_is_not_evaluated_again_but_for_the_same_owner() -> None:
    setup = Setup(1)
    for owner, n_cached in (("a", 0), ("a", 9), ("b", 0), ("a", 0)):
        told = Told(prompt(10), owner=owner, max_tokens=2)
        setup.submit(told)
        setup.run()
        assert told.job.n_cached == n_cached
        assert told.text == alone(prompt(10), 1, 2)


def test_a_beginning_is_copied_from_another_slot() -> None:
    """While its slot is taken, and afterwards so that it keeps what it holds."""
    setup = Setup(3)

    def tick() -> None:
        setup.clock.now += 0.1

    setup.engine.before_pass = tick
    first = Told(prompt(36), max_tokens=20, is_endless=True)
    setup.submit(first)
    for _ in range(4):
        setup.scheduler.step()
    beside = Told([*prompt(36), 50], seed=2)
    stranger = Told([*prompt(36), 50], seed=2, owner="b")
    setup.submit(beside, stranger)
    setup.run()
    assert (beside.job.n_cached, stranger.job.n_cached) == (36, 0)
    assert setup.engine.n_copied == 36
    again = Told([*prompt(36), 51])
    setup.submit(again)
    setup.run()
    assert again.job.n_cached == 36
    goes_on = Told([*first.job.tokens, 9])
    setup.submit(goes_on)
    setup.run()
    assert goes_on.job.n_cached >= len(first.job.tokens) - 1  # nobody has overwritten it
    for told, seed in ((first, 1), (beside, 2), (stranger, 2), (again, 1), (goes_on, 1)):
        most = 20 if told is first else 8
        if told is not first:
            assert told.text == alone(told.job.prompt, seed, most)


@pytest.mark.parametrize("n_changed", [0, 2], ids=["goes on", "answers come back otherwise"])
def test_a_late_change_begins_at_an_earlier_turn_where_windows_move_on(n_changed: int) -> None:
    """As when an agent's client changes a tool's result of the last turn but one."""
    setup = Setup(3)
    setup.engine.is_windowed, setup.engine.ctx_tokens, setup.engine.n_pool = True, 200, 600

    def tick() -> None:
        setup.clock.now += 0.1

    setup.engine.before_pass = tick
    said, ends = prompt(12), [0]
    for turn in range(6):
        told = Told(said, max_tokens=2, is_endless=True)
        setup.submit(told)
        setup.run()
        assert told.job.n_cached >= ends[-1] - 1
        ends.append(len(told.job.tokens) - n_changed)
        said = [*told.job.tokens[: ends[-1]], *prompt(18, turn)]
    late = Told([*told.job.tokens[: ends[-2] + 1], *prompt(18, 20)], max_tokens=2)
    setup.submit(late)
    setup.run()
    assert late.job.n_cached >= ends[-2] - 1


@pytest.mark.parametrize("n_own", [0, 3])
def test_equal_beginnings_that_come_together_are_evaluated_once(n_own: int) -> None:
    setup = Setup(3)
    prompts = [[*prompt(40), *prompt(n_own, 7 * i)] for i in range(3)]
    told = [Told(each, seed=i) for i, each in enumerate(prompts)]
    stranger = Told(prompts[0], owner="b")
    setup.submit(*told, stranger)
    setup.run()
    assert [one.text for one in told] == [alone(each, i, 8) for i, each in enumerate(prompts)]
    assert [one.job.n_cached for one in told] == [0, 40 - (n_own == 0), 40 - (n_own == 0)]
    assert stranger.job.n_cached == 0
    n_prompt = sum(
        len(item.tokens) for items in setup.engine.passes for item in items if len(item.tokens) > 1
    )
    assert n_prompt <= 2 * 40 + 4 * n_own  # a single token may be of an answer


def test_who_waited_for_another_goes_on_without_it() -> None:
    """It takes what was evaluated before the other was cancelled; the third waits for it."""
    setup = Setup(3)
    first, second, third = (Told([*prompt(50), 3 + i]) for i in range(3))
    setup.submit(first, second, third)
    setup.scheduler.step()
    setup.scheduler.cancel(first.job)
    setup.run()
    assert first.end == "cancelled"
    for told in (second, third):
        assert told.text == alone(told.job.prompt, 1, 8)
    assert [second.job.n_cached, third.job.n_cached] == [16, 50]


def test_owners_have_turns() -> None:
    setup = Setup(1)
    order: list[str] = []
    jobs = [Told(prompt(2), owner=owner, max_tokens=1) for owner in "aaab"]
    for one in jobs:
        one.job.sink = lambda job, _event: order.append(job.owner)
        setup.submit(one)
    setup.run()
    assert order == ["a", "b", "a", "a"]


def test_the_queue_has_an_end_with_both_numbers() -> None:
    setup = Setup(1, max_waiting=2, max_waiting_tokens=100)
    for _ in range(3):
        setup.submit(Told(prompt(2)))
    with pytest.raises(Problem, match="2 requests wait, and 2 is the limit") as caught:
        setup.submit(Told(prompt(2)))
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert caught.value.retry_seconds is not None
    assert 1 <= caught.value.retry_seconds <= 60
    full = Setup(1, max_waiting=99, max_waiting_tokens=30)
    full.submit(Told(prompt(20)))
    with pytest.raises(Problem, match="would have 40 tokens, and 30 is the limit"):
        full.submit(Told(prompt(20)))


def test_who_waits_or_runs_too_long_is_told() -> None:
    setup = Setup(1, queue_seconds=10)
    long, late = Told(prompt(2), max_tokens=60, is_endless=True), Told(prompt(3))
    setup.submit(long, late)
    setup.scheduler.step()
    setup.clock.now += 10
    setup.run()
    assert (long.end, late.end) == ("length", "queue_timeout")
    told = Told(prompt(2), max_tokens=60, max_seconds=5, is_endless=True)
    setup.submit(told)
    setup.scheduler.step()
    assert told.end == ""
    setup.clock.now += 5
    setup.run()
    assert told.end == "deadline"


@pytest.mark.parametrize(
    "kind", [QsfIOError, QsfMemoryError, QsfNumericError], ids=lambda k: k.__name__
)
def test_a_failure_ends_its_requests_and_not_the_server(kind: type) -> None:
    setup = Setup(2)
    told, other = Told(prompt(5)), Told(prompt(9))
    setup.submit(told, other)
    setup.engine.failures = [kind("broken"), kind("broken")]
    setup.scheduler.step()
    if kind in (QsfMemoryError, QsfNumericError):
        setup.engine.failures.clear()
    ends = [(one.end, one.n_ends) for one in (told, other)]
    if kind is QsfMemoryError:  # it waits for the other's memory
        assert ends == [("engine_error", 1), ("", 0)]
        setup.run()
        assert other.text == alone(prompt(9), 1, 8)
    else:
        assert ends == [("engine_error", 1)] * 2
    problem = told.events[-1].problem
    assert problem is not None
    assert problem.headers() == {"x-should-retry": "false"}
    after = Told(prompt(5))
    setup.submit(after)
    setup.run()
    assert after.text == alone(prompt(5), 1, 8)


def test_a_defect_of_the_scheduler_does_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    setup = Setup(1)
    told, after = Told(prompt(5)), Told(prompt(5))

    def fail_once() -> None:
        setup.engine.before_pass = lambda: None
        raise ZeroDivisionError

    setup.engine.before_pass = fail_once
    thread = threading.Thread(target=setup.scheduler.run, args=(lambda: None,))
    thread.start()
    ended = threading.Event()
    after.job.sink = lambda _job, event: ended.set() if event.is_last else None
    setup.submit(told)
    while not told.end:
        ended.wait(0.01)
    setup.submit(after)
    assert ended.wait(30)
    setup.scheduler.close()
    thread.join(30)
    assert not thread.is_alive()
    assert told.end == "engine_error"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_closing_lets_those_who_run_end() -> None:
    setup = Setup(1)
    running, waiting = Told(prompt(2), max_tokens=4), Told(prompt(2))
    setup.submit(running, waiting)
    setup.scheduler.step()
    setup.scheduler.close()
    with pytest.raises(Problem, match="shutting down"):
        setup.submit(Told(prompt(2)))
    setup.run()
    assert running.text == alone(prompt(2), 1, 4)
    assert waiting.end == "shutting_down"
    again = Setup(1)
    running = Told(prompt(2), max_tokens=50, is_endless=True)
    again.submit(running)
    again.scheduler.step()
    again.scheduler.close(at_once=True)
    again.run()
    assert running.end == "shutting_down"


def test_the_pace_follows_what_passes_took() -> None:
    in_memory, streamed = Pace(0.1), Pace(0.1)
    for _ in range(50):
        in_memory.learn(4, 0, 0.025)
        in_memory.learn(4, 40, 0.025 + 40 * 0.0018)
        streamed.learn(4, 0, 1.4)
        streamed.learn(4, 40, 1.4 + 40 * 0.001)
    assert in_memory.prompt_rows(4) == pytest.approx(0.075 / 0.0018, abs=2)
    assert streamed.prompt_rows(4) == pytest.approx(0.5 * 1.4 / 0.001, rel=0.1)
    slow = Pace(0.1)
    slow.learn(1, 0, 0.09)
    slow.learn(1, 10, 10.0)
    assert slow.prompt_rows(1) == 8  # some progress, however slow


def test_a_job_knows_how_many_tokens_were_evaluated_again() -> None:
    setup = Setup(1)
    for n_jobs in (1, 2):
        told = Told(prompt(20, n_jobs), max_tokens=3)

        def going_back() -> None:
            setup.engine.again[0] += 2

        setup.engine.before_pass = going_back
        n_passes = len(setup.engine.passes)
        setup.submit(told)
        setup.run()
        assert told.job.n_again == 2 * (len(setup.engine.passes) - n_passes) > 0


def test_what_was_said_is_kept_as_long_as_there_is_room() -> None:
    """Two at a time, and two more are kept; the longest unused gives way."""
    setup = Setup(2, n_kept=2)

    def answer(first: int) -> Told:
        told = Told(prompt(30, first), max_tokens=4, is_endless=True)
        setup.submit(told)
        setup.run()
        assert told.text == alone(prompt(30, first), 1, 4)
        setup.clock.now += 1
        return told

    assert [answer(first).job.n_cached for first in (5, 1, 2)] == [0, 0, 0]
    assert answer(5).job.n_cached == 29  # though two others have been answered since
    assert setup.engine.n_full == 1  # 128 tokens are room for three, so 1 was forgotten
    assert answer(2).job.n_cached == 29
    assert answer(1).job.n_cached == 0


class AnyOrder(RuleBasedStateMachine):
    """Jobs come, are cancelled, passes fail, time passes; what must hold holds after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = Setup(3, n_kept=2, most_drafts=3, max_waiting=4, queue_seconds=50)
        self.told: list[Told] = []
        self.asked: list[tuple[list[int], int, int]] = []
        self.n_failures = 0
        self.is_closed = False

    @rule(
        n=st.integers(1, 40),
        first=st.integers(0, 3),
        seed=st.integers(0, 3),
        most=st.integers(1, 20),
        owner=st.sampled_from("ab"),
        limit=st.sampled_from([None, None, 20.0]),
    )
    def submit(
        self, n: int, first: int, seed: int, most: int, owner: str, limit: float | None
    ) -> None:
        told = Told(prompt(n, first), seed=seed, max_tokens=most, owner=owner, max_seconds=limit)
        n_waiting = self.setup.scheduler.n_waiting
        code = ""
        try:
            self.setup.submit(told)
        except Problem as problem:
            code = problem.code
        if self.is_closed or code:
            assert code == ("shutting_down" if self.is_closed else "queue_full")
            assert self.is_closed or n_waiting >= 4
            return
        self.told.append(told)
        self.asked.append((prompt(n, first), seed, most))

    @rule()
    def step(self) -> None:
        self.setup.scheduler.step()

    @precondition(lambda self: self.told)
    @rule(data=st.data(), is_in_pass=st.booleans())
    def cancel(self, data: st.DataObject, is_in_pass: bool) -> None:
        told = self.told[data.draw(st.integers(0, len(self.told) - 1))]
        if not is_in_pass:
            self.setup.scheduler.cancel(told.job)
            return
        self.setup.engine.before_pass = lambda: self.setup.scheduler.cancel(told.job)
        self.setup.scheduler.step()
        self.setup.engine.before_pass = lambda: None

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.setup.clock.now += seconds

    @rule(kind=st.sampled_from([QsfIOError, QsfFormatError, QsfNumericError]))
    def fail(self, kind: type) -> None:
        self.setup.engine.failures.append(kind("broken"))

    @precondition(lambda self: len(self.told) > 6)
    @rule()
    def close(self) -> None:
        self.setup.scheduler.close()
        self.is_closed = True

    @invariant()
    def everything_is_in_order(self) -> None:
        scheduler = self.setup.scheduler
        running = scheduler.running
        assert len({id(job) for job in running}) == len(running) <= 3
        assert scheduler.n_waiting <= 4 + 3
        for slot in scheduler.slots:
            assert slot.n_held == len(self.setup.engine.held[slot.index])
            if slot.job is not None:
                held = self.setup.engine.held[slot.index]
                assert slot.job.tokens[: slot.job.n_held] == held
        for told, (tokens, seed, most) in zip(self.told, self.asked, strict=True):
            assert told.n_ends <= 1
            whole = alone(tokens, seed, most)
            assert whole.startswith(told.text)
            if told.end in ("end", "length"):
                assert told.text == whole

    def teardown(self) -> None:
        self.setup.engine.failures.clear()
        self.setup.run()
        assert [told.n_ends for told in self.told] == [1] * len(self.told)
        assert self.setup.scheduler.running == []
        assert self.setup.scheduler.n_waiting == 0
        assert sum(self.setup.metrics.ends.values()) == len(self.told)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)


# ---- how many sequences are served together: fewer where recurrent states leave no room ----
@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A small model with states of 19 MB."""
    shape = Shape(
        24, 128, 128, 2, 1, 2048, 8192, "qwen3_5_text", 64, is_tied=True, n_value_heads=16
    )
    file = tmp_path_factory.mktemp("states") / "m.qsf"
    write_model(file, shape, Dtype.Q4, Dtype.Q8, tokenizer_from=tiny_llama_dir)
    return file


@pytest.mark.parametrize(
    ("more_mb", "options", "n_sequences", "n_sessions"),
    [
        (700, (), 4, 8),
        (400, (), 4, 4),
        (230, (), 2, 2),
        (140, (), 1, 1),
        (400, ("--parallel", "3"), 3, 3),
    ],
)
def test_states_and_a_context_have_room(
    path: Path, more_mb: int, options: tuple[str, ...], n_sequences: int, n_sessions: int
) -> None:
    taken_mb = Model.plan(path, ram_budget="auto").process_bytes >> 20
    request = parse([str(path), "--ram-budget", str(taken_mb + more_mb), *options])
    opening = serve._opening(path, request, False)
    assert (opening.kv_contexts, opening.sessions) == (n_sequences, n_sessions)
    plan = call_with(Model.plan, path, opening)
    assert plan.is_enough
    assert plan.ctx_tokens >= 2048
    assert request.serving.parallel_of(plan.kv_contexts) == n_sequences


def test_a_number_that_was_given_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(path), "--ram-budget", "200", "--parallel", "8", "--plan"]) == 1
    assert "or --parallel with fewer than now (their states take " in capsys.readouterr().err
