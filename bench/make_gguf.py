"""Write a GGUF model of a given shape with random weights, for llama.cpp as the baseline.

The command line of qsf_bench/models/random_gguf.py, which says what the file is.

Needs: pip install gguf
Usage: python bench/make_gguf.py OUT.gguf --shape tinyllama-1.1b --type Q4_K_M
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qsf.errors import QsfError
from qsf_bench.models.random_gguf import FILE_TYPES, tensors, write_model
from qsf_bench.models.shapes import SHAPES, find_shape


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_0")
    args = parser.parse_args()
    shape = find_shape(args.shape)
    try:
        write_model(args.out, shape, args.type)
    except QsfError as error:
        raise SystemExit(str(error)) from None
    n_weights = sum(tensor.n_values for tensor in tensors(shape, args.type))
    n_bytes = args.out.stat().st_size
    print(f"{args.out}: {n_bytes / 1e6:.0f} MB, {n_bytes * 8 / n_weights:.2f} bits per weight")


if __name__ == "__main__":
    main()
