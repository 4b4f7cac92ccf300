"""Where the commands start, before anything that takes time to import.

A Ctrl-C in the first half second, which Python spends on imports, ends them without a
traceback: nothing has been written by then.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import NoReturn


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)


def start(module: str) -> NoReturn:
    """Run ``main()`` of the command in ``module`` and exit with what it returns."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask for
            signal.signal(number, _leave)
    sys.exit(import_module(module).main())


def run() -> NoReturn:
    """Start ``qsf-run``."""
    start("qsf.run_cli")


def convert() -> NoReturn:
    """Start ``qsf-convert``."""
    start("qsf.converter.cli")


def inspect() -> NoReturn:
    """Start ``qsf-inspect``."""
    start("qsf.inspect_cli")


def evaluate() -> NoReturn:
    """Start ``qsf-eval``."""
    start("qsf.eval_cli")
