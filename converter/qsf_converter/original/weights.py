"""The weights of a unit of the original model, and their products."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from qsf.file.kinds import LayerKind
from qsf.file.layout import TensorType
from qsf_converter.sources.checkpoint import Float32Array

T = TensorType

BIASES: Final = {
    T.Q: T.Q_BIAS,
    T.K: T.K_BIAS,
    T.V: T.V_BIAS,
    T.ATTN_OUT: T.ATTN_OUT_BIAS,
    T.FFN_GATE: T.FFN_GATE_BIAS,
    T.FFN_UP: T.FFN_UP_BIAS,
    T.FFN_DOWN: T.FFN_DOWN_BIAS,
    T.ATTN_NORM: T.ATTN_NORM_BIAS,
    T.FFN_NORM: T.FFN_NORM_BIAS,
    T.FINAL_NORM: T.FINAL_NORM_BIAS,
    T.INPUT_NORM: T.INPUT_NORM_BIAS,
}


class Weights(dict[TensorType, Float32Array]):
    """The tensors of a unit by their types, and for a layer its kind.

    ``expert`` reads the tensors of an expert of the layer by its number. ``layer`` is the layer's.
    """

    def __init__(
        self,
        tensors: Mapping[TensorType, Float32Array],
        kind: LayerKind,
        expert: Callable[[int], Weights] | None = None,
        *,
        layer: int = 0,
    ) -> None:
        super().__init__(tensors)
        self.kind = kind
        self.expert = expert
        self.layer = layer

    def changed(
        self,
        changes: Mapping[TensorType, Float32Array] | None = None,
        expert: Callable[[int], Weights] | None = None,
    ) -> Weights:
        """Return a copy with some tensors replaced, or with other experts."""
        changed = {**self, **(changes or {})}
        return Weights(changed, self.kind, expert or self.expert, layer=self.layer)

    @property
    def is_shared_norm(self) -> bool:
        """True if attention and FFN read the same normalised input."""
        return self.kind.is_parallel and T.FFN_NORM not in self


def linear(w: Weights, kind: TensorType, x: Float32Array) -> Float32Array:
    """Return x [n_tokens, n_inputs] times the matrix, plus its bias if there is one."""
    y: Float32Array = x @ w[kind].T
    bias = BIASES.get(kind)
    if bias is not None and bias in w:
        y += w[bias]
    return y
