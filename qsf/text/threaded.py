"""Pieces of text for an event loop: each is made in a thread, while other tasks run."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


async def threaded(pieces: Iterator[str], cancel: Callable[[], None]) -> AsyncIterator[str]:
    """Yield ``pieces``, a generator of texts that are never None.

    If the task is cancelled or the iteration is closed, ``cancel`` is called to end the current
    piece; its thread is awaited, then the generator is closed.
    """
    step: asyncio.Future[str | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
            piece = await asyncio.shield(step)
            if piece is None:
                return
            yield piece
    finally:
        while step is not None and not step.done():
            cancel()
            with contextlib.suppress(
                asyncio.CancelledError
            ):  # a cancellation is already on its way
                await asyncio.wait([step])
        if step is not None and not step.cancelled():
            step.exception()  # the error was raised above, or nobody waits for it any more
        pieces.close()  # type: ignore[attr-defined]
