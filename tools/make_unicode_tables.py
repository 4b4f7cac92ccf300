"""Writes the tables of characters: the engine's, and the converter's for regular expressions.

python tools/make_unicode_tables.py csrc/text/unicode_tables.inc \\
    converter/qsf_converter/text/character_sets.bin

Our tokenizer must equal the ``tokenizers`` library, which has three databases of different
Unicode versions inside: its regular expressions', its normaliser's and its language's. So the
library is asked about every code point, and Python's database only where the library cannot
be: for the numbers of the combining classes, which are checked against it.
"""

from __future__ import annotations

import argparse
import itertools
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

HEADER = Path(__file__).resolve().parents[1] / "csrc" / "text" / "unicode.h"
BLOCK = 128  # as QSF_UNICODE_BLOCK
N_POINTS = 0x110000
POINTS = [c for c in range(N_POINTS) if not 0xD800 <= c <= 0xDFFF]
TEXT = "".join(map(chr, POINTS))
HANGUL = range(0xAC00, 0xAC00 + 11172)  # composed by arithmetic

# Bits of unicode.h
WORD, SPACE = 1, 2

# Names of Oniguruma's sets of characters that expressions may use; Cn is all that the first lack.
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co"
SCRIPTS = (
    "Arabic Armenian Balinese Bengali Bopomofo Braille Canadian_Aboriginal Cherokee Common Coptic"
    " Cyrillic Devanagari Ethiopic Georgian Greek Gujarati Gurmukhi Han Hangul Hebrew Hiragana"
    " Inherited Javanese Kannada Katakana Khmer Lao Latin Malayalam Mongolian Myanmar Nko Oriya"
    " Sinhala Sundanese Syriac Tamil Telugu Thaana Thai Tibetan Tifinagh Yi"
)
PROPERTIES = "Alphabetic Uppercase Lowercase Space Word Punct Emoji Extended_Pictographic"

HEAD = """\
/* unicode_tables.inc - words, spaces, combining classes and (de)composition, encoded; written by
 * tools/make_unicode_tables.py from the library tokenizers {version}.
 */
/* SPDX-License-Identifier: Apache-2.0 */
"""
# How numbers are written; unicode.c reads them. A digit below N_LAST ends its number.
DIGITS = [chr(c) for c in range(32, 127) if chr(c) not in '"?\\']
N_LAST = 70
N_ROW = 96  # as ROW of unicode.c


def members(name: str) -> list[int]:
    """Return the code points of a set of Oniguruma."""
    rest = set(normalizers.Replace(Regex(rf"\p{{{name}}}+"), "").normalize_str(TEXT))
    return [c for c in POINTS if chr(c) not in rest]


def split_alone(pre_tokenizer: pre_tokenizers.PreTokenizer) -> list[int]:
    """Return the code points that the pre-tokenizer cuts off from a letter."""
    return [c for c in POINTS if len(pre_tokenizer.pre_tokenize_str(f"a{chr(c)}")) == 2]


def joined(pre_tokenizer: pre_tokenizers.PreTokenizer) -> list[int]:
    """Return the code points that stay in one piece with a letter."""
    whole = [(c, pre_tokenizer.pre_tokenize_str(f"a{chr(c)}")[0][0]) for c in POINTS]
    return [c for c, piece in whole if len(piece) == 2]


def read_sets() -> str:
    """Return a line for each set of characters: its name, and the distances of its edges."""
    sets = {name: members(name) for name in f"{CATEGORIES} {SCRIPTS} {PROPERTIES}".split()}
    sets["rust_numeric"] = split_alone(pre_tokenizers.Digits(individual_digits=True))
    sets["rust_punctuation"] = split_alone(pre_tokenizers.Punctuation())
    sets["rust_word"] = joined(pre_tokenizers.Whitespace())
    lines = []
    for name, points in sets.items():
        bits = bytearray(N_POINTS + 2)
        for c in points:
            bits[c + 1] = 1
        edges = [c for c in range(N_POINTS + 1) if bits[c] != bits[c + 1]]
        distances = (b - a for a, b in itertools.pairwise([0, *edges]))
        lines.append(" ".join([name, *(f"{distance:x}" for distance in distances)]))
    return "\n".join(lines)


def read_words() -> bytearray:
    """Return which code points make words beside an added token, and which are spaces."""
    words = bytearray(N_POINTS)
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "XY": 1}, unk_token="?"))
    tokenizer.add_tokens([AddedToken("XY", single_word=True)])
    encodings = tokenizer.encode_batch([chr(c) + "XY" for c in POINTS])
    for c, encoding in zip(POINTS, encodings, strict=True):
        words[c] |= 0 if 1 in encoding.ids else WORD
    for c in members("Space"):
        words[c] |= SPACE
    return words


def read_classes() -> bytearray:
    """Return the combining class of every code point, as the library's normaliser has it."""
    classes = bytearray(N_POINTS)
    normalise = normalizers.NFD().normalize_str
    for c in POINTS:
        # U+0345 has 240, the highest of all, so what has less is put in front of it.
        is_special = c == 0x345 or normalise("\u0345" + chr(c)) == chr(c) + "\u0345"
        value = unicodedata.combining(chr(c))
        if is_special and value == 0:
            raise SystemExit(
                f"U+{c:04X} has a class, but Python {unicodedata.unidata_version}"
                " does not know it: use a newer Python"
            )
        classes[c] = value if is_special else 0
    return classes


def read_decompositions() -> list[tuple[int, bool, str]]:
    """Return (code point, is for NFKC alone, full decomposition), sorted."""
    rows = []
    canonical, compatible = normalizers.NFD().normalize_str, normalizers.NFKD().normalize_str
    for c in POINTS:
        if c in HANGUL:
            continue
        canon, other = canonical(chr(c)), compatible(chr(c))
        if canon != chr(c):
            rows.append((c, False, canon))
        if other != canon:
            rows.append((c, True, other))
    return rows


def read_compositions(decompositions: Iterable[tuple[int, bool, str]]) -> list[tuple[int, ...]]:
    """Return (first, second, both) of all pairs that the library makes one character."""
    normalise = normalizers.NFC().normalize_str
    pairs = []
    for c, is_compatible, full in decompositions:
        if is_compatible or len(full) < 2:
            continue
        first, second = normalise(full[:-1]), full[-1]
        if len(first) == 1 and normalise(first + second) == chr(c):
            pairs.append((ord(first), ord(second), c))
    return sorted(pairs)


def write_number(number: int) -> str:
    """Return the digits of a number: its last one counts to N_LAST, those before to the rest."""
    number, last = divmod(number, N_LAST)
    text = DIGITS[last]
    while number > 0:
        number, digit = divmod(number, len(DIGITS) - N_LAST)
        text = DIGITS[N_LAST + digit] + text
    return text


def fold(number: int) -> int:
    """Return a number of any sign as one without: 0, -1, 1, -2 are 0, 1, 2, 3."""
    return 2 * number if number >= 0 else -2 * number - 1


def list_runs(values: Iterable[int]) -> Iterator[int]:
    """Yield the length and the value of every run of equal values."""
    for value, run in itertools.groupby(values):
        yield len(list(run))
        yield value


def list_two_stages(values: bytes) -> Iterator[int]:
    """Yield an index of blocks and the blocks that differ, both as runs."""
    blocks: dict[bytes, int] = {}
    index = [
        blocks.setdefault(bytes(values[i : i + BLOCK]), len(blocks))
        for i in range(0, N_POINTS, BLOCK)
    ]
    if len(blocks) > 256:
        raise SystemExit(f"{len(blocks)} blocks do not fit an index of bytes")
    yield from list_runs(index)
    yield from list_runs(b"".join(blocks))


def list_decompositions(decompositions: Iterable[tuple[int, bool, str]]) -> Iterator[int]:
    """Yield each code point's distance to the one before, and its text or the entry that has it.

    A character is written as the distance to the one at its place in the last new text, or to
    the character before it if that text is shorter.
    """
    entries: dict[str, int] = {}
    last_point, last_text = 0, "\0"
    for entry, (c, is_compatible, full) in enumerate(decompositions):
        yield c - last_point
        last_point = c
        if full in entries:
            yield int(is_compatible)
            yield entries[full]
            continue
        entries[full] = entry
        yield 2 * len(full) + is_compatible
        for k, char in enumerate(full):
            yield fold(ord(char) - ord(last_text[k] if k < len(last_text) else full[k - 1]))
        last_text = full


def list_compositions(compositions: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """Yield the distances of each (first, second, both) to the one before."""
    last = (0, 0, 0)
    for first, second, both in compositions:
        yield first - last[0]
        yield fold(second - last[1])
        yield fold(both - last[2])
        last = first, second, both


def check_sizes(
    decompositions: Sequence[tuple[int, bool, str]], compositions: Sequence[tuple[int, ...]]
) -> None:
    """Compare the sizes of the decoded tables with those of unicode.h."""
    header = HEADER.read_text(encoding="ascii")
    sizes = {
        "DECOMPOSITIONS": len(decompositions),
        "POOL": sum(map(len, {full for _, _, full in decompositions})),
        "COMPOSITIONS": len(compositions),
    }
    for name, size in sizes.items():
        if f"#define QSF_UNICODE_{name} {size}\n" not in header:
            raise SystemExit(f"csrc/text/unicode.h needs: #define QSF_UNICODE_{name} {size}")


def write_rows(numbers: Iterable[int]) -> str:
    """Return the text of the numbers as rows of C strings."""
    text = "".join(map(write_number, numbers))
    return "".join(f'"{text[i : i + N_ROW]}",\n' for i in range(0, len(text), N_ROW))


def write_file() -> str:
    import tokenizers

    decompositions = read_decompositions()
    compositions = read_compositions(decompositions)
    check_sizes(decompositions, compositions)
    rows = write_rows(
        itertools.chain(
            *(list_two_stages(bytes(read())) for read in (read_words, read_classes)),
            list_decompositions(decompositions),
            list_compositions(compositions),
        )
    )
    return HEAD.format(version=tokenizers.__version__) + rows


def main() -> None:
    """Write the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("sets_output", type=Path)
    args = parser.parse_args()
    args.output.write_text(write_file(), encoding="ascii")
    args.sets_output.write_bytes(zlib.compress(read_sets().encode(), 9))


if __name__ == "__main__":
    main()
