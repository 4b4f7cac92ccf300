"""Random models, made once: a folder of files whose names contain all their parameters."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Final

from qsf.errors import QsfError, QsfIOError
from qsf.file.layout import dtype_name
from qsf.file.partial import remove_abandoned
from qsf_bench.models import random_gguf, random_qsf
from qsf_bench.models.facts import MOST_BITS_APART, FileFacts, read_facts
from qsf_bench.models.random_gguf import BASELINE_TYPES, gguf_bits_per_weight, gguf_bytes
from qsf_bench.models.random_qsf import embed_type_of, qsf_bits_per_weight, qsf_bytes
from qsf_bench.models.shapes import Shape, name_of
from qsf_converter.rounding.plan import DEFAULT_EMBED_TYPE, parse_quant_type

Progress = Callable[[int, int], None]

_SMALL_EMBED_TYPE: Final = "4bit"
_SPARE_BYTES: Final = 64 << 20  # left free on the disk


def default_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/qsf/bench`` or ``~/.cache/qsf/bench``.

    Raises QsfIOError if the user has no home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # the specification ignores relative paths
        try:
            root = Path.home() / ".cache"
        except RuntimeError as error:
            raise QsfIOError(
                f"there is no home folder to keep models in ({error}): --cache FOLDER names a place"
            ) from error
    return root / "qsf" / "bench"


def embed_type_beside_baseline(shape: Shape, quant_type: str) -> str:
    """Return the type of embedding and head with which a file counts as the baseline's same work.

    The default of qsf-convert, 8bit; or 4bit if the tables are so large that bits per weight would
    differ by more than 25 %.
    """
    usual = dtype_name(embed_type_of(quant_type))
    if quant_type not in BASELINE_TYPES or usual != DEFAULT_EMBED_TYPE:
        return usual
    baseline_bits = gguf_bits_per_weight(shape, BASELINE_TYPES[quant_type])

    def bits_apart(embed_type: str) -> float:
        bits = qsf_bits_per_weight(shape, quant_type, embed_type=embed_type)
        return max(bits, baseline_bits) / min(bits, baseline_bits) - 1

    if bits_apart(usual) <= MOST_BITS_APART or bits_apart(usual) <= bits_apart(_SMALL_EMBED_TYPE):
        return usual
    return _SMALL_EMBED_TYPE


def find_or_make(
    engine: str,
    shape: Shape,
    type_name: str,
    *,
    embed_type: str | None = None,
    folder: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Return a file of random weights; makes it unless the cache has it whole.

    Args:
        engine: selects .qsf or GGUF.
        shape: the model's dimensions.
        type_name: one of `random_qsf.QUANT_TYPES`, or of `random_gguf.FILE_TYPES`.
        embed_type: of embedding and head, .qsf only; None: see `embed_type_beside_baseline`.
        folder: of the cache; None: `default_folder`.
        seed: of the weights.
        progress: called with bytes written and to be written, while a file is made.

    Raises:
        QsfArgumentError: an unknown type.
        QsfIOError: the disk has not enough room, which is checked before writing, or the system
            refuses.
        QsfUnsupportedError: making a GGUF needs the missing package gguf.
    """
    folder = default_folder() if folder is None else folder
    stem = f"{name_of(shape)}-{type_name}"
    if engine == "qsf":
        embed_type = embed_type or embed_type_beside_baseline(shape, type_name)
        total_bytes = qsf_bytes(shape, type_name, embed_type=embed_type)
        stem += f"-embed-{embed_type}-v{random_qsf.GENERATOR}-seed{seed}"
    else:
        total_bytes = gguf_bytes(shape, type_name)
        stem += f"-v{random_gguf.GENERATOR}-seed{seed}"
    path = folder / f"{stem}{'.qsf' if engine == 'qsf' else '.gguf'}"
    if _is_whole(path, shape):
        return path
    _make_room(path, total_bytes)
    if engine == "qsf":
        quant_dtype = parse_quant_type(type_name)
        embed_dtype = embed_type_of(type_name, embed_type)
        random_qsf.write_model(path, shape, quant_dtype, embed_dtype, seed=seed, progress=progress)
    else:
        random_gguf.write_model(path, shape, type_name, seed=seed, progress=progress)
    return path


def _is_whole(path: Path, shape: Shape) -> bool:
    """Return whether the file exists with the size that its head states, and with this shape."""
    if not path.exists():
        return False
    try:
        facts = read_facts(path)
    except QsfError:
        return False
    names = {field.name for field in fields(FileFacts)}
    dimensions = [field.name for field in fields(Shape) if field.name in names]
    return all(getattr(facts, name) == getattr(shape, name) for name in dimensions)


def _make_room(path: Path, total_bytes: int) -> None:
    """Make the folder; refuse if the file does not fit."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise QsfIOError(
            f"{folder}: {error.strerror}; --cache FOLDER puts models elsewhere"
        ) from error
    needed_bytes = total_bytes + _SPARE_BYTES
    if free_bytes < needed_bytes:
        raise QsfIOError(
            f"{path}: {total_bytes / 1e6:.0f} MB and {_SPARE_BYTES / 1e6:.0f} MB to spare are "
            f"needed, {free_bytes / 1e6:.0f} MB are free there; --cache FOLDER puts models "
            "elsewhere"
        )
