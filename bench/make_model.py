"""Write a .qsf file of a given shape and type with random weights, without a checkpoint.

The command line of qsf_bench/models/random_qsf.py, which describes the file. With --sparse N
only the first N layers have weights, the others are holes in the file.

Usage: python bench/make_model.py OUT.qsf --shape tinyllama-1.1b --quant-type 2bit
           [--embed-type 8bit] [--tokenizer-from examples/tiny-llama] [--seed 0]
           [--compress zstd | --sparse 1]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from qsf.errors import QsfError
from qsf.file.layout import Compression
from qsf_bench.models.random_qsf import embed_type_of, write_model
from qsf_bench.models.shapes import SHAPES, find_shape
from qsf_converter.rounding.compression import (
    AUTO,
    COMPRESSIONS,
    DEFAULT_COMPRESSION,
    parse_compression,
)
from qsf_converter.rounding.plan import QUANT_TYPES


def main() -> None:
    """Parse the command line, write the file, print the duration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--quant-type", choices=QUANT_TYPES, default="4bit")
    parser.add_argument(
        "--embed-type", choices=QUANT_TYPES, help="default: 8bit, or f16 with --quant-type f16"
    )
    parser.add_argument("--tokenizer-from", type=Path, help="folder with a tokenizer.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compress", choices=[c for c in COMPRESSIONS if c != AUTO], default=DEFAULT_COMPRESSION
    )
    parser.add_argument("--sparse", type=int, metavar="N", help="only N layers, the rest are holes")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        write_model(
            args.out,
            find_shape(args.shape),
            QUANT_TYPES[args.quant_type],
            embed_type_of(args.quant_type, args.embed_type),
            tokenizer_from=args.tokenizer_from,
            seed=args.seed,
            compression=parse_compression(args.compress) or Compression.NONE,
            n_real_layers=args.sparse,
        )
    except QsfError as error:
        raise SystemExit(str(error)) from None
    elapsed_s = time.monotonic() - started
    file = args.out.stat()
    print(
        f"{args.out}: {file.st_size / 1e6:.0f} MB, {file.st_blocks * 512 / 1e6:.0f} MB on the disk,"
        f" {elapsed_s:.1f} s"
    )


if __name__ == "__main__":
    main()
