"""The records of a .qsf file: constants, enumerations and the header (docs/format.md).

How a record is packed, and which values it may have, for writer and reader. Pure Python; nothing
here touches a file.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from qsf.errors import QsfError

MAGIC: Final = b"QSF1"
VERSION: Final = 2
HEADER_BYTES: Final = 128
ENTRY_BYTES: Final = 32  # of the directory and the tensor table
TENSOR_HEADER_BYTES: Final = 64
UNIT_ALIGN: Final = 4096
DATA_ALIGN: Final = 64
BLOCK: Final = 64  # columns of a tile
TILE_ROWS: Final = 16
COMPRESSED_BLOCK_BYTES: Final = 1 << 20
SECTION_REQUIRED: Final = 1
TOKEN_NONE: Final = 0xFFFFFFFF
MAX_SECTIONS: Final = 256
# Python reads these whole; parsed they take up to 25 times as much memory.
MAX_TEXT_BYTES: Final = {"TOKN": 64 << 20, "CHAT": 1 << 20, "META": 16 << 20}
MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 4096
MAX_HEAD_DIM: Final = 4096
MAX_DIM: Final = 1 << 20
MAX_OWN_WIDTH: Final = 4096
MAX_VOCAB: Final = 1 << 24
MAX_EXTENT_ROWS: Final = 1 << 24  # rows or columns of a tensor
MAX_LAYER_KINDS: Final = 128
MAX_LAYER_EXPERTS: Final = 1024
MAX_CHOSEN: Final = 64  # experts of a token in a layer
MAX_ROPE_SETS: Final = 64
MAX_ROPE_PAIRS: Final = 2048
MAX_OUTLIERS: Final = 1 << 24  # of one outlier table
LEAST_WEIGHTS_PER_OUTLIER: Final = 100
F32_MAX: Final = 3.4028234663852886e38

DIRECTORY_ENTRY: Final = struct.Struct("<4sIQQII")
UNIT_ENTRY: Final = struct.Struct("<QQQIfBBBBHHII")
TENSOR_ENTRY: Final = struct.Struct("<IIIIBBHIQ")
TENSOR_HEADER: Final = struct.Struct("<IIIBBHI44s")
BLOCK_HEADER: Final = struct.Struct("<II")


class Role(IntEnum):
    """The role of a unit in the model."""

    EMBEDDING = 0
    LAYER = 1
    FINAL = 2  # final norm and output head
    EXPERT = 3
    OWN_TABLE = 4  # embeddings that each layer has of its own: read by rows


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


class Architecture(IntEnum):
    """Which family of models the file holds."""

    GPT2 = 0
    LLAMA = 1
    MISTRAL = 2
    PHI = 3
    OTHER = 4


class Activation(IntEnum):
    """The non-linearity of the feed-forward network."""

    GELU_TANH = 0
    SILU = 1
    RELU = 2
    GELU_ERF = 3
    RELU_SQUARED = 4
    SILU_CLAMPED = 5
    XIELU = 6  # in KIND alone


class Norm(IntEnum):
    """How activations are normalised."""

    LAYER = 0
    RMS = 1


class Positions(IntEnum):
    """How positions reach the model."""

    LEARNED = 0
    ROPE = 1
    ALIBI = 2


class Dtype(IntEnum):
    """Quantisation types; an id never changes meaning."""

    Q2_SYM = 0
    Q2 = 1
    Q3 = 2
    Q4 = 3
    TERNARY = 4
    MIXED = 5
    Q8 = 6
    F16 = 7
    F32 = 8
    TERNARY_DENSE = 9
    Q4_SYM = 10
    MXFP4 = 11
    Q4_0 = 12
    Q4_1 = 13
    Q5_0 = 14
    Q5_1 = 15
    Q8_0 = 16
    Q4_K = 17
    Q5_K = 18
    Q6_K = 19
    Q4_NL = 20


class Layout(IntEnum):
    """How the values of a tensor lie."""

    VECTOR = 0
    TILES = 1
    OUTLIERS = 2


class Compression(IntEnum):
    """How a layer's bytes are packed."""

    NONE = 0
    LZ4 = 1
    LZ4HC = 2
    ZSTD = 3


class RopeScaling(IntEnum):
    """How RoPE frequencies are stretched for longer contexts."""

    NONE = 0
    LINEAR = 1
    LLAMA3 = 2


class TensorType(IntEnum):
    """What a tensor is in the model."""

    Q = 0
    K = 1
    V = 2
    ATTN_OUT = 3
    FFN_GATE = 4
    FFN_UP = 5
    FFN_DOWN = 6
    ATTN_NORM = 7
    FFN_NORM = 8
    Q_BIAS = 9
    K_BIAS = 10
    V_BIAS = 11
    ATTN_OUT_BIAS = 12
    FFN_GATE_BIAS = 13
    ATTN_NORM_BIAS = 14
    FFN_NORM_BIAS = 15
    FFN_UP_BIAS = 16
    FFN_DOWN_BIAS = 17
    Q_NORM = 18
    K_NORM = 19
    POST_ATTN_NORM = 20
    POST_FFN_NORM = 21
    EXPERT_ROUTER = 22
    ATTN_SUB_NORM = 23
    FFN_SUB_NORM = 24
    EMBEDDING = 25
    HEAD = 26
    FINAL_NORM = 27
    FINAL_NORM_BIAS = 28
    Q_OUTLIERS = 29
    K_OUTLIERS = 30
    V_OUTLIERS = 31
    ATTN_OUT_OUTLIERS = 32
    FFN_GATE_OUTLIERS = 33
    FFN_UP_OUTLIERS = 34
    FFN_DOWN_OUTLIERS = 35
    SINKS = 36
    MIX_GATE = 37
    Q_UP = 38  # queries from the latent of Q, of latent attention
    K_UP = 39  # maps queries to the latent, and its transpose values back: one product a head
    V_UP = 40
    GATE_UP = 41  # of the delta rule, likewise the next: MIX_GATE and DECAY have a low rank
    DECAY_UP = 42
    ROUTER_BIAS = 44
    SELECTION_BIAS = 45
    SHARED_GATE = 46
    ROUTER_NORM = 47  # applied to the residual for the router alone
    EXPERT_SCALE = 48  # factors of the experts' weights
    CONV = 50  # [taps * channels], the oldest tap first
    CONV_BIAS = 51
    DECAY_RATE = 52
    DECAY_BIAS = 53
    SSD_SKIP = 54
    MIX_NORM = 55
    BETA = 56
    OWN_GATE = 57  # 57 .. 61: of layers with embeddings of their own
    OWN_IN = 58
    OWN_IN_NORM = 59
    OWN_OUT = 60
    OWN_NORM = 61
    ROUTED_NORM = 62  # of the residual, which experts then read by themselves
    ROUTED_POST_NORM = 63  # applied to the sum of the experts' outputs
    DENSE_POST_NORM = 64  # applied to the output of the dense part beside experts
    LAYER_SCALE = 65  # factor of the residual after the layer
    HEAD_BIAS = 66
    INPUT_NORM = 67
    INPUT_NORM_BIAS = 68
    DECAY = 69
    OWN_TABLE = 70
    SSD_IN = 71  # x, B and C
    SSD_GATE = 72
    SSD_STEP = 73
    SSD_RATE = 74
    SSD_STEP_BIAS = 75
    SSD_CONV = 76  # as CONV
    SSD_CONV_BIAS = 77
    SSD_NORM = 78
    SSD_OUT = 79
    MTP_TRUNK_NORM = 80  # of the MTP head: a copy of FINAL_NORM; likewise the next
    MTP_TOKEN_NORM = 81
    MTP_HIDDEN_NORM = 82
    MTP_JOIN = 83
    MTP_END_NORM = 84
    INPUT_SHIFT = 85  # added to the residual before the input norm
    DENSE = 86  # of an encoder, after the final norm
    HEAD_REST = 87  # the head's rows after those of HEAD
    SECOND_SHIFT = 88  # instead of INPUT_SHIFT for the second text of a pair


HEADS: Final = (TensorType.HEAD, TensorType.HEAD_REST)
TABLES: Final = (TensorType.EMBEDDING, TensorType.OWN_TABLE)  # with checksums of bands in EBND
EXACT: Final = (  # f16 or f32 alone
    TensorType.EXPERT_ROUTER, TensorType.BETA, TensorType.DECAY, TensorType.DECAY_UP,
    TensorType.SSD_STEP,
)  # fmt: skip
FINE: Final = (  # of 8 bits at least: all heads, or few numbers, go through them
    TensorType.K_UP, TensorType.V_UP, TensorType.GATE_UP, TensorType.OWN_IN, TensorType.OWN_GATE,
    TensorType.OWN_OUT, TensorType.MTP_JOIN,
)  # fmt: skip


OUTLIERS_OF: Final[dict[int, TensorType]] = {  # matrix -> its outlier table
    TensorType.Q: TensorType.Q_OUTLIERS,
    TensorType.K: TensorType.K_OUTLIERS,
    TensorType.V: TensorType.V_OUTLIERS,
    TensorType.ATTN_OUT: TensorType.ATTN_OUT_OUTLIERS,
    TensorType.FFN_GATE: TensorType.FFN_GATE_OUTLIERS,
    TensorType.FFN_UP: TensorType.FFN_UP_OUTLIERS,
    TensorType.FFN_DOWN: TensorType.FFN_DOWN_OUTLIERS,
}


_DTYPES: Final[dict[int, tuple[str, int, int]]] = {  # name, bytes of a tile, bytes of a scalar
    Dtype.Q2_SYM: ("2bit-sym", 288, 0),
    Dtype.Q2: ("2bit", 320, 0),
    Dtype.Q3: ("3bit", 448, 0),
    Dtype.Q4: ("4bit", 576, 0),
    Dtype.TERNARY: ("ternary", 288, 0),
    Dtype.MIXED: ("mixed", 0, 0),
    Dtype.Q8: ("8bit", 1056, 0),
    Dtype.F16: ("f16", 2048, 2),
    Dtype.F32: ("f32", 4096, 4),
    Dtype.TERNARY_DENSE: ("ternary-dense", 240, 0),
    Dtype.Q4_SYM: ("4bit-sym", 544, 0),
    Dtype.MXFP4: ("mxfp4", 544, 0),
    Dtype.Q4_0: ("q4_0", 576, 0),
    Dtype.Q4_1: ("q4_1", 640, 0),
    Dtype.Q5_0: ("q5_0", 704, 0),
    Dtype.Q5_1: ("q5_1", 768, 0),
    Dtype.Q8_0: ("q8_0", 1088, 0),
    Dtype.Q4_K: ("q4_k", 576, 0),
    Dtype.Q5_K: ("q5_k", 704, 0),
    Dtype.Q6_K: ("q6_k", 840, 0),
    Dtype.Q4_NL: ("4bit-nl", 544, 0),
}


# Types whose tiles share their scales: these need whole multiples of so many columns.
HEAD_COLS: Final = {Dtype.Q4_K: 256, Dtype.Q5_K: 256, Dtype.Q6_K: 256}
KEPT: Final = (Dtype.MXFP4, *(Dtype(i) for i in range(Dtype.Q4_0, Dtype.Q6_K + 1)))
"""Types that nothing is rounded to: weights that have them already keep them."""


def dtype_name(dtype: int) -> str:
    """Return the name people use for a quantisation type, such as ``4bit``."""
    return _DTYPES[dtype][0] if dtype in _DTYPES else "unknown"


def padded(n_bytes: int, align: int) -> int:
    return -(-n_bytes // align) * align


def band_bytes(n_cols: int, dtype: int) -> int:
    """Return the bytes of one row of tiles: 16 rows, ``n_cols`` columns padded to 64."""
    return -(-n_cols // BLOCK) * _DTYPES[dtype][1]


def tensor_fault(
    type: int, n_rows: int, n_cols: int, dtype: int, layout: int, n_entries: int
) -> str | None:
    is_table = layout == Layout.OUTLIERS
    if n_entries and not is_table:
        return f"{n_entries} outliers (reserved) in layout {layout}, allowed: 0"
    for name, value in (("rows", n_rows), ("columns", n_cols)):
        if not 1 <= value <= MAX_EXTENT_ROWS:
            return f"{value} {name}, allowed: 1 .. {MAX_EXTENT_ROWS}"
    if is_table != (TensorType.Q_OUTLIERS <= type <= TensorType.FFN_DOWN_OUTLIERS):
        return f"tensor type {type} in layout {layout}, allowed: types 29 .. 35 in layout 2 alone"
    if is_table:
        if dtype != Dtype.F16:
            return f"outliers of type {dtype} ({dtype_name(dtype)}), allowed: f16"
        most = min(MAX_OUTLIERS, n_rows * n_cols // LEAST_WEIGHTS_PER_OUTLIER)
        if not 1 <= n_entries <= most:
            return f"{n_entries} outliers, allowed: 1 .. {most}"
        return None
    if layout == Layout.VECTOR:
        if n_rows != 1:
            return f"a vector with {n_rows} rows, allowed: 1"
        if dtype not in (Dtype.F16, Dtype.F32):
            return f"a vector of type {dtype} ({dtype_name(dtype)}), allowed: f16, f32"
    elif layout == Layout.TILES:
        if dtype not in _DTYPES or dtype == Dtype.MIXED:
            name = dtype_name(dtype)
            return f"tiles of type {dtype} ({name}), allowed: 0 .. 4, 6 .. {max(Dtype)}"
        head_cols = HEAD_COLS.get(Dtype(dtype), 1)
        if n_cols % head_cols:
            return f"{n_cols} columns of {dtype_name(dtype)}, allowed: multiples of {head_cols}"
    else:
        return f"layout {layout}, allowed: 0, 1, 2"
    return None


def tensor_bytes(n_rows: int, n_cols: int, dtype: int, layout: int, n_entries: int = 0) -> int:
    """Return the bytes of a tensor's data without padding; the shape must be valid."""
    if layout == Layout.OUTLIERS:
        return 4 * (-(-n_rows // TILE_ROWS) + 1 + n_entries)
    if layout == Layout.VECTOR:
        return n_cols * _DTYPES[dtype][2]
    return -(-n_rows // TILE_ROWS) * band_bytes(n_cols, dtype)


@dataclass(frozen=True, slots=True)
class Header:
    """The numbers of the model in the first 128 bytes of a file."""

    architecture: int
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int  # 0 when writing: as many as attention heads
    n_vocab: int
    max_tokens: int
    ffn_dim: int
    head_dim: int
    dtype: int
    activation: int
    norm: int
    positions: int
    rope_theta: float  # 0 without RoPE
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


@dataclass(frozen=True, slots=True)
class Arch:
    """The ``ARCH`` section; a reader fills the defaults in."""

    norm_epsilon: float = 1e-5
    rope_scaling: int = RopeScaling.NONE
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_tokens: int = 8192
    rope_dims: int | None = None  # None when writing: head_dim
    rope_interleaved: bool = False
    tied_head: bool = False
    window_tokens: int = 0
    embedding_factor: float = 1.0
    logit_cap: float = 0.0  # 0: none
    is_encoder: bool = False  # no head, and a token sees later ones too
    own_width: int = 0  # of the embeddings that each layer has of its own; 0: none
    kv_key_bits: int = 0  # default of the KV cache, 2, 4, 8, 16 or 32; 0: none
    kv_value_bits: int = 0
    act_bits: int = 8  # bits of activations with weights of fewer than 8 bits: 8 or 16


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


_RANGES: Final = (
    ("n_layers", "number of layers", 1, MAX_LAYERS),
    ("dim", "hidden dimension", 1, 1 << 20),
    ("n_heads", "number of attention heads", 1, MAX_HEADS),
    ("n_kv_heads", "number of KV heads", 0, MAX_HEADS),
    ("n_vocab", "vocabulary", 1, MAX_VOCAB),
    ("max_tokens", "maximum sequence length", 1, 1 << 24),
    ("ffn_dim", "FFN dimension", 1, 1 << 22),
    ("head_dim", "head dimension", 1, 4096),
    ("dtype", "quantisation type", 0, max(Dtype)),
    ("activation", "activation", 0, Activation.SILU_CLAMPED),
    ("norm", "normalisation", 0, max(Norm)),
    ("positions", "positions", 0, max(Positions)),
)


def to_f32(value: float) -> float:
    """Return the number as the file would store it; out of range, the number itself."""
    if not abs(value) <= F32_MAX:
        return value
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def check_header(header: Header, error: type[QsfError]) -> None:
    """Raise ``error`` for the first field that breaks a rule of section 1."""
    for field, name, least, most in _RANGES:
        value = getattr(header, field)
        if not least <= value <= most:
            raise error(f"header: {name} is {value}, allowed: {least} .. {most}")
        if field == "n_kv_heads" and value != 0 and header.n_heads % value != 0:
            raise error(f"header: {value} KV heads do not divide {header.n_heads} attention heads")
    theta = to_f32(header.rope_theta)
    if header.positions == Positions.ROPE:
        if not 0.0 < theta <= F32_MAX:
            raise error(f"header: RoPE theta is {theta:g}, allowed with RoPE: finite, above 0")
    elif theta != 0.0:
        raise error(f"header: RoPE theta is {theta:g}, allowed without RoPE: 0")
    for name, token in (("BOS", header.bos_id), ("EOS", header.eos_id), ("PAD", header.pad_id)):
        if token is not None and not 0 <= token < header.n_vocab:
            raise error(
                f"header: {name} id is {token}, allowed: below the vocabulary of"
                f" {header.n_vocab}, or none"
            )


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
