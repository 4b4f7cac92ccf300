"""Limits of this process, for a program that runs what a stranger wrote.

Imports nothing of the package: ``qsf/text/render_child.py`` runs without it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import resource


def confine(free_bytes: int, n_seconds: int, stack_bytes: int) -> None:
    """Let this process take no more than ``free_bytes`` on top of what it has."""
    _limit(resource.RLIMIT_CORE, 1)  # of one byte neither a file nor a handler takes a dump
    _limit(resource.RLIMIT_CPU, n_seconds, 1)
    _limit(resource.RLIMIT_STACK, stack_bytes)
    _limit(resource.RLIMIT_DATA, _data_bytes() + free_bytes)


def limit_file_bytes(n_bytes: int) -> None:
    """Let no file that this process writes become larger: an OSError says so."""
    _limit(resource.RLIMIT_FSIZE, n_bytes)


def _limit(kind: int, most: int, slack: int = 0) -> None:
    """Lower a limit of this process; the hard one is ``slack`` more."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
        slack = min(slack, hard - most)
    resource.setrlimit(kind, (most, most + slack))


def _data_bytes() -> int:
    """Return the private writable memory of this process, mapped; 0 where that is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib is large)
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
