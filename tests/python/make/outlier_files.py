"""Gives matrices of .qsf files outlier tables: of random entries, or as a test wants; fine ones."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from make.stored import Reader
from make.unit_shapes import unit_order
from qsf.file.kinds import LayerKind, RopeSet
from qsf.file.layout import OUTLIERS_OF, Compression, Dtype, Layout, Role, Tensor
from qsf.file.writer import Writer
from qsf_converter import convert

Entry = tuple[int, int, float]  # row, column, delta
Fields = tuple[int, int, int, int, int, int]  # of `Writer.begin_tensor`
Choose = Callable[[Tensor], list[Entry]]


def naive_table(entries: list[Entry], n_rows: int) -> tuple[bytes, int]:
    """Return an outlier table and its number of entries, straight from docs/format.md."""
    out, first = b"", [0]
    for tile_row in range(-(-n_rows // 16)):
        here = sorted((16 * col + row % 16, d) for row, col, d in entries if row // 16 == tile_row)
        last = -1
        for position, delta in here:
            while position - last > 65535:
                out += struct.pack("<He", 65535, 0.0)
                last += 65535
            out += struct.pack("<He", position - last, delta)
            last = position
        first.append(len(out) // 4)
    return struct.pack(f"<{len(first)}I", *first) + out, first[-1]


def random_entries(seed: int, one_in: int = 100) -> Choose:
    """Return a choice of one weight in ``one_in``, the corners of the matrix among them."""

    def choose(t: Tensor) -> list[Entry]:
        rng = random.Random(f"{seed} {t.unit_idx} {t.type}")
        n = t.n_rows * t.n_cols
        places = {0, n - 1, *rng.sample(range(n), max(0, n // one_in - 2))}
        return [(i // t.n_cols, i % t.n_cols, rng.uniform(-2, 2)) for i in sorted(places)]

    return choose


def _fields(t: Tensor, kind: int, dtype: int, layout: int) -> Fields:
    return kind, t.n_rows, t.n_cols, dtype, layout, t.index


def add_outliers(
    source: Path,
    out: Path,
    choose: Choose,
    compression: Compression | None = None,
    *,
    layer_kinds: Sequence[LayerKind] = (),
    rope_sets: Sequence[RopeSet] = (),
) -> dict[tuple[int, int], list[Entry]]:
    """Copy a file, with outlier tables for its layers' matrices; return them by (unit, type).

    A matrix for which nothing is chosen gets none. Kinds and RoPE sets may be others than before.
    """
    chosen: dict[tuple[int, int], list[Entry]] = {}
    with (
        Reader(source) as r,
        Writer(
            out, r.header, r.arch, layer_kinds=layer_kinds or r.layer_kinds,
            rope_sets=rope_sets or r.rope_sets,
        ) as w,
    ):  # fmt: skip
        for u in r.units:
            is_layer = u.id.role == Role.LAYER
            packing = u.compression if compression is None or not is_layer else compression
            w.begin_unit(u.id, dtype=u.dtype, compression=packing, importance=u.importance)
            tensors = [
                (_fields(t, t.type, t.dtype, t.layout), 0, r.read_tensor(t)) for t in u.tensors
            ]
            for t in u.tensors if is_layer else ():
                entries = choose(t) if t.type in OUTLIERS_OF else []
                if entries:
                    data, n = naive_table(entries, t.n_rows)
                    kind = OUTLIERS_OF[t.type]
                    tensors.append((_fields(t, kind, Dtype.F16, Layout.OUTLIERS), n, data))
                    chosen[u.idx, t.type] = entries
            order = unit_order(u.id.role, is_tied=r.arch.tied_head)
            for fields, n, data in sorted(tensors, key=lambda t: order.index(t[0][0])):
                w.begin_tensor(*fields, n)
                w.write(data)
                w.end_tensor()
            w.end_unit()
        for tag in r.sections:
            if tag in ("WPOS", "META", "TEXT", "TOKN", "CHAT"):
                w.add_section(tag, r.read_section(tag))
    return chosen


# ---- converts models to files that say 16-bit activations, whatever 8 bits cost them ----
def convert_fine(source: Path, out: Path, **options: Any) -> Path:
    """Convert with the options of `convert`; the converter measures this only for GGUF's types."""
    finish = Writer.finish

    def finish_fine(writer: Writer) -> None:
        writer.change_arch(act_bits=16)
        finish(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "finish", finish_fine)
        convert(source, out, **options)
    return out
