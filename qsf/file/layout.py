"""The records of a .qsf file: how they are packed, and which values they may have (docs/format.md).

Constants, enumerations and weight types are those of csrc/format/layout.h and csrc/types/: they
come through ``qsf.native._facts``, which the build makes of these headers.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple

from qsf.native._facts import *

MAGIC: Final = b"QSF1"
VERSION: Final = FILE_VERSION
ENTRY_BYTES: Final = DIRECTORY_ENTRY_BYTES
TOKEN_NONE: Final = 0xFFFFFFFF
# Python reads these whole; parsed they take up to 25 times as much memory.
MAX_TEXT_BYTES: Final = {"TOKN": 64 << 20, "CHAT": 1 << 20, "META": 16 << 20}
F32_MAX: Final = 3.4028234663852886e38

DIRECTORY_ENTRY: Final = struct.Struct("<4sIQQII")
UNIT_ENTRY: Final = struct.Struct("<QQQIfBBBBHHII")
TENSOR_ENTRY: Final = struct.Struct("<IIIIBBHIQ")
TENSOR_HEADER: Final = struct.Struct("<IIIBBHI44s")
BLOCK_HEADER: Final = struct.Struct("<II")


class UnitId(NamedTuple):
    """A unit by its role; a file has its units in ascending order of their ids."""

    role: Role
    layer: int = 0  # of a layer or an expert
    expert: int = 0  # of an expert: its number in the layer

    @property
    def name(self) -> str:
        """The unit's name in errors and reports, such as ``layer 3`` or ``layer 3, expert 7``."""
        return {
            Role.EMBEDDING: "embedding",
            Role.LAYER: f"layer {self.layer}",
            Role.FINAL: "final unit",
            Role.EXPERT: f"layer {self.layer}, expert {self.expert}",
            Role.OWN_TABLE: "own table",
        }[self.role]

    def of_expert(self, expert: int) -> UnitId:
        return UnitId(Role.EXPERT, self.layer, expert)


EMBEDDING_UNIT: Final = UnitId(Role.EMBEDDING)
FINAL_UNIT: Final = UnitId(Role.FINAL)
OWN_TABLE_UNIT: Final = UnitId(Role.OWN_TABLE)


def layer_unit(layer: int) -> UnitId:
    return UnitId(Role.LAYER, layer)


def pass_units(n_layers: int) -> list[UnitId]:
    """Return the units that every pass uses, in order: all but experts."""
    return [EMBEDDING_UNIT, *map(layer_unit, range(n_layers)), FINAL_UNIT]


TABLES: Final = (TensorType.EMBEDDING, TensorType.OWN_TABLE)  # with checksums of bands in EBND
EXACT: Final = (  # f16 or f32 alone
    TensorType.EXPERT_ROUTER, TensorType.BETA, TensorType.DECAY, TensorType.DECAY_UP,
    TensorType.SSD_STEP,
)  # fmt: skip
FINE: Final = (  # of 8 bits at least: all heads, or few numbers, go through them
    TensorType.K_UP, TensorType.V_UP, TensorType.GATE_UP, TensorType.OWN_IN, TensorType.OWN_GATE,
    TensorType.OWN_OUT, TensorType.MTP_JOIN, TensorType.RELATIVE, TensorType.TOKEN_SINKS,
    TensorType.K_TAPS, TensorType.V_TAPS,
    *(TensorType[f"{part}_{name}"] for part in ("Q", "K", "V", "FFN")
      for name in ("GATE_DOWN", "FORGET", "GAIN")),
)  # fmt: skip


OUTLIERS_OF: Final[dict[int, TensorType]] = {  # matrix -> its outlier table
    TensorType[table.name.removesuffix("_OUTLIERS")]: table
    for table in TensorType
    if table.name.endswith("_OUTLIERS")
}


# Types whose tiles share their scales: these need whole multiples of so many columns.
HEAD_COLS: Final = dict.fromkeys(
    (Dtype.Q2_K, Dtype.Q3_K, Dtype.Q4_K, Dtype.Q5_K, Dtype.Q6_K, Dtype.IQ4_XS), 256
)
KEPT: Final = (
    *(Dtype(i) for i in range(Dtype.MXFP4, Dtype.Q6_K + 1)),
    *(Dtype(i) for i in range(Dtype.Q2_K, Dtype.IQ4_XS + 1)),
)
"""Types of checkpoints: weights that have them keep them."""


def dtype_name(dtype: int) -> str:
    """Return the name people use for a quantisation type, such as ``4bit``."""
    return DTYPES[dtype][0] if dtype in DTYPES else "unknown"


def padded(n_bytes: int, align: int) -> int:
    return -(-n_bytes // align) * align


def band_bytes(n_cols: int, dtype: int) -> int:
    """Return the bytes of one row of tiles: 16 rows, ``n_cols`` columns padded to 64."""
    return -(-n_cols // BLOCK) * DTYPES[dtype][1]


def tensor_bytes(n_rows: int, n_cols: int, dtype: int, layout: int, n_entries: int = 0) -> int:
    """Return the bytes of a tensor's data without padding; the shape must be valid."""
    if layout == Layout.OUTLIERS:
        return 4 * (-(-n_rows // TILE_ROWS) + 1 + n_entries)
    if layout == Layout.VECTOR:
        return n_cols * DTYPES[dtype][1] // (TILE_ROWS * BLOCK)  # f16 or f32
    return -(-n_rows // TILE_ROWS) * band_bytes(n_cols, dtype)


class Header(HeaderFields):
    """The numbers of the model in the first 128 bytes of a file; fields as ``qsf_header``.

    ``n_kv_heads`` may be 0 when writing: as many as attention heads.
    """

    __slots__ = ()


class Arch(ArchFields):
    """The ``ARCH`` section, which a reader fills the defaults in; fields as ``qsf_arch``."""

    __slots__ = ()

    def visits(self, layer: int) -> int:
        """Return how often a token passes through a layer."""
        return self.loop_passes if self.loop_begin <= layer < self.loop_end else 1


DEFAULT_ARCH: Final = Arch()


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the directory."""

    tag: str
    off: int
    n_bytes: int
    crc32: int
    is_required: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor table."""

    unit_idx: int
    type: int
    n_rows: int
    n_cols: int
    dtype: int
    layout: int
    index: int
    data_off: int  # in the unit's raw bytes
    data_bytes: int  # without padding
    n_entries: int = 0  # of an outlier table


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit, which is read as a whole: the embedding, a layer, the final unit or an expert."""

    idx: int  # in the file
    id: UnitId
    off: int  # in the file
    stored_bytes: int
    raw_bytes: int
    crc32: int  # of the stored bytes
    dtype: int
    compression: int
    importance: float
    tensors: tuple[Tensor, ...]  # an expert has the tensors of its template
    template_idx: int  # unit whose tensors the table lists: itself, or an earlier expert


class Stored(NamedTuple):
    """The place and form of a written unit in the file."""

    compression: Compression
    stored_bytes: int
    raw_bytes: int


def to_f32(value: float) -> float:
    """Return the number as the file would store it; out of range, the number itself."""
    if not abs(value) <= F32_MAX:
        return value
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


MODEL: Final = struct.Struct("<4sIII8I4Bf")  # bytes 0 .. 55
TOKENS: Final = struct.Struct("<III")  # bytes 80 .. 91


def pack_model(header: Header) -> bytes:
    """Return bytes 0 .. 55 of the file."""
    h = header
    return MODEL.pack(
        MAGIC, VERSION, HEADER_BYTES, h.architecture, h.n_layers, h.dim, h.n_heads, h.n_kv_heads,
        h.n_vocab, h.max_tokens, h.ffn_dim, h.head_dim, h.dtype, h.activation, h.norm,
        h.positions, h.rope_theta,
    )  # fmt: skip


def pack_tokens(header: Header) -> bytes:
    """Return bytes 80 .. 91 of the file."""
    ids = (header.bos_id, header.eos_id, header.pad_id)
    return TOKENS.pack(*(TOKEN_NONE if i is None else i for i in ids))


def pack_header(
    header: Header,
    links: tuple[int, int, int],
    directory_off: int,
    directory: bytes,
    unit_index_crc32: int,
) -> bytes:
    """Return the file's first 128 bytes; it ends with the directory.

    links: offsets of the section UNIT, the embedding and the final unit.
    """
    n_bytes = directory_off + len(directory)
    first = (
        pack_model(header)
        + struct.pack("<QQQ", *links)
        + pack_tokens(header)
        + struct.pack("<I", n_bytes & 0xFFFFFFFF)
    )
    second = struct.pack(
        "<QIIHBBI", directory_off, len(directory) // ENTRY_BYTES, zlib.crc32(directory), BLOCK,
        TILE_ROWS, 0, unit_index_crc32,
    )  # fmt: skip
    crcs = [struct.pack("<I", zlib.crc32(part)) for part in (first, second)]
    return first + crcs[0] + second + crcs[1]


MAX_STEP: Final = 0xFFFF


class PackedOutliers(NamedTuple):
    """An outlier table as bytes of a file; ``n_entries`` is for ``Writer.begin_tensor``."""

    data: bytes
    n_entries: int
