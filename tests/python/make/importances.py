"""Rewrites a .qsf file with other importances of layers, or without some of the layers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from make.stored import Reader
from qsf.file.layout import EMBEDDING_UNIT, FINAL_UNIT, Compression, Role, layer_unit
from qsf.file.writer import Writer

_OPTIONAL = ("META", "TEXT", "TOKN", "CHAT", "WPOS")


def rewrite(
    source: Path,
    out: Path,
    *,
    importances: Sequence[float] | None = None,
    without: Collection[int] = (),
) -> Path:
    """Copy ``source`` to ``out``; ``importances`` [n_layers], layers of ``without`` left out."""
    with Reader(source) as reader:
        n_layers = reader.header.n_layers
        kept = [layer for layer in range(n_layers) if layer not in without]
        header = replace(reader.header, n_layers=len(kept))
        units = [(EMBEDDING_UNIT, reader.embedding)]
        units += [(layer_unit(i), reader.layers[layer]) for i, layer in enumerate(kept)]
        units += [(FINAL_UNIT, reader.final)]
        with Writer(out, header, reader.arch) as writer:
            for new_id, unit in units:
                importance = unit.importance
                if importances is not None and unit.id.role == Role.LAYER:
                    importance = importances[unit.id.layer]
                writer.begin_unit(
                    new_id,
                    dtype=unit.dtype,
                    compression=Compression(unit.compression),
                    importance=importance,
                )
                for tensor in unit.tensors:
                    writer.begin_tensor(
                        tensor.type,
                        tensor.n_rows,
                        tensor.n_cols,
                        tensor.dtype,
                        tensor.layout,
                        tensor.index,
                    )
                    writer.write(reader.read_tensor(tensor))
                    writer.end_tensor()
                writer.end_unit()
            for section in reader.sections.values():
                if section.tag in _OPTIONAL:
                    writer.add_section(section.tag, reader.read_section(section.tag))
    return out
