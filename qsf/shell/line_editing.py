"""Lines typed on a terminal: edited, completed, remembered."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_HISTORY = 1000


@contextlib.contextmanager
def line_editing(complete: Callable[[str, str], Sequence[str]]) -> Iterator[None]:
    """Let input() edit lines, join pasted lines into one message, and keep a history over runs.

    ``complete(before, word)`` returns completions of ``word``, which follows ``before`` on the
    line.
    """
    try:
        import readline
    except ImportError:  # Windows, whose console edits lines itself
        yield
        return
    matches: list[str] = []

    def completer(word: str, state: int) -> str | None:
        if state == 0:
            matches[:] = complete(readline.get_line_buffer()[: readline.get_begidx()], word)
        return matches[state] if state < len(matches) else None

    with contextlib.suppress(Exception):  # libedit lacks the setting
        readline.parse_and_bind("set enable-bracketed-paste on")
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(completer)
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not folder.is_absolute():
        folder = Path("~/.local/state").expanduser()
    path = folder / "qsf" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)


@contextlib.contextmanager
def prefilled(text: str) -> Iterator[None]:
    """Start the next input() with ``text``, which the user can edit."""
    try:
        import readline
    except ImportError:
        text = ""
    if not text:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        yield
    finally:
        readline.set_startup_hook(None)


def file_names(word: str) -> list[str]:
    folder, _, start = word.rpartition("/")
    try:
        inside = sorted(Path(f"{folder}/" if "/" in word else ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    head = word[: len(word) - len(start)]
    return [
        f"{head}{path.name}{'/' if path.is_dir() else ''}"
        for path in inside
        if path.name.startswith(start) and (start or not path.name.startswith("."))
    ]
