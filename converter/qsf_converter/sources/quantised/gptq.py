"""GPTQ and AWQ: codes in words of 32 bits; each group of inputs has zeros and scales.

As in AutoGPTQ's nn_modules/qlinear and AutoAWQ's modules/linear: NAME.qweight holds several inputs
in a word (GPTQ, [words, outputs]) or several outputs (AWQ, [inputs, words], in an order of its
own; its version gemv [outputs, words]). NAME.g_idx, if there is one, has the group of each input.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import Matrix, RawArray, SourceTensor
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised import matrix
from qsf_converter.sources.quantised.matrix import FLOATS, INTEGERS, Stored, affine, unpack

_CODES: Final = ".qweight"
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of the codes of 8 outputs
_SPAN: Final = 32  # outputs whose codes fill whole words, whatever their bits
_CHECKED: Final = 4096  # outputs at once

_Read = Callable[[str, int, int], RawArray]  # of outputs [start, stop)


def gptq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of GPTQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits", (2, 3, 4, 8))
    form = _choice(own, "checkpoint_format", ("gptq", "gptq_v2"))
    add = np.uint8(form == "gptq")  # AutoGPTQ stores the zeros less one
    mask = np.uint8(255 if bits == 3 else (1 << bits) - 1)  # of 3 bits it lets the zero be 8

    def zeros(name: str, start: int, stop: int) -> RawArray:
        first, last = start // _SPAN * bits, -(-stop // _SPAN) * bits
        words = stored.columns(name, first, min(last, stored.tensors[name].shape[-1]))
        found = unpack(words, bits)[:, start % _SPAN :][:, : stop - start]
        return np.transpose(found + add & mask)

    def codes(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.columns(name, start, stop).T, bits)

    for words in _words(stored):
        shape = (words.shape[1], words.shape[0] * 32 // bits)
        yield _matrix(stored, own, words, shape, bits, codes, zeros, _transposed(stored))


def awq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of AWQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits" if own.has("bits") else "w_bit", (4,))
    version = _choice(own, "version", ("gemm", "gemv", "GEMM", "GEMV")).lower()

    def turned(name: str, start: int, stop: int) -> RawArray:
        found = unpack(stored.columns(name, start // 8, -(-stop // 8)), bits)
        found = found.reshape(len(found), -1, 8)[..., _AWQ_ORDER].reshape(len(found), -1)
        return np.transpose(found[:, start % 8 :][:, : stop - start])

    def plain(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.rows(name, start, stop), bits)

    for words in _words(stored):
        n, m = words.shape
        if version == "gemv":
            yield _matrix(stored, own, words, (n, m * 8), bits, plain, plain, stored.rows)
        else:
            scales = _transposed(stored)
            yield _matrix(stored, own, words, (m * 8, n), bits, turned, turned, scales)


def _transposed(stored: Stored) -> _Read:
    return lambda name, start, stop: np.transpose(stored.columns(name, start, stop))


def _choice(own: Config, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return the value of a key, by default the first one allowed; bits must be stated."""
    value = own.get(name, None if name == "bits" else allowed[0]) or allowed[0]
    if isinstance(value, bool) or value not in allowed or (name == "bits" and not own.has(name)):
        options = ", ".join(map(str, allowed))
        raise own.error(name, f"= {shown(own.get(name))} is not supported; allowed: {options}")
    return value


def _words(stored: Stored) -> Iterator[SourceTensor]:
    for name in [name for name in stored.tensors if name.endswith(_CODES)]:
        words = stored.need(name, ("I32",))
        if len(words.shape) != 2 or 0 in words.shape:
            raise QsfConversionError(f"tensor {name} of shape {list(words.shape)} is no matrix")
        yield words


def _matrix(
    stored: Stored, own: Config, words: SourceTensor, shape: tuple[int, int], bits: int,
    codes: _Read, zeros: _Read, scales: _Read,
) -> Matrix:  # fmt: skip
    base = words.name.removesuffix(_CODES)
    g_idx, n_outputs, n_inputs = f"{base}.g_idx", *shape
    factor, zero = stored.need(f"{base}.scales", FLOATS), stored.need(f"{base}.qzeros", ("I32",))
    parts = [words.name, zero.name, factor.name]
    if g_idx in stored.tensors:
        parts.append(stored.need(g_idx, INTEGERS).name)
        n_inputs = min(n_inputs, stored.tensors[g_idx].shape[0])
    size = own.get("group_size", own.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else n_inputs
    n_groups = -(-n_inputs // size)
    in_order = np.arange(n_inputs) // size
    if scales == stored.rows:  # of gemv: both are padded
        fits = factor.shape[0] == zero.shape[0] == n_outputs
        fits &= min(factor.shape[-1], zero.shape[-1] * 32 // bits) >= n_groups
    else:
        fits = factor.shape == (n_groups, n_outputs)
        fits &= zero.shape == (n_groups, -(-n_outputs * bits // 32))
    if not fits:
        raise QsfConversionError(
            f"tensor {words.name} of shape {list(words.shape)}: scales {list(factor.shape)} and "
            f"zeros {list(zero.shape)} are not those of {n_groups} groups of {bits} bits"
        )

    def groups() -> RawArray:
        found = stored.whole(g_idx) if g_idx in parts else in_order
        if found.min(initial=0) < 0 or found.max(initial=0) >= n_groups:
            raise QsfConversionError(f"tensor {g_idx} names a group that is not there")
        return found

    kept = None
    spans = ((at, min(at + _CHECKED, n_outputs)) for at in range(0, n_outputs, _CHECKED))
    middle = 1 << (bits - 1)
    if np.array_equal(groups(), in_order) and all(
        (zeros(zero.name, *span)[:, :n_groups] == middle).all() for span in spans
    ):
        kept = matrix.kept_type(stored, factor.name, bits, n_inputs, min(size, n_inputs))
    return affine(
        f"{base}.weight", (n_outputs, n_inputs), f"INT{bits}", parts,
        lambda start, stop: codes(words.name, start, stop)[:, :n_inputs],
        lambda start, stop: scales(factor.name, start, stop)[:, groups()],
        lambda start, stop: zeros(zero.name, start, stop)[:, groups()],
        kept,
    )  # fmt: skip
