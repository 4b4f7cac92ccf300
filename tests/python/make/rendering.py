"""Chat templates rendered in this process, without the one that bounds what they take."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from qsf.text import render, render_child


@pytest.fixture(autouse=True, scope="module")
def rendered_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same function as the child's, for all but test_render, whose subject the child is."""

    def ask(data: bytes) -> tuple[int, bytes]:
        parts: list[bytes] = []
        render_child._answer(data, parts.append)
        return 0, b"".join(parts)

    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_render"):
            patch.setitem(sys.modules, "confine", SimpleNamespace(confine=lambda *_: None))
            patch.setattr(render, "_ask_child", ask)
        yield
