"""A small file whose layers differ, and changes of KIND and ROPE that each must be refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from dataclasses import replace

from make.attacks import NAN, Change, F, U, build, f32, f32s, grow, u32
from make.qsf_files import repair, tiny_header
from qsf.errors import QsfError
from qsf.file.kinds import QkNorm, RopeSet, plain_kind
from qsf.file.layout import Arch

PLAIN_KIND = plain_kind(tiny_header(), Arch())
DELTA, SSD, NONE = (u32(1, i) + u32(37, 255) for i in (2, 3, 5))
CONV = u32(1, 1) + u32(37, 255) + u32(116, 3)
SHARED = u32(49, 1)  # the keys and values of layer 0


def heads(n_key: int, n_value: int, key_dim: int, value_dim: int) -> bytes:
    """Keys 112 to 115"""
    values = (n_key, n_value, key_dim, value_dim)
    return b"".join(u32(112 + i, value) for i, value in enumerate(values))


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


def latent(rank: int = 64, nope: int = 3, value: int = 16, query_rank: int = 5) -> bytes:
    """Keys 44 to 47; without those that are 0"""
    values = (rank, nope, value, query_rank)
    return b"".join(u32(44 + i, n) for i, n in enumerate(values) if n)


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
    kind(latent())(data)
    return repair(data)


LATENTS = _of_latents()
LATENT_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
    ("latent: wider than a key", F, kind(latent(128))),
    ("latent: as wide as a key", F, kind(u32(34, 64) + latent())),
    ("latent: no multiple of 64", F, kind(latent(63))),
    ("latent: nothing left to rotate", F, kind(u32(34, 67) + latent())),
    ("latent: without the query's part", F, kind(latent(nope=0))),
    ("latent: without values", F, kind(latent(value=0))),
    ("latent: values of 17", F, kind(latent(value=17))),
    ("latent: values of 4112", F, kind(latent(value=4112))),
    ("latent: queries of 4097", F, kind(latent(nope=4097))),
    ("latent: a query's rank above 2^20", F, kind(latent(query_rank=(1 << 20) + 1))),
    ("latent: with a QK norm", F, kind(latent() + u32(48, 1))),
    ("latent: with an output gate", F, kind(latent() + u32(56, 1))),
    ("latent: with a limit", F, kind(latent() + f32(51, 1.0))),
    ("latent: with a norm of more", F, kind(latent() + u32(52, 65))),
    ("latent: none, with its norm", F, kind(u32(52, 1))),
    ("latent: with a V norm", F, kind(latent() + u32(57, 1))),
    ("latent: with values that are keys", F, kind(latent() + u32(59, 1))),
    ("latent: of a convolution", F, kind(u32(1, 1) + u32(37, 255) + latent() + u32(116, 3))),
    ("latent: none, with its other keys", F, kind(latent(rank=0))),
    ("latent: none, with a query's rank", F, kind(u32(47, 5))),
    ("latent: 0", F, kind(u32(44, 0))),
]

KIND_ATTACKS: list[tuple[str, type[QsfError], Change]] = [
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
    ("kind: unknown key", U, kind(u32(2, 0))),
    ("kind: MTP head 2", F, kind(u32(17, 2))),
    ("kind: an MTP head that is the first layer", F, kind(u32(17, 1))),
    ("kind: an MTP head before the last layer", F, kind(u32(17, 1), b"", of_layers=b"\0\1")),
    ("kind: an MTP head without attention", F, kind(b"", CONV + u32(17, 1), of_layers=b"\0\1")),
    ("kind: an MTP head with shared keys", F, kind(b"", SHARED + u32(17, 1), of_layers=b"\0\1")),
    ("kind: mixer 6", F, kind(u32(1, 6))),
    ("kind: output gate 3", F, kind(u32(56, 3))),
    ("kind: V norm 2", F, kind(u32(57, 2))),
    ("kind: key 58", U, kind(u32(58, 1))),
    ("kind: values 2", F, kind(u32(59, 2))),
    ("kind: values that are keys with one norm", F, kind(u32(48, 2) + u32(59, 1))),
    ("kind: V norm of a convolution", F, kind(u32(1, 1) + u32(37, 255) + u32(57, 1) + u32(116, 3))),
    ("kind: delta rule without heads", F, kind(DELTA + u32(116, 4))),
    ("kind: delta rule without taps", F, kind(DELTA + heads(1, 2, 8, 8))),
    ("kind: delta rule with 3 heads for 2", F, kind(DELTA + heads(2, 3, 8, 8) + u32(116, 4))),
    ("kind: delta rule with wide keys", F, kind(DELTA + heads(1, 2, 257, 8) + u32(116, 4))),
    ("kind: delta rule with wide values", F, kind(DELTA + heads(1, 2, 8, 257) + u32(116, 4))),
    (
        "kind: delta rule with too many rows",
        F,
        kind(DELTA + heads(4096, 4096, 256, 256) + u32(116, 4)),
    ),
    (
        "kind: delta rule with a gate of attention",
        F,
        kind(DELTA + u32(56, 1) + heads(1, 2, 8, 8) + u32(116, 4)),
    ),
    ("kind: SSD without heads", F, kind(SSD + u32(116, 4))),
    ("kind: SSD without taps", F, kind(SSD + heads(1, 2, 8, 8))),
    ("kind: SSD with 3 heads for 2 groups", F, kind(SSD + heads(2, 3, 8, 8) + u32(116, 4))),
    ("kind: SSD with a wide state", F, kind(SSD + heads(1, 2, 257, 8) + u32(116, 4))),
    ("kind: SSD with too many rows", F, kind(SSD + heads(4096, 4096, 256, 256) + u32(116, 4))),
    (
        "kind: delta rule with a factor of 0",
        F,
        kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + f32(119, 0.0)),
    ),
    (
        "kind: delta rule with an epsilon below 0",
        F,
        kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + f32(125, -1e-5)),
    ),
    ("kind: gate of rank 0", F, kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + u32(117, 0))),
    (
        "kind: gate of rank 2^20 + 1",
        F,
        kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + u32(117, (1 << 20) + 1)),
    ),
    ("kind: decays 2", F, kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + u32(118, 2))),
    ("kind: gate's function 2", F, kind(DELTA + heads(1, 2, 8, 8) + u32(116, 4) + u32(123, 2))),
    ("kind: SSD with a rank", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + u32(117, 8))),
    ("kind: SSD with decays", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + u32(118, 1))),
    ("kind: SSD with a sigmoid", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + u32(123, 1))),
    ("kind: a rank with attention", F, kind(u32(117, 8))),
    ("kind: SSD with a factor", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + f32(119, 2.0))),
    ("kind: SSD with an epsilon", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + f32(125, 1e-5))),
    ("kind: a factor of beta with attention", F, kind(f32(119, 2.0))),
    (
        "kind: SSD with bounded decays",
        F,
        kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + f32(120, 5.0)),
    ),
    ("kind: bounded decays with attention", F, kind(f32(120, 5.0))),
    ("kind: a late norm 2", F, kind(u32(48, 1) + u32(50, 2))),
    ("kind: a late norm that is none", F, kind(u32(50, 1))),
    ("kind: a late norm of all heads", F, kind(u32(48, 2) + u32(50, 1))),
    (
        "kind: a late norm and a temperature",
        F,
        kind(f32(40, 0.5) + u32(41, 8) + u32(48, 1) + u32(50, 1)),
    ),
    ("kind: a limit below 0", F, kind(f32(51, -1.0))),
    ("kind: a limit and one norm", F, kind(u32(48, 2) + f32(51, 1.0))),
    (
        "kind: a limit of a convolution",
        F,
        kind(u32(1, 1) + u32(37, 255) + f32(51, 1.0) + u32(116, 3)),
    ),
    ("kind: activation 6 without its numbers", F, kind(u32(66, 6) + f32(67, 1.0) + f32(69, 1.0))),
    ("kind: numbers of activation 6 without it", F, kind(f32(68, 1.0))),
    ("kind: activation 7", F, kind(u32(66, 7))),
    ("kind: SSD with tiled heads", F, kind(SSD + heads(1, 2, 8, 8) + u32(116, 4) + u32(126, 1))),
    ("kind: SSD with RoPE", F, kind(u32(1, 3) + heads(1, 2, 8, 8) + u32(116, 4))),
    ("kind: attention and SSD without heads", F, kind(u32(1, 4) + u32(116, 4))),
    (
        "kind: SSD and keys of another layer",
        F,
        kind(u32(1, 4) + u32(49, 1) + heads(1, 2, 8, 8) + u32(116, 4)),
    ),
    ("kind: attention and SSD without taps", F, kind(u32(1, 4) + heads(1, 2, 8, 8))),
    ("kind: no mixer with RoPE", F, kind(u32(1, 5))),
    ("kind: no mixer with taps", F, kind(NONE + u32(116, 4))),
    ("kind: no mixer with heads", F, kind(NONE + heads(1, 2, 8, 8))),
    ("kind: no mixer and no FFN", F, kind(NONE + u32(64, 0))),
    ("kind: no mixer with a parallel FFN", F, kind(u32(1, 5) + u32(16, 1) + u32(37, 255))),
    ("kind: form of experts 0", F, kind(u32(91, 0))),
    ("kind: form of experts 3", F, kind(u32(91, 3))),
    ("kind: plain experts without experts", F, kind(u32(91, 1))),
    ("kind: heads of the delta rule with attention", F, kind(heads(1, 2, 8, 8))),
    ("kind: order of value heads with attention", F, kind(u32(126, 1))),
    ("kind: a convolution without taps", F, kind(u32(1, 1) + u32(37, 255))),
    ("kind: taps of attention", F, kind(u32(116, 3))),
    ("kind: 1 tap", F, kind(u32(1, 1) + u32(37, 255) + u32(116, 1))),
    ("kind: 17 taps", F, kind(u32(1, 1) + u32(37, 255) + u32(116, 17))),
    ("kind: a convolution with RoPE", F, kind(u32(1, 1) + u32(116, 3))),
    (
        "kind: a convolution with a window",
        F,
        kind(u32(1, 1) + u32(36, 5) + u32(37, 255) + u32(116, 3)),
    ),
    (
        "kind: a convolution with a QK norm",
        F,
        kind(u32(1, 1) + u32(37, 255) + u32(48, 1) + u32(116, 3)),
    ),
    (
        "kind: a convolution with fewer heads",
        F,
        kind(u32(1, 1) + u32(32, 1) + u32(37, 255) + u32(116, 3)),
    ),
    (
        "kind: a convolution with a scale",
        F,
        kind(u32(1, 1) + u32(37, 255) + f32(38, 0.5) + u32(116, 3)),
    ),
    ("kind: unknown key behind the last", U, kind(u32(129, 0))),
    ("kind: unknown key of a new type", U, kind(struct.pack("<HBB", 35, 9, 0))),
    ("kind: a later key first", F, kind(u32(36, 0) + u32(16, 0))),
    ("kind: parallel 2", F, kind(u32(16, 2))),
    ("kind: heads 0", F, kind(u32(32, 0))),
    ("kind: heads above the header's", F, kind(u32(32, 3))),
    ("kind: KV heads above the header's", F, kind(u32(33, 2))),
    ("kind: head dimension", F, kind(u32(34, 5))),
    ("kind: rotated beyond the head", F, kind(u32(34, 3))),
    ("kind: no such RoPE set", F, kind(u32(37, 2))),
    ("kind: RoPE set 256", F, kind(u32(37, 256))),
    ("kind: scale 0", F, kind(f32(38, 0.0))),
    ("kind: cap nan", F, kind(f32(39, NAN))),
    ("kind: beta without a step", F, kind(f32(40, 0.1))),
    ("kind: a step without a beta", F, kind(u32(41, 7))),
    ("kind: step 0", F, kind(f32(40, 0.1) + u32(41, 0))),
    ("kind: slopes for 3 heads", F, kind(f32s(43, 3, 0.5, 0.5, 0.5))),
    ("kind: slopes for fewer heads", F, kind(u32(32, 1) + f32s(43, 2, 0.5, 0.5))),
    ("kind: slope negative", F, kind(f32s(43, 2, 0.5, -0.5))),
    ("kind: slope infinite", F, kind(f32s(43, 2, 0.5, float("inf")))),
    ("kind: slopes of another type", F, kind(f32(43, 0.5))),
    ("kind: QK norm", F, kind(u32(48, 4))),
    ("kind: keys of itself", F, kind(u32(49, 1))),
    ("kind: keys of a layer that is not before", F, kind(u32(49, 2))),
    ("kind: keys of another window", F, kind(b"", u32(36, 7) + SHARED, of_layers=b"\0\1")),
    ("kind: keys with other heads", F, kind(b"", u32(34, 2) + SHARED, of_layers=b"\0\1")),
    ("kind: keys with a V norm", F, kind(b"", SHARED + u32(57, 1), of_layers=b"\0\1")),
    ("kind: keys of a convolution", F, kind(CONV, SHARED, of_layers=b"\0\1")),
    ("kind: keys that are shared on", F, kind(SHARED, SHARED, of_layers=b"\0\1")),
    ("kind: form of the FFN", F, kind(u32(64, 3))),
    ("kind: FFN 0", F, kind(u32(65, 0))),
    ("kind: FFN above the header's", F, kind(u32(65, 13))),
    ("kind: activation", F, kind(u32(66, 6))),
    ("kind: factor negative", F, kind(f32(128, -1.0))),
    ("kind: the second is bad", F, kind(b"", u32(16, 2))),
    ("rope: 3 bytes", F, lambda d: grow(d, b"ROPE", b"\1\0\0")),
    ("rope: none", F, rope()),
    ("rope: 65", F, rope(count=65)),
    ("rope: reserved", F, rope(rope_set(0), ONE, reserved=1)),
    ("rope: half a set", F, rope(rope_set(0), ONE[:-1])),
    ("rope: half a head", F, rope(rope_set(0), ONE[:11])),
    ("rope: behind the last", F, rope(rope_set(0), ONE, behind=b"\0\0\0\0")),
    ("rope: first number 1", F, rope(ONE)),
    ("rope: numbers with a gap", F, rope(rope_set(0), ONE, rope_set(3))),
    ("rope: numbers descend", F, rope(rope_set(0), ONE, rope_set(0, least_context=4))),
    ("rope: first context not 0", F, rope(rope_set(0, least_context=4), ONE)),
    ("rope: contexts equal", F, rope(rope_set(0), rope_set(0), ONE)),
    ("rope: other pairs", F, rope(rope_set(0), rope_set(0, 1, least_context=4), ONE)),
    ("rope: other pairing", F, rope(rope_set(0), rope_set(0, pairing=1, least_context=4), ONE)),
    ("rope: pairing 2", F, rope(rope_set(0, pairing=2), ONE)),
    ("rope: no pairs", F, rope(rope_set(0, 0), ONE)),
    ("rope: 2049 pairs", F, rope(rope_set(0, 2049), ONE)),
    ("rope: more pairs than the heads have", F, rope(rope_set(0, 3), ONE)),
    ("rope: a set is missing", F, rope(rope_set(0))),
    ("rope: factor 0", F, rope(rope_set(0, factor=0.0), ONE)),
    ("rope: factor infinite", F, rope(rope_set(0, factor=float("inf")), ONE)),
    ("rope: frequency negative", F, rope(rope_set(0, frequency=-1.0), ONE)),
    ("rope: frequency nan", F, rope(rope_set(0, frequency=NAN), ONE)),
]
