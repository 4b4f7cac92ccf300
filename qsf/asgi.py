"""The server of ``qsf serve`` as an ASGI application: for uvicorn, hypercorn, a mount of FastAPI.

::

    # app.py, for `uvicorn app:app`
    import qsf.asgi

    app = qsf.asgi.app("model.qsf", "--ram-budget", "2GB")

The other server has its own limits of connections, heads and idle clients; those of bodies, keys
and host names are the ones of ``qsf serve`` (docs/server.md). One process is one model.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

from qsf.cli.serve import find_models, opened_server
from qsf.cli.serve_options import Request, parse
from qsf.errors import QsfArgumentError
from qsf.serve.http.connection import Limits
from qsf.serve.http.exchange import SMALL_BYTES, Exchange, Head, make_head, stated_bytes, to_json
from qsf.serve.http.gate import is_loopback
from qsf.serve.http.problems import Problem, internal
from qsf.serve.server import Server
from qsf.shell.arguments import UsageError
from qsf.text.render import one_process

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_OF_LISTENER = ("--host", "--port", "--connections", "--grace", "--plan", "--ray", "--machines")


def app(*words: str) -> Application:
    """Return the application for the words of a ``qsf serve`` command: the model, then options.

    The model is opened when the other server starts, or by the first request.

    Raises:
        QsfArgumentError: a wrong option, or one of the listener, which is the other server's.
    """
    for flag in _OF_LISTENER:
        if any(word.partition("=")[0] == flag for word in words):
            raise QsfArgumentError(f"{flag} is for `qsf serve`: here another server listens")
    try:
        return Application(parse(list(words)))
    except UsageError as error:
        raise QsfArgumentError(str(error)) from None


class _GoneError(Exception):
    """The client has disconnected."""


class _Carrier:
    """Brings an answer to the other server; the last message is left to the application."""

    def __init__(self, server: Server, send: _Send, unread_seconds: float) -> None:
        self._server = server
        self._send = send
        self._unread_seconds = unread_seconds
        self._start: _Message | None = None
        self.has_begun = False
        self.exchange: Exchange | None = None

    def write_head(self, head: Head, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        fields = {**headers, **self._server.extra_headers(head)}
        pairs = [(n.encode(), value.encode("latin-1", "replace")) for n, value in fields.items()]
        self._start = {"type": "http.response.start", "status": status, "headers": pairs}

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of a body; a client that has stopped reading counts as gone."""
        start, self._start = self._start, None
        body = {"type": "http.response.body", "body": data, "more_body": not is_last}
        for message in ([] if start is None else [start]) + [body]:
            try:
                await asyncio.wait_for(self._send(message), self._unread_seconds)
            except (asyncio.TimeoutError, OSError):
                if self.exchange is not None:
                    self.exchange.mark_gone()
                return

    def end(self) -> None:
        pass


class Application:
    """Opens the model at the start of the other server, answers its requests, closes it.

    An application that mounts this one calls ``start`` and ``stop`` in its own lifespan.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._limits = Limits(max_body_bytes=request.serving.max_body_mb << 20)
        self._opening: asyncio.Task[tuple[Server, ExitStack]] | None = None
        self._opened = ExitStack()
        self._server: Server | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one scope of the ASGI specification."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(await self.start(), scope, receive, send)
        else:
            raise QsfArgumentError(f"{scope['type']} is not served here: HTTP requests are")

    async def start(self) -> Server:
        """Open the model, unless that is done."""
        async with self._turn:
            if self._server is None:
                if self._opening is None:
                    self._opening = asyncio.create_task(asyncio.to_thread(self._open))
                try:  # a request that is cancelled leaves it to the next one
                    server, self._opened = await asyncio.shield(self._opening)
                    server.begin()
                except Exception:
                    self._opening = None
                    self._opened.close()
                    raise
                self._opening, self._server = None, server
            return self._server

    def _open(self) -> tuple[Server, ExitStack]:
        paths = find_models(self._request)
        with ExitStack() as opened:
            opened.enter_context(one_process())
            server = opened.enter_context(opened_server(self._request, paths))
            assert server is not None
            return server, opened.pop_all()

    async def stop(self) -> None:
        """Close the model; answers that still run are ended."""
        async with self._turn:
            if self._opening is not None:
                self._server, self._opened = await self._opening
                self._opening = None
                self._server.begin()
            if self._server is not None:
                await self._server.stop(0)
            self._server = None
            self._opened.close()

    async def _live(self, receive: _Receive, send: _Send) -> None:
        while True:
            message = await receive()
            what = message["type"].removeprefix("lifespan.")
            try:
                await (self.start() if what == "startup" else self.stop())
            except Exception as error:
                await send({"type": f"lifespan.{what}.failed", "message": str(error)})
                raise
            await send({"type": f"lifespan.{what}.complete"})
            if what == "shutdown":
                return

    async def _answer(
        self, server: Server, scope: _Message, receive: _Receive, send: _Send
    ) -> None:
        carrier = _Carrier(server, send, self._limits.unread)
        peer = (scope.get("client") or ("",))[0]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        exchange = Exchange(carrier, Head(scope["method"], path, {}, peer))
        carrier.exchange = exchange
        try:
            exchange.head = make_head(scope["method"], path, scope["headers"], peer)
            self._check_place(scope)
            endpoint = server.check(exchange.head)
            await self._read_body(server, exchange, receive)
            watching = asyncio.ensure_future(_watch(receive, exchange))
            try:
                await server.answer(endpoint, exchange)
            finally:
                watching.cancel()
        except Problem as problem:
            await _refuse(server, problem, carrier, exchange)
        except _GoneError:
            return
        except Exception as error:
            await _refuse(server, internal(error), carrier, exchange)
        finally:
            exchange.drop_body()
        if not exchange.is_gone:
            await carrier.write(b"", is_last=True)

    def _check_place(self, scope: _Message) -> None:
        """Refuse what came to an address that other machines reach, unless keys keep them out."""
        host, _ = scope.get("server") or ("localhost", None)
        options = self._request.serving
        if not (options.api_key_file or options.no_auth or is_loopback(host)):
            text = f"other machines reach {host}: app() needs --api-key-file, or --no-auth"
            raise Problem(403, "no_keys", text)

    async def _read_body(self, server: Server, exchange: Exchange, receive: _Receive) -> None:
        """Read the body; a large one waits until memory allows it. Raises Problem, _GoneError."""
        body, most = bytearray(), self._limits.max_body_bytes
        stated_bytes(exchange.head, most)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._limits.body
        goes_on = True
        while goes_on:
            try:
                message = await asyncio.wait_for(receive(), ends_at - loop.time())
            except asyncio.TimeoutError:
                text = f"the body took more than {self._limits.body:g} s"
                raise Problem(408, "body_timeout", text) from None
            if message["type"] == "http.disconnect":
                raise _GoneError
            body += message.get("body", b"")
            if len(body) > most:
                text = f"the body has more than {most} bytes, the limit"
                raise Problem(413, "body_too_large", text)
            if len(body) > SMALL_BYTES and exchange.holds is None:
                await exchange.hold(server.large_bodies, self._limits.body)
                ends_at = loop.time() + self._limits.body
            goes_on = message.get("more_body", False)
        exchange.body = bytes(body)


async def _watch(receive: _Receive, exchange: Exchange) -> None:
    """Wait for the client to leave."""
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.mark_gone()


async def _refuse(server: Server, problem: Problem, carrier: _Carrier, exchange: Exchange) -> None:
    if not carrier.has_begun:  # else its endpoint has reported the error
        body = to_json(server.explain(problem, exchange.head))
        await exchange.send(body, status=problem.status, headers=problem.headers())
