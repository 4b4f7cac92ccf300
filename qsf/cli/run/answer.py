"""One answer or continuation as it is generated: progress, and signals that stop the engine."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from qsf.errors import QsfCancelledError
from qsf.shell import command
from qsf.shell.prose import can_move, dim, prose_on
from qsf.system.signals import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from qsf.model import Model
    from qsf.options import GenerationOptions


def say(text: str) -> None:
    print(command.wrapped(text), file=sys.stderr, flush=True)


def say_lines(lines: list[str]) -> None:
    for line in lines:
        say(line)


def show(piece: str) -> None:
    """Print generated text on standard output, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


class Shown:
    """Prints an answer on standard output: on a terminal wrapped at words, with its Markdown."""

    def __init__(self, *, is_as_written: bool, has_markdown: bool) -> None:
        """With ``is_as_written`` the text is not changed, even on a terminal."""
        is_formatted = not is_as_written and can_move(sys.stdout)
        self._prose = prose_on(sys.stdout, has_markdown=has_markdown) if is_formatted else None

    def push(self, piece: str) -> None:
        show(piece if self._prose is None else self._prose.push(piece))

    def end(self) -> None:
        """Print the held-back text, and end the line."""
        show(f"{'' if self._prose is None else self._prose.end()}\n")


class _Thoughts:
    """Shows a model's reasoning on standard error in a quieter colour, or only a note of it."""

    def __init__(self, *, is_hidden: bool) -> None:
        self._progress = command.Progress("thinking", is_wanted=is_hidden)
        self._prose = None if is_hidden else prose_on(sys.stderr, is_dim=True)
        self._began: float | None = None

    def push(self, piece: str) -> None:
        if self._began is None:
            self._began = time.monotonic()
        if self._prose is not None:
            sys.stderr.write(self._prose.push(piece))
            sys.stderr.flush()

    def tick(self) -> None:
        if self._began is not None:
            self._progress.tick()

    def end(self) -> None:
        if self._began is None:
            return
        self._progress.end()
        if self._prose is not None:
            say(f"{self._prose.end()}\n")
        else:
            say(dim(f"(thought for {time.monotonic() - self._began:.1f} s)"))
        self._began = None


def generate(
    model: Model,
    options: GenerationOptions,
    start: Callable[[GenerationOptions], Iterator[str]],
    *,
    is_quiet: bool,
    hides_thoughts: bool = False,
    guard: LoopGuard | None = None,
) -> Generator[str, None, None]:
    """Yield the pieces of text of ``start(options)``; a signal stops the engine at once.

    Reasoning is shown on standard error if that is a terminal. The guard ends an answer, or
    thoughts, that repeat themselves. The caller closes the generator.
    """
    progress = command.Progress("reading the prompt", is_wanted=not is_quiet)
    thoughts = _Thoughts(is_hidden=hides_thoughts)

    def show_progress(n_done: int, n_all: int) -> None:
        progress.update(f"reading the prompt: {n_done} of {n_all} tokens")
        if n_done == n_all:
            progress.end()

    def is_loop(piece: str) -> bool:
        if guard is not None:
            guard.push(piece)
        return guard is not None and guard.found != ""

    def show_reasoning(piece: str) -> None:
        progress.end()
        thoughts.push(piece)
        if is_loop(piece):
            model.cancel()

    def tick() -> None:
        progress.tick()
        thoughts.tick()

    options = replace(options, progress=show_progress)
    if sys.stderr.isatty() and not is_quiet:
        options = replace(options, on_reasoning=show_reasoning)
    try:
        with Watcher(lambda _: model.cancel(), tick):
            for piece in start(options):
                progress.end()
                thoughts.end()
                yield piece
                if is_loop(piece):
                    break
    except QsfCancelledError:
        if guard is None or not guard.found:
            raise
    finally:
        progress.end()
        thoughts.end()


LEAST_TOKENS: Final = 200  # of a loop
LEAST_TIMES: Final = 8
_KEPT_TOKENS: Final = 4096  # so the longest period has 512
_CHECKED_EVERY: Final = 64  # tokens; a check takes 5 ms at most


class LoopGuard:
    """Notices that an answer repeats one text for ever, as small models do.

    Each piece of the answer is taken for a token.

    Attributes:
        found: what to tell the user about the loop that ends the answer; "": there is none.
    """

    def __init__(self) -> None:
        self.found = ""
        self._pieces: deque[str] = deque(maxlen=_KEPT_TOKENS)
        self._n_unchecked = 0

    def push(self, piece: str) -> None:
        """Take the next piece, and look for a loop now and then."""
        self._pieces.append(piece)
        self._n_unchecked += 1
        if self._n_unchecked < _CHECKED_EVERY:
            return
        self._n_unchecked = 0
        period, n_chars = loop_at_end("".join(self._pieces), self._least_chars())
        if period:
            self.found = (
                f"(stopped: the same {period} character{'' if period == 1 else 's'} came "
                f"{n_chars // period} times; --no-loop-guard lets it go on)"
            )

    def _least_chars(self) -> int:
        """Return the characters of LEAST_TOKENS pieces; if there are fewer, one more than that."""
        pieces = list(self._pieces)[-LEAST_TOKENS:]
        return sum(map(len, pieces)) + (len(pieces) < LEAST_TOKENS)


def terminal_guard(*, is_wanted: bool) -> LoopGuard | None:
    return LoopGuard() if is_wanted and sys.stdout.isatty() else None


def loop_at_end(text: str, least_chars: int) -> tuple[int, int]:
    """Return the period of the longest loop that ends the text, and its length, or (0, 0).

    A loop has ``least_chars`` characters or more and LEAST_TIMES periods. By the prefix function of
    the reversed text (Knuth, Morris, Pratt 1977): time is linear in the length of the text.
    """
    turned = text[::-1]
    borders = [0] * len(turned)
    found = (0, 0)
    border = 0
    for i in range(1, len(turned)):
        while border and turned[i] != turned[border]:
            border = borders[border - 1]
        border += turned[i] == turned[border]
        borders[i] = border
        n_chars = i + 1
        period = n_chars - border
        if n_chars >= least_chars and n_chars >= LEAST_TIMES * period:
            found = (period, n_chars)
    return found
