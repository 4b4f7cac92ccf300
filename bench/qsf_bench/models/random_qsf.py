"""A .qsf file of a shape and type with random weights, without a checkpoint.

For measuring speed and memory with every type, without making floats for most weights. A pool of
tiles is quantised once from normally distributed weights, and every matrix takes its tiles from
the pool, beginning at a random place. So codes and scales look like a model's, activations stay
finite, and any size needs little memory. The text of such a model is meaningless.

In a mixture of experts, tokens choose experts by their rows of the embedding, which are so large
that layers hardly change the routers' inputs. Rows of the first half of the vocabulary have a
common part and a part that drifts from row to row. If they are fed one after the other,
neighbouring tokens choose similar experts, as in Qwen3-30B-A3B: 39 % of the experts of the token
before, and least-recently-used caches of 6, 11, 17, 22, 34 and 45 % of the experts hit 38, 59, 72,
78, 87 and 91 % where recorded choices of that model give 38, 57, 71, 80, 92 and 96 % (6 of 128
chosen, 150 tokens). Rows of the other half are independent: any expert is as likely as the others,
the worst case. Not realistic: all layers are alike, and one layer's choice does not predict the
next one's, although the next router, applied one layer early, would be nearly always right.

Layers may have no weights: their matrices are holes in the file, zeros without room on the disk,
so a model of 70 B parameters is made in seconds. Such a file tests opening and running in little
memory, but not speed, because a hole is read faster than a disk.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.file.blocks import pack_tokenizer
from qsf.file.layout import (
    BLOCK,
    EMBEDDING_UNIT,
    EXACT,
    FINAL_UNIT,
    FINE,
    OWN_TABLE_UNIT,
    TILE_ROWS,
    Compression,
    Dtype,
    Layout,
    Role,
    UnitId,
    layer_unit,
    tensor_bytes,
)
from qsf.file.writer import Writer
from qsf_bench.models.shapes import (
    Entry,
    Shape,
    T,
    expert_entries,
    experts_of,
    facts_of,
    final_entries,
    layer_entries,
)
from qsf_converter.rounding.plan import DEFAULT_EMBED_TYPE, parse_quant_type
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import mxfp4_tiles
from qsf_converter.sources.checkpoint import MXFP4_BLOCK, MXFP4_COLS, MXFP4_VALUES

GENERATOR: Final = 3  # increased when the same arguments give another file
WEIGHT_STD: Final = 0.02
POOL_TILES: Final = 4096
# Embedding rows of a mixture of experts: their size, and the shares of their parts.
_ROUTING_STD: Final = 50.0
_COMMON_SHARE: Final = 0.5
_DRIFTING_SHARE: Final = 0.25
_DRIFT: Final = math.exp(-1 / 5)  # share that the next row keeps of the drifting part


class Weights:
    """Random weights as the bytes of a file."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pools: dict[Dtype, memoryview] = {}

    def _normal(self, n_rows: int, n_cols: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._random.standard_normal((n_rows, n_cols), np.float32)
        values *= np.float32(WEIGHT_STD)
        return values

    def positions(self, n_rows: int, n_cols: int) -> bytes:
        """Return rows of f16 without tiles."""
        return self._normal(n_rows, n_cols).astype("<f2").tobytes()

    def write_matrix(self, writer: Writer, dtype: Dtype, n_rows: int, n_cols: int) -> None:
        """Write the tiles of a matrix; a last tile row with padding is made separately."""
        tile_bytes = tensor_bytes(TILE_ROWS, BLOCK, dtype, Layout.TILES)
        if dtype not in self._pools:
            rows = self._normal(TILE_ROWS, BLOCK * POOL_TILES)
            self._pools[dtype] = memoryview(self._tiles(dtype, rows))
        pool_view = self._pools[dtype]
        whole_rows = n_rows // TILE_ROWS * TILE_ROWS if n_cols % BLOCK == 0 else 0
        left = tensor_bytes(whole_rows, n_cols, dtype, Layout.TILES)
        at = int(self._random.integers(POOL_TILES)) * tile_bytes
        while left:
            part = pool_view[at : at + left]
            writer.write(part)
            left -= len(part)
            at = 0
        for row in range(whole_rows, n_rows, 1024):
            rows = self._normal(min(1024, n_rows - row), n_cols)
            writer.write(self._tiles(dtype, rows))

    def write_routing_rows(self, writer: Writer, dtype: Dtype, n_rows: int, n_cols: int) -> None:
        """Write the tiles of an embedding by which tokens choose experts."""
        shares = (_COMMON_SHARE, _DRIFTING_SHARE, 1 - _COMMON_SHARE - _DRIFTING_SHARE)
        of_common, of_drifting, of_own = np.sqrt(np.array(shares, np.float32))
        common, drifting = self._random.standard_normal((2, n_cols), np.float32)
        for first in range(0, n_rows, 1024):
            rows = self._random.standard_normal((min(1024, n_rows - first), n_cols), np.float32)
            steps = self._random.standard_normal(rows.shape, np.float32)
            for row in range(min(len(rows), (n_rows + 1) // 2 - first)):
                drifting = _DRIFT * drifting + np.sqrt(1 - _DRIFT**2) * steps[row]
                rows[row] = of_common * common + of_drifting * drifting + of_own * rows[row]
            writer.write(self._tiles(dtype, np.float32(_ROUTING_STD) * rows))

    def _tiles(self, dtype: Dtype, rows: NDArray[np.float32]) -> bytes:
        if dtype != Dtype.MXFP4:
            return quantise_rows(dtype, rows)
        # Types without rounding: random codes, with a scale that makes weights of the usual size.
        raw = np.empty((len(rows), -(-rows.shape[1] // MXFP4_COLS)), MXFP4_BLOCK)
        raw["scale"] = 127 + round(math.log2(WEIGHT_STD / MXFP4_VALUES.std()))
        raw["codes"] = self._random.integers(0, 256, (*raw.shape, MXFP4_COLS // 2))
        return mxfp4_tiles(raw)


def embed_type_of(quant_type: str, embed_type: str | None = None) -> Dtype:
    """Return the type of embedding and head: the requested one, else the default of qsf-convert."""
    default = "f16" if quant_type == "f16" else DEFAULT_EMBED_TYPE
    return parse_quant_type(embed_type or default, option="type of embeddings")


def _units(
    shape: Shape, quant_type: Dtype, embed_type: Dtype
) -> list[tuple[UnitId, Dtype, list[Entry]]]:
    """The units in the order of the file: the experts of a layer follow it."""
    embedding: list[Entry] = [(T.EMBEDDING, shape.n_vocab, shape.dim)]
    expert_type = Dtype.MXFP4 if shape.family == "gpt_oss" else quant_type
    units = [(EMBEDDING_UNIT, embed_type, embedding)]
    for layer in map(layer_unit, range(shape.n_layers)):
        units.append((layer, quant_type, layer_entries(shape, layer.layer)))
        units += [
            (layer.of_expert(expert), expert_type, expert_entries(shape))
            for expert in range(experts_of(shape, layer.layer))
        ]
    units.append((FINAL_UNIT, embed_type, final_entries(shape)))
    if shape.own_width:
        own = (T.OWN_TABLE, shape.n_vocab, shape.n_layers * shape.own_width)
        units.append((OWN_TABLE_UNIT, embed_type, [own]))
    return units


def _dtype_of(entry: Entry, dtype: Dtype) -> Dtype:
    """Matrices of EXACT are f16 in a unit of any type, those of FINE have 8 bits at least."""
    if entry[0] in EXACT:
        return Dtype.F16
    return Dtype.Q8 if entry[0] in FINE and dtype not in (Dtype.F16, Dtype.F32) else dtype


def _meta(seed: int) -> bytes:
    meta = {"source": {"name": "random weights of python -m qsf.bench", "seed": seed}}
    return json.dumps(meta).encode()


def _data_bytes(entry: Entry, dtype: Dtype) -> int:
    _, n_rows, n_cols = entry
    dtype = _dtype_of(entry, dtype)
    return tensor_bytes(n_rows, n_cols, dtype, Layout.TILES) if n_rows else 4 * n_cols


def _size(shape: Shape, quant_type: Dtype, embed_type: Dtype) -> tuple[int, int]:
    """Return the number of weights, and the bytes of all tensors."""
    n_positions = shape.max_tokens * shape.dim if shape.family == "gpt2" else 0
    n_values, n_bytes = n_positions, 2 * n_positions
    for _, unit_dtype, entries in _units(shape, quant_type, embed_type):
        n_values += sum(max(1, n_rows) * n_cols for _, n_rows, n_cols in entries)
        n_bytes += sum(_data_bytes(entry, unit_dtype) for entry in entries)
    return n_values, n_bytes


def qsf_bytes(shape: Shape, quant_type: str, *, embed_type: str | None = None) -> int:
    """Return the bytes of all tensors, without compression."""
    return _size(shape, parse_quant_type(quant_type), embed_type_of(quant_type, embed_type))[1]


def write_model(
    out: Path,
    shape: Shape,
    quant_type: Dtype,
    embed_type: Dtype,
    *,
    tokenizer_from: Path | None = None,
    seed: int = 0,
    compression: Compression = Compression.NONE,
    n_real_layers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the file ``out`` atomically.

    The layers from ``n_real_layers`` on are holes. ``progress`` is called with bytes written and
    all bytes; with ``compression`` the latter is too large. Raises QsfIOError if the system
    refuses, such as for a full disk.
    """
    total_bytes = _size(shape, quant_type, embed_type)[1]

    def report_bytes(done_bytes: int) -> None:
        if progress is not None:
            progress(min(done_bytes, total_bytes), total_bytes)

    weights = Weights(seed)
    facts = facts_of(shape)
    with Writer(
        out,
        replace(facts.header, dtype=quant_type),
        facts.arch,
        layer_kinds=facts.layer_kinds,
        rope_sets=facts.rope_sets,
        progress=report_bytes,
        needed_bytes=total_bytes,
    ) as writer:
        for unit, dtype, entries in _units(shape, quant_type, embed_type):
            is_layer = unit.role == Role.LAYER
            is_end = unit.role in (Role.EMBEDDING, Role.FINAL, Role.OWN_TABLE)
            is_real = is_end or n_real_layers is None or unit.layer < n_real_layers
            writer.begin_unit(
                unit, dtype=dtype, compression=compression if is_layer else Compression.NONE
            )
            if unit.role == Role.EMBEDDING and shape.n_experts:
                _write_routing_rows(writer, weights, dtype, entries[0])
            else:
                _write_unit(writer, weights if is_real else None, dtype, entries)
        if shape.family == "gpt2":
            writer.add_section("WPOS", weights.positions(shape.max_tokens, shape.dim))
        if tokenizer_from is not None:
            from qsf_converter.sources import metadata
            from qsf_converter.text.tables import tables_of

            tokenizer = metadata.tokenizer_bytes(tokenizer_from)
            if tokenizer is not None:
                tables, _ = tables_of(tokenizer, None, None)
                if tables is not None:
                    writer.add_section("TEXT", tables)
                writer.add_section("TOKN", pack_tokenizer(tokenizer))
        writer.add_section("META", _meta(seed))


def _write_routing_rows(writer: Writer, weights: Weights, dtype: Dtype, entry: Entry) -> None:
    kind, n_rows, n_cols = entry
    writer.begin_tensor(kind, n_rows, n_cols, dtype, Layout.TILES)
    weights.write_routing_rows(writer, dtype, n_rows, n_cols)
    writer.end_tensor()
    writer.end_unit()


def _write_unit(
    writer: Writer, weights: Weights | None, unit_dtype: Dtype, entries: list[Entry]
) -> None:
    """Write the tensors of a unit: norms are one, biases zero, matrices random or holes."""
    for kind, n_rows, n_cols in entries:
        dtype = _dtype_of((kind, n_rows, n_cols), unit_dtype)
        if n_rows:
            writer.begin_tensor(kind, n_rows, n_cols, dtype, Layout.TILES)
            if weights is None:
                writer.write_zeros(tensor_bytes(n_rows, n_cols, dtype, Layout.TILES))
            else:
                weights.write_matrix(writer, dtype, n_rows, n_cols)
        else:
            value = 0 if kind.name.endswith("BIAS") else 1
            writer.begin_tensor(kind, 1, n_cols, Dtype.F32, Layout.VECTOR)
            writer.write(np.full(n_cols, value, "<f4").tobytes())
        writer.end_tensor()
    writer.end_unit()
