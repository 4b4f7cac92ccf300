"""The .qsf file: everything that other modules use to write and to read one (docs/format.md).

Writing and reading, in short::

    with Writer(path, header, arch) as w:
        w.begin_unit(0, dtype=Dtype.Q8)
        w.begin_tensor(TensorType.EMBEDDING, n_vocab, dim, Dtype.Q8, Layout.TILES)
        w.write(tiles)
        ...

    with Reader(path) as r:
        data = r.read_tensor(r.tensor(1, TensorType.Q))
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.format_layout import (
    BLOCK,
    OUTLIERS_OF,
    TILE_ROWS,
    Activation,
    Arch,
    Architecture,
    Compression,
    Dtype,
    Header,
    Layout,
    Norm,
    Positions,
    RopeScaling,
    Section,
    Stored,
    Tensor,
    TensorType,
    Unit,
    dtype_name,
    tensor_bytes,
)
from qsf.format_outliers import Outlier, PackedOutliers, unpack_outliers
from qsf.format_reader import Reader
from qsf.format_writer import Writer

__all__ = [
    "BLOCK",
    "OUTLIERS_OF",
    "TILE_ROWS",
    "Activation",
    "Arch",
    "Architecture",
    "Compression",
    "Dtype",
    "Header",
    "Layout",
    "Norm",
    "Outlier",
    "PackedOutliers",
    "Positions",
    "Reader",
    "RopeScaling",
    "Section",
    "Stored",
    "Tensor",
    "TensorType",
    "Unit",
    "Writer",
    "dtype_name",
    "tensor_bytes",
    "unpack_outliers",
]
