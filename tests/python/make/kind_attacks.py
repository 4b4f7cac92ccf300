"""A small file whose layers differ, and changes of KIND and ROPE that each must be refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from make.attacks import (
    DATA,
    Attack,
    Change,
    F,
    U,
    build,
    grow,
    number,
    u32,
    values_of,
)  # fmt: skip
from make.qsf_files import repair, tiny_header
from qsf.file.kinds import QkNorm, RopeSet, plain_kind
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
