# SPDX-License-Identifier: Apache-2.0
"""Write the table of families in docs/use.md, which is made from the tables of the converter.

Usage: .venv/bin/python tools/make_family_table.py [--check]

With --check nothing is written; exits with 1 if the document has another table.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qsf_converter.sources.gguf_config import families

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "use.md"
BEGIN, END = "<!-- families: tools/make_family_table.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """Return the rows, by the names that people know."""
    lines = ["| models | `architectures` in config.json | GGUF |", "|---|---|---|"]
    for title, names, dialects in families():
        cells = (", ".join(f"`{name}`" for name in cell) for cell in (names, dialects))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = DOCUMENT.read_text("utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    wanted = text[:start] + "\n" + table() + "\n" + text[end:]
    if "--check" in sys.argv:
        return int(text != wanted)
    DOCUMENT.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
