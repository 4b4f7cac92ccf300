"""Weights of a model and cost of a token, from the tables of a .qsf file: no weight is read."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qsf.file.layout import Layout, Role, Tensor
from qsf.file.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model in numbers. Tables and vectors are counted as well as the matrices of layers.

    Attributes:
        n_weights: weights of all tensors; outlier tables do not count.
        tensor_bytes: bytes of all tensors in memory, without compression or alignment.
        token_bytes: bytes of weights that generating one token reads: the chosen experts, one row
            of each embedding or position table, all other tensors; a tied head counts in full.
    """

    n_weights: int
    file_bytes: int
    tensor_bytes: int
    token_bytes: int


def token_bytes(tensor_bytes: int, unused_bytes: int, tables: list[tuple[int, int]]) -> int:
    """Return the bytes that a token reads: all but ``unused_bytes``, and one row of each table.

    A table is given as its number of rows and its bytes.
    """
    return tensor_bytes - unused_bytes - sum(size - size // n_rows for n_rows, size in tables)


def size_of(reader: Reader) -> ModelSize:
    header = reader.header
    n_weights = tensor_bytes = unused_bytes = 0
    for tensor, n_all, n_met in _tensors_of(reader):
        tensor_bytes += tensor.data_bytes * n_all
        unused_bytes += tensor.data_bytes * (n_all - n_met)
        if tensor.layout != Layout.OUTLIERS:
            n_weights += tensor.n_rows * tensor.n_cols * n_all
    embedding = reader.embedding.tensors[0]
    tables = [] if reader.arch.tied_head else [(header.n_vocab, embedding.data_bytes)]
    tables += [(header.n_vocab, u.raw_bytes) for u in reader.units if u.id.role == Role.OWN_TABLE]
    if "WPOS" in reader.sections:
        tables.append((header.max_tokens, reader.sections["WPOS"].n_bytes))
        n_weights += header.max_tokens * header.dim
        tensor_bytes += reader.sections["WPOS"].n_bytes
    return ModelSize(
        n_weights=n_weights,
        file_bytes=reader.file_bytes,
        tensor_bytes=tensor_bytes,
        token_bytes=token_bytes(tensor_bytes, unused_bytes, tables),
    )


def _tensors_of(reader: Reader) -> Iterator[tuple[Tensor, int, int]]:
    """Yield tensors, how many of each there are, and how often one token uses them."""
    for unit in reader.units:
        if unit.id.role == Role.EXPERT:
            continue
        is_layer = unit.id.role == Role.LAYER
        n_visits = reader.arch.visits(unit.id.layer) if is_layer else 1
        yield from ((tensor, 1, n_visits) for tensor in unit.tensors)
    for i, kind in enumerate(reader.layer_kinds):
        experts = reader.experts_of(i)
        for tensor in experts[0].tensors if experts else ():
            yield tensor, kind.n_experts, kind.n_chosen * reader.arch.visits(i)
