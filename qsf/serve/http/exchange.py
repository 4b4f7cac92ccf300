"""A request and its answer, whatever carries them: ``Application`` answers an ``Exchange``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from qsf.serve.http.problems import Problem

SMALL_BYTES = 16 << 10  # larger bodies count as large
_ONCE = ("host", "origin", "authorization", "transfer-encoding")
_REQUEST_ID = re.compile(r"[\w.:/=+-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request; header names are in lower case.

    Attributes:
        request_id: of the client, or made here; the answer and the log contain it.
    """

    method: str
    path: str
    headers: dict[str, str]
    peer: str
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))

    def get(self, name: str) -> str:
        return self.headers.get(name, "")


def make_head(method: str, path: str, fields: Iterable[tuple[bytes, bytes]], peer: str) -> Head:
    """Return the head of a request to a path without its query. Raises Problem."""
    headers: dict[str, str] = {}
    for name, value in fields:
        key = name.decode("latin-1").lower()
        if key in headers and key in _ONCE:
            raise Problem(400, "bad_request", f"there are two fields {key}")
        headers[key] = value.decode("latin-1")
    path = "/" + "/".join(
        filter(None, path.split("/"))
    )  # clients join addresses with // and end in /
    named = _REQUEST_ID.fullmatch(headers.get("x-request-id", ""))
    return Head(method, path, headers, peer, *([named[0]] if named else []))


def stated_bytes(head: Head, most: int) -> int:
    """Return the length of the body that the head states, or 0. Raises Problem."""
    stated = head.get("content-length") or "0"
    n_bytes = int(stated[:20]) if stated.isdecimal() else 0
    if n_bytes > most:
        text = f"the body has {n_bytes} bytes, and {most} is the limit"
        raise Problem(413, "body_too_large", text)
    return n_bytes


class Carrier(Protocol):
    """What brings an answer to its client: a connection of this server, or another server."""

    def write_head(self, head: Head, status: int, headers: dict[str, str]) -> None: ...
    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits for a client that reads slowly."""

    def end(self) -> None: ...


class Application(Protocol):
    large_bodies: asyncio.Semaphore  # held while a large body is in memory

    def check(self, head: Head) -> object:
        """Return what answers a request, before its body is read. Raises Problem."""

    async def answer(self, endpoint: Any, exchange: Exchange) -> None: ...
    def extra_headers(self, head: Head | None) -> dict[str, str]: ...
    def explain(self, problem: Problem, head: Head | None) -> object: ...


@dataclass
class Exchange:
    """A request, and what was sent of its answer.

    Attributes:
        status: of the answer; 0: nothing was sent.
        headers: added to those of the answer.
        on_gone: called when the client has disconnected.
    """

    carrier: Carrier
    head: Head
    body: bytes = b""
    is_gone: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    on_gone: Callable[[], object] | None = None
    holds: asyncio.Semaphore | None = None

    async def hold(self, turns: asyncio.Semaphore, seconds: float) -> None:
        """Wait until memory allows another large body. Raises Problem."""
        try:
            await asyncio.wait_for(turns.acquire(), seconds)
        except asyncio.TimeoutError:
            text = f"other large bodies have been read for {seconds:g} s"
            raise Problem(503, "busy", text, retry_seconds=5) from None
        self.holds = turns

    def drop_body(self) -> None:
        """Free the memory of the body once it was parsed."""
        self.body = b""
        if self.holds is not None:
            self.holds.release()
            self.holds = None

    def mark_gone(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            if self.on_gone is not None:
                self.on_gone()

    async def send(
        self,
        body: bytes,
        kind: str = "application/json",
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send an answer in one piece."""
        sizes = {"content-length": str(len(body))}
        self._begin(status, {"content-type": kind, **(headers or {}), **sizes})
        await self.carrier.write(b"" if self.head.method == "HEAD" else body)
        self.carrier.end()

    def begin(self, kind: str) -> None:
        """Begin a stream, whose parts follow by ``write``."""
        self._begin(200, {"content-type": kind, "x-accel-buffering": "no"})

    async def write(self, data: bytes) -> None:
        if data and not self.is_gone:
            await self.carrier.write(data)

    def end(self) -> None:
        if not self.is_gone:
            self.carrier.end()

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        every = {**self.headers, "x-request-id": self.head.request_id}
        self.carrier.write_head(self.head, status, {**headers, **every})


def to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
