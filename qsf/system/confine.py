"""Limits of this process, for a program that runs untrusted templates.

Imports nothing of the package: ``qsf/text/render_child.py`` runs without it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import resource


def confine(free_bytes: int, n_seconds: int, stack_bytes: int) -> None:
    """Limit this process to ``free_bytes`` more memory than it has now."""
    _limit(resource.RLIMIT_CORE, 1)  # one byte: neither a file nor a crash handler gets a dump
    _limit(resource.RLIMIT_CPU, n_seconds, 1)
    _limit(resource.RLIMIT_STACK, stack_bytes)
    _limit(resource.RLIMIT_DATA, _data_bytes() + free_bytes)


def limit_file_bytes(n_bytes: int) -> None:
    """Limit the size of files that this process writes; longer writes raise OSError."""
    _limit(resource.RLIMIT_FSIZE, n_bytes)


def _limit(kind: int, most: int, slack: int = 0) -> None:
    """Lower a limit of this process; its hard limit is larger by ``slack``."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
        slack = min(slack, hard - most)
    resource.setrlimit(kind, (most, most + slack))


def _data_bytes() -> int:
    """Return the private writable memory that this process has mapped; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib is large)
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
