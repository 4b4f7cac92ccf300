"""Writes csrc/text/unicode_tables.c: kinds of characters, and how they are normalised.

python tools/make_unicode_tables.py csrc/text/unicode_tables.c

Our tokenizer must equal the ``tokenizers`` library, which has three databases of different
Unicode versions inside: its regular expressions', its normaliser's and its language's. So the
library is asked about every code point, and Python's database only where the library cannot
be: for the numbers of the combining classes, which are checked against it.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

BLOCK = 128  # as QSF_UNICODE_BLOCK
N_POINTS = 0x110000
N_COLUMNS = 100
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
/* unicode_tables.c - kinds of characters and their (de)composition; written by
 * tools/make_unicode_tables.py from the library tokenizers {version}.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/unicode.h"

/* clang-format off */
"""


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
        known = c == 0x345 or normalise("\u0345" + chr(c)) == chr(c) + "\u0345"
        value = unicodedata.combining(chr(c))
        if known and value == 0:
            raise SystemExit(
                f"U+{c:04X} has a class, but Python {unicodedata.unidata_version}"
                " does not know it: use a newer Python"
            )
        classes[c] = value if known else 0
    return classes


def read_decompositions() -> list[tuple[int, bool, str]]:
    """Return (code point, is for NFKC alone, full decomposition), sorted."""
    found = []
    canonical, compatible = normalizers.NFD().normalize_str, normalizers.NFKD().normalize_str
    for c in POINTS:
        if c in HANGUL:
            continue
        one, other = canonical(chr(c)), compatible(chr(c))
        if one != chr(c):
            found.append((c, False, one))
        if other != one:
            found.append((c, True, other))
    return found


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


def write_items(items: Iterable[str]) -> list[str]:
    """Return full lines of the items, with a comma after each."""
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 1 > N_COLUMNS:
            lines.append("")
        lines[-1] += item + ","
    return lines


def write_numbers(numbers: Iterable[int]) -> list[str]:
    """Return full lines of comma-separated numbers."""
    return write_items(map(str, numbers))


def write_two_stages(name: str, plural: str, values: bytes) -> list[str]:
    """Return an index of blocks and the blocks that differ."""
    blocks: dict[bytes, int] = {}
    index = [
        blocks.setdefault(bytes(values[i : i + BLOCK]), len(blocks))
        for i in range(0, N_POINTS, BLOCK)
    ]
    if len(blocks) > 256:
        raise SystemExit(f"{len(blocks)} blocks of {plural} do not fit an index of bytes")
    lines = [f"const uint8_t qsf_unicode_{name}_index[QSF_UNICODE_POINTS / QSF_UNICODE_BLOCK] = {{"]
    lines += [*write_numbers(index), "};"]
    lines.append(f"const uint8_t qsf_unicode_{plural}[][QSF_UNICODE_BLOCK] = {{")
    for block in blocks:
        lines += ["{", *write_numbers(block), "},"]
    return [*lines, "};", ""]


def write_compositions(
    decompositions: list[tuple[int, bool, str]], compositions: list[tuple[int, ...]]
) -> list[str]:
    """Return the tables of normalize.c."""
    pool: list[int] = []
    firsts: dict[str, int] = {}
    entries = []
    for c, is_compatible, full in decompositions:
        if full not in firsts:
            firsts[full] = len(pool)
            pool += map(ord, full)
        entries.append(f"{{{c},{len(full)},{int(is_compatible)},{firsts[full]}}}")
    if len(pool) >= 1 << 16:
        raise SystemExit("the pool is too large for its index")
    lines = ["const qsf_decomposition qsf_unicode_decompositions[] = {", *write_items(entries)]
    lines += ["};", f"const size_t qsf_unicode_n_decompositions = {len(decompositions)};"]
    lines += ["const uint32_t qsf_unicode_pool[] = {", *write_numbers(pool), "};"]
    lines.append("const qsf_composition qsf_unicode_compositions[] = {")
    lines += write_items(f"{{{a},{b},{c}}}" for a, b, c in compositions)
    lines += ["};", f"const size_t qsf_unicode_n_compositions = {len(compositions)};"]
    return lines


def main() -> None:
    """Write the file that the command line names."""
    import tokenizers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    path = parser.parse_args().output
    tables: Mapping[tuple[str, str], Callable[[], bytearray]] = {
        ("kind", "kinds"): read_kinds,
        ("word", "words"): read_words,
        ("class", "classes"): read_classes,
    }
    lines = [HEAD.format(version=tokenizers.__version__)]
    for (name, plural), read in tables.items():
        lines += write_two_stages(name, plural, bytes(read()))
    decompositions = read_decompositions()
    lines += write_compositions(decompositions, read_compositions(decompositions))
    path.write_text("\n".join([*lines, "/* clang-format on */", ""]), encoding="ascii")


if __name__ == "__main__":
    main()
