"""Signals that end a program, even during a long call or a wait."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from qsf.system import process

if TYPE_CHECKING:
    import asyncio
    from _socket import socket
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

# The terminal was closed; treated as SIGTERM. Windows says it by SIGBREAK.
HANGUP: Final = getattr(signal, "SIGHUP" if hasattr(signal, "SIGHUP") else "SIGBREAK")
STOPPING: Final = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    HANGUP: signal.SIGTERM,
}
_TICK_SECONDS = 0.5
_NUDGE_SECONDS = 0.05


def handle_stopping(loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
    """Call ``on_signal`` in the loop for each of STOPPING; signals that our parent ignores stay
    ignored.

    nohup, for example, requests that.
    """
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            try:
                loop.add_signal_handler(number, on_signal, number)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda n, _: loop.call_soon_threadsafe(on_signal, n))
    if sys.platform == "win32":

        def wait() -> None:
            process.wait_to_be_asked()
            loop.call_soon_threadsafe(on_signal, signal.SIGTERM)

        threading.Thread(target=wait, daemon=True).start()


def _socket_pair() -> tuple[socket, socket]:
    """Return two sockets; what one sends, the other receives."""
    try:
        from _socket import socketpair  # the module `socket` is large
    except ImportError:  # Windows
        from socket import socketpair
    return socketpair()


class Watcher:
    """Reacts to signals and ticks while the main thread is inside one long call.

    Python runs signal handlers in the main thread between two instructions: during a call of the
    engine, seconds with a large model, Ctrl-C would do nothing. The system's handler writes the
    signal's number into a socket at once, and a thread here reads it.

    Args:
        on_signal: called in that thread for SIGINT and SIGTERM, as soon as they arrive; SIGHUP
            counts as SIGTERM. The main thread gets its StoppedError all the same, when it is back.
        on_tick: called in that thread twice a second.
    """

    def __init__(
        self, on_signal: Callable[[int], None], on_tick: Callable[[], None] | None = None
    ) -> None:
        self._on_signal = on_signal
        self._on_tick = on_tick
        self._thread: threading.Thread | None = None
        self._previous = -1

    def __enter__(self) -> Self:
        """Start; does nothing outside of the main thread, which alone gets signals."""
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = _socket_pair()
            self._writer.setblocking(False)
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
            self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop; ``on_signal`` is never called afterwards."""
        if self._thread is not None:
            signal.set_wakeup_fd(self._previous)
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _watch(self) -> None:
        wait_seconds = None if self._on_tick is None else _TICK_SECONDS
        while True:
            ready, _, _ = select.select([self._reader], [], [], wait_seconds)
            if not ready:
                if self._on_tick is not None:
                    self._on_tick()
                continue
            numbers = self._reader.recv(64)
            if not numbers:
                return
            for number, meaning in STOPPING.items():
                if number in numbers:
                    self._on_signal(meaning)


def _nudge_main_thread(_number: int) -> None:
    time.sleep(_NUDGE_SECONDS)  # by now the thread has left the wait, or is waiting
    ident = threading.main_thread().ident
    if ident is not None:
        signal.pthread_kill(ident, signal.SIGURG)


@contextlib.contextmanager
def interruptible_wait() -> Iterator[None]:
    """Let a signal interrupt a wait for input even if it arrives just before the wait begins.

    In that case the handler only records the signal, and the wait would last until a key is
    pressed. So a second signal without meaning follows; it interrupts the wait, and Python handles
    the first.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGURG"):  # on Windows Ctrl-C ends the wait itself
        yield
        return
    previous = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        with Watcher(_nudge_main_thread):
            yield
    finally:
        signal.signal(signal.SIGURG, previous)
