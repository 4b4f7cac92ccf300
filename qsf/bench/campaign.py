"""A run of ``python -m qsf.bench``, from request to results: files, limits, rounds, rows."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qsf.bench import analysis, limits, machine, model_cache, quality, shapes
from qsf.bench.file_facts import FileFacts, check_same_work, peer_type, read_facts
from qsf.bench.launch import Outcome, run_task
from qsf.bench.peer import Peer, PeerMissingError, find_peer
from qsf.bench.request import NO_PEER, PEER, Request, Setting
from qsf.bench.results import Failure, Limits, Results, Row
from qsf.bench.rounds import TaskRuns, run_rounds
from qsf.bench.tasks import Engine, Task
from qsf.command import StoppedError
from qsf.errors import QsfArgumentError, QsfError, QsfUnsupportedError

_TRACED_TOKENS = 8
_TRACED_EVENTS = 1 << 18
# From so many bytes a token on, a streamed prompt is warmed up by one token instead of all.
_SLOW_BYTES = 512 << 20


class Watcher(Protocol):
    """Is told what is being done."""

    def begin(self, what: str) -> None:
        """Something begins that may take seconds or minutes."""

    def update(self, fraction: float, text: str = "") -> None:
        """So much of it is done; ``text`` is what is done now."""

    def say(self, text: str) -> None:
        """Something that a user may want to know."""

    def warn(self, text: str) -> None:
        """Something that a user must know."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a process recorded; see `trace.chrome_trace`."""

    rows: list[list[int]]
    kinds: list[str]
    n_layers: int
    name: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found.

    ``is_incomplete``: something that was asked for is missing, and the results say what.
    ``stopped``: the signal's exception if one ended the rounds before their time.
    """

    results: Results
    trace: Trace | None
    is_incomplete: bool
    stopped: StoppedError | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A file of QSF, and that of the peer which means the same work."""

    qsf: FileFacts
    peer: FileFacts | None


@dataclass(slots=True)
class _Run:
    """What a run has gathered so far."""

    request: Request
    watcher: Watcher
    peer: Peer | None = None
    pairs: list[_Pair] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def miss(self, engine: str, file: str, what: str, why: str) -> None:
        """Something that was asked for cannot be had; all else goes on."""
        self.watcher.warn(f"{engine}: {why}")
        self.failures.append(Failure(engine, file, what, why))


def run(request: Request, watcher: Watcher, *, wants_trace: bool = False) -> Found:
    """Do what is requested.

    Raises:
        QsfArgumentError: the request cannot be met, such as files that are not the same work.
        QsfError: there is nothing to measure, or nothing could be measured.
    """
    one = _Run(request, watcher)
    one.peer = _find_peer(one)
    one.pairs = _pairs(one)
    _check_contexts(request, one.pairs)
    known = machine.describe(f"llama.cpp {one.peer.version}" if one.peer else None)
    bounds = _measure_limits(one)
    runs: list[TaskRuns] = []
    stopped = None
    try:
        _run_rounds(one, _tasks(one), runs)
    except StoppedError as error:
        if not any(task_runs.has_figures for task_runs in runs):
            raise
        stopped = error
        one.notes.append(f"{error.text} before all {request.n_rounds} rounds were done")
    if stopped is None:
        bounds = _best(bounds, _measure_limits(one))
    found = analysis.analyse(
        [_measured(task_runs, _facts_by_path(one)) for task_runs in runs],
        bounds,
        [(str(pair.qsf.path), str(pair.peer.path)) for pair in one.pairs if pair.peer],
    )
    rows = found.rows
    trace = None
    if stopped is None:
        rows = _with_quality(one, rows)
        trace = _trace(one) if wants_trace else None
    results = Results(
        machine=known,
        limits=bounds,
        rows=rows,
        ratios=found.ratios,
        failures=one.failures + found.failures,
        notes=one.notes + found.notes,
        settings=_settings(request),
    )
    is_incomplete = bool(results.failures) or (wants_trace and trace is None)
    return Found(results, trace, is_incomplete, stopped)


# ---- files ----


def _find_peer(one: _Run) -> Peer | None:
    request = one.request
    if request.peer == NO_PEER:
        return None
    try:
        return find_peer(str(request.peer_python) if request.peer_python else None)
    except PeerMissingError as error:
        if request.peer == PEER or request.peer_python or request.peer_models:
            one.miss(PEER, "", "all tests", f"is left out: {error}")
        else:
            one.watcher.warn(f"llama.cpp is left out: {error}")
            one.notes.append(f"llama.cpp is left out: {error}")
        return None


def _pairs(one: _Run) -> list[_Pair]:
    request = one.request
    pairs = []
    peer_models: Sequence[Path | None] = request.peer_models or [None] * len(request.models)
    for path, peer_path in zip(request.models, peer_models, strict=True):
        facts = read_facts(path)
        if facts.engine != "qsf":
            raise QsfArgumentError(f"{path} is no .qsf file: give it as --peer-model beside one")
        pairs.append(_Pair(facts, _peer_of_model(one, facts, peer_path)))
    for name in request.shapes:
        shape = shapes.find_shape(name)
        for type_name in request.types:
            facts = _random_file(one, "qsf", shape, type_name)
            pairs.append(_Pair(facts, _random_peer(one, facts, shape)))
    return _told_apart(pairs)


def _peer_of_model(one: _Run, facts: FileFacts, path: Path | None) -> FileFacts | None:
    if one.peer is None:
        return None
    if path is None:
        try:
            shape = shapes.shape_of_file(facts.path)
        except QsfUnsupportedError as error:
            one.miss(PEER, "", facts.path.name, f"has no random weights of its shape: {error}")
            return None
        return _random_peer(one, facts, shape)
    found = read_facts(path)
    if found.engine != PEER:
        raise QsfArgumentError(f"--peer-model {path} is no GGUF file")
    check_same_work(facts, found)
    return found


def _random_peer(one: _Run, facts: FileFacts, shape: shapes.Shape) -> FileFacts | None:
    """Return a file of the peer that means the same work, made if need be."""
    if one.peer is None:
        return None
    type_name = peer_type(facts.type, shape, facts.bits_per_weight)
    try:
        found = _random_file(one, "llama.cpp", shape, type_name)
        check_same_work(facts, found)
    except (QsfUnsupportedError, QsfArgumentError) as error:
        one.miss(PEER, "", facts.path.name, f"is left out: {error}")
        return None
    return found


def _random_file(one: _Run, engine: Engine, shape: shapes.Shape, type_name: str) -> FileFacts:
    watcher = one.watcher
    has_begun = False

    def progress(n_done: int, n_all: int) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            watcher.begin(f"making random weights, {shapes.name_of(shape)}, {engine} {type_name}")
        watcher.update(n_done / n_all if n_all else 1.0, f"{n_all / 1e6:.0f} MB")

    path = model_cache.find_or_make(
        engine, shape, type_name, folder=one.request.cache, progress=progress
    )
    return read_facts(path)


def _told_apart(pairs: list[_Pair]) -> list[_Pair]:
    """Put the file's name into the type where two files have the same shape and type."""
    counts = Counter((pair.qsf.shape_name, pair.qsf.type) for pair in pairs)

    def named(facts: FileFacts) -> FileFacts:
        return replace(facts, type=f"{facts.type} {facts.path.stem}")

    return [
        pair
        if counts[pair.qsf.shape_name, pair.qsf.type] == 1
        else _Pair(named(pair.qsf), pair.peer and named(pair.peer))
        for pair in pairs
    ]


def _check_contexts(request: Request, pairs: Sequence[_Pair]) -> None:
    """Refuse before the work tests that are longer than a model's context."""
    for pair in pairs:
        for test in request.tests:
            if test.ctx_tokens > pair.qsf.max_tokens:
                raise QsfArgumentError(
                    f"{test.name} after {test.depth} tokens needs a context of {test.ctx_tokens}: "
                    f"{pair.qsf.path.name} was made for {pair.qsf.max_tokens}"
                )


# ---- measuring ----


def _measure_limits(one: _Run) -> Limits:
    watcher = one.watcher
    watcher.begin("measuring what the machine can do")
    thread_counts = sorted({setting.n_threads for setting in one.request.settings})
    n_steps = len(thread_counts) + 6  # about, of the disk
    n_done = 0

    def progress(text: str) -> None:
        nonlocal n_done
        watcher.update(min(1.0, n_done / n_steps), text)
        n_done += 1

    memory, madds = limits.measure_memory(thread_counts, progress)
    disk = limits.measure_disk(one.pairs[0].qsf.path, progress)
    return Limits(memory_gb_per_s=memory, disk_gb_per_s=disk, gmadds_per_s=madds)


def _best(before: Limits, after: Limits) -> Limits:
    """Return the larger of each: others may have been busy during one of the two."""

    def larger(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
        return {name: max(known.get(name, 0.0) for known in (a, b)) for name in {**a, **b}}

    return Limits(
        memory_gb_per_s=larger(before.memory_gb_per_s, after.memory_gb_per_s),
        disk_gb_per_s=larger(before.disk_gb_per_s, after.disk_gb_per_s),
        gmadds_per_s=larger(before.gmadds_per_s, after.gmadds_per_s),
    )


def _tasks(one: _Run) -> list[Task]:
    return [
        _task(one.request, setting, facts)
        for setting in one.request.settings
        for pair in one.pairs
        for facts in (pair.qsf, pair.peer)
        if facts is not None and (facts.engine == "qsf" or setting.has_peer)
    ]


def _task(request: Request, setting: Setting, facts: FileFacts) -> Task:
    is_qsf = facts.engine == "qsf"
    return Task(
        engine=facts.engine,
        path=str(facts.path),
        n_threads=setting.n_threads,
        tests=request.tests,
        budget_mb=setting.budget_mb if is_qsf else None,
        cap_mb=setting.cap_mb,
        kv_type=request.kv_type,
        io=request.io if is_qsf else None,
        is_slow=_is_streamed(setting, facts) and facts.token_bytes > _SLOW_BYTES,
    )


def _is_streamed(setting: Setting, facts: FileFacts) -> bool:
    """Is there less memory than weights that a token needs?"""
    room_mb = min(mb for mb in (setting.budget_mb, setting.cap_mb, 1 << 40) if mb is not None)
    return facts.token_bytes > room_mb << 20


def _run_rounds(one: _Run, tasks: Sequence[Task], runs: list[TaskRuns]) -> None:
    watcher = one.watcher
    watcher.begin(f"measuring, {one.request.n_rounds} rounds of {len(tasks)} runs")

    def progress(n_done: int, n_all: int, text: str) -> None:
        watcher.update(n_done / n_all, text)

    run_rounds(tasks, one.request.n_rounds, _runner(one), runs=runs, progress=progress)
    notes = [
        outcome.note for task_runs in runs for outcome in task_runs.outcomes if outcome is not None
    ]
    one.notes += dict.fromkeys(note for note in notes if note)


def _runner(one: _Run) -> Callable[[Task], Outcome]:
    facts_by_path = _facts_by_path(one)

    def run_one(task: Task) -> Outcome:
        setting = Setting(task.n_threads, task.budget_mb, task.cap_mb)
        is_streamed = _is_streamed(setting, facts_by_path[task.path])
        return run_task(task, _python_of(one, task), is_cold=one.request.is_cold and is_streamed)

    return run_one


def _python_of(one: _Run, task: Task) -> str:
    return one.peer.python if task.engine == PEER and one.peer else sys.executable


def _facts_by_path(one: _Run) -> dict[str, FileFacts]:
    both = [facts for pair in one.pairs for facts in (pair.qsf, pair.peer) if facts is not None]
    return {str(facts.path): facts for facts in both}


def _measured(runs: TaskRuns, facts_by_path: dict[str, FileFacts]) -> analysis.Measured:
    outcomes = [outcome for outcome in runs.outcomes if outcome is not None]
    return analysis.Measured(
        task=runs.task,
        facts=facts_by_path[runs.task.path],
        answers=[None if outcome is None else outcome.answer for outcome in runs.outcomes],
        peak_rss_bytes=max((outcome.peak_rss_bytes for outcome in outcomes), default=0),
        caps=[outcome.cap for outcome in outcomes if outcome.cap is not None],
        reasons=[*runs.whys.elements(), *filter(None, [runs.skipped_why])],
    )


# ---- beside the rounds ----


def _with_quality(one: _Run, rows: list[Row]) -> list[Row]:
    """Add how well the files predict the text, where one is given."""
    request = one.request
    if request.text is None:
        return rows
    files = list(request.models)
    files += list(request.peer_models) if one.peer is not None else []
    one.watcher.begin("measuring quality")

    def progress(name: str, n_done: float, n_all: float) -> None:
        one.watcher.update(n_done / n_all if n_all else 1.0, name)

    try:
        found = quality.measure(
            files,
            request.text,
            against=request.against,
            peer_python=one.peer.python if one.peer is not None else "",
            n_threads=max(setting.n_threads for setting in request.settings),
            progress=progress,
        )
    except QsfArgumentError:
        raise
    except QsfError as error:
        one.miss("quality", "", str(request.text.name), str(error))
        return rows
    by_name = {path.name: known for path, known in found.items()}
    return [replace(row, quality=by_name.get(row.file)) for row in rows]


def _trace(one: _Run) -> Trace | None:
    """Record a few tokens, generated if possible, of the first file in the last setting."""
    request = one.request
    facts = one.pairs[0].qsf
    test = request.tests[-1]
    if test.kind == "tg":
        test = replace(test, n_tokens=min(test.n_tokens, _TRACED_TOKENS))
    one.watcher.begin("tracing")
    task = _task(request, request.settings[-1], facts)
    outcome = _runner(one)(replace(task, tests=(test,), trace_events=_TRACED_EVENTS))
    if outcome.why or outcome.answer is None:
        one.miss("qsf", facts.path.name, "trace", outcome.why)
        return None
    answer = outcome.answer
    return Trace(answer.trace, answer.trace_kinds, facts.n_layers, facts.path.name)


def _settings(request: Request) -> dict[str, object]:
    known: dict[str, object] = {
        "rounds": request.n_rounds,
        "tests": [f"{t.name} @ {t.depth}" if t.depth else t.name for t in request.tests],
        "kv_type": request.kv_type or "each engine's default",
        "io": request.io or "auto",
        "caches": "dropped before streamed runs" if request.is_cold else "left as they were",
    }
    if request.text is not None:
        known["text"] = request.text.name
    return known
