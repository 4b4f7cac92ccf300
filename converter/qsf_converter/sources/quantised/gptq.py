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
from qsf_converter.sources.checkpoint import RawArray, SourceTensor
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.quantised.matrix import Matrix
from qsf_converter.sources.quantised.stored import FLOATS, Stored, unpack

_CODES: Final = ".qweight"
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of the codes of 8 outputs
_SPAN: Final = 32  # outputs whose codes fill whole words, whatever their bits

# Outputs [start, stop) of a tensor of words along them, [n_rows, n].
_Along = Callable[[str, int, int], RawArray]


def gptq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of GPTQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits", (2, 3, 4, 8))
    form = _choice(own, "checkpoint_format", ("gptq", "gptq_v2"))
    add = 1 if form == "gptq" else 0  # AutoGPTQ stores the zeros less one

    def along(name: str, start: int, stop: int) -> RawArray:
        first, last = start // _SPAN * bits, -(-stop // _SPAN) * bits
        last = min(last, stored.tensors[name].shape[-1])
        at = start - first // bits * _SPAN
        return unpack(stored.columns(name, first, last), bits)[:, at : at + stop - start]

    def codes(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.columns(name, start, stop).T, bits)

    for words in _words(stored):
        n_inputs = words.shape[0] * 32 // bits
        yield _matrix(stored, own, words, (words.shape[1], n_inputs), bits, codes, along, add=add)


def awq_matrices(stored: Stored, own: Config) -> Iterator[Matrix]:
    """Yield the matrices of AWQ. Raises QsfConversionError for parts that do not fit."""
    bits = _choice(own, "bits" if own.has("bits") else "w_bit", (4,))
    version = str(_choice(own, "version", ("gemm", "gemv", "GEMM", "GEMV"))).lower()

    def along(name: str, start: int, stop: int) -> RawArray:
        first = start // 8
        found: RawArray = unpack(stored.columns(name, first, -(-stop // 8)), bits)
        found = found.reshape(len(found), -1, 8)[..., _AWQ_ORDER]
        found = found.reshape(len(found), -1)
        return np.asarray(found[:, start - first * 8 : stop - first * 8])

    def along_rows(name: str, start: int, stop: int) -> RawArray:
        return unpack(stored.rows(name, start, stop), bits).T

    for words in _words(stored):
        n, m = words.shape
        if version == "gemv":
            shape, zeros = (n, m * 8), along_rows
        else:
            shape, zeros = (m * 8, n), along
        yield _matrix(
            stored, own, words, shape, bits, lambda *of, read=zeros: read(*of).T, zeros,
            is_turned=version == "gemv",
        )  # fmt: skip


def _choice(own: Config, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return the value of a key, by default the first of those allowed."""
    value = own.get(name)
    if value is None and len(allowed) < 3:
        return allowed[0]
    if isinstance(value, bool) or value not in allowed:
        options = ", ".join(map(str, allowed))
        raise own.error(name, f"= {shown(value)} is not supported; allowed: {options}")
    return value


def _words(stored: Stored) -> Iterator[SourceTensor]:
    for name in stored.tensors:
        if name.endswith(_CODES):
            words = stored.need(name, ("I32",), of=name)
            if len(words.shape) != 2 or 0 in words.shape:
                raise QsfConversionError(f"tensor {name} of shape {list(words.shape)}: no matrix")
            yield words


def _matrix(
    stored: Stored,
    own: Config,
    words: SourceTensor,
    shape: tuple[int, int],
    bits: int,
    codes: _Along,
    zeros: _Along,
    *,
    add: int = 0,
    is_turned: bool = False,
) -> Matrix:
    """Return the matrix; ``is_turned``: scales and zeros have a row for each output."""
    base = words.name.removesuffix(_CODES)
    name, g_idx = f"{base}.weight", f"{base}.g_idx"
    qzeros = stored.need(f"{base}.qzeros", ("I32",), of=name)
    scales = stored.need(f"{base}.scales", FLOATS, of=name)
    parts = [words.name, qzeros.name, scales.name]
    n_outputs, n_inputs = shape
    if g_idx in stored.tensors:
        parts.append(stored.need(g_idx, ("I32", "I64"), of=name).name)
        n_inputs = min(n_inputs, stored.tensors[g_idx].shape[0])
    size = own.get("group_size", own.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else n_inputs
    n_groups = -(-n_inputs // size)
    own_groups = np.arange(n_inputs) // size
    zero_words = -(-n_outputs * bits // 32)
    fits = scales.shape == (n_groups, n_outputs) and qzeros.shape == (n_groups, zero_words)
    if is_turned:  # both are padded
        fits = scales.shape[0] == qzeros.shape[0] == n_outputs
        fits &= min(scales.shape[-1], qzeros.shape[-1] * 32 // bits) >= n_groups
    if not fits:
        raise QsfConversionError(
            f"tensor {words.name} of shape {list(words.shape)}: scales {list(scales.shape)} and "
            f"zeros {list(qzeros.shape)} are not those of {n_groups} groups of {bits} bits"
        )

    def read(start: int, stop: int) -> RawArray:
        groups = own_groups if len(parts) < 4 else stored.whole(g_idx).astype(np.int64)
        if groups.min(initial=0) < 0 or groups.max(initial=0) >= n_groups:
            raise QsfConversionError(f"tensor {g_idx} names a group that is not there")
        if is_turned:
            factors = stored.rows(scales.name, start, stop)
        else:
            factors = stored.columns(scales.name, start, stop).T
        zero = zeros(qzeros.name, start, stop).T + np.uint8(add)
        if bits != 3:  # of 3 bits AutoGPTQ lets the zero be 8
            zero &= np.uint8((1 << bits) - 1)
        values = codes(words.name, start, stop)[:, :n_inputs].astype(np.float32)
        values -= zero[:, groups]
        values *= factors.astype(np.float32)[:, groups]
        return values

    return Matrix(name, (n_outputs, n_inputs), f"INT{bits}", tuple(parts), read)
