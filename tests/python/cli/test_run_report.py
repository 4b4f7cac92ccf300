"""The lines that ``qsf-run`` prints about memory and time."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from qsf.cli.run import report
from qsf.native.binding import MemoryEvent, MemoryPlan, SessionStats, UnitTime, phase_names
from qsf.native.opening import does_not_fit

MB = 2**20
MS = 1_000_000


def unit(
    name: str,
    *,
    read_mb: int = 0,
    wait_ms: float = 0,
    compute_ms: float = 1,
    is_skipped: bool = False,
) -> UnitTime:
    """Return what ten passes took, given what one takes."""
    return UnitTime(
        name=name,
        is_resident=read_mb == 0 and not is_skipped,
        is_skipped=is_skipped,
        n_passes=0 if is_skipped else 10,
        read_bytes=10 * read_mb * MB,
        read_ns=10 * 2 * MS if read_mb else 0,
        wait_ns=int(10 * wait_ms * MS),
        compute_ns=int(10 * compute_ms * MS),
    )


def stats(phase_ns: tuple[int, ...] = (), **changes: Any) -> SessionStats:
    values: dict[str, Any] = {field.name: 0 for field in fields(SessionStats)}
    values |= {"n_drafted": (0,) * 4, "n_accepted": (0,) * 4}
    return SessionStats(**{**values, **changes, "phase_ns": phase_ns})


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {field.name: 0 for field in fields(MemoryPlan)}
    values |= {"kv_k_bits": 4, "kv_v_bits": 4, "is_enough": False, "kv_is_rotated": False}
    values |= {"skipped_layers": (), "kv_policy": "none"}
    return MemoryPlan(**{**values, **changes})


def test_experts_are_in_the_memory_map() -> None:
    some = plan(n_experts=64, expert_slots=10, expert_transit_slots=4, experts_a_token=16,
                experts_bytes=14 * MB, expert_token_bytes=16 * MB, expert_slot_bytes=MB,
                engine_bytes=20 * MB, budget_bytes=22 * MB)  # fmt: skip
    lines = report.plan_lines(some)
    assert any("10 of 64 experts, 4 in transit" in line and "14.0" in line for line in lines)
    assert any("at most 16 experts that are not in memory" in line for line in lines)
    assert any("in memory: 16 to 68 %, with twice the memory 50 to 93 %" in x for x in lines)
    streamed = replace(some, streamed_bytes=16 * MB, budget_bytes=0)
    assert any("with twice the memory 22 to 79 %" in x for x in report.plan_lines(streamed))
    every = report.plan_lines(replace(some, expert_slots=64))
    assert not any("not in memory" in line for line in every)
    assert not any("expert" in line for line in report.plan_lines(plan()))


def test_alike_neighbours_are_one_line_and_skipped_layers_have_their_own() -> None:
    units = [unit("embedding"), *(unit(f"layer {i}") for i in range(3))]
    units += [unit(f"layer {i}", is_skipped=True, compute_ms=0) for i in range(3, 6)]
    units += [unit(f"layer {i}", read_mb=7, wait_ms=3) for i in range(6, 8)]
    units += [unit("layer 8", is_skipped=True, compute_ms=0)]
    # Streamed, and not used yet.
    units += [replace(unit("layer 9", compute_ms=0), is_resident=False, n_passes=0)]
    units += [unit("layer 10", read_mb=7, wait_ms=30), unit("layer 11", read_mb=9, wait_ms=30)]
    units += [unit("final", read_mb=9, wait_ms=30)]
    lines = [" ".join(line.split()) for line in report.table_lines(units)[1:]]
    assert lines == [
        "embedding memory - - - 1.00",
        "layers 0-2 memory - - - 1.00",
        "layers 3-5 skipped - - - -",
        "layers 6-7 streamed 7.0 2.00 3.00 1.00",
        "layer 8 skipped - - - -",
        "layer 9 streamed - - - -",
        "layer 10 streamed 7.0 2.00 30.00 1.00",
        "layer 11 streamed 9.0 2.00 30.00 1.00",
        "final streamed 9.0 2.00 30.00 1.00",
    ]


def test_the_plan_says_which_layers_are_skipped() -> None:
    def said(**changes: Any) -> str:
        return report.plan_lines(plan(n_layers=22, **changes))[-1]

    some = {"n_layers_skipped": 6, "skipped_layers": (3, 5, 6, 7, 8, 11)}
    assert said(n_skips_asked=6, **some) == "layers skipped: 6 of 22, 3, 5-8, 11"
    assert said(n_skips_asked=9, **some).endswith(
        "11 (9 were asked for, but the first two and the last two always run)"
    )
    assert "skipped" not in said()


def test_the_total_says_what_was_hidden_behind_what() -> None:
    units = [unit("layer 0", read_mb=100, compute_ms=40)]  # 0.4 s of computing, 1.05 GB
    slow_disk = stats(read_ns=2000 * MS, wait_ns=1700 * MS, checksum_ns=250 * MS, step_tokens=9)
    line = report.total_line(slow_disk, units)
    assert "reading 2.00 s (1.05 GB, 0.52 GB/s)" in line
    assert "waiting for it 1.70 s, computing 0.40 s, checksums 0.25 s of the readers" in line
    assert line.endswith("9 tokens; 75 % of computing was hidden behind reading")
    slow_cpu = stats(read_ns=200 * MS, wait_ns=50 * MS, step_tokens=1)
    line = report.total_line(slow_cpu, units)
    assert line.endswith("1 token; 75 % of reading was hidden behind computing")
    line = report.total_line(stats(read_ns=MS, wait_ns=2 * MS), units)
    assert line.endswith("; 0 % of reading was hidden behind computing")
    idle = report.total_line(stats(), [unit("layer 0")])
    assert "nothing to read" in idle


def test_the_phases_of_a_token_are_one_line() -> None:
    phases = dict.fromkeys(phase_names(), 0)
    phases |= {"qkv": 120 * MS, "wait": 790 * MS, "down": 86 * MS, "other": 4 * MS}
    spent = tuple(phases.values())
    lines = report.phase_lines(stats(spent, prompt_tokens=2, step_tokens=3))
    assert lines == ["time per token: 200 ms: wait 79 %, qkv 12 %, down 9 %"]
    (line,) = report.phase_lines(stats(spent, step_tokens=4, sample_ns=MS, n_samples=4))
    assert line == "time per token: 250 ms: wait 79 %, qkv 12 %, down 9 %; choosing 0.250 ms"
    assert report.phase_lines(stats((0,) * len(phases))) == []


def test_drafts_are_one_line_where_there_were_any() -> None:
    assert report.draft_lines(stats(step_tokens=4, n_step_passes=4, n_step_rows=4)) == []
    done = stats(
        step_tokens=30,
        n_step_passes=20,
        n_step_rows=50,
        n_drafted=(20, 10, 0, 0),
        n_accepted=(9, 1, 0, 0),
    )
    assert report.draft_lines(done) == [
        "drafts: 1.50 tokens and 2.50 rows a pass; right were 9 of 20 from the text, 1 of 10 from "
        "what followed before"
    ]


def test_the_map_says_what_limits_it() -> None:
    def values(**changes: Any) -> dict[str, str]:
        facts = {"process_bytes": MB, "engine_bytes": 5 * MB, **changes}
        lines = report.plan_lines(plan(**facts))
        return {line[2:42].strip(): line[42:].strip() for line in lines[1:]}

    roomy = values(budget_bytes=200 * MB, ceiling_bytes=200 * MB)
    assert roomy["budget"] == "200.0"
    assert roomy["total"] == "6.0"
    assert not any(name.startswith("ceiling") for name in roomy)
    short = values(budget_bytes=200 * MB, ceiling_bytes=90 * MB)
    assert short["ceiling: what the machine gives"] == "90.0"
    unlimited = values(ceiling_bytes=90 * MB)
    assert unlimited["budget"] == "none"
    assert unlimited["ceiling: what the machine gives"] == "90.0"
    with_text = values(process_bytes=30 * MB, text_bytes=6 * MB)
    assert with_text["process before opening"] == "24.0"
    assert with_text["text: the tokenizer"] == "6.0"
    fetched = values(embedding_bytes=3 * MB, embedding_rows=64)
    assert fetched["embedding, a band and 64 rows"] == "3.0"
    streaming = values(stream_bytes=8 * MB, ring_bytes=6 * MB, io_depth=4, streamed_bytes=70 * MB)
    assert streaming["ring for the others, filled by 4 reads"] == "6.0"
    assert streaming["decode buffer"] == "2.0"
    assert streaming["read from the file per token"] == "70.0"


def test_a_refusal_says_what_is_short_and_what_would_help() -> None:
    small = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB + 1, process_bytes=30 * MB)
    text = does_not_fit(small)
    assert "does not fit in 50.0 MB, of which Python and the tokenizer take 30.0" in text
    assert text.endswith(": set ram_budget=61")
    assert does_not_fit(small, is_command=True).endswith(": set --ram-budget 61")

    both = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB, ceiling_bytes=40 * MB)
    assert "60, if the machine or its control group had them" in does_not_fit(both)
    assert "40.0 MB" in does_not_fit(both)

    for budget_bytes in (0, 70 * MB):
        text = does_not_fit(
            plan(budget_bytes=budget_bytes, min_budget_bytes=60 * MB, ceiling_bytes=40 * MB)
        )
        assert "needs 60 MB" in text
        assert "control group leaves this process 40.0" in text
        assert "set " not in text

    asked = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB, kv_bytes=9 * MB, io_depth=8,
                 stream_bytes=16 * MB, ring_bytes=16 * MB)  # fmt: skip
    text = does_not_fit(asked, is_command=True)
    assert "--max-seq-len with a shorter context (it takes 9.0)" in text
    assert "--kv-type with fewer bits" in text
    assert "--io-depth with fewer reads (they take 16.0)" in text
    assert "max_seq_len with" in does_not_fit(asked)


def test_memory_events_are_said() -> None:
    class Model:
        session_stats = stats(n_embedding_rows=8, n_embedding_hits=6)
        timeline = (unit("layer 0"),)
        memory_events = (
            MemoryEvent(12, 224 * MB, 5 * MB, is_given_back=True, n_units_resident=3),
            MemoryEvent(99, 100 * MB, 700 * MB, is_given_back=False, n_units_resident=1),
        )

    lines = report.timeline_lines(Model())  # type: ignore[arg-type]
    assert lines[-1] == (
        "memory: at 12 s: gave back 224.0 MB, 5.0 MB were available, 3 units in memory since; "
        "at 99 s: took again 100.0 MB, 700.0 MB were available, 1 unit in memory since"
    )
    assert lines[-2] == "embedding rows: 8 asked for, 6 found in the cache (75 %)"
