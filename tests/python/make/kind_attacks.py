"""A small file whose layers differ, and changes of KIND, ROPE and EXPT to refuse."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
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
from make.qsf_files import repair, tiny_header
from qsf.file.kinds import ExpertScore, ExpertWeights, QkNorm, RopeSet, plain_kind
from qsf.file.layout import Arch

PLAIN_KIND = plain_kind(tiny_header(), Arch())


SETS = (
    RopeSet(0, (1.0, 0.5)),
    RopeSet(0, (1.0, 0.25), least_context=9, factor=1.2),
    RopeSet(1, (0.3,), is_interleaved=True),
)
KINDS = build(
    layer_kinds=(
        replace(PLAIN_KIND, window_tokens=5, rope_set=1, alibi_slopes=(0.5, 0.0), score_cap=30.0),
        replace(PLAIN_KIND, qk_norm=QkNorm.WHOLE_WIDTH, temperature_beta=0.1, temperature_step=8),
    ),
    rope_sets=SETS,
)


def kind(*kinds: bytes, of_layers: bytes = b"\0\0", padding: bytes = b"\0\0") -> Change:
    """Return a change of the whole section KIND; each kind is its key-values."""
    data = struct.pack("<HH", len(kinds), 0) + of_layers + padding
    data += b"".join(struct.pack("<I", len(values)) + values for values in kinds)
    return lambda d: grow(d, b"KIND", data)


def raw_kind(data: bytes) -> Change:
    """Return a change of the whole section KIND."""
    return lambda d: grow(d, b"KIND", data)


def rope_set(
    number: int, n_pairs: int = 2, *, pairing: int = 0, least_context: int = 0,
    factor: float = 1.0, frequency: float = 0.5,
) -> bytes:  # fmt: skip
    """Return a set of equal frequencies."""
    head = struct.pack("<BBHIf", number, pairing, n_pairs, least_context, factor)
    return head + struct.pack("<f", frequency) * n_pairs


def rope(*sets: bytes, count: int | None = None, reserved: int = 0, behind: bytes = b"") -> Change:
    """Return a change of the whole section ROPE; both layers then need sets 0 and 1."""
    data = struct.pack("<HH", len(sets) if count is None else count, reserved)
    return lambda d: grow(d, b"ROPE", data + b"".join(sets) + behind)


ONE = rope_set(1)


def _of_latents() -> bytes:
    """A file whose KIND is right for a latent; its tensors are not, which readers do not ask."""
    plain = plain_kind(tiny_header(head_dim=68), Arch(rope_dims=4))
    kinds = (replace(plain, window_tokens=5),) * 2
    data = bytearray(build(layer_kinds=kinds, arch=Arch(rope_dims=4), head_dim=68))
    kind(values_of({"like": "latent"}))(data)
    return repair(data)


LATENTS = _of_latents()


def kind_attack(name: str, error: str, what: str, *how: Any) -> Attack:
    """Return the attack of a row of the table "kind": one kind, two, or sets of RoPE."""
    if what == "rope":
        sets = [{key: number(value) for key, value in said.items()} for said in how]
        change = rope(*(rope_set(**said) for said in sets))
    else:
        of_layers = b"\0\1" if what == "kinds" else b"\0\0"
        change = kind(*map(values_of, how), of_layers=of_layers)
    return name, {"F": F, "U": U}[error], change


LATENT_ATTACKS: list[Attack] = [kind_attack(*row) for row in DATA["latent"]]
KIND_ATTACKS: list[Attack] = [
    *(kind_attack(*row) for row in DATA["kind"]),
    ("kind: 3 bytes", F, raw_kind(b"\1\0\0")),
    ("kind: no layers", F, raw_kind(b"\1\0\0\0")),
    ("kind: none", F, raw_kind(struct.pack("<HH4x", 0, 0))),
    ("kind: 129", F, raw_kind(struct.pack("<HH4x", 129, 0) + bytes(4 * 129))),
    ("kind: reserved", F, raw_kind(struct.pack("<HH4xI", 1, 1, 0))),
    ("kind: of a layer", F, kind(b"", of_layers=b"\0\1")),
    ("kind: padding", F, kind(b"", padding=b"\0\1")),
    ("kind: behind the last", F, raw_kind(struct.pack("<HH4xII", 1, 0, 0, 0))),
    ("kind: too many bytes", F, raw_kind(struct.pack("<HH4xI", 1, 0, 1))),
    ("kind: most bytes", F, raw_kind(struct.pack("<HH4xI", 1, 0, 0xFFFFFFFF))),
    ("kind: half a size", F, raw_kind(struct.pack("<HH4xH", 1, 0, 0))),
    ("kind: half a key", F, kind(u32(16, 0)[:-1])),
    ("kind: unknown key of a new type", U, kind(struct.pack("<HBB", 35, 9, 0))),
    ("kind: a later key first", F, kind(u32(36, 0) + u32(16, 0))),
    ("kind: the second is bad", F, kind(b"", u32(16, 2))),
    ("rope: 3 bytes", F, lambda d: grow(d, b"ROPE", b"\1\0\0")),
    ("rope: none", F, rope()),
    ("rope: 65", F, rope(count=65)),
    ("rope: reserved", F, rope(rope_set(0), ONE, reserved=1)),
    ("rope: half a set", F, rope(rope_set(0), ONE[:-1])),
    ("rope: half a head", F, rope(rope_set(0), ONE[:11])),
    ("rope: behind the last", F, rope(rope_set(0), ONE, behind=b"\0\0\0\0")),
]


# ---- A small file with experts, and changes of KIND, UNIT and TENS that each must be refused ----
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
