"""Dimensions of well-known models, and of a .qsf file that a baseline's file is to be made for."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsf.errors import QsfArgumentError, QsfUnsupportedError
from qsf.file.layout import (
    OUTLIERS_OF,
    Activation,
    Arch,
    Architecture,
    Header,
    Norm,
    Positions,
    TensorType,
)
from qsf.file.reader import Reader

T = TensorType
Entry = tuple[TensorType, int, int]  # a matrix [n_rows, n_cols], or a vector: n_rows is 0

_FAMILIES: Final = {  # of architectures whose work a random file can have
    Architecture.GPT2: "gpt2",
    Architecture.LLAMA: "llama",
    Architecture.MISTRAL: "llama",
}
_PARTS: Final = {
    "gpt2": (Activation.GELU_TANH, Norm.LAYER, Positions.LEARNED),
    "llama": (Activation.SILU, Norm.RMS, Positions.ROPE),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model.

    ``family`` is its ``model_type``: llama or gpt2. ``head_dim`` 0 becomes dim / n_heads, and
    ``is_tied`` None what the family has: the head of GPT-2 is its embedding.
    """

    n_layers: int
    dim: int
    ffn_dim: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int = 32000
    max_tokens: int = 2048
    family: str = "llama"
    head_dim: int = 0
    is_tied: bool | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from the rest, so that equal shapes compare equal."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.is_tied is None:
            object.__setattr__(self, "is_tied", self.family == "gpt2")

    @property
    def q_dim(self) -> int:
        """Outputs of Q, all heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Outputs of K, and of V, all heads."""
        return self.n_kv_heads * self.head_dim


SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(4, 256, 768, 4, 2, n_vocab=2048),
    "gpt2": Shape(12, 768, 3072, 12, 12, n_vocab=50257, max_tokens=1024, family="gpt2"),
    "llama-110m": Shape(12, 768, 2048, 12, 12),
    "tinyllama-1.1b": Shape(22, 2048, 5632, 32, 4, max_tokens=4096),
    "llama2-7b": Shape(32, 4096, 11008, 32, 32, max_tokens=4096),
    "llama2-13b": Shape(40, 5120, 13824, 40, 40, max_tokens=4096),
    "llama2-70b": Shape(80, 8192, 28672, 64, 8, max_tokens=4096),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, max_tokens=32768),
}
ALIASES: Final[Mapping[str, str]] = {
    "110m": "llama-110m",
    "1.1b": "tinyllama-1.1b",
    "7b": "llama2-7b",
    "13b": "llama2-13b",
    "70b": "llama2-70b",
}


def find_shape(name: str) -> Shape:
    """Return the shape of that name or alias. Raises QsfArgumentError with the known names."""
    shape = SHAPES.get(ALIASES.get(name, name))
    if shape is None:
        raise QsfArgumentError(
            f"shape {name!r} is unknown; known: {', '.join((*SHAPES, *ALIASES))}"
        )
    return shape


def name_of(shape: Shape) -> str:
    """Return the shape's name, or one made of its dimensions."""
    for name, known in SHAPES.items():
        if known == shape:
            return name
    tied = "-tied" if shape.is_tied else ""
    return (
        f"{shape.family}-{shape.n_layers}x{shape.dim}-ffn{shape.ffn_dim}-heads{shape.n_heads}"
        f".{shape.n_kv_heads}.{shape.head_dim}-vocab{shape.n_vocab}-ctx{shape.max_tokens}{tied}"
    )


def layer_entries(shape: Shape) -> list[Entry]:
    """Return the tensors of a layer in the order of a .qsf file."""
    dim, ffn, q, kv = shape.dim, shape.ffn_dim, shape.q_dim, shape.kv_dim
    attention: list[Entry] = [(T.Q, q, dim), (T.K, kv, dim), (T.V, kv, dim)]
    if shape.family == "gpt2":
        return [
            *((kind, 0, dim) for kind in (T.ATTN_NORM, T.ATTN_NORM_BIAS)),
            (T.Q_BIAS, 0, q),
            *((kind, 0, kv) for kind in (T.K_BIAS, T.V_BIAS)),
            *attention,
            (T.ATTN_OUT_BIAS, 0, dim),
            (T.ATTN_OUT, dim, q),
            *((kind, 0, dim) for kind in (T.FFN_NORM, T.FFN_NORM_BIAS)),
            (T.FFN_UP_BIAS, 0, ffn),
            (T.FFN_UP, ffn, dim),
            (T.FFN_DOWN_BIAS, 0, dim),
            (T.FFN_DOWN, dim, ffn),
        ]
    return [
        (T.ATTN_NORM, 0, dim),
        *attention,
        (T.ATTN_OUT, dim, q),
        (T.FFN_NORM, 0, dim),
        (T.FFN_GATE, ffn, dim),
        (T.FFN_UP, ffn, dim),
        (T.FFN_DOWN, dim, ffn),
    ]


# ---- of a file ----


def shape_of_file(path: Path) -> Shape:
    """Return the shape of a .qsf file, so that a file of the same work can be made for a baseline.

    Numbers that change no work may differ: epsilon, the base and the scaling of RoPE, and side
    tables of outliers, which are part of how QSF stores a matrix.

    Raises QsfUnsupportedError for a model whose work no random file has, saying why; QsfIOError and
    QsfFormatError when the file does not open.
    """
    with Reader(path) as reader:
        header, arch = reader.header, reader.arch
        family = _FAMILIES.get(Architecture(header.architecture))
        if family is None:
            name = Architecture(header.architecture).name.lower()
            raise _unsupported(path, f"the architecture {name}")
        shape = Shape(
            header.n_layers,
            header.dim,
            header.ffn_dim,
            header.n_heads,
            header.n_kv_heads,
            header.n_vocab,
            header.max_tokens,
            family,
            header.head_dim,
            arch.tied_head,
        )
        _check_parts(path, header, arch, family)
        wanted = {kind for kind, _, _ in layer_entries(shape)}
        ignored = set(OUTLIERS_OF.values())
        for unit in reader.units[1:-1]:
            found = {TensorType(tensor.type) for tensor in unit.tensors} - ignored
            if found != wanted or any(tensor.index for tensor in unit.tensors):
                raise _unsupported(path, _difference(unit.idx - 1, found, wanted))
        return shape


def _check_parts(path: Path, header: Header, arch: Arch, family: str) -> None:
    found = (header.activation, header.norm, header.positions)
    for value, wanted in zip(found, _PARTS[family], strict=True):
        if value != wanted:
            what = f"{type(wanted).__name__.lower()} {type(wanted)(value).name.lower()}"
            raise _unsupported(path, f"{what} where {family} has {wanted.name.lower()}")
    if 0 < arch.window_tokens < header.max_tokens:
        raise _unsupported(path, f"a sliding window of {arch.window_tokens} tokens")
    if family == "llama" and arch.rope_dims not in (None, header.head_dim):
        raise _unsupported(path, f"RoPE on {arch.rope_dims} of {header.head_dim} dimensions")
    if family == "gpt2" and header.head_dim * header.n_heads != header.dim:
        raise _unsupported(path, f"{header.n_heads} heads of {header.head_dim} in {header.dim}")


def _difference(layer: int, found: set[TensorType], wanted: set[TensorType]) -> str:
    more = sorted(kind.name for kind in found - wanted)
    missing = sorted(kind.name for kind in wanted - found)
    words = [f"layer {layer} with {', '.join(more)}"] if more else []
    words += [f"layer {layer} without {', '.join(missing)}"] if missing else []
    return " and ".join(words) or f"layer {layer} with experts"


def _unsupported(path: Path, what: str) -> QsfUnsupportedError:
    return QsfUnsupportedError(
        f"{path}: {what}: no random GGUF has the same work; give one of the model itself"
    )
