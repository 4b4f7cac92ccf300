# SPDX-License-Identifier: Apache-2.0
"""What qsf.bench makes of what processes answered: speeds, limits, parts, ratios, notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from make.bench_records import (
    BASELINE_FILE,
    LIMITS,
    PP,
    QSF_FILE,
    TG,
    facts_of,
    measured_of,
    run_of,
)
from qsf.native.roofline import Limits
from qsf_bench.judge.bounds import kv_bytes_per_position
from qsf_bench.judge.results import Row
from qsf_bench.judge.rows import Analysis, analyse
from qsf_bench.run import tasks
from qsf_bench.run.rounds import TaskRuns
from qsf_bench.run.tasks import Cap

PAIR = [(QSF_FILE, BASELINE_FILE)]


def only_row(one: TaskRuns, limits: Limits = LIMITS) -> Row:
    (row,) = analyse([one], limits).rows
    return row


def tg_runs(*rates: float, **changes: Any) -> list[list[Any]]:
    return [[run_of(TG, rate, **changes)] for rate in rates]


# ---- speeds ----


def test_a_row_has_median_least_and_most_of_the_rounds_in_their_order() -> None:
    row = only_row(measured_of("qsf", tg_runs(20.0, 26.0, 23.0), tests=[TG]))
    assert row.tok_per_s.median == pytest.approx(23.0, rel=1e-6)
    assert row.tok_per_s.min == pytest.approx(20.0, rel=1e-6)
    assert row.tok_per_s.max == pytest.approx(26.0, rel=1e-6)
    assert row.tok_per_s.values == pytest.approx([20.0, 26.0, 23.0], rel=1e-6)
    assert (row.engine, row.test, row.file, row.threads) == ("qsf", "tg128", "small-4bit.qsf", 2)
    assert row.peak_rss_bytes == 720 << 20


def test_rounds_without_an_answer_are_left_out_and_a_test_without_any_has_no_row() -> None:
    one = measured_of("qsf", [None, [run_of(TG, 20.0)], None], tests=[PP, TG])
    assert [row.test for row in analyse([one], LIMITS).rows] == ["tg128"]
    assert only_row(one).tok_per_s.values == pytest.approx([20.0], rel=1e-6)


def test_depths_are_not_mixed_up() -> None:
    deep = tasks.Test("tg", 128, 2048)
    one = measured_of("qsf", [[run_of(TG, 20.0), run_of(deep, 15.0)]], tests=[TG, deep])
    rows = analyse([one], LIMITS).rows
    assert [(row.depth, round(row.tok_per_s.median)) for row in rows] == [(0, 20), (2048, 15)]


# ---- limits ----


def test_generation_is_held_against_memory_with_the_kv_cache() -> None:
    row = only_row(measured_of("qsf", tg_runs(20.0), tests=[TG]))
    # 10 layers of 4 heads of 64 keys and 64 values of 4.5 bits: 2880 bytes a position; the tokens
    # of 128 read 64.5 positions in the mean.
    needed = 600_000_000 + 2880 * 64.5
    assert row.bytes_per_token == round(needed)
    assert row.limited_by == "memory"
    assert row.limit_tok_per_s == pytest.approx(20e9 / needed)
    assert row.fraction_of_limit == pytest.approx(20.0 * needed / 20e9, rel=1e-6)
    assert row.gb_per_s == pytest.approx(20.0 * needed / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("engine", "kv_type", "n_bytes"),
    [
        ("qsf", "f16", 10 * 4 * 64 * 2 * 2),
        ("qsf", "k8v4", 10 * 4 * 64 * (8.25 + 4.5) / 8),
        ("qsf", "2bit", 10 * 4 * 64 * 2 * 2.5 / 8),
        ("llama.cpp", "f16", 10 * 4 * 64 * 2 * 2),
        ("llama.cpp", "8bit", 10 * 4 * 64 * 2 * 34 / 32),
        ("llama.cpp", "2bit", None),
        ("qsf", "q8_0", None),
    ],
)
def test_kv_cache_types(engine: str, kv_type: str, n_bytes: float | None) -> None:
    assert kv_bytes_per_position(facts_of(), kv_type, engine) == n_bytes


def test_a_prompt_is_held_against_arithmetic_without_most_of_the_head() -> None:
    one = measured_of("qsf", [[run_of(PP, 500.0)]], tests=[PP])
    row = only_row(one)
    assert row.limited_by == "arithmetic"
    assert row.limit_tok_per_s == pytest.approx(2000e9 / (1_000_000_000 + 51_200_000 / 512))
    assert row.bytes_per_token == 600_000_000
    assert row.gb_per_s is None


def test_a_prompt_in_many_passes_is_held_against_memory() -> None:
    row = only_row(measured_of("qsf", [[run_of(PP, 30.0, n_passes=512)]], tests=[PP]))
    assert row.limited_by == "memory"
    assert row.limit_tok_per_s == pytest.approx(20e9 / 600_000_000)


STREAMED = {"plan": {"streamed_bytes": 500_000_000}}


def test_what_qsf_streams_is_held_against_the_best_of_the_disk() -> None:
    row = only_row(measured_of("qsf", tg_runs(3.0), tests=[TG], answer=STREAMED))
    assert row.limited_by == "disk"
    assert row.limit_tok_per_s == pytest.approx(2e9 / 500_000_000)
    assert row.fraction_of_limit == pytest.approx(0.75, rel=1e-6)
    assert row.gb_per_s == pytest.approx(1.5, rel=1e-6)


def test_of_a_mixture_the_disk_gives_what_was_missing_and_memory_the_rest_before() -> None:
    plan = {"plan": {"streamed_bytes": 0, "expert_token_bytes": 400_000_000}}
    runs = tg_runs(3.0, read_bytes=128 * 300_000_000)
    row = only_row(measured_of("qsf", runs, tests=[TG], answer=plan))
    assert row.limited_by == "disk"
    assert row.limit_tok_per_s == pytest.approx(1 / (300e6 / 2e9 + 200e6 / 20e9))
    assert row.gb_per_s == pytest.approx(0.9, rel=1e-6)
    held = tg_runs(3.0, read_bytes=0)
    assert only_row(measured_of("qsf", held, tests=[TG], answer=plan)).limited_by == "memory"
    prompt = [[run_of(PP, 500.0, read_bytes=2 * 3_000_000_000)]]
    row = only_row(measured_of("qsf", prompt, tests=[PP], answer=plan))
    assert row.limit_tok_per_s == pytest.approx(2e9 / (2 * 3_000_000_000 / 512))


def test_of_the_baseline_the_group_holds_all_that_fits() -> None:
    caps = [Cap(300, None, 0)]
    one = measured_of("llama.cpp", tg_runs(1.0), tests=[TG], cap_mb=300, caps=caps)
    row = only_row(one)
    assert row.limited_by == "disk"
    assert row.limit_tok_per_s == pytest.approx(2e9 / (600_000_000 - (300 << 20)))


def test_where_the_page_cache_answers_the_disk_is_no_limit() -> None:
    warm = tg_runs(8.0, disk_bytes=128 * 100_000_000)
    found = analyse([measured_of("qsf", warm, tests=[TG], answer=STREAMED)], LIMITS)
    assert found.rows[0].limited_by == "memory"
    assert found.rows[0].read_bytes_per_token == pytest.approx(100_000_000)
    assert any("of 500 MB streamed for each pass 100 came from the disk" in n for n in found.notes)
    cold = tg_runs(3.0, disk_bytes=128 * 510_000_000)
    found = analyse([measured_of("qsf", cold, tests=[TG], answer=STREAMED)], LIMITS)
    assert (found.rows[0].limited_by, found.notes) == ("disk", [])


def test_more_than_a_limit_comes_with_the_reason() -> None:
    found = analyse([measured_of("qsf", tg_runs(8.0), tests=[TG], answer=STREAMED)] * 2, LIMITS)
    assert found.rows[0].fraction_of_limit == pytest.approx(2.0, rel=1e-6)
    (note,) = found.notes
    assert "faster than the disk as it was measured: the page cache holds" in note
    assert "%" not in note
    assert found.rows[0].share_of_limit == "cached"
    small = replace(found.rows[0], limited_by="memory", file_bytes=3 << 20)
    assert "of a file of 3 MB the processor's caches hold much" in small.above_limit


@pytest.mark.parametrize(
    ("test", "rate", "limits", "answer"),
    [
        (TG, 20.0, Limits(), None),
        (TG, 20.0, Limits({"1": 10.0}), None),  # of another number of threads
        (TG, 20.0, LIMITS, {"kv_type": "other"}),
        (TG, 3.0, Limits({"2": 20.0}), STREAMED),
        (PP, 500.0, Limits({"2": 20.0}), None),
    ],
)
def test_unknown_limits_stay_unknown(
    test: tasks.Test, rate: float, limits: Limits, answer: dict[str, Any] | None
) -> None:
    one = measured_of("qsf", [[run_of(test, rate)]], tests=[test], answer=answer)
    row = only_row(one, limits)
    assert (row.fraction_of_limit, row.limit_tok_per_s, row.limited_by) == (None, None, "")
    assert row.gb_per_s is None


# ---- parts and agreement ----


def with_parts(rate: float, *parts_of: float) -> Any:
    run = run_of(TG, rate)
    names = ("phase_attention", "phase_ffn", "sample")
    parts = {n: round(p * run.wall_ns) for n, p in zip(names, parts_of, strict=False)}
    return replace(run, parts=parts, beside={"read": run.wall_ns // 2})


def test_the_breakdown_is_in_milliseconds_a_token() -> None:
    rounds = [[with_parts(rate, 0.2, 0.7, 0.1)] for rate in (20.0, 25.0, 40.0)]
    found = analyse([measured_of("qsf", rounds, tests=[TG])], LIMITS)
    breakdown = found.rows[0].breakdown
    assert breakdown is not None
    assert breakdown.wall_ms == pytest.approx(40.0, rel=1e-6)
    assert breakdown.parts["ffn"].values == pytest.approx([35.0, 28.0, 17.5], rel=1e-6)
    assert list(breakdown.parts) == ["attention", "ffn", "sample"]
    assert breakdown.beside["read"].median == pytest.approx(20.0, rel=1e-6)
    assert not any("parts" in note for note in found.notes)


def test_parts_that_do_not_sum_to_the_time_are_said_and_not_stretched() -> None:
    rounds = [[with_parts(20.0, 0.2, 0.79)], [with_parts(20.0, 0.2, 0.7)]]
    found = analyse([measured_of("qsf", rounds, tests=[TG])], LIMITS)
    (note,) = found.notes
    assert "qsf, 4bit, tg128, 2 threads: the parts sum to 5760.0 ms where 6400.0 ms passed" in note
    assert "1 of 2 rounds" in note
    breakdown = found.rows[0].breakdown
    assert breakdown is not None
    assert sum(part.values[1] for part in breakdown.parts.values()) == pytest.approx(45.0, rel=1e-6)


# ---- ratios ----


def both(*baseline_changes: Any, **qsf_task: Any) -> Analysis:
    facts, answer = (*baseline_changes, None, None)[:2]
    return analyse(
        [
            measured_of("qsf", tg_runs(20.0, 30.0, 24.0), tests=[TG], **qsf_task),
            measured_of(
                "llama.cpp", tg_runs(10.0, 10.0, 8.0), tests=[TG], facts=facts, answer=answer
            ),
        ],
        LIMITS,
        PAIR,
    )


def test_ratios_are_those_of_the_same_round() -> None:
    (ratio,) = both().ratios
    assert (ratio.row, ratio.vs) == (0, 1)
    assert ratio.values == pytest.approx([2.0, 3.0, 3.0], rel=1e-6)
    assert (ratio.median, ratio.min, ratio.max) == pytest.approx((3.0, 2.0, 3.0), rel=1e-6)


def test_rounds_in_which_one_engine_failed_have_no_ratio() -> None:
    mine = measured_of("qsf", [None, *tg_runs(30.0, 24.0)], tests=[TG])
    baseline = measured_of("llama.cpp", [*tg_runs(10.0, 15.0), None], tests=[TG])
    (ratio,) = analyse([mine, baseline], LIMITS, PAIR).ratios
    assert ratio.values == pytest.approx([2.0], rel=1e-6)
    baseline = measured_of("llama.cpp", [*tg_runs(10.0), None, None], tests=[TG])
    assert analyse([mine, baseline], LIMITS, PAIR).ratios == []


@pytest.mark.parametrize(
    ("baseline_changes", "qsf_task", "why"),
    [
        ((facts_of(n_weights=1_100_000_000),), {}, "1,000,000,000 weights against 1,100,000,000"),
        ((None, {"n_vocab": 50000}), {}, "32,000 tokens in the vocabulary against 50,000"),
        ((), {"budget_mb": 300}, "a budget of 300 MB limits QSF alone"),
    ],
)
def test_different_work_is_refused_and_said(
    baseline_changes: tuple[Any, ...], qsf_task: dict[str, Any], why: str
) -> None:
    found = both(*baseline_changes, **qsf_task)
    assert found.ratios == []
    assert any(why in note for note in found.notes)


@pytest.mark.parametrize("task", [{"n_threads": 1}, {"cap_mb": 300}, {"path": "/models/b.qsf"}])
def test_other_settings_and_files_that_are_no_pair_are_not_compared(task: dict[str, Any]) -> None:
    found = both(**task)
    assert found.ratios == []
    assert not any("not compared" in note for note in found.notes)
