"""Compare the engine's tokenizer with the library `tokenizers` on random texts.

Every family of tests/python/make/text_families.py takes part, and every folder given that has a
tokenizer.json. Half of the texts may name special tokens, half may not. Ends with status 1 at the
first difference.

Usage: .venv/bin/python tools/compare_tokenizers.py [--texts N] [--seed SEED] [FOLDER ...]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.text_families import families, random_text  # noqa: E402
from qsf.text.tokenizer import Tokenizer  # noqa: E402
from qsf_converter.text.tables import text_section  # noqa: E402

N_BATCH = 1000
REPORT_SECONDS = 20


@dataclass
class Pair:
    """The two tokenizers of one vocabulary, and how many texts they agreed on."""

    name: str
    ours: Tokenizer
    library: tokenizers.Tokenizer
    rewritten: frozenset[int]  # added tokens that newer libraries decode in their normalised form
    n_encoded: int = 0
    n_decoded: int = 0

    def compare(self, texts: Sequence[str], *, parse_special: bool) -> str | None:
        """Return what differs first, or None."""
        self.library.encode_special_tokens = not parse_special
        found = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        expected = [encoding.ids for encoding in found]
        decoded = self.library.decode_batch(expected, skip_special_tokens=False)
        for text, ids, expected_text in zip(texts, expected, decoded, strict=True):
            ours = self.ours.encode(text, add_prefix=False, parse_special=parse_special)
            if ours != ids:
                special = "with" if parse_special else "without"
                return f"encode {text!a} {special} special tokens: {ours}, the library {ids}"
            self.n_encoded += 1
            if not self.rewritten.isdisjoint(ids):
                continue
            our_text = self.ours.decode(ids, skip_special=False)
            if our_text != expected_text:
                return f"decode {ids}: {our_text!a}, the library {expected_text!a}"
            self.n_decoded += 1
        return None


def open_pair(name: str, tokenizer_json: bytes) -> Pair:
    """Open one tokenizer.json with both."""
    section, reason = text_section(tokenizer_json, bos_id=None, add_bos=None)
    if section is None:
        raise SystemExit(f"{name}: {reason}")
    library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    added = library.get_added_tokens_decoder().items()
    rewritten = frozenset(token_id for token_id, token in added if token.normalized)
    return Pair(name, Tokenizer(section), library, rewritten)


def some_texts(rng: random.Random, count: int) -> list[str]:
    """Return texts of mostly 1 to 40 characters, one in 200 of some hundreds."""
    return [
        random_text(rng, rng.randrange(1, 13) if rng.random() < 0.995 else 150)
        for _ in range(count)
    ]


def main() -> int:
    """Compare ``n`` texts and print their number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--texts", type=int, default=1_000_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("folders", type=Path, nargs="*", help="folders with a tokenizer.json")
    args = parser.parse_args()
    sources = families() | {
        str(folder): (folder / "tokenizer.json").read_bytes() for folder in args.folders
    }
    pairs = [open_pair(name, data) for name, data in sources.items()]
    rng = random.Random(args.seed)
    n_done = i_batch = 0
    next_report = time.monotonic()
    while n_done < args.texts:
        pair = pairs[i_batch % len(pairs)]
        texts = some_texts(rng, min(N_BATCH, args.texts - n_done))
        difference = pair.compare(texts, parse_special=i_batch // len(pairs) % 2 == 0)
        if difference is not None:
            print(f"{pair.name}: {difference}")
            return 1
        n_done += len(texts)
        i_batch += 1
        if time.monotonic() >= next_report:
            print(f"{n_done:,} of {args.texts:,} texts are equal", flush=True)
            next_report = time.monotonic() + REPORT_SECONDS
    for pair in pairs:
        print(f"{pair.name}: {pair.n_encoded:,} encoded, {pair.n_decoded:,} decoded")
    print(f"{n_done:,} texts in {len(pairs)} vocabularies, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
