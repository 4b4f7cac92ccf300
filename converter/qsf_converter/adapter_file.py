"""Makes files of adapters that a model is run with, beside its weights: W x + s B (A x).

Such a file belongs to one .qsf file, whose META says where each matrix comes from and what the
conversion did to it (docs/format.md, section 11). What cannot be said of a matrix as it lies in
that file is refused by name; merging (``sources.adapters``) can take it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfConversionError, shown
from qsf.file.layout import HEADER_BYTES, Dtype, TensorType
from qsf.file.reader import Reader
from qsf.native.quantise import repack_rows
from qsf.report.record import Quality, TensorReport, read_meta
from qsf.shell.output import check_not_a_source, check_output, write_bytes
from qsf_converter.calibrate.changes import TAG, Factors, unpack
from qsf_converter.calibrate.transforms import ROTATED, SCALED
from qsf_converter.meta import KEY_EXPONENTS
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import BLOCK, TILE_ROWS, tile_bytes
from qsf_converter.sources.adapters import (
    WITH_PEFT,
    Adapter,
    Names,
    Placed,
    name_pattern,
    open_adapter,
)
from qsf_converter.sources.architectures import FAMILIES
from qsf_converter.sources.families.family import Family
from qsf_converter.sources.families.rules import TensorRule

T = TensorType
Floats = NDArray[np.float64]

DEFAULT_TYPE: Final = "8bit"
TYPES: Final = {"f16": Dtype.F16, "8bit": Dtype.Q8_0}
_MAGIC, _VERSION = b"QSFA", 2
_HEADER_BYTES, _NAME_BYTES, _MAX_RANK = 128, 76, 1024
_CHANGEABLE: Final = (T.Q, T.K, T.V, T.ATTN_OUT, T.FFN_GATE, T.FFN_UP, T.FFN_DOWN)
_PLAIN: Final = {"groups": None, "slices": None, "scale": None, "add": 0.0, "is_flat": False,
                 "is_repeated": False, "is_log": False, "is_turned": False, "is_stacked": False,
                 "of_all": False}  # fmt: skip
_TOP: Final = 15  # numbers of B are below 2^15, so that small rows keep their digits in f16


@dataclass(frozen=True, slots=True)
class _LowRank:
    layer: int
    kind: TensorType
    a: Floats  # [rank, in]
    b: Floats  # [out, rank]
    factor: float


def convert_adapter(
    adapter: str, base: Path, out: Path, *, quant_type: str | None = None, overwrite: bool = False
) -> tuple[int, int]:
    """Write the file ``out`` of an adapter for the file ``base``; return matrices and most rank.

    ``adapter``: as ``open_adapter``. ``quant_type``: 8bit or f16.

    Raises QsfConversionError for an adapter that does not fit, or a base that does not say enough;
    QsfArgumentError for a type or an output that cannot be, QsfIOError as the system refuses.
    """
    if (quant_type or DEFAULT_TYPE) not in TYPES:
        raise QsfArgumentError(f"adapters have type {' or '.join(TYPES)}, not {quant_type}")
    check_output(out, overwrite=overwrite)
    dtype = TYPES[quant_type or DEFAULT_TYPE]
    with Reader(base) as reader, open_adapter(adapter) as opened:
        check_not_a_source(out, (base, *opened.paths))
        matrices = sorted(_Base(reader).matrices(opened), key=lambda m: (m.layer, m.kind))
        with base.open("rb") as file:
            header = file.read(HEADER_BYTES)
        most_rank = max(len(matrix.a) for matrix in matrices)
        table = b"".join(_entry(matrix) for matrix in matrices)
        body = table + b"".join(_packed(matrix, dtype) for matrix in matrices)
        head = struct.pack(
            "<4sIQQIIIIII76s", _MAGIC, _VERSION, _HEADER_BYTES + len(body), reader.file_bytes,
            zlib.crc32(header[:64]), zlib.crc32(header[64:]), len(matrices), most_rank, dtype,
            zlib.crc32(body), _short_name(base),
        )  # fmt: skip
        write_bytes(out, head + struct.pack("<I", zlib.crc32(head)) + body, overwrite=overwrite)
    return len(matrices), most_rank


def _short_name(base: Path) -> bytes:
    name = "".join(c if c.isprintable() else "?" for c in base.resolve().name)
    return name.encode("utf-8", "replace")[: _NAME_BYTES - 1].decode("utf-8", "ignore").encode()


class _Base:
    """What a .qsf file says of its matrices."""

    def __init__(self, reader: Reader) -> None:
        meta = read_meta(reader) or {}
        quality, source = Quality.from_meta(meta.get("quality")), meta.get("source")
        family = FAMILIES.get(str(source.get("architecture"))) if isinstance(source, dict) else None
        again = f"make it again: qsf convert MODEL {reader.path} --force"
        if quality is None or family is None or not isinstance(meta.get(KEY_EXPONENTS), dict):
            raise QsfConversionError(
                f"{reader.path}: it does not say how its matrices were made, so no adapter can be "
                f"made for it; {again}"
            )
        has_changes = TAG in reader.sections
        for tensor in quality.tensors:
            if not has_changes and (ROTATED in tensor.action or SCALED in tensor.action):
                raise QsfConversionError(
                    f"{reader.path}: its calibration changed the weights ({tensor.name}: "
                    f"{tensor.action}), and it does not say how; {again} --calibration FILE"
                )
        self._changes = unpack(reader.read_section(TAG)) if has_changes else {}
        self._path, self._header, self._arch = reader.path, reader.header, reader.arch
        self._kinds, self._exponents = reader.layer_kinds, meta[KEY_EXPONENTS]
        self._family = family
        self._tensors: dict[str, list[TensorReport]] = {}
        for tensor in quality.tensors:
            self._tensors.setdefault(tensor.source, []).append(tensor)

    def matrices(self, adapter: Adapter) -> Iterator[_LowRank]:
        """Yield what the adapter adds to each matrix."""
        shapes = {
            name: (sum(t.n_rows for t in parts), parts[0].n_cols)
            for name, parts in self._tensors.items()
        }
        names = Names(
            adapter, shapes, _as_stored(self._family), self._header, tied_head=self._arch.tied_head
        )
        for placed in names.placed():
            yield from self._parts(adapter, placed, names.bare(placed.name))

    def _parts(self, adapter: Adapter, placed: Placed, bare: str) -> Iterator[_LowRank]:
        """Yield the matrices that one of the checkpoint became, in their order."""
        change = adapter.changes[placed.module]
        a, b, magnitude = adapter.factors(placed.module, placed.n_heads)
        parts = [(self._rule(bare, tensor), tensor) for tensor in self._tensors[placed.name]]

        def refuse(why: str) -> NoReturn:
            raise QsfConversionError(
                f"{adapter.path}: it changes {shown(placed.module)}, {why}, which is not supported "
                f"beside the weights: merge it (qsf convert MODEL OUT --lora {adapter.path}), or "
                f"{WITH_PEFT}"
            )

        if magnitude is not None:
            refuse("as DoRA does, by the lengths of rows")
        if not change.factor:
            refuse("by nothing: its scale is 0")
        if len(a) > _MAX_RANK:
            refuse(f"with rank {len(a)}, above {_MAX_RANK}")
        row = 0
        for rule, tensor in sorted(parts, key=lambda part: part[0].part if part[0] else 0):
            if tensor.kind.startswith("EXPERTS."):
                refuse("a matrix of experts")
            if rule is None or tensor.layer is None:
                refuse(f"which the file holds as {tensor.name}, not as the checkpoint does")
            kind, rows = T.__members__[tensor.kind], b[row : row + tensor.n_rows]
            row += tensor.n_rows
            layer, made = tensor.layer, Factors(a / change.factor, rows)
            if self._changes:
                made = made.changed(self._changes, layer, kind, self._kinds[layer])
            b_rows = self._shifted(made.b, layer, kind)
            yield _LowRank(layer, kind, made.a, b_rows, change.factor)

    def _rule(self, bare: str, tensor: TensorReport) -> TensorRule | None:
        """Return the rule of a matrix whose rows are consecutive rows of the checkpoint's."""
        return next(
            (
                rule
                for rule in self._family.rules
                if rule.target in _CHANGEABLE
                and T(rule.target).name == tensor.kind
                and name_pattern(rule.source).fullmatch(bare)
                and all(getattr(rule, name) == usual for name, usual in _PLAIN.items())
                and self._family.derive is None
            ),
            None,
        )

    def _shifted(self, b: Floats, layer: int, kind: TensorType) -> Floats:
        """Return rows of B as those of W became: of Q and K times powers of two."""
        shifts = self._exponents.get(str(layer))
        if shifts is None or kind not in (T.Q, T.K):
            return b
        is_valid = layer < len(self._kinds) and isinstance(shifts, list)
        if is_valid:
            of = self._kinds[layer]
            is_valid = len(shifts) == of.n_kv_heads * of.head_dim
            is_valid = is_valid and all(type(n) is int and abs(n) <= 64 for n in shifts)
        if not is_valid:
            raise QsfConversionError(
                f"{self._path}: {KEY_EXPONENTS} of layer {layer} are malformed"
            )
        exponents = np.array(shifts, np.int64)
        if kind == T.Q:
            of_heads = -exponents.reshape(of.n_kv_heads, of.head_dim)
            exponents = np.repeat(of_heads, of.n_heads // of.n_kv_heads, axis=0).ravel()
        return np.asarray(np.ldexp(b, exponents[:, None]))


def _as_stored(family: Family) -> Family:
    """Return the family with all matrices as [out, in], as META describes them."""
    rules = tuple(dataclasses.replace(rule, transposed=False) for rule in family.rules)
    return dataclasses.replace(family, rules=rules)


# ---- bytes ----


def _shift(values: Floats) -> int:
    """Return the exponent that makes the largest value nearly 2^15."""
    largest = float(abs(values).max())
    return _TOP - math.frexp(largest)[1] if largest else 0


def _entry(matrix: _LowRank) -> bytes:
    factor = np.float32(math.ldexp(matrix.factor, -_shift(matrix.a) - _shift(matrix.b)))
    shape = (len(matrix.b), matrix.a.shape[1], len(matrix.a))
    return struct.pack("<IIIIIfQ", matrix.layer, matrix.kind, *shape, factor, 0)


def _packed(matrix: _LowRank, dtype: Dtype) -> bytes:
    """Return the tiles of A, then of each tile row B [rank, 16], after scales if it is not f16."""
    a = np.ldexp(matrix.a, _shift(matrix.a)).astype(np.float32)
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % BLOCK)))
    b = np.ldexp(matrix.b, _shift(matrix.b))
    b = np.pad(b, ((0, -len(b) % TILE_ROWS), (0, 0))).reshape(-1, TILE_ROWS, b.shape[1])
    if dtype == Dtype.F16:
        return quantise_rows(dtype, a) + bytes(b.transpose(0, 2, 1).astype("<f2"))
    scales = (abs(b).max(axis=2) / 127).astype("<f2")
    codes = np.rint(b / np.where(scales == 0, 1, scales)[:, :, None]).clip(-127, 127) + 128
    of_rows = scales.view(np.uint8).reshape(len(b), -1)
    of_columns = codes.transpose(0, 2, 1).astype(np.uint8).reshape(len(b), -1)
    return _tiles_of_8_bits(a) + np.concatenate((of_rows, of_columns), 1).tobytes()


def _tiles_of_8_bits(a: NDArray[np.float32]) -> bytes:
    """Return rows as tiles of q8_0: the scale of 32 columns is that of their largest number."""
    blocks = a.reshape(len(a), -1, 32)
    scales = (abs(blocks).max(axis=2, keepdims=True) / 127).astype("<f2")
    codes = np.rint(blocks / np.where(scales == 0, 1, scales).astype(np.float32)).clip(-127, 127)
    stored = np.concatenate((scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)), 2)
    tiles = np.empty(tile_bytes(Dtype.Q8_0, *a.shape), np.uint8)
    repack_rows(Dtype.Q8_0, stored.reshape(len(a), -1), a.shape[1], tiles)
    return tiles.tobytes()
