"""The files that are measured: bytes of a token, and random weights that are made once."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsf.errors import QsfConversionError, QsfFormatError, QsfIOError
from qsf.file.family import type_of
from qsf.file.partial import remove_abandoned
from qsf.file.reader import Reader
from qsf.file.sizes import size_of, token_bytes
from qsf_bench.models import random_gguf, random_qsf
from qsf_bench.models.random_qsf import embed_type_of
from qsf_bench.models.shapes import Shape
from qsf_converter.rounding.plan import parse_quant_type
from qsf_converter.sources.gguf_file import MAGIC, GgufHead, GgufTensor, read_head

Progress = Callable[[int, int], None]

_SPARE_BYTES: Final = 64 << 20  # left free on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file in numbers, from its head."""

    path: Path
    type: str  # the engine's name: ``4bit``, ``Q4_K_M``
    n_weights: int
    tensor_bytes: int
    token_bytes: int  # of weights that generating one token reads
    max_tokens: int

    @property
    def bits_per_weight(self) -> float:
        """Of all tensors."""
        return 8 * self.tensor_bytes / self.n_weights


def is_gguf(path: Path) -> bool:
    """Return whether the file begins as GGUF files do. Raises QsfIOError."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error


def read_facts(path: Path) -> FileFacts:
    """Return the facts of a .qsf or GGUF file.

    Raises QsfIOError if the system refuses, QsfFormatError if it is neither or damaged.
    """
    if is_gguf(path):
        return _gguf_facts(path)
    with Reader(path) as reader:
        size = size_of(reader)
        return FileFacts(
            path=path,
            type=type_of(reader),
            n_weights=size.n_weights,
            tensor_bytes=size.tensor_bytes,
            token_bytes=size.token_bytes,
            max_tokens=reader.header.max_tokens,
        )


def _gguf_facts(path: Path) -> FileFacts:
    try:
        with path.open("rb", buffering=0) as file:
            head = read_head(path, file)
    except QsfConversionError as error:
        raise QsfFormatError(str(error)) from error
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    tensors = head.tensors.values()
    tensor_bytes = sum(tensor.n_bytes for tensor in tensors)
    names = ["position_embd.weight"]
    names += ["token_embd.weight"] if "output.weight" in head.tensors else []
    tables = [head.tensors[name] for name in names if name in head.tensors]
    return FileFacts(
        path=path,
        type=_gguf_type(head),
        n_weights=sum(math.prod(tensor.shape) for tensor in tensors),
        tensor_bytes=tensor_bytes,
        token_bytes=token_bytes(
            tensor_bytes,
            sum(_unused_bytes(head, tensor) for tensor in tensors),
            [(table.shape[0], table.n_bytes) for table in tables],
        ),
        max_tokens=int(head.metadata.get(f"{_arch(head)}.context_length", 0)),
    )


def _arch(head: GgufHead) -> str:
    return str(head.metadata.get("general.architecture"))


def _unused_bytes(head: GgufHead, tensor: GgufTensor) -> int:
    """Return the bytes of experts that a token does not choose."""
    if len(tensor.shape) < 3 or not tensor.name.startswith("blk."):
        return 0
    n_used = int(head.metadata.get(f"{_arch(head)}.expert_used_count", tensor.shape[0]))
    return tensor.n_bytes - tensor.n_bytes * n_used // tensor.shape[0]


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


# ---- random weights ----


def default_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/qsf/bench`` or ``~/.cache/qsf/bench``."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification ignores relative paths.
    return (root if root.is_absolute() else Path.home() / ".cache") / "qsf" / "bench"


def find_or_make(
    name: str, shape: Shape, type_name: str, folder: Path, progress: Progress | None = None
) -> Path:
    """Return a file of random weights; makes it unless the folder has it.

    Args:
        name: of the shape, for the file's name.
        shape: the model's dimensions.
        type_name: one of `random_qsf.QUANT_TYPES`, or of `random_gguf.FILE_TYPES` for a GGUF.
        folder: where random weights are kept.
        progress: called with bytes written and to be written, while a file is made.

    Raises:
        QsfIOError: the disk has not enough room, which is checked before writing, or the system
            refuses.
    """
    is_qsf = type_name not in random_gguf.FILE_TYPES
    generator, suffix = (random_qsf, "qsf") if is_qsf else (random_gguf, "gguf")
    # A finished file has this name: files are written under another one, and then renamed.
    path = folder / f"{name}-{type_name}-v{generator.GENERATOR}.{suffix}"
    if path.exists():
        return path
    if is_qsf:
        _make_room(path, random_qsf.qsf_bytes(shape, type_name))
        dtypes = parse_quant_type(type_name), embed_type_of(type_name)
        random_qsf.write_model(path, shape, *dtypes, progress=progress)
    else:
        _make_room(path, random_gguf.gguf_bytes(shape, type_name))
        random_gguf.write_model(path, shape, type_name, progress=progress)
    return path


def _make_room(path: Path, total_bytes: int) -> None:
    """Make the folder; refuse if the file does not fit."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        free_bytes = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise QsfIOError(
            f"{path.parent}: {error.strerror}; --cache FOLDER puts models elsewhere"
        ) from error
    if free_bytes < total_bytes + _SPARE_BYTES:
        raise QsfIOError(
            f"{path}: {total_bytes / 1e6:.0f} MB and {_SPARE_BYTES / 1e6:.0f} MB to spare are "
            f"needed, {free_bytes / 1e6:.0f} MB are free there; --cache FOLDER puts models "
            "elsewhere"
        )
