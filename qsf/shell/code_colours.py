"""Colours for one line of code, by rules that fit most languages."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

_RESET, _DIM, _GREEN, _BLUE, _YELLOW = "\x1b[0m", "\x1b[2m", "\x1b[32m", "\x1b[34m", "\x1b[33m"
_KEYWORDS = frozenset(
    """
abstract and as assert async await begin bool break case catch char class const continue def
default defer del delete do done double elif else end enum esac except export extends extern false
False fi final finally float fn for foreach from func function go goto if impl import in include
instanceof int interface is lambda let long loop match mod module mut namespace new nil None
nonlocal not null operator or package pass private protected pub public raise return self select
short signed sizeof static struct super switch template then this throw trait true True try type
typedef typeof union unless unsigned until use using var virtual void volatile when where while with
yield SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN ON GROUP BY ORDER AND OR NOT
NULL AS SET VALUES
""".split()  # noqa: SIM905  # a hundred literals would be longer
)
_COMMENTS = {
    "--": ("sql", "lua", "haskell", "hs", "ada", "vhdl"),
    "#": ("python", "py", "sh", "bash", "shell", "zsh", "ruby", "rb", "perl", "yaml", "yml", "toml",
          "r", "make", "makefile", "dockerfile", "cmake", "powershell", "nix", "julia", "elixir"),
    "": ("", "text", "txt", "plaintext", "console", "output", "diff", "markdown", "md"),
}  # fmt: skip
_STRING = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`(?:\\.|[^`\\])*`"
_REST = rf"({_STRING})|(\b\d[\w.]*)|([A-Za-z_]\w*)"


def coloured(line: str, language: str) -> str:
    """Return a line of code with colours; ``language`` is the name on the Markdown block."""
    comment = next((mark for mark, names in _COMMENTS.items() if language in names), "//")
    if not comment:
        return line
    pattern = re.compile(rf"((?<!\S){re.escape(comment)}.*|/\*.*?(?:\*/|$))|{_REST}")

    def styled(match: re.Match[str]) -> str:
        text = match[0]
        if match[1]:
            return f"{_DIM}{text}{_RESET}"
        if match[2]:
            return f"{_GREEN}{text}{_RESET}"
        if match[3]:
            return f"{_YELLOW}{text}{_RESET}"
        return f"{_BLUE}{text}{_RESET}" if text in _KEYWORDS else text

    return pattern.sub(styled, line)
