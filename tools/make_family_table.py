# SPDX-License-Identifier: Apache-2.0
"""Write the list of families in docs/use.md, which is made from the tables of the converter.

Usage: .venv/bin/python tools/make_family_table.py [--check]

With --check nothing is written; exits with 1 if the document has another list.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from qsf_converter.sources.gguf_config import families

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "use.md"
BEGIN, END = "<!-- families: tools/make_family_table.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """Return the names that people know, with those of GGUF files."""
    rows = [(title.replace(";", ","), dialects) for title, _, dialects in families()]
    parts = ("".join([title, *(f" `{name}`" for name in names)]) for title, names in rows)
    return textwrap.fill("; ".join(parts) + ".", 119, break_on_hyphens=False) + "\n"


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
