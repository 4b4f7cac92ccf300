"""From what processes answered to rows: spreads, fractions of the limits, ratios, breakdowns.

Pure arithmetic over records. What cannot be known is None; what a reader must know to judge a
figure, and every check that failed, becomes a note.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Protocol

from qsf.bench.results import (
    PARTS_TOLERANCE,
    Breakdown,
    Cap,
    Failure,
    Limits,
    Ratio,
    Row,
    Spread,
    spread_of,
)
from qsf.bench.tasks import Answer, Task, Test, TestRun
from qsf.options import parse_kv_type

_MORE_THAN_POSSIBLE = {
    "disk": "the page cache answered, or the disk became faster",
    "memory": "the weights lie in the processor's caches, or memory became faster",
    "arithmetic": "the processor became faster",
}
AGREEMENT = 0.03  # of our clock with the engine's own
# A call takes microseconds from one clock to the other; no more than that a token is not worth a
# word, though it is several per cent where a token takes no more than a hundred of them.
_CALL_NS = 20_000
_SAME_WEIGHTS = 0.01  # one format may store a small table that the other computes
_FROM_CACHE = 0.5  # less of what is streamed comes from the disk: the page cache answered
# Bits a value with its share of scales and least values.
_LLAMA_KV_BITS = {"f16": 16.0, "8bit": 8.5, "4bit": 4.5}  # as `worker_llama` names them
_QSF_KV_BITS = {2: 2.5, 4: 4.5, 8: 8.25, 16: 16.0, 32: 32.0}
_QSF_KV_BLOCK = 64  # a head takes a whole number of these


class Facts(Protocol):
    """What a token costs by the file alone; `file_facts.FileFacts` is one.

    ``token_bytes`` are those of weights that a pass reads, head included, embedding table not;
    ``token_madds`` the multiply-adds of layers, ``head_madds`` those of the head.
    """

    @property
    def n_weights(self) -> int: ...  # noqa: D102
    @property
    def file_bytes(self) -> int: ...  # noqa: D102
    @property
    def bits_per_weight(self) -> float: ...  # noqa: D102
    @property
    def token_bytes(self) -> int: ...  # noqa: D102
    @property
    def token_madds(self) -> int: ...  # noqa: D102
    @property
    def head_madds(self) -> int: ...  # noqa: D102
    @property
    def n_layers(self) -> int: ...  # noqa: D102
    @property
    def n_heads(self) -> int: ...  # noqa: D102
    @property
    def n_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def shape_name(self) -> str: ...  # noqa: D102
    @property
    def type(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds of one task. ``answers[i]`` is that of round i, None where there was none."""

    task: Task
    facts: Facts
    answers: Sequence[Answer | None]
    peak_rss_bytes: int  # the most of all rounds, by the kernel's count
    caps: Sequence[Cap] = ()  # of the rounds; empty: no group
    reasons: Sequence[str] = ()  # why processes failed, one of each; empty: see the answers

    @property
    def file(self) -> str:
        """The file's name, without folder."""
        return PurePath(self.task.path).name


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a result is made of."""

    rows: list[Row]
    ratios: list[Ratio]
    failures: list[Failure]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a test can reach at most. ``binding_bytes`` of a token come from where it is bound."""

    limited_by: str
    tok_per_s: float
    binding_bytes: float | None


@dataclass(slots=True)
class _Draft:
    """A row, and what is needed to hold it against another."""

    row: Row
    task: Task
    n_vocab: int
    by_round: dict[int, float]  # tok/s
    notes: list[str] = field(default_factory=list)


def analyse(
    measured: Sequence[Measured], limits: Limits, pairs: Iterable[tuple[str, str]] = ()
) -> Analysis:
    """Return rows in the order of ``measured`` and of its tests.

    ``pairs`` are files of QSF and of the peer, as in `Task.path`, that are held against each other.
    """
    drafts = [
        draft
        for one in measured
        for test in one.task.tests
        if (draft := _draft(one, test, limits)) is not None
    ]
    ratios, ratio_notes = _ratios(drafts, list(pairs))
    rows = [draft.row for draft in drafts]
    notes = [note for draft in drafts for note in draft.notes] + _notes_on_limits(limits, rows)
    return Analysis(
        rows=rows,
        ratios=ratios,
        failures=[failure for one in measured for failure in _failures(one)],
        notes=list(dict.fromkeys(notes + ratio_notes)),
    )


# ---- what the rounds say ----


def _runs(one: Measured, test: Test) -> tuple[dict[int, tuple[Answer, TestRun]], int]:
    """Return the runs of a test by round, and how many did other work than was asked for."""
    runs: dict[int, tuple[Answer, TestRun]] = {}
    n_other = 0
    for number, answer in enumerate(one.answers):
        for run in answer.tests if answer is not None else ():
            if (run.name, run.depth) != (test.name, test.depth):
                continue
            if run.n_tokens != test.n_tokens or run.wall_ns <= 0:
                n_other += 1
            elif answer is not None:
                runs[number] = (answer, run)
    return runs, n_other


def _draft(one: Measured, test: Test, limits: Limits) -> _Draft | None:
    """Return the row of a test; None where no round has answered."""
    runs, n_other = _runs(one, test)
    if not runs:
        return None
    by_round = {n: run.n_tokens / run.wall_ns * 1e9 for n, (_, run) in runs.items()}
    answers = [answer for answer, _ in runs.values()]
    tests = [run for _, run in runs.values()]
    first, task, facts = answers[0], one.task, one.facts
    engine = [run.n_tokens / run.engine_ns * 1e9 for run in tests if run.engine_ns]
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
        peak_rss_bytes=one.peak_rss_bytes,
        fraction_of_limit=None,
        read_bytes_per_token=_median(
            run.disk_bytes / run.n_tokens for run in tests if run.disk_bytes is not None
        ),
        kv_type=first.kv_type,
        io=first.io,
        file=one.file,
        version=first.version,
        kernels=first.kernels,
        n_weights=facts.n_weights,
        cap=_worst(one.caps),
        breakdown=_breakdown(tests),
        engine_tok_per_s=_median(engine),
        load_seconds=_median(answer.load_seconds for answer in answers),
        madds_per_token=madds_per_token(test, facts),
    )
    draft = _Draft(row, task, first.n_vocab, by_round)
    _check_other_work(draft, n_other)
    _check_parts(draft, tests)
    _check_agreement(draft, engine)
    _bound(draft, one, test, list(runs.values()), limits)
    return draft


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _worst(caps: Sequence[Cap]) -> Cap | None:
    if not caps:
        return None
    peaks = [cap.peak_bytes for cap in caps if cap.peak_bytes is not None]
    n_oom_kills = sum(cap.n_oom_kills for cap in caps)
    return Cap(caps[0].limit_mb, max(peaks, default=None), n_oom_kills)


def _breakdown(runs: Sequence[TestRun]) -> Breakdown | None:
    """Return milliseconds a token; a part that a round does not name took no time in it."""
    if not any(run.parts for run in runs):
        return None

    def spreads(of_runs: Sequence[Mapping[str, int]]) -> dict[str, Spread]:
        names = dict.fromkeys(name for parts in of_runs for name in parts)
        return {
            name: spread_of(
                [
                    parts.get(name, 0) / run.n_tokens / 1e6
                    for run, parts in zip(runs, of_runs, strict=True)
                ]
            )
            for name in names
        }

    return Breakdown(
        wall_ms=statistics.median(run.wall_ns / run.n_tokens / 1e6 for run in runs),
        parts=spreads([_without_prefix(run.parts) for run in runs]),
        beside=spreads([run.beside for run in runs]),
    )


def _without_prefix(parts: Mapping[str, int]) -> dict[str, int]:
    """Return the parts by the names that people know; a process says which are the engine's."""
    return {name.removeprefix("phase_"): ns for name, ns in parts.items()}


def _failures(one: Measured) -> list[Failure]:
    """Return what went wrong, the same thing once."""
    answers = [answer for answer in one.answers if answer is not None]
    said = [reason for reason in one.reasons or [answer.failure for answer in answers] if reason]
    task = one.task
    what = f"{task.n_threads} thread{'' if task.n_threads == 1 else 's'}"
    what += f", budget {task.budget_mb} MB" if task.budget_mb is not None else ""
    what += f", cgroup {task.cap_mb} MB" if task.cap_mb is not None else ""
    return [
        Failure(task.engine, one.file, what, why, n_times) for why, n_times in Counter(said).items()
    ]


# ---- what is checked ----


def _check_other_work(draft: _Draft, n_other: int) -> None:
    if n_other:
        draft.notes.append(
            f"{draft.row.label}: {n_other} of its rounds left out, because they did other work "
            "than was asked for"
        )


def _check_parts(draft: _Draft, runs: Sequence[TestRun]) -> None:
    """Say so where the parts of a round do not sum to its time."""
    off = []
    for run in runs:
        missing_ns = sum(run.parts.values()) - run.wall_ns
        is_much = abs(missing_ns) > max(PARTS_TOLERANCE * run.wall_ns, _CALL_NS * run.n_tokens)
        if run.parts and is_much:
            off.append((missing_ns / run.wall_ns, run))
    if not off:
        return
    part, run = max(off, key=lambda found: abs(found[0]))
    draft.notes.append(
        f"{draft.row.label}: the parts sum to {sum(run.parts.values()) / 1e6:.1f} ms where "
        f"{run.wall_ns / 1e6:.1f} ms passed ({100 * part:+.1f} %); {len(off)} of {len(runs)} "
        f"rounds are off by more than {100 * PARTS_TOLERANCE:.0f} %"
    )


def _check_agreement(draft: _Draft, engine: Sequence[float]) -> None:
    """Say so where the engine counts another speed than our clock."""
    own = draft.row.engine_tok_per_s
    if own is None or not engine:
        return
    ours = draft.row.tok_per_s.median
    if abs(own / ours - 1) > AGREEMENT and abs(1 / own - 1 / ours) > _CALL_NS / 1e9:
        draft.notes.append(
            f"{draft.row.label}: {ours:.2f} tok/s by the clock, {own:.2f} by the engine's own "
            f"count ({100 * (own / ours - 1):+.1f} %)"
        )


def _notes_on_limits(limits: Limits, rows: Sequence[Row]) -> list[str]:
    notes = []
    ways = limits.disk_gb_per_s
    if ways and not any(way.startswith("direct") for way in ways):
        notes.append(
            "the disk was read through the page cache only, because the filesystem of the model "
            "has no direct reads: its limit may be that of memory"
        )
    for limited_by, why in _MORE_THAN_POSSIBLE.items():
        above = [
            f"{row.label} {100 * row.fraction_of_limit:.0f} %"
            for row in rows
            if row.limited_by == limited_by
            and row.fraction_of_limit is not None
            and row.fraction_of_limit > 1
        ]
        if above:
            notes.append(
                f"more than the {limited_by} limit as it was measured, so {why}: "
                + "; ".join(above)
            )
    return notes


# ---- what is possible ----


def kv_bytes_per_position(facts: Facts, kv_type: str, engine: str) -> float | None:
    """Return bytes of keys and values of one position in all layers; None: not a known type."""
    if engine == "qsf":
        try:
            key_bits, value_bits = parse_kv_type(kv_type)
        except ValueError:
            return None
        bits = _QSF_KV_BITS[key_bits] + _QSF_KV_BITS[value_bits]
        n_values = -(-facts.head_dim // _QSF_KV_BLOCK) * _QSF_KV_BLOCK
    else:
        if kv_type not in _LLAMA_KV_BITS:
            return None
        bits, n_values = 2 * _LLAMA_KV_BITS[kv_type], facts.head_dim
    return facts.n_layers * facts.n_kv_heads * n_values * bits / 8


def madds_per_token(test: Test, facts: Facts) -> float:
    """Return multiply-adds of a token in the mean: layers, head where it is wanted, attention."""
    of_head = facts.head_madds / (test.n_tokens if test.kind == "pp" else 1)
    # For each position before it, and itself, a token multiplies with a key and a value.
    of_position = 2 * facts.n_layers * facts.n_heads * facts.head_dim
    return facts.token_madds + of_head + of_position * _mean_positions(test)


def _mean_positions(test: Test) -> float:
    """Return how many positions a token of the test looks at in the mean, its own included."""
    return test.depth + (test.n_tokens + 1) / 2


def streamed_bytes_at_best(task: Task, facts: Facts, plan: Mapping[str, object]) -> float:
    """Return bytes of weights that cannot stay in memory from one pass to the next.

    QSF says it in its plan. Of another engine only the group's limit is known: at best, all of
    it holds weights.
    """
    if task.engine == "qsf":
        known = plan.get("streamed_bytes", 0)
        return float(known) if isinstance(known, int | float) else 0.0
    if task.cap_mb is None:
        return 0.0
    return float(max(0, facts.token_bytes - (task.cap_mb << 20)))


def bound_of(
    test: Test,
    facts: Facts,
    limits: Limits,
    *,
    threads: int,
    kv_token_bytes: float | None,
    streamed_bytes: float,
    n_passes: int = 1,
) -> Bound | None:
    """Return what bounds a test: the slowest of what it needs, were all of it at its best.

    Args:
        test: what is done.
        facts: what a token costs.
        limits: of the machine.
        threads: of them, which of the limits counts.
        kv_token_bytes: of the KV cache that a token reads; ignored for a prompt.
        streamed_bytes: of weights that a pass reads from the disk.
        n_passes: of a prompt over the weights, one for each chunk.

    Returns:
        None where a limit that has a say was not measured: generation needs that of memory, a
        prompt that of arithmetic, either that of the disk where weights are streamed.
    """
    memory = limits.memory_gb_per_s.get(str(threads))
    disk = limits.best_disk_gb_per_s
    gmadds = limits.gmadds_per_s.get(str(threads))
    n_passes = max(1, n_passes) if test.kind == "pp" else test.n_tokens
    per_token = n_passes / test.n_tokens
    seconds: dict[str, tuple[float, float | None]] = {}  # a token, and bytes of it
    if streamed_bytes > 0:
        if not disk:
            return None
        n_bytes = streamed_bytes * per_token
        seconds["disk"] = (n_bytes / disk / 1e9, n_bytes)
    if test.kind == "pp":
        if not gmadds:
            return None
        # Of the head only the last token's logits are wanted. What attention multiplies is left
        # out: the limit is that of the weights.
        n_madds = facts.token_madds + facts.head_madds / test.n_tokens
        seconds["arithmetic"] = (n_madds / gmadds / 1e9, None)
        if memory:
            n_bytes = facts.token_bytes * per_token
            seconds["memory"] = (n_bytes / memory / 1e9, n_bytes)
    else:
        if not memory or kv_token_bytes is None:
            return None
        n_bytes = facts.token_bytes + kv_token_bytes
        seconds["memory"] = (n_bytes / memory / 1e9, n_bytes)
    by, (token_seconds, binding_bytes) = max(seconds.items(), key=lambda known: known[1][0])
    return Bound(by, 1 / token_seconds, binding_bytes) if token_seconds > 0 else None


def _bound(
    draft: _Draft,
    one: Measured,
    test: Test,
    runs: Sequence[tuple[Answer, TestRun]],
    limits: Limits,
) -> None:
    """Put the limit into the row."""
    row, facts = draft.row, one.facts
    n_passes = max(1, round(statistics.median(run.n_passes for _, run in runs)))
    position_bytes = kv_bytes_per_position(facts, row.kv_type, row.engine)
    kv_token_bytes = None
    if position_bytes is not None:
        kv_token_bytes = position_bytes * _mean_positions(test)
    streamed = streamed_bytes_at_best(one.task, facts, runs[-1][0].plan)
    streamed = _without_cached(draft, test, streamed, n_passes)
    bound = bound_of(
        test,
        facts,
        limits,
        threads=row.threads,
        kv_token_bytes=kv_token_bytes,
        streamed_bytes=streamed,
        n_passes=n_passes,
    )
    needed = facts.token_bytes + (kv_token_bytes or 0) if test.kind == "tg" else facts.token_bytes
    draft.row = row = replace(row, bytes_per_token=round(needed))
    if bound is None:
        return
    reached = row.tok_per_s.median
    draft.row = replace(
        row,
        fraction_of_limit=reached / bound.tok_per_s,
        limited_by=bound.limited_by,
        limit_tok_per_s=bound.tok_per_s,
        gb_per_s=None if bound.binding_bytes is None else reached * bound.binding_bytes / 1e9,
    )


def _without_cached(draft: _Draft, test: Test, streamed: float, n_passes: int) -> float:
    """Return the streamed bytes; none where the kernel says that the disk was hardly asked."""
    per_token = draft.row.read_bytes_per_token
    if streamed <= 0 or per_token is None:
        return streamed
    n_passes = n_passes if test.kind == "pp" else test.n_tokens
    per_pass = per_token * test.n_tokens / n_passes
    if per_pass >= _FROM_CACHE * streamed:
        return streamed
    draft.notes.append(
        f"{draft.row.label}: of {streamed / 1e6:,.0f} MB streamed for each pass "
        f"{per_pass / 1e6:,.0f} came from the disk, the page cache had the rest; so it is held "
        "against memory"
    )
    return 0.0


# ---- two engines ----


def _ratios(
    drafts: Sequence[_Draft], pairs: Sequence[tuple[str, str]]
) -> tuple[list[Ratio], list[str]]:
    """Return QSF's rows against the peer's, and why some are not compared."""
    ratios: list[Ratio] = []
    notes: list[str] = []
    for qsf_file, peer_file in pairs:
        mine = [(i, d) for i, d in enumerate(drafts) if _is_of(d, "qsf", qsf_file)]
        theirs = [(i, d) for i, d in enumerate(drafts) if _is_of(d, "llama.cpp", peer_file)]
        for i, draft in mine:
            for k, peer in theirs:
                if _setting(draft) != _setting(peer):
                    continue
                if why := _difference(draft, peer):
                    notes.append(f"{draft.row.label} is not compared with {peer.row.type}: {why}")
                elif (ratio := _ratio(i, draft, k, peer)) is not None:
                    ratios.append(ratio)
    return ratios, notes


def _is_of(draft: _Draft, engine: str, path: str) -> bool:
    return draft.task.engine == engine and draft.task.path == path


def _setting(draft: _Draft) -> tuple[object, ...]:
    return (draft.row.test, draft.row.depth, draft.row.threads, draft.task.cap_mb)


def _difference(mine: _Draft, peer: _Draft) -> str:
    """Return why two rows are not the same work; empty: they are."""
    if abs(mine.row.n_weights / max(peer.row.n_weights, 1) - 1) > _SAME_WEIGHTS:
        return f"{mine.row.n_weights:,} weights against {peer.row.n_weights:,}"
    if mine.n_vocab != peer.n_vocab:
        return f"{mine.n_vocab:,} tokens in the vocabulary against {peer.n_vocab:,}"
    if mine.task.budget_mb is not None and mine.task.cap_mb is None:
        return f"a budget of {mine.task.budget_mb} MB binds QSF alone where there is no cgroup"
    return ""


def _ratio(i: int, mine: _Draft, k: int, peer: _Draft) -> Ratio | None:
    """Return the ratio round by round: what slows a round slows both."""
    both = [number for number in mine.by_round if number in peer.by_round]
    if not both:
        return None
    values = spread_of([mine.by_round[number] / peer.by_round[number] for number in both])
    return Ratio(i, k, values.median, values.min, values.max, values.values)
