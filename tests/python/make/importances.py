"""Rewrites a .qsf file with other importances of layers, or without some of the layers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from qsf.file.layout import Compression
from qsf.file.reader import Reader
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
        kept = [0, *(i + 1 for i in range(n_layers) if i not in without), n_layers + 1]
        header = replace(reader.header, n_layers=len(kept) - 2)
        with Writer(out, header, reader.arch) as writer:
            for new_idx, unit_idx in enumerate(kept):
                unit = reader.unit(unit_idx)
                importance = unit.importance
                if importances is not None and 1 <= unit_idx <= n_layers:
                    importance = importances[unit_idx - 1]
                writer.begin_unit(
                    new_idx,
                    dtype=unit.dtype,
                    compression=Compression(unit.compression),
                    importance=importance,
                )
                for tensor in (t for t in reader.tensors if t.unit_idx == unit_idx):
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
