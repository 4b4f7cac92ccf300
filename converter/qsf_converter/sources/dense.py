"""The dense layers that sentence-transformers computes behind the pooling, as one matrix.

They are linear, as the mean is: their product makes the same vectors when it is applied to the
hidden states.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    DerivedCheckpoint,
    Float32Array,
    Matrix,
    to_float32,
)
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.families.encoders import DENSE
from qsf_converter.sources.metadata import read_json_object

_GGUF_NAMES = ("dense_2.weight", "dense_3.weight")
_WEIGHT = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"


def with_dense(
    stored: Checkpoint, matrices: Sequence[Float32Array], parts: Sequence[str]
) -> Checkpoint:
    """Return the checkpoint with the product of ``matrices`` [out, in], of which the first reads
    the pooled vector, instead of the tensors ``parts``; as it is without any.
    """
    if not matrices:
        return stored
    try:
        product = reduce(lambda done, next_: next_ @ done, (m.astype(float) for m in matrices))
    except ValueError as error:
        raise QsfConversionError(f"its dense layers do not fit together: {error}") from error
    dense = product.astype(np.float32)
    matrix = Matrix(DENSE, dense.shape, "F32", parts, lambda start, stop: dense[start:stop])
    return DerivedCheckpoint(stored, [matrix])


def with_dense_of_folder(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint with the dense layers of the folder, 2_Dense and so on, if any."""
    matrices = []
    for path in sorted(folder.glob("[0-9]_Dense")):
        config = read_json_object(path / "config.json") or {}
        activation = config.get("activation_function")
        if activation != _IDENTITY or config.get("bias"):
            raise QsfConversionError(
                f"{path.name}: a dense layer with the activation {shown(activation)} and bias "
                f"{shown(config.get('bias'))} is not supported; allowed: Identity, no bias"
            )
        with SafetensorsCheckpoint(path) as dense:
            names = list(dense.tensors)
            if names != [_WEIGHT]:
                raise QsfConversionError(f"{path.name}: it has {shown(names)}, allowed: {_WEIGHT}")
            matrices.append(to_float32(dense.read_rows(_WEIGHT, 0, dense.tensors[_WEIGHT].n_rows)))
    return with_dense(checkpoint, matrices, ())


def with_dense_of_gguf(checkpoint: Checkpoint) -> Checkpoint:
    names = [name for name in _GGUF_NAMES if name in checkpoint.tensors]
    matrices = [
        to_float32(checkpoint.read_rows(name, 0, checkpoint.tensors[name].n_rows)) for name in names
    ]
    return with_dense(checkpoint, matrices, names)
