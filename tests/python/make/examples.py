"""How many examples hypothesis tries: a quarter in quick runs, all of them in `make check-slow`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os

_ALL = os.environ.get("QSF_EXAMPLES") == "all"
_LEAST = 20


def examples(count: int) -> int:
    """Return how many of ``count`` examples this run tries."""
    return count if _ALL else min(count, max(_LEAST, count // 4))
