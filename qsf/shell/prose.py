"""Text of a model on a terminal, piece by piece: wrapped at words, its Markdown shown.

A renderer of our own, because it streams and imports nothing: rich's Markdown takes 10.5 MB, which
would count in the budget of the process. Unsupported Markdown (tables, links) stays unchanged.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO


_RESET, _BOLD, _DIM, _ITALIC, _CYAN = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[36m"
_LEAST_COLUMNS = 12  # narrower terminals wrap by themselves
_MAX_HELD = 600  # characters of a line held back for a closing mark

# The kinds of lines, each with the pattern of its beginning.
_UNDECIDED = re.compile(r" *(?:#{1,6}|[-*+]|\d{1,3}[.)]?|`{1,2}|~{1,2}|>)?")
_FENCE = re.compile(r" *(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6} +")
_ITEM = re.compile(r" *(?:[-*+]|\d{1,3}[.)]|>) +")

_SPANS = {
    "`": re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)"),
    "***": re.compile(r"(\*{3})(?=[^\s*])(.+?)(?<=[^\s\\])\*{3}"),
    "**": re.compile(r"(\*{2})(?=[^\s*])(.+?)(?<=[^\s\\])\*{2}"),
    "*": re.compile(r"(\*)(?=[^\s*])((?:\*\*.+?\*\*|[^*])+?)(?<=[^\s*\\])\*(?!\*)"),
}
_STYLES = {"`": _CYAN, "***": _BOLD + _ITALIC, "**": _BOLD, "*": _ITALIC}
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")  # characters that control a terminal
_MARK = re.compile(r"[`*\\]")


def shows_styles(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours, and the user wants colours."""
    return can_move(stream) and not os.environ.get("NO_COLOR")


def can_move(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that obeys cursor sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def columns_of(stream: TextIO) -> int:
    """Return the width of the stream's terminal; 0: unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class Prose:
    """Turns pieces of text into output for a terminal.

    Args:
        columns: returns the width of the terminal; 0: lines are not wrapped.
        style: escape sequence of all text; "": none.
        has_markdown: show Markdown by styles, without its marks.
    """

    def __init__(
        self, columns: Callable[[], int], *, style: str = "", has_markdown: bool = False
    ) -> None:
        self._columns = columns
        self._style = style
        self._has_markdown = has_markdown
        self._out: list[str] = []
        self._held = ""  # held-back text of this line
        self._is_start = True  # the kind of this line is not decided
        self._line_style = style
        self._is_code = False  # this line is code or a fence
        self._is_table = False
        self._fence = ""  # mark that ends the current code block
        self._shown_style = ""
        self._column = 0
        self._indent = 0  # of wrapped lines
        self._word: list[tuple[str, str]] = []  # style and text since the last space
        self._word_columns = 0

    def push(self, piece: str) -> str:
        for part in piece.replace("\r", "").splitlines(keepends=True):
            line = part.rstrip("\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")
            self._held += _CONTROLS.sub("?", line)
            self._take(is_whole=line != part)
            if line != part:
                self._end_line()
        return self._taken()

    def end(self) -> str:
        """Return the held text, and the reset to the terminal's own style."""
        self._take(is_whole=True)
        self._show_style("")
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    # ---- lines ----

    def _take(self, *, is_whole: bool) -> None:
        """Write the part of the line that can be shown; ``is_whole``: the line is complete."""
        if not self._has_markdown:
            text, self._held = self._held, ""
            self._put(text, self._style)
            return
        if self._is_start and (self._fence or _FENCE.match(self._held)):
            self._is_start = False
            self._is_code = True
        if self._is_code:
            self._take_code(is_whole=is_whole)
        else:
            if self._is_start and not self._begin_line(is_whole=is_whole):
                return
            self._take_spans(is_whole=is_whole)

    def _begin_line(self, *, is_whole: bool) -> bool:
        """Decide the kind of this line; return False if more of the line is needed."""
        line = self._held
        if not is_whole and _UNDECIDED.fullmatch(line):
            return False
        heading, item = _HEADING.match(line), _ITEM.match(line)
        if heading and heading.end() == len(line) and not is_whole:
            return False
        if item and item.end() == len(line) and not is_whole:
            return False
        self._is_start = False
        if heading:
            self._line_style = self._style + _BOLD
            self._held = line[heading.end() :]
        elif item:
            self._indent = item.end()
            bullet = re.sub(r"[-*+]", "\u2022", item[0])
            self._put(bullet, self._style)
            self._held = line[item.end() :]
        else:
            self._indent = len(line) - len(line.lstrip(" "))
            self._is_table = line.lstrip().startswith("|")
        return True

    def _end_line(self) -> None:
        self._show_style("")
        self._out.append("\n")
        self._held = ""
        self._is_start = True
        self._is_code = self._is_table = False
        self._line_style = self._style
        self._column = self._indent = self._word_columns = 0
        self._word.clear()

    def _take_code(self, *, is_whole: bool) -> None:
        """Write a line of a code block as it arrives; one that may be a fence waits for its end."""
        line, style = self._held, _CYAN
        fence = _FENCE.match(line)
        if fence and not is_whole:
            return
        if fence and not self._fence:
            self._fence, style = fence[1], _DIM
        elif fence and fence[1].startswith(self._fence) and not line[fence.end() :].strip():
            self._fence, style = "", _DIM
        if len(line) > self._column:
            self._show_style(style)
            self._out.append(line[self._column :])
            self._column = len(line)

    # ---- inside a line ----

    def _take_spans(self, *, is_whole: bool) -> None:
        """Write text and spans between marks; holds back a span without its end."""
        text, self._held = self._held, ""
        self._held = self._put_spans(text, self._line_style, is_whole=is_whole)

    def _put_spans(self, text: str, style: str, *, is_whole: bool) -> str:
        """Write ``text`` and return the part that must wait."""
        while text:
            mark = _MARK.search(text)
            if mark is None:
                self._put(text, style)
                return ""
            self._put(text[: mark.start()], style)
            text = text[mark.start() :]
            has_more = not is_whole and len(text) < _MAX_HELD
            if text[0] == "\\":
                if len(text) == 1 and has_more:
                    return text
                n = 1 if text[1:2] in ("*", "`", "_", "#") else 0
                self._put(text[n : n + 1], style)
                text = text[n + 1 :]
                continue
            run = re.match(r"`+|\*+", text)[0]  # type: ignore[index]  # the mark is there
            if len(run) == len(text) and has_more:
                return text
            kind = "`" if run[0] == "`" else run[:3]
            span = _SPANS[kind].match(text)
            if span is not None and (span.end() < len(text) or not has_more):
                if kind == "`":
                    self._put(span[2].strip(" ") or span[2], style + _STYLES[kind])
                else:
                    self._put_spans(span[2], style + _STYLES[kind], is_whole=True)
                text = text[span.end() :]
            elif has_more and (kind == "`" or not text[len(run)].isspace()):
                return text
            else:
                self._put(run, style)
                text = text[len(run) :]
        return ""

    def _put(self, text: str, style: str) -> None:
        """Write text at its place; moves a word that does not fit to the next line."""
        columns = self._columns()
        if columns < _LEAST_COLUMNS or self._is_table:
            self._show_style(style)
            self._out.append(text)
            return
        for part in re.findall(r"[ \t]|[^ \t]+", text):
            if part in (" ", "\t"):
                self._word.clear()
                self._word_columns = 0
                if self._column < columns - 1:
                    self._show_style(style)
                    self._out.append(" ")
                    self._column += 1
                continue
            for char in part:
                self._put_char(char, style, columns)

    def _put_char(self, char: str, style: str, columns: int) -> None:
        width = 0 if combining(char) or char in "\u200d\ufe0f" else 1
        if east_asian_width(char) in "WF":
            width = 2
        if self._column + width > columns - 1:
            self._wrap(columns)
        self._show_style(style)
        self._out.append(char)
        self._column += width
        if width == 2:  # Chinese and Japanese have no spaces: a line may end after any character
            self._word.clear()
            self._word_columns = 0
            return
        self._word_columns += width
        if self._word and self._word[-1][0] == style:
            self._word[-1] = (style, self._word[-1][1] + char)
        else:
            self._word.append((style, char))

    def _wrap(self, columns: int) -> None:
        """Move the last word to the next line; breaks a word that is longer than a line."""
        indent = self._indent if self._indent < columns // 2 else 0
        is_longer = self._word_columns >= columns - 1 - indent
        word = [] if is_longer else self._word[:]
        if word and self._word_columns:
            self._out.append(f"\x1b[{self._word_columns}D\x1b[K")
        self._show_style("")
        self._out.append("\n" + " " * indent)
        self._column = indent
        if not word:
            self._word.clear()
            self._word_columns = 0
        for style, text in word:
            self._show_style(style)
            self._out.append(text)
        self._column += self._word_columns

    def _show_style(self, style: str) -> None:
        if style != self._shown_style:
            self._out.append((_RESET if self._shown_style else "") + style)
            self._shown_style = style


def prose_on(stream: TextIO, *, is_dim: bool = False, has_markdown: bool = False) -> Prose:
    """Return a printer of text on a terminal. Without colours Markdown stays unchanged."""
    has_styles = shows_styles(stream)
    return Prose(
        lambda: columns_of(stream),
        style=_DIM if is_dim and has_styles else "",
        has_markdown=has_markdown and has_styles,
    )


def dim(text: str) -> str:
    """Return the text in a quieter colour, if standard error shows colours."""
    return f"{_DIM}{text}{_RESET}" if shows_styles(sys.stderr) else text
