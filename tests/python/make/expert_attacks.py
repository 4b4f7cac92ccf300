"""A small file with experts, and changes of KIND, UNIT and TENS that each must be refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace

from make.attacks import (
    NAN,
    UNIT_BYTES,
    Change,
    F,
    build,
    entry,
    f32,
    grow,
    inside,
    section_at,
    u32,
    unit_at,
)
from make.kind_attacks import PLAIN_KIND, kind
from qsf.errors import QsfError
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


CHOSEN = u32(81, 2) + u32(82, 6)
EXPERT_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("kind: experts 0", F, kind(u32(80, 0))),
    ("kind: 1025 experts", F, kind(u32(80, 1025) + CHOSEN)),
    ("kind: fewer experts than UNIT has", F, kind(b"")),
    ("kind: more experts than UNIT has", F, kind(u32(80, 4) + CHOSEN)),
    ("kind: none chosen", F, routed(u32(82, 6))),
    ("kind: chosen 0", F, routed(u32(81, 0), u32(82, 6))),
    ("kind: chosen 5 of 4", F, routed(u32(81, 5), u32(82, 6))),
    ("kind: chosen 65", F, routed(u32(81, 65), u32(82, 6))),
    ("kind: no expert dimension", F, routed(u32(81, 2))),
    ("kind: expert dimension above the header's", F, routed(u32(81, 2), u32(82, 13))),
    ("kind: score 3", F, routed(CHOSEN, u32(83, 3))),
    ("kind: weights 3", F, routed(CHOSEN, u32(84, 3))),
    ("kind: sum of logits", F, routed(CHOSEN, u32(83, 2), u32(84, 1))),
    ("kind: epsilon 0", F, routed(CHOSEN, f32(85, 0.0))),
    ("kind: factor nan", F, routed(CHOSEN, f32(86, NAN))),
    ("kind: 0 groups", F, routed(CHOSEN, u32(87, 0))),
    ("kind: 3 groups of 4", F, routed(CHOSEN, u32(87, 3))),
    ("kind: more groups kept than there are", F, routed(CHOSEN, u32(87, 2), u32(88, 3))),
    ("kind: no groups kept", F, routed(CHOSEN, u32(87, 2), u32(88, 0))),
    ("kind: group score 2", F, routed(CHOSEN, u32(89, 2))),
    ("kind: two largest of one", F, routed(CHOSEN, u32(87, 4), u32(88, 3), u32(89, 1))),
    ("kind: chosen beyond the kept groups", F,
     routed(u32(81, 3), u32(82, 6), u32(87, 2), u32(88, 1))),
    *((f"kind: key {k} without experts", F, kind(u32(k, 2))) for k in (81, 82, 83, 84, 87)),
    ("UNIT: no experts", F, entries(0, 0)),
    ("UNIT: half an entry", F, entry(b"UNIT", "Q", 16, UNIT_BYTES * (FIRST_UNIT + N_EXPERTS) - 24)),
    ("UNIT: one is missing", F, entries(0, N_EXPERTS - 1)),
    ("UNIT: the first is missing", F, entries(1, N_EXPERTS)),
    ("UNIT: 65537 entries", F, lambda d: grow(d, b"UNIT", bytes(UNIT_BYTES * 65537))),
    ("UNIT: of a layer that is none", F, expert(6, "H", 36, 2)),
    ("UNIT: of the layer before", F, expert(4, "H", 36, 0)),
    ("UNIT: an expert number of another", F, expert(5, "H", 38, 2)),
    ("UNIT: an expert number is left out", F, expert(6, "H", 38, 3)),
    ("UNIT: template of a layer", F, expert(0, "I", 44, 1)),
    ("UNIT: unaligned", F, off_of(1, 1, 64)),
    ("UNIT: outside", F, expert(6, "Q", 0, 1 << 40)),
    ("UNIT: wraps", F, expert(6, "Q", 0, (1 << 64) - 4096)),
    ("UNIT: the same place", F, off_of(1, 0, 0)),
    ("UNIT: descends", F, off_of(2, 1, -4096)),
    ("UNIT: in the layer", F, off_of(0, 0, -4096)),
    ("UNIT: in the header", F, expert(0, "Q", 0, 0)),
    ("UNIT: stored 0", F, expert(0, "Q", 8, 0)),
    ("UNIT: raw 0", F, expert(0, "Q", 16, 0)),
    ("UNIT: stored is not raw", F, expert(0, "Q", 16, 64)),
    ("UNIT: quantisation type", F, expert(0, "B", 33, 12)),
    ("UNIT: another type than its template", F, expert(1, "B", 33, 6)),
    ("UNIT: compression", F, expert(0, "B", 34, 1)),
    ("UNIT: compression 4", F, expert(0, "B", 34, 4)),
    ("UNIT: tensors", F, expert(0, "I", 40, 3)),
    ("UNIT: other tensors than its template", F, expert(1, "I", 40, 3)),
    ("UNIT: importance nan", F, expert(0, "f", 28, NAN)),
    ("UNIT: importance negative", F, expert(0, "f", 28, -1.0)),
    ("UNIT: a later template", F, expert(0, "I", 44, FIRST_UNIT + 2)),
    ("UNIT: a template of no entries", F, expert(3, "I", 44, FIRST_UNIT + 1)),
    ("UNIT: a template of another size", F, expert(3, "I", 44, FIRST_UNIT + 2)),
    ("UNIT: a template of its own without entries", F, expert(1, "I", 44, FIRST_UNIT + 1)),
    ("UNIT: entries without a template", F, expert(4, "I", 44, FIRST_UNIT)),
    ("UNIT: template behind all", F, expert(0, "I", 44, 0xFFFFFFFF)),
    ("TENS: of an expert that has a template", F, tensor(0, "I", 0, FIRST_UNIT + 1)),
    ("TENS: behind the experts", F, tensor(15, "I", 0, FIRST_UNIT + N_EXPERTS)),
    ("TENS: final norm in an expert", F, tensor(0, "I", 4, 27)),
    ("TENS: shape of an expert", F, tensor(0, "I", 8, 17)),
]  # fmt: skip
