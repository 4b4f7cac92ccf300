"""The measured process of QSF: opens a file, runs tests on it and writes their times.

Run as ``python -m qsf_bench.run.worker_qsf TASK``. TASK is the JSON of a `tasks.Task`. The
`tasks.Answer` goes as JSON into the file that the environment variable ``QSF_BENCH_ANSWER`` names,
because anything may write to stdout.

Memory is measured, so beside small ones only modules that ``qsf-run`` imports are imported here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfError, QsfMemoryError
from qsf.kv import kv_type_name
from qsf.native import binding
from qsf.native.opening import does_not_fit, open_native
from qsf.options import ModelOptions
from qsf_bench.run.tasks import ANSWER_VARIABLE, Answer, Task, Test, TestRun, parse_task
from qsf_bench.run.worker_llama import disk_bytes, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NO_TOKENS = array("I")


class Loop:
    """Times a loop of calls of the engine, and Python's work between the calls.

    The time between calls comes from clock readings around each call, independent of the engine's
    own statistics.
    """

    def __init__(self) -> None:
        self.wall_ns = 0
        self.python_ns = 0
        self._began_ns = self._left_ns = time.perf_counter_ns()

    def call(self, engine: Callable[..., Any], *arguments: object) -> Any:
        """Call the engine."""
        self._add_gap()
        result = engine(*arguments)
        self._left_ns = time.perf_counter_ns()
        return result

    def end(self) -> None:
        """Stop the clock."""
        self.wall_ns = self._add_gap() - self._began_ns

    def _add_gap(self) -> int:
        now_ns = time.perf_counter_ns()
        self.python_ns += now_ns - self._left_ns
        return now_ns


class Opened:
    """An open model, and its one session."""

    def __init__(self, task: Task, ctx_tokens: int) -> None:
        """Open the file of the task. Raises QsfError."""
        began_ns = time.perf_counter_ns()
        options = ModelOptions(
            ram_budget=task.budget_mb,
            threads=task.n_threads,
            max_seq_len=ctx_tokens,
            kv_type=task.kv_type,
            io=task.io,
            draft="off",
        )
        self.ctx_tokens = ctx_tokens
        self.model = open_native(task.path, options)
        self.session = self.model.create_session()
        self.load_seconds = (time.perf_counter_ns() - began_ns) / 1e9
        self.info = self.model.info()
        self._sampler = binding.NativeSampler(
            temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=0
        )

    def close(self) -> None:
        """Free the memory."""
        self.session.close()
        self.model.close()

    def run(self, test: Test, *, is_slow: bool) -> TestRun:
        """Warm up and time one test."""
        n_vocab = self.info.n_vocab
        before = tokens_of(test.depth, n_vocab, is_even=test.is_even)
        tokens = tokens_of(test.n_tokens, n_vocab, is_even=test.is_even)
        self.session.rewind(0)
        if before:
            self._hold(before)
        self._warm_up(test, before, tokens, is_slow=is_slow)
        stats, n_disk_bytes = self.session.stats(), disk_bytes()
        loop = Loop()
        if test.kind == "pp":
            n_passes = self._hold(before + tokens, loop)
        else:
            n_passes = self._step(tokens, loop)
        loop.end()
        run = test_run(test, loop, stats, self.session.stats(), n_passes)
        if n_disk_bytes is not None:
            run = replace(run, disk_bytes=(disk_bytes() or 0) - n_disk_bytes)
        return run

    def _warm_up(
        self, test: Test, before: array[int], tokens: array[int], *, is_slow: bool
    ) -> None:
        if test.kind == "tg" or is_slow:
            self.session.step(tokens[0])
        else:
            self._hold(before + tokens)
        if test.kind == "pp":
            self.session.rewind(len(before))

    def _hold(self, tokens: array[int], loop: Loop | None = None) -> int:
        """Evaluate the missing tokens; return the number of passes."""
        loop = loop or Loop()
        n_passes, n_done = 0, 0
        while n_done < len(tokens):
            n_done = loop.call(self.session.sync_chunk, tokens)
            n_passes += 1
        return n_passes

    def _step(self, tokens: array[int], loop: Loop) -> int:
        """Evaluate the tokens one at a time, choose a token after each, and drop it."""
        for token in tokens:
            loop.call(self.session.step, token)
            loop.call(self._sampler.choose, self.session, _NO_TOKENS)
        return len(tokens)


def test_run(
    test: Test,
    loop: Loop,
    before: binding.SessionStats,
    after: binding.SessionStats,
    n_passes: int,
) -> TestRun:
    """Return the session's counts between two readings of its counters."""

    def grown(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    phases = zip(binding.phase_names(), before.phase_ns, after.phase_ns, strict=True)
    parts = {f"phase_{name}": end_ns - begin_ns for name, begin_ns, end_ns in phases}
    parts |= {"sample": grown("sample_ns"), "python": loop.python_ns}
    return TestRun(
        name=test.name,
        depth=test.depth,
        n_tokens=test.n_tokens,
        wall_ns=loop.wall_ns,
        parts=parts,
        beside={"read": grown("read_ns"), "checksum": grown("checksum_ns")},
        n_passes=n_passes,
        read_bytes=grown("read_bytes"),
        n_expert_uses=grown("n_expert_uses"),
        n_expert_hits=grown("n_expert_hits"),
    )


def measure(task: Task) -> Answer:
    """Run the tests in order. The answer contains any failure, with the tests before it."""
    answer = Answer(
        version=f"QSF {binding.version()}",
        kernels="",
        kv_type="",
        n_vocab=0,
        load_seconds=0.0,
        peak_rss_bytes=0,
        tests=[],
    )
    opened: Opened | None = None
    try:
        for test in task.tests:
            if opened is None or opened.ctx_tokens != test.ctx_tokens:
                if opened is not None:
                    opened.close()
                opened = Opened(task, test.ctx_tokens)
            answer = with_run(answer, opened, opened.run(test, is_slow=task.is_slow))
    except QsfMemoryError as error:
        why = str(error) if error.plan is None else does_not_fit(error.plan, is_command=True)
        answer = replace(answer, failure=why)
    except QsfError as error:
        answer = replace(answer, failure=str(error))
    return replace(answer, peak_rss_bytes=binding.describe_machine().peak_bytes)


def with_run(answer: Answer, opened: Opened, run: TestRun) -> Answer:
    """Return the answer with one more test, and the facts of the open model."""
    info = opened.info
    return replace(
        answer,
        kernels=info.isa_name,
        kv_type=kv_type_name(info.plan.kv_k_bits, info.plan.kv_v_bits),
        n_vocab=info.n_vocab,
        load_seconds=answer.load_seconds or opened.load_seconds,
        tests=[*answer.tests, run],
        plan=asdict(info.plan),
        io=f"{info.io_name} x{max(info.io_depth, 1)}",
    )


def main(arguments: Sequence[str]) -> int:
    """Run the task of the command line; return 1 if it is incomplete."""
    answer = measure(parse_task(json.loads(arguments[0])))
    Path(os.environ[ANSWER_VARIABLE]).write_text(json.dumps(answer.as_json()), "utf-8")
    return 1 if answer.failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
