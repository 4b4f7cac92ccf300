"""Write the seeds of the fuzz target of vocabularies, which the C tests read, too.

Also a model with such a section, which examples/generate.c runs in the C tests. A seed is the size
of a text (u32), the text, and a section TEXT.

Usage: .venv/bin/python tools/make_text_seeds.py
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.text_families import families, random_text  # noqa: E402
from make.tiny_checkpoints import make_llama  # noqa: E402
from qsf_converter import convert  # noqa: E402
from qsf_converter.text.tables import text_section  # noqa: E402

FAMILIES = ("gpt2", "qwen2", "o200k", "deepseek", "nfkc", "llama2", "mistral", "unigram first")


def main() -> None:
    """Write a seed for each family, and the model."""
    seeds = ROOT / "tests" / "fuzz" / "corpus" / "text"
    made = families(is_small=True)
    for name in FAMILIES:
        section, reason = text_section(made[name], bos_id=None, add_bos=None)
        if section is None:
            raise SystemExit(reason)
        text = random_text(random.Random(6), 20).encode()[:200]
        seed = struct.pack("<I", len(text)) + text + section
        (seeds / name.replace(" ", "_")).write_bytes(seed)
    with tempfile.TemporaryDirectory() as name:
        llama = make_llama(Path(name) / "llama", seed=3, n_layers=1, n_vocab=512, max_tokens=128)
        (llama / "tokenizer.json").write_bytes(made["llama2"])
        convert(llama, ROOT / "qsf" / "selftest.qsf", quant_type="4bit", force=True)


if __name__ == "__main__":
    main()
