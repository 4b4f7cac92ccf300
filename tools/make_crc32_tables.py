"""Writes csrc/format/crc32_tables.c, the constants of the slicing-by-16 checksum.

python tools/make_crc32_tables.py csrc/format/crc32_tables.c
"""

from __future__ import annotations

import argparse
from pathlib import Path

POLYNOMIAL = 0xEDB88320  # IEEE 802.3, bit-reversed
N_TABLES = 16
PER_LINE = 8

HEAD = """\
/* crc32_tables.c - the constants of crc32.c; written by tools/make_crc32_tables.py.
 *
 * Table k holds the checksum of byte i followed by k zero bytes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/crc32_tables.h"

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


def main() -> None:
    """Write the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    lines = [HEAD]
    for table in make_tables():
        lines.append("    {\n")
        for start in range(0, 256, PER_LINE):
            values = ", ".join(f"0x{value:08X}" for value in table[start : start + PER_LINE])
            lines.append(f"    {values},\n")
        lines.append("    },\n")
    lines.append("};\n/* clang-format on */\n")
    parser.parse_args().out.write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    main()
