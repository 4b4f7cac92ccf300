"""The head of a GGUF model that is split into several files: that of all parts together.

Each part has a head of its own. The first one has the metadata of the model; each has the part's
number from 0 (``split.no``) and the number of parts (``split.count``).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

from qsf.errors import QsfConversionError
from qsf.file.gguf_parts import MAX_PARTS, part_names
from qsf_converter.sources.gguf_file import GgufHead, read_head


def read_parts(
    place: Path, open_raw: Callable[[Path], io.RawIOBase]
) -> tuple[GgufHead, tuple[Path, ...]]:
    """Read the head of a file, or of all parts of which it is the first.

    Returns the head, whose tensors name their parts, and the paths of all parts. The files, opened
    by ``open_raw`` in this order, stay open. Raises QsfConversionError if a part is missing or
    another model's, or if the file is not the first part.
    """
    head = read_head(place, open_raw(place))
    n_parts = _count(head, "split.count", 1)
    if n_parts in (0, 1):
        return head, (place,)
    names = part_names(place.name)
    if _count(head, "split.no") != 0 or n_parts != len(names) or place.name != names[0]:
        raise _not_the_first(place, head, names)
    tensors = dict(head.tensors)
    paths = [place.with_name(name) for name in names]
    for i, path in enumerate(paths[1:], 1):
        if not path.exists():
            raise QsfConversionError(
                f"{path} is missing: it is part {i + 1} of the {n_parts} parts of {place.name}"
            )
        part = read_head(path, open_raw(path))
        if (_count(part, "split.no"), _count(part, "split.count")) != (i, n_parts):
            raise QsfConversionError(
                f"{path}: by its metadata this is not part {i + 1} of {n_parts}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise QsfConversionError(f"{path}: tensor {name[:200]} is in an earlier part too")
            tensors[name] = dataclasses.replace(tensor, part=i)
    n_tensors = _count(head, "split.tensors.count", len(tensors))
    if n_tensors != len(tensors):
        raise QsfConversionError(
            f"{place}: its {n_parts} parts have {len(tensors)} tensors, and it says {n_tensors}"
        )
    return dataclasses.replace(head, tensors=tensors), tuple(paths)


def _count(head: GgufHead, key: str, default: int = -1) -> int:
    """Return a number of the metadata; -1 if the value is not a number."""
    value = head.metadata.get(key, default)
    return value if isinstance(value, int) else -1


def _not_the_first(place: Path, head: GgufHead, names: tuple[str, ...]) -> QsfConversionError:
    if len(names) > 1 and place.name != names[0]:
        return QsfConversionError(
            f"{place} is one of {len(names)} parts: name the first, {place.with_name(names[0])}"
        )
    number, n_parts = (str(head.metadata.get(f"split.{key}"))[:20] for key in ("no", "count"))
    return QsfConversionError(
        f"{place}: its metadata say that it is part {number} (the first is 0) of {n_parts}, which "
        f"must be up to {MAX_PARTS} and part of the name: NAME-00001-of-00003.gguf"
    )
