"""The compression of the layers: its names, and the record of what each layer got."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsf.errors import QsfArgumentError
from qsf.file.blocks import load_codec
from qsf.file.layout import Compression, Stored

DEFAULT_COMPRESSION = "none"
COMPRESSIONS: Mapping[str, Compression] = {each.name.lower(): each for each in Compression}


def parse_compression(name: str) -> Compression:
    """Return the compression called ``name``.

    Raises QsfArgumentError for an unknown name, QsfUnsupportedError when the Python package
    for it is missing.
    """
    if name not in COMPRESSIONS:
        raise QsfArgumentError(
            f"compression {name} is unknown; available: {', '.join(COMPRESSIONS)}"
        )
    compression = COMPRESSIONS[name]
    if compression:
        load_codec(compression)
    return compression


class StoredLayers:
    def __init__(self, compression: str) -> None:
        self.compression = parse_compression(compression)
        self._stored: list[Stored] = []

    def note(self, stored: Stored) -> None:
        self._stored.append(stored)

    def meta(self) -> dict[str, Any] | None:
        if self.compression is Compression.NONE:
            return None
        return {
            "asked": self.compression.name.lower(),
            "layers": [
                {
                    "chosen": stored.compression.name.lower(),
                    "ratio": float(f"{stored.stored_bytes / stored.raw_bytes:.4g}"),
                }
                for stored in self._stored
            ],
        }

    def summary(self) -> str | None:
        if self.compression is Compression.NONE:
            return None
        packed = [s for s in self._stored if s.compression != Compression.NONE]
        text = f"layers: {len(self._stored)}, "
        if not packed:
            return text + "compression saves less than 3 %: stored as they are"
        stored_bytes = sum(s.stored_bytes for s in self._stored)
        share = stored_bytes / sum(s.raw_bytes for s in self._stored)
        some = "" if len(packed) == len(self._stored) else f"{len(packed)} of them "
        name = self.compression.name.lower()
        return text + f"{some}compressed with {name}, stored at {100 * share:.0f} %"
