"""Fixtures of all tests of the server."""
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
from pathlib import Path

import pytest

from make.rendering import rendered_here as rendered_here
from make.served import Client, serving


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    """A server of a chat model, with forms of answers where llguidance is installed."""
    with serving(tiny_chat_8bit, parallel=4, any_model=True) as found:
        yield found
