"""A small file with experts, and changes of KIND, UNIT and TENS that each must be refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace
from typing import Any

from make.attacks import (
    DATA,
    UNIT_BYTES,
    Attack,
    Change,
    F,
    U,
    attack_of,
    build,
    grow,
    inside,
    number,
    section_at,
    u32,
    unit_at,
    values_of,
)  # fmt: skip
from make.kind_attacks import PLAIN_KIND, kind, kind_attack
from qsf.file.kinds import ExpertScore, ExpertWeights

ROUTED = replace(
    PLAIN_KIND, n_experts=4, n_chosen=2, expert_dim=6, expert_score=ExpertScore.SIGMOID,
    expert_weights=ExpertWeights.BY_SUM, weights_epsilon=1e-20, weights_factor=2.5, n_groups=2,
    n_groups_kept=1, group_score=1,
)  # fmt: skip
EXPERTS = build(layer_kinds=(ROUTED, replace(PLAIN_KIND, n_experts=3, n_chosen=3, expert_dim=12)))
N_EXPERTS = 7
FIRST_UNIT = 4  # of the experts
FIRST_TENSOR = 21  # in TENS; experts 0, 2, 4 and 6 have four each there


def expert(i: int, fmt: str, at: int, value: object) -> Change:
    """Return a change of the entry of the i-th expert in UNIT."""
    return inside(b"UNIT", fmt, UNIT_BYTES * (FIRST_UNIT + i) + at, value)


def tensor(i: int, fmt: str, at: int, value: object) -> Change:
    """Return a change of the i-th entry of the tensor table that is of an expert."""
    return inside(b"TENS", fmt, 32 * (FIRST_TENSOR + i) + at, value)


def entries(first: int, end: int) -> Change:
    """Return a change that leaves only some of the experts in UNIT."""

    def change(d: bytearray) -> None:
        at = section_at(d, b"UNIT")
        index = bytes(d[at : at + UNIT_BYTES * FIRST_UNIT])
        at += len(index)
        grow(d, b"UNIT", index + bytes(d[at + UNIT_BYTES * first : at + UNIT_BYTES * end]))

    return change


def off_of(i: int, other: int, behind: int) -> Change:
    """Return a change that moves an expert to another one, or to so many bytes behind it."""

    def change(d: bytearray) -> None:
        expert(i, "Q", 0, unit_at(d, FIRST_UNIT + other) + behind)(d)

    return change


def routed(*values: bytes) -> Change:
    """Return a change of both kinds: 3 and 4 experts of 2 chosen, and more values."""
    last = u32(80, 3) + u32(81, 3) + u32(82, 12)
    return kind(u32(80, 4) + b"".join(values), last, of_layers=b"\0\1")


def expert_attack(name: str, error: str, what: str, *how: Any) -> Attack:
    """Return the attack of a row of the table "expert"."""
    own = {"expert": expert, "tensor": tensor}
    if what in own:
        return name, {"F": F, "U": U}[error], own[what](*map(number, how))
    if what == "routed":
        return name, {"F": F, "U": U}[error], routed(values_of(how[0]))
    return (kind_attack if what == "kind" else attack_of)(name, error, what, *how)


EXPERT_ATTACKS: list[Attack] = [
    *(expert_attack(*row) for row in DATA["expert"]),
    *((f"kind: key {k} without experts", F, kind(u32(k, 2))) for k in (81, 82, 83, 84, 87)),
    ("UNIT: no experts", F, entries(0, 0)),
    ("UNIT: one is missing", F, entries(0, N_EXPERTS - 1)),
    ("UNIT: the first is missing", F, entries(1, N_EXPERTS)),
    ("UNIT: 65537 entries", F, lambda d: grow(d, b"UNIT", bytes(UNIT_BYTES * 65537))),
    ("UNIT: unaligned", F, off_of(1, 1, 64)),
    ("UNIT: the same place", F, off_of(1, 0, 0)),
    ("UNIT: descends", F, off_of(2, 1, -4096)),
    ("UNIT: in the layer", F, off_of(0, 0, -4096)),
]  # fmt: skip
