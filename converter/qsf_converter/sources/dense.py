"""The dense layers that sentence-transformers computes behind the pooling, as one matrix.

They are linear, as the mean is: their product makes the same vectors when it is applied to the
hidden states.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import reduce
from pathlib import Path

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    Float32Array,
    RawArray,
    SourceTensor,
    WrappedCheckpoint,
    to_float32,
)
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.families.encoders import DENSE
from qsf_converter.sources.metadata import read_json_object

_GGUF_NAMES = ("dense_2.weight", "dense_3.weight")
_WEIGHT = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"


class DenseCheckpoint(WrappedCheckpoint):
    def __init__(
        self,
        stored: Checkpoint,
        matrices: Sequence[Float32Array],
        without: Container[str] = _GGUF_NAMES,
    ) -> None:
        """Multiply ``matrices`` [out, in], of which the first reads the pooled vector, and leave
        out the stored tensors ``without``.
        """
        super().__init__(stored)
        try:
            product = reduce(lambda done, next_: next_ @ done, (m.astype(float) for m in matrices))
        except ValueError as error:
            raise QsfConversionError(f"its dense layers do not fit together: {error}") from error
        self._dense = product.astype(np.float32)
        shape = self._dense.shape
        self._tensors = {
            **{name: t for name, t in stored.tensors.items() if name not in without},
            DENSE: SourceTensor(DENSE, shape, "F32", self._dense.nbytes),
        }

    def read_rows(self, name: str, start: int, stop: int) -> RawArray:
        return (
            self._dense[start:stop] if name == DENSE else self._stored.read_rows(name, start, stop)
        )


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
    return DenseCheckpoint(checkpoint, matrices) if matrices else checkpoint


def with_dense_of_gguf(checkpoint: Checkpoint) -> Checkpoint:
    matrices = [
        to_float32(checkpoint.read_rows(name, 0, checkpoint.tensors[name].n_rows))
        for name in _GGUF_NAMES
        if name in checkpoint.tensors
    ]
    return DenseCheckpoint(checkpoint, matrices) if matrices else checkpoint
