"""Rewrites a .qsf file with other importances of layers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from make.attacks import layer
from make.qsf_files import repair


def rewrite(source: Path, out: Path, *, importances: Sequence[float]) -> Path:
    """Copy ``source`` to ``out`` with ``importances`` [n_layers]."""
    data = bytearray(source.read_bytes())
    for i, importance in enumerate(importances):
        layer(i, "f", 28, importance)(data)
    out.write_bytes(repair(data))
    return out
