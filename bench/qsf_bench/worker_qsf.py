"""The measured process of QSF: opens a file, runs the tests of a task and writes their speeds.

Run as ``python -m qsf_bench.worker_qsf TASK ANSWER``: the JSON of a `tasks.Task`, and the file for
the JSON of a `tasks.Answer`. Memory is measured, so only modules that ``qsf run`` imports are
imported here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import time
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

from qsf.errors import QsfError, QsfMemoryError
from qsf.native import binding
from qsf.native.opening import does_not_fit, open_native
from qsf.options import ModelOptions
from qsf_bench.worker_llama import tokens_of

_NO_TOKENS = array("I")


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Run the tests in order; return the fields of a `tasks.Answer`. Raises QsfError."""
    isa_name, speeds = "", []
    for test in task["tests"]:
        n_ctx_tokens = test["depth"] + test["n_tokens"] + 2
        options = ModelOptions(
            ram_budget=task["budget_mb"] or None,
            threads=task["n_threads"],
            max_seq_len=n_ctx_tokens,
            kv_type=task["kv_type"],
            draft="off",
        )
        with closing(open_native(task["path"], options)) as model:
            info = model.info()
            isa_name = info.isa_name
            with closing(model.create_session()) as session:
                speeds.append(test["n_tokens"] / run_test(session, info.n_vocab, test))
    return {
        "version": f"QSF {binding.version()}, {isa_name}",
        "tok_per_s": speeds,
        "peak_bytes": binding.describe_machine().peak_bytes,
    }


def run_test(session: binding.NativeSession, n_vocab: int, test: dict[str, Any]) -> float:
    """Warm up and time one test; returns its seconds."""
    before = tokens_of(test["depth"], n_vocab)
    tokens = tokens_of(test["n_tokens"], n_vocab)
    hold(session, before)
    session.step(tokens[0])  # the first pass touches buffers and fills the page cache
    session.rewind(len(before))
    began_ns = time.perf_counter_ns()
    if test["kind"] == "pp":
        hold(session, before + tokens)
    else:
        sampler = binding.NativeSampler(
            temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=0
        )
        for token in tokens:
            session.step(token)
            sampler.choose(session, _NO_TOKENS)
    return (time.perf_counter_ns() - began_ns) / 1e9


def hold(session: binding.NativeSession, tokens: array[int]) -> None:
    """Evaluate the tokens that the session lacks."""
    n_done = 0
    while n_done < len(tokens):
        n_done = session.sync_chunk(tokens)


def main(task: str, answer: str) -> int:
    """Run the task; on failure print why and return 1."""
    try:
        Path(answer).write_text(json.dumps(measure(json.loads(task))), "utf-8")
    except QsfMemoryError as error:
        sys.stderr.write(
            str(error) if error.plan is None else does_not_fit(error.plan, is_command=True)
        )
        return 1
    except QsfError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
