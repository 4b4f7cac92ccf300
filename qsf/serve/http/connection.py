"""HTTP/1.1 over one connection: limits and deadlines of heads and bodies, answers, streams.

h11 parses the grammar; inputs that it would wrongly accept are refused before it sees them. The
rules are in docs/server.md.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11

from qsf.serve.http.exchange import (
    SMALL_BYTES,
    Application,
    Exchange,
    Head,
    make_head,
    stated_bytes,
    to_json,
)
from qsf.serve.http.problems import Problem, internal

MAX_HEAD_BYTES = 16 << 10
MAX_LINE_BYTES = 8 << 10
MAX_FIELDS = 64
_MAX_WAITING_BYTES = 64 << 10  # of the next request while one is answered
_MAX_UNSENT_BYTES = 256 << 10  # of a stream whose client reads nothing
_LINGER_BYTES = 4 << 20
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)
"""What a connection too many is told."""
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_BAD_LINE = re.compile(rb"(?<!\r)\n|\r\n[ \t]")  # or a continuation line
_LENGTHS = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)
_ABSOLUTE = re.compile(r"https?://([^/?#]+)([/?#].*)?", re.IGNORECASE)  # RFC 9112, 3.2.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for clients: numbers, and how many seconds each step may take."""

    max_body_bytes: int = 1 << 20
    max_connections: int = 64
    max_of_address: int = 16
    large_bodies: int = 2
    head: float = 10.0
    body: float = 30.0
    idle: float = 30.0
    unread: float = 30.0
    linger: float = 2.0


class _GoneError(Exception):
    """The client has disconnected."""


def _bad(text: str, status: int = 400) -> Problem:
    return Problem(status, "bad_request", text)


def _check_sizes(data: bytes | bytearray) -> None:
    """Raise Problem for a head, or the beginning of one, that is too large."""
    n_line = data.find(b"\r\n")
    for what, n_read, most in (
        ("bytes in its first line", len(data) if n_line < 0 else n_line, MAX_LINE_BYTES),
        ("bytes", len(data), MAX_HEAD_BYTES),
        ("fields", data.count(b"\r\n") - 2, MAX_FIELDS),
    ):
        if n_read > most:
            text = f"the head has {n_read} {what}, and {most} is the limit"
            raise Problem(431, "headers_too_large", text)


class Connection(asyncio.Protocol):
    """One connection; its requests are served one after the other."""

    def __init__(
        self,
        application: Application,
        limits: Limits,
        on_end: Callable[[Connection], None],
        is_welcome: Callable[[Connection], bool],
    ) -> None:
        self._application = application
        self._is_welcome = is_welcome
        self._limits = limits
        self._on_end = on_end
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES + 1024)
        self._incoming = bytearray()
        self._is_eof = False
        self._wanted: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self._is_closing = False
        self._is_waiting = True
        self._n_served = 0
        self.idle_since = 0.0
        self._task: asyncio.Task[None] | None = None
        self.peer = ""
        self.is_counted = False  # counted in the limit of connections until its last answer is sent

    # ---- called by asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else ""
        if not self._is_welcome(self):
            # Closed when its request has arrived: earlier, the client would only see a reset.
            transport.write(REFUSAL)
            self._is_closing = True
            asyncio.get_running_loop().call_later(self._limits.linger, transport.abort)
            return
        self.is_counted = True
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        """Keep received bytes; beyond a limit, later ones wait in the socket."""
        if self._task is None:
            self._transport.close()
            return
        self._incoming += data
        if len(self._incoming) > _MAX_WAITING_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Handle the end of the client's sending; returns True: the answer may still be written."""
        self._is_eof = True
        self._wake()
        if self._exchange is not None:
            self._exchange.mark_gone()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_counted = False
        self._is_eof = self._is_closing = True
        self._wake()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._exchange is not None:
            self._exchange.mark_gone()
        self._on_end(self)

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    # ---- called by exchange and server ----

    @property
    def is_idle(self) -> bool:
        return self._is_waiting and not self._incoming.strip(b"\r\n")

    @property
    def is_spare(self) -> bool:
        """True if the client was answered and can connect again for another request."""
        return self.is_counted and self.is_idle and self._n_served > 0

    def write_head(self, head: Head, status: int, headers: dict[str, str]) -> None:
        """Send the head of an answer; closes the connection later if the body stays unread."""
        headers = {**headers, **self._application.extra_headers(head)}
        values = [
            (name.encode(), text.encode("latin-1", "replace")) for name, text in headers.items()
        ]
        if self._is_closing or self._h11.their_state not in (h11.DONE, h11.IDLE, h11.MUST_CLOSE):
            self._is_closing = True
            values.append((b"connection", b"close"))
        reason = HTTPStatus(status).phrase.encode()
        self._send(h11.Response(status_code=status, headers=values, reason=reason))

    async def write(self, data: bytes) -> None:
        """Send a part of a body; disconnects a client that has stopped reading."""
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.abort()
        self._send(h11.Data(data=data))
        if self._drained is None or self._transport.is_closing():
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._drained), self._limits.unread)
        except asyncio.TimeoutError:
            self.abort()

    def end(self) -> None:
        self._send(h11.EndOfMessage())

    def _send(self, event: Any) -> None:
        data = self._h11.send(event)
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()
        if self._exchange is not None:
            self._exchange.mark_gone()

    def close_when_done(self) -> None:
        """End the connection after the request that is being answered, or now."""
        self._is_closing = True
        if self.is_idle:
            self.is_counted = False
            self._transport.close()

    # ---- reading ----

    async def _more(self, seconds: float) -> None:
        """Wait for new bytes. Raises TimeoutError, or _GoneError at the end."""
        if self._is_eof:
            raise _GoneError
        if not self._transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._wanted = loop.create_future()
        try:
            await asyncio.wait_for(self._wanted, seconds)
        finally:
            self._wanted = None

    async def _read_head(self) -> Head:
        """Return the next head. Raises Problem, _GoneError, or TimeoutError if no byte arrived."""
        loop = asyncio.get_running_loop()
        self._is_waiting, self.idle_since = True, loop.time()
        while True:
            while self._incoming[:2] == b"\r\n":  # RFC 9112, 2.2
                del self._incoming[:2]
            if self._incoming and not self._incoming.startswith(b"\r"):
                break
            await self._more(self._limits.idle)
        self._is_waiting = False
        ends_at = loop.time() + self._limits.head
        while (end := _HEAD_END.search(self._incoming)) is None:
            _check_sizes(self._incoming)
            await self._more_of("head", ends_at, self._limits.head)
        raw = bytes(self._incoming[: end.end()])
        _check_sizes(raw)
        del self._incoming[: end.end()]
        return self._parse_head(raw)

    async def _more_of(self, what: str, ends_at: float, limit: float) -> None:
        """Wait for more of a request. Raises Problem, _GoneError."""
        try:
            await self._more(ends_at - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            text = f"the {what} took more than {limit:g} s"
            raise Problem(408, f"{what}_timeout", text) from None

    def _parse_head(self, raw: bytes) -> Head:
        if _BAD_LINE.search(raw) is not None or b"\0" in raw:
            raise _bad("a line does not end with CR LF, or goes on")
        if len(_LENGTHS.findall(raw)) > 1:
            raise _bad("there are two fields Content-Length")
        try:
            self._h11.receive_data(raw)
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise _bad(str(error), error.error_status_hint) from None
        if not isinstance(event, h11.Request):
            raise _bad("there is no request")
        if event.http_version not in (b"1.0", b"1.1"):
            raise _bad("HTTP/1.1 is spoken here", 505)
        target = event.target.decode("latin-1")
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is not None:
            target = absolute[2] or ""
        path = unquote(target.partition("?")[0])
        head = make_head(event.method.decode("latin-1"), path, event.headers, self.peer)
        if "transfer-encoding" in head.headers and (
            "content-length" in head.headers or event.http_version < b"1.1"
        ):
            raise _bad("Transfer-Encoding goes with HTTP/1.1 and alone")
        if absolute is not None:  # the host of the target replaces the header
            head.headers["host"] = absolute[1]
        return head

    async def _read_body(self, exchange: Exchange) -> None:
        """Read the body; a large one waits until memory allows it. Raises Problem, _GoneError."""
        head, most, limits = exchange.head, self._limits.max_body_bytes, self._limits
        n_bytes = stated_bytes(head, most)
        if "transfer-encoding" in head.headers or n_bytes > SMALL_BYTES:
            await exchange.hold(self._application.large_bodies, limits.body)
        if self._h11.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        body = bytearray()
        ends_at = asyncio.get_running_loop().time() + limits.body
        while not isinstance(event := self._next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > most:
                    text = f"the body has more than {most} bytes, the limit"
                    raise Problem(413, "body_too_large", text)
            elif event is h11.NEED_DATA:
                if not self._incoming:
                    await self._more_of("body", ends_at, limits.body)
                data = bytes(self._incoming)
                self._incoming.clear()
                if data:
                    self._h11.receive_data(data)
            else:
                raise _GoneError
        exchange.body = bytes(body)

    def _next_event(self) -> Any:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise _bad(str(error)) from None

    # ---- serving ----

    async def _serve(self) -> None:
        try:
            while not self._is_closing:
                if not await self._serve_request():
                    break
        except (_GoneError, asyncio.TimeoutError):
            pass
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        finally:
            self._exchange = None
            self.is_counted = False
            await self._linger()

    async def _serve_request(self) -> bool:
        """Serve one request; return whether another may follow."""
        head: Head | None = None
        exchange: Exchange | None = None
        try:
            head = await self._read_head()
            exchange = Exchange(self, head)
            endpoint = self._application.check(head)
            await self._read_body(exchange)
            self._exchange = exchange
            await self._application.answer(endpoint, exchange)
        except Problem as problem:
            await self._refuse(problem, head)
        except (_GoneError, asyncio.TimeoutError):
            raise
        except Exception as error:  # our own error must not look like one of the network
            await self._refuse(internal(error), head)
        finally:
            self._exchange = None
            if exchange is not None:
                exchange.drop_body()
        self._n_served += 1
        if self._is_closing or self._h11.our_state is not h11.DONE:
            return False
        if self._h11.their_state is not h11.DONE:
            return False
        # Bytes that h11 has read after the body begin the next request.
        rest, _ = self._h11.trailing_data
        self._incoming[:0] = rest
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES + 1024)
        return True

    async def _refuse(self, problem: Problem, head: Head | None) -> None:
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # the answer has begun: its endpoint has reported the error
        exchange = Exchange(self, head or Head("GET", "", {}, self.peer))
        if head is None:
            self._is_closing = True
        body = self._application.explain(problem, head)
        await exchange.send(to_json(body), status=problem.status, headers=problem.headers())

    async def _linger(self) -> None:
        """Close; a client that is still sending receives the answer first, not a reset."""
        if self._transport.is_closing():
            return
        is_over = self._h11.their_state in (h11.DONE, h11.MUST_CLOSE) and not self._incoming
        if self._is_eof or is_over or self._h11.our_state is h11.IDLE:
            self._transport.close()
            return
        n_bytes = 0
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._limits.linger
        with contextlib.suppress(OSError, NotImplementedError):
            self._transport.write_eof()
        with contextlib.suppress(_GoneError, asyncio.TimeoutError):
            while n_bytes < _LINGER_BYTES:
                n_bytes += len(self._incoming)
                self._incoming.clear()
                await self._more(ends_at - loop.time())
        self._transport.close()
