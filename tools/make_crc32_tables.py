"""Writes csrc/checksum/crc32_tables.c, the constants of the slicing-by-16 checksum.

python tools/make_crc32_tables.py csrc/checksum/crc32_tables.c
"""

from __future__ import annotations

import argparse
from pathlib import Path

POLYNOMIAL = 0xEDB88320  # IEEE 802.3, bit-reversed
N_TABLES = 16
N_POWERS = 32  # x^(2^32) is x again
PER_LINE = 8

HEAD = """\
/* crc32_tables.c - the constants of crc32.c; written by tools/make_crc32_tables.py.
 *
 * Table k holds the checksum of byte i followed by k zero bytes; power k is x^(2^k).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum/crc32_tables.h"

/* clang-format off */
const uint32_t qsf_crc32_tables[QSF_CRC32_TABLES][256] = {
"""


def make_tables() -> list[list[int]]:
    """Return N_TABLES tables of 256 entries."""
    first = []
    for i in range(256):
        value = i
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        first.append(value)
    tables = [first]
    while len(tables) < N_TABLES:
        tables.append([value >> 8 ^ first[value & 0xFF] for value in tables[-1]])
    return tables


def multiply(a: int, b: int) -> int:
    """Return a * b modulo the polynomial; bit 31 is the coefficient of x^0."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def make_powers() -> list[int]:
    """Return x^(2^k) modulo the polynomial for each k below N_POWERS."""
    powers = [1 << 30]
    while len(powers) < N_POWERS:
        powers.append(multiply(powers[-1], powers[-1]))
    return powers


def write_values(values: list[int]) -> list[str]:
    """Return the lines of the numbers of an array."""
    starts = range(0, len(values), PER_LINE)
    rows = [", ".join(f"0x{v:08X}" for v in values[i : i + PER_LINE]) for i in starts]
    return [f"    {row},\n" for row in rows]


def main() -> None:
    """Write the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    lines = [HEAD]
    for table in make_tables():
        lines.append("    {\n")
        lines += write_values(table)
        lines.append("    },\n")
    lines.append("};\n\nconst uint32_t qsf_crc32_powers[QSF_CRC32_POWERS] = {\n")
    lines += write_values(make_powers())
    lines.append("};\n/* clang-format on */\n")
    parser.parse_args().out.write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
