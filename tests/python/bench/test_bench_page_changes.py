# SPDX-License-Identifier: Apache-2.0
"""A comparison in the words of the page."""

from __future__ import annotations

from dataclasses import replace

from qsf.bench.compare import Change, Comparison
from qsf.bench.page_changes import changes_of
from qsf.bench.results import spread_of

SPEED = Change(
    row="small, qsf, 4bit, tg128",
    what="tok/s",
    unit="tok/s",
    old=spread_of([20.0, 21.0]),
    new=spread_of([18.0, 19.0]),
    change=-0.1,
    corrected=-0.1,
    noise=0.05,
    verdict="slower",
    is_sure=True,
)


def test_nothing_is_said_of_no_comparison() -> None:
    assert changes_of(None) == ([], [])


def test_changes_are_in_words() -> None:
    part = replace(SPEED, what="attn_out", unit="ms", change=0.1, corrected=0.04, verdict="noisy")
    ratio = replace(SPEED, what="ratio to llama.cpp Q4_K_M", unit="x", verdict="same")
    unsure = replace(SPEED, is_sure=False)
    same_part = replace(part, verdict="same")
    found, notes = changes_of(
        Comparison([SPEED, part, same_part, ratio, unsure], [], ["an old row"], [], ["a note"])
    )
    assert [tuple(change) for change in found] == [
        ("small, qsf, 4bit, tg128: tok/s", "20.5", "18.5", "-10.0 %", "slower"),
        (
            "small, qsf, 4bit, tg128: attn out",
            "20.5 ms",
            "18.5 ms",
            "+10.0 %, +4.0 % without the machine's drift",
            "noisy",
        ),
        (
            "small, qsf, 4bit, tg128: ratio to llama.cpp Q4_K_M",
            "20.5x",
            "18.5x",
            "-10.0 %",
            "same",
        ),
        ("small, qsf, 4bit, tg128: tok/s", "20.5", "18.5", "-10.0 %", "slower?"),
    ]
    assert notes == [
        "a note",
        "only in the older result: an old row",
        "a question mark: beyond its noise, but among so many figures that is chance",
    ]
