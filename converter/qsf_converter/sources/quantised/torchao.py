"""torchao's matrices in safetensors files: NAME._weight_qdata, _weight_scale, _weight_zero_point.

As prototype/safetensors of torchao names them: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor,
and Int4Tensor, whose two codes in a byte are signed and whose scales and zeros, numbers that are
added, lie [groups, rows]. Its pickles are instances of its classes, which nothing here runs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from qsf.errors import QsfConversionError
from qsf_converter.sources.checkpoint import RawArray, SourceTensor
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised.matrix import Matrix, scaled
from qsf_converter.sources.quantised.stored import FLOATS, FP8, Stored, unpack

_CODES: Final = "._weight_qdata"


def matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices. Raises QsfConversionError for a layout that cannot be read."""
    del own  # the tensors say it all
    for codes in stored.tensors.values():
        if not codes.name.endswith(_CODES):
            continue
        base = codes.name.removesuffix(_CODES)
        name, scale, zero = (f"{base}.{part}" for part in ("weight", "_weight_scale",
                                                           "_weight_zero_point"))  # fmt: skip
        if scale not in stored.tensors or codes.dtype not in (*FP8, "I8", "U8"):
            raise QsfConversionError(
                f"tensor {codes.name} is {codes.dtype} of torchao in an order for one GPU; convert "
                "the original, or save it with Int4WeightOnlyConfig(int4_packing_format='plain')"
            )
        has_zero = zero in stored.tensors
        parts = (codes.name, scale, *([zero] if has_zero else []))
        if has_zero and stored.tensors[zero].dtype in FLOATS:
            yield _int4(stored, name, codes, parts)
        else:
            yield scaled(stored, name, codes, parts)


def _int4(stored: Stored, name: str, codes: SourceTensor, parts: tuple[str, ...]) -> Matrix:
    scale, zero = (stored.need(part, FLOATS, of=name) for part in parts[1:])
    n_rows, n_cols = codes.shape[0], 2 * codes.shape[-1]
    n_groups = scale.shape[0] if scale.shape else 0
    if scale.shape != (n_groups, n_rows) or zero.shape != scale.shape or n_cols % (n_groups or 1):
        raise QsfConversionError(
            f"tensor {scale.name} of shape {list(scale.shape)} has no scales of {name}"
        )

    def read(start: int, stop: int) -> RawArray:
        values = unpack(stored.rows(codes.name, start, stop), 4).astype(np.float32)
        values -= 16 * (values > 7)
        for part, join in ((scale.name, np.multiply), (zero.name, np.add)):
            of_groups = stored.columns(part, start, stop).T.astype(np.float32)
            join(values, np.repeat(of_groups, n_cols // n_groups, axis=1), out=values)
        return values

    return Matrix(name, (n_rows, n_cols), "INT4", parts, read)
