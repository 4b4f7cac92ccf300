"""Makes tiny valid .qsf files from a seed, and repairs checksums after an attack."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from qsf.file.kinds import LayerKind, RopeSet
from qsf.file.layout import (
    EMBEDDING_UNIT,
    FINAL_UNIT,
    OWN_TABLE_UNIT,
    UNIT_ENTRY,
    Activation,
    Arch,
    Architecture,
    Compression,
    Dtype,
    Header,
    Layout,
    Norm,
    Positions,
    TensorType,
    UnitId,
    layer_unit,
    tensor_bytes,
)
from qsf.file.writer import Writer

T = TensorType


def tiny_header(**changes: object) -> Header:
    """Return a header of a model with two layers of dimension 8."""
    values: dict[str, object] = {
        "architecture": Architecture.LLAMA, "n_layers": 2, "dim": 8, "n_heads": 2,
        "n_kv_heads": 1, "n_vocab": 20, "max_tokens": 16, "ffn_dim": 12, "head_dim": 4,
        "dtype": Dtype.Q4, "activation": Activation.SILU, "norm": Norm.RMS,
        "positions": Positions.ROPE, "rope_theta": 10000.0, "bos_id": 1, "eos_id": 2,
        "pad_id": None,
    }  # fmt: skip
    return Header(**{**values, **changes})  # type: ignore[arg-type]


def layer_tensors(h: Header, dtype: int) -> list[tuple[int, int, int, int, int]]:
    """Return (type, rows, cols, dtype, layout) of a plain layer, in order."""
    q, kv = h.n_heads * h.head_dim, (h.n_kv_heads or h.n_heads) * h.head_dim
    tiles, vector = Layout.TILES, Layout.VECTOR
    return [
        (T.ATTN_NORM, 1, h.dim, Dtype.F32, vector),
        (T.Q, q, h.dim, dtype, tiles),
        (T.K, kv, h.dim, dtype, tiles),
        (T.V, kv, h.dim, dtype, tiles),
        (T.ATTN_OUT, h.dim, q, dtype, tiles),
        (T.FFN_NORM, 1, h.dim, Dtype.F16, vector),
        (T.FFN_GATE, h.ffn_dim, h.dim, dtype, tiles),
        (T.FFN_UP, h.ffn_dim, h.dim, dtype, tiles),
        (T.FFN_DOWN, h.dim, h.ffn_dim, dtype, tiles),
    ]


def expert_tensors(h: Header, kind: LayerKind, dtype: int) -> list[tuple[int, int, int, int, int]]:
    """Return (type, rows, cols, dtype, layout) of an expert, in order."""
    return [
        (T.FFN_GATE, kind.expert_dim, h.dim, dtype, Layout.TILES),
        (T.FFN_UP, kind.expert_dim, h.dim, dtype, Layout.TILES),
        (T.FFN_DOWN_BIAS, 1, h.dim, Dtype.F32, Layout.VECTOR),
        (T.FFN_DOWN, h.dim, kind.expert_dim, dtype, Layout.TILES),
    ]


def fill(rng: random.Random, n_bytes: int, is_dull: bool) -> bytes:
    """Return bytes that compress well (dull) or not at all."""
    return bytes(n_bytes) if is_dull else rng.randbytes(n_bytes)


def write_tensors(
    w: Writer,
    rng: random.Random,
    tensors: list[tuple[int, int, int, int, int]],
    *,
    is_dull: bool = False,
) -> dict[tuple[int, int], bytes]:
    """Write the tensors of the open unit in uneven pieces; return the bytes by (unit, type)."""
    out = {}
    for kind, n_rows, n_cols, dtype, layout in tensors:
        data = fill(rng, tensor_bytes(n_rows, n_cols, dtype, layout), is_dull)
        w.begin_tensor(kind, n_rows, n_cols, dtype, layout)
        cut = rng.randrange(len(data) + 1)
        w.write(data[:cut])
        w.write(memoryview(data)[cut:])
        w.end_tensor()
        out[kind, n_rows] = data
    return out


def write_tiny(
    path: Path,
    seed: int = 0,
    *,
    header: Header | None = None,
    arch: Arch | None = None,
    dtype: int = Dtype.Q4,
    compression: int = Compression.NONE,
    is_dull: bool = False,
    head_rows: int = 0,
    sections: dict[str, bytes] | None = None,
    layer_kinds: Sequence[LayerKind] = (),
    rope_sets: Sequence[RopeSet] = (),
) -> dict[tuple[UnitId, int], bytes]:
    """Write a small valid file; return every tensor's bytes by (unit, type)."""
    rng = random.Random(seed)
    h = tiny_header() if header is None else header
    a = Arch() if arch is None else arch
    written: dict[tuple[UnitId, int], bytes] = {}

    def unit(id: UnitId, tensors: list[tuple[int, int, int, int, int]], packing: int) -> None:
        w.begin_unit(id, dtype=dtype, compression=packing, importance=0.5)
        for (kind, _), data in write_tensors(w, rng, tensors, is_dull=is_dull).items():
            written[id, kind] = data
        w.end_unit()

    with Writer(path, h, a, layer_kinds=layer_kinds, rope_sets=rope_sets) as w:
        unit(
            EMBEDDING_UNIT,
            [(T.EMBEDDING, h.n_vocab, h.dim, Dtype.Q8, Layout.TILES)],
            Compression.NONE,
        )
        for i in range(h.n_layers):
            unit(layer_unit(i), layer_tensors(h, dtype), compression)
            for e in range(layer_kinds[i].n_experts if layer_kinds else 0):
                of_expert = dtype if e % 3 < 2 else Dtype.Q8  # several templates in a layer
                w.begin_unit(layer_unit(i).of_expert(e), dtype=of_expert, importance=0.1 * e)
                write_tensors(w, rng, expert_tensors(h, layer_kinds[i], of_expert))
                w.end_unit()
        final = [(int(T.FINAL_NORM), 1, h.dim, int(Dtype.F32), int(Layout.VECTOR))]
        if not a.tied_head:
            n_first = head_rows or h.n_vocab
            final.append((T.HEAD, n_first, h.dim, Dtype.Q8, Layout.TILES))
            if n_first < h.n_vocab:
                rest = (T.HEAD_REST, h.n_vocab - n_first, h.dim, Dtype.Q4_NL, Layout.TILES)
                final.append(rest)
        unit(FINAL_UNIT, final, Compression.NONE)
        if a.own_width:
            own = (T.OWN_TABLE, h.n_vocab, h.n_layers * a.own_width, Dtype.Q8, Layout.TILES)
            unit(OWN_TABLE_UNIT, [own], Compression.NONE)
        if h.positions == Positions.LEARNED:
            w.add_section("WPOS", rng.randbytes(h.max_tokens * h.dim * 2))
        for tag, data in (sections or {}).items():
            w.add_section(tag, data)
    return written


def repair(data: bytes | bytearray) -> bytes:
    """Return the file with every checksum made right for what it now says, as far as possible.

    This is what an attacker would do, and what makes mutations reach the rules behind the
    checksums. Extents outside the file are left alone.
    """
    d = bytearray(data)
    if len(d) < 128:
        return bytes(d)
    struct.pack_into("<I", d, 92, len(d) & 0xFFFFFFFF)
    directory_off, n_sections = struct.unpack_from("<QI", d, 100)
    n_sections = min(n_sections, 256)
    if directory_off + 32 * n_sections <= len(d):
        entries = range(directory_off, directory_off + 32 * n_sections, 32)
        for at in entries:
            if bytes(d[at : at + 4]) == b"UNIT":
                _repair_units(d, *struct.unpack_from("<QQ", d, at + 8))
        for at in entries:
            off, n_bytes = struct.unpack_from("<QQ", d, at + 8)
            if off + n_bytes <= len(d):
                crc32 = zlib.crc32(d[off : off + n_bytes])
                struct.pack_into("<I", d, at + 24, crc32)
                if d[at : at + 4] == b"UNIT":
                    struct.pack_into("<I", d, 120, crc32)
        crc32 = zlib.crc32(d[directory_off : directory_off + 32 * n_sections])
        struct.pack_into("<I", d, 112, crc32)
    struct.pack_into("<I", d, 96, zlib.crc32(d[:96]))
    struct.pack_into("<I", d, 124, zlib.crc32(d[100:124]))
    return bytes(d)


def _repair_units(d: bytearray, off: int, n_bytes: int) -> None:
    if off + n_bytes > len(d):
        return
    for at in range(off, off + n_bytes - UNIT_ENTRY.size + 1, UNIT_ENTRY.size):
        unit_off, stored_bytes = struct.unpack_from("<QQ", d, at)
        if unit_off + stored_bytes <= len(d):
            crc32 = zlib.crc32(d[unit_off : unit_off + stored_bytes])
            struct.pack_into("<I", d, at + 24, crc32)
