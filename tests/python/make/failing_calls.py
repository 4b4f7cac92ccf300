"""Lets one call of a function of `os` fail: the first, the second, and so on."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

ERRORS: list[BaseException] = [
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
]


class FailingCalls:
    """Counts the calls of ``os.<name>`` and raises ``error`` in one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
        self._patch, self.name, self._error = patch, name, error

    def during(self, act: Callable[[], object], *, fail_at: int = 0) -> int:
        """Return the number of calls; the one of number ``fail_at``, from 1, fails."""
        real: Callable[..., Any] = getattr(os, self.name)
        n_calls = 0

        def count(*args: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls == fail_at:
                if self.name == "close":
                    real(*args)
                raise self._error
            return real(*args)

        with self._patch.context() as patch:
            patch.setattr(os, self.name, count)
            act()
        return n_calls

    def before_the_name(self, write: Callable[[], object]) -> range:
        """Return the numbers of the calls up to the one that puts the written file in place.

        The last fsync and close are of the folder, after it.
        """
        n_all = self.during(write)
        assert n_all >= 1
        return range(1, n_all if self.name in ("fsync", "close") else n_all + 1)
