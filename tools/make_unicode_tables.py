"""Writes csrc/text/unicode_tables.c: kinds of characters, and how they are normalised.

python tools/make_unicode_tables.py csrc/text/unicode_tables.c

Our tokenizer must equal the ``tokenizers`` library, which has three databases of different
Unicode versions inside: its regular expressions', its normaliser's and its language's. So the
library is asked about every code point, and Python's database only where the library cannot
be: for the numbers of the combining classes, which are checked against it.
"""

from __future__ import annotations

import argparse
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

HEADER = Path(__file__).resolve().parents[1] / "csrc" / "text" / "unicode.h"
BLOCK = 128  # as QSF_UNICODE_BLOCK
N_POINTS = 0x110000
POINTS = [c for c in range(N_POINTS) if not 0xD800 <= c <= 0xDFFF]
HANGUL = range(0xAC00, 0xAC00 + 11172)  # composed by arithmetic

# Bits of unicode.h -> the expression that its characters match.
KINDS = {
    1: r"[\p{Lu}\p{Lt}]",
    2: r"\p{Ll}",
    4: r"[\p{Lm}\p{Lo}]",
    8: r"\p{M}",
    16: r"\p{N}",
    32: r"\p{P}",
    64: r"\p{S}",
    128: r"\s",
}
WORD, NUMERIC = 1, 2

HEAD = """\
/* unicode_tables.c - kinds of characters and their (de)composition, encoded; written by
 * tools/make_unicode_tables.py from the library tokenizers {version}.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/unicode.h"

/* clang-format off */
const char qsf_unicode_text[][QSF_UNICODE_ROW + 1] = {{
"""
TAIL = """\
};
/* clang-format on */
"""

# How numbers are written; unicode.c reads them. A digit below N_LAST ends its number.
DIGITS = [chr(c) for c in range(32, 127) if chr(c) not in '"?\\']
N_LAST = 70
N_ROW = 96  # as QSF_UNICODE_ROW


def read_kinds() -> bytearray:
    """Return the bits of every code point."""
    kinds = bytearray(N_POINTS)
    text = "".join(map(chr, POINTS))
    for bit, expression in KINDS.items():
        rest = set(normalizers.Replace(Regex(expression + "+"), "").normalize_str(text))
        for c in POINTS:
            if chr(c) not in rest:
                kinds[c] |= bit
    return kinds


def read_words() -> bytearray:
    """Return which code points make words beside an added token, and which are numeric."""
    words = bytearray(N_POINTS)
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "XY": 1}, unk_token="?"))
    tokenizer.add_tokens([AddedToken("XY", single_word=True)])
    encodings = tokenizer.encode_batch([chr(c) + "XY" for c in POINTS])
    for c, encoding in zip(POINTS, encodings, strict=True):
        words[c] |= 0 if 1 in encoding.ids else WORD
    digits = pre_tokenizers.Digits(individual_digits=True)
    for c in POINTS:
        words[c] |= NUMERIC if len(digits.pre_tokenize_str(f"a{chr(c)}")) == 2 else 0
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
    """Return the C file."""
    import tokenizers

    decompositions = read_decompositions()
    compositions = read_compositions(decompositions)
    check_sizes(decompositions, compositions)
    rows = write_rows(
        itertools.chain(
            *(list_two_stages(bytes(read())) for read in (read_kinds, read_words, read_classes)),
            list_decompositions(decompositions),
            list_compositions(compositions),
        )
    )
    return HEAD.format(version=tokenizers.__version__) + rows + TAIL


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.parse_args().output.write_text(write_file(), encoding="ascii")


if __name__ == "__main__":
    main()
