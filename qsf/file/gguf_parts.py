"""Names of the files of a GGUF model that is split: ``NAME-00001-of-00003.gguf`` and so on."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

MAX_PARTS = 512  # open at the same time

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts, the first one first; of an unsplit file its own name."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[2]) <= MAX_PARTS:
        return (name,)
    start, end = name[: match.start()], name[match.end() - len(".gguf") :]
    return tuple(f"{start}-{i:05}-of-{match[2]}{end}" for i in range(1, int(match[2]) + 1))


def name_without_part(name: str) -> str:
    """Return the name that the file would have if it were not split."""
    return _PART.sub(".gguf", name)
