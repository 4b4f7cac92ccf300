"""Draws docs/demo.svg: a terminal in which the commands of `make demo` have run.

The text is what the commands really print, on this machine, now. The picture has no outside
bytes: no font, no script, no link.

Usage: .venv/bin/python tools/make_screenshot.py [OUT.svg]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
MODEL = "examples/tiny-llama"
N_COLUMNS = 96
LINE_PX, CHARACTER_PX, MARGIN_PX = 18, 7.8, 16
COMMAND, OUTPUT, BACKGROUND = "#9ece6a", "#c0caf5", "#1a1b26"


def run(command: list[str], folder: Path) -> list[str]:
    """Run a command of QSF in `folder`; return its last lines, wrapped, without progress."""
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "left" not in line]
    return [part for line in lines for part in textwrap.wrap(line, N_COLUMNS) or [""]]


def draw(lines: list[tuple[str, str]]) -> str:
    """Return the SVG of (color, text) lines."""
    width = 2 * MARGIN_PX + N_COLUMNS * CHARACTER_PX
    height = 2 * MARGIN_PX + len(lines) * LINE_PX
    rows = "\n".join(
        f'<text x="{MARGIN_PX}" y="{MARGIN_PX + (i + 1) * LINE_PX - 5}" fill="{color}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
        for i, (color, text) in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="monospace" font-size="13">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n{rows}\n</svg>\n'
    )


def main() -> None:
    """Run the commands and write the picture."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "demo.svg"
    lines: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for command in (
            f"qsf-convert {MODEL} model.qsf",
            "qsf-run model.qsf --prompt 'Once upon a time' -n 80 --temperature 0 --ram-budget 40",
        ):
            lines.append((COMMAND, "$ " + command))
            lines += [(OUTPUT, text) for text in run(shlex.split(command), Path(folder))]
    out.write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
