"""One answer or continuation as it is generated: progress, and signals that stop the engine."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from qsf.cli.run import report
from qsf.shell import command
from qsf.system.signals import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from qsf.model import Model
    from qsf.options import GenerationOptions


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def say_lines(lines: list[str]) -> None:
    """Print lines on standard error."""
    for line in lines:
        say(line)


def show(piece: str) -> None:
    """Print generated text on standard output, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def generate(
    model: Model,
    options: GenerationOptions,
    start: Callable[[GenerationOptions], Iterator[str]],
    *,
    is_quiet: bool,
) -> Generator[str, None, None]:
    """Yield the pieces of text of ``start(options)``; a signal stops the engine at once.

    Reasoning is shown on a terminal, on standard error. To be closed.
    """
    progress = command.Progress("reading the prompt", is_wanted=not is_quiet)

    def show_progress(n_done: int, n_all: int) -> None:
        progress.update(f"reading the prompt: {n_done} of {n_all} tokens")
        if n_done == n_all:
            progress.end()

    has_reasoning = False

    def show_reasoning(piece: str) -> None:
        nonlocal has_reasoning
        progress.end()
        has_reasoning = True
        sys.stderr.write(report.dim(piece))
        sys.stderr.flush()

    options = replace(options, progress=show_progress)
    if sys.stderr.isatty() and not is_quiet:
        options = replace(options, on_reasoning=show_reasoning)
    try:
        with Watcher(lambda _: model.cancel(), progress.tick):
            for piece in start(options):
                progress.end()
                if has_reasoning:
                    say("\n")
                    has_reasoning = False
                yield piece
    finally:
        progress.end()
