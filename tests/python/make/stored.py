"""What a .qsf file stores: the engine's reader with the bytes of units and tensors, unpacked."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfError
from qsf.file import reader
from qsf.file.layout import BLOCK_HEADER, Compression, Tensor


class Reader(reader.Reader):
    """The engine's reader, which also reads weights. ``verify`` checks their checksums."""

    def read_unit(self, unit_idx: int) -> bytes:
        """Return the raw bytes of a unit."""
        unit = self.unit(unit_idx)
        with self.path.open("rb") as file:
            file.seek(unit.off)
            stored = file.read(unit.stored_bytes)
        if unit.compression == Compression.NONE:
            return stored
        out = bytearray()
        while stored:
            n_stored, n_raw = BLOCK_HEADER.unpack_from(stored)
            out += unpack_block(unit.compression, stored[8 : 8 + n_stored], n_raw)
            stored = stored[8 + n_stored :]
        return bytes(out)

    def read_tensor(self, tensor: Tensor, unit_idx: int | None = None) -> bytes:
        """Return a tensor's data without padding; ``unit_idx``: an expert of this template."""
        unit = self.read_unit(tensor.unit_idx if unit_idx is None else unit_idx)
        return unit[tensor.data_off : tensor.data_off + tensor.data_bytes]

    def tensor(self, unit_idx: int, type: int, index: int = 0) -> Tensor | None:
        """Return the tensor of this type in a unit; None when absent."""
        for tensor in self.unit(unit_idx).tensors:
            if (tensor.type, tensor.index) == (type, index):
                return tensor
        return None


def unpack_block(compression: int, stored: bytes, n_raw: int) -> bytes:
    """Return the raw bytes of a block; its libraries raise their own errors."""
    if len(stored) == n_raw:
        return stored
    if compression == Compression.ZSTD:
        raw = importlib.import_module("zstandard").ZstdDecompressor().decompress(stored)
    else:
        raw = importlib.import_module("lz4.block").decompress(stored, uncompressed_size=n_raw)
    assert len(raw) == n_raw
    return bytes(raw)


def unpack_tokenizer(section: bytes) -> bytes:
    """Return ``tokenizer.json`` of a section TOKN; older files have it as it is."""
    if not section.startswith(b"LZ4\n"):
        return section
    (n_bytes,) = struct.unpack_from("<I", section, 4)
    return unpack_block(Compression.LZ4HC, section[8:], n_bytes)


def decode_outliers(data: bytes, n_rows: int, n_cols: int) -> NDArray[Any]:
    """Return what an outlier table adds to the matrix [n_rows, n_cols] (docs/format.md, 5)."""
    n_tile_rows = -(-n_rows // 16)
    out = np.zeros((16 * n_tile_rows, n_cols), np.float32)
    first = np.frombuffer(data, "<u4", n_tile_rows + 1).astype(int)
    entries = np.frombuffer(data, [("step", "<u2"), ("delta", "<f2")], offset=4 * len(first))
    for tile_row in range(n_tile_rows):
        position = -1
        for step, delta in entries[first[tile_row] : first[tile_row + 1]]:
            position += int(step)
            out[16 * tile_row + position % 16, position // 16] += np.float32(delta)
    return out[:n_rows]


def verify_file(path: Path) -> None:
    """Check every byte. Raises QsfError."""
    with reader.Reader(path) as r:
        r.verify()


def fault_of(path: Path) -> QsfError | None:
    """Return what the reader has against the file, in one printable line; None: nothing."""
    try:
        verify_file(path)
    except QsfError as error:
        fault = error
    else:
        return None
    assert str(fault).isascii()
    assert str(fault).isprintable()
    return fault


def verdict(path: Path, data: bytes | bytearray) -> type[QsfError] | None:
    """Return the kind of error of a file with these bytes; None: it is good."""
    write_fresh(path, data)
    fault = fault_of(path)
    return None if fault is None else type(fault)


# ---- bytes as a new file, for tests that write one path again and again ----
def write_fresh(path: Path, data: bytes | bytearray) -> None:
    """Write a new file in the place of an old one.

    Some file systems write a file that is truncated and filled again to the disk at once, which
    takes milliseconds.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(data)
