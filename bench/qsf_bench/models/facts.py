"""The cost of a token by the file alone: bytes and multiply-adds, of .qsf and GGUF files.

Reads only the heads of files: opens no model and reads no weights.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from qsf.errors import (
    QsfArgumentError,
    QsfConversionError,
    QsfFormatError,
    QsfIOError,
    QsfUnsupportedError,
)
from qsf.file.layout import dtype_name
from qsf.file.reader import Reader
from qsf.file.sizes import ModelSize, size_of, token_bytes
from qsf_bench.models.random_gguf import BASELINE_TYPES, FILE_TYPES, gguf_bits_per_weight
from qsf_bench.models.shapes import SHAPES, Shape
from qsf_converter.sources.gguf_file import MAGIC, GgufHead, GgufTensor, read_head

MOST_WEIGHTS_APART: Final = 0.01
MOST_BITS_APART: Final = 0.25

_DIMENSIONS: Final = {
    "n_layers": "layers",
    "dim": "hidden dimension",
    "n_heads": "heads",
    "n_kv_heads": "KV heads",
    "head_dim": "head dimension",
    "ffn_dim": "FFN dimension",
    "n_vocab": "vocabulary",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts(ModelSize):
    """A file in numbers.

    Attributes:
        shape_name: one of `shapes.SHAPES` with these dimensions, else the dimensions in words.
        type: the engine's name of it: ``4bit``, ``Q4_K_M``.
    """

    path: Path
    engine: str
    shape_name: str
    type: str
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    n_vocab: int
    max_tokens: int

    @property
    def bits_per_weight(self) -> float:
        """Of all tensors."""
        return 8 * self.tensor_bytes / self.n_weights


def read_facts(path: Path) -> FileFacts:
    """Return the facts of a .qsf or GGUF file.

    Raises QsfIOError if the system refuses, QsfFormatError if it is neither or damaged.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    return _gguf_facts(path) if magic == MAGIC else _qsf_facts(path)


def _qsf_facts(path: Path) -> FileFacts:
    with Reader(path) as reader:
        header = reader.header
        dimensions = {name: getattr(header, name) for name in (*_DIMENSIONS, "max_tokens")}
        return FileFacts(
            path=path,
            engine="qsf",
            type=dtype_name(header.dtype),
            shape_name=_shape_name(dimensions),
            **asdict(size_of(reader)),
            **dimensions,
        )


def _gguf_facts(path: Path) -> FileFacts:
    try:
        with path.open("rb", buffering=0) as file:
            head = read_head(path, file)
            file_bytes = file.seek(0, 2)
    except QsfConversionError as error:
        raise QsfFormatError(str(error)) from error
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    n_parts = head.metadata.get("split.count", 0)
    if isinstance(n_parts, int) and n_parts > 1:
        raise QsfUnsupportedError(
            f"{path}: it is one of {n_parts} parts; join them with llama-gguf-split --merge"
        )
    dimensions = _gguf_dimensions(path, head)
    tensors = head.tensors.values()
    is_tied = "output.weight" not in head.tensors
    names = ["position_embd.weight"] + ([] if is_tied else ["token_embd.weight"])
    tables = [head.tensors[name] for name in names if name in head.tensors]
    in_layers = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1]
    tensor_bytes = sum(tensor.n_bytes for tensor in tensors)
    return FileFacts(
        path=path,
        engine="llama.cpp",
        type=_gguf_type(head),
        shape_name=_shape_name(dimensions),
        n_weights=sum(math.prod(tensor.shape) for tensor in tensors),
        file_bytes=file_bytes,
        tensor_bytes=tensor_bytes,
        token_bytes=token_bytes(
            tensor_bytes,
            sum(t.n_bytes - _used(head, t, t.n_bytes) for t in in_layers),
            [(table.shape[0], table.n_bytes) for table in tables],
        ),
        token_madds=sum(_used(head, t, math.prod(t.shape)) for t in in_layers),
        head_madds=dimensions["n_vocab"] * dimensions["dim"],
        **dimensions,
    )


def _used(head: GgufHead, tensor: GgufTensor, amount: int) -> int:
    """Return the share of ``amount`` that a token uses: of experts, only the chosen ones."""
    if len(tensor.shape) < 3:
        return amount
    arch = head.metadata["general.architecture"]
    n_used = head.metadata.get(f"{arch}.expert_used_count", tensor.shape[0])
    return amount * int(n_used) // tensor.shape[0]


def _gguf_dimensions(path: Path, head: GgufHead) -> dict[str, int]:
    arch = head.metadata.get("general.architecture")

    def number(key: str, default: int | None = None) -> int:
        value: Any = head.metadata.get(f"{arch}.{key}", default)
        value = value.tolist() if hasattr(value, "tolist") else value  # one value for each layer
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            shown = "missing" if value is None else f"{str(value)[:40]}, expected one number"
            raise QsfFormatError(f"{path}: {arch}.{key} is {shown}")
        return value

    if "token_embd.weight" not in head.tensors:
        raise QsfFormatError(f"{path}: there is no tensor token_embd.weight")
    n_heads, dim = number("attention.head_count"), number("embedding_length")
    return {
        "n_layers": number("block_count"),
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": number("attention.head_count_kv", n_heads),
        "head_dim": number("attention.key_length", dim // n_heads),
        "ffn_dim": number("expert_feed_forward_length", number("feed_forward_length")),
        "n_vocab": head.tensors["token_embd.weight"].shape[0],
        "max_tokens": number("context_length"),
    }


def _gguf_type(head: GgufHead) -> str:
    """Return the name of the mixture, or of the type of most weights."""
    from gguf import LlamaFileType  # late: a tenth of a second

    stated = head.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in LlamaFileType._value2member_map_:
        return LlamaFileType(stated).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    counts: Counter[str] = Counter()
    for tensor in head.tensors.values():
        counts[tensor.type] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0]


def _shape_name(dimensions: Mapping[str, int]) -> str:
    for name, shape in SHAPES.items():
        if all(getattr(shape, field) == dimensions[field] for field in _DIMENSIONS):
            return name
    heads = f"{dimensions['n_heads']}/{dimensions['n_kv_heads']} heads"
    return (
        f"{dimensions['n_layers']} x {dimensions['dim']}, FFN {dimensions['ffn_dim']}, {heads}, "
        f"vocabulary {dimensions['n_vocab']}"
    )


# ---- the same work ----


def check_same_work(a: FileFacts, b: FileFacts) -> None:
    """Raise QsfArgumentError with both sides' numbers, unless the files are the same work.

    Dimensions must be equal, weights within 1 %, bits per weight within 25 % of the smaller.
    """
    differences = [
        f"{label}: {getattr(a, name)} and {getattr(b, name)}"
        for name, label in _DIMENSIONS.items()
        if getattr(a, name) != getattr(b, name)
    ]
    if _apart(a.n_weights, b.n_weights) > MOST_WEIGHTS_APART:
        differences.append(f"weights: {a.n_weights:,} and {b.n_weights:,}")
    bits_apart = _apart(a.bits_per_weight, b.bits_per_weight)
    if bits_apart > MOST_BITS_APART:
        differences.append(
            f"bits per weight {100 * bits_apart:.0f} % apart, allowed: {100 * MOST_BITS_APART:.0f}"
        )
    if differences:
        raise QsfArgumentError(
            f"{describe_size(a)} and {describe_size(b)} are not the same work: "
            + "; ".join(differences)
            + ". Compare files of one model that have nearly the same bits per weight"
        )


def baseline_type(quant_type: str, shape: Shape, bits_per_weight: float) -> str:
    """Return the type of llama.cpp that a .qsf file of this type and shape is compared with.

    The type of `BASELINE_TYPES`, unless its file would not count as the same work: then, and for
    "mixed", the type nearest in bits per weight.
    """

    def apart(name: str) -> float:
        return _apart(gguf_bits_per_weight(shape, name), bits_per_weight)

    named = BASELINE_TYPES.get(quant_type)
    if named is not None and apart(named) <= MOST_BITS_APART:
        return named
    return min(FILE_TYPES, key=apart)


def describe_size(facts: FileFacts) -> str:
    """Return name, type, bits per weight and size in words."""
    return (
        f"{facts.path.name} ({facts.engine} {facts.type}, {facts.bits_per_weight:.2f} bits per "
        f"weight, {facts.file_bytes / 1e6:.1f} MB)"
    )


def _apart(a: float, b: float) -> float:
    return abs(a - b) / min(a, b)
