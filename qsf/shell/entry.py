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


def _one_blas_thread() -> None:
    """Let products run on one thread each, unless the user says otherwise.

    The converter and qsf-eval work on several windows of text at once. Threads of the BLAS beside
    these wait for each other in loops: ten times slower on a busy machine. With one, sums also
    have one order, whatever the machine. numpy reads this when it is imported.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def run() -> NoReturn:
    """Start ``qsf-run``."""
    start("qsf.run.cli")


def convert() -> NoReturn:
    """Start ``qsf-convert``."""
    _one_blas_thread()
    start("qsf_converter.cli")


def inspect() -> NoReturn:
    """Start ``qsf-inspect``."""
    start("qsf.inspect.cli")


def evaluate() -> NoReturn:
    """Start ``qsf-eval``."""
    _one_blas_thread()
    start("qsf.evaluate.cli")


def bench() -> NoReturn:
    """Start ``python -m qsf.bench``."""
    _one_blas_thread()
    start("qsf.bench.cli")
