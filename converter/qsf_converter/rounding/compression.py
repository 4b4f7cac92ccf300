"""Which compression a layer gets: the requested one, or (auto) the one that measures fastest.

Reading and decoding overlap when the model runs, so a layer takes the longer of the two times.
``auto`` measures both on a sample of the layer's blocks, and compresses only if that is faster
than reading the layer uncompressed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsf.errors import QsfArgumentError, QsfUnsupportedError
from qsf.file.blocks import load_codec, pack_block, unpack_block
from qsf.file.layout import BLOCK_HEADER, Compression, Stored

AUTO = "auto"
DEFAULT_COMPRESSION = "none"
COMPRESSIONS: Mapping[str, Compression | None] = {
    **{compression.name.lower(): compression for compression in Compression},
    AUTO: None,
}
SAMPLE_BLOCKS = 8
LEAST_GAIN = 0.03  # of the time; a smaller gain is not worth decoding

_DECODE_ROUNDS = 5
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of compressing some blocks."""

    compression: Compression
    stored_bytes: int
    raw_bytes: int
    decode_s: float  # for all blocks, on one thread

    @property
    def ratio(self) -> float:
        """Stored bytes for each raw byte."""
        return self.stored_bytes / self.raw_bytes

    @property
    def decode_bytes_per_s(self) -> float:
        """Raw bytes decoded a second; infinite if no block had to be decoded."""
        return self.raw_bytes / self.decode_s if self.decode_s > 0 else math.inf


def choose(measured: Iterable[Measured], disk_bytes_per_s: float) -> Compression:
    """Return the compression whose blocks are available first.

    The time is ``max(stored / disk, raw / decode)``, which must be at least 3 % less than ``raw /
    disk``. Of equal times the one that decodes faster wins.
    """

    def seconds(m: Measured) -> float:
        return max(m.stored_bytes / disk_bytes_per_s, m.decode_s)

    best = min(measured, key=lambda m: (seconds(m) / m.raw_bytes, m.decode_s), default=None)
    if best is None or seconds(best) > best.raw_bytes / disk_bytes_per_s * (1 - LEAST_GAIN):
        return Compression.NONE
    return best.compression


def measure(
    compression: Compression,
    blocks: Sequence[bytes],
    *,
    level: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Pack the blocks and time how one thread decodes them, with the libraries the engine uses.

    A block that does not shrink is stored uncompressed and needs no decoding. The median of
    a few rounds; the first is not counted.
    """
    packed = [pack_block(compression, block, level=level) for block in blocks]
    pairs = [(p, len(b)) for p, b in zip(packed, blocks, strict=True) if len(p) < len(b)]
    rounds = []
    for _ in range(_DECODE_ROUNDS + 1 if pairs else 0):
        started = clock()
        for stored, n_raw in pairs:
            unpack_block(compression, stored, n_raw)
        rounds.append(clock() - started)
    return Measured(
        compression,
        sum(len(p) + BLOCK_HEADER.size for p in packed),
        sum(map(len, blocks)),
        sorted(rounds[1:])[_DECODE_ROUNDS // 2] if rounds else 0.0,
    )


def parse_compression(name: str) -> Compression | None:
    """Return the compression called ``name``, None for auto.

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


class Chooser:
    """Chooses the compression of each layer, and records the result."""

    def __init__(self, compression: str, disk_bytes_per_s: float | None, *, is_given: bool) -> None:
        """Store the requested compression; auto needs the speed of the disk to compress anything.

        ``is_given``: the speed was given by the user, not measured.
        """
        self.compression = compression
        self._fixed = parse_compression(compression)
        self._disk_bytes_per_s = disk_bytes_per_s
        self._is_given = is_given
        self._layers: list[dict[str, Any]] = []
        self._stored: list[Stored] = []
        self.warnings: list[str] = []
        self._candidates: list[Compression] = []
        if self._fixed is None:
            self._candidates = self._available()
            if disk_bytes_per_s is None:
                self.warnings.append(
                    "the disk's speed could not be measured; give it with --disk-speed"
                )

    def _available(self) -> list[Compression]:
        available = []
        for compression in (Compression.LZ4, Compression.LZ4HC, Compression.ZSTD):
            try:
                load_codec(compression)
            except QsfUnsupportedError as error:
                self.warnings.append(f"not tried: {error}")
            else:
                available.append(compression)
        return available

    def for_layer(self, sample: Callable[[int], Sequence[bytes]]) -> Compression:
        """Return the compression of the next layer; ``sample(n)`` gives n of its blocks."""
        if self._fixed is not None:
            return self._fixed
        if self._disk_bytes_per_s is None:
            return Compression.NONE
        blocks = sample(SAMPLE_BLOCKS)
        measured = [measure(compression, blocks) for compression in self._candidates]
        chosen = choose(measured, self._disk_bytes_per_s)
        self._layers.append({m.compression.name.lower(): _figures(m) for m in measured})
        return chosen

    def note(self, stored: Stored) -> None:
        """Record the compression and size that a layer got."""
        self._stored.append(stored)

    def meta(self) -> dict[str, Any] | None:
        """Return the record for META; None if no compression was requested."""
        if self._fixed is Compression.NONE:
            return None
        layers: list[dict[str, Any]] = [
            {
                "chosen": stored.compression.name.lower(),
                "ratio": _rounded(stored.stored_bytes / stored.raw_bytes),
            }
            for stored in self._stored
        ]
        if self._fixed is not None or self._disk_bytes_per_s is None:
            return {"asked": self.compression, "layers": layers}
        for layer, sampled in zip(layers, self._layers, strict=True):
            layer["sampled"] = sampled
        return {
            "asked": self.compression,
            "disk_mb_per_s": _rounded(self._disk_bytes_per_s / _MB),
            "disk_speed_from": "--disk-speed" if self._is_given else "measured",
            "layers": layers,
        }

    def summary(self) -> str | None:
        """One line for people: the compressions of the layers."""
        if self._fixed is Compression.NONE:
            return None
        packed = [s for s in self._stored if s.compression != Compression.NONE]
        text = f"layers: {len(self._stored)}, "
        if packed:
            names = sorted({s.compression.name.lower() for s in packed})
            stored_bytes = sum(s.stored_bytes for s in self._stored)
            share = stored_bytes / sum(s.raw_bytes for s in self._stored)
            some = "" if len(packed) == len(self._stored) else f"{len(packed)} of them "
            text += f"{some}compressed with {' and '.join(names)}, stored at {100 * share:.0f} %"
        elif self._fixed is not None:
            text += "compression saves less than 3 %: stored as they are"
        elif self._disk_bytes_per_s is None:
            text += "the disk's speed is unknown: stored as they are"
        else:
            text += "no compression reads 3 % faster: stored as they are"
        if self._fixed is None and self._disk_bytes_per_s is not None:
            speed = self._disk_bytes_per_s / _MB
            text += f" (disk {speed:.0f} MB/s, {'given' if self._is_given else 'measured'})"
        return text


def _figures(m: Measured) -> dict[str, Any]:
    speed = m.decode_bytes_per_s
    return {
        "ratio": _rounded(m.ratio),
        "decode_mb_per_s": None if math.isinf(speed) else _rounded(speed / _MB),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
