"""From the answers of processes to rows: spreads, shares of the limits, ratios, breakdowns.

Pure arithmetic over records. An unknown value is None. Facts that readers need to judge a figure,
and failed checks, become notes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from qsf.native.roofline import Limits, bound_of
from qsf_bench.judge import bounds
from qsf_bench.judge.results import Breakdown, Failure, Ratio, Row, Spread, spread_of
from qsf_bench.run.rounds import TaskRuns
from qsf_bench.run.tasks import QSF, Answer, Cap, Task, Test, TestRun

# A call takes microseconds between two clocks: a difference up to this per token is no
# disagreement.
_CALL_NS = 20_000
_PARTS_TOLERANCE = 0.03
_SAME_WEIGHTS = 0.01  # one format may store a small table that the other computes
_FROM_CACHE = (
    0.5  # if a smaller share of the streamed bytes comes from the disk, the page cache had them
)


@dataclass(frozen=True, slots=True)
class Analysis:
    """The parts of a result that come from the rounds."""

    rows: list[Row]
    ratios: list[Ratio]
    failures: list[Failure]
    notes: list[str]


@dataclass(slots=True)
class _Draft:
    """A row, with the numbers for comparisons."""

    row: Row
    task: Task
    n_vocab: int
    by_round: dict[int, float]  # tok/s
    notes: list[str] = field(default_factory=list)


def analyse(
    runs: Sequence[TaskRuns], limits: Limits, pairs: Iterable[tuple[str, str]] = ()
) -> Analysis:
    """Return rows in the order of ``runs`` and of their tests.

    ``pairs`` are files of QSF and of the baselines, as in `Task.path`, to be compared.
    """
    drafts = [
        draft
        for task_runs in runs
        for test in task_runs.task.tests
        if (draft := _draft(task_runs, test, limits)) is not None
    ]
    ratios, ratio_notes = _ratios(drafts, list(pairs))
    notes = [note for draft in drafts for note in draft.notes]
    ways = limits.disk_gb_per_s
    if ways and not any(way.startswith("direct") for way in ways):
        notes.append(
            "the disk was read through the page cache only, because the filesystem of the model "
            "has no direct reads: its limit may be that of memory"
        )
    failures = [
        Failure(task_runs.task.engine, task_runs.file, task_runs.task.setting, why, n_times)
        for task_runs in runs
        for why, n_times in task_runs.failures.items()
    ]
    rows = [draft.row for draft in drafts]
    return Analysis(rows, ratios, failures, list(dict.fromkeys(notes + ratio_notes)))


def _draft(measured: TaskRuns, test: Test, limits: Limits) -> _Draft | None:
    """Return the row of a test; None if no round has answered."""
    outcomes = {i: outcome for i, outcome in enumerate(measured.outcomes) if outcome is not None}
    runs = {
        i: (outcome.answer, run)
        for i, outcome in outcomes.items()
        if outcome.answer is not None
        for run in outcome.answer.tests
        if (run.name, run.depth) == (test.name, test.depth)
    }
    if not runs:
        return None
    by_round = {n: run.n_tokens / run.wall_ns * 1e9 for n, (_, run) in runs.items()}
    answers = [answer for answer, _ in runs.values()]
    tests = [run for _, run in runs.values()]
    first, task, facts = answers[0], measured.task, measured.facts
    row = Row(
        engine=task.engine,
        shape=facts.shape_name,
        type=facts.type,
        bits_per_weight=facts.bits_per_weight,
        file_bytes=facts.file_bytes,
        threads=task.n_threads,
        test=test.name,
        depth=test.depth,
        budget_mb=task.budget_mb,
        tok_per_s=spread_of(list(by_round.values())),
        peak_rss_bytes=max(outcome.peak_rss_bytes for outcome in outcomes.values()),
        fraction_of_limit=None,
        read_bytes_per_token=_median(
            run.disk_bytes / run.n_tokens for run in tests if run.disk_bytes is not None
        ),
        expert_hits=_median(
            run.n_expert_hits / run.n_expert_uses for run in tests if run.n_expert_uses
        ),
        kv_type=first.kv_type,
        io=first.io,
        file=measured.file,
        version=first.version,
        kernels=first.kernels,
        n_weights=facts.n_weights,
        cap=_worst([outcome.cap for outcome in outcomes.values() if outcome.cap is not None]),
        breakdown=_breakdown(tests),
        load_seconds=_median(answer.load_seconds for answer in answers if answer.load_seconds),
    )
    draft = _Draft(row, task, first.n_vocab, by_round)
    _check_parts(draft, tests)
    _bound(draft, measured, test, list(runs.values()), limits)
    return draft


def _median(values: Iterable[float]) -> float | None:
    rounds = list(values)
    return statistics.median(rounds) if rounds else None


def _worst(caps: Sequence[Cap]) -> Cap | None:
    if not caps:
        return None
    peaks = [cap.peak_bytes for cap in caps if cap.peak_bytes is not None]
    n_oom_kills = sum(cap.n_oom_kills for cap in caps)
    return Cap(caps[0].limit_mb, max(peaks, default=None), n_oom_kills)


def _breakdown(runs: Sequence[TestRun]) -> Breakdown | None:
    """Return milliseconds a token; a part missing in a round counts as 0."""
    if not any(run.parts for run in runs):
        return None

    def spreads(of_runs: Sequence[Mapping[str, int]]) -> dict[str, Spread]:
        names = dict.fromkeys(name for parts in of_runs for name in parts)
        return {
            name.removeprefix("phase_"): spread_of(
                [
                    parts.get(name, 0) / run.n_tokens / 1e6
                    for run, parts in zip(runs, of_runs, strict=True)
                ]
            )
            for name in names
        }

    return Breakdown(
        wall_ms=statistics.median(run.wall_ns / run.n_tokens / 1e6 for run in runs),
        parts=spreads([run.parts for run in runs]),
        beside=spreads([run.beside for run in runs]),
    )


def _check_parts(draft: _Draft, runs: Sequence[TestRun]) -> None:
    """Add a note if the parts of a round do not sum to its time."""
    off = []
    for run in runs:
        missing_ns = sum(run.parts.values()) - run.wall_ns
        allowed_ns = max(_PARTS_TOLERANCE * run.wall_ns, _CALL_NS * run.n_tokens)
        if run.parts and abs(missing_ns) > allowed_ns:
            off.append((missing_ns / run.wall_ns, run))
    if not off:
        return
    share, run = max(off, key=lambda entry: abs(entry[0]))
    draft.notes.append(
        f"{draft.row.label}: the parts sum to {sum(run.parts.values()) / 1e6:.1f} ms where "
        f"{run.wall_ns / 1e6:.1f} ms passed ({100 * share:+.1f} %); {len(off)} of {len(runs)} "
        f"rounds are off by more than {100 * _PARTS_TOLERANCE:.0f} %"
    )


def _bound(
    draft: _Draft,
    measured: TaskRuns,
    test: Test,
    runs: Sequence[tuple[Answer, TestRun]],
    limits: Limits,
) -> None:
    """Set the limit of the row."""
    row, facts = draft.row, measured.facts
    n_passes = max(1, round(statistics.median(run.n_passes for _, run in runs)))
    position_bytes = bounds.kv_bytes_per_position(facts, row.kv_type, row.engine)
    kv_token_bytes = None
    if position_bytes is not None:
        kv_token_bytes = position_bytes * bounds.mean_positions(test)
    plan = runs[-1][0].plan
    streamed = bounds.streamed_bytes_at_best(measured.task, facts, plan)
    of_experts = plan.get("expert_token_bytes", 0)
    first_bytes = 0.0
    if of_experts:  # routers choose the experts, so the bytes actually read count
        first_bytes = max(0.0, facts.token_bytes - of_experts - streamed)
        streamed = _median((run.read_bytes or 0) / max(run.n_passes, 1) for _, run in runs) or 0.0
    bound = bound_of(
        facts,
        limits,
        n_tokens=test.n_tokens,
        threads=row.threads,
        kv_token_bytes=kv_token_bytes,
        streamed_bytes=_without_cached(draft, test, streamed, n_passes),
        first_bytes=first_bytes,
        n_prompt_passes=n_passes if test.kind == "pp" else 0,
    )
    needed = facts.token_bytes + (kv_token_bytes or 0) if test.kind == "tg" else facts.token_bytes
    draft.row = row = replace(row, bytes_per_token=round(needed))
    if bound is None:
        return
    reached = row.tok_per_s.median
    draft.row = row = replace(
        row,
        fraction_of_limit=reached / bound.tok_per_s,
        limited_by=bound.limited_by,
        limit_tok_per_s=bound.tok_per_s,
        gb_per_s=None if bound.binding_bytes is None else reached * bound.binding_bytes / 1e9,
    )
    if row.above_limit:
        draft.notes.append(f"{row.label}: {row.above_limit}")


def _without_cached(draft: _Draft, test: Test, streamed: float, n_passes: int) -> float:
    """Return the streamed bytes; 0 if they came from the page cache, by the kernel's count."""
    per_token = draft.row.read_bytes_per_token
    if streamed <= 0 or per_token is None:
        return streamed
    n_passes = n_passes if test.kind == "pp" else test.n_tokens
    per_pass = per_token * test.n_tokens / n_passes
    if per_pass >= _FROM_CACHE * streamed:
        return streamed
    draft.notes.append(
        f"{draft.row.label}: of {streamed / 1e6:,.0f} MB streamed for each pass "
        f"{per_pass / 1e6:,.0f} came from the disk, the page cache had the rest; so the limit is "
        "that of memory"
    )
    return 0.0


# ---- two engines ----


def _ratios(
    drafts: Sequence[_Draft], pairs: Sequence[tuple[str, str]]
) -> tuple[list[Ratio], list[str]]:
    """Return the ratios of QSF's rows to those of the baselines, and why some are not compared."""
    ratios: list[Ratio] = []
    notes: list[str] = []
    for qsf_file, gguf_file in pairs:
        mine = [(i, d) for i, d in enumerate(drafts)
                if d.task.engine == QSF and d.task.path == qsf_file]  # fmt: skip
        theirs = [(i, d) for i, d in enumerate(drafts)
                  if d.task.engine != QSF and d.task.path == gguf_file]  # fmt: skip
        for i, draft in mine:
            for k, baseline in theirs:
                if _setting(draft) != _setting(baseline):
                    continue
                if why := _difference(draft, baseline):
                    notes.append(
                        f"{draft.row.label} is not compared with {baseline.row.type}: {why}"
                    )
                elif (ratio := _ratio(i, draft, k, baseline)) is not None:
                    ratios.append(ratio)
    return ratios, notes


def _setting(draft: _Draft) -> tuple[object, ...]:
    return (draft.row.test, draft.row.depth, draft.row.threads, draft.task.cap_mb)


def _difference(mine: _Draft, other: _Draft) -> str:
    """Return why two rows are not the same work; "": they are."""
    if abs(mine.row.n_weights / max(other.row.n_weights, 1) - 1) > _SAME_WEIGHTS:
        return f"{mine.row.n_weights:,} weights against {other.row.n_weights:,}"
    if mine.n_vocab and other.n_vocab and mine.n_vocab != other.n_vocab:
        return f"{mine.n_vocab:,} tokens in the vocabulary against {other.n_vocab:,}"
    if mine.task.budget_mb is not None and mine.task.cap_mb is None:
        return f"a budget of {mine.task.budget_mb} MB limits QSF alone where there is no cgroup"
    return ""


def _ratio(i: int, mine: _Draft, k: int, other: _Draft) -> Ratio | None:
    """Return the ratio round by round, because a disturbance of a round slows both."""
    rounds = [number for number in mine.by_round if number in other.by_round]
    if not rounds:
        return None
    values = spread_of([mine.by_round[number] / other.by_round[number] for number in rounds])
    return Ratio(**asdict(values), row=i, vs=k)
