"""Answers on a terminal: wrapped at words, Markdown as styles, the same however they arrive."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.screens import lines_of
from qsf.shell.prose import Prose

STYLE = re.compile(r"\x1b\[\d*m")


def shown(pieces: list[str], columns: int = 40, *, has_markdown: bool = True) -> str:
    prose = Prose(lambda: columns, has_markdown=has_markdown)
    return "".join(map(prose.push, pieces)) + prose.end()


def seen(text: str, columns: int = 40, *, has_markdown: bool = True) -> list[str]:
    return lines_of(shown(list(text), columns, has_markdown=has_markdown), columns)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two three", "four"]),
        ("- one two three four", ["\u2022 one two three", "  four"]),
        ("12. one two three", ["12. one two", "    three"]),
        ("abcdefghijklmnopqrstu v", ["abcdefghijklmno", "pqrstu v"]),
        ("\u4e2d\u6587" * 5, ["\u4e2d\u6587" * 3 + "\u4e2d", "\u6587\u4e2d\u6587"]),
        ("# Big *one*\nx", ["Big one", "x"]),
        ("a **b c** d `e*f`", ["a b c d e*f"]),
        ("2 * 3 * 4, **k", ["2 * 3 * 4, **k"]),
        ("f(*args) \\*x\\*", ["f(*args) *x*"]),
        ("1.5 is > 1", ["1.5 is > 1"]),
        ("| a | b | c | d | e |", ["| a | b | c | d ", "| e |"]),
        ("```py\nx = '''1 2 3 4 5 6 7'''\n```\n*y*",
         ["```py", "x = '''1 2 3 4 5", " 6 7'''", "```", "y"]),
        ("````\n```\n# *a*\n````\n", ["````", "```", "# *a*", "````", ""]),
        ("a\x1b[2Jb\x9bc\r\nd", ["a?[2Jb?c", "d"]),
    ],
)  # fmt: skip
def test_what_a_terminal_of_16_columns_shows(text: str, lines: list[str]) -> None:
    assert seen(text, 16) == [line.rstrip() for line in lines]


PARTS = st.sampled_from(
    ["word ", "x", " ", "\n", "*", "**", "`", "```", "```py\n", "# ", "- ", "1. ", "\\", "|",
     "\u00e9", "\u4e2d", "'", '"', "def ", "12", "longerthanaline" * 3]
)  # fmt: skip


@given(parts=st.lists(PARTS, max_size=25), columns=st.integers(20, 50))
def test_pieces_do_not_matter(parts: list[str], columns: int) -> None:
    text = "".join(parts)
    by_parts, by_chars, whole = (shown(p, columns) for p in (parts, list(text), [text]))
    assert lines_of(by_parts, columns) == lines_of(whole, columns)
    assert lines_of(by_chars, columns) == lines_of(whole, columns)


@given(parts=st.lists(PARTS, max_size=25))
def test_without_markdown_nothing_is_lost_but_spaces_between_lines(parts: list[str]) -> None:
    lines = seen("".join(parts), has_markdown=False)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", "".join(parts))
    assert all(len(line) < 40 for line in lines)


def test_styles_end_with_the_line_and_the_answer() -> None:
    for text in ("**bold**", "# Title", "```py\nif x:", "*a\n"):
        styles = STYLE.findall(shown([text]))
        assert not styles or styles[-1] == "\x1b[0m"
    assert "\x1b[1mbold\x1b[0m" in shown(["**bold**"])
    assert "\x1b[2m```py\x1b[0m\n\x1b[36mif x:\x1b[0m\n" in shown(["```py\nif", " x:\n"])
    assert "\x1b" not in shown(["**bold** `x`"], has_markdown=False)
