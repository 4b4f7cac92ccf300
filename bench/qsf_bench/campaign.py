"""A run of ``python -m qsf.bench``, from request to results: files, limits, rounds, rows."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from qsf.errors import QsfArgumentError, QsfError, QsfUnsupportedError
from qsf.native import roofline
from qsf.native.roofline import Limits
from qsf.shell.command import StoppedError, explain_folder
from qsf_bench.judge import machine, rows
from qsf_bench.judge.results import Failure, Results
from qsf_bench.models import cache, shapes
from qsf_bench.models.facts import FileFacts, baseline_type, check_same_work, read_facts
from qsf_bench.request import Request, Setting
from qsf_bench.run.baseline import HOW, Baseline, BaselineMissingError, find_baseline
from qsf_bench.run.launch import Outcome, run_task
from qsf_bench.run.memory_group import memory_group
from qsf_bench.run.rounds import TaskRuns, run_rounds
from qsf_bench.run.tasks import LLAMA, LLAMA_KV_TYPES, QSF, Task

_PROCESS_MB = 48  # Python, KV cache, buffers
# If a token of a streamed prompt reads more bytes than this, one token warms the prompt up instead
# of all.
_SLOW_BYTES = 512 << 20


class Watcher(Protocol):
    """Shows a user the progress of a run."""

    def begin(self, part: str) -> None:
        """A step begins; it may take seconds or minutes."""

    def update(self, fraction: float, text: str = "") -> None:
        """Show the done fraction of the step; ``text`` is the current work."""

    def warn(self, text: str) -> None:
        """A fact that the user must know."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a run.

    ``is_incomplete``: a requested figure is missing; the results name it. ``stopped``: the
    exception of a signal that ended the rounds early.
    """

    results: Results
    is_incomplete: bool
    stopped: StoppedError | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A file of QSF, and the baselines' file of the same work."""

    qsf: FileFacts
    gguf: FileFacts | None


def run(request: Request, watcher: Watcher) -> Outputs:
    """Do the requested measurements.

    Raises:
        QsfArgumentError: the request cannot be met, such as files of different work.
        QsfError: nothing can be measured.
        StoppedError: a signal arrived before the first figures; for later ones see
            `Outputs.stopped`.
    """
    return _Campaign(request, watcher).run()


class _Campaign:
    """The results of a run so far."""

    def __init__(self, request: Request, watcher: Watcher) -> None:
        self.request = request
        self.watcher = watcher
        self.llama: Baseline | None = None
        self.pairs: list[_Pair] = []
        self.facts: dict[str, FileFacts] = {}  # by path
        self.failures: list[Failure] = []
        self.notes: list[str] = []
        self.runs: list[TaskRuns] = []

    def run(self) -> Outputs:
        """See `run`."""
        self.check()
        self.llama = self.find_llama()
        self.pairs = _told_apart(self.make_pairs())
        files = [facts for pair in self.pairs for facts in (pair.qsf, pair.gguf) if facts]
        self.facts = {str(facts.path): facts for facts in files}
        baselines = [self.llama.words] if self.llama else []
        machine_facts = machine.describe(baselines)
        bounds = self.measure_limits()
        stopped = None
        try:
            self.run_rounds()
            bounds = self.measure_limits_again(bounds)
        except StoppedError as error:
            if not any(task_runs.has_figures for task_runs in self.runs):
                raise
            stopped = error
            is_after = all(len(r.outcomes) == self.request.options.rounds for r in self.runs)
            part = "what comes after the rounds was done" if is_after else "all rounds were done"
            self.notes.append(f"{error.text} before {part}")
        return self.outputs(machine_facts, bounds, stopped)

    def miss(self, engine: str, file: str, part: str, why: str, *, how: str = "") -> None:
        """Record that a requested part is missing; the rest of the run continues.

        ``how``, the way to get it, is shown to the user but not put into the results.
        """
        self.watcher.warn(f"{engine}, {part}: {how or why}")
        self.failures.append(Failure(engine, file, part, why))

    def outputs(
        self,
        machine_facts: dict[str, object],
        bounds: Limits,
        stopped: StoppedError | None,
    ) -> Outputs:
        """Make the results."""
        analysis = rows.analyse(
            self.runs,
            bounds,
            [(str(pair.qsf.path), str(pair.gguf.path)) for pair in self.pairs if pair.gguf],
        )
        outcomes = [outcome for task_runs in self.runs for outcome in task_runs.outcomes if outcome]
        notes = [*self.notes, *(o.note for o in outcomes if o.note), *analysis.notes]
        results = Results(
            machine=machine_facts,
            limits=bounds,
            rows=analysis.rows,
            ratios=analysis.ratios,
            failures=[
                replace(failure, why=_without_folders(failure.why))
                for failure in self.failures + analysis.failures
            ],
            notes=list(dict.fromkeys(map(_without_folders, notes))),
            settings=self.settings(),
        )
        return Outputs(results, bool(results.failures), stopped)

    def settings(self) -> dict[str, object]:
        """Return the settings of all rows."""
        request = self.request
        return {
            "rounds": request.options.rounds,
            "tests": [test.words for test in request.tests],
            "kv_type": request.options.kv_type or "each engine's default",
            "io": request.options.io or "auto",
            "caches": "dropped before runs that stream or are in a cgroup",
            "weights": "of files" if request.options.models else "random",
        }

    # ---- files ----

    def check(self) -> None:
        """Refuse impossible requests before minutes of making files and measuring."""
        request = self.request
        for path in request.options.models:
            self.check_context(path.name, _read_model(path).max_tokens)
        for path in request.options.baseline_model:
            _read_gguf(path)
        for name in request.shapes:
            self.check_context(name, shapes.find_shape(name).max_tokens)
        for cap_mb in dict.fromkeys(setting.cap_mb for setting in request.settings):
            if cap_mb is not None:
                with memory_group(cap_mb << 20):
                    pass

    def check_context(self, name: str, max_tokens: int) -> None:
        """Refuse tests that are longer than a model's context."""
        for test in self.request.tests:
            if test.ctx_tokens > max_tokens:
                after = f" after {test.depth}" if test.depth else ""
                raise QsfArgumentError(
                    f"{test.name}{after} needs a context of {test.ctx_tokens} tokens, {name} was "
                    f"made for {max_tokens}: --prompt, --gen and --depth ask for less"
                )

    def find_llama(self) -> Baseline | None:
        """Return llama-cpp-python if it is wanted and installed."""
        request = self.request
        if request.llama is False:
            return None
        if not any(setting.has_baseline for setting in request.settings):
            self.notes.append("llama.cpp is left out: it has no --ram-budget, --cgroup binds both")
            return None
        python = request.options.baseline_python
        try:
            llama = find_baseline(str(python) if python else None)
        except BaselineMissingError as error:
            if request.llama:
                self.miss(LLAMA, "", "all of it", error.why, how=str(error))
                return None
            why, advice = error.why, str(error)
        else:
            if request.options.kv_type is None or request.options.kv_type in LLAMA_KV_TYPES:
                return llama
            why = advice = f"it has no KV cache of {request.options.kv_type}"
        self.watcher.warn(f"llama.cpp is left out: {advice}")
        self.notes.append(f"llama.cpp is left out: {why}")
        return None

    @property
    def has_baseline(self) -> bool:
        """True if anything other than QSF is measured."""
        return self.llama is not None

    def make_pairs(self) -> list[_Pair]:
        """Return the files; makes missing ones."""
        request = self.request
        pairs = []
        gguf_paths: Sequence[Path | None] = request.options.baseline_model or [None] * len(
            request.options.models
        )
        for path, gguf_path in zip(request.options.models, gguf_paths, strict=True):
            facts = _read_model(path)
            pairs.append(_Pair(facts, self.gguf_of_model(facts, gguf_path)))
        for name in request.shapes:
            shape = shapes.find_shape(name)
            for type_name in request.types:
                facts = self.random_file(QSF, shape, type_name)
                pairs.append(_Pair(facts, self.random_gguf(facts, shape)))
        return pairs

    def gguf_of_model(self, facts: FileFacts, path: Path | None) -> FileFacts | None:
        """Return the baseline's file for a user's model."""
        if not self.has_baseline:
            return None
        if path is None:
            try:
                shape = shapes.shape_of_file(facts.path)
            except QsfUnsupportedError as error:
                self.miss(LLAMA, "", f"beside {facts.path.name}", str(error))
                return None
            return self.random_gguf(facts, shape)
        gguf = _read_gguf(path)
        check_same_work(facts, gguf)
        return gguf

    def random_gguf(self, facts: FileFacts, shape: shapes.Shape) -> FileFacts | None:
        """Return a GGUF file of the same work."""
        if not self.has_baseline:
            return None
        try:
            type_name = baseline_type(facts.type, shape, facts.bits_per_weight)
            gguf = self.random_file(LLAMA, shape, type_name)
            check_same_work(facts, gguf)
        except (QsfUnsupportedError, QsfArgumentError) as error:
            self.miss(LLAMA, "", f"beside {facts.path.name}", str(error))
            return None
        return gguf

    def random_file(self, engine: str, shape: shapes.Shape, type_name: str) -> FileFacts:
        """Return a file of random weights."""
        has_begun = False

        def progress(n_done: int, n_all: int) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                name = shapes.name_of(shape)
                self.watcher.begin(f"making random weights, {name}, {engine} {type_name}")
            self.watcher.update(n_done / n_all if n_all else 1.0, f"{n_all / 1e6:.0f} MB")

        folder = self.request.options.cache
        return read_facts(
            cache.find_or_make(engine, shape, type_name, folder=folder, progress=progress)
        )

    # ---- measuring ----

    def measure_limits(self, when: str = "") -> Limits:
        """Return the limits of the machine."""
        self.watcher.begin(f"measuring {when}the limits of the machine")
        thread_counts = sorted({setting.n_threads for setting in self.request.settings})

        def progress(text: str) -> None:
            self.watcher.update(0.0, text)

        memory, madds = roofline.measure_memory(thread_counts, progress)
        disk = roofline.measure_disk(self.pairs[0].qsf.path, progress)
        return Limits(memory_gb_per_s=memory, disk_gb_per_s=disk, gmadds_per_s=madds)

    def measure_limits_again(self, before: Limits) -> Limits:
        """Return the better figures of both measurements; a failure of the second is only noted."""
        try:
            return before.best_of(self.measure_limits("once more "))
        except QsfError as error:
            self.notes.append(f"the machine's limits were measured only before the rounds: {error}")
            return before

    def tasks(self) -> list[Task]:
        """Return the tasks of a round; a baseline file that two files share is run once."""
        return [
            self.task(setting, facts)
            for setting in self.request.settings
            for facts in self.facts.values()
            if facts.engine == QSF or setting.has_baseline
        ]

    def task(self, setting: Setting, facts: FileFacts) -> Task:
        """Return the task of one process."""
        is_qsf = facts.engine == QSF
        return Task(
            engine=facts.engine,
            path=str(facts.path),
            n_threads=setting.n_threads,
            tests=self.request.tests,
            budget_mb=setting.budget_mb if is_qsf else None,
            cap_mb=setting.cap_mb,
            kv_type=self.request.options.kv_type,
            io=self.request.options.io if is_qsf and self.request.options.io != "auto" else None,
            is_slow=_is_streamed(setting, facts) and facts.token_bytes > _SLOW_BYTES,
        )

    def run_rounds(self) -> None:
        """Run all tasks in rounds."""
        n_rounds = self.request.options.rounds
        self.runs = [TaskRuns(task, self.facts[task.path]) for task in self.tasks()]
        self.watcher.begin(f"measuring, rounds: {n_rounds}, runs in each: {len(self.runs)}")

        def progress(n_done: int, n_all: int, text: str) -> None:
            self.watcher.update(n_done / n_all, text)

        run_rounds(self.runs, n_rounds, self.run_task, progress)
        crashes = [
            why for r in self.runs if r.task.engine == LLAMA for why in r.failures if "crash" in why
        ]
        if crashes:
            self.watcher.warn(f"llama.cpp {crashes[0]}: {HOW}")

    def run_task(self, task: Task) -> Outcome:
        """Run one process."""
        facts = self.facts[task.path]
        setting = Setting(task.n_threads, task.budget_mb, task.cap_mb)
        # A group is not charged for pages in the cache that others have read, so these are dropped
        # first.
        is_bound = task.cap_mb is not None or _is_streamed(setting, facts)
        is_llama = task.engine == LLAMA and self.llama is not None
        return run_task(
            task,
            self.llama.python if is_llama and self.llama else sys.executable,
            is_cold=is_bound,
        )


def _is_streamed(setting: Setting, facts: FileFacts) -> bool:
    """Return whether memory is too small for a token's weights and a process."""
    room_mb = min(mb for mb in (setting.budget_mb, setting.cap_mb, 1 << 40) if mb is not None)
    return facts.token_bytes > (room_mb - _PROCESS_MB) << 20


def _without_folders(text: str) -> str:
    """Return the text with names of files instead of paths, for publication."""
    return re.sub(r"(?<![^\s'\"(=])/[^\s'\":;,()]*/(?=[^/\s])", "", text)


def _read_model(path: Path) -> FileFacts:
    if path.is_dir():
        raise QsfArgumentError(explain_folder(path))
    facts = read_facts(path)
    if facts.engine != QSF:
        raise QsfArgumentError(
            f"{path} is a GGUF file, not a .qsf file: convert it with qsf-convert, and give it as "
            "--baseline-model beside that"
        )
    return facts


def _read_gguf(path: Path) -> FileFacts:
    facts = read_facts(path)
    if facts.engine == QSF:
        raise QsfArgumentError(f"--baseline-model {path} is a .qsf file, not a GGUF file")
    return facts


def _told_apart(pairs: list[_Pair]) -> list[_Pair]:
    """Put the file's name into the type if files have the same shape and type."""
    files = {facts.path: facts for pair in pairs for facts in (pair.qsf, pair.gguf) if facts}
    counts = Counter((facts.engine, facts.shape_name, facts.type) for facts in files.values())

    def named(facts: FileFacts) -> FileFacts:
        if counts[facts.engine, facts.shape_name, facts.type] == 1:
            return facts
        return replace(facts, type=f"{facts.type} {facts.path.stem}")

    return [_Pair(named(pair.qsf), pair.gguf and named(pair.gguf)) for pair in pairs]
