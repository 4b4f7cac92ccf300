"""Tries mutants of every section of a .qsf file in processes with a limit of memory.

Each batch is opened, inspected, verified, run and chatted with (tests/python/make/use_file.py).
Anything but a normal result or a QsfError is kept in FOLDER, and the exit code is 1.

Usage: python tests/fuzz/fuzz_sections.py SECONDS_PER_SECTION FOLDER [FIRST_SEED [TAG ...]]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.limited import outcomes  # noqa: E402
from make.mutants import SECTIONS, mutant  # noqa: E402
from make.recurrent_models import write_recurrent  # noqa: E402
from qsf_converter.convert import convert  # noqa: E402

BATCH = 200


def try_section(tag: str, base: Path, n_seconds: float, seed: int, kept: Path) -> tuple[int, int]:
    """Return how many mutants were tried, and how many broke a promise."""
    data = base.read_bytes()
    n_tried = n_wrong = n_refused = 0
    deadline = time.monotonic() + n_seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < deadline:
            paths = []
            for i in range(seed + n_tried, seed + n_tried + BATCH):
                paths.append(Path(folder) / f"{tag}-{i}.qsf")
                paths[-1].write_bytes(mutant(data, tag, i))
            results = outcomes(base, paths)
            for path, result in zip(paths, results, strict=False):
                n_refused += result.startswith("Qsf")
                if result.startswith(("WRONG", "CRASH")):
                    n_wrong += 1
                    (kept / path.name).write_bytes(path.read_bytes())
                    print(f"{kept / path.name}: {result}")
            n_tried += len(results)
            for path in paths:
                path.unlink()
    print(f"section {tag}: {n_tried} mutants from seed {seed}, {n_refused} refused", flush=True)
    return n_tried, n_wrong


def convert_yarn(folder: Path) -> Path:
    """Return a file with the section ROPE: tiny-llama with other frequencies."""
    source = Path(shutil.copytree(ROOT / "examples" / "tiny-llama", folder / "yarn"))
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["rope_scaling"] = {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    convert(source, folder / "yarn.qsf", quant_type="4bit")
    return folder / "yarn.qsf"


def main(n_seconds: float, kept: Path, seed: int, tags: list[str]) -> int:
    """Try all sections; the exit code is 1 where a promise was broken."""
    kept.mkdir(parents=True, exist_ok=True)
    totals = [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        llama, gpt2, moe = (Path(folder) / f"{name}.qsf" for name in ("llama", "gpt2", "moe"))
        convert(ROOT / "examples" / "tiny-llama", llama, quant_type="4bit")
        convert(ROOT / "tests" / "models" / "tiny-gpt2", gpt2, quant_type="8bit")
        convert(ROOT / "tests" / "models" / "tiny-moe", moe, quant_type="4bit")
        yarn = convert_yarn(Path(folder))
        mixers = [write_recurrent(Path(folder), case=case) for case in ("lfm2", "qwen3_next")]
        bases = {
            "WPOS": [gpt2], "UNIT": [moe], "ROPE": [yarn], "ARCH": [llama, *mixers],
            "KIND": [moe, *mixers], "TENS": [llama, *mixers],
        }  # fmt: skip
        for tag in tags:
            for base in (those := bases.get(tag, [llama])):
                tried = try_section(tag, base, n_seconds / len(those), seed, kept)
                totals = [a + b for a, b in zip(totals, tried, strict=True)]
    print(f"{totals[0]} mutants, {totals[1]} of them broke a promise")
    return 1 if totals[1] else 0


if __name__ == "__main__":
    given = sys.argv[3:]
    sys.exit(
        main(
            float(sys.argv[1]),
            Path(sys.argv[2]),
            int(given[0]) if given else random.randrange(2**32),
            given[1:] or list(SECTIONS),
        )
    )
