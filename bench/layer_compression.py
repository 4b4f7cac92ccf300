"""What compressing the layers of a trained model saves, for each type, and what decoding costs.

Converts the model to every quantisation type, packs its layers as qsf-convert --compress would and
times how fast one thread packs and decodes them. Prints a table: the share that is
stored, MB of layers packed and decoded a second (median of 5 rounds, 10^6 bytes), and the disk
below whose speed reading the compressed layers is at least 3 % faster. Random weights would not
do: the codes of trained ones are distributed otherwise.

Usage: python bench/layer_compression.py MODEL_DIR ... [--quant-type TYPE ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from qsf.file.blocks import LZ4HC_LEVEL, ZSTD_LEVEL, pack_block
from qsf.file.layout import COMPRESSED_BLOCK_BYTES, Compression
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.rounding.compression import LEAST_GAIN, Measured, measure
from qsf_converter.rounding.plan import QUANT_TYPES

CODECS = (  # name, compression, level
    ("lz4", Compression.LZ4, None),
    (f"lz4hc {LZ4HC_LEVEL}", Compression.LZ4HC, LZ4HC_LEVEL),
    (f"zstd {ZSTD_LEVEL}", Compression.ZSTD, ZSTD_LEVEL),
    ("zstd 19", Compression.ZSTD, 19),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    model: str
    quant_type: str
    codec: str
    measured: Measured
    pack_bytes_per_s: float


def layer_blocks(path: Path) -> list[bytes]:
    """Return the blocks of all layers as compression cuts them."""
    step = COMPRESSED_BLOCK_BYTES
    blocks = []
    with Reader(path) as reader:
        for unit in reader.layers:
            raw = reader.read_unit(unit.idx)
            blocks += [raw[at : at + step] for at in range(0, len(raw), step)]
    return blocks


def rows_of(model_dir: Path, quant_type: str) -> list[Row]:
    """Convert the model to a type and measure every codec on it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.qsf"
        convert(model_dir, path, quant_type=quant_type)
        blocks = layer_blocks(path)
    rows = []
    for name, compression, level in CODECS:
        started = time.perf_counter()
        for block in blocks:
            pack_block(compression, block, level=level)
        pack_s = time.perf_counter() - started
        measured = measure(compression, blocks, level=level)
        speed = measured.raw_bytes / pack_s
        rows.append(Row(model_dir.name, quant_type, name, measured, speed))
    return rows


def line(row: Row) -> str:
    """Return a row of the table."""
    m = row.measured
    pays = m.ratio <= 1 - LEAST_GAIN
    is_plain = m.ratio >= 1  # no block shrank, so there is nothing to decode
    decode = "" if is_plain else f"{m.decode_bytes_per_s / 1e6:.0f}"
    limit = f"{(1 - LEAST_GAIN) * m.decode_bytes_per_s / 1e6:.0f}" if pays else "never"
    return (
        f"| {row.model} | {row.quant_type} | {row.codec} | {100 * m.ratio:.1f} % |"
        f" {row.pack_bytes_per_s / 1e6:.0f} | {decode} | {limit} |"
    )


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dirs", type=Path, nargs="+", metavar="MODEL_DIR")
    parser.add_argument("--quant-type", nargs="+", choices=QUANT_TYPES, default=list(QUANT_TYPES))
    args = parser.parse_args()
    print(
        "| model | type | codec | stored | packs MB/s | decodes MB/s | pays on disks below MB/s |"
    )
    print("|---|---|---|---|---|---|---|")
    for model_dir in args.model_dirs:
        for quant_type in args.quant_type:
            for row in rows_of(model_dir, quant_type):
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
