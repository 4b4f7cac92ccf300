"""A llama-bench that the user names, as a measured process: its command line and its JSON.

llama-bench comes with llama.cpp and its forks. It has a warm-up of its own before each test; its
``tg`` chooses no tokens, which makes it slightly faster than the ``tg`` of our workers.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qsf_bench.run.tasks import Answer, Task, Test, TestRun, WorkerError

KV_TYPES = {"f16": "f16", "8bit": "q8_0", "4bit": "q4_0"}
MOST_WEIGHTS_APART = 0.01


def command_of(task: Task) -> list[str]:
    """Return the command that runs the tests of a task once, each after a warm-up."""
    command = [task.program, "-m", task.path, "-t", str(task.n_threads), "-r", "1", "-o", "json"]
    for option, kind in (("-p", "pp"), ("-n", "tg")):
        sizes = dict.fromkeys(str(test.n_tokens) for test in task.tests if test.kind == kind)
        command += [option, ",".join(sizes) or "0"]
    depths = dict.fromkeys(str(test.depth) for test in task.tests)
    if list(depths) != ["0"]:  # forks of before 2025 have no -d
        command += ["-d", ",".join(depths)]
    kv_type = KV_TYPES[task.kv_type or "f16"]
    if kv_type != "f16":  # V can be quantised only with flash attention
        command += ["-ctk", kv_type, "-ctv", kv_type, "-fa", "1"]
    return command


def answer_of(output: str, task: Task, *, n_weights: int) -> Answer:
    """Return the answer in llama-bench's output.

    Args:
        output: what it wrote to stdout.
        task: the task it was run for.
        n_weights: of the task's file.

    Raises:
        WorkerError: no such JSON, a test is missing, or it measured another model.
    """
    records = _records(output)
    first = records[0]
    measured_weights = _whole(first, "model_n_params")
    if abs(measured_weights / max(n_weights, 1) - 1) > MOST_WEIGHTS_APART:
        raise WorkerError(
            f"it measured a model of {measured_weights:,} weights "
            f"({Path(str(first.get('model_filename', '?'))).name}), but {Path(task.path).name} has "
            f"{n_weights:,}: the rows would not be the same work"
        )
    build = f"{first.get('build_commit', '')} ({first.get('build_number', '?')})"
    return Answer(
        version=f"{task.engine} {build}",
        kernels=str(first.get("backends") or "CPU"),
        kv_type=task.kv_type or "f16",
        n_vocab=0,
        load_seconds=0.0,
        peak_rss_bytes=0,
        tests=[_run_of(test, records) for test in task.tests],
    )


def _records(output: str) -> list[dict[str, Any]]:
    """Return the records; whatever is printed around the JSON is left out."""
    begin, end = output.find("["), output.rfind("]")
    try:
        records = json.loads(output[begin : end + 1])
    except ValueError as error:
        raise WorkerError(f"its output is not the JSON of llama-bench -o json: {error}") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise WorkerError("its output is not the JSON of llama-bench -o json: no records")
    return list(records)


def _run_of(test: Test, records: list[dict[str, Any]]) -> TestRun:
    n_tokens = (test.n_tokens, 0) if test.kind == "pp" else (0, test.n_tokens)
    for record in records:
        sizes = (_whole(record, "n_prompt"), _whole(record, "n_gen"))
        if sizes == n_tokens and record.get("n_depth", 0) == test.depth:
            wall_ns = _whole(record, "avg_ns")
            n_passes = -(-test.n_tokens // 512) if test.kind == "pp" else test.n_tokens
            return TestRun(test.name, test.depth, test.n_tokens, wall_ns, n_passes=n_passes)
    raise WorkerError(f"its output lacks the test {test.words}")


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WorkerError(f"its JSON has {key} {value!r}, expected a whole number")
    return value
