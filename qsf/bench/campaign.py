"""A run of ``python -m qsf.bench``, from request to results: files, limits, rounds, rows."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from qsf.bench import analysis, limits, machine, model_cache, quality, shapes
from qsf.bench.file_facts import FileFacts, check_same_work, peer_type, read_facts
from qsf.bench.launch import Outcome, run_task
from qsf.bench.memory_group import memory_group
from qsf.bench.peer import Peer, PeerMissingError, find_peer, install_command
from qsf.bench.request import NO_PEER, PEER, Request, Setting
from qsf.bench.results import Failure, Limits, Quality, Results
from qsf.bench.rounds import TaskRuns, run_rounds
from qsf.bench.tasks import Engine, Task
from qsf.bench.worker_llama import KV_TYPES as PEER_KV_TYPES
from qsf.errors import QsfArgumentError, QsfError, QsfUnsupportedError
from qsf.shell.command import StoppedError, explain_folder

_CACHES = {
    True: "dropped before runs that stream or are in a cgroup",
    False: "left as they were",
}
_PROCESS_MB = 48  # Python, KV cache, buffers
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
    runs: list[TaskRuns] = field(default_factory=list)
    qualities: dict[str, Quality] = field(default_factory=dict)  # by the file's name
    trace: Trace | None = None

    def miss(self, engine: str, file: str, what: str, why: str, *, how: str = "") -> None:
        """Something that was asked for cannot be had; all else goes on.

        ``how`` it could be had is for the user alone, not for the results.
        """
        self.watcher.warn(f"{engine}, {what}: {how or why}")
        self.failures.append(Failure(engine, file, what, why))

    @property
    def has_all_rounds(self) -> bool:
        """Whether all that was to be timed was tried."""
        return bool(self.runs) and all(
            len(task_runs.outcomes) == self.request.n_rounds for task_runs in self.runs
        )


def run(request: Request, watcher: Watcher, *, wants_trace: bool = False) -> Found:
    """Do what is requested.

    Raises:
        QsfArgumentError: the request cannot be met, such as files that are not the same work.
        QsfError: there is nothing to measure, or nothing could be measured.
        StoppedError: by a signal before there were any figures; after that, see `Found.stopped`.
    """
    _check_request(request)
    one = _Run(request, watcher)
    one.peer = _find_peer(one)
    one.pairs = _pairs(one)
    known = machine.describe(f"llama.cpp {one.peer.version}" if one.peer else None)
    bounds = _measure_limits(one)
    stopped = None
    try:
        _run_rounds(one)
        bounds = _limits_again(one, bounds)
        _measure_quality(one)
        if wants_trace:
            _record_trace(one)
    except StoppedError as error:
        if not any(task_runs.has_figures for task_runs in one.runs):
            raise
        stopped = error
        rounds = f"all {request.n_rounds} rounds" if request.n_rounds > 1 else "all"
        what = "what comes after the rounds" if one.has_all_rounds else rounds
        one.notes.append(f"{error.text} before {what} {'were' if what == rounds else 'was'} done")
    return _found(one, known, bounds, stopped, wants_trace=wants_trace)


def _found(
    one: _Run,
    known: dict[str, Any],
    bounds: Limits,
    stopped: StoppedError | None,
    *,
    wants_trace: bool,
) -> Found:
    """Make results of what has been gathered."""
    facts_by_path = _facts_by_path(one)
    found = analysis.analyse(
        [_measured(task_runs, facts_by_path) for task_runs in one.runs],
        bounds,
        [(str(pair.qsf.path), str(pair.peer.path)) for pair in one.pairs if pair.peer],
    )
    told = [outcome.note for task_runs in one.runs for outcome in task_runs.outcomes if outcome]
    notes = [*one.notes, *(note for note in told if note), *found.notes]
    failures = [
        replace(failure, why=_without_folders(failure.why))
        for failure in one.failures + found.failures
    ]
    results = Results(
        machine=known,
        limits=bounds,
        rows=[replace(row, quality=one.qualities.get(row.file)) for row in found.rows],
        ratios=found.ratios,
        failures=failures,
        notes=list(dict.fromkeys(map(_without_folders, notes))),
        settings=_settings(one.request),
    )
    is_incomplete = bool(results.failures) or (wants_trace and one.trace is None)
    return Found(results, one.trace, is_incomplete, stopped)


def _without_folders(text: str) -> str:
    """Return the text with files by their names: results are published, folders are not."""
    return re.sub(r"(?<![^\s'\"(=])/[^\s'\":;,()]*/(?=[^/\s])", "", text)


# ---- files ----


def _check_request(request: Request) -> None:
    """Refuse what cannot be met before anything is made or measured, which may take minutes."""
    for path in request.models:
        _check_context(request, path.name, _read_model(path).max_tokens)
    for path in request.peer_models:
        _read_peer_model(path)
    for name in request.shapes:
        _check_context(request, name, shapes.find_shape(name).max_tokens)
    if request.text is not None:
        quality.check([*request.models, *request.peer_models], request.text, request.against)
    for cap_mb in dict.fromkeys(setting.cap_mb for setting in request.settings):
        if cap_mb is not None:
            with memory_group(cap_mb << 20):
                pass


def _read_model(path: Path) -> FileFacts:
    if path.is_dir():
        raise QsfArgumentError(explain_folder(path))
    facts = read_facts(path)
    if facts.engine != "qsf":
        raise QsfArgumentError(
            f"{path} is a GGUF file, not a .qsf file: convert it with qsf-convert, and give it as "
            "--peer-model beside that"
        )
    return facts


def _read_peer_model(path: Path) -> FileFacts:
    facts = read_facts(path)
    if facts.engine != PEER:
        raise QsfArgumentError(f"--peer-model {path} is a .qsf file, not a GGUF file")
    return facts


def _check_context(request: Request, name: str, max_tokens: int) -> None:
    for test in request.tests:
        if test.ctx_tokens > max_tokens:
            after = f" after {test.depth}" if test.depth else ""
            raise QsfArgumentError(
                f"{test.name}{after} needs a context of {test.ctx_tokens} tokens, {name} was made "
                f"for {max_tokens}: --prompt, --gen and --depth ask for less"
            )


def _find_peer(one: _Run) -> Peer | None:
    request = one.request
    if request.peer == NO_PEER:
        return None
    if not any(setting.has_peer for setting in request.settings):
        one.notes.append("llama.cpp is left out: it has no --ram-budget, --cgroup binds both")
        return None
    is_wanted = request.peer == PEER or request.peer_python or request.peer_models
    try:
        found = find_peer(str(request.peer_python) if request.peer_python else None)
    except PeerMissingError as error:
        if is_wanted:
            one.miss(PEER, "", "all of it", error.why, how=str(error))
            return None
        why, told = error.why, str(error)
    else:
        if request.kv_type is None or request.kv_type in PEER_KV_TYPES:
            return found
        why = told = f"it has no KV cache of {request.kv_type}"
    one.watcher.warn(f"llama.cpp is left out: {told}")
    one.notes.append(f"llama.cpp is left out: {why}")
    return None


def _pairs(one: _Run) -> list[_Pair]:
    request = one.request
    pairs = []
    peer_models: Sequence[Path | None] = request.peer_models or [None] * len(request.models)
    for path, peer_path in zip(request.models, peer_models, strict=True):
        facts = _read_model(path)
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
            one.miss(PEER, "", f"beside {facts.path.name}", str(error))
            return None
        return _random_peer(one, facts, shape)
    found = _read_peer_model(path)
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
        one.miss(PEER, "", f"beside {facts.path.name}", str(error))
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
    """Put the file's name into the type where files have the same shape and type."""
    both = {facts.path: facts for pair in pairs for facts in (pair.qsf, pair.peer) if facts}
    counts = Counter((facts.engine, facts.shape_name, facts.type) for facts in both.values())

    def named(facts: FileFacts) -> FileFacts:
        if counts[facts.engine, facts.shape_name, facts.type] == 1:
            return facts
        return replace(facts, type=f"{facts.type} {facts.path.stem}")

    return [_Pair(named(pair.qsf), pair.peer and named(pair.peer)) for pair in pairs]


# ---- measuring ----


def _measure_limits(one: _Run, when: str = "") -> Limits:
    watcher = one.watcher
    watcher.begin(f"measuring {when}what the machine can do")
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


def _limits_again(one: _Run, before: Limits) -> Limits:
    """Return the better of both; a failure, so late, costs no more than a note."""
    try:
        return _best(before, _measure_limits(one, "once more "))
    except QsfError as error:
        one.notes.append(f"the machine's limits were measured only before the rounds: {error}")
        return before


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
    """Return what is run in a round; a file that is the peer of two is run once."""
    return [
        _task(one.request, setting, facts)
        for setting in one.request.settings
        for facts in _facts_by_path(one).values()
        if facts.engine == "qsf" or setting.has_peer
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
    """Is there less memory than a token needs, of weights and about so much of all else?"""
    room_mb = min(mb for mb in (setting.budget_mb, setting.cap_mb, 1 << 40) if mb is not None)
    return facts.token_bytes > (room_mb - _PROCESS_MB) << 20


def _run_rounds(one: _Run) -> None:
    tasks, n_rounds = _tasks(one), one.request.n_rounds
    one.watcher.begin(f"measuring, {_times(n_rounds, 'round')} of {_times(len(tasks), 'run')}")

    def progress(n_done: int, n_all: int, text: str) -> None:
        one.watcher.update(n_done / n_all, text)

    run_rounds(tasks, n_rounds, _runner(one), runs=one.runs, progress=progress)
    crashes = [why for r in one.runs if r.task.engine == PEER for why in r.whys if "crash" in why]
    if crashes and one.peer is not None:
        how = install_command(one.peer.python)
        one.watcher.warn(f"llama.cpp {crashes[0]}. This builds it for this machine: {how}")


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _runner(one: _Run) -> Callable[[Task], Outcome]:
    facts_by_path = _facts_by_path(one)

    def run_one(task: Task) -> Outcome:
        setting = Setting(task.n_threads, task.budget_mb, task.cap_mb)
        # A group is not charged with pages that others have read: nothing may be there before.
        is_bound = task.cap_mb is not None or _is_streamed(setting, facts_by_path[task.path])
        return run_task(task, _python_of(one, task), is_cold=one.request.is_cold and is_bound)

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


def _measure_quality(one: _Run) -> None:
    """See how well the files predict the text, where one is given."""
    request = one.request
    if request.text is None:
        return
    files = list(request.models)
    files += dict.fromkeys(request.peer_models) if one.peer is not None else []
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
    except QsfError as error:
        one.miss("quality", "", request.text.name, str(error))
        return
    one.qualities = {path.name: known for path, known in found.items()}


def _record_trace(one: _Run) -> None:
    """Record a few tokens, generated if possible, of the first file in the last setting."""
    request = one.request
    facts = one.pairs[0].qsf
    test = request.tests[-1]
    if test.kind == "tg":
        test = replace(test, n_tokens=min(test.n_tokens, _TRACED_TOKENS))
    one.watcher.begin("tracing")
    task = _task(request, request.settings[-1], facts)
    try:
        outcome = _runner(one)(replace(task, tests=(test,), trace_events=_TRACED_EVENTS))
        why, answer = outcome.why, outcome.answer
    except QsfError as error:
        why, answer = str(error), None
    if why or answer is None:
        one.miss("qsf", facts.path.name, "trace", why)
        return
    one.trace = Trace(answer.trace, answer.trace_kinds, facts.n_layers, facts.path.name)


def _settings(request: Request) -> dict[str, object]:
    known: dict[str, object] = {
        "rounds": request.n_rounds,
        "tests": [test.words for test in request.tests],
        "kv_type": request.kv_type or "each engine's default",
        "io": request.io or "auto",
        "caches": _CACHES[request.is_cold],
    }
    if request.text is not None:
        known["text"] = request.text.name
    return known
