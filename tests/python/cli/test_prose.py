"""Answers on a terminal: wrapped at words, Markdown as styles; loops are ended and said."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unicodedata import east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.refusals import table
from qsf.cli.run.answer import LoopGuard, generate, loop_at_end, terminal_guard
from qsf.errors import QsfCancelledError
from qsf.options import GenerationOptions
from qsf.serve.server import log_json
from qsf.shell import command
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
        *table("tables")["prose"],
        ("\u4e2d\u6587" * 5, ["\u4e2d\u6587" * 3 + "\u4e2d", "\u6587\u4e2d\u6587"]),
    ],
)
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


# ---- loops ----
TEXT = st.text("ab ", min_size=1, max_size=5)


class Engine:
    """What ``generate`` needs of a model."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@given(st.text("abc ", max_size=40), TEXT, st.integers(1, 12), st.integers(1, 60))
def test_it_is_the_loop_that_plain_search_finds(
    before: str, unit: str, times: int, least: int
) -> None:
    text = before + unit * times
    loops = [
        (period, n)
        for n in range(least, len(text) + 1)
        for period in range(1, n // 8 + 1)
        if text[-n:][period:] == text[-n:][:-period]
    ]
    longest = max((n for _, n in loops), default=0)
    assert loop_at_end(text, least) == min(
        ((p, n) for p, n in loops if n == longest), default=(0, 0)
    )


def test_numbers_that_count_and_short_loops_are_no_loops() -> None:
    guard = LoopGuard()
    for i in range(2000):
        guard.push(f"{i}, ")
    for _ in range(190):  # of tokens
        guard.push("ha ")
    assert guard.found == ""


@pytest.mark.parametrize("is_thought", [False, True])
def test_a_loop_ends_the_answer(monkeypatch: pytest.MonkeyPatch, is_thought: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine: Any = Engine()

    def start(options: GenerationOptions) -> Iterator[str]:
        for _ in range(1000):
            if is_thought:
                assert options.on_reasoning is not None
                options.on_reasoning("Wait. ")
            else:
                yield "It had a robot. "
            if engine.is_cancelled:
                raise QsfCancelledError("cancelled")

    def answer(guard: LoopGuard | None) -> int:
        return len(list(generate(engine, GenerationOptions(), start, is_quiet=False, guard=guard)))

    guard = terminal_guard(is_wanted=True)
    assert guard is not None
    assert answer(guard) == (0 if is_thought else 256)
    assert "came 256 times; --no-loop-guard" in guard.found
    assert terminal_guard(is_wanted=False) is None
    engine.is_cancelled = False
    assert answer(None) == (0 if is_thought else 1000)


def test_a_pipe_has_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal_guard(is_wanted=True) is None


def test_our_own_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "in memory 374 MB of at most 50 MB\n  --ram-budget auto"
    assert command.wrapped(line) == line  # no terminal
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: 2))
    monkeypatch.setattr("os.get_terminal_size", lambda _: SimpleNamespace(columns=20))
    assert command.wrapped(line) == "in memory 374 MB of\nat most 50 MB\n  --ram-budget auto"
    said: list[str] = []
    stream = SimpleNamespace(fileno=lambda: 2, write=said.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    log_json({"path": "/v1/chat/completions", "note": "prompt 1 cached 0"})
    assert json.loads(said[0])["note"] == "prompt 1 cached 0"
    assert said[0].count("\n") == 1


# ---- A terminal's screen as far as `qsf` moves on it: lines, the cursor, erasing ----
_PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.)", re.DOTALL)


def lines_of(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal of that width shows, without spaces at their ends."""
    rows = [[" "] * columns]
    at, column = 0, 0
    for count, action, char in _PART.findall(text):
        n = int(count or 1)
        if action == "m":
            continue
        if action == "A":
            assert n <= at
            at -= n
        elif action == "D":
            assert n <= column
            column -= n
        elif action in ("J", "K"):
            assert action == "K" or count == ""
            rows[at][column:] = [" "] * (columns - column)
            if action == "J":
                del rows[at + 1 :]
        elif char == "\r":
            column = 0
        else:
            assert not action, action
            width = 2 if east_asian_width(char) in "WF" else 1
            if char == "\n" or column + width > columns:
                at, column = at + 1, 0
                rows += [[" "] * columns] * 0 if at < len(rows) else [[" "] * columns]
            if char != "\n":
                rows[at][column : column + width] = [char] + [""] * (width - 1)
                column += width
    return ["".join(row).rstrip() for row in rows]
