"""Print the tables of docs/small-machines.md: memory of well-known shapes, by their plans.

Files are made with holes for all layers but one, planned and removed: nothing is run.

Usage: python bench/small_machines.py [--quant-type 4bit] [SHAPE...]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qsf.cli.plan import plans_of
from qsf.errors import QsfError
from qsf.file.layout import Compression
from qsf.file.reader import Reader
from qsf.file.sizes import size_of
from qsf_bench.models.random_qsf import embed_type_of, write_model
from qsf_bench.models.shapes import find_shape
from qsf_converter.rounding.plan import QUANT_TYPES

MB = 2**20
N_TOKENS = 2048  # of the session, which has no drafts
MEMORY_BYTES_PER_S = 10e9  # the speed is computed for this memory bandwidth
REACHED = 0.8  # share of the limit reached by models of 1 to 9 GB: docs/benchmarks.md
SHAPES = (
    "qwen3-0.6b", "qwen3.5-0.8b", "gemma3-1b", "falcon-h1-1.5b", "smollm3-3b",
    "granite4-h-micro", "minicpm3-4b", "phi4-mini", "qwen3-4b", "gemma3-4b", "gemma4-e2b",
    "granite4-h-tiny", "gemma4-e4b", "olmo-hybrid-7b", "qwen3-8b", "qwen3.5-9b",
    "deepseek-v2-lite", "gpt-oss-20b",
    "gemma4-26b-a4b", "qwen3.8-27b", "glm-4.7-flash", "qwen3-30b-a3b", "gemma4-31b",
    "nemotron3-nano-30b-a3b", "qwen3.6-35b-a3b",
    "kimi-linear-48b-a3b",
)  # fmt: skip
COLUMNS = (
    "shape", "file", "memory for all of it", "a token reads", "tok/s at 10 GB/s, reckoned",
    "least budget",
)  # fmt: skip


def main() -> None:
    """Print each shape's line as soon as it is planned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=SHAPES)
    parser.add_argument("--quant-type", choices=QUANT_TYPES, default="4bit")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    try:
        for name in args.shapes:
            print(f"| {' | '.join(cells(name, args.quant_type))} |", flush=True)
    except QsfError as error:
        raise SystemExit(str(error)) from None


def cells(name: str, quant_type: str) -> Iterator[str]:
    """Yield the cells of a shape's line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.qsf"
        types = QUANT_TYPES[quant_type], embed_type_of(quant_type, None)
        write_model(path, find_shape(name), *types, compression=Compression.NONE, n_real_layers=1)
        with Reader(path) as reader:
            size = size_of(reader)
        session = {"max_seq_len": N_TOKENS, "draft": "off"}
        whole, least = plans_of(path, session | {"ram_budget": None}, session | {"ram_budget": 1})
    whole_bytes = whole.process_bytes + whole.reserve_bytes + whole.engine_bytes
    yield f"`{name}`"
    yield f"{size.file_bytes / MB:,.0f} MB"
    yield f"{whole_bytes / MB:,.0f} MB"
    yield f"{size.token_bytes / MB:,.0f} MB"
    yield f"{REACHED * MEMORY_BYTES_PER_S / size.token_bytes:,.1f}"
    yield f"{-(-least.min_budget_bytes // MB)} MB"


if __name__ == "__main__":
    main()
