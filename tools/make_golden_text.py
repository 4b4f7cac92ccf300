"""Write tests/golden/text: small sections TEXT, texts and the ids that the library gives them.

Also a model with such a section, which examples/generate.c runs in the C tests.

The C tests read them, and the fuzz target begins with them. Each file is the section's size (u32),
the section, the number of cases (u32), and for each case: flags of qsf_tokenize (u32), bytes of
the text (u32), the text, the number of ids (u32), the ids, bytes of their decoded text (u32), that
text.

Usage: .venv/bin/python tools/make_golden_text.py
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
from pathlib import Path

import tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.text_families import families, random_text  # noqa: E402
from make.tiny_checkpoints import make_llama  # noqa: E402
from qsf_converter import convert  # noqa: E402
from qsf_converter.text.tables import text_section  # noqa: E402

N_CASES = 12
FAMILIES = ("gpt2", "qwen2", "o200k", "deepseek", "nfkc", "llama2", "mistral", "unigram first")
SPECIAL = 2  # QSF_TOKENIZE_SPECIAL


def golden(tokenizer_json: bytes) -> bytes:
    section, reason = text_section(tokenizer_json, bos_id=None, add_bos=None)
    if section is None:
        raise SystemExit(reason)
    library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    rng = random.Random(5)
    cases = []
    for i in range(N_CASES):
        text = "" if i == 0 else random_text(rng, rng.randrange(1, 30))
        library.encode_special_tokens = i % 3 == 2
        ids = library.encode(text, add_special_tokens=False).ids
        decoded = library.decode(ids, skip_special_tokens=False)
        cases.append(
            struct.pack("<I", 0 if i % 3 == 2 else SPECIAL)
            + _counted(text.encode())
            + struct.pack(f"<{len(ids) + 1}I", len(ids), *ids)
            + _counted(decoded.encode())
        )
    return _counted(section) + struct.pack("<I", len(cases)) + b"".join(cases)


def _counted(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def main() -> None:
    """Write a file for each family, and the seeds of the fuzz target."""
    folder = ROOT / "tests" / "golden" / "text"
    seeds = ROOT / "tests" / "fuzz" / "corpus" / "text"
    for path in (folder, seeds):
        path.mkdir(parents=True, exist_ok=True)
    made = families(is_small=True)
    for name in FAMILIES:
        data = golden(made[name])
        (folder / f"{name.replace(' ', '-')}.bin").write_bytes(data)
        n_section = int.from_bytes(data[:4], "little")
        text = random_text(random.Random(6), 20).encode()[:200]
        seed = struct.pack("<I", len(text)) + text + data[4 : 4 + n_section]
        (seeds / name.replace(" ", "_")).write_bytes(seed)
    with tempfile.TemporaryDirectory() as name:
        llama = make_llama(Path(name) / "llama", seed=3, n_layers=1, n_vocab=512, max_tokens=128)
        (llama / "tokenizer.json").write_bytes(made["llama2"])
        convert(llama, ROOT / "qsf" / "selftest.qsf", quant_type="4bit", force=True)


if __name__ == "__main__":
    main()
