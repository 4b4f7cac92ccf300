"""HTTP as bytes: splits, smuggling, limits, random heads: no engine; any values; openapi."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.refusals import table
from make.served import Client, serving
from qsf import Model
from qsf.serve.http.connection import Connection, Limits
from qsf.serve.http.exchange import Exchange, Head
from qsf.serve.http.problems import Problem

QUICK = Limits(max_body_bytes=1000, head=0.05, body=0.05, idle=0.05, unread=0.05, linger=0.02)


class Echo:
    """Answers with what was asked; a stream at /stream, a refusal of the head at /refused."""

    def __init__(self) -> None:
        self.large_bodies = asyncio.Semaphore(1)
        self.n_answers = 0
        self.gone: list[str] = []

    def check(self, head: Head) -> str:
        if head.path == "/refused":
            raise Problem(403, "refused", "not for you")
        return head.path

    async def answer(self, endpoint: str, exchange: Exchange) -> None:
        self.n_answers += 1
        exchange.on_gone = lambda: self.gone.append(endpoint)
        if endpoint == "/broken":
            raise IndexError("list index out of range")
        if endpoint == "/stream":
            exchange.begin("text/event-stream")
            for i in range(3):
                await exchange.write(b"data: %d\n\n" % i)
            exchange.end()
        elif endpoint == "/endless":
            exchange.begin("text/event-stream")
            while not exchange.is_gone:
                await exchange.write(b"x" * 1000)
                await asyncio.sleep(0)
        else:
            text = f"{exchange.head.method} {endpoint} {len(exchange.body)}"
            await exchange.send(text.encode(), "text/plain")

    def extra_headers(self, head: Head | None) -> dict[str, str]:
        return {}

    def explain(self, problem: Problem, head: Head | None) -> object:
        return problem.body()


class Wire(asyncio.Transport):
    """A transport in memory; ``is_stuck``: the client takes nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 1)})
        self.sent = b""
        self.is_stuck = False
        self.n_pending = 0
        self.is_over = False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        assert not self.is_over
        self.sent += data
        if self.is_stuck:
            self.n_pending += len(data)
            if self.n_pending > 65536:
                self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.n_pending

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connect(app: Echo, limits: Limits) -> tuple[Connection, Wire]:
    wire = Wire()
    connection = Connection(app, limits, lambda _one: None, lambda _one: True)
    wire.protocol = connection
    connection.connection_made(wire)
    return connection, wire


async def settle(turns: int = 12) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def talk(
    parts: Sequence[bytes],
    app: Echo | None = None,
    limits: Limits = QUICK,
    act: Callable[[Wire], None] | None = None,
) -> bytes:
    """Return what comes back for pieces of bytes, until the server closes."""

    async def run() -> bytes:
        connection, wire = connect(app or Echo(), limits)
        if act is not None:
            act(wire)
        for part in parts:
            if wire.is_over:
                break
            connection.data_received(part)
            await settle(2)
        for _ in range(200):
            if wire.is_over:
                await settle(2)
                return wire.sent
            await asyncio.sleep(0.005)
        raise AssertionError(f"the connection stays open: {wire.sent!r}")

    return asyncio.run(run())


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nTrailer: z\r\n\r\n"
)


def test_requests_have_paths_ids_and_followers() -> None:
    for target, path in (
        (b"/c?d", b"/c"), (b"", b"/"), (b"?d", b"/"), (b"//c/d/?//", b"/c/d"), (b"//", b"/"),
    ):  # fmt: skip
        answer = talk([GET.replace(b"/a", b"HTTP://x:80" + target)])
        assert b"GET " + path + b" 0" in answer
    own = GET.replace(b"\r\n\r\n", b"\r\nX-Request-Id: Ab-1.:/+=_\r\n\r\n")
    bad = own.replace(b"Ab-1", b"a b")
    refused = own.replace(b"/a", b"/refused")
    answer = talk([own + bad + GET + refused])
    ids = re.findall(rb"\r\nx-request-id: (.*)\r\n", answer)
    assert ids[0] == ids[3] == b"Ab-1.:/+=_"
    assert re.fullmatch(rb"[0-9a-f]{32}", ids[1])
    assert ids[1] != ids[2]
    answer = talk([GET + POST + CHUNKED + GET])
    assert statuses(answer) == [200] * 4
    for text in (b"GET /a 0", b"POST /b 5", b"POST /c 7"):
        assert text in answer
    answer = talk([GET.replace(b"/a", b"/broken") + GET], Echo())
    assert statuses(answer) == [500, 200], answer
    assert b"please report it: IndexError: list index" in answer


@pytest.mark.parametrize("data", [GET + POST, CHUNKED + GET], ids=["plain", "chunked"])
def test_splits_at_every_byte(data: bytes) -> None:
    patient = Limits(idle=0.4)  # a pause of the machine between two bytes is no slow client
    whole = statuses(talk([data], limits=patient))

    async def run() -> None:
        for at in range(1, len(data)):
            connection, wire = connect(Echo(), Limits())
            for part in (data[:at], data[at:]):
                connection.data_received(part)
                await settle()
            assert statuses(wire.sent) == whole == [200, 200], at
            wire.abort()
            await settle(3)

    asyncio.run(run())
    assert statuses(talk([data[i : i + 1] for i in range(len(data))], limits=patient)) == whole


def test_a_stream_is_chunked_and_in_http_1_0_ends_with_the_connection() -> None:
    answer = talk([b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"])
    assert b"transfer-encoding: chunked" in answer.lower()
    assert answer.count(b"data: ") == 3
    assert answer.endswith(b"0\r\n\r\n")
    old = talk([b"GET /stream HTTP/1.0\r\nhost: x\r\n\r\n"])
    assert b"transfer-encoding" not in old.lower()
    assert old.endswith(b"data: 2\n\n")


SMUGGLED = {
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
    "two equal lengths": b"Content-Length: 5\r\ncontent-length: 5\r\n",
    "lengths in a list": b"Content-Length: 5, 6\r\n",
    "a length with chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "chunks with a length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "another coding": b"Transfer-Encoding: gzip, chunked\r\n",
    "a coding in disguise": b"Transfer-Encoding: xchunked\r\n",
    "a space before the colon": b"Content-Length : 5\r\n",
    "a negative length": b"Content-Length: -5\r\n",
    "a length in hexadecimal": b"Content-Length: 0x5\r\n",
    "a folded field": b"X: a\r\n b\r\nContent-Length: 5\r\n",
    "a line that ends with LF": b"X: a\nContent-Length: 5\r\n",
    "a zero byte": b"X: a\0b\r\nContent-Length: 5\r\n",
    "two hosts": b"Host: y\r\nContent-Length: 5\r\n",
    "a bare CR": b"X: a\rContent-Length: 5\r\n",
}


@pytest.mark.parametrize("fields", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_what_two_readers_may_read_differently_is_refused(fields: bytes) -> None:
    app = Echo()
    answer = talk([b"POST /b HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\nhello" + GET], app)
    assert statuses(answer)[0] in (400, 501), answer
    assert len(statuses(answer)) == 1
    assert app.n_answers == 0
    assert b"connection: close" in answer.lower()


CHUNKS = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS: dict[str, tuple[bytes, int]] = {
    "a chunk without a size": (CHUNKS + b"g\r\n", 400),
    "a chunk of a negative size": (CHUNKS + b"-1\r\n", 400),
    "a chunk that is longer than it says": (CHUNKS + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "a chunk of many digits": (CHUNKS + b"F" * 22 + b"\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "a long line": (b"GET /" + b"a" * 9000, 431),
    "a long line that ends": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    "a long head": (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 3000, 431),
    "a long field": (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 17_000 + b"\r\n\r\n", 431),
    "many fields": (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 64 + b"\r\n", 431),
    "a long body": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
    "an endless body": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"64\r\n"
        + b"x" * 100
        + b"\r\n"
        + b"3e8\r\n"
        + b"x" * 1000,
        413,
    ),
    "a length of many digits": (
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999999999999\r\n\r\n",
        413,
    ),
}


@pytest.mark.parametrize(("data", "status"), LIMITS.values(), ids=LIMITS.keys())
def test_limits(data: bytes, status: int) -> None:
    app = Echo()
    assert statuses(talk([data], app)) == [status]
    assert app.n_answers == 0


def test_a_head_is_refused_before_its_body_has_come() -> None:
    head = b"POST /refused HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    assert statuses(talk([head])) == [403]
    good = head.replace(b"/refused", b"/b") + b"123456789"
    assert statuses(talk([good[:-9], good[-9:]])) == [100, 200]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", None),
        (b"\r\n", None),
        (b"GET / HT", 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1234", 408),
    ],
)
def test_slow_clients_are_let_go(data: bytes, status: int | None) -> None:
    answer = talk([data] if data else [])
    assert statuses(answer) == ([] if status is None else [status])


def test_large_bodies_take_turns() -> None:
    """So that memory is bounded: the second is not read while the first is there."""

    async def run() -> None:
        app = Echo()
        (first, one), (second, two) = (connect(app, Limits()) for _ in range(2))
        at = CHUNKED.index(b"3\r\nabc") + 4
        first.data_received(CHUNKED[:at])
        await settle()
        second.data_received(CHUNKED)
        await settle()
        assert (one.sent, two.sent) == (b"", b"")
        first.data_received(CHUNKED[at:])
        await settle()
        assert statuses(one.sent) == statuses(two.sent) == [200]
        for wire in (one, two):
            wire.abort()
        await settle()
        assert not app.large_bodies.locked()

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_gone() -> None:
    app = Echo()

    def stick(wire: Wire) -> None:
        wire.is_stuck = True

    talk([b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n"], app, act=stick)
    assert app.gone == ["/endless"]


@pytest.mark.parametrize("how", ["eof", "lost"])
def test_the_end_of_the_connection_is_noticed(how: str) -> None:
    app = Echo()

    async def run() -> None:
        connection, wire = connect(app, Limits())
        connection.data_received(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await settle()
        assert app.gone == []
        if how == "eof":
            assert connection.eof_received()
        else:
            wire.abort()
        await settle()
        assert app.gone == ["/endless"]
        wire.abort()
        await settle()

    asyncio.run(run())


@pytest.mark.parametrize("n_heads", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_heads_never_hang_or_raise(n_heads: int) -> None:
    """Mutants of good requests: each ends with answers, or by its deadline, and raises nothing."""
    rng = random.Random(19)
    base = [GET, POST, CHUNKED]
    words = [b"\r\n", b"\0", b"\xff", b":", b" ", b"Content-Length: 3\r\n", b"HTTP/1.1", b"chunked"]
    faults: list[Any] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: faults.append(context))
        for _ in range(n_heads):
            data = bytearray(rng.choice(base) + rng.choice(base))
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                kind = rng.randrange(3)
                if kind == 0:
                    data[at] = rng.randrange(256)
                elif kind == 1:
                    del data[at : at + rng.randint(1, 8)]
                else:
                    data[at:at] = rng.choice(words)
            app = Echo()
            connection, wire = connect(app, Limits(linger=0.0))
            connection.data_received(bytes(data))
            await settle(6)
            if not wire.is_over:
                connection.eof_received()
                await settle(4)
            wire.abort()
            await settle(3)
            assert connection._task is not None
            assert connection._task.done()
            assert connection._task.exception() is None, bytes(data)
            assert app.n_answers == statuses(wire.sent).count(200)

    asyncio.run(run())
    assert faults == []


# ---- any JSON value in any field of any API is answered, or refused by its name ----
BODIES: dict[str, dict[str, Any]] = table("bodies")
# Fields that errors call by another name
NAMES = {"model": ""}
OF_OTHER_MODELS = {"/v1/rerank", "/infill"}  # the tiny model lacks their tokens
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, -1, 1, 2**70, 0.5, 1e308, "", "a", "\x00", "\ud800", "user",
                     "function", "{", "1e5", "#", [], {}, "x" * 300, "none", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "name", "function", "arguments", "id",
                         "$ref", "anyOf", "properties", "items", "pattern", "const", "", "x"]),
        inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield (key,)
        yield from ((key, *path) for path in places(each))


PLACES = [(path, place) for path, body in BODIES.items() for place in places(body)]


@given(st.sampled_from(PLACES), VALUES)
def test_any_value_is_answered_or_refused_by_name(
    client: Client, where: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    path, place = where
    body = json.loads(json.dumps(BODIES[path]))
    node: Any = body
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    answer = client.post(path, body)
    assert 200 <= answer.status < 500, (path, place, value, answer.body[:300])
    if answer.status == 200 or path in OF_OTHER_MODELS:
        return
    error = answer.json["error"]
    text = error if path.startswith("/api/") else error["message"]
    assert isinstance(text, str)
    named = f"{text} {error.get('param') if isinstance(error, dict) else ''}"
    is_general = "the body" in text or "the context holds" in text
    assert is_general or NAMES.get(place[0], place[0]) in named, (path, place, value, text)


def test_the_bodies_are_good(client: Client) -> None:
    for path in BODIES.keys() - OF_OTHER_MODELS:
        answer = client.post(path, BODIES[path])
        assert answer.status == 200, answer.body[:300]


# ---- /openapi.json says what the server does: its routes, and schemathesis's requests ----
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


def test_it_has_the_routes(tiny_llama_4bit: Path) -> None:
    with serving(tiny_llama_4bit) as client:
        paths = client.get("/openapi.json").json["paths"]
        described = {
            (method.upper(), path) for path, operations in paths.items() for method in operations
        }
        assert described == set(client.server.routes)
        for (method, path), route in client.server.routes.items():
            operation = paths[path][method.lower()]
            assert ("requestBody" in operation) == (route.body is not None)
            assert ("security" in operation) == route.is_open


@pytest.mark.slow
def test_schemathesis_finds_nothing(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    options: Any = {"max_seq_len": 64, "sessions": 2, "threads": 1}  # short answers
    with (
        Model(tiny_chat_8bit, ram_budget=None, **options) as model,
        serving(tiny_chat_8bit, model, parallel=2, constraints=True, any_model=True) as client,
    ):
        words = [sys.executable, "-m", "schemathesis.cli", "run", f"{client.url}/openapi.json"]
        words += ["--checks", CHECKS, "--max-examples", "20", "--generation-deterministic"]
        words += ["--request-timeout", "600", "--phases", "coverage,fuzzing"]
        words += ["--suppress-health-check", "all"]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert client.get("/health").status == 200
