"""The binding to the C engine's rounding of matrices: arrays to pointers. No policy."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status, record

Float32Array = NDArray[np.float32]

RULE_SEARCH: int = lib.QSF_RULE_SEARCH
RULE_NEAREST: int = lib.QSF_RULE_NEAREST
RULE_SCALE: int = lib.QSF_RULE_SCALE


@dataclass(frozen=True, slots=True)
class Rounding:
    """How to round; fields as ``qsf_rounding`` in qsf.h."""

    dtype: int
    rule: int
    scale: float
    weights: Float32Array | None


@dataclass(frozen=True, slots=True)
class RoundingSums:
    """The sums of rounding errors; fields as ``qsf_rounding_sums`` in qsf.h.

    ``bad_row`` is None, or the first of the 16 rows with a value that cannot be stored; the sums
    are invalid then.
    """

    n_values: int
    squared_error: float
    source_energy: float
    stored_energy: float
    inner_product: float
    max_error: float
    bad_row: int | None


def quantise_rows(
    how: Rounding, rows: Float32Array, tiles: NDArray[np.uint8], stored: Float32Array | None
) -> RoundingSums:
    """Fill ``tiles`` and ``stored``, as ``qsf_quantise_rows``."""
    n_rows, n_cols = _shape(rows)
    keep, struct = _rounding(how, n_cols)
    sums = ffi.new("qsf_rounding_sums *")
    status = lib.qsf_quantise_rows(
        struct, _floats(rows), n_rows, n_cols, ffi.from_buffer(tiles), tiles.nbytes,
        _output(stored, rows), sums,
    )  # fmt: skip
    del keep
    return _sums(status, sums)


def repack_rows(
    dtype: int, stored: NDArray[np.uint8], n_cols: int, tiles: NDArray[np.uint8]
) -> None:
    """Fill ``tiles`` with the blocks of ``stored`` [n_rows, bytes], as ``qsf_repack_rows``."""
    stored = np.ascontiguousarray(stored)
    check_status(
        lib.qsf_repack_rows(
            dtype,
            ffi.from_buffer(stored),
            len(stored),
            n_cols,
            ffi.from_buffer(tiles),
            tiles.nbytes,
        )
    )


def feedback_rows(
    how: Rounding,
    rows: Float32Array,
    factor: Float32Array,
    order: NDArray[np.int32],
    tiles: NDArray[np.uint8],
    stored: Float32Array | None,
) -> RoundingSums:
    """Fill ``tiles`` and ``stored``, as ``qsf_feedback_rows``."""
    n_rows, n_cols = _shape(rows)
    if factor.shape != (n_cols, n_cols):
        raise QsfArgumentError(f"factor is {list(factor.shape)}: [{n_cols}, {n_cols}] is asked for")
    if order.shape != (n_cols,):
        raise QsfArgumentError(f"order is {list(order.shape)}: [{n_cols}] is asked for")
    order = np.ascontiguousarray(order, np.int32)
    keep, struct = _rounding(how, n_cols)
    work = np.empty(lib.qsf_feedback_work_floats(n_cols), np.float32)
    sums = ffi.new("qsf_rounding_sums *")
    status = lib.qsf_feedback_rows(
        struct, _floats(rows), n_rows, n_cols, _floats(factor),
        ffi.from_buffer("int32_t[]", order), _floats(work), work.size,
        ffi.from_buffer(tiles), tiles.nbytes, _output(stored, rows), sums,
    )  # fmt: skip
    del keep
    return _sums(status, sums)


def _shape(rows: Float32Array) -> tuple[int, int]:
    if rows.ndim != 2 or rows.size == 0:
        raise QsfArgumentError(f"rows are {list(rows.shape)}: [n_rows, n_cols] is asked for")
    return rows.shape[0], rows.shape[1]


def _floats(values: Float32Array) -> Any:
    """A pointer together with its memory: the array, or a copy that C can read."""
    return ffi.from_buffer("float[]", np.ascontiguousarray(values, np.float32))


def _output(stored: Float32Array | None, rows: Float32Array) -> Any:
    if stored is None:
        return ffi.NULL
    if stored.shape != rows.shape or stored.dtype != np.float32 or not stored.flags.c_contiguous:
        raise QsfArgumentError(
            f"stored is {stored.dtype} {list(stored.shape)}: float32 {list(rows.shape)}, "
            "C-contiguous, is asked for"
        )
    return ffi.from_buffer("float[]", stored, require_writable=True)


def _rounding(how: Rounding, n_cols: int) -> tuple[Any, Any]:
    """Return objects to keep alive, and a ``qsf_rounding *``."""
    if how.weights is not None and how.weights.shape != (n_cols,):
        raise QsfArgumentError(f"weights are {list(how.weights.shape)}: [{n_cols}] is asked for")
    weights = ffi.NULL if how.weights is None else _floats(how.weights)
    fields = {"dtype": how.dtype, "rule": how.rule, "scale": how.scale, "weights": weights}
    return weights, ffi.new("qsf_rounding *", fields)


def _sums(status: int, sums: Any) -> RoundingSums:
    is_bad = status == lib.QSF_ERR_NUMERIC
    if not is_bad:
        check_status(status)
    return record(RoundingSums, sums, bad_row=int(sums.bad_row) if is_bad else None)
